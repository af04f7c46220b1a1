"""The layout matrix: tiny models in every layout and batch kind, compared with Hugging Face.

The tests run it, and ``python -m mcore_qwen3vl.verification.parity`` writes it as a table.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from mcore_qwen3vl.layout import Layout
from mcore_qwen3vl.tiny import YARN, write_tiny_checkpoint
from mcore_qwen3vl.tiny.tiny_checkpoint import HYBRID_TEXT
from mcore_qwen3vl.verification.parity.case import (
    ADAPTERS,
    RECIPES,
    AdamW,
    ParityCase,
    write_random_adapter,
)
from mcore_qwen3vl.verification.parity.comparison import compare_case
from mcore_qwen3vl.verification.parity.reference import ReferenceCheckpoint
from mcore_qwen3vl.verification.report import Report

HYBRID_YARN = {
    "max_position_embeddings": 256,
    "rope_parameters": {
        **HYBRID_TEXT["rope_parameters"],
        "rope_type": "yarn",
        "factor": 4.0,
        "original_max_position_embeddings": 64,
    },
}

MODELS: dict[str, dict[str, Any]] = {
    "dense": {},
    "tied": {"tie": True},
    "moe": {"moe": True},
    # Dense and MoE layers alternate.
    "moe-mixed": {"moe": True, "layout": "v5", "text": {"mlp_only_layers": [0, 2]}},
    # Every token takes every expert. Rounding can change no choice, so that bf16 can be judged.
    "moe-all": {"moe": True, "text": {"num_experts_per_tok": 12}},
    # An epsilon that shows in float32: twice the published 1e-6 would go unnoticed.
    "epsilon": {"text": {"rms_norm_eps": 0.02}},
    # Fewer KV heads than tensor-parallel ranks.
    "few-kv": {"text": {"num_key_value_heads": 2}},
    "yarn": {"text": YARN},
    "qwen3.5": {"family": "qwen3.5"},
    # Its head is tied, and the part of each head that is rotated has a scaled rope.
    "qwen3.5-tied": {"family": "qwen3.5", "tie": True, "text": HYBRID_YARN},
    "qwen3.5-moe": {"family": "qwen3.5", "moe": True},
    # Without a vision tower. Its batches have text in place of images and videos.
    "qwen3.5-text": {"family": "qwen3.5", "text_only": True},
    "qwen3.5-text-tied": {"family": "qwen3.5", "text_only": True, "tie": True},
    "qwen3.5-text-moe": {"family": "qwen3.5", "text_only": True, "moe": True},
}
"""The arguments of :func:`write_tiny_checkpoint` for each model."""

EVERY = tuple(RECIPES)
STAGED = ("mixed", "padded-left", "packed", "imageless", "ragged")
"""Batches that a pipeline can get wrong by itself. It computes in the order of one rank, so its
errors are those of the same layout without it, digit for digit. It can lose what has to reach a
later stage: features, the padding mask, the bounds of a pack, micro-batches without a feature,
shapes."""
DIVIDED = ("packed", "imageless", "ragged")
"""Batches that data parallelism can get wrong by itself, though each micro-batch is computed as on
one rank: the divisor of the loss, ranks without an image, ranks with micro-batches of other shapes.
"""
UNIFORM = {"recompute_granularity": "full", "recompute_method": "uniform"}


@dataclass(frozen=True)
class MatrixRow:
    """One row of the matrix."""

    model: str  # a name in `MODELS`
    layout: str  # in the form that ``Layout.parse`` reads
    batches: tuple[str, ...] = EVERY
    options: dict[str, Any] = field(default_factory=dict)  # further fields of `ParityCase`
    note: str = ""
    lora: str = ""  # a name in `ADAPTERS`; only this adapter is trained, and compared with PEFT

    @classmethod
    def build(
        cls, model: str, layout: str, *batches: str, note: str = "", lora: str = "", **options: Any
    ) -> MatrixRow:
        """Return a row; by default with the batch ``mixed``, and with `options` of the case."""
        return cls(model, layout, batches or ("mixed",), options, note, lora)

    def __str__(self) -> str:
        lora = f"LoRA: {self.lora}" if self.lora else ""
        return " ".join(filter(None, [self.model, self.layout, lora, self.note]))


row = MatrixRow.build
BF16: dict[str, Any] = {"note": "bf16", "dtype": "bf16"}
FP64: dict[str, Any] = {"note": "fp64", "dtype": "fp64"}
OVERLAP: dict[str, Any] = {"note": "overlap", "overlap": True}
SHARDED: dict[str, Any] = {"note": "distr. opt.", "distributed_optimizer": True}
OVERLAPPED: dict[str, Any] = SHARDED | OVERLAP | {"note": "distr. opt., overlap"}
EXPERTS: dict[str, Any] = {"note": "overlapped experts", "overlap_experts": True}
BOTH: dict[str, Any] = EXPERTS | OVERLAPPED | {"note": "overlapped experts, distr. opt., overlap"}


def config_options(note: str, **config: Any) -> dict[str, Any]:
    """Return arguments of :meth:`MatrixRow.build` for these ``TransformerConfig`` fields."""
    return {"note": note, "config": config}


def recompute_uniform(layers: int) -> dict[str, Any]:
    """Return arguments of :meth:`MatrixRow.build` for uniform recompute of this many layers."""
    return config_options(f"recompute uniform {layers}", **UNIFORM, recompute_num_layers=layers)


BLOCK = config_options(
    "recompute block", **UNIFORM | {"recompute_method": "block"}, recompute_num_layers=1
)
SELECTIVE = config_options("recompute selective", recompute_granularity="selective")
SELECTIVE_MOE = config_options(
    "recompute selective moe",
    recompute_granularity="selective",
    recompute_modules=["core_attn", "moe"],
)
ALLGATHER = config_options("allgather", moe_token_dispatcher_type="allgather")
ONE_EXPERT = config_options("one expert after another", moe_grouped_gemm=False)
ACCUMULATED = config_options("fused gradients", gradient_accumulation_fusion=True)
# Coefficients far above those in use, so that an error in a loss shows in the gradients.
ROUTERS = config_options("router losses", moe_aux_loss_coeff=0.6, moe_z_loss_coeff=0.05)
ROUTERS_OF_ROWS = config_options(
    "router losses by row",
    moe_router_load_balancing_type="seq_aux_loss",
    moe_aux_loss_coeff=0.6,
)
ROUTERS_OF_ALL = config_options(
    "router losses of the global batch",
    moe_router_load_balancing_type="global_aux_loss",
    moe_aux_loss_coeff=0.6,
)
MEGATRONS_LOSS = config_options("Megatron's loss", head_chunk=0)
COMPILED: dict[str, Any] = {"note": "compiled", "compile_pointwise": True}
PATTERNS_FROZEN = OVERLAP | {
    "note": "patterns frozen, overlap",
    "freeze": (r".*\.mlp\.router", r"visual\.blocks\.1\."),
}
ALMOST_FROZEN = recompute_uniform(2) | {
    "note": "all but the last layer frozen, recompute uniform 2",
    "freeze": ("vision", "aligner", "embedding", r"decoder\.layers\.[012]\."),
}


MATRIX: tuple[MatrixRow, ...] = (
    MatrixRow("dense", "single"),
    MatrixRow("dense", "tp2"),
    MatrixRow("dense", "tp2+sp"),
    row("dense", "tp4+sp", "mixed", "packed", "padded-left"),
    MatrixRow("dense", "pp2", STAGED),
    row("dense", "pp4", "images", "video", "packed", "ragged"),
    MatrixRow("dense", "pp2xvpp2", STAGED),
    row("dense", "pp2+first1", "mixed", "padded", "ragged"),
    row("dense", "pp2+last1", "images", "packed"),
    row("dense", "pp4+first1+last1", "text", "mixed"),
    row("dense", "pp2+E|t|tt|tL", "mixed", "packed", "ragged"),
    row("dense", "pp2+Ettt|tL", "mixed"),
    row("dense", "pp2xdp2+E|tt||t|t|L", "imageless", **OVERLAPPED),
    MatrixRow("dense", "cp2"),
    row("dense", "cp4", "video", "packed", "padded"),
    MatrixRow("dense", "dp2", DIVIDED),
    row("dense", "dp2", "imageless", "packed", **OVERLAP),
    row("dense", "dp2", "imageless", "mixed", **SHARDED),
    row("dense", "dp2", "imageless", "ragged", **OVERLAPPED),
    row("dense", "tp2xpp2", "image", "padded-left", "ragged"),
    row("dense", "tp2xpp2+sp", "mixed", "packed", "imageless"),
    row("dense", "tp2xcp2", "images", "padded"),
    row("dense", "tp2xcp2+sp", "mixed", "packed", "imageless", "padded-left", "ragged"),
    row("dense", "pp2xcp2", "video", "packed", "ragged"),
    row("dense", "tp2xpp2xvpp2+sp", "images", "packed", "ragged"),
    row("dense", "tp2xdp2+sp", "imageless", "padded", **OVERLAPPED),
    row("dense", "cp2xdp2", "imageless", "packed", **OVERLAPPED),
    row("dense", "pp2xvpp2xdp2", "imageless", "mixed", **OVERLAPPED),
    row("dense", "tp2xpp2xcp2+sp", "mixed", "packed", "ragged"),
    row("tied", "single", "mixed", "packed"),
    row("tied", "tp2xpp2+sp", "mixed", "packed"),
    row("tied", "pp2xvpp2xdp2", "imageless", **OVERLAPPED),
    row("epsilon", "single", "mixed"),
    MatrixRow("yarn", "single"),
    row("yarn", "tp2+sp", "mixed", "padded", "packed"),
    row("yarn", "cp2", "video", "packed", "ragged"),
    row("yarn", "pp2", "mixed", "packed", "ragged"),
    row("yarn", "tp2xcp2+sp", "mixed", "packed"),
    row("yarn", "single", "mixed", "packed", **BF16),
    MatrixRow("moe", "single"),
    row("moe", "tp2+sp", "image", "padded", "packed"),
    row("moe", "pp2xvpp2", "images", "packed", "ragged"),
    MatrixRow("moe", "ep2xdp2"),
    row("moe", "ep2xdp2", "mixed", "padded", "packed", **ALLGATHER),
    row("moe", "ep4xdp4", "images", "imageless", "packed", **OVERLAPPED),
    row("moe", "ep4xdp4", "mixed", **ALLGATHER),
    row("moe", "tp2xetp2+sp", "mixed", "packed"),
    MatrixRow("moe", "tp2xep2+sp"),
    row("moe", "cp2xep2", "video", "packed", "padded"),
    row("moe", "pp2xep2xdp2", "mixed", "packed", "ragged", "imageless"),
    row("moe", "pp2xep2xdp2+E|tt|tt|L", "mixed", "imageless"),
    row("moe", "pp2xcp2xep2+Et|t|t|tL", "packed"),
    row("moe", "tp2xpp2xep2+sp", "mixed", "packed", "ragged"),
    row("moe", "tp2xep2xetp2xdp2+sp", "mixed", "packed"),
    row("moe", "tp2xpp2xep2xdp2+sp", "imageless", "packed", **OVERLAPPED),
    row("moe", "ep2xdp2", "mixed", "packed", "imageless", **EXPERTS),
    row("moe", "tp2xep2+sp", "packed", "padded", **EXPERTS),
    row("moe", "cp2xep2", "packed", **EXPERTS),
    row("moe", "ep2xdp4", "packed", **BOTH),
    row("moe", "pp2xvpp2xep2xdp2", "imageless", "ragged", **EXPERTS),
    row("moe", "tp2xpp2xvpp2xep2+sp", "mixed", "packed", "ragged", **EXPERTS),
    row("moe", "cp2xpp2xep2+Ettt|t||L", "packed", **EXPERTS),
    row("moe", "cp2xpp2xep2+Et||tt|tL", "packed", **EXPERTS),
    row("moe", "single", "mixed", "padded", "padded-left", "packed", **ROUTERS),
    row("moe", "tp2+sp", "padded", "padded-left", "packed", **ROUTERS),
    row("moe", "cp2xep2", "padded", "padded-left", "packed", **ROUTERS),
    row("moe", "tp2xcp2xep2+sp", "padded", "packed", **ROUTERS),
    row("moe", "ep2xdp2", "padded", "packed", **ROUTERS),
    row(
        "moe",
        "ep2xdp2",
        "padded",
        "packed",
        **ROUTERS | EXPERTS | {"note": "router losses, overlapped experts"},
    ),
    row("moe", "pp2xep2xdp2", "ragged", "packed", **ROUTERS),
    row("moe", "tp2xpp2xvpp2xep2+sp", "padded", **ROUTERS),
    row("moe", "tp2xetp2+sp", "padded", **ROUTERS),
    row("moe", "tp2+sp", "padded", **ROUTERS_OF_ROWS),
    row("moe", "cp2xep2", "padded", "ragged", **ROUTERS_OF_ROWS),
    row("moe", "ep4xdp4", "padded", "packed", **ROUTERS_OF_ALL),
    row("moe", "tp2xep2xdp4+sp", "padded", **ROUTERS_OF_ALL),
    row("moe-mixed", "cp2xep2", "packed", **ROUTERS),
    row(
        "qwen3.5-moe",
        "single",
        "padded",
        "packed",
        **FP64 | ROUTERS | {"note": "fp64, router losses"},
    ),
    row("qwen3.5-moe", "tp2xep2+sp", "padded", "packed", **ROUTERS),
    row(
        "qwen3.5-moe",
        "cp2xep2",
        "padded",
        "packed",
        **FP64 | ROUTERS | {"note": "fp64, router losses"},
    ),
    row("qwen3.5-moe", "pp2xep2xdp2", "padded", "packed", **ROUTERS),
    row("moe-mixed", "single", "mixed", "packed"),
    MatrixRow("qwen3.5", "single"),
    MatrixRow("qwen3.5", "tp2"),
    row("qwen3.5", "tp2+sp", "mixed", "padded-left", "packed"),
    row("qwen3.5", "cp2", "video", "padded-left", "packed"),
    MatrixRow("qwen3.5", "pp2", STAGED),
    row("qwen3.5", "pp2xvpp2", "images", "packed", "ragged"),
    row("qwen3.5", "pp2xdp2+E|t|tt|tL", "imageless", **OVERLAPPED),
    row("qwen3.5", "dp2", "imageless", "packed", **OVERLAPPED),
    row("qwen3.5", "single", *EVERY, **FP64),
    row("qwen3.5", "tp2xcp2+sp", "mixed", "padded-left", "packed", **FP64),
    row("qwen3.5", "tp4", "mixed", "packed", **FP64),
    row("qwen3.5", "cp4", "video", "packed", "padded", **FP64),
    row("qwen3.5", "tp2xpp2xcp2+sp", "mixed", "packed", **FP64),
    row("qwen3.5-tied", "tp2xpp2+sp", "mixed", "packed"),
    row("qwen3.5-tied", "cp2", "mixed", "packed", **FP64),
    row("qwen3.5", "tp2+sp", "mixed", **recompute_uniform(1)),
    row("qwen3.5", "pp2xvpp2", "packed", **recompute_uniform(1)),
    row("qwen3.5", "cp2", "mixed", **SELECTIVE),
    row("qwen3.5", "tp2xcp2+sp", "packed", **config_options("all kept", keep_activations=True)),
    row("qwen3.5", "tp2xpp2+sp", "mixed", "packed", **ACCUMULATED),
    row("qwen3.5", "single", "mixed", "packed", **BF16),
    row("qwen3.5-moe", "single", *EVERY, **FP64),
    row("qwen3.5-moe", "single", "mixed", "packed"),
    row("qwen3.5-moe", "ep2xdp2", "mixed", "padded-left", "packed"),
    row("qwen3.5-moe", "tp2xep2+sp", "mixed", "packed", "padded"),
    row("qwen3.5-moe", "tp2xetp2+sp", "mixed", "packed", **FP64),
    row("qwen3.5-moe", "cp2xep2", "video", "packed", "padded", **FP64),
    row("qwen3.5-moe", "pp2xep2xdp2", "imageless", "packed", **OVERLAPPED),
    row("qwen3.5-moe", "ep2xdp2", "mixed", "packed", **EXPERTS),
    row("qwen3.5-text", "single", "mixed", "padded-left", "packed", "ragged"),
    row("qwen3.5-text", "tp2+sp", "mixed", "packed", **recompute_uniform(1)),
    row("qwen3.5-text", "tp2xcp2+sp", "packed", "padded", **FP64),
    row("qwen3.5-text-tied", "pp2xvpp2xdp2", "ragged", "packed", **OVERLAPPED),
    row("qwen3.5-text-moe", "single", "mixed", "packed", **FP64),
    row("qwen3.5-text-moe", "cp2xep2", "packed", "padded", **FP64),
    row("qwen3.5-text-moe", "tp2xep2+sp", "padded", "packed", **ROUTERS),
    row("qwen3.5-text-moe", "pp2xep2xdp2", "ragged", "packed", **OVERLAPPED),
    row("qwen3.5-text-moe", "ep2xdp2", "packed", **EXPERTS),
    row("moe-mixed", "ep2xdp2", "mixed", "packed", **EXPERTS),
    row("moe-mixed", "pp2xep2xdp2", "images", "padded"),
    row("dense", "tp2+sp", "mixed", **recompute_uniform(1)),
    row("dense", "cp2", "packed", **recompute_uniform(2)),
    row("moe", "tp2xep2+sp", "mixed", **recompute_uniform(4)),
    row("dense", "pp2", "images", **recompute_uniform(2)),
    row("dense", "pp2xvpp2", "packed", **recompute_uniform(1)),
    row("dense", "tp2xpp2+sp", "packed", **BLOCK),
    row("dense", "cp2", "mixed", **SELECTIVE),
    row("dense", "tp2+sp", "mixed", **config_options("recompute vision", recompute_vision=True)),
    row("dense", "tp2xcp2+sp", "packed", **config_options("all kept", keep_activations=True)),
    row("moe", "ep2xdp2", "packed", **SELECTIVE_MOE),
    row("dense", "tp2xcp2+sp", "packed", **MEGATRONS_LOSS),
    row("tied", "dp2", "imageless", **OVERLAPPED | MEGATRONS_LOSS),
    row("moe", "ep2xdp2", "packed", **ONE_EXPERT),
    row("dense", "tp2xpp2+sp", "mixed", "packed", **ACCUMULATED),
    row("tied", "pp2xvpp2xdp2", "imageless", **OVERLAPPED | ACCUMULATED),
    row("moe", "tp2xep2+sp", "mixed", "packed", **ACCUMULATED),
    row("moe", "ep2xdp2", "packed", **EXPERTS | ACCUMULATED),
    row("dense", "tp2xcp2+sp", "packed", "padded-left", **COMPILED),
    row("dense", "tp2+sp", "mixed", note="vision frozen", freeze=("vision",)),
    row("dense", "cp2", "mixed", note="aligner frozen", freeze=("aligner",)),
    row("dense", "pp2", "mixed", note="language frozen", freeze=("language",)),
    row("moe", "ep2xdp2", "mixed", **PATTERNS_FROZEN),
    row("dense", "pp2xvpp2", "mixed", **ALMOST_FROZEN),
    row("dense", "tp2xcp2+sp", "mixed", "packed", **FP64),
    row("moe", "tp2xep2+sp", "mixed", "packed", **FP64),
    row("dense", "single", "mixed", "padded-left", "packed", "imageless", **BF16),
    row("dense", "tp2xpp2+sp", "mixed", "packed", **BF16),
    row("moe-all", "single", "mixed", "packed", **BF16),
    row("moe-all", "tp2xep2+sp", "packed", **BF16),
)

LORA_MATRIX: tuple[MatrixRow, ...] = (
    row("dense", "single", "mixed", "packed", "padded", "text", lora="everything"),
    row("dense", "tp2", "mixed", "packed", "padded-left", lora="everything"),
    row("dense", "tp2+sp", "mixed", lora="everything"),
    row("dense", "tp2+sp", "packed", "imageless", lora="language"),
    row("dense", "tp4+sp", lora="mixed ranks"),
    row("dense", "pp2", "images", "ragged", lora="everything"),
    row("dense", "pp2xvpp2", "video", "packed", lora="mixed ranks"),
    row("dense", "pp4", "images", lora="q and v"),
    row("dense", "cp2", "mixed", "packed", lora="everything"),
    row("dense", "dp2", "imageless", lora="language", **OVERLAP),
    row("dense", "dp2", "ragged", lora="everything", **SHARDED),
    row("dense", "dp2", "mixed", lora="mixed ranks", **OVERLAPPED),
    row("dense", "tp2xpp2+sp", "mixed", "packed", lora="k and gate"),
    row("dense", "tp2xcp2+sp", "packed", "ragged", lora="mixed ranks"),
    row("dense", "tp2xpp2xdp2+sp", lora="everything", **OVERLAPPED),
    row("dense", "single", lora="whole"),
    row("dense", "tp2xpp2+sp", lora="whole"),
    row("dense", "tp2xcp2+sp", "images", lora="whole vision"),
    row("dense", "tp2xpp2+sp", lora="whole", **ACCUMULATED),
    row("few-kv", "tp4", "mixed", "packed", lora="everything"),
    row("few-kv", "tp4+sp", "image", lora="mixed ranks"),
    row("tied", "single", lora="everything"),
    row("tied", "tp2xpp2+sp", lora="everything"),
    row("tied", "tp2xpp2+sp", lora="whole tied"),
    row("moe", "single", "mixed", "packed", lora="experts"),
    row("moe", "tp2+sp", lora="experts"),
    row("moe", "ep2xdp2", "mixed", "imageless", lora="experts"),
    row("moe", "ep4xdp4", lora="experts", **OVERLAPPED),
    row("moe", "cp2xep2", "packed", lora="router"),
    row("moe", "tp2xetp2+sp", lora="experts"),
    row("moe", "tp2xep2+sp", lora="gate and up of experts"),
    row("moe", "tp2xep2xetp2xdp2+sp", lora="router"),
    row("moe", "tp2xep2xetp2xdp2+sp", lora="down of experts", **SHARDED),
    row("moe", "pp2xvpp2", "images", lora="router"),
    row("moe", "tp2xpp2xep2+sp", lora="whole router"),
    row("moe-mixed", "single", lora="experts and MLP"),
    row("moe-mixed", "pp2xep2xdp2", lora="experts and MLP"),
    row("moe-mixed", "tp2xep2+sp", "packed", lora="experts and MLP"),
    row("dense", "tp2+sp", lora="mixed ranks", **recompute_uniform(1)),
    row("moe", "pp2xep2xdp2", lora="experts", **recompute_uniform(2)),
    row("dense", "cp2", lora="q and v", **SELECTIVE),
    row("moe", "ep2xdp2", lora="router", **SELECTIVE_MOE),
    # In the batch mixed, Hugging Face's own float32 is 6.6e-6 from its float64.
    row("qwen3.5", "single", "packed", "ragged", lora="hybrid"),
    row("qwen3.5", "single", "mixed", lora="hybrid", **FP64),
    row("qwen3.5", "tp2", "padded-left", "imageless", lora="hybrid"),
    row("qwen3.5", "tp2xcp2+sp", "packed", lora="hybrid"),
    row("qwen3.5-moe", "single", "packed", lora="hybrid experts"),
    row("qwen3.5-moe", "tp2xep2+sp", "mixed", "packed", lora="hybrid experts"),
    row("qwen3.5-text", "tp2xcp2+sp", "packed", lora="hybrid"),
    row("qwen3.5-text-moe", "cp2xep2", "packed", lora="hybrid experts"),
)
"""Different things can go wrong in each row. Together, the rows combine every rule of
``mcore_qwen3vl.model.lora_modules`` and every kind of target with every kind of parallelism."""


class Matrix:
    """A runner of rows, which makes tiny checkpoints in `folder` and references only once."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._references: dict[tuple[str, str], ReferenceCheckpoint] = {}

    def compare_row(self, row: MatrixRow, timeout: float = 120.0) -> Report:
        """Compare one row; fp32 rows that freeze nothing take an optimizer step too."""
        case = ParityCase(Layout.parse(row.layout), **row.options)
        if case.dtype == "fp32":
            case = replace(case, adamw=AdamW())
        reference = self.reference(row.model, row.lora)
        report = compare_case(reference, case, row.batches, timeout=timeout)
        report.title = f"{row} against {reference.library}"
        return report

    def reference(self, model: str, lora: str = "") -> ReferenceCheckpoint:
        """Return the reference of this model's tiny checkpoint; with `lora`, PEFT's."""
        if (model, lora) not in self._references:
            path = self._folder / model
            if not path.exists():
                write_tiny_checkpoint(path, **MODELS[model])
            adapter = self.adapter(model, lora) if lora else None
            self._references[model, lora] = ReferenceCheckpoint(path, adapter)
        return self._references[model, lora]

    def adapter(self, model: str, lora: str) -> Path:
        """Return the PEFT directory of an adapter for the tiny checkpoint of this model."""
        path = self._folder / f"{model} {lora}"
        if not path.exists():
            write_random_adapter(path, ADAPTERS[lora], self._folder / model)
        return path


def parity_matrix(
    folder: Path, rows: Iterable[MatrixRow], progress: Callable[[MatrixRow, Report], None]
) -> list[tuple[MatrixRow, Report]]:
    """Run `rows` with their tiny checkpoints in `folder`; `progress` is called after each row."""
    matrix = Matrix(folder)
    results = []
    for row in rows:
        report = matrix.compare_row(row)
        progress(row, report)
        results.append((row, report))
    return results


CELLS = """A cell has the worst errors of logits / loss / gradients, in units of 1e-6 of the largest
expected magnitude of the same tensor; `step` is the worst error of all parameters after an AdamW
step with clipping. The limit is 20 in float32. An empty cell was not run."""
"""What a cell of :func:`markdown` holds, for a page."""


def markdown(results: Sequence[tuple[MatrixRow, Report]]) -> str:
    """Return the table: a row for each layout, a column for each batch, and the optimizer step.

    A cell holds the worst relative errors of logits / loss / gradients in units of 1e-6.
    """
    lines = [
        "| model | layout | " + " | ".join([*EVERY, "step"]) + " |",
        "|---|---|" + "---|" * (len(EVERY) + 1),
    ]
    for row, report in results:
        lora = f"LoRA {row.lora}" if row.lora else ""
        layout = ", ".join(filter(None, [row.layout, lora, row.note])).replace("|", r"\|")
        cells = [_batch_cell(report, batch) for batch in EVERY]
        lines.append(
            f"| {row.model} | {layout} | " + " | ".join([*cells, _step_cell(report)]) + " |"
        )
    return "\n".join(lines) + "\n"


def _batch_cell(report: Report, batch: str) -> str:
    summaries = report.parts()
    parts = [summaries.get((batch, part)) for part in ("logits", "loss", "gradients")]
    numbers = " / ".join(
        _in_millionths(part.worst.relative_error) for part in parts if part is not None
    )
    if None in parts:
        return ""
    return f"**{numbers}**" if any(part and part.failed for part in parts) else numbers


def _step_cell(report: Report) -> str:
    errors = [s.worst.relative_error for s in report.parts().values() if s.part == "parameters"]
    return _in_millionths(max(errors)) if errors else ""


def _in_millionths(error: float) -> str:
    if 0 < error < 1e-10:  # in float64
        return f"{error * 1e6:.0e}"
    return f"{error * 1e6:.1f}" if error < 1e-3 else f"{error * 1e6:.0f}"
