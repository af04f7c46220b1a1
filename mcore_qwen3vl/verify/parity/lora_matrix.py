"""The layout matrix of LoRA: every rule for a factor's gradient, compared with PEFT."""

from __future__ import annotations

from mcore_qwen3vl.verify.parity.matrix import OVERLAPPED, SHARDED, UNIFORM, MatrixRow

SELECTIVE = {"recompute_granularity": "selective"}


def _row(
    model: str,
    layout: str,
    lora: str,
    *batches: str,
    note: str = "",
    **options: object,
) -> MatrixRow:
    return MatrixRow(model, layout, batches or ("mixed",), dict(options), note, lora)


LORA_MATRIX: tuple[MatrixRow, ...] = (
    _row("dense", "single", "everything", "mixed", "packed", "padded", "text"),
    _row("dense", "tp2", "everything", "mixed", "packed", "padded-left"),
    _row("dense", "tp2+sp", "everything", "mixed"),
    _row("dense", "tp2+sp", "language", "packed", "imageless"),
    _row("dense", "tp4+sp", "mixed ranks"),
    _row("dense", "pp2", "everything", "images", "ragged"),
    _row("dense", "pp2xvpp2", "mixed ranks", "video", "packed"),
    _row("dense", "pp4", "q and v", "images"),
    _row("dense", "cp2", "everything", "mixed", "packed"),
    _row("dense", "dp2", "language", "imageless", note="overlap", overlap=True),
    _row("dense", "dp2", "everything", "ragged", note="distributed optimizer", **SHARDED),
    _row("dense", "dp2", "mixed ranks", "mixed", note="distr. opt., overlap", **OVERLAPPED),
    _row("dense", "tp2xpp2+sp", "k and gate", "mixed", "packed"),
    _row("dense", "tp2xcp2+sp", "mixed ranks", "packed", "ragged"),
    _row("dense", "tp2xpp2xdp2+sp", "everything", note="distr. opt., overlap", **OVERLAPPED),
    _row("dense", "single", "whole"),
    _row("dense", "tp2xpp2+sp", "whole"),
    _row("dense", "tp2xcp2+sp", "whole vision", "images"),
    _row("few-kv", "tp4", "everything", "mixed", "packed"),
    _row("few-kv", "tp4+sp", "mixed ranks", "image"),
    _row("tied", "single", "everything"),
    _row("tied", "tp2xpp2+sp", "everything"),
    _row("tied", "tp2xpp2+sp", "whole tied"),
    _row("moe", "single", "experts", "mixed", "packed"),
    _row("moe", "tp2+sp", "experts"),
    _row("moe", "ep2xdp2", "experts", "mixed", "imageless"),
    _row("moe", "ep4xdp4", "experts", note="distr. opt., overlap", **OVERLAPPED),
    _row("moe", "cp2xep2", "router", "packed"),
    _row("moe", "tp2xetp2+sp", "experts"),
    _row("moe", "tp2xep2+sp", "gate and up of experts"),
    _row("moe", "tp2xep2xetp2xdp2+sp", "router"),
    _row("moe", "tp2xep2xetp2xdp2+sp", "down of experts", note="distr. opt.", **SHARDED),
    _row("moe", "pp2xvpp2", "router", "images"),
    _row("moe", "tp2xpp2xep2+sp", "whole router"),
    _row("moe-mixed", "single", "experts and MLP"),
    _row("moe-mixed", "pp2xep2xdp2", "experts and MLP"),
    _row("moe-mixed", "tp2xep2+sp", "experts and MLP", "packed"),
    _row(
        "dense",
        "tp2+sp",
        "mixed ranks",
        note="recompute uniform 1",
        config={**UNIFORM, "recompute_num_layers": 1},
    ),
    _row(
        "moe",
        "pp2xep2xdp2",
        "experts",
        note="recompute uniform 2",
        config={**UNIFORM, "recompute_num_layers": 2},
    ),
    _row("dense", "cp2", "q and v", note="recompute selective", config=SELECTIVE),
    _row(
        "moe",
        "ep2xdp2",
        "router",
        note="recompute selective moe",
        config={**SELECTIVE, "recompute_modules": ["core_attn", "moe"]},
    ),
)
"""Different things can go wrong in each row. Together, the rows combine every rule of
``mcore_qwen3vl.model.lora.regions`` and every kind of target with every kind of parallelism."""
