"""The layout matrix for the ``te`` spec, each row with the options that training sets."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace
from typing import Any

from mcore_qwen3vl.verification.parity.case import batch_names_of
from mcore_qwen3vl.verification.parity.matrix import LORA_MATRIX, MATRIX, MatrixRow

TRAINED = {"bias_activation_fusion": True, "bias_dropout_fusion": True}
"""Megatron's fusions that training switches on; a model built directly has them off."""
TRAINED_EXPERTS = {"moe_permute_fusion": True}
"""Options that the launch scripts add for experts; the spec itself groups their GEMMs."""


def with_te(row: MatrixRow) -> MatrixRow:
    """Return `row` with the ``te`` spec, without batches padded on the left, which it refuses."""
    config = TRAINED | (TRAINED_EXPERTS if "moe" in row.model else {})
    config |= row.options.get("config", {})
    return replace(
        row,
        batches=tuple(batch for batch in row.batches if batch in batch_names_of("te")),
        options={**row.options, "spec": "te", "config": config},
    )


def rows_with_te(rows: Iterable[MatrixRow]) -> Iterator[MatrixRow]:
    """Yield the rows that Transformer Engine can compute: all but those in float64."""
    return (with_te(row) for row in rows if row.options.get("dtype") != "fp64")


def _own(model: str, layout: str, *batches: str, note: str, **config: Any) -> MatrixRow:
    return with_te(MatrixRow(model, layout, batches, {"config": config}, note))


TORCH_ROWS = tuple(
    MatrixRow(
        "moe", layout, ("mixed", "packed"), {"config": TRAINED_EXPERTS}, "torch, fused permutation"
    )
    for layout in ("ep2xdp2", "tp2xep2+sp")
)
"""The torch spec with Transformer Engine's permutation, which is the dispatcher's in both specs."""
ROWS = (
    *rows_with_te(MATRIX),
    _own("moe", "ep2xdp2", "mixed", note="unfused permutation", moe_permute_fusion=False),
    *(
        _own("dense", layout, "mixed", "packed", note=f"CP by {way}", cp_comm_type=way)
        for layout in ("cp2", "cp4")
        for way in ("a2a", "all_gather")
    ),
)
LORA_ROWS = tuple(rows_with_te(LORA_MATRIX))
