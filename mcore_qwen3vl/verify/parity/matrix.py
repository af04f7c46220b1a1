"""The layout matrix: every layout and every batch kind, against Hugging Face, on tiny models.

The tests run it, and ``python -m mcore_qwen3vl.verify.parity`` writes it as a table.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from mcore_qwen3vl.layout import Layout
from mcore_qwen3vl.tiny import write_tiny_checkpoint
from mcore_qwen3vl.verify.parity.batches import RECIPES
from mcore_qwen3vl.verify.parity.case import Case
from mcore_qwen3vl.verify.parity.reference import AdamW
from mcore_qwen3vl.verify.parity.verify import Checkpoint, half_precision_tolerances, verify
from mcore_qwen3vl.verify.report.result import Report

MODELS: dict[str, dict[str, Any]] = {
    "dense": {},
    "tied": {"tie": True},
    "moe": {"moe": True},
    # Dense and MoE layers in turn.
    "moe-mixed": {"moe": True, "layout": "v5", "text": {"mlp_only_layers": [0, 2]}},
    # Every expert for every token: without a choice that rounding could change, bf16 can be judged.
    "moe-all": {"moe": True, "text": {"num_experts_per_tok": 12}},
}
"""What :func:`write_tiny_checkpoint` is given for each model."""

EVERY = tuple(RECIPES)
UNIFORM = {"recompute_granularity": "full", "recompute_method": "uniform"}
SHARDED = {"distributed_optimizer": True}
OVERLAPPED = {"distributed_optimizer": True, "overlap": True}


@dataclass(frozen=True)
class Entry:
    """One row of the matrix.

    Attributes:
        model: a name in `MODELS`.
        layout: as ``Layout.parse`` reads it.
        batches: the batches to run.
        options: further fields of :class:`Case`.
        note: what is special about it.
    """

    model: str
    layout: str
    batches: tuple[str, ...] = EVERY
    options: dict[str, Any] = field(default_factory=dict)
    note: str = ""

    def __str__(self) -> str:
        return " ".join(filter(None, [self.model, self.layout, self.note]))


def _recompute(note: str, model: str, layout: str, batch: str, **config: Any) -> Entry:
    return Entry(model, layout, (batch,), {"config": config}, f"recompute {note}")


MATRIX: tuple[Entry, ...] = (
    Entry("dense", "single"),
    Entry("dense", "tp2"),
    Entry("dense", "tp2+sp"),
    Entry("dense", "tp4+sp", ("mixed", "packed", "padded-left")),
    Entry("dense", "pp2"),
    Entry("dense", "pp4", ("images", "video", "packed", "ragged")),
    Entry("dense", "pp2xvpp2"),
    Entry("dense", "pp2+first1", ("mixed", "padded", "ragged")),
    Entry("dense", "pp2+last1", ("images", "packed")),
    Entry("dense", "pp4+first1+last1", ("text", "mixed")),
    Entry("dense", "cp2"),
    Entry("dense", "cp4", ("video", "packed", "padded")),
    Entry("dense", "dp2"),
    Entry("dense", "dp2", ("imageless", "packed"), {"overlap": True}, "overlap"),
    Entry("dense", "dp2", ("imageless", "mixed"), SHARDED, "distributed optimizer"),
    Entry("dense", "dp2", ("imageless", "ragged"), OVERLAPPED, "distributed optimizer, overlap"),
    Entry("dense", "tp2xpp2", ("image", "padded-left", "ragged")),
    Entry("dense", "tp2xpp2+sp", ("mixed", "packed", "imageless")),
    Entry("dense", "tp2xcp2", ("images", "padded")),
    Entry("dense", "tp2xcp2+sp", ("mixed", "packed", "imageless", "padded-left", "ragged")),
    Entry("dense", "pp2xcp2", ("video", "packed", "ragged")),
    Entry("dense", "tp2xpp2xvpp2+sp", ("images", "packed", "ragged")),
    Entry("dense", "tp2xdp2+sp", ("imageless", "padded"), OVERLAPPED, "distr. opt., overlap"),
    Entry("dense", "cp2xdp2", ("imageless", "packed"), OVERLAPPED, "distr. opt., overlap"),
    Entry("dense", "pp2xvpp2xdp2", ("imageless", "mixed"), OVERLAPPED, "distr. opt., overlap"),
    Entry("dense", "tp2xpp2xcp2+sp", ("mixed", "packed", "ragged")),
    Entry("tied", "single", ("mixed", "packed")),
    Entry("tied", "tp2xpp2+sp", ("mixed", "packed")),
    Entry("tied", "pp2xvpp2xdp2", ("imageless",), OVERLAPPED, "distr. opt., overlap"),
    Entry("moe", "single"),
    Entry("moe", "tp2+sp", ("image", "padded", "packed")),
    Entry("moe", "pp2xvpp2", ("images", "packed", "ragged")),
    Entry("moe", "ep2xdp2"),
    Entry(
        "moe",
        "ep2xdp2",
        ("mixed", "padded", "packed"),
        {"config": {"moe_token_dispatcher_type": "allgather"}},
        "allgather",
    ),
    Entry("moe", "ep4xdp4", ("images", "imageless", "packed"), OVERLAPPED, "distr. opt., overlap"),
    Entry(
        "moe",
        "ep4xdp4",
        ("mixed",),
        {"config": {"moe_token_dispatcher_type": "allgather"}},
        "allgather",
    ),
    Entry("moe", "tp2xetp2+sp", ("mixed", "packed")),
    Entry("moe", "tp2xep2+sp"),
    Entry("moe", "cp2xep2", ("video", "packed", "padded")),
    Entry("moe", "pp2xep2xdp2", ("mixed", "packed", "ragged", "imageless")),
    Entry("moe", "tp2xpp2xep2+sp", ("mixed", "packed", "ragged")),
    Entry("moe", "tp2xep2xetp2xdp2+sp", ("mixed", "packed")),
    Entry("moe", "tp2xpp2xep2xdp2+sp", ("imageless", "packed"), OVERLAPPED, "distr. opt., overlap"),
    Entry("moe-mixed", "single", ("mixed", "packed")),
    Entry("moe-mixed", "pp2xep2xdp2", ("images", "padded")),
    _recompute("uniform 1", "dense", "tp2+sp", "mixed", **UNIFORM, recompute_num_layers=1),
    _recompute("uniform 2", "dense", "cp2", "packed", **UNIFORM, recompute_num_layers=2),
    _recompute("uniform 4", "moe", "tp2xep2+sp", "mixed", **UNIFORM, recompute_num_layers=4),
    _recompute("uniform 2", "dense", "pp2", "images", **UNIFORM, recompute_num_layers=2),
    _recompute("uniform 1", "dense", "pp2xvpp2", "packed", **UNIFORM, recompute_num_layers=1),
    _recompute(
        "block",
        "dense",
        "tp2xpp2+sp",
        "packed",
        recompute_granularity="full",
        recompute_method="block",
        recompute_num_layers=1,
    ),
    _recompute("selective", "dense", "cp2", "mixed", recompute_granularity="selective"),
    _recompute(
        "selective moe",
        "moe",
        "ep2xdp2",
        "packed",
        recompute_granularity="selective",
        recompute_modules=["core_attn", "moe"],
    ),
    Entry("dense", "tp2+sp", ("mixed",), {"freeze": ("vision",)}, "vision frozen"),
    Entry("dense", "cp2", ("mixed",), {"freeze": ("aligner",)}, "aligner frozen"),
    Entry("dense", "pp2", ("mixed",), {"freeze": ("language",)}, "language frozen"),
    Entry(
        "moe",
        "ep2xdp2",
        ("mixed",),
        {"freeze": (r".*\.mlp\.router", r"visual\.blocks\.1\."), "overlap": True},
        "patterns frozen, overlap",
    ),
    Entry("dense", "single", EVERY, {"dtype": "bf16"}, "bf16"),
    Entry("dense", "tp2xpp2+sp", ("mixed", "packed"), {"dtype": "bf16"}, "bf16"),
    Entry("moe-all", "single", ("mixed", "packed"), {"dtype": "bf16"}, "bf16"),
    Entry("moe-all", "tp2xep2+sp", ("mixed", "packed"), {"dtype": "bf16"}, "bf16"),
)


class Matrix:
    """Runs entries; tiny checkpoints and references are made once.

    Args:
        folder: where the checkpoints go.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._checkpoints: dict[tuple[str, str], Checkpoint] = {}

    def run(self, entry: Entry, timeout: float = 120.0) -> Report:
        """Compare one entry; fp32 entries that freeze nothing take an optimizer step too."""
        options = dict(entry.options)
        dtype = options.setdefault("dtype", "fp32")
        if dtype == "fp32":
            options.setdefault("adamw", AdamW())
        case = Case(Layout.parse(entry.layout), **options)
        checkpoint = self.checkpoint(entry.model, dtype)
        tolerances = None
        if dtype == "bf16":
            exact = self.checkpoint(entry.model)
            tolerances = half_precision_tolerances(checkpoint, exact, case, entry.batches)
        report = verify(checkpoint, case, entry.batches, tolerances=tolerances, timeout=timeout)
        report.title = f"{entry} against Hugging Face"
        return report

    def checkpoint(self, model: str, dtype: str = "fp32") -> Checkpoint:
        """The tiny checkpoint of this model, with a reference in `dtype`."""
        if (model, dtype) not in self._checkpoints:
            path = self._folder / model
            if not path.exists():
                write_tiny_checkpoint(path, **MODELS[model])
            self._checkpoints[model, dtype] = Checkpoint(path, dtype)
        return self._checkpoints[model, dtype]


def parity_matrix(
    folder: Path,
    entries: Iterable[Entry] = MATRIX,
    *,
    progress: Callable[[Entry, Report], None] = lambda entry, report: None,
) -> list[tuple[Entry, Report]]:
    """Run the matrix.

    Args:
        folder: scratch directory for tiny checkpoints.
        entries: what to run.
        progress: called after each entry.
    """
    matrix = Matrix(folder)
    results = []
    for entry in entries:
        report = matrix.run(entry)
        progress(entry, report)
        results.append((entry, report))
    return results


def markdown(results: Sequence[tuple[Entry, Report]]) -> str:
    """The table: a row for each layout, a column for each batch, and the optimizer step.

    A cell holds the worst relative errors of logits / loss / gradients in units of 1e-6.
    """
    rows = [
        "| model | layout | " + " | ".join([*EVERY, "step"]) + " |",
        "|---|---|" + "---|" * (len(EVERY) + 1),
    ]
    for entry, report in results:
        layout = entry.layout + (f", {entry.note}" if entry.note else "")
        cells = [_cell(report, batch) for batch in EVERY]
        rows.append(f"| {entry.model} | {layout} | " + " | ".join([*cells, _step(report)]) + " |")
    return "\n".join(rows) + "\n"


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
