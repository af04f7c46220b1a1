"""An audit of somebody's conversion: which tensors are right, and what was done to the others.

Each known mistake is made on the right tensor, and the outcome is compared with the examined one
bit for bit; a scaled tensor is compared up to rounding. The settings of the run that wrote the
checkpoint are compared with the Hugging Face config. The tensors may be right and the settings
wrong: then a run with these settings trains another model, whether it reads them or was started
with them.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, field, replace
from itertools import permutations
from pathlib import Path
from typing import Any, ClassVar

import torch
import xxhash
import yaml
from torch import Tensor

from mcore_qwen3vl.config import Architecture
from mcore_qwen3vl.console import visible
from mcore_qwen3vl.converters.hf.hf_checkpoint import HuggingFaceCheckpoint
from mcore_qwen3vl.converters.identify import PathKind, identify
from mcore_qwen3vl.converters.mapping.table import MTP, table
from mcore_qwen3vl.converters.megatron_checkpoint import MegatronCheckpoint
from mcore_qwen3vl.converters.storage.archive import as_bytes
from mcore_qwen3vl.converters.storage.dtypes import dtype_name
from mcore_qwen3vl.converters.storage.staging import Progress
from mcore_qwen3vl.errors import BadInput
from mcore_qwen3vl.megatron_config import architecture_facts
from mcore_qwen3vl.verification.checkpoints import ONLY_A, ONLY_B, TENSORS, Side, compare_sides
from mcore_qwen3vl.verification.measurement import Finding
from mcore_qwen3vl.verification.report import Report

SETTINGS = "settings"
"""The part of the report."""

COMPUTES = (
    *("num_layers", "hidden_size", "num_attention_heads", "num_query_groups", "kv_channels"),
    *("normalization", "layernorm_epsilon", "layernorm_zero_centered_gamma", "qk_layernorm"),
    *("rotary_base", "rotary_percent", "rotary_interleaved", "mrope_section", "swiglu"),
    *("num_experts", "moe_ffn_hidden_size", "moe_router_topk", "moe_router_score_function"),
    *("moe_router_pre_softmax", "moe_router_topk_scaling_factor"),
)
"""Megatron's arguments that decide what the model computes, whoever builds it."""

OLDER = {"layernorm_epsilon": "norm_epsilon"}
"""Names that arguments had in older versions of Megatron."""

NO_COMPUTATION = (
    *("dtype", "expert_layout", "initializer_range", "max_position_embeddings"),
    "router_aux_loss_coef",
)
"""Fields of a Hugging Face config that do not change what the model computes."""

SEARCH_LIMIT = 2000
"""How many tensors of the same shape are searched for the values of a wrong one."""

ROW_ORDERS = {
    r"\.mlp\.gate\.": ("router order", "experts"),
    r"\.mlp\.experts\.": ("expert order", "experts"),
    r"(embed_tokens|lm_head)\.weight$": ("vocabulary order", "tokens"),
    r"\.[qkv]_proj\.": ("permuted QKV", "rows"),
    r"\.attn\.qkv\.": ("permuted vision QKV", "rows"),
    "": ("permuted weight", "rows"),
}
"""By HF name: the mistake if a weight's rows are in another order, and what a row stands for."""

Candidate = tuple[str, str, Tensor]
"""The kind of a mistake, words about it, and the values that there would be with it."""

Verdict = tuple[str, str]
"""The kind of a mistake, and the words that follow the tensor's name in a sentence about it."""

CHANGED = "changed values"
"""The kind of an unknown mistake."""

_FLAWS = {
    ONLY_A: ("further tensor", "is no tensor of the Hugging Face checkpoint"),
    ONLY_B: ("missing tensor", "is not in the examined checkpoint"),
}


@dataclass
class Audit(Report):
    """The result of an audit.

    Attributes:
        mistakes: what is wrong with each wrong tensor.
    """

    failures_shown: ClassVar[int] = 5  # the notes have all of them

    mistakes: dict[str, Verdict] = field(default_factory=dict)

    @property
    def verdict(self) -> str:
        count = sum(finding.part == TENSORS for finding in self.findings)
        settings = [finding.name for finding in self.failures if finding.part == SETTINGS]
        kinds = Counter(kind for kind, _ in self.mistakes.values())
        listed = ", ".join(f"{kind} ({n:,})" for kind, n in kinds.most_common())
        said = (
            f"{len(self.mistakes):,} of {count:,} tensors are wrong: {listed}"
            if self.mistakes
            else f"all {count:,} tensors are those of Hugging Face, bit for bit"
        )
        if settings:
            said += f"; {len(settings)} settings are another model's: {', '.join(settings)}"
        return f"The conversion is {'right' if self.ok else 'wrong'}: {said}."

    @property
    def notes(self) -> dict[str, str]:
        """What is wrong, by kind; tensors that differ in their layer alone have one line."""
        lines: dict[str, dict[str, list[str]]] = {}
        for name, (kind, sentence) in self.mistakes.items():
            alike = re.sub(r"\.\d+\.", ".*.", name)
            lines.setdefault(kind, {}).setdefault(alike, []).append(sentence)
        for finding in self.findings:
            if finding.part == SETTINGS and not finding.ok:
                lines.setdefault(SETTINGS, {})[finding.name] = [finding.flaw]
        return {
            kind: "\n".join(_describe_mistake(*line) for line in alike.items())
            for kind, alike in lines.items()
        }


def _describe_mistake(name: str, sentences: list[str]) -> str:
    """Return a line about all tensors whose names differ in the layer alone."""
    if len(sentences) == 1:
        return visible(f"{name} {sentences[0]}.")
    which = "each" if len(set(sentences)) == 1 else "the first"
    return visible(f"{name}, {len(sentences)} tensors: {which} {sentences[0]}.")


def audit(examined: str | Path, hf: str | Path, *, progress: Progress | None = None) -> Audit:
    """Compare a checkpoint with the Hugging Face checkpoint that it was made from.

    Every tensor of `hf` must be in `examined`, bit for bit after rounding to the dtype that
    `examined` has. Where one is not, known mistakes are made on the right tensor until one gives
    the examined tensor. This takes memory for about four times the tensor; fused experts are
    examined one by one.

    Args:
        examined: a Megatron checkpoint by any known maker, or a Hugging Face checkpoint.
        hf: Hugging Face checkpoint directory, which is right.

    Returns:
        A report, whose environment says so if settings are there but cannot be read.

    Raises:
        BadInput: a checkpoint is damaged, or is of another kind.
    """
    examined, hf = Path(examined), Path(hf)
    identify(hf).require_huggingface(instead="name the one that the other checkpoint was made from")
    right = Side(hf, hf)
    left = Side(examined, hf if identify(examined).kind is PathKind.MEGATRON else examined)
    result = Audit(f"{examined} and {hf}", _describe_side(left))
    for finding in compare_sides(left, right, progress, rounded=True):
        if finding.part == TENSORS and not finding.ok:
            kind, sentence = result.mistakes[finding.name] = _explain(finding, left, right)
            finding = replace(finding, flaw=f"{kind}: {sentence}")
        result.findings.append(finding)
    try:
        result.findings += compare_settings(examined, left.stored, right.architecture)
    except BadInput as error:  # such as objects of another project, which are not unpickled
        result.environment["settings"] = f"not compared: {error}"
    return result


def _describe_side(side: Side) -> dict[str, str]:
    """Return who wrote a checkpoint, and its dtypes."""
    names = (name for name, pieces in side.pieces.items() if pieces)
    dtypes = sorted({dtype_name(side.dtype_of(name)) for name in names})
    maker = {"written by": side.maker} if side.maker else {}
    return maker | {"stored as": ", ".join(dtypes)}


def _explain(finding: Finding, examined: Side, right: Side) -> Verdict:
    """Say what is wrong with the tensor of a finding that failed."""
    name = finding.name
    if finding.flaw:
        return _FLAWS.get(finding.flaw, ("another shape", "does not have Hugging Face's shape"))
    if right.pieces[name][0].source.index is None:
        return diagnose(_Weights(examined, right), name)
    experts = [_Weights(examined, right, expert) for expert in range(len(right.pieces[name]))]
    digests = torch.stack([_digest(weights.examined_values(name)) for weights in experts])
    expected = torch.stack([_digest(weights.right_values(name)) for weights in experts])
    wrong = (digests != expected).any(1).nonzero().flatten().tolist()
    if (order := diagnose_permutation(name, digests, expected)) is not None:
        return order
    kind, sentence = diagnose(experts[wrong[0]], name)
    return kind, f"{sentence}; this is expert {wrong[0]}, and {len(wrong)} experts are wrong"


def _digest(tensor: Tensor) -> Tensor:
    """Return a checksum, (16,) bytes."""
    return torch.tensor(list(xxhash.xxh3_128(as_bytes(tensor.contiguous())).digest()))


@dataclass(frozen=True)
class _Weights:
    """The tensors of both checkpoints; of fused experts, (1, ...), those of `expert`."""

    examined: Side
    right: Side
    expert: int | None = None

    def right_values(self, name: str) -> Tensor:
        """Return the right values, in the dtype of the examined ones."""
        return self.right.read_tensor(name, self.expert).to(self.examined.dtype_of(name))

    def examined_values(self, name: str) -> Tensor:
        """Return the examined values, with experts laid out as the right ones."""
        values = self.examined.read_tensor(name, self.expert)
        layouts = {side.architecture.expert_layout for side in (self.examined, self.right)}
        return values if self.expert is None or len(layouts) == 1 else values.transpose(1, 2)


def diagnose(weights: _Weights, name: str) -> Verdict:
    """Say how the examined tensor `name`, of the right shape, differs from the right one."""
    actual, right = weights.examined_values(name), weights.right_values(name)
    verdict = (
        _diagnose_qkv_order(weights, name)
        or _verdict_of_first_equal(actual, _simple_mistakes(name, actual, right))
        or _diagnose_scale(actual, right)
        or _verdict_of_first_equal(
            actual, _layout_mistakes(name, right, weights.right.architecture)
        )
        or diagnose_permutation(name, actual, right)
        or _diagnose_other_tensor(weights, name, actual)
    )
    if verdict is None:
        largest, count = (actual - right).abs().max().item(), int((actual != right).sum())
        sentence = f"differs in {count} of {actual.numel()} values, by at most {largest:.2g}"
        verdict = CHANGED, sentence
    return verdict


def _verdict_of_first_equal(actual: Tensor, candidates: Iterable[Candidate]) -> Verdict | None:
    """Return the mistake whose values are `actual`; None if no candidate has them."""
    equal = ((kind, what) for kind, what, values in candidates if torch.equal(values, actual))
    return next(equal, None)


def _simple_mistakes(name: str, actual: Tensor, right: Tensor) -> Iterator[Candidate]:
    """Yield what `right` would be if filled with one value, rounded, or off by one."""
    missing = "missing DeepStack" if "deepstack" in name else "missing weight"
    yield missing, "is all zeros: it was never filled", torch.zeros_like(right)
    same = actual.flatten()[0]
    initial = f"is {same:g} everywhere, as if freshly initialised"
    yield "missing weight", initial, same.expand_as(right)
    for dtype in (torch.bfloat16, torch.float16, torch.float8_e4m3fn):
        short = str(dtype).removeprefix("torch.")
        yield "dtype", f"was rounded to {short}", right.to(dtype).to(right.dtype)
        # A zero-centred norm is rounded as the difference from one.
        rounded = (right - 1).to(dtype).to(right.dtype) + 1
        yield "dtype", f"was rounded to {short} as w - 1", rounded
    yield "zero-centred norm", "holds w - 1, for norms that multiply by 1 + w", right - 1
    yield "zero-centred norm", "holds 1 + w", right + 1


def _diagnose_scale(actual: Tensor, right: Tensor) -> Verdict | None:
    # A scaled tensor has one factor everywhere; rounding does not move the median of quotients.
    scale = (actual.float() / right.float())[right != 0].median().item()
    rounding = max(1e-6, torch.finfo(actual.dtype).eps)
    if scale == 1 or not torch.allclose(actual, right * scale, rtol=rounding, atol=0):
        return None
    return "scaled weight", f"is multiplied by {scale:.6g}"


def _layout_mistakes(name: str, right: Tensor, architecture: Architecture) -> Iterator[Candidate]:
    if ".mlp.experts." in name:
        yield from _expert_mistakes(
            name, right, axis=2 if architecture.expert_layout == "published" else 1
        )
    elif name.startswith("model.visual.") and ".attn.qkv." in name:
        yield from _vision_qkv_mistakes(right, architecture.vision.num_heads)
    elif "patch_embed" in name and right.ndim == 5:
        names = dict(enumerate(("colour channels", "frames", "rows", "columns"), 1))
        for axis, what in names.items():
            yield "patch order", f"has its {what} in reverse order", right.flip(axis)
        for order in permutations(names):
            shown = ", ".join(names[axis] for axis in order)
            moved = right.permute(0, *order).reshape(right.shape)
            yield "patch order", f"has its patches flattened as {shown}", moved
    elif architecture.delta_net is not None and re.search(r"\.(in_proj_qkv|conv1d)\.", name):
        net = architecture.delta_net
        parts = right.split([net.key_dim, net.key_dim, net.value_dim])
        joined = dict(zip("qkv", parts, strict=True))
        heads = [part.unflatten(0, (net.num_key_heads, -1)) for part in parts]
        what = "is laid out head by head, each with q, k, v, instead of as all q, all k, all v"
        yield "permuted QKV", what, torch.cat(heads, dim=1).flatten(0, 1)
        for letters in permutations("qkv"):
            shown = ", ".join(f"all {letter}" for letter in letters)
            yield "permuted QKV", f"is laid out as {shown}", torch.cat([joined[n] for n in letters])
    elif right.ndim == 2:
        transposed = right.T.reshape(right.shape)
        yield "transposed weight", "holds the transposed values", transposed


def _expert_mistakes(name: str, right: Tensor, axis: int) -> Iterator[Candidate]:
    """Yield rearrangements of `right`, (E, out, in) or (E, in, out); `axis` is that of out."""
    transposed = right.transpose(1, 2).reshape(right.shape)
    yield "transposed expert", "holds each expert's values transposed", transposed
    if "gate_up" in name:
        gate, up = right.chunk(2, axis)
        yield "swapped gate and up", "has gate and up swapped", torch.cat([up, gate], axis)
        kind = "interleaved gate and up"
        mixed = torch.stack([gate, up], axis + 1).flatten(axis, axis + 1)
        yield kind, "has gate and up rows interleaved", mixed
        apart = right.unflatten(axis, (-1, 2)).transpose(axis, axis + 1).reshape(right.shape)
        yield kind, "was taken apart as if gate and up alternated", apart


def _vision_qkv_mistakes(right: Tensor, heads: int) -> Iterator[Candidate]:
    """Yield rearrangements of the rows of `right`, (3 D) or (3 D, D): all q, all k, all v."""
    kind, parts = "permuted vision QKV", right.unflatten(0, (3, heads, -1))
    what = "is laid out head by head, each with q, k, v, instead of as all q, all k, all v"
    yield kind, what, parts.transpose(0, 1).reshape(right.shape)
    what = "was taken apart as if laid out head by head, each with q, k, v"
    yield kind, what, right.unflatten(0, (heads, 3, -1)).transpose(0, 1).reshape(right.shape)
    yield kind, "has keys and values swapped", parts[[0, 2, 1]].reshape(right.shape)
    for tp in (n for n in (2, 4, 8, 16) if heads % n == 0):
        ranks = parts.unflatten(1, (tp, -1)).transpose(0, 1).reshape(right.shape)
        yield kind, f"is laid out rank by rank as for TP {tp}, each with q, k, v", ranks


def _diagnose_qkv_order(weights: _Weights, name: str) -> Verdict | None:
    """Say how query, key and value rows are arranged in ``linear_qkv``, if not group by group."""
    if not name.endswith(("q_proj.weight", "k_proj.weight", "v_proj.weight")):
        return None
    architecture = weights.right.architecture
    rows = table(architecture, mtp=name.startswith(MTP))
    row = next(r for r in rows if name in {source.name for source in r.sources})
    names = [source.name for source in row.sources]
    if not all(weights.examined.pieces.get(n) for n in names):
        return None
    q, k, v = stored = [weights.right_values(n) for n in names]
    half = architecture.head_dim // 2

    def arrangements() -> Iterator[tuple[str, Tensor]]:
        for order in ("qkv", "qvk", "kvq"):
            joined = torch.cat([stored["qkv".index(letter)] for letter in order])
            parts = ", ".join(f"all {letter}" for letter in order)
            yield f"is laid out as {parts} instead of group by group", joined
        yield "has keys and values swapped", row.to_mcore(q, v, k)
        if architecture.attn_output_gate:
            pairs = q.unflatten(0, (-1, 2, 2 * half))
            apart = q.unflatten(0, (2, -1, 2 * half))
            for what, turned in (
                ("has the query and the gate of each head swapped", pairs.flip(1)),
                ("has all queries before all gates", pairs.transpose(0, 1)),
                ("was taken apart as if all queries preceded all gates", apart.transpose(0, 1)),
            ):
                yield what, row.to_mcore(turned.reshape(q.shape), k, v)
        for shape, what in (
            ((-1, 2, half), "has the rotary halves of each head interleaved into pairs"),
            ((-1, half, 2), "has rotary pairs of each head taken apart into halves"),
        ):
            turned = [w.unflatten(0, shape).transpose(1, 2).reshape(w.shape) for w in (q, k)]
            yield f"{what}, in queries and keys", row.to_mcore(*turned, v)
            yield f"{what}, in queries alone", row.to_mcore(turned[0], k, v)
            yield f"{what}, in keys alone", row.to_mcore(q, turned[1], v)
        for tp in (2, 4, 8):
            ranks = zip(*(weight.tensor_split(tp) for weight in stored), strict=True)
            joined = torch.cat([part for rank in ranks for part in rank])
            yield f"is laid out rank by rank as for TP {tp}, each with q, k, v", joined

    actual = row.to_mcore(*(weights.examined_values(n) for n in names))
    return _verdict_of_first_equal(actual, (("permuted QKV", *made) for made in arrangements()))


def diagnose_permutation(name: str, actual: Tensor, right: Tensor) -> Verdict | None:
    """Say whether slices of the first or second axis are complete, but in another order."""
    for axis in range(min(right.ndim, 2)):
        order = _row_order(actual.transpose(0, axis), right.transpose(0, axis))
        if order is not None:
            moved = [f"{at} at {i}" for i, at in enumerate(order) if i != at]
            more = f" and {len(moved) - 4} more" if len(moved) > 4 else ""
            names = (ROW_ORDERS[part] for part in ROW_ORDERS if re.search(part, name))
            kind, what = next(names) if axis == 0 else ("permuted weight", "columns")
            return kind, f"has its {what} in another order: {', '.join(moved[:4])}{more}"
    return None


def _row_order(actual: Tensor, right: Tensor) -> list[int] | None:
    """Map each slice of `actual` to the slice of `right` that it equals; None if one has none."""
    places = {row: i for i, row in enumerate(_slice_bytes(right))}
    order = [places.get(row, -1) for row in _slice_bytes(actual)]
    return None if -1 in order or len(set(order)) < len(order) else order


def _slice_bytes(tensor: Tensor) -> Iterator[bytes]:
    """Yield the bytes of each slice of the first axis, by which slices are looked up."""
    rows = tensor.reshape(len(tensor), -1).contiguous().view(torch.uint8)
    return (row.numpy().tobytes() for row in rows)


def _diagnose_other_tensor(weights: _Weights, name: str, actual: Tensor) -> Verdict | None:
    """Say whether `actual` holds the values of another tensor of the checkpoint."""
    shape = tuple(actual.shape)
    hf = weights.right.stored
    assert isinstance(hf, HuggingFaceCheckpoint)
    alike = [n for n, e in hf.entries.items() if tuple(e.shape) == shape and n != name]
    for other in alike[:SEARCH_LIMIT]:
        start = hf.read_tensor(other, (slice(1),)).to(actual.dtype)  # most differ in the first row
        if torch.equal(start, actual[:1]) and torch.equal(weights.right_values(other), actual):
            return _kind_of_mix_up(name, other), f"holds the values of {other}"
    return None


def _kind_of_mix_up(name: str, other: str) -> str:
    pair = {name.split(".")[-2], other.split(".")[-2]}
    if "lm_head" in name and "embed_tokens" in other:
        return "tied head"
    if pair == {"gate_proj", "up_proj"}:
        return "swapped gate and up"
    if name.startswith("model.visual."):
        return "wrong vision weights"
    return "weights of another layer" if len(pair) == 1 else "mixed-up weights"


def compare_settings(
    examined: Path, stored: MegatronCheckpoint | HuggingFaceCheckpoint, right: Architecture
) -> Iterator[Finding]:
    """Compare what a checkpoint says of its model with the right config.

    It may say so in a Hugging Face config of its own, in Megatron's arguments, or in
    Megatron-Bridge's ``run_config.yaml``. What it does not say is not compared. `examined` is the
    directory of the checkpoint `stored`.

    Raises:
        BadInput: a file is damaged.
    """
    if (folder := identify(examined).hf) is not None:
        yield from compare_configs(Architecture.from_hf(folder), right)
    saved: Mapping[str, Any] = {}
    if isinstance(stored, MegatronCheckpoint):  # its settings have the names of its maker
        file = stored.folder / "run_config.yaml"
        saved = _read_run_config(file) if file.is_file() else stored.arguments()
    for fact in architecture_facts(right):
        name = fact.argument or ""
        there = [n for n in (name, fact.field or "", OLDER.get(name, "")) if n in saved]
        if name in COMPUTES and there:
            yield _compare_setting(name, saved[there[0]], fact.value)


def compare_configs(examined: Architecture, right: Architecture) -> Iterator[Finding]:
    """Compare the fields of two Hugging Face configs that decide what a model computes."""
    fields, right_fields = _flatten_config(examined), _flatten_config(right)
    for name in fields | right_fields:
        yield _compare_setting(name, fields.get(name), right_fields.get(name))


def _flatten_config(architecture: Architecture) -> dict[str, Any]:
    """Return the fields that decide what is computed; a section's fields as ``SECTION.FIELD``."""
    values = asdict(architecture)
    values["rope_scaling"] = dict(architecture.rope_scaling)
    flat: dict[str, Any] = {}
    for name, value in values.items():
        if isinstance(value, dict):
            flat |= {f"{name}.{field}": setting for field, setting in value.items()}
        elif name not in NO_COMPUTATION:
            flat[name] = value
    return flat


def _compare_setting(name: str, value: Any, right: Any) -> Finding:
    items = value if isinstance(value, list | tuple) else [value]
    # Lists of lists may share their items, and take no end to compare or print.
    if any(isinstance(item, list | tuple | dict) for item in items):
        shown, same = f"a nested {type(value).__name__}", False
    else:
        shown, same = _shown(value), _comparable(value) == _comparable(right)
    return Finding(SETTINGS, name, flaw="" if same else f"is {shown}; the config says {right}")


def _shown(value: Any) -> str:
    try:
        return f"{value!s:.80}"
    except ValueError:  # Python prints no integer of more than 4,300 digits
        return "a number of thousands of digits"


def _comparable(value: Any) -> Any:
    """Return a value in which lists equal tuples, and every form of nothing equals None."""
    return list(value) if isinstance(value, tuple) else value or None


class _Loader(yaml.SafeLoader):
    """Loads YAML without merge keys (``<<``), which could double a mapping on every line."""

    def flatten_mapping(self, node: yaml.MappingNode) -> None:
        """Leave merge keys in place, for which there is no constructor."""


def _read_run_config(file: Path) -> dict[str, Any]:
    """Return the section ``model`` of a ``run_config.yaml``; empty if it has none."""
    try:
        content = yaml.load(file.read_text("utf-8"), _Loader)
    except (OSError, ValueError, RecursionError, yaml.YAMLError) as error:
        raise BadInput(f"{file} cannot be read as YAML: {error!s:.200}. Copy it again.") from None
    model = content.get("model") if isinstance(content, dict) else None
    return model if isinstance(model, dict) else {}
