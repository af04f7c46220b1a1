"""Experiments on weights that are not the checkpoint's: what was done to them.

Each known mistake is made on the right weight, and the outcome is compared with the examined
weight bit for bit; a scaled weight is compared up to rounding. A trace examines the weights of a
model, and an audit those of a checkpoint.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from itertools import permutations
from typing import Protocol

import torch
from torch import Tensor

from mcore_qwen3vl.config import Architecture
from mcore_qwen3vl.converters.hf.hf_checkpoint import HuggingFaceCheckpoint
from mcore_qwen3vl.converters.mapping.table import table

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
"""The kind of a mistake that is none of the known ones."""


class Examined(Protocol):
    """Weights that should be those of a Hugging Face checkpoint."""

    @property
    def architecture(self) -> Architecture:
        """The config of that checkpoint."""

    @property
    def hf(self) -> HuggingFaceCheckpoint:
        """That checkpoint."""

    def stored(self, name: str) -> Tensor:
        """Return the right values of a weight."""

    def weight(self, name: str) -> Tensor | None:
        """Return the examined values, in the shape of the right ones; None if they are unknown."""


def mistake(examined: Examined, name: str, actual: Tensor) -> Verdict:
    """Say how `actual` differs from the checkpoint's tensor `name`, of the same shape and dtype."""
    right, a = examined.stored(name), examined.architecture
    verdict = (
        _qkv(examined, name)
        or _first_equal(actual, _simple(name, actual, right))
        or _scaled(actual, right)
        or _first_equal(actual, _rearranged(name, right, a))
        or permuted(name, actual, right)
        or _other_tensor(examined, name, actual)
    )
    if verdict is None:
        largest, count = (actual - right).abs().max().item(), int((actual != right).sum())
        sentence = f"differs in {count} of {actual.numel()} values, by at most {largest:.2g}"
        verdict = CHANGED, sentence
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
        yield "dtype", f"was rounded to {short}", right.to(dtype).to(right.dtype)
    yield "zero-centred norm", "holds w - 1, for norms that multiply by 1 + w", right - 1
    yield "zero-centred norm", "holds 1 + w", right + 1


def _scaled(actual: Tensor, right: Tensor) -> Verdict | None:
    scale = (actual.float() / right.float())[right != 0].median().item()
    rounding = max(1e-6, torch.finfo(actual.dtype).eps)
    if scale == 1 or not torch.allclose(actual, right * scale, rtol=rounding, atol=0):
        return None
    return "scaled weight", f"is multiplied by {scale:.6g}"


def _rearranged(name: str, right: Tensor, a: Architecture) -> Iterator[Candidate]:
    if ".mlp.experts." in name:
        yield from _experts(name, right, axis=2 if a.expert_layout == "published" else 1)
    elif name.startswith("model.visual.") and ".attn.qkv." in name:
        yield from _vision_qkv(right, a.vision.num_heads)
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


def _vision_qkv(right: Tensor, heads: int) -> Iterator[Candidate]:
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


def _qkv(examined: Examined, name: str) -> Verdict | None:
    """Say how query, key and value rows are arranged in ``linear_qkv``, if not group by group."""
    if not name.endswith(("q_proj.weight", "k_proj.weight", "v_proj.weight")):
        return None
    rows = table(examined.architecture)
    row = next(r for r in rows if name in {source.name for source in r.sources})
    names = [source.name for source in row.sources]
    weights = [weight for n in names if (weight := examined.weight(n)) is not None]
    if len(weights) < len(names):
        return None
    q, k, v = stored = [examined.stored(n) for n in names]
    half = examined.architecture.head_dim // 2

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

    actual = row.to_mcore(*weights)
    return _first_equal(actual, (("permuted QKV", *found) for found in arrangements()))


def permuted(name: str, actual: Tensor, right: Tensor) -> Verdict | None:
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
    places = {row: i for i, row in enumerate(_slices(right))}
    order = [places.get(row, -1) for row in _slices(actual)]
    return None if -1 in order or len(set(order)) < len(order) else order


def _slices(tensor: Tensor) -> Iterator[bytes]:
    rows = tensor.reshape(len(tensor), -1).contiguous().view(torch.uint8)
    return (row.numpy().tobytes() for row in rows)


def _other_tensor(examined: Examined, name: str, actual: Tensor) -> Verdict | None:
    """Say whether `actual` holds the values of another tensor of the checkpoint."""
    shape = tuple(actual.shape)
    alike = [n for n, e in examined.hf.entries.items() if tuple(e.shape) == shape and n != name]
    for other in alike[:SEARCH_LIMIT]:
        start = examined.hf.read(other, (slice(1),)).to(actual.dtype)
        if torch.equal(start, actual[:1]) and torch.equal(examined.stored(other), actual):
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
