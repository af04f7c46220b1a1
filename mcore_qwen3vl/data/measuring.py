"""Sizes of samples for balanced work, measured before training: at once, or in parts.

What is kept is what :mod:`.sizes` keeps when training measures, in the same file.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import asdict, astuple, dataclass
from itertools import accumulate
from pathlib import Path
from typing import Any

from megatron.energon import WorkerConfig

from mcore_qwen3vl.config import Architecture
from mcore_qwen3vl.data.config import DataConfig, parse_sources
from mcore_qwen3vl.data.datasets import load_sources
from mcore_qwen3vl.data.encoding.balanced import BalancedTaskEncoder
from mcore_qwen3vl.data.indexes import origin
from mcore_qwen3vl.data.parts import Parts, depends_on
from mcore_qwen3vl.data.processor import require_fitting
from mcore_qwen3vl.data.records.reading import Reading
from mcore_qwen3vl.data.sizes import (
    BAD,
    OVERLONG,
    MeasuredFactory,
    Size,
    Sizes,
    Unusable,
    measure_in_children,
    sizes_file_of,
)
from mcore_qwen3vl.errors import BadInput
from mcore_qwen3vl.model.flops import ALL
from mcore_qwen3vl.part import Part


@dataclass(frozen=True)
class Measured:
    """The sizes of one data set: how many samples, and in which file."""

    path: Path
    samples: int
    bad: int
    overlong: int
    out: Path


class Measuring:
    """The measuring of a data set, or of those of a mixture, as training would measure them."""

    def __init__(
        self,
        path: Path,
        processor: Any,
        config: DataConfig,
        architecture: Architecture,
        defaults: Reading,
    ) -> None:
        """Open the data sets; raise BadInput if one is missing or empty."""
        require_fitting(processor, architecture)
        sources = parse_sources([str(path)], defaults)
        self._path = path
        self._sources, self._processor, self._config = sources, processor, config
        self._encoder = BalancedTaskEncoder(
            *(architecture, processor, config, sources), dp_rank=0, dp_size=1, trained=ALL
        )
        self._datasets, _ = load_sources(
            sources,
            split="train",
            training=False,
            shuffle=False,
            workers=WorkerConfig(rank=0, world_size=1, num_workers=0),
            trust=config.trust_data,
        )
        factories = [MeasuredFactory(data.dataset, n) for n, data in enumerate(self._datasets)]
        self._factories = factories
        self._bounds = [0, *accumulate(factory.count for factory in factories)]

    def measure(self, processes: int) -> list[Measured]:
        """Measure all samples, unless the cache has their sizes; BadInput: it is not writable."""
        self._encoder.measure_data_sets(self._datasets, processes)
        return [self._measured(data.dataset) for data in self._datasets]

    def measure_part(self, part: Part, folder: Path, processes: int) -> tuple[Path, int]:
        """Measure the samples of one part, unless that is done; return its file and their number.

        The samples of all data sets are divided together.
        """
        parts, numbers = self._parts(folder), part.of(self._bounds[-1])
        if not parts.is_done(part):
            with parts.written(part) as write:
                title = f"measuring part {part} of {self._path}"
                measure_in_children(
                    self._measure_sample,
                    numbers,
                    lambda measured: write(_as_values(*measured)),
                    processes,
                    title,
                )
        return parts.file_of(part), len(numbers)

    def merge(self, folder: Path) -> list[Measured]:
        """Write the sizes that all parts have measured into the cache, for training."""
        values = self._parts(folder).merged()
        for factory in self._factories:
            sizes = Sizes(factory.count)
            for _ in range(factory.count):
                sizes.add(_from_values(next(values)))
            file = sizes_file_of(factory, self._encoder.settings_of(factory))
            try:
                file.parent.mkdir(parents=True, exist_ok=True)
                sizes.save(file)
            except OSError as error:
                raise _unkept(file, error) from None
            factory.sizes, factory.file = sizes, file
        return list(map(self._measured, self._factories))

    def _parts(self, folder: Path) -> Parts:
        # This reads a part of the data, which have been opened before: that refuses pipes.
        depends = depends_on(self._sources, self._processor, self._config, "train")
        return Parts(folder, "measure", self._bounds[-1], depends)

    def _measure_sample(self, number: int) -> tuple[Size | Unusable, int]:
        """Measure a sample by its number among those of all data sets."""
        which = bisect_right(self._bounds, number) - 1
        return self._encoder.measure_sample(self._factories[which], number - self._bounds[which])

    def _measured(self, factory: MeasuredFactory) -> Measured:
        data = origin(factory.path)
        if factory.file is None:
            raise _unkept(sizes_file_of(factory, self._encoder.settings_of(factory)))
        kinds = [unusable.kind for unusable in factory.sizes.unusable]
        flaws = kinds.count(BAD), kinds.count(OVERLONG)
        return Measured(data, factory.count, *flaws, factory.file)


def _as_values(size: Size | Unusable, stamp: int) -> list[Any]:
    """Return a size, or a flaw, with its stamp as plain data."""
    return [stamp, asdict(size) if isinstance(size, Unusable) else list(astuple(size))]


def _from_values(values: Sequence[Any]) -> tuple[Size | Unusable, int]:
    stamp, size = values
    return Unusable(**size) if isinstance(size, dict) else Size(*size), stamp


def _unkept(file: Path, error: OSError | None = None) -> BadInput:
    reason = f" ({error.strerror})" if error else ""
    return BadInput(
        f"{file} cannot be written{reason}. Make its folder writable, or name another cache with "
        "XDG_CACHE_HOME, as training will."
    )
