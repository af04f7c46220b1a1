"""Ranks return, fail, hang and end with their parent in distinguishable ways."""

from __future__ import annotations

import multiprocessing
import os
import signal
import sys
import threading
import time
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
import torch.distributed as dist
from megatron.core import parallel_state

from mcore_qwen3vl.errors import BadInput, CheckFailed
from mcore_qwen3vl.layout import Layout
from mcore_qwen3vl.runtime.launch import RanksFailed, initialize, run_layout, tell
from mcore_qwen3vl.training.run import _choose_device
from tests.leftovers import ENDINGS, run_and_end


def test_results_come_in_the_order_of_ranks() -> None:
    def work(offset: int) -> tuple[torch.Tensor, int, str]:
        total = torch.tensor([dist.get_rank() + offset])
        time.sleep(0.1 * (2 - dist.get_rank()))
        dist.all_reduce(total)
        return total, torch.get_num_threads(), os.environ["RANK"]

    results = run_layout(work, 3, 10)
    assert [r[0].item() for r in results] == [33, 33, 33]
    assert [r[1] for r in results] == [1, 1, 1]
    assert [r[2] for r in results] == ["0", "1", "2"]


def _only_on_rank_1(action: Any) -> None:
    if dist.get_rank() == 1:
        action()
    dist.barrier()


def _raise(error: BaseException) -> None:
    raise error


def test_the_rank_that_failed_comes_first_with_its_traceback() -> None:
    with pytest.raises(RanksFailed, match=r"^rank 1: Traceback") as failure:
        run_layout(_only_on_rank_1, 2, lambda: _raise(ValueError("of rank one")))
    assert "in _raise" in str(failure.value)
    assert "ValueError: of rank one" in str(failure.value)
    assert failure.value.summary == "rank 1: ValueError: of rank one"


@pytest.mark.parametrize("kind", [BadInput, CheckFailed, KeyboardInterrupt])
def test_what_is_no_failure_stays_what_it_is(kind: type[BaseException]) -> None:
    with pytest.raises(kind, match=r"^too many$"):
        run_layout(_only_on_rank_1, 2, lambda: _raise(kind("too many")))


@pytest.mark.usefixtures("interruptible")
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_ctrl_c_in_the_middle_of_a_fork() -> None:
    """Python drops the exception there."""
    interrupts = [signal.SIGINT]

    def interrupt_once() -> None:
        if interrupts:
            os.kill(os.getpid(), interrupts.pop())

    os.register_at_fork(after_in_parent=interrupt_once)
    with pytest.raises(KeyboardInterrupt):
        run_layout(_only_on_rank_1, 2, lambda: None)
    assert not interrupts
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_a_rank_that_dies() -> None:
    with pytest.raises(RanksFailed, match="rank 1: ended with exit code 7"):
        run_layout(_only_on_rank_1, 2, lambda: os._exit(7))
    with pytest.raises(RanksFailed) as failure:
        run_layout(_only_on_rank_1, 2, lambda: os.kill(os.getpid(), signal.SIGKILL))
    assert failure.value.summary == (
        "rank 1: was killed by SIGKILL, as the system does when memory runs out"
    )


def test_a_rank_that_died_comes_before_those_that_lost_it() -> None:
    """It is named first, even if others report the lost connection before its death is noticed."""

    def report(lost: threading.Event) -> None:
        if dist.get_rank() == 0:
            raise RuntimeError("Connection reset by peer")
        lost.wait(0.5)
        os.kill(os.getpid(), signal.SIGKILL)

    with pytest.raises(RanksFailed) as failure:
        run_layout(report, 2, threading.Event())
    assert failure.value.summary.startswith("rank 1: was killed by SIGKILL")


@pytest.mark.usefixtures("impatient")
def test_hanging_ranks_are_killed_and_say_where_they_were() -> None:
    def hang() -> None:
        time.sleep(60)

    start = time.monotonic()
    with pytest.raises(RanksFailed, match=r"rank 1 did not finish within 2 s") as failure:
        run_layout(_only_on_rank_1, 2, hang, timeout=2)
    assert time.monotonic() - start < 20
    assert "in hang" in str(failure.value)
    assert "in barrier" in str(failure.value)
    assert "pytest" not in str(failure.value)


@pytest.mark.usefixtures("impatient")
def test_a_rank_that_hangs_in_its_set_up_says_who_called_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def work() -> None:
        initialize(Layout())

    monkeypatch.setattr(parallel_state, "initialize_model_parallel", lambda **sizes: time.sleep(60))
    with pytest.raises(RanksFailed, match=r"rank 0 did not finish within 2 s") as failure:
        run_layout(work, 1, timeout=2)
    assert "in initialize" in str(failure.value)
    assert "in work" in str(failure.value)


def _start_ranks(started: Path) -> None:
    def work() -> None:
        (started / str(os.getpid())).touch()
        time.sleep(600)

    run_layout(work, 2, timeout=600)


def test_ranks_end_with_the_process_that_was_killed(tmp_path: Path) -> None:
    parent = multiprocessing.get_context("fork").Process(target=_start_ranks, args=(tmp_path,))
    parent.start()
    deadline = time.monotonic() + 60
    while len(list(tmp_path.iterdir())) < 2:
        assert parent.is_alive()
        assert time.monotonic() < deadline
        time.sleep(0.05)
    ranks = [psutil.Process(int(file.name)) for file in tmp_path.iterdir()]
    parent.kill()
    parent.join()
    _, left = psutil.wait_procs(ranks, 15)  # they end at once on a machine that is not busy
    for rank in left:
        rank.kill()
    assert left == []


def test_what_a_rank_tells_is_heard_before_it_ends() -> None:
    both_heard = multiprocessing.get_context("fork").Event()
    heard: list[str] = []

    def work() -> bool:
        tell("half")
        return both_heard.wait(60)

    def hear(what: str) -> None:
        heard.append(what)
        if len(heard) == 2:
            both_heard.set()

    assert run_layout(work, 2, heard=hear) == [True, True]
    assert heard == ["half", "half"]


@pytest.mark.parametrize(("chosen", "threads"), [(None, 1), ("1", 1), ("2", 2)])
def test_a_rank_on_the_cpu_computes_with_one_thread_unless_told(
    chosen: str | None, threads: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("mcore_qwen3vl.runtime.cpu.install", lambda **_: None)
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    if chosen is not None:
        monkeypatch.setenv("OMP_NUM_THREADS", chosen)
    torch.set_num_threads(2)  # as torch chooses where the variable is not set
    try:
        _choose_device(cpu=True)
        assert torch.get_num_threads() == threads
    finally:
        torch.set_num_threads(1)


PARENT = """
import multiprocessing, pathlib, sys, tempfile, time
from mcore_qwen3vl.runtime.lifetime import end_with_parent, scratch_folder

def work(folder):
    end_with_parent()
    (folder / f"here-{multiprocessing.current_process().name}").touch()
    time.sleep(600)

if __name__ == "__main__":
    with scratch_folder() as folder:
        children = []
        for method in ("fork", "spawn"):
            context = multiprocessing.get_context(method)
            children.append(context.Process(target=work, args=(folder,), daemon=True))
            children[-1].start()
        while len(list(folder.iterdir())) < 2:
            time.sleep(0.01)
        pathlib.Path(sys.argv[1]).touch()
        if sys.argv[2] != "success":
            time.sleep(600)
        for child in children:
            child.kill()
            child.join()
"""


@pytest.mark.parametrize("ending", ENDINGS)
def test_children_and_scratch_folder_go_with_the_parent(ending: str, tmp_path: Path) -> None:
    program, started = tmp_path / "program.py", tmp_path / "started"
    program.write_text(PARENT)
    command = [sys.executable, program, started, ending]
    left = run_and_end(command, tmp_path, ending, processes=3, ready=lambda _: started.exists())
    assert left.anything == []
    assert (left.exit_code == 0) == (ending == "success"), left.printed
