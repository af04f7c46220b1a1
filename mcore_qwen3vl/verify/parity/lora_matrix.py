"""The layout matrix of LoRA: every rule for a factor's gradient, compared with PEFT."""

from __future__ import annotations

from mcore_qwen3vl.verify.parity.matrix import (
    BOTH,
    OVERLAPPED,
    SELECTIVE,
    SELECTIVE_MOE,
    SHARDED,
    MatrixRow,
    uniform,
)

LORA_MATRIX: tuple[MatrixRow, ...] = (
    MatrixRow.of("dense", "single", "mixed", "packed", "padded", "text", lora="everything"),
    MatrixRow.of("dense", "tp2", "mixed", "packed", "padded-left", lora="everything"),
    MatrixRow.of("dense", "tp2+sp", "mixed", lora="everything"),
    MatrixRow.of("dense", "tp2+sp", "packed", "imageless", lora="language"),
    MatrixRow.of("dense", "tp4+sp", lora="mixed ranks"),
    MatrixRow.of("dense", "pp2", "images", "ragged", lora="everything"),
    MatrixRow.of("dense", "pp2xvpp2", "video", "packed", lora="mixed ranks"),
    MatrixRow.of("dense", "pp4", "images", lora="q and v"),
    MatrixRow.of("dense", "cp2", "mixed", "packed", lora="everything"),
    MatrixRow.of("dense", "dp2", "imageless", lora="language", note="overlap", overlap=True),
    MatrixRow.of(
        "dense", "dp2", "ragged", lora="everything", note="distributed optimizer", **SHARDED
    ),
    MatrixRow.of("dense", "dp2", "mixed", lora="mixed ranks", note=BOTH, **OVERLAPPED),
    MatrixRow.of("dense", "tp2xpp2+sp", "mixed", "packed", lora="k and gate"),
    MatrixRow.of("dense", "tp2xcp2+sp", "packed", "ragged", lora="mixed ranks"),
    MatrixRow.of("dense", "tp2xpp2xdp2+sp", lora="everything", note=BOTH, **OVERLAPPED),
    MatrixRow.of("dense", "single", lora="whole"),
    MatrixRow.of("dense", "tp2xpp2+sp", lora="whole"),
    MatrixRow.of("dense", "tp2xcp2+sp", "images", lora="whole vision"),
    MatrixRow.of("few-kv", "tp4", "mixed", "packed", lora="everything"),
    MatrixRow.of("few-kv", "tp4+sp", "image", lora="mixed ranks"),
    MatrixRow.of("tied", "single", lora="everything"),
    MatrixRow.of("tied", "tp2xpp2+sp", lora="everything"),
    MatrixRow.of("tied", "tp2xpp2+sp", lora="whole tied"),
    MatrixRow.of("moe", "single", "mixed", "packed", lora="experts"),
    MatrixRow.of("moe", "tp2+sp", lora="experts"),
    MatrixRow.of("moe", "ep2xdp2", "mixed", "imageless", lora="experts"),
    MatrixRow.of("moe", "ep4xdp4", lora="experts", note=BOTH, **OVERLAPPED),
    MatrixRow.of("moe", "cp2xep2", "packed", lora="router"),
    MatrixRow.of("moe", "tp2xetp2+sp", lora="experts"),
    MatrixRow.of("moe", "tp2xep2+sp", lora="gate and up of experts"),
    MatrixRow.of("moe", "tp2xep2xetp2xdp2+sp", lora="router"),
    MatrixRow.of(
        "moe", "tp2xep2xetp2xdp2+sp", lora="down of experts", note="distr. opt.", **SHARDED
    ),
    MatrixRow.of("moe", "pp2xvpp2", "images", lora="router"),
    MatrixRow.of("moe", "tp2xpp2xep2+sp", lora="whole router"),
    MatrixRow.of("moe-mixed", "single", lora="experts and MLP"),
    MatrixRow.of("moe-mixed", "pp2xep2xdp2", lora="experts and MLP"),
    MatrixRow.of("moe-mixed", "tp2xep2+sp", "packed", lora="experts and MLP"),
    MatrixRow.of("dense", "tp2+sp", lora="mixed ranks", **uniform(1)),
    MatrixRow.of("moe", "pp2xep2xdp2", lora="experts", **uniform(2)),
    MatrixRow.of("dense", "cp2", lora="q and v", **SELECTIVE),
    MatrixRow.of("moe", "ep2xdp2", lora="router", **SELECTIVE_MOE),
)
"""Different things can go wrong in each row. Together, the rows combine every rule of
``mcore_qwen3vl.model.lora.regions`` and every kind of target with every kind of parallelism."""
