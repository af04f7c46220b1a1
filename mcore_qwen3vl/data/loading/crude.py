"""An energon data set over one of our readers, which give records by their number.

Energon shards, shuffles, blends and resumes it like its own JSONL and WebDataset.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatron.energon import WorkerConfig
from megatron.energon.epathlib import EPath
from megatron.energon.flavors import BaseCoreDatasetFactory, CrudeSample, SavableDataset
from megatron.energon.flavors.webdataset.sample_loader import WebdatasetSampleLoaderDataset
from megatron.energon.flavors.webdataset.sharder import Sharder
from megatron.energon.flavors.webdataset.structs import DatasetSubset, ShardInfo
from megatron.energon.source_info import SourceInfo
from megatron.energon.wrappers.map_dataset import MapDataset

from mcore_qwen3vl.files import parse_json


def crude_sample(
    dataset: Path, shard: str, index: int, within: int, record: bytes | Mapping[str, Any] = b""
) -> dict[str, Any]:
    """Make a sample in the form of energon's readers.

    Args:
        index: the sample's number in the data set, by which energon finds it again.
        within: the sample's number in the file, for messages.
        record: the record as JSON text, or parsed; empty if it is not read yet.
    """
    source = SourceInfo(
        dataset_path=EPath(dataset), index=within, shard_name=shard, file_names=(f"{within}.json",)
    )
    return {
        "__key__": str(index),
        "__shard__": shard,
        "__restore_key__": ("Webdataset", index),
        "__sources__": (source,),
        "json": record,
    }


@dataclass(eq=False)
class CrudeFactory(BaseCoreDatasetFactory[CrudeSample], Sharder):
    """Energon's factory over a reader; its options are those of energon's own factories."""

    __sample_type__ = CrudeSample

    path: Path
    reader: Any  # a sequence of crude samples
    counts: Sequence[int]  # of samples in each run that is best read together: a row group
    training: bool  # whether to shuffle, and to start again at the end
    worker_config: WorkerConfig
    subflavors: dict[str, Any]
    shuffle_over_epochs: int | None = 1  # None: do not shuffle
    parallel_shard_iters: int = 16  # runs that a worker reads from in turn
    max_samples_per_sequence: int | None = None  # of the pieces that runs are cut into to shuffle
    subset: DatasetSubset | None = None

    def __post_init__(self) -> None:
        self.paths = [EPath(self.path)]
        self.name = self.path.name

    def __len__(self) -> int:
        if self.subset is None:
            return len(self.reader)
        start, end = self.subset.compute_subset(len(self.reader))
        return end - start

    def build(self, worker_rotation_offset: int = 0) -> SavableDataset[CrudeSample]:
        """Build this rank's data set."""
        shards = [
            ShardInfo(name=f"{self.name}-{index}", path=EPath(self.path), count=count)
            for index, count in enumerate(self.counts)
        ]
        offsets = self.shard_workers(
            shards,
            worker_config=self.worker_config,
            max_samples_per_sequence=self.max_samples_per_sequence,
            rotation_offset=worker_rotation_offset,
            subset=self.subset,
        )
        samples = WebdatasetSampleLoaderDataset(
            join_readers=[self.reader],
            workers_sample_slice_offsets=offsets,
            worker_config=self.worker_config,
            shuffle_over_epochs=self.shuffle_over_epochs if self.training else None,
            parallel_slice_iters=self.parallel_shard_iters if self.training else 1,
        )
        return MapDataset(
            samples,
            self.load_raw,
            stateless_map_fn=True,
            map_fn_config=self.config,
            worker_config=self.worker_config,
        )

    def load_raw(self, raw: Any) -> CrudeSample:
        """Return a reader's sample with its JSON parsed and with the data set's subflavors."""
        sample = raw.data[0]
        record = sample["json"]
        if isinstance(record, bytes):
            record = parse_json(record)
        return CrudeSample({**sample, "json": record, "__subflavors__": self.subflavors})

    def config(self) -> dict[str, Any]:
        return {
            "type": type(self).__qualname__,
            "training": self.training,
            "_path": str(self.path),
            "count": len(self.reader),
            "shuffle_over_epochs": self.shuffle_over_epochs,
            "parallel_shard_iters": self.parallel_shard_iters,
            "max_samples_per_sequence": self.max_samples_per_sequence,
            "subset": self.subset.config() if self.subset else None,
            "subflavors": self.subflavors,
        }

    def as_file_store(self) -> Any:
        raise NotImplementedError("no data set of ours asks for files of another")
