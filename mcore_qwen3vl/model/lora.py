"""Put low-rank adapters (LoRA) into a built model, fill them, and say what trains.

Each Hugging Face tensor that is adapted has a pair of factors, on a running, sharded model.
The model itself says which part of each Hugging Face tensor a rank holds
(:func:`mcore_qwen3vl.converters.live.hf_parts`). So nothing here knows how TP, PP, EP or ETP divide
it: B has the rows of the weight and A its columns. The pairs and the linears where they act are in
:mod:`mcore_qwen3vl.model.lora_modules`.

Source: Hu et al., "LoRA: Low-Rank Adaptation of Large Language Models", 2021, as in PEFT.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from itertools import accumulate, groupby
from math import gcd

import torch
from megatron.core.transformer.moe.router import TopKRouter
from torch import Tensor, nn

from mcore_qwen3vl.config import Architecture
from mcore_qwen3vl.converters.adapters.adapter import Adapter, Factors
from mcore_qwen3vl.converters.adapters.config import Slot
from mcore_qwen3vl.converters.live import Overlap, hf_parts, load_factors
from mcore_qwen3vl.converters.mapping.forms import INPUT_EMBEDDING, LM_HEAD
from mcore_qwen3vl.errors import BadInput
from mcore_qwen3vl.memory_labels import label_module
from mcore_qwen3vl.model.freeze import Freezing, global_name
from mcore_qwen3vl.model.lora_modules import (
    AdapterModule,
    FactorShard,
    GroupedSite,
    LinearKind,
    Pair,
    Site,
    adapt_router,
    kind_of,
    weight_shapes,
)
from mcore_qwen3vl.model.qwen3vl import Qwen3VLModel

label_module(__file__, "model, other")

Target = Factors | Slot
"""The adapter wanted for one Hugging Face tensor; its rank and scaling are read."""
Targets = Mapping[str, Target]  # by Hugging Face parameter name


def attach(chunk: Qwen3VLModel, targets: Targets, *, dropout: float = 0.0) -> AdapterModule:
    """Attach adapters, filled with zeros, to the linears of one pipeline chunk, as its child.

    Call this once, before Megatron wraps the chunk. :class:`mcore_qwen3vl.model.freeze.Freezing`
    decides what trains. The factors are on the device of the weights, which may be ``meta``.
    Targets in other chunks are ignored. Dropout acts on the input of each A in training mode.

    Raises:
        BadInput: the chunk has an adapter, or one of `targets` cannot be adapted.
    """
    if chunk.adapter is not None:
        raise BadInput("The model has an adapter already: merge it, or build the model again.")
    adapter = AdapterModule(chunk.pg_collection)
    parts = list(hf_parts(chunk, expert_layout="v5"))
    for path, of_module in groupby(parts, key=lambda part: part.parameter.rpartition(".")[0]):
        for pair in _adapt_module(chunk, path, list(of_module), targets, dropout):
            adapter.put(pair)
    if LM_HEAD in targets and chunk.post_process:
        adapter.put(_adapt_head(chunk, targets[LM_HEAD], dropout))
    # Routers without a target are replaced too, for the gradient that `_router_logits` saves.
    for module in chunk.modules():
        if isinstance(module, TopKRouter) and "gating" not in vars(module):
            adapt_router(module)
    chunk.adapter = adapter
    return adapter


def adapt(chunks: Sequence[Qwen3VLModel], adapter: Adapter) -> Freezing:
    """Put `adapter` into the chunks of this rank: its factors, and the tensors that it holds whole.

    The chunks hold the adapter's base weights, and Megatron has not wrapped them. Apply the choice
    that is returned to every chunk, to train only what `adapter` holds.

    Raises:
        BadInput: see :func:`attach` and :func:`whole_patterns`.
    """
    choice = adapter_freezing()
    saved = whole_tensors(adapter)
    for chunk in chunks:
        attach(chunk, adapter.factors, dropout=adapter.config.lora_dropout)
        choice.add_trainable(whole_patterns(chunk, saved))
    load_factors(chunks, adapter.factors)
    load_saved(chunks, saved)
    return choice


def whole_tensors(adapter: Adapter) -> dict[str, Tensor]:
    """Return the tensors that `adapter` trains whole."""
    # PEFT stores the base weight of an adapted head beside its factors.
    return {name: value for name, value in adapter.saved.items() if name not in adapter.factors}


def with_tied_embedding(
    architecture: Architecture, saved: Mapping[str, Tensor]
) -> dict[str, Tensor]:
    """Return `saved`, with the embedding added if it is tied to a head in `saved`."""
    saved = dict(saved)
    if architecture.tie_word_embeddings and LM_HEAD in saved:
        saved.setdefault(INPUT_EMBEDDING, saved[LM_HEAD])
    return saved


@torch.no_grad()
def load_saved(chunks: Sequence[Qwen3VLModel], saved: Mapping[str, Tensor]) -> None:
    """Overwrite base weights with the tensors in `saved`, by Hugging Face's names.

    Experts are laid out as in transformers 5. One name is enough for tied embeddings.
    """
    saved = with_tied_embedding(chunks[0].architecture, saved)
    for part in hf_parts(chunks, expert_layout="v5"):
        if part.name in saved:
            part.local.copy_(saved[part.name][part.box])


def adapter_freezing() -> Freezing:
    """Return a choice in which only adapters train; for more see :func:`whole_patterns`."""
    return Freezing(trainable=[r"adapter\."])


def whole_patterns(chunk: Qwen3VLModel, saved: Collection[str]) -> Iterator[str]:
    """Yield patterns for ``Freezing.add_trainable``: the parameters of `chunk` that hold `saved`.

    Those are Hugging Face's names of what trains whole. A tied head means the embedding too.

    Raises:
        BadInput: Megatron holds one of `saved` in one weight with others that do not train.
    """
    names = set(saved)
    if names & {LM_HEAD, INPUT_EMBEDDING} and chunk.architecture.tie_word_embeddings:
        names |= {LM_HEAD, INPUT_EMBEDDING}
    names_of: dict[str, set[str]] = {}
    for part in hf_parts(chunk):
        names_of.setdefault(part.parameter, set()).add(part.name)
    for parameter, sources in names_of.items():
        if not sources & names:
            continue
        if alone := sorted(sources - names):
            raise BadInput(
                f"Megatron stores {', '.join(sorted(sources & names))} in one weight with "
                f"{', '.join(alone)}, so modules_to_save must name all of them or none: add the "
                "others, or train them with an adapter."
            )
        yield re.escape(global_name(chunk, parameter)) + "$"


def trained_names(chunk: Qwen3VLModel) -> set[str]:
    """Return the local names of the parameters that train, a tied one under all its names."""
    named = chunk.named_parameters(remove_duplicate=False)
    return {name for name, parameter in named if parameter.requires_grad}


def _adapt_module(
    chunk: Qwen3VLModel, path: str, parts: Sequence[Overlap], targets: Targets, dropout: float
) -> list[Pair]:
    """Adapt one module; most have no target, and get no pairs."""
    shapes, module = weight_shapes(chunk.architecture), chunk.get_submodule(path)
    sites, kind = [], None
    for (parameter, _), matrix_parts in groupby(parts, key=_matrix_key):
        parts_of_matrix = list(matrix_parts)
        if not (names := _targets_of(parts_of_matrix, targets)):
            continue
        kind = kind_of(chunk, parameter)
        if kind is None:
            raise BadInput(f"LoRA on {names[0]} is not supported: leave it out of the targets.")
        weight = chunk.get_parameter(parameter)
        pairs = [
            _build_pair(name, kind, targets[name], weight, parts_of_matrix, shapes[name])
            for name in names
        ]
        rows = _row_places(parts_of_matrix, pairs, divided=kind.partition_dim == 0)
        sites.append(Site(pairs, rows, kind, module, dropout))
    if kind is not None:
        _install_sites(module, kind, sites)
    return [pair for site in sites for pair in site.pairs]


def _matrix_key(part: Overlap) -> tuple[str, int | None]:
    """Return the parameter's name, and the expert's number if it holds several experts."""
    first = part.box[0]
    return part.parameter, first if isinstance(first, int) else None


def _targets_of(parts: Sequence[Overlap], targets: Targets) -> list[str]:
    """Return the targets in one weight, in the same order on all TP ranks."""
    names = dict.fromkeys(part.name for part in parts if part.name != LM_HEAD)
    if parts[0].parameter.endswith("linear_qkv.weight"):
        # If TP divides the query heads of one KV head, a rank may hold no row of its key or value.
        # It needs all of their A factors, whose product with the input is summed over TP.
        layer = parts[0].name.rpartition(".self_attn.")[0]
        names = dict.fromkeys(f"{layer}.self_attn.{x}_proj.weight" for x in "qkv")
    return [name for name in names if name in targets]


def _install_sites(module: nn.Module, kind: LinearKind, sites: Sequence[Site]) -> None:
    """Let `module` add the adapters of `sites`; only grouped experts have several."""
    if kind.router:
        adapt_router(module, sites[0])
        return
    if hasattr(module, "return_layernorm_output"):  # Transformer Engine's norm and linear in one
        module.return_layernorm_output = True  # type: ignore[assignment]
    module.register_forward_hook(GroupedSite(sites).hook if kind.grouped else sites[0].hook)


def _build_pair(
    name: str,
    kind: LinearKind,
    target: Target,
    weight: Tensor,
    parts_of_weight: Sequence[Overlap],
    shape: Sequence[int],
) -> Pair:
    """Build the pair of the Hugging Face tensor `name`, whose shape is `shape`, experts first.

    `parts_of_weight` are all parts in `weight`, in the order of their rows; none may be of this
    tensor.
    """
    parts = [part for part in parts_of_weight if part.name == name]
    out, into = shape[-2:]
    a, b = FactorShard((target.r, into), None), FactorShard((out, target.r), None)
    boxes = [part.rows_and_columns for part in parts]
    if kind.partition_dim == 0:
        grain = gcd(kind.head_rows, *(len(part.local) for part in parts))
        b = FactorShard(b.shape, 0, _join_rows([rows for rows, _ in boxes]), grain)
    elif kind.partition_dim == 1:
        (_, columns), *_ = boxes
        a = FactorShard(
            a.shape, 1, (range(columns.start, columns.stop),), columns.stop - columns.start
        )
    expert = (parts[0].expert, shape[0]) if kind.expert else None
    pair = Pair(name, a, b, scaling=target.scaling, like=weight, expert=expert)
    kind.mark_factors(pair, weight)
    return pair


def _join_rows(rows: Sequence[slice]) -> tuple[range, ...]:
    """Join rows into runs that are consecutive in the whole tensor; B holds them in this order."""
    runs: list[range] = []
    for run in rows:
        start = runs.pop().start if runs and runs[-1].stop == run.start else run.start
        runs.append(range(start, run.stop))
    return tuple(runs)


def _row_places(parts: Sequence[Overlap], pairs: Sequence[Pair], *, divided: bool) -> Tensor:
    """Return each of the weight's rows' place in the B factors below one another; -1: none."""
    starts = accumulate((len(pair.lora_B) for pair in pairs), initial=0)
    # `starts` has one more: where the last ends.
    following = dict(zip((pair.name for pair in pairs), starts, strict=False))
    starts_of = dict(following)  # a copy, because `following` moves on part by part
    rows = []
    for part in parts:
        first, count = following.get(part.name), len(part.local)
        if first is None:
            rows.append(torch.full((count,), -1, device="cpu"))
            continue
        following[part.name] = first + count
        # A divided B has its rows in the weight's order, and a whole one in Hugging Face's.
        if not divided:
            first = starts_of[part.name] + part.rows_and_columns[0].start
        rows.append(torch.arange(first, first + count, device="cpu"))
    return torch.cat(rows)


def _adapt_head(chunk: Qwen3VLModel, target: Target, dropout: float) -> Pair:
    """Adapt the head, which is no tensor of its own if it is tied, and may be padded."""
    head, vocabulary = chunk.output_layer, chunk.architecture.vocab_size
    kind = kind_of(chunk, "output_layer.weight")
    assert kind is not None
    rows, columns = head.output_size_per_partition, head.columns
    weight = chunk.shared_embedding_or_output_weight()
    hidden = chunk.architecture.hidden_size
    a, b = FactorShard((target.r, hidden), None), FactorShard((vocabulary, target.r), None)
    if kind.partition_dim == 0:
        run = range(columns.first, columns.first + columns.count)
        b = FactorShard(b.shape, 0, (run,) if run else (), gcd(rows, vocabulary))
    pair = Pair(LM_HEAD, a, b, scaling=target.scaling, like=weight)
    kind.mark_factors(pair, weight)
    places = torch.arange(rows, device="cpu")
    places[columns.count :] = -1
    head.adapter = Site([pair], places, kind, head, dropout)
    return pair
