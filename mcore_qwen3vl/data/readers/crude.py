"""What readers of ours share: samples in the form of energon's readers, and energon's factory."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
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


@cache
def _epath(dataset: Path) -> EPath:
    """Return energon's path of a data set, which takes longer to make than the rest of a sample."""
    return EPath(dataset)


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
        dataset_path=_epath(dataset), index=within, shard_name=shard, file_names=(f"{within}.json",)
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
    reader: Any  # a sequence of crude samples; `counts` has those of each part to read together
    training: bool  # whether to shuffle, and to start again at the end
    worker_config: WorkerConfig
    subflavors: dict[str, Any]
    shuffle_over_epochs: int | None = 1  # None: do not shuffle
    parallel_shard_iters: int = 16  # parts that a worker reads from in turn
    max_samples_per_sequence: int | None = None  # of the pieces that parts are cut into to shuffle
    subset: DatasetSubset | None = None

    def __len__(self) -> int:
        if self.subset is None:
            return len(self.reader)
        start, end = self.subset.compute_subset(len(self.reader))
        return end - start

    def build(self, worker_rotation_offset: int = 0) -> SavableDataset[CrudeSample]:
        """Build this rank's data set."""
        shards = [
            ShardInfo(name=f"{self.path.name}-{index}", path=EPath(self.path), count=count)
            for index, count in enumerate(self.reader.counts)
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
            samples, self.load_raw, stateless_map_fn=True, worker_config=self.worker_config
        )

    def load_raw(self, raw: Any) -> CrudeSample:
        """Return a reader's sample with the data set's subflavors; its JSON is parsed later."""
        return CrudeSample({**raw.data[0], "__subflavors__": self.subflavors})

    def as_file_store(self) -> Any:
        raise NotImplementedError("no data set of ours asks for files of another")
