"""Experiments on rotary tables: another base, other axes, other positions."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from torch import Tensor

from mcore_qwen3vl.model.decoder.rope import rope_frequencies
from mcore_qwen3vl.verify.trace.causes.divergence import Divergence
from mcore_qwen3vl.verify.trace.probe_points import ProbePoint, cosine_and_sine
from mcore_qwen3vl.verify.trace.result import Cause

BASES = (1e4, 5e5, 1e6, 5e6)
"""Rotary bases of other models, tried beside that of the examined config."""


def find_rotary(divergence: Divergence, _: ProbePoint) -> Iterator[Cause | None]:
    """Compute the tables with one of base, axes and positions changed at a time."""
    right, micro = divergence.architecture, divergence.recording.micro
    positions = micro.position_ids.flatten(1)[:, divergence.rows].float()  # (3, T)
    axes = _interleaved(right.mrope_section)

    def test(
        kind: str,
        explanation: str,
        base: float = right.rope_theta,
        axes: str = axes,
        positions: Tensor = positions,
    ) -> Cause | None:
        rows = positions[["thw".index(axis) for axis in axes]].T
        # In float32, because Hugging Face computes them so whatever the model's dtype.
        frequencies, factor = rope_frequencies(right, base)
        angles = (rows * frequencies).repeat(1, 2)  # (T, D)
        tables = cosine_and_sine((angles.cos(), angles.sin())) * factor
        return divergence.test(kind, explanation, tables)

    note = divergence.config_note("rope_theta")
    for base in (divergence.examined.rope_theta, *BASES):
        what = f"The angles are those of base {base:,.0f}; the model's is {right.rope_theta:,.0f}."
        yield test("rotary base", what + note, base=base)
    note = divergence.config_note("mrope_section")
    chunks = "".join(axis * count for axis, count in zip("thw", right.mrope_section, strict=True))
    for kind, other in (
        ("mrope section", _interleaved(divergence.examined.mrope_section)),
        ("mrope interleaving", chunks),
    ):
        yield test(
            kind, f"The axes of the frequencies are {other} instead of {axes}.{note}", axes=other
        )
    counted = (divergence.rows % micro.input_ids.shape[1]).float().expand(3, -1)
    what = "The positions are counted token by token on all three axes, as for text alone."
    yield test("position ids", what, positions=counted)


def _interleaved(section: Sequence[int]) -> str:
    """Return the axes in the order of HF ``apply_interleaved_mrope``: t h w t h w … t t."""
    axes = ["t"] * sum(section)
    for axis in (1, 2):
        for place in range(axis, min(3 * section[axis], len(axes)), 3):
            axes[place] = "thw"[axis]
    return "".join(axes)
