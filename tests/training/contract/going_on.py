"""Runs that are stopped and go on: what each of their steps trained, and what the run said."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections import Counter, defaultdict
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mcore_qwen3vl.converters.identify import TRACKER, folder_name
from mcore_qwen3vl.layout import Layout
from mcore_qwen3vl.model.freeze import part_of
from mcore_qwen3vl.runtime.launch import run_layout
from mcore_qwen3vl.training.events import Built, RunObserver
from mcore_qwen3vl.training.logs.terminal import loss_name
from mcore_qwen3vl.verification.curves import import_for_ranks, run_rank

STEPS, HALF = 4, 2


@dataclass(frozen=True)
class Step:
    """A step of a run.

    Attributes:
        records: ``file:line`` of each record that it trained, sorted, over all data-parallel ranks.
        weights: digests by part of the model, of each rank, after it.
        loss: before it; None if it was left out.
        rate: of learning.
    """

    records: tuple[str, ...]
    weights: dict[str, tuple[str, ...]]
    loss: float | None
    rate: float | None


@dataclass(frozen=True)
class Going:
    """What a run did: its steps by their numbers, and its output."""

    steps: dict[int, Step]
    said: str

    def records(self) -> Counter[str]:
        """Return how often the run trained each record."""
        return Counter(name for step in self.steps.values() for name in step.records)


class _Notes(RunObserver):
    """Notes each step of a rank in a file."""

    def __init__(self, folder: Path) -> None:
        self._folder, self._names, self._built = folder, [], None  # type: ignore[var-annotated]

    def begin(self, built: Built) -> None:
        self._built = built

    def batch(self, batch: Any) -> None:
        self._names += [Path(name).name for name in batch.names]

    def step(self, iteration: int) -> None:
        digests: dict[str, Any] = defaultdict(lambda: hashlib.blake2b(digest_size=8))
        for chunk in self._built.chunks:
            for name, parameter in chunk.named_parameters():
                values = parameter.detach().float().contiguous().cpu().numpy()
                digests[part_of(name)].update(values.tobytes())
        held = {part: found.hexdigest() for part, found in digests.items()}
        with (self._folder / f"rank {os.environ['RANK']}").open("a") as file:
            print(json.dumps([iteration, self._names, held]), file=file)
        self._names = []


def run(argv: list[str], layout: Layout, folder: Path) -> Going:
    """Train as a command line says, on one process for each rank; BadInput if it is refused."""
    import_for_ranks()
    folder.mkdir(parents=True)
    log, output = folder / "log.jsonl", folder / "output.txt"
    words = [*argv, "--log-json", str(log)]
    run_layout(run_rank, layout.world_size, words, output, _Notes(folder), timeout=300)
    records: dict[int, list[str]] = defaultdict(list)
    weights: dict[int, dict[str, tuple[str, ...]]] = defaultdict(dict)
    for rank in range(layout.world_size):
        notes = folder / f"rank {rank}"
        for line in notes.read_text().splitlines() if notes.exists() else ():
            step, names, held = json.loads(line)
            if rank % (layout.tp * layout.cp) == 0:  # the others of its group have the same
                records[step] += names
            for part, digest in held.items():
                weights[step][part] = (*weights[step].get(part, ()), digest)
    entries = [json.loads(line) for line in log.read_text().splitlines()] if log.exists() else []
    logged = {entry["iteration"]: entry for entry in entries if loss_name(entry)}
    steps = {}
    for step in sorted(weights):
        entry = logged.get(step, {})
        loss = entry.get(loss_name(entry) or "")
        rate = entry.get("learning rate")
        steps[step] = Step(tuple(sorted(records[step])), weights[step], loss, rate)
    return Going(steps, output.read_text())


def run_and_stop(argv: list[str], layout: Layout, folder: Path, stop: int) -> tuple[Going, Path]:
    """Train to the end; return what it did, and the checkpoints as of the step `stop`."""
    save = folder / "save"
    flags = ["--save", str(save), "--save-interval", str(stop)]
    whole = run([*argv, *flags], layout, folder / "whole")
    for step in whole.steps:
        if step > stop and (later := save / folder_name(step)).exists():
            shutil.rmtree(later)
    (save / TRACKER).write_text(str(min(stop, max(whole.steps))))
    return whole, save
