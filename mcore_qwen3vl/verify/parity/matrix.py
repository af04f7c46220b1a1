"""The layout matrix: tiny models in every layout and batch kind, compared with Hugging Face.

The tests run it, and ``python -m mcore_qwen3vl.verify.parity`` writes it as a table.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from mcore_qwen3vl.layout import Layout
from mcore_qwen3vl.tiny import YARN, write_tiny_checkpoint
from mcore_qwen3vl.verify.parity.adapters import ADAPTERS, write_random_adapter
from mcore_qwen3vl.verify.parity.batches import RECIPES
from mcore_qwen3vl.verify.parity.case import Case
from mcore_qwen3vl.verify.parity.comparison import compare_case, half_precision_tolerances
from mcore_qwen3vl.verify.parity.reference import AdamW, CachedReference
from mcore_qwen3vl.verify.report import Report

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
SHARDED: dict[str, Any] = {"distributed_optimizer": True}
EXPERTS: dict[str, Any] = {"overlap_experts": True}
OVERLAPPED: dict[str, Any] = {"distributed_optimizer": True, "overlap": True}


@dataclass(frozen=True)
class MatrixRow:
    """One row of the matrix.

    Attributes:
        model: a name in `MODELS`.
        layout: the layout in the form that ``Layout.parse`` reads.
        options: further fields of :class:`Case`.
        lora: a name in ``adapters.ADAPTERS``; only this adapter is trained, and compared with PEFT.
    """

    model: str
    layout: str
    batches: tuple[str, ...] = EVERY
    options: dict[str, Any] = field(default_factory=dict)
    note: str = ""
    lora: str = ""

    @classmethod
    def of(
        cls, model: str, layout: str, *batches: str, note: str = "", lora: str = "", **options: Any
    ) -> MatrixRow:
        """Return a row; by default with the batch ``mixed``, and with `options` of the case."""
        return cls(model, layout, batches or ("mixed",), options, note, lora)

    def __str__(self) -> str:
        lora = f"LoRA: {self.lora}" if self.lora else ""
        return " ".join(filter(None, [self.model, self.layout, lora, self.note]))


BOTH = "distr. opt., overlap"
SPLIT = "overlapped experts"


def noted(note: str, **config: Any) -> dict[str, Any]:
    """Return arguments of :meth:`MatrixRow.of` for these ``TransformerConfig`` fields."""
    return {"note": note, "config": config}


def uniform(layers: int) -> dict[str, Any]:
    """Return arguments of :meth:`MatrixRow.of` for uniform recompute of this many layers."""
    return noted(f"recompute uniform {layers}", **UNIFORM, recompute_num_layers=layers)


BLOCK = noted("recompute block", **UNIFORM | {"recompute_method": "block"}, recompute_num_layers=1)
SELECTIVE = noted("recompute selective", recompute_granularity="selective")
SELECTIVE_MOE = noted(
    "recompute selective moe",
    recompute_granularity="selective",
    recompute_modules=["core_attn", "moe"],
)
ALLGATHER = noted("allgather", moe_token_dispatcher_type="allgather")
ONE_EXPERT = noted("one expert after another", moe_grouped_gemm=False)
ACCUMULATED = noted("fused gradients", gradient_accumulation_fusion=True)
MEGATRONS_LOSS = noted("Megatron's loss", head_chunk=0)


MATRIX: tuple[MatrixRow, ...] = (
    MatrixRow("dense", "single"),
    MatrixRow("dense", "tp2"),
    MatrixRow("dense", "tp2+sp"),
    MatrixRow.of("dense", "tp4+sp", "mixed", "packed", "padded-left"),
    MatrixRow("dense", "pp2", STAGED),
    MatrixRow.of("dense", "pp4", "images", "video", "packed", "ragged"),
    MatrixRow("dense", "pp2xvpp2", STAGED),
    MatrixRow.of("dense", "pp2+first1", "mixed", "padded", "ragged"),
    MatrixRow.of("dense", "pp2+last1", "images", "packed"),
    MatrixRow.of("dense", "pp4+first1+last1", "text", "mixed"),
    MatrixRow.of("dense", "pp2+E|t|tt|tL", "mixed", "packed", "ragged"),
    MatrixRow.of("dense", "pp2+Ettt|tL", "mixed"),
    MatrixRow.of("dense", "pp2xdp2+E|tt||t|t|L", "imageless", note=BOTH, **OVERLAPPED),
    MatrixRow("dense", "cp2"),
    MatrixRow.of("dense", "cp4", "video", "packed", "padded"),
    MatrixRow("dense", "dp2", DIVIDED),
    MatrixRow.of("dense", "dp2", "imageless", "packed", note="overlap", overlap=True),
    MatrixRow.of("dense", "dp2", "imageless", "mixed", note="distributed optimizer", **SHARDED),
    MatrixRow.of(
        "dense", "dp2", "imageless", "ragged", note="distributed optimizer, overlap", **OVERLAPPED
    ),
    MatrixRow.of("dense", "tp2xpp2", "image", "padded-left", "ragged"),
    MatrixRow.of("dense", "tp2xpp2+sp", "mixed", "packed", "imageless"),
    MatrixRow.of("dense", "tp2xcp2", "images", "padded"),
    MatrixRow.of("dense", "tp2xcp2+sp", "mixed", "packed", "imageless", "padded-left", "ragged"),
    MatrixRow.of("dense", "pp2xcp2", "video", "packed", "ragged"),
    MatrixRow.of("dense", "tp2xpp2xvpp2+sp", "images", "packed", "ragged"),
    MatrixRow.of("dense", "tp2xdp2+sp", "imageless", "padded", note=BOTH, **OVERLAPPED),
    MatrixRow.of("dense", "cp2xdp2", "imageless", "packed", note=BOTH, **OVERLAPPED),
    MatrixRow.of("dense", "pp2xvpp2xdp2", "imageless", "mixed", note=BOTH, **OVERLAPPED),
    MatrixRow.of("dense", "tp2xpp2xcp2+sp", "mixed", "packed", "ragged"),
    MatrixRow.of("tied", "single", "mixed", "packed"),
    MatrixRow.of("tied", "tp2xpp2+sp", "mixed", "packed"),
    MatrixRow.of("tied", "pp2xvpp2xdp2", "imageless", note=BOTH, **OVERLAPPED),
    MatrixRow.of("epsilon", "single", "mixed"),
    MatrixRow("yarn", "single"),
    MatrixRow.of("yarn", "tp2+sp", "mixed", "padded", "packed"),
    MatrixRow.of("yarn", "cp2", "video", "packed", "ragged"),
    MatrixRow.of("yarn", "pp2", "mixed", "packed", "ragged"),
    MatrixRow.of("yarn", "tp2xcp2+sp", "mixed", "packed"),
    MatrixRow.of("yarn", "single", "mixed", "packed", note="bf16", dtype="bf16"),
    MatrixRow("moe", "single"),
    MatrixRow.of("moe", "tp2+sp", "image", "padded", "packed"),
    MatrixRow.of("moe", "pp2xvpp2", "images", "packed", "ragged"),
    MatrixRow("moe", "ep2xdp2"),
    MatrixRow.of("moe", "ep2xdp2", "mixed", "padded", "packed", **ALLGATHER),
    MatrixRow.of("moe", "ep4xdp4", "images", "imageless", "packed", note=BOTH, **OVERLAPPED),
    MatrixRow.of("moe", "ep4xdp4", "mixed", **ALLGATHER),
    MatrixRow.of("moe", "tp2xetp2+sp", "mixed", "packed"),
    MatrixRow("moe", "tp2xep2+sp"),
    MatrixRow.of("moe", "cp2xep2", "video", "packed", "padded"),
    MatrixRow.of("moe", "pp2xep2xdp2", "mixed", "packed", "ragged", "imageless"),
    MatrixRow.of("moe", "pp2xep2xdp2+E|tt|tt|L", "mixed", "imageless"),
    MatrixRow.of("moe", "pp2xcp2xep2+Et|t|t|tL", "packed"),
    MatrixRow.of("moe", "tp2xpp2xep2+sp", "mixed", "packed", "ragged"),
    MatrixRow.of("moe", "tp2xep2xetp2xdp2+sp", "mixed", "packed"),
    MatrixRow.of("moe", "tp2xpp2xep2xdp2+sp", "imageless", "packed", note=BOTH, **OVERLAPPED),
    MatrixRow.of("moe", "ep2xdp2", "mixed", "packed", "imageless", note=SPLIT, **EXPERTS),
    MatrixRow.of("moe", "tp2xep2+sp", "packed", "padded", note=SPLIT, **EXPERTS),
    MatrixRow.of("moe", "cp2xep2", "packed", note=SPLIT, **EXPERTS),
    MatrixRow.of("moe", "ep2xdp4", "packed", note=f"{SPLIT}, {BOTH}", **EXPERTS, **OVERLAPPED),
    MatrixRow.of("moe", "pp2xvpp2xep2xdp2", "imageless", "ragged", note=SPLIT, **EXPERTS),
    MatrixRow.of("moe", "tp2xpp2xvpp2xep2+sp", "mixed", "packed", "ragged", note=SPLIT, **EXPERTS),
    MatrixRow.of("moe", "cp2xpp2xep2+Ettt|t||L", "packed", note=SPLIT, **EXPERTS),
    MatrixRow.of("moe", "cp2xpp2xep2+Et||tt|tL", "packed", note=SPLIT, **EXPERTS),
    MatrixRow.of("moe-mixed", "single", "mixed", "packed"),
    MatrixRow.of("moe-mixed", "ep2xdp2", "mixed", "packed", note=SPLIT, **EXPERTS),
    MatrixRow.of("moe-mixed", "pp2xep2xdp2", "images", "padded"),
    MatrixRow.of("dense", "tp2+sp", "mixed", **uniform(1)),
    MatrixRow.of("dense", "cp2", "packed", **uniform(2)),
    MatrixRow.of("moe", "tp2xep2+sp", "mixed", **uniform(4)),
    MatrixRow.of("dense", "pp2", "images", **uniform(2)),
    MatrixRow.of("dense", "pp2xvpp2", "packed", **uniform(1)),
    MatrixRow.of("dense", "tp2xpp2+sp", "packed", **BLOCK),
    MatrixRow.of("dense", "cp2", "mixed", **SELECTIVE),
    MatrixRow.of("dense", "tp2+sp", "mixed", **noted("recompute vision", recompute_vision=True)),
    MatrixRow.of("dense", "tp2xcp2+sp", "packed", **noted("all kept", keep_activations=True)),
    MatrixRow.of("moe", "ep2xdp2", "packed", **SELECTIVE_MOE),
    MatrixRow.of("dense", "tp2xcp2+sp", "packed", **MEGATRONS_LOSS),
    MatrixRow.of("tied", "dp2", "imageless", **OVERLAPPED, **MEGATRONS_LOSS),
    MatrixRow.of("moe", "ep2xdp2", "packed", **ONE_EXPERT),
    MatrixRow.of("dense", "tp2xpp2+sp", "mixed", "packed", **ACCUMULATED),
    MatrixRow.of("tied", "pp2xvpp2xdp2", "imageless", **OVERLAPPED, **ACCUMULATED),
    MatrixRow.of("moe", "tp2xep2+sp", "mixed", "packed", **ACCUMULATED),
    MatrixRow.of("moe", "ep2xdp2", "packed", **EXPERTS, **ACCUMULATED),
    MatrixRow.of(
        "dense", "tp2xcp2+sp", "packed", "padded-left", note="compiled", compile_pointwise=True
    ),
    MatrixRow.of("dense", "tp2+sp", "mixed", note="vision frozen", freeze=("vision",)),
    MatrixRow.of("dense", "cp2", "mixed", note="aligner frozen", freeze=("aligner",)),
    MatrixRow.of("dense", "pp2", "mixed", note="language frozen", freeze=("language",)),
    MatrixRow.of(
        "moe",
        "ep2xdp2",
        "mixed",
        note="patterns frozen, overlap",
        freeze=(r".*\.mlp\.router", r"visual\.blocks\.1\."),
        overlap=True,
    ),
    MatrixRow.of(
        "dense", "single", "mixed", "padded-left", "packed", "imageless", note="bf16", dtype="bf16"
    ),
    MatrixRow.of("dense", "tp2xpp2+sp", "mixed", "packed", note="bf16", dtype="bf16"),
    MatrixRow.of("moe-all", "single", "mixed", "packed", note="bf16", dtype="bf16"),
    MatrixRow.of("moe-all", "tp2xep2+sp", "packed", note="bf16", dtype="bf16"),
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
    MatrixRow.of("dense", "tp2xpp2+sp", lora="whole", **ACCUMULATED),
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
``mcore_qwen3vl.model.lora.kinds`` and every kind of target with every kind of parallelism."""


class Matrix:
    """A runner of rows, which makes tiny checkpoints in `folder` and references only once."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._references: dict[tuple[str, str, str], CachedReference] = {}

    def run(self, row: MatrixRow, timeout: float = 120.0) -> Report:
        """Compare one row; fp32 rows that freeze nothing take an optimizer step too."""
        options = dict(row.options)
        dtype = options.setdefault("dtype", "fp32")
        if dtype == "fp32":
            options.setdefault("adamw", AdamW())
        case = Case(Layout.parse(row.layout), **options)
        reference = self.reference(row.model, dtype, row.lora)
        tolerances = None
        if dtype == "bf16":
            exact = self.reference(row.model, lora=row.lora)
            tolerances = half_precision_tolerances(reference, exact, case, row.batches)
        report = compare_case(reference, case, row.batches, tolerances=tolerances, timeout=timeout)
        report.title = f"{row} against Hugging Face"
        return report

    def reference(self, model: str, dtype: str = "fp32", lora: str = "") -> CachedReference:
        """Return this model's tiny checkpoint and its reference in `dtype`; with `lora`, PEFT's."""
        key = (model, dtype, lora)
        if key not in self._references:
            path = self._folder / model
            if not path.exists():
                write_tiny_checkpoint(path, **MODELS[model])
            adapter = self.adapter(model, lora) if lora else None
            self._references[key] = CachedReference(path, dtype, lora=adapter)
        return self._references[key]

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
        report = matrix.run(row)
        progress(row, report)
        results.append((row, report))
    return results


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
        cells = [_cell(report, batch) for batch in EVERY]
        lines.append(f"| {row.model} | {layout} | " + " | ".join([*cells, _step(report)]) + " |")
    return "\n".join(lines) + "\n"


def _cell(report: Report, batch: str) -> str:
    found = report.parts()
    parts = [found.get((batch, part)) for part in ("logits", "loss", "gradients")]
    numbers = " / ".join(_micro(part.worst.error) for part in parts if part is not None)
    if None in parts:
        return ""
    return f"**{numbers}**" if any(part and part.failed for part in parts) else numbers


def _step(report: Report) -> str:
    errors = [s.worst.error for s in report.parts().values() if s.part == "parameters"]
    return _micro(max(errors)) if errors else ""


def _micro(error: float) -> str:
    return f"{error * 1e6:.1f}" if error < 1e-3 else f"{error * 1e6:.0f}"
