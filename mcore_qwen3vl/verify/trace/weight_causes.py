"""Experiments on weights that are not the checkpoint's: which one, and what was done to it.

Each known mistake is made on the right weight, and the outcome is compared with mcore's weight bit
for bit; a scaled weight is compared up to rounding.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from itertools import permutations

import torch
from torch import Tensor

from mcore_qwen3vl.converters.mapping.table import table
from mcore_qwen3vl.verify.trace.divergence import Candidate, Cause, Divergence
from mcore_qwen3vl.verify.trace.probe_points import ProbePoint
from mcore_qwen3vl.verify.trace.recording import replay

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

Verdict = tuple[str, str]
"""The kind of a mistake, and the words that follow the tensor's name in a sentence about it."""


def find_weight(divergence: Divergence, point: ProbePoint) -> Iterator[Candidate | Cause]:
    """Name the weights of the probe point that differ, and test whether they explain it."""
    changed = {
        name: values
        for name, values in divergence.weights.items()
        if name.startswith(f"{point.module}.") and not torch.equal(values, divergence.stored(name))
    }
    if point.side == "input" or not changed:
        return
    verdicts = {name: _verdict(divergence, name, values) for name, values in changed.items()}
    name = min(verdicts, key=lambda n: verdicts[n][0] == "changed values")
    kind, sentence = verdicts[name]
    parameters = _in_module(divergence, point, changed)
    outcome = replay(divergence.model, divergence.recording, point, **parameters)
    others = f" (as well as {len(changed) - 1} more here)" if len(changed) > 1 else ""
    explanation = f"{name}{others} {sentence}."
    yield kind, explanation, outcome
    still = (
        f"Hugging Face's module with mcore's weight is still {divergence.distance(outcome):.1e} "
        "from mcore's values, so the weight alone does not explain them."
    )
    yield Cause(kind, explanation, still, confirmed=False)


def _in_module(
    divergence: Divergence, point: ProbePoint, changed: dict[str, Tensor]
) -> dict[str, Tensor]:
    """Return `changed` by the names of the module in memory, with experts in its layout."""
    module = divergence.model.get_submodule(point.module)
    paths = {parameter: path for path, parameter in module.named_parameters()}
    # PEFT's wrappers keep the adapted parameter one or more levels down.
    bare = {path.replace("base_layer.", ""): path for path in paths.values()}
    inside: dict[str, Tensor] = {}
    for name, value in changed.items():
        own = bare.get(name.removeprefix(f"{point.module}."), "")
        path = paths.get(divergence.trained[name], own) if name in divergence.trained else own
        swap = value.ndim == 3 and divergence.published
        inside[path] = value.transpose(1, 2) if swap else value
    return inside


def _verdict(divergence: Divergence, name: str, actual: Tensor) -> Verdict:
    """Say how `actual` differs from the checkpoint's tensor `name`."""
    right = divergence.stored(name)
    verdict = (
        _qkv(divergence, name)
        or _first_equal(actual, _simple(name, actual, right))
        or _scaled(actual, right)
        or _first_equal(actual, _rearranged(name, right, divergence.published))
        or _permuted(name, actual, right)
        or _other_tensor(divergence, name, actual)
    )
    if verdict is None:
        largest, count = (actual - right).abs().max().item(), int((actual != right).sum())
        sentence = f"differs in {count} of {actual.numel()} values, by at most {largest:.2g}"
        verdict = "changed values", sentence
    return verdict


def _first_equal(actual: Tensor, candidates: Iterable[Candidate]) -> Verdict | None:
    equal = ((kind, what) for kind, what, values in candidates if torch.equal(values, actual))
    return next(equal, None)


def _simple(name: str, actual: Tensor, right: Tensor) -> Iterator[Candidate]:
    missing = "missing DeepStack" if "deepstack" in name else "missing weight"
    yield missing, "is all zeros: it was never filled", torch.zeros_like(right)
    same = actual.flatten()[0]
    initial = f"is {same:g} everywhere, as if freshly initialised"
    yield "missing weight", initial, same.expand_as(right)
    for dtype in (torch.bfloat16, torch.float16, torch.float8_e4m3fn):
        short = str(dtype).removeprefix("torch.")
        yield "dtype", f"was rounded to {short}", right.to(dtype).float()
    yield "zero-centred norm", "holds w - 1, for norms that multiply by 1 + w", right - 1
    yield "zero-centred norm", "holds 1 + w", right + 1


def _scaled(actual: Tensor, right: Tensor) -> Verdict | None:
    scale = (actual / right)[right != 0].median().item()
    if scale == 1 or not torch.allclose(actual, right * scale, rtol=1e-6, atol=0):
        return None
    return "scaled weight", f"is multiplied by {scale:.6g}"


def _rearranged(name: str, right: Tensor, published: bool) -> Iterator[Candidate]:
    if ".mlp.experts." in name:
        yield from _experts(name, right, axis=2 if published else 1)
    elif "patch_embed" in name and right.ndim == 5:
        names = dict(enumerate(("colour channels", "frames", "rows", "columns"), 1))
        for axis, what in names.items():
            yield "patch order", f"has its {what} in reverse order", right.flip(axis)
        for order in permutations(names):
            shown = ", ".join(names[axis] for axis in order)
            moved = right.permute(0, *order).reshape(right.shape)
            yield "patch order", f"has its patches flattened as {shown}", moved
    elif right.ndim == 2:
        transposed = right.T.reshape(right.shape)
        yield "transposed weight", "holds the transposed values", transposed


def _experts(name: str, right: Tensor, axis: int) -> Iterator[Candidate]:
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


def _qkv(divergence: Divergence, name: str) -> Verdict | None:
    """Say how query, key and value rows are arranged in ``linear_qkv``, if not group by group."""
    if not name.endswith(("q_proj.weight", "k_proj.weight", "v_proj.weight")):
        return None
    rows = table(divergence.architecture)
    row = next(r for r in rows if name in {source.name for source in r.sources})
    names = [source.name for source in row.sources]
    if not divergence.weights.keys() >= set(names):
        return None
    q, k, v = stored = [divergence.stored(n) for n in names]
    half = divergence.architecture.head_dim // 2

    def arrangements() -> Iterator[tuple[str, Tensor]]:
        for order in ("qkv", "qvk", "kvq"):
            joined = torch.cat([stored["qkv".index(letter)] for letter in order])
            parts = ", ".join(f"all {letter}" for letter in order)
            yield f"is laid out as {parts} instead of group by group", joined
        yield "has keys and values swapped", row.to_mcore(q, v, k)
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

    actual = row.to_mcore(*(divergence.weights[n] for n in names))
    return _first_equal(actual, (("permuted QKV", *found) for found in arrangements()))


def _permuted(name: str, actual: Tensor, right: Tensor) -> Verdict | None:
    """Say whether slices of the first or second axis are complete, but in another order."""
    for axis in range(min(right.ndim, 2)):
        order = _order(actual.transpose(0, axis), right.transpose(0, axis))
        if order is not None:
            moved = [f"{at} at {i}" for i, at in enumerate(order) if i != at]
            more = f" and {len(moved) - 4} more" if len(moved) > 4 else ""
            names = (ROW_ORDERS[part] for part in ROW_ORDERS if re.search(part, name))
            kind, what = next(names) if axis == 0 else ("permuted weight", "columns")
            return kind, f"has its {what} in another order: {', '.join(moved[:4])}{more}"
    return None


def _order(actual: Tensor, right: Tensor) -> list[int] | None:
    """Map each slice of `actual` to the slice of `right` that it equals; None if one has none."""
    places = {row.numpy().tobytes(): i for i, row in enumerate(right.contiguous())}
    order = [places.get(row.numpy().tobytes(), -1) for row in actual.contiguous()]
    return None if -1 in order or len(set(order)) < len(order) else order


def _other_tensor(divergence: Divergence, name: str, actual: Tensor) -> Verdict | None:
    """Say whether `actual` holds the values of another tensor of the checkpoint."""
    shape = tuple(actual.shape)
    alike = [n for n, e in divergence.hf.entries.items() if tuple(e.shape) == shape and n != name]
    for other in alike[:SEARCH_LIMIT]:
        start = divergence.hf.read(other, (slice(1),)).float()
        if torch.equal(start, actual[:1]) and torch.equal(divergence.stored(other), actual):
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
