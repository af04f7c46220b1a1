"""A program that starts a run hears of its events, in their order."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from mcore_qwen3vl.data.encoding.batch import Batch
from mcore_qwen3vl.runtime.launch import run_layout
from mcore_qwen3vl.training.events import FINALIZE, FORWARD_BACKWARD, LOG, Built, Phase, RunObserver
from mcore_qwen3vl.verification.curves import run_rank
from tests.training.one_step import step_job


class Recorder(RunObserver):
    """Writes down each event; of a phase its beginning and its end."""

    def __init__(self) -> None:
        self.events: list[str] = []

    def begin(self, built: Built) -> None:
        assert len(built.chunks) == 1
        assert built.second == []
        assert built.trained.vision == 1
        self.events.append("begin")

    def batch(self, batch: Batch) -> None:
        assert not batch.input_ids.is_cuda
        self.events.append("batch")

    def step(self, iteration: int) -> None:
        self.events.append(f"step {iteration}")

    @contextmanager
    def during(self, phase: Phase) -> Iterator[None]:
        self.events.append(f"{phase}:")
        yield
        self.events.append(f"end of {phase}")


def _events(argv: list[str], output: Path) -> list[str]:
    recorder = Recorder()
    run_rank(argv, output, recorder)
    return recorder.events


def _span(phase: Phase, *inside: str) -> list[str]:
    return [f"{phase}:", *inside, f"end of {phase}"]


def test_the_events_of_a_run(dense: Path, data: Path, tmp_path: Path) -> None:
    job = step_job(dense, data, "pp2", "--iterations-to-skip", "2", steps=3)
    batches = ["batch"] * job.batch
    trained = _span(FORWARD_BACKWARD, *batches, *_span(FINALIZE, *_span(LOG)))
    expected = [
        "begin",
        *[*trained, "step 1", *_span(LOG)],
        *[*batches, "step 2", *_span(LOG)],
        *[*trained, "step 3", *_span(LOG)],
    ]
    first, last = run_layout(_events, 2, job.argv, tmp_path / "output.txt")
    assert first == last == expected
