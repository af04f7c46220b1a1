"""Rows of the layout matrix under Megatron's flex dispatcher, with each backend of DeepEP."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from mcore_qwen3vl.verification.parity.matrix import (
    EXPERTS,
    OVERLAPPED,
    SELECTIVE_MOE,
    SHARDED,
    MatrixRow,
    recompute_uniform,
)

BACKENDS: dict[str, dict[str, Any]] = {
    "deepep": {},
    # The ranks of a parity batch have different numbers of tokens, as those of unpacked data do.
    "hybridep": {"moe_hybridep_pad_uneven_dispatch_inputs": True},
}


def under(backend: str, row: MatrixRow) -> MatrixRow:
    """Return `row` with tokens exchanged by this backend."""
    config = {
        "moe_token_dispatcher_type": "flex",
        "moe_flex_dispatcher_backend": backend,
        **BACKENDS[backend],
        **row.options.get("config", {}),
    }
    note = ", ".join(filter(None, [backend, row.note]))
    return replace(row, options={**row.options, "config": config}, note=note)


_EXCHANGED = (
    MatrixRow("moe", "ep2xdp2"),
    MatrixRow("moe", "tp2xep2+sp"),
    MatrixRow.build("moe", "ep4xdp4", "images", "imageless", "packed", **OVERLAPPED),
    MatrixRow.build("moe", "cp2xep2", "video", "packed", "padded"),
    MatrixRow.build("moe", "tp2xetp2+sp", "mixed", "packed"),
    MatrixRow.build("moe", "tp2xep2xetp2xdp2+sp", "mixed", "packed", "padded"),
    MatrixRow.build("moe", "tp2xpp2xep2+sp", "mixed", "packed", "ragged"),
    MatrixRow.build("moe", "pp2xep2xdp2+E|tt|tt|L", "mixed", "imageless"),
    MatrixRow.build("moe-mixed", "pp2xep2xdp2", "images", "padded"),
    MatrixRow.build("moe", "tp2xep2+sp", "mixed", "packed", **recompute_uniform(4)),
    MatrixRow.build("moe", "ep2xdp2", "packed", **SELECTIVE_MOE),
    MatrixRow.build("moe-all", "tp2xep2+sp", "packed", note="bf16", dtype="bf16"),
)
_SPLIT = (
    MatrixRow.build("moe", "ep2xdp2", "mixed", "packed", "imageless", **EXPERTS),
    MatrixRow.build("moe", "tp2xep2+sp", "packed", "padded", **EXPERTS),
    MatrixRow.build("moe", "tp2xpp2xvpp2xep2+sp", "mixed", "packed", "ragged", **EXPERTS),
    MatrixRow.build("moe-mixed", "ep2xdp2", "mixed", "packed", **EXPERTS),
)
_LORA = (
    MatrixRow.build("moe", "ep2xdp2", "mixed", "imageless", lora="experts"),
    MatrixRow.build("moe", "tp2xep2xetp2xdp2+sp", lora="down of experts", **SHARDED),
    MatrixRow.build("moe", "tp2xpp2xep2+sp", lora="whole router"),
    MatrixRow.build("moe-mixed", "tp2xep2+sp", "packed", lora="experts and MLP"),
)


def _named(note: str, rows: tuple[MatrixRow, ...]) -> Iterator[MatrixRow]:
    for row in rows:
        yield replace(row, note=row.note or note)


ROWS = tuple(
    under(backend, row)
    for backend in BACKENDS
    for row in (*_EXCHANGED, *_named("overlapped experts", _SPLIT), *_LORA)
)
