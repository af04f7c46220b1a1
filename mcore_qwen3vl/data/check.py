"""Validate a data set: every sample is read, tokenised and decoded, as training would."""

from __future__ import annotations

import io
import json
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import redirect_stdout
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from megatron.energon import WorkerConfig
from megatron.energon.dataset_config import get_dataset_from_config
from megatron.energon.metadataset import traverse_metadataset

from mcore_qwen3vl.data.config import DataConfig
from mcore_qwen3vl.data.encoding.encoder import cook, plan_sample
from mcore_qwen3vl.data.encoding.packing import best_fit
from mcore_qwen3vl.data.encoding.pixels import PixelLoader
from mcore_qwen3vl.data.encoding.planning import Plan, Planner
from mcore_qwen3vl.data.loading.index import ensure_index
from mcore_qwen3vl.data.records.bad_samples import OverlongSample, sample_id
from mcore_qwen3vl.data.records.template import Renderer
from mcore_qwen3vl.errors import BadInput
from mcore_qwen3vl.runtime.extras import require_extra


@dataclass(frozen=True)
class Flaw:
    """A sample that training would skip, and why."""

    sample: str
    reason: str


@dataclass
class DataReport:
    """What a data set holds. The lists have one entry a usable sample."""

    path: Path
    seq_length: int
    tokens: list[int] = field(default_factory=list)
    trained_tokens: list[int] = field(default_factory=list)
    patches: list[int] = field(default_factory=list)
    images: int = 0
    videos: int = 0
    bad: list[Flaw] = field(default_factory=list)
    overlong: list[Flaw] = field(default_factory=list)
    packing_efficiency: float | None = None
    """Share of packed sequences that is not padding; None when no sample is usable."""
    packed_sequences: int = 0

    @property
    def samples(self) -> int:
        """All that were read."""
        return len(self.tokens) + len(self.bad) + len(self.overlong)

    def summary(self) -> list[tuple[str, str]]:
        """Rows of a table: what, and how much."""
        rows = [
            ("samples", f"{self.samples:,}"),
            ("usable", f"{len(self.tokens):,}"),
            ("bad", f"{len(self.bad):,}"),
            (f"longer than {self.seq_length:,} tokens", f"{len(self.overlong):,}"),
            ("images", f"{self.images:,}"),
            ("videos", f"{self.videos:,}"),
        ]
        for name, values in (
            ("tokens a sample", self.tokens),
            ("trained tokens a sample", self.trained_tokens),
            ("patches a sample", self.patches),
        ):
            if values:
                low, median, high = np.percentile(values, [0, 50, 100]).astype(int)
                rows.append((name, f"{low:,} to {high:,}, median {median:,}"))
        if self.packing_efficiency is not None:
            efficiency = f"{self.packing_efficiency:.1%} in {self.packed_sequences:,} sequences"
            rows.append(("packing efficiency", efficiency))
        return rows

    def histograms(self, bins: int = 20) -> dict[str, tuple[np.ndarray, np.ndarray]]:
        """(counts (bins,), edges (bins + 1,)) of tokens, trained tokens and patches a sample."""
        measured = {
            "tokens": self.tokens,
            "trained tokens": self.trained_tokens,
            "patches": self.patches,
        }
        return {
            name: np.histogram(v, min(bins, max(v) - min(v) + 1))
            for name, v in measured.items()
            if v
        }


def check_data(
    path: Path,
    processor: Any,
    config: DataConfig,
    *,
    split: str = "train",
    decode: bool = True,
    limit: int | None = None,
) -> DataReport:
    """Read a data set once, in order.

    Args:
        path: as for the loader: JSONL, WebDataset folder or metadataset.
        processor: of ``load_processor``; its budgets are changed as `config` says.
        config: lengths, policies and budgets.
        split: part of a WebDataset or metadataset.
        decode: also decode every image and video; without, only headers are read.
        limit: stop after so many samples.

    Raises:
        BadInput: the data set is missing or empty.
    """
    config.media.apply(processor)
    renderer, planner = Renderer(processor, config.document_end), Planner(processor, config)
    pixels = PixelLoader(processor)
    report = DataReport(path, config.seq_length)
    for index, crude in enumerate(_samples(path, split)):
        if limit is not None and index >= limit:
            break
        try:
            plan = plan_sample(renderer, planner, cook(_parsed(crude)))
            if decode:
                pixels.load(plan.media)
        except OverlongSample as error:
            report.overlong.append(Flaw(sample_id(crude), str(error)))
        except Exception as error:  # as the loader does: whatever a sample raises is its flaw
            kind = "" if type(error).__module__.startswith(__package__) else type(error).__name__
            report.bad.append(Flaw(sample_id(crude), f"{kind}: {error}" if kind else str(error)))
        else:
            _record(report, plan)
    _pack(report, config)
    return report


def _samples(path: Path, split: str) -> Iterator[dict[str, Any]]:
    """Crude samples in order, JSON not parsed yet."""
    leaves: Iterable[Any] = [ensure_index(path)]
    if path.suffix in (".yaml", ".yml"):
        leaves = [leaf.path for leaf in traverse_metadataset(path.absolute(), split_part=split)]
    workers = WorkerConfig(rank=0, world_size=1, num_workers=0)
    for leaf in leaves:
        place = ensure_index(Path(str(leaf)).absolute())
        factory: Any = get_dataset_from_config(
            place,
            split_part=split,
            training=False,
            worker_config=workers,
            **({} if place.suffix == ".jsonl" else {"decoder": None}),
        )
        # Not through the factory's own loading, which parses JSON and stops at a broken line.
        factory._load_sample = factory.load_sample = lambda sample: sample
        with redirect_stdout(io.StringIO()):  # energon says how it divides the data
            dataset = factory.build()
        workers.worker_activate(0)
        try:
            yield from dataset
        finally:
            workers.worker_deactivate()


def _parsed(crude: dict[str, Any]) -> Any:
    """With its JSON parsed."""
    return {**crude, "json": json.loads(crude["json"])} if "json" in crude else crude


def _record(report: DataReport, plan: Plan) -> None:
    kinds = Counter(item.media.kind for item in plan.media)
    report.images += kinds["image"]
    report.videos += kinds["video"]
    report.tokens.append(len(plan.input_ids))
    report.trained_tokens.append(int((plan.loss_weights[1:] > 0).sum()))
    report.patches.append(sum(item.patches for item in plan.media))


def _pack(report: DataReport, config: DataConfig) -> None:
    """As the loader would: buffer by buffer."""
    size = config.packing_buffer
    for start in range(0, len(report.tokens), size):
        lengths = [config.padded(length) for length in report.tokens[start : start + size]]
        report.packed_sequences += len(best_fit(lengths, config.seq_length))
    if report.packed_sequences:
        capacity = report.packed_sequences * config.seq_length
        report.packing_efficiency = sum(report.tokens) / capacity


def plot_report(report: DataReport, png: Path) -> None:
    """Draw the histograms.

    Raises:
        BadInput: matplotlib is not installed (extra ``plots``), or there is nothing to draw.
    """
    require_extra("matplotlib", "--plot")
    from matplotlib.figure import Figure

    histograms = report.histograms()
    if not histograms:
        raise BadInput(f"{report.path} holds no usable sample, so there is nothing to draw.")
    figure = Figure(figsize=(4 * len(histograms), 3), layout="constrained")
    for axes, (name, (counts, edges)) in zip(
        np.atleast_1d(figure.subplots(1, len(histograms))), histograms.items(), strict=True
    ):
        axes.stairs(counts, edges, fill=True)
        axes.set(xlabel=f"{name} a sample", ylabel="samples")
        for axis in (axes.xaxis, axes.yaxis):
            axis.get_major_locator().set_params(integer=True)
    figure.suptitle(f"{report.path.name}: {len(report.tokens):,} usable samples")
    figure.savefig(png, dpi=150)
