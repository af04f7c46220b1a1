"""Energon's data sets, made from the sources that the user named."""

from __future__ import annotations

import io
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, redirect_stdout
from pathlib import Path
from typing import Any, BinaryIO
from unittest import mock

import yaml
from megatron.energon import WorkerConfig, dataset_config
from megatron.energon.eyaml import load_yaml
from megatron.energon.flavors import BaseWebdatasetFactory
from megatron.energon.flavors.jsonl.crude_jsonl_dataset import (
    CrudeJsonlDatasetFactory,
    DefaultCrudeJsonlDatasetFactory,
)
from megatron.energon.flavors.webdataset.sample_loader import RawSampleData
from megatron.energon.flavors.webdataset.structs import DatasetSubset
from megatron.energon.metadataset import load_dataset, traverse_metadataset
from megatron.energon.metadataset.loader_interface import DatasetBlendMode, LoadedDataset
from torch.utils.data import ConcatDataset, Dataset

from mcore_qwen3vl.data.config import Source
from mcore_qwen3vl.data.indexes import ensure_index, index_beside, origin, tars_of_splits
from mcore_qwen3vl.data.readers.crude import CrudeFactory
from mcore_qwen3vl.data.readers.json_arrays import JsonReader, index_of
from mcore_qwen3vl.data.readers.tables import TableReader, is_table
from mcore_qwen3vl.data.records.hooks import preprocess_record
from mcore_qwen3vl.data.records.tasks import labels_in
from mcore_qwen3vl.data.unread import unread_files
from mcore_qwen3vl.errors import BadInput
from mcore_qwen3vl.files import files_below
from mcore_qwen3vl.json_and_yaml import parse_json, require_spelled_out
from mcore_qwen3vl.labels import Labels
from mcore_qwen3vl.unused.fields import Unused

SOURCE = "source"
"""The key in a sample's subflavors that holds the number of its source."""

_RUN_LENGTH = 100  # consecutive samples that are read together when data are shuffled
_OPEN_GROUPS = 4  # row groups of a table that a worker reads from in turn
_MOST_LABELS = 100_000  # a head of more labels is rather a record with an id in the wrong key
_OWN_MODULE = "megatron.energon"
_PYTHON_FILES = ("sample_loader", "part_filter")
"""Settings of a WebDataset that can name a function in a Python file beside it."""


def load_sources(
    sources: Sequence[Source],
    *,
    split: str,
    training: bool,
    shuffle: bool,
    workers: WorkerConfig,
    trust: bool,
) -> tuple[list[LoadedDataset], DatasetBlendMode]:
    """Make energon's data sets of all sources; return them and how they are blended.

    In `training` they repeat without end. BadInput is raised if one is missing, empty or malformed,
    or names code without `trust`.
    """
    with refuse_code(unless=trust):
        loaded = [
            _load_source(number, source, split, training, shuffle, workers)
            for number, source in enumerate(sources)
        ]
    if len(loaded) == 1 and sources[0].epochs is None:
        return loaded[0]
    epochs = sources[0].epochs is not None
    mode = DatasetBlendMode.SAMPLE_REPETITIONS if epochs else DatasetBlendMode.DATASET_WEIGHT
    total = sum(source.weight for source in sources)
    datasets = []
    for source, (leaves, inner) in zip(sources, loaded, strict=True):
        if inner not in (DatasetBlendMode.NONE, mode):
            raise BadInput(
                f"{source.path} blends by {inner.value}, but the other data sets by "
                f"{mode.value}, and energon cannot mix the two. Give all of them weights, or "
                "all of them epochs."
            )
        for leaf in leaves:
            if epochs:
                leaf.repetitions = (leaf.repetitions or 1) * (source.epochs or 1)
            else:
                share = 1.0 if leaf.weight is None else leaf.weight
                leaf.weight = share * source.weight / total
            datasets.append(leaf)
    return datasets, mode


def _load_source(
    number: int, source: Source, split: str, training: bool, shuffle: bool, workers: WorkerConfig
) -> tuple[list[LoadedDataset], DatasetBlendMode]:
    """Make energon's data sets of one source, several for a metadataset; return their blend too."""
    path = source.path.absolute()
    place = ensure_index(path)  # what energon reads: the path, or its stand-in in the cache
    is_metadataset = place.suffix in (".yaml", ".yml")
    if is_metadataset and source.max_samples is not None:
        raise BadInput(
            f"max_samples is {source.max_samples} for {path}, but an energon metadataset blends "
            "data sets, and which of their samples are the first is not defined. Leave max_samples "
            "out, and limit each of its data sets there, by subset: {range: [0, N]}; or name "
            "them in the mixture file, each with a max_samples of its own."
        )
    options: dict[str, Any] = {
        "training": training,
        "worker_config": workers,
        "subflavors": {SOURCE: number},
    }
    if shuffle:
        options["max_samples_per_sequence"] = _RUN_LENGTH
    elif training:
        # Without shuffling, training reads one shard at a time, to keep the order.
        options["parallel_shard_iters"] = 1
    reader: Any = None  # of ours, if energon cannot read the data
    if path.suffix == ".json":
        reader = JsonReader(path, index_of(place))
    elif is_table(path):
        reader = TableReader(path, split)
        options |= {"max_samples_per_sequence": None}  # a row group is read in one go
        # Unless it is set above, to keep the order.
        options.setdefault("parallel_shard_iters", _OPEN_GROUPS)
    if reader is not None:
        factory = CrudeFactory(path, reader, shuffle_over_epochs=1 if shuffle else None, **options)
        datasets, mode = [LoadedDataset(dataset=factory)], DatasetBlendMode.NONE
    else:
        with _name_malformed(path):
            if is_metadataset:
                _index_leaves(path)
            loaded = load_dataset(place).get_datasets(
                split_part=_split_or_train(place, split),
                shuffle_over_epochs_multiplier=1 if shuffle else None,
                # WebDataset parts stay bytes; JSONL has no decoder
                **({} if place.suffix == ".jsonl" else {"decoder": None}),
                **options,
            )
        datasets, mode = loaded.datasets, loaded.blend_mode
        for each in datasets:
            if isinstance(each.dataset, DefaultCrudeJsonlDatasetFactory):
                _leave_unparsed(each.dataset)
    if source.max_samples is not None:
        whole: Any = datasets[0].dataset
        if source.max_samples < len(whole):  # energon refuses a subset that is longer
            whole.subset = DatasetSubset(absolute_range=(0, source.max_samples))
    return datasets, mode


def _leave_unparsed(factory: Any) -> None:
    """Let lines of JSONL stay bytes, which are then parsed as those of every other format."""

    def load_sample(sample: Any) -> Any:
        sample["__subflavors__"] = factory.subflavors
        return CrudeJsonlDatasetFactory._load_sample(factory, sample)

    factory._load_sample = load_sample


_MALFORMED = (
    *(AssertionError, AttributeError, LookupError, RecursionError, TypeError, ValueError),
    yaml.YAMLError,
)
"""What energon raises for settings of other types, or that contain themselves."""


@contextmanager
def _name_malformed(path: Path) -> Iterator[None]:
    """Raise BadInput, which names the data set, where energon cannot make one of its settings."""
    try:
        yield
    except _MALFORMED as error:
        reason = f"{type(error).__name__}: {' '.join(str(error).split())}"
        raise BadInput(
            f"{path} is no data set that energon can read ({reason:.300}). Correct the "
            "metadataset, or the files in the folder .nv-meta; a WebDataset without that folder is "
            "indexed here."
        ) from error


def unread_of(sources: Sequence[Source], split: str) -> list[Unused]:
    """Return what nothing reads in the folders of data sets, and the shards that they lack."""
    folders = dict.fromkeys(source.path for source in sources)
    return [item for folder in folders for item in unread_files(folder, split)]


def are_numbered(datasets: Sequence[LoadedDataset]) -> bool:
    """Return whether any record can be read alone: those of tars are read shard by shard."""
    return not any(isinstance(dataset.dataset, BaseWebdatasetFactory) for dataset in datasets)


def is_of_tars(path: Path) -> bool:
    """Return whether a path names a folder of tars, whose records have no number."""
    return path.is_dir() and next(files_below(path, (".tar",)), None) is not None


def _index_leaves(path: Path) -> None:
    """Index a metadataset's data sets beside them, where energon opens all splits."""
    content = require_spelled_out(yaml.safe_load(path.read_text(encoding="utf-8")))
    for split in content.get("splits", {}):
        try:
            leaves = list(traverse_metadataset(path, split_part=split))
        except NotImplementedError:  # energon traverses all but these
            raise BadInput(
                f"{path} joins WebDatasets (join:), which cannot be read here. Write each record "
                "and its media into one WebDataset, as members of one name."
            ) from None
        for leaf in leaves:
            place = Path(str(leaf.path))
            if is_table(place) or place.suffix == ".json":
                raise BadInput(
                    f"{path} is an energon metadataset, which can name JSONL files and WebDatasets "
                    f"only, not {place}. Name the data sets in a mixture file (datasets:) instead."
                )
            try:
                index_beside(place)
            except OSError as error:
                raise BadInput(
                    f"{path} is an energon metadataset, and energon looks for the index of {place} "
                    f"beside it, where it cannot be written ({error.strerror}). Name the data sets "
                    "in a mixture file (datasets:) instead: their indexes are kept in the cache."
                ) from error


def _split_or_train(path: Path, split: str) -> str:
    """Return `split`, or `train` if a folder of tars has no such part, as after our indexing."""
    listed = tars_of_splits(path)
    return split if listed is None or listed.get(split) else "train"


class NumberedSamples(Dataset[Any]):
    """The samples of one data set that are used, by their number."""

    def __init__(self, factory: Any) -> None:
        """Take a data set of energon's, whose factory must have been made for a single worker."""
        with redirect_stdout(io.StringIO()):  # energon prints how it divides the data
            built = factory.build()
        samples = built.dataset
        self._readers = samples.join_readers
        self.crude: Callable[[RawSampleData], Any] = built.map_fn
        """Makes energon's crude sample of a raw one; any exception means that the record is bad."""
        # For one worker, its only slice runs from offsets[0] to offsets[-1]. Excluded samples read
        # as None.
        offsets = samples.workers_slice_offsets[0]
        self.first = offsets[0]
        """The number of the first sample in the files."""
        self.runs = getattr(self._readers[0], "runs", None)
        """Rows that are best read together, if there are any; see :class:`TableReader`."""
        self._numbers: Sequence[int] = range(offsets[0], offsets[-1])
        if getattr(factory, "sample_excludes", None):
            self._numbers = [n for n in self._numbers if self._readers[0][n] is not None]
        self._subflavors = factory.subflavors
        self.source: int = factory.subflavors[SOURCE]
        """The number of its source."""
        self.path = origin(Path(str(factory.path)))

    def __len__(self) -> int:
        return len(self._numbers)

    def __getitem__(self, place: int) -> dict[str, Any]:
        return {**self.raw(place).data[0], "__subflavors__": self._subflavors}

    def raw(self, place: int) -> RawSampleData:
        """Read a sample, for :attr:`crude` to parse; raise BadInput if its file is damaged."""
        number = self._numbers[place]
        try:
            data = tuple(reader[number] for reader in self._readers)
        except Exception as error:  # readers of tars and tables raise many types
            raise BadInput(
                f"Record {number + 1} of {self.path} cannot be read: {error}. The file is "
                "damaged: write it again."
            ) from error
        return RawSampleData(__restore_key__=("Webdataset", number), data=data)


class CrudeSamples(ConcatDataset[Any]):
    """All samples of data sets in order, each once; JSON that may be malformed is not parsed.

    A sample is read by its number, from 0. ``BadInput`` says that its file is damaged.
    """

    def __init__(self, sources: Sequence[Source], *, split: str, trust: bool) -> None:
        """Open the data sets."""
        workers = WorkerConfig(rank=0, world_size=1, num_workers=0)
        datasets, _ = load_sources(
            sources, split=split, training=False, shuffle=False, workers=workers, trust=trust
        )
        data_sets = [NumberedSamples(dataset.dataset) for dataset in datasets]
        super().__init__(data_sets)
        self.paths = [samples.path for samples in data_sets]
        """The paths of the data sets, including those of a metadataset."""

    def __iter__(self) -> Iterator[Any]:
        return (self[number] for number in range(len(self)))


def collect_labels(sources: Sequence[Source], *, trust: bool) -> Labels:
    """Return the labels of all records: names in alphabetical order, or numbers up to the largest.

    Records that cannot be used are left out, as in training.

    Raises:
        BadInput: there are none, or both names and numbers.
    """
    labels: set[int | str] = set()
    for crude in CrudeSamples(sources, split="train", trust=trust):
        record = crude.get("json")
        try:
            record = parse_json(record, unique=True) if isinstance(record, bytes) else record
            source = sources[crude["__subflavors__"][SOURCE]]
            labels.update(labels_in(preprocess_record(record, source.reading)))
        except BadInput:  # the hook cannot be imported
            raise
        except Exception:  # as in the loader, any exception makes the record bad
            continue
    numbers = [label for label in labels if isinstance(label, int)]
    names = sorted(label for label in labels if isinstance(label, str))
    if numbers and names:
        raise BadInput(
            f"Some labels are numbers ({min(numbers)}), others names ({names[0]}): use one kind."
        )
    if not labels:
        raise BadInput(
            f"No record of {sources[0].path} has a label, which --task classify trains on."
        )
    if numbers and max(numbers) >= _MOST_LABELS:
        raise BadInput(
            f"A label is {max(numbers)}, and labels are numbered from 0: for so many, pass "
            "--num-labels."
        )
    return Labels(tuple(names)) if names else Labels.numbered(max(numbers) + 1)


@contextmanager
def refuse_code(*, unless: bool) -> Iterator[None]:
    """Refuse metadatasets and WebDatasets that name code other than energon's classes.

    The check reads a file's content as energon's own parser returns it, before energon acts on it.

    Raises (while energon loads files inside the block):
        BadInput: a file names code; the message gives the file and the line.
    """
    if unless:
        yield
        return
    with mock.patch.object(dataset_config, "load_yaml", _load_yaml_without_code):
        yield


def _load_yaml_without_code(stream: BinaryIO) -> Any:
    """Parse a file as energon does; raise BadInput if it names code to run."""
    text = stream.read()
    content = require_spelled_out(load_yaml(text))
    for key, value in _code_names(content):
        lines = text.decode("utf-8", errors="replace").splitlines()
        line = next(
            (n for n, written in enumerate(lines, 1) if key in written and value in written), 1
        )
        raise BadInput(
            f"{stream.name}:{line} names code to run: {key}: {value}. Refused; if you trust who "
            "wrote the data set, read that code and pass --trust-data."
        )
    return content


def _code_names(content: Any) -> Iterator[tuple[str, str]]:
    """Yield the keys and values that make energon import or run foreign code."""
    if isinstance(content, dict):
        for key, value in content.items():
            if (
                (key == "__module__" and value != _OWN_MODULE)
                or key == "__function__"
                or (key in _PYTHON_FILES and isinstance(value, str))
            ):
                yield key, str(value)
            yield from _code_names(value)
    elif isinstance(content, list):
        for value in content:
            yield from _code_names(value)
