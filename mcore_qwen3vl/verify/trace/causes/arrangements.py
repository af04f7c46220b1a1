"""What was done to a tensor: told by doing it to the right one and comparing bit for bit."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import permutations
from typing import NamedTuple

import torch
from torch import Tensor


class Verdict(NamedTuple):
    """A short name of a mistake, and what it did, to follow the tensor's name in a sentence."""

    kind: str
    sentence: str


def arrangement(name: str, found: Tensor, right: Tensor, *, swapped: bool) -> Verdict | None:
    """The mistake that makes `found` of `right`, if it is a known one.

    Args:
        name: HF name; says what the axes mean.
        found, right: float32, of the same shape.
        swapped: fused experts are stored as (E, in, out).
    """
    simple = _constant(name, found) or _arithmetic(found, right)
    if simple is not None:
        return simple
    for verdict, candidate in _rearranged(name, right, swapped):
        if candidate.shape == found.shape and torch.equal(candidate, found):
            return verdict
    return _permuted(name, found, right)


def _constant(name: str, found: Tensor) -> Verdict | None:
    values = found.unique()
    if len(values) > 1:
        return None
    if values.item() == 0:
        kind = "missing DeepStack" if "deepstack" in name else "missing weight"
        return Verdict(kind, "is all zeros: it was never filled")
    return Verdict("missing weight", f"is {values.item():g} everywhere, as freshly initialised")


def _arithmetic(found: Tensor, right: Tensor) -> Verdict | None:
    for dtype in (torch.bfloat16, torch.float16, torch.float8_e4m3fn):
        if torch.equal(found, right.to(dtype).float()):
            short = str(dtype).removeprefix("torch.")
            return Verdict("dtype", f"was rounded to {short} on its way")
    for shift, meaning in (
        (-1.0, "w - 1, for norms that multiply by 1 + w"),
        (1.0, "1 + w"),
    ):
        if torch.equal(found, right + shift):
            return Verdict("zero-centred norm", f"holds {meaning}")
    ratio = found / right
    scale = ratio[right != 0].median().item()
    if scale != 1 and torch.allclose(found, right * scale, rtol=1e-6, atol=0):
        return Verdict("scaled weight", f"is multiplied by {scale:.6g}")
    return None


def _rearranged(name: str, right: Tensor, swapped: bool) -> Iterator[tuple[Verdict, Tensor]]:
    if ".mlp.experts." in name:
        yield from _experts(name, right, swapped)
    elif "patch_embed" in name and right.ndim == 5:
        yield from _patches(right)
    elif right.ndim == 2:
        flat = right.T.reshape(right.shape)
        yield Verdict("transposed weight", "holds the transposed values"), flat
        half = len(right) // 2
        yield (
            Verdict("swapped halves", "has its two halves of rows swapped"),
            right.roll(half, 0),
        )


def _experts(name: str, right: Tensor, swapped: bool) -> Iterator[tuple[Verdict, Tensor]]:
    """`right` (E, out, in), or (E, in, out) if `swapped`."""
    flat = right.transpose(1, 2).reshape(right.shape)
    yield Verdict("transposed expert", "holds each expert's values transposed"), flat
    if "gate_up" in name:
        axis = 2 if swapped else 1
        half = right.shape[axis] // 2
        gate, up = right.split(half, axis)
        yield (
            Verdict("swapped gate and up", "has gate and up swapped"),
            torch.cat([up, gate], axis),
        )
        yield (
            Verdict("interleaved gate and up", "has gate and up rows interleaved"),
            torch.stack([gate, up], axis + 1).flatten(axis, axis + 1),
        )
        apart = right.unflatten(axis, (half, 2)).transpose(axis, axis + 1)
        yield (
            Verdict("interleaved gate and up", "was taken apart as if gate and up alternated"),
            apart.reshape(right.shape),
        )


def _patches(right: Tensor) -> Iterator[tuple[Verdict, Tensor]]:
    """`right` (hidden, channels, frames, height, width)."""
    for axis, what in ((1, "colour channels"), (2, "frames"), (3, "rows"), (4, "columns")):
        yield Verdict("patch order", f"has its {what} in reverse order"), right.flip(axis)
    for order in list(permutations((1, 2, 3, 4)))[1:]:
        names = ", ".join(("channels", "frames", "rows", "columns")[axis - 1] for axis in order)
        moved = right.permute(0, *order).reshape(right.shape)
        yield Verdict("patch order", f"has its patches flattened as {names}"), moved


def _permuted(name: str, found: Tensor, right: Tensor) -> Verdict | None:
    """Whole slices of the first or the second axis in another order."""
    for axis in range(min(right.ndim, 2)):
        order = _order(found.transpose(0, axis), right.transpose(0, axis))
        if order is None:
            continue
        moved = [i for i, at in enumerate(order) if i != at]
        shown = ", ".join(f"{order[i]} at {i}" for i in moved[:4])
        more = f" and {len(moved) - 4} more" if len(moved) > 4 else ""
        kind, what = _axis(name, axis)
        return Verdict(kind, f"has its {what} in another order: {shown}{more}")
    return None


def _order(found: Tensor, right: Tensor) -> list[int] | None:
    """Map each slice of `found` to the slice of `right` that it equals; None if one has none."""
    places = {row.numpy().tobytes(): i for i, row in enumerate(right.contiguous())}
    order = [places.get(row.numpy().tobytes()) for row in found.contiguous()]
    known = [at for at in order if at is not None]
    return known if len(set(known)) == len(order) else None


def _axis(name: str, axis: int) -> tuple[str, str]:
    if ".mlp.gate." in name:
        return "router order", "experts"
    if ".mlp.experts." in name and axis == 0:
        return "expert order", "experts"
    if name.endswith(("embed_tokens.weight", "lm_head.weight")) and axis == 0:
        return "vocabulary order", "tokens"
    if any(f".{x}_proj." in name for x in "qkv") and axis == 0:
        return "permuted QKV", "rows"
    if ".attn.qkv." in name and axis == 0:
        return "permuted vision QKV", "rows"
    return "permuted weight", ("rows", "columns")[axis]
