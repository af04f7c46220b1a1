"""Sizes of a data set's samples, measured once and kept in a file, by which packs share work.

Each sample is measured before training: its tokens and patches are kept in a small file in the
cache. With it all ranks go through the same order of samples, by number.

The file is named after the data's files. For the files that records name, such as images, it holds
a stamp of their sizes and times for each sample. At the start, the stamps of unusable samples and
of some others are compared, and samples that were unusable for a reason of the moment, such as a
slow disk, are measured again. If a stamp differs, or such a sample has a size now, all samples are
measured again. A sample that contradicts its size when it is read removes the file.
"""

from __future__ import annotations

import hashlib
import io
import json
import logging
from collections.abc import Callable, Iterable, Sequence
from contextlib import redirect_stdout, suppress
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from filelock import FileLock
from megatron.energon import CrudeSample
from megatron.energon.flavors import BaseCoreDatasetFactory
from megatron.energon.flavors.webdataset.sample_loader import RawSampleData
from megatron.energon.wrappers.map_dataset import MapDataset

from mcore_qwen3vl.config import Architecture
from mcore_qwen3vl.data.indexes import cache_of, fingerprint, origin
from mcore_qwen3vl.data.readers.crude import crude_sample
from mcore_qwen3vl.data.records.media import Media
from mcore_qwen3vl.files import atomic_write
from mcore_qwen3vl.model import flops
from mcore_qwen3vl.model.flops import ALL, Trained
from mcore_qwen3vl.runtime.pool import work_in_children

log = logging.getLogger(__name__)

_CHUNK = 64  # samples that a process measures at a time, at least


_COMPARED = 1000  # usable samples, about, whose media are compared at every start


PATIENCE = 6 * 3600.0
"""Seconds that other ranks wait for the measuring rank."""


BAD, OVERLONG, EXCLUDED = "bad", "over-long", "absent"


@dataclass(frozen=True, slots=True)
class Size:
    """The sizes of a sample from which its work is computed."""

    tokens: int
    patches: int
    squared_frames: float  # sum of the squared patch counts of all frames


def uneven_works(
    architecture: Architecture, sizes: Sequence[Size], trained: Trained = ALL
) -> np.ndarray:
    """Return the FLOPs of each sample, except those of its tokens' linear layers.

    Those cost the same in every pack, since every pack is padded to `seq_length`.

    Returns:
        (samples,) float64.
    """
    rows = [(size.tokens, size.patches, size.squared_frames) for size in sizes]
    tokens, patches, squared_frames = np.array(rows, np.float64).reshape(-1, 3).T
    attention = flops.language(architecture, np.zeros_like(tokens), tokens**2, trained)
    return attention + flops.vision(architecture, patches, squared_frames, trained)


@dataclass(frozen=True)
class Unusable:
    """A sample without a size."""

    kind: str  # BAD, OVERLONG, or EXCLUDED: excluded by the data set itself
    reason: str
    shard: str
    number: int  # the sample's number in its shard
    momentary: bool = False  # whether it may have a size another time


class Sizes(Sequence[Size | Unusable]):
    """The size or the flaw of every sample of a data set, in one array and a short list.

    Attributes:
        stamps: (samples,) uint64, see :func:`stamp_of`.
    """

    def __init__(self, count: int) -> None:
        """Make room for samples, which are then added in order."""
        self._table = np.zeros((count, 3))
        self._unusable: dict[int, Unusable] = {}
        self.stamps = np.zeros(count, np.uint64)
        self._added = 0

    def add(self, measured: tuple[Size | Unusable, int]) -> None:
        """Add the size or the flaw of the next sample, and its stamp."""
        size, stamp = measured
        if isinstance(size, Size):
            self._table[self._added] = size.tokens, size.patches, size.squared_frames
        else:
            self._unusable[self._added] = size
        self.stamps[self._added] = stamp
        self._added += 1

    @classmethod
    def load(cls, file: Path) -> Sizes:
        """Read sizes that :meth:`save` wrote."""
        sizes = cls(0)
        with np.load(file, allow_pickle=False) as arrays:
            sizes._table, sizes.stamps = arrays["table"], arrays["stamps"]
            said = json.loads(arrays["unusable"].tobytes())
        sizes._unusable = {int(index): Unusable(**fields) for index, fields in said.items()}
        return sizes

    def save(self, file: Path) -> None:
        """Write the sizes to `file`, completely or not at all."""
        said = json.dumps({index: asdict(size) for index, size in self._unusable.items()})
        with atomic_write(file, remedy=None) as partial, partial.open("wb") as stream:
            unusable = np.frombuffer(said.encode(), np.uint8)
            np.savez(stream, table=self._table, stamps=self.stamps, unusable=unusable)

    @property
    def unusable(self) -> list[Unusable]:
        """The samples without a size."""
        return list(self._unusable.values())

    @property
    def momentary(self) -> list[int]:
        """The samples that may have a size another time."""
        return [index for index, flaw in self._unusable.items() if flaw.momentary]

    def replace(self, index: int, measured: tuple[Size | Unusable, int]) -> None:
        """Replace the size or the flaw of a sample, and its stamp."""
        del self._unusable[index]
        added, self._added = self._added, index
        self.add(measured)
        self._added = added

    def samples_to_compare(self) -> list[int]:
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


NOTHING = Unusable(EXCLUDED, "", "", 0)
"""The size of a sample that stands in a pack without any."""


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
        self.sizes = Sizes(0)
        self.file: Path | None = None  # which keeps the sizes
        with redirect_stdout(io.StringIO()):  # energon prints how it divides the data
            built = inner.build()
        self._load, self._readers = built.map_fn, built.dataset.join_readers
        self.count = len(self._readers[0])  # of the samples in the files, also of those not used

    def __len__(self) -> int:
        return len(self._inner)

    def read_sample(self, index: int) -> Any:
        """Return one of energon's crude samples, or None if the data set excludes it."""
        data = tuple(reader[index] for reader in self._readers)
        if data[0] is None:
            return None
        return self._load(RawSampleData(__restore_key__=("Webdataset", index), data=data))

    def build(self, worker_rotation_offset: int = 0) -> Any:
        """Build energon's data set, with stubs as its samples."""
        built = self._inner.build(worker_rotation_offset)
        built.dataset.join_readers = [_Stubs(self, self._readers[0])]
        return MapDataset(
            built.dataset,
            lambda raw: CrudeSample(raw.data[0]),
            stateless_map_fn=True,
            worker_config=built.worker_config,
        )

    def forget_sizes(self) -> None:
        """Remove the file with the sizes, so that the next start measures again."""
        if self.file is not None:
            with suppress(OSError):
                self.file.unlink(missing_ok=True)

    def as_file_store(self) -> Any:
        return self._inner.as_file_store()


class _Stubs:
    """A reader of the stubs that replace samples until they are packed; None if one is excluded."""

    def __init__(self, factory: MeasuredFactory, reader: Any) -> None:
        """Take a data set, and the reader of the samples themselves."""
        self._factory = factory
        self.runs = getattr(reader, "runs", None)

    def __getitem__(self, index: int) -> dict[str, Any] | None:
        factory = self._factory
        size, shard, number = factory.sizes[index], factory.path.name, index
        if isinstance(size, Unusable):
            if size.kind == EXCLUDED:
                return None
            shard, number = size.shard, size.number
        stub = crude_sample(factory.path, shard, index, number)
        known = {"data_set": factory.number, "index": index, "size": size}
        return {**stub, **known, "__subflavors__": factory.subflavors}


def load_or_measure_sizes(
    factory: MeasuredFactory,
    measure: Callable[[MeasuredFactory, int], tuple[Size | Unusable, int]],
    stamp: Callable[[MeasuredFactory, int], int],
    settings: str,
    processes: int,
) -> None:
    """Set the factory's sizes from the file of an earlier run, or by reading every sample once.

    The file is in the cache, if it can be written, and then `factory.file` names it.

    Args:
        measure: returns the size or the flaw of the sample with a number, and its media's stamp.
        stamp: returns the stamp alone.
        settings: what the sizes depend on besides the data.
        processes: number of processes that measure.
    """
    data, file = origin(factory.path), sizes_file_of(factory, settings)

    def read_sizes() -> Sizes | None:
        """Return the kept sizes; None if there are none, or media have changed since."""
        if not file.exists():
            return None
        sizes = Sizes.load(file)
        compared, title = (
            sizes.samples_to_compare(),
            f"comparing the media of {data} with their measurement",
        )
        now: list[int] = []
        measure_in_children(partial(stamp, factory), compared, now.append, processes, title)
        if now != sizes.stamps[compared].tolist():
            return None
        again = measure_again(sizes.momentary)
        if count := sum(isinstance(size, Size) for size, _ in again):
            log.warning(
                "%s samples of %s could not be read when they were measured, and can be now: packs "
                "are others than before", count, data,
            )  # fmt: skip
            return None
        return sizes

    def measure_all() -> Sizes:
        title = f"measuring {data}, once, to balance work"
        sizes, indices = Sizes(factory.count), range(factory.count)
        measure_in_children(partial(measure, factory), indices, sizes.add, processes, title)
        waiting = sizes.momentary
        for index, measured in zip(waiting, measure_again(waiting), strict=True):
            sizes.replace(index, measured)
        return sizes

    def measure_again(indices: Sequence[int]) -> list[tuple[Size | Unusable, int]]:
        """Measure samples that could not be read for a reason of the moment."""
        again: list[tuple[Size | Unusable, int]] = []
        title = f"measuring {len(indices)} samples of {data} again"
        if indices:
            measure_in_children(partial(measure, factory), indices, again.append, processes, title)
        return again

    try:
        if (sizes := read_sizes()) is None:
            file.parent.mkdir(parents=True, exist_ok=True)
            with FileLock(file.with_name(f"{file.name}.lock"), timeout=PATIENCE):
                if (sizes := read_sizes()) is None:  # another rank may have done it meanwhile
                    measure_all().save(file)
                    sizes = Sizes.load(file)  # as every other rank reads them
        factory.file = file
    except OSError as error:
        log.warning("the sizes of %s cannot be kept in %s: %s", data, file.parent, error)
        sizes = measure_all()
    factory.sizes = sizes


def sizes_file_of(factory: MeasuredFactory, settings: str) -> Path:
    """Return the cached file of the sizes, which depend on these settings too."""
    data = origin(factory.path)
    # "with stamps" changes the key, so that files of an earlier form, without them, are not read.
    said = f"with stamps {settings}{fingerprint(data)}"
    key = hashlib.sha256(said.encode()).hexdigest()[:16]
    return cache_of(data) / f"{data.name}.{key}.sizes"


def measure_in_children[R](
    work: Callable[[int], R],
    indices: Sequence[int],
    use: Callable[[R], object],
    processes: int,
    title: str,
) -> None:
    """Call `work` for each sample in child processes, as :func:`.work_in_children` does."""
    remedy = "or train with --no-balance, which measures nothing"
    work_in_children(
        work, indices, use, processes=processes, chunk=_CHUNK, title=title, remedy=remedy
    )
