"""Runs a case on forked ranks of this process, and notes what it did.

A :class:`Bench` is a process that has torch, megatron and this package imported; each rank of each
run is a fork of it, so a run costs its own work alone. What a run computed is read from what it
shows its users, the log and the export, and from the batches that an observer of the run sees.
"""

from __future__ import annotations

import ctypes
import importlib
import itertools
import json
import multiprocessing
import os
import resource
import runpy
import shutil
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass, field
from itertools import pairwise
from multiprocessing import resource_tracker
from pathlib import Path
from typing import Any
from unittest import mock

import psutil
import torch
import torch.distributed as dist

from mcore_qwen3vl.errors import BadInput, CheckFailed
from mcore_qwen3vl.runtime.launch import RanksFailed, run_layout
from mcore_qwen3vl.training.arguments.checks import check_early
from mcore_qwen3vl.training.arguments.command_line import CommandLine
from mcore_qwen3vl.training.events import RunObserver
from mcore_qwen3vl.training.logs.terminal import loss_name
from mcore_qwen3vl.verification.curves import import_for_ranks, run_rank
from mcore_qwen3vl.verification.search import data_files, plain
from mcore_qwen3vl.verification.search.case import (
    ADAPTER,
    OTHER,
    Case,
    Device,
    Segment,
    path_of,
    segments,
)
from mcore_qwen3vl.verification.search.fp8 import write_fp8

_PR_SET_CHILD_SUBREAPER = 36  # <linux/prctl.h>
_VISIBLE_GPUS = "CUDA_VISIBLE_DEVICES"
_FULL_BYTES = 16 * 1024
_ORPHANS_SECONDS = 6.0  # a data worker looks for its parent every five seconds


@dataclass(frozen=True)
class TrainedSample:
    """A sequence that a run trained on, as it was in a batch, without padding."""

    name: str
    tokens: tuple[int, ...]
    weights: tuple[float, ...]
    """Of each token: the weight of its loss, 0 if it is not trained."""
    micro_batch: int = 0
    """The number of its micro-batch in the step, over all data-parallel ranks."""


@dataclass
class Ran:
    """What one command did."""

    exit_code: int
    refusal: str = ""
    """What a refusal said."""
    crash: str = ""
    """The traceback of an error of another class than ours, or how a rank died or hung."""
    printed: str = ""
    log: list[dict[str, Any]] = field(default_factory=list)
    """The entries of ``--log-json`` of steps."""
    validations: list[dict[str, Any]] = field(default_factory=list)
    samples: dict[int, list[TrainedSample]] = field(default_factory=dict)
    """By the step, over all data-parallel ranks."""
    left: list[str] = field(default_factory=list)
    """Processes and files that were left over."""
    filled: bool = False
    """Whether the disk was full at its end."""


@dataclass
class Outcome:
    """What the commands of a case did.

    Attributes:
        ran: each command.
        folder: where the run lies: ``log.jsonl``, ``save``, ``hf``.
        model: the Hugging Face model; in place of one in FP8, its values.
        media: where the media of the records lie.
        judged_by: the oracles that knew the case, by name.
        in_fp8: the model in FP8, which the commands named.
    """

    ran: list[Ran]
    folder: Path
    model: Path
    media: Path
    judged_by: list[str] = field(default_factory=list)
    in_fp8: Path | None = None

    @property
    def named_model(self) -> Path:
        """The Hugging Face model that the commands named."""
        return self.in_fp8 or self.model

    @property
    def finished(self) -> bool:
        """Whether the last command trained to its end."""
        return not (self.refusal or any(one.crash for one in self.ran))

    @property
    def refusal(self) -> str:
        """What a command was refused for; that a disk was full is no refusal if the run went on."""
        first, *later = self.ran
        unexpected = later if first.filled and later else self.ran
        return next((one.refusal for one in unexpected if one.refusal), "")

    @property
    def log(self) -> dict[int, dict[str, Any]]:
        """The entries of all steps; a repeated step has the entries of the second time."""
        return {int(entry["iteration"]): entry for one in self.ran for entry in one.log}

    @property
    def samples(self) -> dict[int, list[TrainedSample]]:
        """The samples of all steps; a repeated step has the samples of the second time."""
        return {step: some for one in self.ran for step, some in sorted(one.samples.items())}

    def names(self, step: int) -> Counter[str]:
        return Counter(sample.name for sample in self.samples.get(step, ()))


class CommandFailed(Exception):
    """A command behind a run has failed."""


class Bench:
    """Runs cases, each once."""

    def __init__(self, folder: Path, *, timeout: float = 400.0) -> None:
        """
        Args:
            folder: where models and runs lie; the run of a case is removed with the next
                :meth:`clear`.
            timeout: seconds after which a run hangs.
        """
        self.folder, self.timeout = folder, timeout
        self.runs = 0
        self._outcomes: dict[Case, Outcome] = {}
        self._models: dict[tuple[str, ...], Path] = {}
        self._gpus = os.environ.get(_VISIBLE_GPUS)
        import_for_ranks()  # it hides the GPUs from this process
        self._adopt(True)
        resource_tracker.ensure_running()  # ranks on GPUs start one, which stays

    def moved_to(self, folder: Path) -> Bench:
        """Make this the bench of a fork of its process, with a folder of its own."""
        self.folder = folder
        self._adopt(True)  # a fork does not inherit it
        return self

    def close(self) -> None:
        """Remove all runs, and let this process be as it was."""
        self.clear()
        self._adopt(False)

    @staticmethod
    def _adopt(adopts: bool) -> None:
        """Have processes that a rank leaves become children of this one, or of the system's."""
        ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, int(adopts))

    def clear(self) -> None:
        """Forget all runs, and remove their folders."""
        self._outcomes.clear()
        shutil.rmtree(self.folder / "runs", ignore_errors=True)

    def model(self, words: tuple[str, ...]) -> Path:
        """Return the checkpoint that ``mcore-qwen3vl tiny`` writes with these words."""
        if given := path_of(words):
            return Path(given)
        if words not in self._models:
            from mcore_qwen3vl.tiny import write_tiny_checkpoint

            path = self.folder / "models" / ("-".join(word.strip("-") for word in words) or "dense")
            values = dict(pairwise(words))
            family: Any = values.get("--family", "qwen3-vl")
            write_tiny_checkpoint(
                path,
                family=family,
                moe="--moe" in words,
                tie="--tie" in words,
                text_only="--text-only" in words,
                seed=int(values.get("--seed", "0")),
            )
            self._models[words] = path
        return self._models[words]

    def other_model(self, case: Case) -> Path:
        """Return the model that :data:`.OTHER` stands for."""
        return self.model((*case.model, "--seed", "1"))

    def run(self, case: Case) -> Outcome:
        """Run a case, or return what it did before."""
        if case not in self._outcomes:
            self._outcomes[case] = self._run(case)
        return self._outcomes[case]

    def call(self, words: Sequence[str]) -> str:
        """Run a command of ``mcore-qwen3vl``, and return its standard output.

        Raises:
            CommandFailed: its exit code is not 0.
        """
        files = [self.folder / name for name in ("output.txt", "messages.txt")]
        process = multiprocessing.get_context("fork").Process(target=_call, args=(words, *files))
        process.start()
        process.join(self.timeout)
        if process.exitcode is None:
            process.kill()
            process.join()
        output, messages = (file.read_text("utf-8", errors="replace") for file in files)
        if process.exitcode:
            name = " ".join(itertools.takewhile(str.isalpha, words))
            raise CommandFailed(f"{name} ended with {process.exitcode}: {messages or output}")
        return output

    def keep(self, cases: Collection[Case]) -> None:
        """Forget the runs of all other cases, and remove their folders."""
        for other in self._outcomes.keys() - set(cases):
            shutil.rmtree(self._outcomes.pop(other).folder, ignore_errors=True)

    def _run(self, case: Case) -> Outcome:
        folder = self.folder / "runs" / f"{self.runs:06d}"
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        for name in data_files.pictures(case.records):
            (folder / name).write_bytes(data_files.picture(name))
        for name, text in data_files.texts(case.form, case.records, case.media).items():
            (folder / name).write_text(text, "utf-8")
        if writer := data_files.WRITERS.get(case.form):
            writer(str(folder / "train.jsonl"), str(folder / case.data))
        media = folder if case.media is None else Path(case.media)
        outcome = Outcome([], folder, self._model_of(case), media)
        if case.start == "fp8":
            outcome.in_fp8 = _in_fp8(outcome.model)
        other = ""
        if any(OTHER in flag for flag in case.flags):
            other = str(self.other_model(case))
        if any(ADAPTER in flag for flag in case.flags):
            write_adapter(outcome.model, folder / "adapter")
        if case.starts_converted:
            converted = _converted(outcome.model, case.start, case.conversion)
            (folder / "converted").symlink_to(converted)
        for segment in segments(case):
            words = segment.words(case, str(folder), str(outcome.named_model), other)
            notes = folder / f"command{len(outcome.ran)}"
            ran = self._run_segment(segment, words, notes, case.device)
            outcome.ran.append(ran)
            if ran.crash or (ran.refusal and not ran.filled):
                break
        return outcome

    @contextmanager
    def _visible_gpus(self) -> Iterator[None]:
        """Have the processes that start inside the block see the GPUs."""
        with mock.patch.dict(os.environ):
            os.environ.pop(_VISIBLE_GPUS, None)
            if self._gpus is not None:
                os.environ[_VISIBLE_GPUS] = self._gpus
            yield

    def _model_of(self, case: Case) -> Path:
        """Return the Hugging Face model of a case, in its form; in place of FP8 its values."""
        published = self.model(case.model)
        if case.start not in ("transformers", "fp8"):
            return published
        path = published.with_name(f"{published.name}-{case.start}")
        if case.start == "fp8" and not path.exists():
            write_fp8(published, _in_fp8(path), path)
        if case.start == "transformers" and not path.exists():
            run_layout(save_again, 1, published, path, timeout=self.timeout)
        return path

    def _run_segment(
        self, segment: Segment, words: Sequence[str], notes: Path, device: Device
    ) -> Ran:
        """Run one command, and read what it wrote."""
        self.runs += 1
        notes.mkdir()
        temporary, log = notes / "temporary", notes.parent / "log.jsonl"
        temporary.mkdir()
        before = _lines_of(log)
        ran = Ran(0)
        others = {process.pid for process in psutil.Process().children(recursive=True)}
        with _own_temporary_folder(temporary):
            try:
                size = segment.layout.world_size
                command = CommandLine(words)  # as `mcore-qwen3vl train` does before it starts ranks
                if device == "cpu":  # this process is prepared for the CPU, and GPUs' ranks check
                    check_early(command)
                command.layout(size)
                ranks = (_rank, size, list(words), notes, segment)
                with self._visible_gpus() if device == "cuda" else nullcontext():
                    codes = run_layout(*ranks, timeout=self.timeout, device=device)
                ran.exit_code, modules = codes[0]
                if device == "cpu":
                    _import(modules)
            except (BadInput, CheckFailed) as error:
                ran.exit_code, ran.refusal = error.exit_code, str(error)
            except RanksFailed as error:
                ran.exit_code = 1
                if segment.kill_after is None or "SIGKILL" not in str(error):
                    ran.crash = "\n".join(map(str, error.args))
        ran.left = _left_over(temporary, others)
        printed = notes / "output.txt"
        ran.printed = printed.read_text("utf-8", errors="replace") if printed.exists() else ""
        entries = _lines_of(log)[len(before) :]
        ran.log = [entry for entry in entries if loss_name(entry)]
        # It is full from the end of a step on: what was refused before has met no full disk.
        ran.filled = segment.full_after is not None and bool(ran.log)
        ran.validations = [entry for entry in entries if not loss_name(entry)]
        ran.samples = _samples(notes)
        return ran


def _converted(model: Path, name: str, options: Mapping[str, Any]) -> Path:
    """Return a model as a Megatron-Core checkpoint, written once under this name."""
    from mcore_qwen3vl.converters.convert import hf_to_mcore

    path = model.with_name(f"{model.name}-{name}")
    if not path.exists():
        hf_to_mcore(model, path, **options)
    return path


def _in_fp8(values: Path) -> Path:
    """Return the model in FP8 beside its values."""
    return values.with_name(f"{values.name}-numbers")


def save_again(model: Path | str, path: Path | str) -> None:
    """Load a model with transformers, and write it and its processor as transformers does."""
    plain.load_model(Path(model)).save_pretrained(path)
    plain.load_processor(Path(model)).save_pretrained(path)


def write_adapter(model: Path | str, folder: Path | str) -> None:
    """Write a PEFT adapter of a model's language layers, with random factors."""
    from mcore_qwen3vl.verification.parity.case import preset_config, write_random_adapter

    write_random_adapter(Path(folder), preset_config("language", model), model)


def _lines_of(file: Path) -> list[dict[str, Any]]:
    if not file.exists():
        return []
    return [json.loads(line) for line in file.read_text("utf-8").splitlines()]


@contextmanager
def _own_temporary_folder(folder: Path) -> Iterator[None]:
    """Have all processes that start inside the block make their temporary files in a folder."""
    with (
        mock.patch.dict(os.environ, TMPDIR=str(folder)),
        mock.patch.object(tempfile, "tempdir", str(folder)),
    ):
        yield


def _left_over(temporary: Path, others: Collection[int]) -> list[str]:
    """Return what a run has left: files in its temporary folder, and processes, which are ended.

    Processes with the ids `others` ran before it.
    """
    deadline = time.monotonic() + _ORPHANS_SECONDS
    this = psutil.Process()
    while True:
        processes = [
            one
            for one in this.children(recursive=True)
            if one.pid not in others and _is_running(one)
        ]
        files = sorted(
            str(file.relative_to(temporary))
            for file in temporary.rglob("*")
            if not file.relative_to(temporary).parts[0].startswith("torchinductor_")  # its cache
        )
        if not (processes or files) or time.monotonic() > deadline:
            break
        time.sleep(0.02)
    left = [f"file {name}" for name in files]
    for one in processes:
        with suppress(psutil.NoSuchProcess):
            left.append(f"process {' '.join(one.cmdline())[:200]}")
            one.kill()
    for _ in this.children():  # the dead that nobody waits for
        with suppress(ChildProcessError):
            os.waitpid(-1, os.WNOHANG)
    return left


def _is_running(process: psutil.Process) -> bool:
    try:
        return bool(process.status() != psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return False


class _Notes(RunObserver):
    """Notes each batch of each step in a file of this rank, and ends the run where it is to end."""

    def __init__(self, folder: Path, segment: Segment) -> None:
        self._file = (folder / f"rank{os.environ['RANK']}.jsonl").open(
            "w", buffering=1, encoding="utf-8"
        )
        self._segment = segment
        self._batches: list[Any] = []

    def batch(self, batch: Any) -> None:
        self._batches.append(_samples_of(batch))

    def step(self, iteration: int) -> None:
        from mcore_qwen3vl.data.sharing import rank_reads

        if rank_reads():
            print(json.dumps([iteration, self._batches]), file=self._file)
        self._batches = []
        if iteration == self._segment.kill_after:
            dist.barrier()  # all ranks have noted the step
            os.kill(os.getpid(), signal.SIGKILL)
        if iteration == self._segment.terminate_after:
            signal.raise_signal(signal.SIGTERM)
        if iteration == self._segment.full_after:
            signal.signal(signal.SIGXFSZ, signal.SIG_IGN)  # the write fails instead
            resource.setrlimit(resource.RLIMIT_FSIZE, (_FULL_BYTES, _FULL_BYTES))


def _samples_of(batch: Any) -> list[Any]:
    """Return name, tokens and weights of each sample of a batch, as plain data."""
    if batch.is_spare:
        return []
    rows, starts = list(range(len(batch.names))), [0] * len(batch.names)
    if batch.cu_seqlens is not None:
        rows, starts = [0] * len(batch.names), batch.cu_seqlens.tolist()
    found = []
    for name, row, start, length in zip(batch.names, rows, starts, batch.lengths, strict=False):
        part = slice(start, start + length)
        # A label stands at the token before it.
        weights = [0.0, *batch.loss_weights[row, part].tolist()][:length]
        found.append([name, batch.input_ids[row, part].tolist(), weights])
    return found


def _samples(notes: Path) -> dict[int, list[TrainedSample]]:
    found: dict[int, list[TrainedSample]] = {}
    for file in sorted(notes.glob("rank*.jsonl")):
        for step, batches in map(json.loads, file.read_text("utf-8").splitlines()):
            samples = found.setdefault(step, [])
            first = samples[-1].micro_batch + 1 if samples else 0
            samples.extend(
                TrainedSample(name.rsplit("/", 1)[-1], tuple(tokens), tuple(weights), number)
                for number, batch in enumerate(batches, first)
                for name, tokens, weights in batch
            )
    return found


def _call(words: Sequence[str], output: Path, messages: Path) -> None:
    """Run the command line in this process, with its standard output and error in files.

    It is run as ``python -m`` runs it: the command line imports this package, and not the reverse.
    """
    files = (output.open("w", encoding="utf-8"), messages.open("w", encoding="utf-8"))
    with files[0] as sys.stdout, files[1] as sys.stderr:
        os.dup2(sys.stdout.fileno(), 1)
        os.dup2(sys.stderr.fileno(), 2)
        sys.argv = ["mcore-qwen3vl", *words]
        runpy.run_module("mcore_qwen3vl", run_name="__main__")


def _rank(words: list[str], notes: Path, segment: Segment) -> tuple[int, list[str]]:
    """Run one rank; return the exit code, and the modules that it had to import."""
    known = set(sys.modules)
    code = run_rank(words, notes / "output.txt", _Notes(notes, segment))
    return code, sorted(sys.modules.keys() - known)


def _import(modules: Sequence[str]) -> None:
    """Import in the bench what a run imported, so that later forks have it."""
    for name in modules:
        if name not in sys.modules:
            with suppress(Exception):  # some are made while a program runs
                importlib.import_module(name)
    torch.set_num_threads(1)
