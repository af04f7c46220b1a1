"""What a data set holds, before it trains: a check of every sample, and its report.

The check reads, tokenises and decodes every sample, as training would. It also packs the lengths in
ways that training has, and says how even the ranks' work would be.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterable, Sequence
from dataclasses import astuple, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from mcore_qwen3vl import console
from mcore_qwen3vl.config import Architecture
from mcore_qwen3vl.console import counted
from mcore_qwen3vl.data.config import DataConfig, parse_sources
from mcore_qwen3vl.data.datasets import CrudeSamples, unread_of
from mcore_qwen3vl.data.encoding.balanced import size_of
from mcore_qwen3vl.data.encoding.packing import best_fit
from mcore_qwen3vl.data.encoding.planning import check_length
from mcore_qwen3vl.data.encoding.preparation import Preparation
from mcore_qwen3vl.data.parts import Parts, depends_on
from mcore_qwen3vl.data.places import number_of, sample_id
from mcore_qwen3vl.data.processor import require_fitting
from mcore_qwen3vl.data.record_form import DetectedForm
from mcore_qwen3vl.data.records.media import peculiarities
from mcore_qwen3vl.data.records.reading import PLAIN, OverlongSample, Reading, reason_of
from mcore_qwen3vl.data.records.video import is_uneven
from mcore_qwen3vl.data.sidecar import OpenSidecar
from mcore_qwen3vl.data.sizes import Size
from mcore_qwen3vl.data.workload import Balance, Workload, pack_by_length, pack_by_work
from mcore_qwen3vl.errors import BadInput
from mcore_qwen3vl.files import atomic_write
from mcore_qwen3vl.machine import require_extra
from mcore_qwen3vl.part import Part
from mcore_qwen3vl.runtime.pool import work_in_children
from mcore_qwen3vl.unused.fields import Unused

_BUFFERS = 4  # packing buffers of each rank that are enough to measure how even the work is
_KEYS_NAMED = 10
_UNEVEN = "videos with a variable frame rate, whose times are those of a constant one"


@dataclass(frozen=True)
class Flaw:
    """A sample that training would skip, and the reason."""

    sample: str
    reason: str


@dataclass(frozen=True)
class Left(Unused):
    """What is not used, and the samples that have it; what a model's file holds is in none."""

    samples: list[str] = field(default_factory=list)

    def __str__(self) -> str:
        said = [f"{len(self.samples):,}"] * bool(self.samples) + [self.why] * bool(self.why)
        return f"{self.name} ({': '.join(said)})" if said else self.name


@dataclass
class DataReport:
    """What a data set holds. The lists of numbers have one entry for each usable sample."""

    path: Path
    seq_length: int
    formats: dict[str, int] = field(default_factory=dict)
    """Number of well-formed records in each format."""
    tokens: list[int] = field(default_factory=list)
    trained_tokens: list[int] = field(default_factory=list)
    patches: list[int] = field(default_factory=list)
    images: int = 0
    videos: int = 0
    peculiar: dict[str, list[str]] = field(default_factory=dict)
    """By what is peculiar of a text, an image or a video: the samples that have it."""
    unused: list[Left] = field(default_factory=list)
    """What is not used of the samples, and of the model's files, which have no samples."""
    bad: list[Flaw] = field(default_factory=list)
    overlong: list[Flaw] = field(default_factory=list)
    packing_efficiency: float | None = None
    """Share of packed sequences that is not padding; None when no sample is usable."""
    packed_sequences: int = 0
    sizes: list[Size] = field(default_factory=list)
    balance: dict[str, Balance] = field(default_factory=dict)
    """Balance of the requested layout: ``by length``, and ``by work`` (``--balance``)."""

    @property
    def samples(self) -> int:
        """The number of samples that were read."""
        return len(self.tokens) + len(self.bad) + len(self.overlong)

    def totals(self) -> dict[str, int]:
        """Return the numbers of samples, and sums over the usable ones."""
        return {
            "samples": self.samples,
            "usable": len(self.tokens),
            "bad": len(self.bad),
            "overlong": len(self.overlong),
            "images": self.images,
            "videos": self.videos,
            "tokens": sum(self.tokens),
            "trained_tokens": sum(self.trained_tokens),
            "patches": sum(self.patches),
            "most_tokens": max(self.tokens, default=0),
        }

    def summary(self) -> list[tuple[str, str]]:
        """Return the rows of a table, each a name and a value."""
        rows = [
            ("format", ", ".join(f"{n} ({c:,})" for n, c in self.formats.items()) or "none"),
            ("samples", f"{self.samples:,}"),
            ("usable", f"{len(self.tokens):,}"),
            ("bad", f"{len(self.bad):,}"),
            (f"longer than {self.seq_length:,} tokens", f"{len(self.overlong):,}"),
            ("images", f"{self.images:,}"),
            ("videos", f"{self.videos:,}"),
        ]
        for what, samples in self.peculiar.items():
            rows.append((what, f"{len(samples):,}, the first in {samples[0]}"))
        places = dict.fromkeys(item.where for item in self.unused)
        rows += [(f"not used of {where}", self._unused_in_words(where)) for where in places]
        for name, values in self._numbers_by_name().items():
            low, median, high = np.percentile(values, [0, 50, 100]).astype(int)
            rows.append((f"{name} a sample", f"{low:,} to {high:,}, median {median:,}"))
        if self.packing_efficiency is not None:
            packs = counted(self.packed_sequences, "sequence")
            rows.append(("packing efficiency", f"{self.packing_efficiency:.1%} in {packs}"))
        for way, balance in self.balance.items():
            name = f"work, most over mean of the ranks, packed {way}"
            rows.append((name, f"{balance.micro_batch_step:.3f}"))
        return rows

    def _numbers_by_name(self) -> dict[str, list[int]]:
        if not self.tokens:
            return {}
        tokens, trained = self.tokens, self.trained_tokens
        return {"tokens": tokens, "trained tokens": trained, "patches": self.patches}

    def _unused_in_words(self, where: str) -> str:
        left = [item for item in self.unused if item.where == where]
        names = [str(item) for item in left[:_KEYS_NAMED]]
        more = f" and {len(left) - _KEYS_NAMED:,} more" if len(left) > _KEYS_NAMED else ""
        first = next((sample for item in left for sample in item.samples), None)
        return ", ".join(names) + more + (f", the first in {first}" if first else "")

    def histograms(self) -> dict[str, tuple[np.ndarray, np.ndarray]]:
        """Return histograms of tokens, trained tokens and patches a sample.

        Each is (counts (bins,), edges (bins + 1,)).
        """
        measured = self._numbers_by_name().items()
        return {name: np.histogram(v, min(20, max(v) - min(v) + 1)) for name, v in measured}


def check_data(
    path: Path,
    processor: Any,
    config: DataConfig,
    *,
    split: str = "train",
    decode: bool = True,
    limit: int | None = None,
    defaults: Reading = PLAIN,
    architecture: Architecture | None = None,
    unused: Sequence[Unused] = (),
    ranks: int = 1,
    micro_batches: int = 1,
    processes: int = 1,
    usable: Callable[[bytes], object] | None = None,
    merge: Path | None = None,
) -> DataReport:
    """Read a data set once, in order, and report what it holds.

    Args:
        path: a file, a directory, a metadataset or a mixture file, as for the loader.
        architecture: shape of the model, for the balance of work, the vocabulary of a sidecar and
            the sizes of patches.
        unused: what of the model's files is not used, to be reported.
        ranks: data-parallel ranks to divide the work over; 1: measure no balance.
        micro_batches: micro-batches of a rank in a step.
        processes: child processes that read; 1: this process reads. The report is the same.
        usable: called with the JSON of each record that can be used, in order.
        merge: the folder of parts that :func:`check_part` has checked, in place of reading.

    Raises:
        BadInput: the data set is missing or empty, or the processor is another model's; or parts
            are missing, doubled or different.
        Unfinished: a child process was killed.
    """
    check = Check(
        path, processor, config,
        split=split, decode=decode, limit=limit, defaults=defaults, architecture=architecture,
    )  # fmt: skip
    fold = Fold(DataReport(path, config.seq_length), [*unused, *unread_of(check.sources, split)])

    numbers = iter(check.numbers)

    def take(finding: Finding) -> None:
        number = next(numbers)
        fold.add(finding)
        if usable is not None and finding.flaw is None:
            usable(check.record(number))

    if merge is None:
        check.find_each(check.numbers, take, processes)
    else:
        for values in check.parts(merge).merged():
            take(Finding.from_values(values))
    return fold.finish(config, architecture, ranks, micro_batches)


def check_part(check: Check, part: Part, folder: Path, processes: int) -> tuple[Path, int]:
    """Check one part of a data set, for :func:`check_data` to merge, unless that is done already.

    Args:
        folder: for the parts' results.
        processes: as in :func:`check_data`.

    Returns:
        The file with the part's result, and the number of its samples.

    Raises:
        BadInput, Unfinished: those of :func:`check_data`; or `folder` cannot be written.
    """
    parts, numbers = check.parts(folder), part.of(len(check.numbers))
    if not parts.is_done(part):
        with parts.written(part) as write:
            check.find_each(
                check.numbers[numbers.start : numbers.stop],
                lambda finding: write(finding.values()),
                processes,
            )
    return parts.file_of(part), len(numbers)


@dataclass(frozen=True, slots=True)
class Finding:
    """What a check found in one sample; the two sequences of a pair are added up."""

    sample: str
    format: str | None = None
    """Format of a well-formed record."""
    flaw: str | None = None
    """Why training would skip the sample; what follows is then empty."""
    overlong: bool = False
    """Whether its length is the flaw."""
    size: Size | None = None
    trained: int = 0
    images: int = 0
    videos: int = 0
    peculiar: Sequence[tuple[str, str]] = ()
    """What is peculiar, and where."""
    unused: Sequence[Unused] = ()

    def values(self) -> list[Any]:
        """Return the fields as plain data; :meth:`from_values` makes a finding of them again."""
        return list(astuple(self))

    @classmethod
    def from_values(cls, values: Sequence[Any]) -> Finding:
        """Make it from its fields as plain data."""
        sample, form, flaw, overlong, size, trained, images, videos, peculiar, unused = values
        counts = trained, images, videos
        left = [Unused(*item) for item in unused]
        return cls(sample, form, flaw, overlong, size and Size(*size), *counts, peculiar, left)


_CHUNK = 8  # samples that a process checks at a time, at least: one may be a long video


class Check:
    """Reads samples of a data set by their number, as training would, and says what is found."""

    def __init__(
        self,
        path: Path,
        processor: Any,
        config: DataConfig,
        *,
        split: str,
        decode: bool,
        limit: int | None,
        defaults: Reading,
        architecture: Architecture | None,
    ) -> None:
        """Open a data set, see :func:`check_data`."""
        if architecture is not None:
            require_fitting(processor, architecture)
        self.sources = sources = parse_sources([str(path)], defaults)
        self._preparation = Preparation(processor, config, sources)
        self._path, self._config, self._split, self._decode = path, config, split, decode
        self._processor, self._limit = processor, limit
        self._open()
        self.numbers = range(len(self._samples))[:limit]
        """The numbers of the samples that are checked."""
        vocab_size = 0 if architecture is None else architecture.vocab_size
        self._sidecars: Sequence[OpenSidecar] = ()
        if config.sidecar is not None:
            paths = [source.path for source in sources]
            self._sidecars = config.sidecar.open(paths, processor.tokenizer, vocab_size)

    def _open(self) -> None:
        trust = self._config.trust_data
        self._samples = CrudeSamples(self.sources, split=self._split, trust=trust)
        self._opened_by = os.getpid()

    def parts(self, folder: Path) -> Parts:
        """Return the parts of this check whose results are in a folder.

        This reads a part of the data, which have been opened before: that refuses pipes.
        """
        depends = depends_on(self.sources, self._processor, self._config, self._split)
        depends |= {"--no-decode": not self._decode, "--limit": self._limit}
        return Parts(folder, "check", len(self.numbers), depends)

    def record(self, number: int) -> bytes:
        """Return the JSON of a sample that can be used, of a ``.jsonl`` or ``.json`` file."""
        text: bytes = self._samples[number]["json"]
        return text

    def find_each(
        self, numbers: Sequence[int], take: Callable[[Finding], object], processes: int
    ) -> None:
        """Call `take` with what is found in each of these samples, in order."""
        title = f"checking {self._path}"
        if processes > 1:
            remedy = "with fewer --workers"
            work_in_children(
                *(self.find, numbers, take),
                processes=processes, chunk=_CHUNK, title=title, remedy=remedy,
            )  # fmt: skip
            return
        with console.count_progress(title, len(numbers), "samples") as show:
            for done, number in enumerate(numbers, 1):
                take(self.find(number))
                show(done)

    def find(self, number: int) -> Finding:
        """Return what is found in a sample; BadInput says that its file is damaged."""
        if self._opened_by != os.getpid():  # forks of a process share the positions of its files
            self._open()
        crude = self._samples[number]
        sample, form = sample_id(crude), None
        try:
            raw = self._preparation.raw(crude)
            records = self._config.records or DetectedForm()
            parts = self._preparation.parse_each(raw, records)
            form = next(iter(parts.values())).format
            named = {name: self._preparation.plan(raw, part) for name, part in parts.items()}
            records.require_trainable(named)
            plans = list(named.values())
            check_length(self._config, plans)
            if self._sidecars:
                self._sidecars[raw.source].look_up(number_of(crude), plans)
            if self._decode:
                for plan in plans:
                    self._preparation.load_pixels(plan, raw.source)
            media = [item.media for plan in plans for item in plan.media]
            uneven = self._decode and any(is_uneven(m) for m in media if m.kind == "video")
        except OverlongSample as error:
            return Finding(sample, form, str(error), overlong=True)
        except Exception as error:  # as in the loader, any exception makes the sample bad
            return Finding(sample, form, reason_of(error))
        images = [medium for medium in media if medium.kind == "image"]
        peculiar = [(f"images {what}", sample) for m in images for what in peculiarities(m)]
        for token, place in dict.fromkeys(pair for plan in plans for pair in plan.spelt):
            what = f"texts that spell {token}, which is then the token"
            peculiar.append((what, f"{sample}, {place}"))
        sizes = [astuple(size_of(plan)) for plan in plans]
        return Finding(
            sample,
            form,
            size=Size(*(sum(part) for part in zip(*sizes, strict=True))),
            trained=sum(plan.trained_tokens for plan in plans),
            images=len(images),
            videos=len(media) - len(images),
            peculiar=peculiar + [(_UNEVEN, sample)] * uneven,
            unused=list(dict.fromkeys(item for plan in plans for item in plan.unused)),
        )


class Fold:
    """A report to which what is found in samples is added, in their order."""

    def __init__(self, report: DataReport, unused: Iterable[Unused]) -> None:
        """Begin a report with what is not used of the model's files and beside the data."""
        self._report = report
        report.unused = [Left(item.where, item.name, item.why) for item in unused]
        # What is not used is found again here, and not among thousands in the report.
        self._known = {(item.where, item.name, item.why): item for item in report.unused}

    def add(self, finding: Finding) -> None:
        """Add what was found in one sample."""
        report, sample = self._report, finding.sample
        if finding.format is not None:
            report.formats[finding.format] = report.formats.get(finding.format, 0) + 1
        if finding.flaw is not None:
            flaws = report.overlong if finding.overlong else report.bad
            flaws.append(Flaw(sample, finding.flaw))
            return
        assert finding.size is not None, "a sample without a flaw has a size"
        report.images += finding.images
        report.videos += finding.videos
        report.sizes.append(finding.size)
        report.tokens.append(finding.size.tokens)
        report.trained_tokens.append(finding.trained)
        report.patches.append(finding.size.patches)
        for what, place in finding.peculiar:
            report.peculiar.setdefault(what, []).append(place)
        for item in finding.unused:
            said = item.where, item.name, item.why
            if said not in self._known:
                report.unused.append(left := Left(*said))
                self._known[said] = left
            self._known[said].samples.append(sample)

    def finish(
        self,
        config: DataConfig,
        architecture: Architecture | None = None,
        ranks: int = 1,
        micro_batches: int = 1,
    ) -> DataReport:
        """Return the report, with how full the packs are and how even the ranks' work is."""
        report = self._report
        _measure_packing(report, config)
        if architecture is not None and ranks > 1 and report.sizes:
            balance = _measure_balance(report, config, architecture, ranks, micro_batches)
            report.balance = balance
        return report


def _measure_packing(report: DataReport, config: DataConfig) -> None:
    """Pack the samples in their order, buffer by buffer, and note how full the sequences are."""
    size = config.buffer
    for start in range(0, len(report.tokens), size):
        lengths = [config.padded(length) for length in report.tokens[start : start + size]]
        report.packed_sequences += len(best_fit(lengths, config.seq_length))
    if report.packed_sequences:
        capacity = report.packed_sequences * config.seq_length
        report.packing_efficiency = sum(report.tokens) / capacity


def _measure_balance(
    report: DataReport,
    config: DataConfig,
    architecture: Architecture,
    ranks: int,
    micro_batches: int,
) -> dict[str, Balance]:
    """Return how even the ranks' work is with each way of packing, by its name.

    The shuffled data are divided over ranks as the loaders do, a small data set repeatedly.
    """
    random = np.random.default_rng(0)
    count = len(report.sizes)
    epochs = math.ceil(_BUFFERS * ranks * config.buffer / count)
    sizes = [report.sizes[i] for _ in range(epochs) for i in random.permutation(count)]
    load = Workload(architecture, sizes, config.seq_length)
    layout = config.seq_length, ranks, config.buffer
    ways = {
        "by length": pack_by_length(load.lengths, *layout),
        "by work": pack_by_work(load.lengths, load.extra, *layout, micro_batches),
    }
    return {way: load.balance(list(rows), micro_batches) for way, rows in ways.items()}


def plot_report(report: DataReport, png: Path) -> None:
    """Draw the histograms into `png`.

    Raises:
        BadInput: matplotlib is not installed (extra ``plots``), there is nothing to draw, or `png`
            cannot be written.
    """
    require_extra("matplotlib", "--plot")
    from matplotlib.figure import Figure

    histograms = report.histograms()
    if not histograms:
        raise BadInput(f"{report.path} holds no usable sample, so there is nothing to draw.")
    columns = len(histograms) + bool(report.balance)
    figure = Figure(figsize=(4 * columns, 3), layout="constrained")
    places = np.atleast_1d(figure.subplots(1, columns))
    if report.balance:
        _draw_balance(places[-1], report.balance)
    for axes, (name, (counts, edges)) in zip(places, histograms.items(), strict=False):
        axes.stairs(counts, edges, fill=True)
        axes.set(xlabel=f"{name} a sample", ylabel="samples")
        for axis in (axes.xaxis, axes.yaxis):
            axis.get_major_locator().set_params(integer=True)
    figure.suptitle(f"{report.path.name}: {len(report.tokens):,} usable samples")
    with atomic_write(png, "Choose another --plot.") as partial:
        figure.savefig(partial, dpi=150, format=png.suffix.lstrip(".") or "png")


def _draw_balance(axes: Any, balance: dict[str, Balance]) -> None:
    """Draw how many packs have how much work; a row takes as long as its largest pack."""
    packs = np.concatenate([result.packs for result in balance.values()])
    edges = np.histogram_bin_edges(packs, 40)
    for way, result in balance.items():
        counts, _ = np.histogram(result.packs, edges)
        label = f"{way}: {result.micro_batch_step:.3f}"
        axes.stairs(counts / len(result.packs), edges, label=label)
    axes.set(xlabel="work of a pack / mean", ylabel="share of packs")
    axes.legend(fontsize="small")
