"""Attach adapters to the linears of a built model, divided over ranks and marked for Megatron.

The model itself says which part of each Hugging Face tensor a rank holds
(:func:`mcore_qwen3vl.converters.live.sharded.hf_parts`). So nothing here knows how TP, PP, EP or
ETP divide it: B has the rows of the weight and A its columns.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import groupby

from megatron.core.transformer.moe.router import TopKRouter
from torch import Tensor, nn

from mcore_qwen3vl.converters.adapters.adapter import Factors
from mcore_qwen3vl.converters.adapters.targets import Slot
from mcore_qwen3vl.converters.live.sharded import Part, hf_parts
from mcore_qwen3vl.converters.mapping.forms import LM_HEAD
from mcore_qwen3vl.errors import BadInput
from mcore_qwen3vl.model.lora.adapter_module import Adapter, Pair, Place, Span
from mcore_qwen3vl.model.lora.kinds import Kind, kind_of, weight_shapes
from mcore_qwen3vl.model.lora.site import Blocks, GroupedSite, Site, adapt_router
from mcore_qwen3vl.model.qwen3vl import Qwen3VLModel

Target = Factors | Slot
"""The adapter wanted for one Hugging Face tensor, of which rank and scaling are read."""
Targets = Mapping[str, Target]
"""Targets by Hugging Face parameter name."""


def attach(chunk: Qwen3VLModel, targets: Targets, *, dropout: float = 0.0) -> Adapter:
    """Attach adapters, filled with zeros, to the linears of one pipeline chunk, as its child.

    Call this once, before Megatron wraps the chunk. :class:`mcore_qwen3vl.model.freeze.Freezing`
    decides what trains. The factors are on the device of the weights, which may be ``meta``.
    Targets in other chunks are ignored. Dropout acts on the input of each A in training mode.

    Raises:
        BadInput: the chunk has an adapter, or one of `targets` cannot be adapted.
    """
    if chunk.adapter is not None:
        raise BadInput("The model has an adapter already: merge it, or build the model again.")
    adapter = Adapter(chunk.pg_collection)
    parts = list(hf_parts(chunk, expert_layout="v5"))
    for path, of_module in groupby(parts, key=lambda part: part.parameter.rpartition(".")[0]):
        for pair in _adapt(chunk, path, list(of_module), targets, dropout):
            adapter.put(pair)
    if LM_HEAD in targets and chunk.post_process:
        adapter.put(_adapt_head(chunk, targets[LM_HEAD], dropout))
    for module in chunk.modules():
        if isinstance(module, TopKRouter) and "gating" not in vars(module):
            adapt_router(module)
    chunk.adapter = adapter
    return adapter


def _adapt(
    chunk: Qwen3VLModel, path: str, parts: Sequence[Part], targets: Targets, dropout: float
) -> list[Pair]:
    """Adapt one module; most have no target, and get no pairs."""
    shapes, module = weight_shapes(chunk.architecture), chunk.get_submodule(path)
    sites, kind = [], None
    for (parameter, _), of_one in groupby(parts, key=_matrix):
        held = list(of_one)
        names = _targets_of(held, targets)
        if not names:
            continue
        kind = kind_of(chunk, parameter)
        if kind is None:
            raise BadInput(f"LoRA on {names[0]} is not supported: leave it out of the targets.")
        weight = chunk.get_parameter(parameter)
        pairs = [_pair(name, kind, targets[name], weight, held, shapes[name]) for name in names]
        sites.append(Site(pairs, _blocks(held, pairs), kind, module, dropout))
    if kind is not None:
        _install(module, kind, sites)
    return [pair for site in sites for pair in site.pairs]


def _matrix(part: Part) -> tuple[str, int | None]:
    """Return the parameter's name, and the expert's number if it holds several experts."""
    first = part.box[0]
    return part.parameter, first if isinstance(first, int) else None


def _targets_of(parts: Sequence[Part], targets: Targets) -> list[str]:
    """Return the targets in one weight, in the same order on all TP ranks.

    If TP divides the query heads of one KV head, a rank may hold no row of its key or value. It
    still needs all of their A factors, whose product with the input is summed over TP.
    """
    names = dict.fromkeys(part.name for part in parts if part.name != LM_HEAD)
    if parts[0].parameter.endswith("linear_qkv.weight"):
        layer = parts[0].name.rpartition(".self_attn.")[0]
        names = dict.fromkeys(f"{layer}.self_attn.{x}_proj.weight" for x in "qkv")
    return [name for name in names if name in targets]


def _install(module: nn.Module, kind: Kind, sites: Sequence[Site]) -> None:
    if kind.router:
        adapt_router(module, sites[0])
        return
    if hasattr(module, "return_layernorm_output"):  # Transformer Engine's norm and linear in one
        module.return_layernorm_output = True  # type: ignore[assignment]
    module.register_forward_hook(GroupedSite(sites).hook if kind.grouped else sites[0].hook)


def _pair(
    name: str,
    kind: Kind,
    target: Target,
    weight: Tensor,
    held: Sequence[Part],
    shape: Sequence[int],
) -> Pair:
    """Build the pair of the Hugging Face tensor `name`, whose shape is `shape`, experts first.

    `held` are all parts in `weight`, in the order of their rows; none may be of this tensor.
    """
    parts = [part for part in held if part.name == name]
    out, into = shape[-2:]
    a, b = Place((target.r, into), None), Place((out, target.r), None)
    boxes = [part.matrix for part in parts]
    if kind.cut == 0:
        spans = _joined([rows for rows, _ in boxes])
        b = Place((out, target.r), 0, spans, kind.grain([len(part.local) for part in parts]))
    elif kind.cut == 1:
        (_, columns), *_ = boxes
        width = columns.stop - columns.start
        a = Place((target.r, into), 1, (Span(0, columns.start, width),), width)
    expert = (parts[0].expert, shape[0]) if kind.expert else None
    pair = Pair(name, a, b, scaling=target.scaling, like=weight, expert=expert)
    kind.mark(pair, weight)
    return pair


def _joined(rows: Sequence[slice]) -> tuple[Span, ...]:
    """Join rows into runs that are consecutive in the whole tensor; B holds them in this order."""
    spans: list[Span] = []
    held = 0
    for run in rows:
        length = run.stop - run.start
        if spans and spans[-1].whole + spans[-1].length == run.start:
            spans[-1] = spans[-1]._replace(length=spans[-1].length + length)
        else:
            spans.append(Span(held, run.start, length))
        held += length
    return tuple(spans)


def _blocks(parts: Sequence[Part], pairs: Sequence[Pair]) -> Blocks:
    """Return the place of each B factor's rows among the rows of the weight.

    Adjacent blocks of one pair, such as the gate and up rows of an expert, are merged.
    """
    numbers = {pair.name: number for number, pair in enumerate(pairs)}
    row, taken = 0, [0] * len(pairs)
    placed: list[tuple[int, int, int, int]] = []
    for name, adjacent in groupby(parts, key=lambda part: part.name):
        length, number = sum(len(part.local) for part in adjacent), numbers.get(name)
        if number is not None:
            placed.append((row, number, taken[number], length))
            taken[number] += length
        row += length
    shapes = tuple(pair.places["lora_B"].local_shape for pair in pairs)
    return Blocks(row, shapes, tuple(placed))


def _adapt_head(chunk: Qwen3VLModel, target: Target, dropout: float) -> Pair:
    """Adapt the head, which is no tensor of its own if it is tied, and may be padded."""
    head, vocabulary = chunk.output_layer, chunk.architecture.vocab_size
    kind = kind_of(chunk, "output_layer.weight")
    assert kind is not None
    rows = head.output_size_per_partition
    first = kind.group.rank() * rows
    own = min(max(vocabulary - first, 0), rows)
    weight = chunk.shared_embedding_or_output_weight()
    hidden = chunk.architecture.hidden_size
    a, b = Place((target.r, hidden), None), Place((vocabulary, target.r), None)
    if kind.cut == 0:
        spans = (Span(0, first, own),) if own else ()
        b = Place(b.shape, 0, spans, kind.grain([rows, vocabulary]))
    pair = Pair(LM_HEAD, a, b, scaling=target.scaling, like=weight)
    kind.mark(pair, weight)
    blocks = Blocks(rows, ((own, target.r),), ((0, 0, 0, own),))
    head.adapter = Site([pair], blocks, kind, head, dropout)
    return pair
