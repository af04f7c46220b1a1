"""Data sets with known sample sizes, where each rank reads only the samples that it trains on.

To balance work, every rank must know the sizes of all samples of a global batch, but read only its
own. So each sample is measured once, before training: its tokens and patches are kept in a small
file in the cache. With it all ranks go through the same order of samples, by number.
"""

from __future__ import annotations

import hashlib
import json
import logging
import multiprocessing
import signal
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
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
from mcore_qwen3vl.errors import BadInput
from mcore_qwen3vl.files import replacing
from mcore_qwen3vl.runtime.lifetime import end_with_parent

log = logging.getLogger(__name__)

_CHUNK, _CHUNKS = 64, 10_000  # fewest samples in a chunk that a process measures; most chunks
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
    """The size or the flaw of every sample of a data set, in one array and a short list."""

    def __init__(self, sizes: Sequence[Size | Unusable]) -> None:
        self._table = np.zeros((len(sizes), 3))
        self._unusable = {}
        for index, size in enumerate(sizes):
            if isinstance(size, Size):
                self._table[index] = size.tokens, size.patches, size.squared_frames
            else:
                self._unusable[index] = size

    @classmethod
    def load(cls, file: Path) -> Sizes:
        """Read sizes that :meth:`save` wrote."""
        sizes = cls([])
        with np.load(file, allow_pickle=False) as arrays:
            sizes._table, said = arrays["table"], json.loads(arrays["unusable"].tobytes())
        sizes._unusable = {int(index): Unusable(**fields) for index, fields in said.items()}
        return sizes

    def save(self, file: Path) -> None:
        """Write the sizes to `file`, completely or not at all."""
        said = json.dumps({index: asdict(size) for index, size in self._unusable.items()})
        with replacing(file) as partial, partial.open("wb") as stream:
            unusable = np.frombuffer(said.encode(), np.uint8)
            np.savez(stream, table=self._table, unusable=unusable)

    def __len__(self) -> int:
        return len(self._table)

    def __getitem__(self, index: int) -> Size | Unusable:  # type: ignore[override]  # no slices
        tokens, patches, squared_frames = self._table[index]
        return self._unusable.get(index) or Size(int(tokens), int(patches), float(squared_frames))


Measuring = Callable[[Any], Size | Unusable]


class MeasuredFactory(BaseCoreDatasetFactory[CrudeSample]):
    """A wrapper of energon's factory for one data set, whose samples are their numbers alone."""

    __sample_type__ = CrudeSample

    def __init__(self, inner: Any, number: int) -> None:
        self._inner = inner
        self.number = number
        self.subflavors = inner.subflavors
        self.path = Path(str(inner.path))
        self.sizes: Sequence[Size | Unusable] = ()
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
        own = {"data_set": factory.number, "index": index, "size": size}
        return {**stub, **own, "__subflavors__": factory.subflavors}


def measure(factory: MeasuredFactory, measuring: Measuring, settings: str, processes: int) -> None:
    """Set the factory's sizes from the file of an earlier run, or by reading every sample once.

    They depend on the data and on `settings`.
    """
    data = origin(factory.path)
    key = hashlib.sha256((settings + fingerprint(data)).encode()).hexdigest()[:16]
    file = cache_of(data) / f"{data.name}.{key}.sizes"
    try:
        if not file.exists():
            file.parent.mkdir(parents=True, exist_ok=True)
            with FileLock(file.with_name(f"{file.name}.lock"), timeout=PATIENCE):
                if not file.exists():  # another rank may have done it meanwhile
                    Sizes(_measured(factory, measuring, processes)).save(file)
    except OSError as error:
        log.warning("the sizes of %s cannot be kept in %s: %s", data, file.parent, error)
        factory.sizes = Sizes(_measured(factory, measuring, processes))
    else:
        factory.sizes = Sizes.load(file)


def _measured(
    factory: MeasuredFactory, measuring: Measuring, processes: int
) -> list[Size | Unusable]:
    """Measure all samples, always in child processes.

    Readers that are opened in this process would share file positions with data workers.
    """
    count, path = factory.count(), origin(factory.path)
    starts = range(0, count, max(_CHUNK, count // _CHUNKS))
    pool = ProcessPoolExecutor(
        max(1, min(processes, len(starts))),
        multiprocessing.get_context("fork"),
        _begin,
        (factory, measuring, starts.step),
    )
    title = f"measuring {path}, once, to balance work"
    sizes: list[Size | Unusable] = []
    try:
        with pool, console.count_progress(title, count, "samples") as show:
            for chunk in pool.map(_measure_chunk, starts):
                sizes += chunk
                show(len(sizes))
    except BrokenProcessPool:
        raise BadInput(
            f"A process that measured the samples of {path} was killed, by a signal or because "
            "memory ran out. Start again, or skip the measuring with --no-balance."
        ) from None
    return sizes


_task: tuple[MeasuredFactory, Measuring, int]


def _begin(*task: Any) -> None:
    global _task
    end_with_parent()
    _task = task
    for number in (signal.SIGTERM, signal.SIGINT):  # not the rank's handlers, which finish a step
        signal.signal(number, signal.SIG_DFL)


def _measure_chunk(start: int) -> list[Size | Unusable]:
    factory, measuring, step = _task
    stop = min(start + step, factory.count())
    return [_measure_one(factory, measuring, index) for index in range(start, stop)]


def _measure_one(factory: MeasuredFactory, measuring: Measuring, index: int) -> Size | Unusable:
    try:
        sample = factory.read(index)
    except Exception as error:  # such as a broken line: any exception makes the sample bad
        return Unusable(BAD, f"{type(error).__name__}: {error}", factory.path.name, index)
    if sample is None:
        return Unusable(ABSENT, "", "", 0)
    return measuring(sample)
