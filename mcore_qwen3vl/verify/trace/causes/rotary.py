"""Wrong rotary tables: base, axes and positions are read off the angles that were found."""

from __future__ import annotations

import torch
from torch import Tensor

from mcore_qwen3vl.verify.trace.causes.divergence import Divergence
from mcore_qwen3vl.verify.trace.probe_points import TEXT, cosine_and_sine
from mcore_qwen3vl.verify.trace.result import Cause

AXES = "thw"
ROUNDING = 1e-5
"""How well a base is known that was solved from float32 angles."""


def find_rotary_cause(divergence: Divergence) -> Cause | None:
    """Base first: it follows from a token whose three positions are 1; then the axes."""
    if divergence.forward is None or divergence.name != f"{TEXT}.rotary_emb":
        return None
    positions = divergence.recording.micro.position_ids.flatten(1)[
        :, divergence.rows
    ].float()  # (3, T)
    half = divergence.architecture.head_dim // 2
    cosine, sine = divergence.actual.split(2 * half, dim=1)
    angles = torch.atan2(sine, cosine)[:, :half]  # (T, D / 2)
    base = _base(angles, positions, divergence.architecture.head_dim)
    if base is None:
        return None
    base = _round_number(base)
    frequencies = _frequencies(base, divergence.architecture.head_dim)
    axes = _axes(divergence.actual, positions, frequencies)
    outcome = _tables(positions, frequencies, axes)
    if not divergence.explains(outcome):
        return _positions(divergence, frequencies)
    expected = _interleaved(half, divergence.architecture.mrope_section)
    if abs(base / divergence.architecture.rope_theta - 1) > ROUNDING:
        says = _config_says(
            divergence,
            "rope_theta",
            divergence.examined.rope_theta,
            divergence.architecture.rope_theta,
        )
        return Cause(
            "rotary base",
            f"The angles are those of base {base:,.0f}; the model's is "
            f"{divergence.architecture.rope_theta:,.0f}.{says}",
            divergence.evidence(
                f"Base {base:,.0f}, solved from the angles at position 1,", outcome
            ),
        )
    right = _tables(positions, frequencies, expected)
    if axes == expected or divergence.explains(right):
        return None
    found = "".join(AXES[axis] for axis in axes)
    wanted = "".join(AXES[axis] for axis in expected)
    counts = tuple(axes.count(axis) for axis in range(3))
    if axes == sorted(axes):
        kind, what = "mrope interleaving", "in chunks instead of alternating"
    elif counts != divergence.architecture.mrope_section and axes == _interleaved(half, counts):
        kind, what = "mrope section", f"by section {list(counts)}"
    else:
        kind, what = "mrope section", "in another order"
    section = divergence.architecture.mrope_section
    says = _config_says(divergence, "mrope_section", divergence.examined.mrope_section, section)
    return Cause(
        kind,
        f"The axes share the frequencies {what}: {found}, where section {list(section)} means "
        f"{wanted}.{says}",
        divergence.evidence("Each frequency with the axis whose positions fit it", outcome),
    )


def _base(angles: Tensor, positions: Tensor, head_dim: int) -> float | None:
    """The rotary base from tokens at position 1 on every axis, where angle and frequency agree."""
    ones = torch.nonzero((positions == 1).all(0)).squeeze(1)
    if not len(ones):
        return None
    frequency = angles[ones[0]]
    exponents = torch.arange(len(frequency), dtype=torch.float64) * 2 / head_dim
    bases = frequency[1:] ** (-1 / exponents[1:])
    return float(bases[-1]) if bool((bases > 0).all()) else None


def _round_number(base: float) -> float:
    """The number with few digits that `base` is, up to the rounding of what it was solved from."""
    short = float(f"{base:.4g}")
    return short if abs(short / base - 1) < ROUNDING else base


def _frequencies(base: float, head_dim: int) -> Tensor:
    """(D / 2,) in float32, as Hugging Face computes them whatever the model's dtype."""
    return 1.0 / (base ** (torch.arange(0, head_dim, 2).float() / head_dim))


def _axes(actual: Tensor, positions: Tensor, frequencies: Tensor) -> list[int]:
    """Return, for each frequency, the axis whose positions give the observed angles."""
    half = len(frequencies)
    errors = torch.stack(
        [
            (_tables(positions, frequencies, [axis] * half) - actual).abs().amax(0)
            for axis in range(3)
        ]
    ).view(3, 4, half)  # the cosines twice, the sines twice
    return [int(axis) for axis in errors.amax(1).argmin(0)]


def _interleaved(half: int, section: tuple[int, int, int] | tuple[int, ...]) -> list[int]:
    """HF ``apply_interleaved_mrope``: t h w t h w … t t."""
    axes = [0] * half
    for axis in (1, 2):
        axes[axis : section[axis] * 3 : 3] = [axis] * len(axes[axis : section[axis] * 3 : 3])
    return axes


def _tables(positions: Tensor, frequencies: Tensor, axes: list[int]) -> Tensor:
    angles = positions[axes].T * frequencies  # (T, D / 2)
    angles = torch.cat([angles, angles], dim=1)
    return cosine_and_sine((angles.cos(), angles.sin()))


def _positions(divergence: Divergence, frequencies: Tensor) -> Cause | None:
    """Tables of other positions: counted from 0 on every axis, as for text."""
    length = divergence.recording.micro.input_ids.shape[1]
    counted = (divergence.rows % length).float().expand(3, -1)
    half = len(frequencies)
    outcome = _tables(counted, frequencies, [0] * half)
    if not divergence.explains(outcome):
        return None
    return Cause(
        "position ids",
        "The positions are counted token by token on all three axes, as for text alone.",
        divergence.evidence("The token's number as its position on every axis", outcome),
    )


def _config_says(divergence: Divergence, name: str, examined: object, truth: object) -> str:
    if examined == truth:
        return " Its config is right."
    return f" The examined checkpoint's config gives {name} as {examined}."
