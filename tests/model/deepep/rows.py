"""Rows of the layout matrix under Megatron's flex dispatcher, with each backend of DeepEP."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from mcore_qwen3vl.verify.parity.matrix import (
    EXPERTS,
    OVERLAPPED,
    SELECTIVE_MOE,
    SHARDED,
    MatrixRow,
    uniform,
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
    MatrixRow.of("moe", "ep4xdp4", "images", "imageless", "packed", **OVERLAPPED),
    MatrixRow.of("moe", "cp2xep2", "video", "packed", "padded"),
    MatrixRow.of("moe", "tp2xetp2+sp", "mixed", "packed"),
    MatrixRow.of("moe", "tp2xep2xetp2xdp2+sp", "mixed", "packed", "padded"),
    MatrixRow.of("moe", "tp2xpp2xep2+sp", "mixed", "packed", "ragged"),
    MatrixRow.of("moe", "pp2xep2xdp2+E|tt|tt|L", "mixed", "imageless"),
    MatrixRow.of("moe-mixed", "pp2xep2xdp2", "images", "padded"),
    MatrixRow.of("moe", "tp2xep2+sp", "mixed", "packed", **uniform(4)),
    MatrixRow.of("moe", "ep2xdp2", "packed", **SELECTIVE_MOE),
    MatrixRow.of("moe-all", "tp2xep2+sp", "packed", note="bf16", dtype="bf16"),
)
_SPLIT = (
    MatrixRow.of("moe", "ep2xdp2", "mixed", "packed", "imageless", **EXPERTS),
    MatrixRow.of("moe", "tp2xep2+sp", "packed", "padded", **EXPERTS),
    MatrixRow.of("moe", "tp2xpp2xvpp2xep2+sp", "mixed", "packed", "ragged", **EXPERTS),
    MatrixRow.of("moe-mixed", "ep2xdp2", "mixed", "packed", **EXPERTS),
)
_LORA = (
    MatrixRow.of("moe", "ep2xdp2", "mixed", "imageless", lora="experts"),
    MatrixRow.of("moe", "tp2xep2xetp2xdp2+sp", lora="down of experts", **SHARDED),
    MatrixRow.of("moe", "tp2xpp2xep2+sp", lora="whole router"),
    MatrixRow.of("moe-mixed", "tp2xep2+sp", "packed", lora="experts and MLP"),
)


def _named(note: str, rows: tuple[MatrixRow, ...]) -> Iterator[MatrixRow]:
    for row in rows:
        yield replace(row, note=row.note or note)


ROWS = tuple(
    under(backend, row)
    for backend in BACKENDS
    for row in (*_EXCHANGED, *_named("overlapped experts", _SPLIT), *_LORA)
)
