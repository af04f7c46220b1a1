"""Scoring of a data set with a checkpoint of either kind under a layout; it can be resumed."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import asdict, dataclass, field, replace
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from mcore_qwen3vl import console
from mcore_qwen3vl.config import Architecture, read_config_file
from mcore_qwen3vl.data.config import DataConfig, MediaLimits, Source, parse_sources
from mcore_qwen3vl.data.content import digest_of_hook
from mcore_qwen3vl.data.datasets import CrudeSamples, unread_of
from mcore_qwen3vl.data.indexes import fingerprint
from mcore_qwen3vl.data.processor import load_processor, vocabulary_fingerprint
from mcore_qwen3vl.data.records.reading import Reading
from mcore_qwen3vl.data.scores import facts_file_of, file_digest, scores_file_of
from mcore_qwen3vl.errors import BadInput
from mcore_qwen3vl.inference import CheckedModel, ModelRequest, on_all_ranks
from mcore_qwen3vl.labels import SINGLE, Labels
from mcore_qwen3vl.losses.embedding import require_last_token_pooling
from mcore_qwen3vl.losses.registry import loss_named
from mcore_qwen3vl.losses.reranker import ANSWERS
from mcore_qwen3vl.losses.teacher_file import check_top_k, teacher_file_of
from mcore_qwen3vl.machine import require_extra
from mcore_qwen3vl.model.inputs import length_multiple
from mcore_qwen3vl.scoring.records import OVERLONG, BlockResults, Output, Records, Tally
from mcore_qwen3vl.unused.fields import Unused
from mcore_qwen3vl.writer_lock import only_writer

if TYPE_CHECKING:
    from mcore_qwen3vl.scoring.on_rank import Readout

Task = Literal["embedding", "reranker", "reward", "classify"]
ScoreTask = Literal["log-probabilities"] | Task
"""What is written for each record."""

LONGEST = 8192
"""The default length of a record and of a pack in tokens, unless the model has fewer positions."""


@dataclass(frozen=True)
class ScoreRequest(ModelRequest):
    """The data to score, the checkpoint and the settings.

    Attributes:
        data: any data set of training, or a mixture file, whose data sets are scored one after the
            other, each once.
        out: file to write; None: the file beside `data` where training looks for its reference.
        seq_length: length of the longest record and of a pack; None: :data:`LONGEST`.
        buffer: records of a replica that are packed and written together.
        task: ``embedding``: write embeddings of retrieval records instead of log-probabilities;
            ``reranker``: write scores of their documents; ``reward``: write rewards of preference
            records and conversations; ``classify``: write labels and their probabilities.
        answers: a reranker's words for relevant and irrelevant, one token each.
        top_k: number of likeliest tokens to write for each trained token, for distillation; None:
            write log-probabilities of the trained tokens alone.
    """

    data: Path
    out: Path | None = None
    temperature: float = 1.0
    entropy: bool = False
    packing: bool = True
    seq_length: int | None = None
    media_limits: MediaLimits = field(default_factory=MediaLimits)
    buffer: int = 128
    max_bad_fraction: float = 0.05
    force: bool = False
    split: str = "train"
    preprocess: str | None = None
    train_on: str | None = None
    chat_template_kwargs: str | None = None
    allow_dropped: bool = False
    trust_data: bool = False
    task: ScoreTask = "log-probabilities"
    answers: tuple[str, str] = ANSWERS
    top_k: int | None = None

    @property
    def data_task(self) -> Task | None:
        """The task that the records are read for; None: predicting tokens."""
        return None if self.task == "log-probabilities" else self.task

    @property
    def default_out(self) -> Path:
        """The file that is written if none is named."""
        if self.top_k:
            return teacher_file_of(self.data)
        endings = {"log-probabilities": "scores.jsonl", "embedding": "embeddings.parquet"}
        return scores_file_of(self.data, endings.get(self.task, f"{self.task}.jsonl"))

    @property
    def out_file(self) -> Path:
        """The file to write."""
        return self.out or self.default_out

    def sources(self) -> list[Source]:
        """Return the data sets."""
        defaults = Reading(
            preprocess=self.preprocess,
            train_on=self.train_on,
            chat_template_kwargs=self.chat_template_kwargs,
        )
        return parse_sources([str(self.data)], defaults)

    def open_samples(self) -> CrudeSamples:
        """Open the records; each process opens the files by itself."""
        return CrudeSamples(self.sources(), split=self.split, trust=self.trust_data)


def score(request: ScoreRequest, *, on_cpu: bool = False) -> Tally | None:
    """Compute what the task asks for on all ranks of the layout, and write it.

    Returns:
        The summary of the file; under torchrun None on all ranks but the first.

    Raises:
        BadInput: the checkpoint, the data or the layout cannot be used; the output exists, was
            begun with other settings, or is being written by another process; too many records
            are bad; or there is no GPU.
    """
    job = _ScoringJob(request)
    first = os.environ.get("RANK", "0") == "0"
    with only_writer(job.output.path) if first else nullcontext():
        if first:
            job.output.check(force=request.force)
        on_all_ranks(job.on_rank, request.layout, on_cpu=on_cpu, purpose="score")
        return job.output.finish() if first else None


class _ScoringJob:
    """A request that has been checked; all ranks get the same one."""

    def __init__(self, request: ScoreRequest) -> None:
        """Check the request, before a rank starts; raise what :func:`score` does."""
        if not request.temperature > 0:
            raise BadInput(f"The temperature is {request.temperature:g}: it must be above 0.")
        if request.buffer < 1:
            raise BadInput(f"--packing-buffer is {request.buffer}; it must be at least 1.")
        if request.data_task and (request.entropy or request.temperature != 1):
            raise BadInput(
                f"--entropy and --temperature are not for --task {request.task}: drop them."
            )
        _check_out(request)
        self._request = request
        self._model = CheckedModel(request, "score", task=request.data_task)
        architecture, layout = self._model.architecture, request.layout
        if request.top_k is not None:
            check_top_k("--top-k", request.top_k, architecture.vocab_size)
            if request.entropy or request.data_task:
                other = "--entropy" if request.entropy else f"--task {request.task}"
                raise BadInput(f"--top-k with {other}: score twice, or drop one of them.")
        if request.task == "classify":
            _classifier_labels(self._model)
        if request.task == "embedding":
            require_last_token_pooling(self._model.folder)
        samples = request.open_samples()
        self._total = len(samples)
        self._multiple = length_multiple(layout.cp, layout.tp, layout.sp)
        self._config = _data_config(request, architecture, self._multiple)
        self._block = request.buffer * layout.dp
        settings = _settings(request, self._model.folder, samples.paths, self._config, self._block)
        if request.top_k:  # hashed only then: it takes seconds
            tokenizer = load_processor(self._model.folder).tokenizer
            settings["vocabulary"] = vocabulary_fingerprint(tokenizer, architecture.vocab_size)
        self.output = Output(request.out_file, settings, self._block)

    def on_rank(self) -> None:
        """Load this rank's part of the model and score; needs ``torch.distributed`` initialised."""
        import torch.distributed as dist

        from mcore_qwen3vl.scoring.on_rank import Scorer

        request, readout = self._request, self._make_readout()
        # Otherwise stages expect equal lengths, but the last pack of a block is shorter.
        overrides = {"variable_seq_lengths": True} if request.layout.pp > 1 else {}
        scorer = Scorer(self._model.load(readout.kind, **overrides), self._open_records, readout)
        first = dist.get_rank() == 0
        # The first rank tells the others how many blocks are finished.
        message = [self.output.open(force=request.force) if first else 0]
        dist.broadcast_object_list(message)
        begin, total = message[0] * self._block, self._total
        progress = console.count_progress if first else console.no_progress
        with progress(f"scoring {request.data.name}", total, "records") as advance:
            advance(min(begin, total))
            bad = self.output.tally().bad if first else 0
            files = unread_of(request.sources(), request.split) if first else []
            unused: dict[Unused, None] = dict.fromkeys(files)
            for start in range(begin, total, self._block):
                records = range(start, min(start + self._block, total))
                results = scorer.score_block(records)
                if results is not None:
                    self.output.append(
                        [_line_of(results, record, request.data) for record in records]
                    )
                    bad = self._report_errors(results, bad)
                    unused |= results.unused
                advance(records.stop)
        console.print_unused(unused)

    def _make_readout(self) -> Readout:
        from mcore_qwen3vl.scoring import on_rank as readouts

        request = self._request
        match request.task:
            case "embedding":
                return readouts.Embeddings()
            case "reranker":
                return readouts.Relevance(self._model.folder, request.answers)
            case "reward":
                return readouts.Rewards()
            case "classify":
                return readouts.Classes(_classifier_labels(self._model))
        if request.top_k:
            return readouts.TopK(temperature=request.temperature, k=request.top_k)
        return readouts.LogProbs(temperature=request.temperature, entropy=request.entropy)

    def _open_records(self) -> Records:
        return Records(
            self._request.open_samples(),
            self._request.sources(),
            self._model.architecture,
            load_processor(self._model.folder),
            self._config,
            self._multiple,
            alone=self._request.top_k is not None,
        )

    def _report_errors(self, results: BlockResults, bad: int) -> int:
        """Print which records could not be scored; return how many are bad so far."""
        for record, error in sorted(results.errors.items()):
            say = console.plain(f"record {results.places[record]} left out: {error}")
            console.messages.print(f"warning: {say}", soft_wrap=True)
            bad += not error.startswith(OVERLONG)
        if bad > self._request.max_bad_fraction * self._total:
            raise BadInput(
                f"{bad} of {self._total} records are bad, more than the accepted share of "
                f"{self._request.max_bad_fraction:g}. Run `mcore-qwen3vl data check` on the data "
                "set to list them all, or raise --max-bad-fraction."
            )
        return bad


def _check_out(request: ScoreRequest) -> None:
    """Raise BadInput if the file to write is the data, or its suffix is that of another format."""
    out, suffix = request.out_file, request.default_out.suffix
    if facts_file_of(out) in (out, request.data) or out == request.data:
        raise BadInput(f"--out {out}: name a file that ends with {suffix} and is not the data.")
    endings = {suffix, ".npy"} if request.task == "embedding" else {suffix}
    if out.suffix not in endings and {out.suffix, *endings} & {".parquet", ".npy", ".arrow"}:
        raise BadInput(
            f"--out {out}: embeddings are written as Parquet (or .npy), likeliest "
            f"tokens (--top-k) as Arrow, and all else as JSONL; end it with {suffix}."
        )
    if out.suffix in (".parquet", ".arrow"):
        require_extra("pyarrow", str(out))


def _classifier_labels(model: CheckedModel) -> Labels:
    """Return a classifier's labels, which are the adapter's if it has a head."""
    of_adapter = None if model.adapter is None else model.adapter.labels
    labels = of_adapter or Labels.of_config(read_config_file(model.folder))
    if labels is None or len(labels) < 2:
        raise BadInput(
            f"{model.folder} names no labels (id2label in config.json), nor does an adapter: "
            "--task classify scores with a classifier, such as the export of train --task classify."
        )
    return labels if labels.problem_type else replace(labels, problem_type=SINGLE)


def _data_config(request: ScoreRequest, architecture: Architecture, multiple: int) -> DataConfig:
    """Return the data settings; raise BadInput if the length does not fit model or layout."""
    longest = min(LONGEST, architecture.max_position_embeddings)
    seq_length = request.seq_length or longest - longest % multiple
    if seq_length % multiple:
        raise BadInput(
            f"--seq-length {seq_length} is not a multiple of {multiple}, which the layout "
            f"{request.layout} divides it by. Round it."
        )
    if seq_length > architecture.max_position_embeddings:
        raise BadInput(
            f"--seq-length {seq_length} is more than the model's "
            f"{architecture.max_position_embeddings} positions."
        )
    return DataConfig(
        seq_length,
        packing=request.packing,
        records=loss_named(request.data_task).records if request.data_task else None,
        # CP divides each packed sample; SP divides only the pack.
        length_multiple=length_multiple(request.layout.cp) if request.packing else multiple,
        max_bad_fraction=request.max_bad_fraction,
        media_limits=request.media_limits,
        allow_dropped=request.allow_dropped,
        trust_data=request.trust_data,
    )


def _settings(
    request: ScoreRequest, hf: Path, paths: Sequence[Path], config: DataConfig, block: int
) -> dict[str, Any]:
    """Return all that a line depends on; a run continues only with the same settings.

    Args:
        hf: the folder of config, tokenizer and processor.
    """
    hooks = [source.reading.preprocess for source in request.sources()]
    names = (
        "split", "preprocess", "train_on", "chat_template_kwargs", "allow_dropped", "spec", "dtype",
        "task", "answers", "temperature", "entropy", "top_k",
    )  # fmt: skip
    return {
        **{name: getattr(request, name) for name in names},
        "data": _data_identity(request, paths),
        "hooks": [hook and digest_of_hook(hook) for hook in hooks],
        "checkpoint": _checkpoint_identity(request.checkpoint),
        "hf_model": _checkpoint_identity(hf),
        "lora": None if request.lora is None else _checkpoint_identity(request.lora),
        "layout": str(request.layout),
        "packing": config.packing,
        "seq_length": config.seq_length,
        "media": asdict(config.media_limits),
        "block": block,
        "torch": version("torch"),
    }


def _data_identity(request: ScoreRequest, paths: Sequence[Path]) -> str:
    """Return a hash of a JSONL file's bytes, which training compares, or of other files' times."""
    if request.data.suffix == ".jsonl":
        return file_digest(request.data)
    said = [
        (source.reading, source.media_root, source.limits, source.max_samples)
        for source in request.sources()
    ]
    files = [fingerprint(path) for path in paths]
    return hashlib.sha256(repr((said, files)).encode()).hexdigest()


def _checkpoint_identity(folder: Path) -> dict[str, Any]:
    """Return what identifies a checkpoint: its path, and the size and time of its files."""
    stats = [path.stat() for path in folder.rglob("*") if path.is_file()]
    newest = max((stat.st_mtime_ns for stat in stats), default=0)
    size = sum(stat.st_size for stat in stats)
    return {"path": str(folder.absolute()), "bytes": size, "newest": newest}


def _line_of(results: BlockResults, record: int, data: Path) -> dict[str, Any]:
    """Return what is written for a record: its number, its file if there are several, results."""
    place = results.places[record]
    line = {"line" if place.is_line else "record": place.number, **results.entry(record)}
    if data.is_file() and data.suffix not in (".yaml", ".yml"):
        return line
    base = data if data.is_dir() else data.parent
    return {"file": os.path.relpath(place.file, base), **line}
