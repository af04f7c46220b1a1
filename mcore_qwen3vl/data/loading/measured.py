"""Data sets with known sample sizes, where each rank reads only the samples that it trains on.

To balance work, every rank must know the sizes of all samples of a global batch, but read only its
own. So each sample is measured once, before training: its tokens and patches are kept in a small
file in the cache. With it all ranks go through the same order of samples, by number.

The file is named after the data's files. For the files that records name, such as images, it holds
a stamp of their sizes and times for each sample. At the start, those of samples that cannot be used
and of some others are compared, and if one differs, all samples are measured again. A sample that
contradicts its size when it is read removes the file.
"""

from __future__ import annotations

import hashlib
import json
import logging
import multiprocessing
import signal
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
from filelock import FileLock
from megatron.energon.flavors import BaseCoreDatasetFactory, CrudeSample
from megatron.energon.flavors.webdataset.sample_loader import RawSampleData
from megatron.energon.wrappers.map_dataset import MapDataset

from mcore_qwen3vl import console
from mcore_qwen3vl.data.loading.index import cache_of, fingerprint, origin
from mcore_qwen3vl.data.loading.readers import crude_sample
from mcore_qwen3vl.data.records.media import Media
from mcore_qwen3vl.errors import BadInput
from mcore_qwen3vl.files import replacing
from mcore_qwen3vl.runtime.lifetime import end_with_parent

log = logging.getLogger(__name__)

_CHUNK, _CHUNKS = 64, 10_000  # fewest samples in a chunk that a process measures; most chunks
_COMPARED = 1000  # usable samples, about, whose media are compared at every start
PATIENCE = 6 * 3600.0
"""Seconds that other ranks wait for the rank that measures."""

BAD, OVERLONG, ABSENT = "bad", "over-long", "absent"


@dataclass(frozen=True)
class Size:
    """The sizes of a sample from which its work is computed."""

    tokens: int
    patches: int
    squared_frames: float  # sum of the squared patch counts of all frames


@dataclass(frozen=True)
class Unusable:
    """A sample without a size."""

    kind: str  # BAD, OVERLONG, or ABSENT: excluded by the data set itself
    reason: str
    shard: str
    number: int  # the sample's number in its shard


class Sizes(Sequence[Size | Unusable]):
    """The size or the flaw of every sample of a data set, in one array and a short list.

    Attributes:
        stamps: (samples,) uint64, see :func:`stamp_of`.
    """

    def __init__(self, measured: Sequence[tuple[Size | Unusable, int]]) -> None:
        self._table = np.zeros((len(measured), 3))
        self._unusable = {}
        self.stamps = np.array([stamp for _, stamp in measured], np.uint64)
        for index, (size, _) in enumerate(measured):
            if isinstance(size, Size):
                self._table[index] = size.tokens, size.patches, size.squared_frames
            else:
                self._unusable[index] = size

    @classmethod
    def load(cls, file: Path) -> Sizes:
        """Read sizes that :meth:`save` wrote."""
        sizes = cls([])
        with np.load(file, allow_pickle=False) as arrays:
            sizes._table, sizes.stamps = arrays["table"], arrays["stamps"]
            said = json.loads(arrays["unusable"].tobytes())
        sizes._unusable = {int(index): Unusable(**fields) for index, fields in said.items()}
        return sizes

    def save(self, file: Path) -> None:
        """Write the sizes to `file`, completely or not at all."""
        said = json.dumps({index: asdict(size) for index, size in self._unusable.items()})
        with replacing(file) as partial, partial.open("wb") as stream:
            unusable = np.frombuffer(said.encode(), np.uint8)
            np.savez(stream, table=self._table, stamps=self.stamps, unusable=unusable)

    def doubtful(self) -> list[int]:
        """Return samples whose stamps tell whether media were replaced: all unusable, some usable.

        Samples that cannot be used are never read, so nothing else would notice a change.
        """
        spread = range(0, len(self), max(1, len(self) // _COMPARED))
        return sorted({*spread, *self._unusable})

    def __len__(self) -> int:
        return len(self._table)

    def __getitem__(self, index: int) -> Size | Unusable:  # type: ignore[override]  # no slices
        tokens, patches, squared_frames = self._table[index]
        return self._unusable.get(index) or Size(int(tokens), int(patches), float(squared_frames))


@dataclass(frozen=True)
class Measuring:
    """What is done with each crude sample in the processes that measure."""

    measure: Callable[[Any], tuple[Size | Unusable, int]]
    """Return its size or flaw, and the stamp of its media."""
    stamp: Callable[[Any], int]
    """Return the stamp alone."""


def stamp_of(media: Iterable[Media]) -> int:
    """Return a number of 64 bits that changes when a file is replaced, appears or disappears."""
    stats: list[tuple[int, int] | None] = []
    for medium in media:
        if isinstance(medium.content, tuple):
            stats.append((stamp_of(medium.content), 0))
        elif isinstance(medium.content, Path):
            try:
                stat = medium.content.stat()
                stats.append((stat.st_size, stat.st_mtime_ns))
            except OSError:
                stats.append(None)
    digest = hashlib.blake2b(repr(stats).encode(), digest_size=8).digest()
    return int.from_bytes(digest) if stats else 0


class MeasuredFactory(BaseCoreDatasetFactory[CrudeSample]):
    """A wrapper of energon's factory for one data set, whose samples are their numbers alone."""

    __sample_type__ = CrudeSample

    def __init__(self, inner: Any, number: int) -> None:
        self._inner = inner
        self.number = number
        self.subflavors = inner.subflavors
        self.path = Path(str(inner.path))
        self.sizes = Sizes([])
        self.file: Path | None = None  # which keeps the sizes
        built = inner.build()
        self._load, self._readers = built.map_fn, built.dataset.join_readers

    def __len__(self) -> int:
        return len(self._inner)

    def count(self) -> int:
        """Return the number of samples in the files, including those that are not used."""
        return len(self._readers[0])

    def read(self, index: int) -> Any:
        """Return one of energon's crude samples, or None if the data set excludes it."""
        data = tuple(reader[index] for reader in self._readers)
        if data[0] is None:
            return None
        return self._load(RawSampleData(__restore_key__=("Webdataset", index), data=data))

    def build(self, worker_rotation_offset: int = 0) -> Any:
        """Build energon's data set, with stubs as its samples."""
        built = self._inner.build(worker_rotation_offset)
        built.dataset.join_readers = [_Stubs(self)]
        return MapDataset(
            built.dataset,
            lambda raw: CrudeSample(raw.data[0]),
            stateless_map_fn=True,
            worker_config=built.worker_config,
        )

    def forget(self) -> None:
        """Remove the file with the sizes, so that the next start measures again."""
        if self.file is not None:
            with suppress(OSError):
                self.file.unlink(missing_ok=True)

    def as_file_store(self) -> Any:
        return self._inner.as_file_store()


class _Stubs:
    """A reader of the stubs that replace samples until they are packed; None if one is excluded."""

    def __init__(self, factory: MeasuredFactory) -> None:
        self._factory = factory

    @property
    def runs(self) -> Any:
        """Those of the reader of the samples themselves."""
        return getattr(self._factory._readers[0], "runs", None)

    def __len__(self) -> int:
        return len(self._factory.sizes)

    def __getitem__(self, index: int) -> dict[str, Any] | None:
        factory = self._factory
        size, shard, number = factory.sizes[index], factory.path.name, index
        if isinstance(size, Unusable):
            if size.kind == ABSENT:
                return None
            shard, number = size.shard, size.number
        stub = crude_sample(factory.path, shard, index, number)
        known = {"data_set": factory.number, "index": index, "size": size}
        return {**stub, **known, "__subflavors__": factory.subflavors}


def measure(factory: MeasuredFactory, measuring: Measuring, settings: str, processes: int) -> None:
    """Set the factory's sizes from the file of an earlier run, or by reading every sample once.

    They depend on the data and on `settings`.
    """
    data = origin(factory.path)
    said = f"with stamps {settings}{fingerprint(data)}"
    key = hashlib.sha256(said.encode()).hexdigest()[:16]
    file = cache_of(data) / f"{data.name}.{key}.sizes"
    everything = range(factory.count())

    def known() -> Sizes | None:
        if not file.exists():
            return None
        sizes = Sizes.load(file)
        compared = sizes.doubtful()
        title = f"comparing the media of {data} with their measurement"
        now = _in_children(_stamp_one, factory, measuring, compared, processes, title)
        return sizes if now == sizes.stamps[compared].tolist() else None

    def anew() -> Sizes:
        title = f"measuring {data}, once, to balance work"
        return Sizes(_in_children(_measure_one, factory, measuring, everything, processes, title))

    try:
        if (sizes := known()) is None:
            file.parent.mkdir(parents=True, exist_ok=True)
            with FileLock(file.with_name(f"{file.name}.lock"), timeout=PATIENCE):
                if (sizes := known()) is None:  # another rank may have done it meanwhile
                    anew().save(file)
                    sizes = Sizes.load(file)
        factory.file = file
    except OSError as error:
        log.warning("the sizes of %s cannot be kept in %s: %s", data, file.parent, error)
        sizes = anew()
    factory.sizes = sizes


def _in_children[R](
    work: Callable[[MeasuredFactory, Measuring, int], R],
    factory: MeasuredFactory,
    measuring: Measuring,
    indices: Sequence[int],
    processes: int,
    title: str,
) -> list[R]:
    """Return what `work` makes of samples, always in child processes.

    Readers that are opened in this process would share file positions with data workers.
    """
    step = max(_CHUNK, len(indices) // _CHUNKS)
    chunks = [indices[start : start + step] for start in range(0, len(indices), step)]
    pool = ProcessPoolExecutor(
        max(1, min(processes, len(chunks))),
        multiprocessing.get_context("fork"),
        _begin,
        (work, factory, measuring),
    )
    results: list[R] = []
    try:
        with pool, console.count_progress(title, len(indices), "samples") as show:
            for chunk in pool.map(_each, chunks):
                results += chunk
                show(len(results))
    except BrokenProcessPool:
        raise BadInput(
            f"A process that measured the samples of {origin(factory.path)} was killed, by a "
            "signal or because memory ran out. Start again, or skip the measuring with "
            "--no-balance."
        ) from None
    return results


_task: tuple[Callable[[MeasuredFactory, Measuring, int], Any], MeasuredFactory, Measuring]


def _begin(*task: Any) -> None:
    global _task
    end_with_parent()
    _task = task
    for number in (signal.SIGTERM, signal.SIGINT):  # not the rank's handlers, which finish a step
        signal.signal(number, signal.SIG_DFL)


def _each(indices: Sequence[int]) -> list[Any]:
    work, factory, measuring = _task
    return [work(factory, measuring, index) for index in indices]


def _measure_one(
    factory: MeasuredFactory, measuring: Measuring, index: int
) -> tuple[Size | Unusable, int]:
    try:
        sample = factory.read(index)
    except Exception as error:  # such as a broken line: any exception makes the sample bad
        reason = f"{type(error).__name__}: {error}"
        return Unusable(BAD, reason, factory.path.name, index), 0
    return (Unusable(ABSENT, "", "", 0), 0) if sample is None else measuring.measure(sample)


def _stamp_one(factory: MeasuredFactory, measuring: Measuring, index: int) -> int:
    try:
        sample = factory.read(index)
    except Exception:  # as above
        return 0
    return 0 if sample is None else measuring.stamp(sample)
