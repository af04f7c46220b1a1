"""Work on many samples in child processes; what comes of it has the samples' order."""

from __future__ import annotations

import multiprocessing
import signal
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from typing import Any

import torch

from mcore_qwen3vl import console
from mcore_qwen3vl.errors import Unfinished
from mcore_qwen3vl.runtime.lifetime import end_with_parent, noting_ctrl_c

_CHUNKS = 10_000  # most chunks


def work_in_children[R](
    work: Callable[[int], R],
    numbers: Sequence[int],
    use: Callable[[R], object],
    *,
    processes: int,
    chunk: int,
    title: str,
    remedy: str,
) -> None:
    """Call `work` for each number in a child process, and `use` here with its results, in order.

    It always works in children: readers opened in this process would share file positions with
    other processes that it forks. No child is left, however this function ends.

    Args:
        processes: number of children, or fewer if there are fewer chunks.
        chunk: samples that a child gets at a time, at least.
        title: what is done, for the progress and for messages.
        remedy: what to do where a child was killed, beside starting again.

    Raises:
        Unfinished: a child was killed.
        Exception: what `work` raised, of the first number for which it did.
    """
    step = max(chunk, len(numbers) // _CHUNKS)
    chunks = [numbers[start : start + step] for start in range(0, len(numbers), step)]
    fork = multiprocessing.get_context("fork")  # so that `work` needs no pickling
    others = set(multiprocessing.active_children())
    pool = ProcessPoolExecutor(max(1, min(processes, len(chunks))), fork, _begin_child, (work,))
    done = 0
    with (
        noting_ctrl_c() as raise_if_it_came,
        pool,
        console.count_progress(title, len(numbers), "samples") as show,
    ):
        try:
            for results in pool.map(_work_on_each, chunks):
                for result in results:
                    use(result)
                done += len(results)
                show(done)
                raise_if_it_came()
        except BrokenProcessPool:
            raise_if_it_came()
            raise Unfinished(
                f"{title}: a process was killed, by a signal or because memory ran out. Start "
                f"again, {remedy}."
            ) from None
        except BaseException:
            # The pool would wait until they have done all that is under way.
            for child in set(multiprocessing.active_children()) - others:
                child.kill()
            raise


_work: Callable[[int], Any]


def _begin_child(work: Callable[[int], Any]) -> None:
    """Prepare a child process, which keeps `work` in a global for `_work_on_each`."""
    global _work
    end_with_parent()
    _work = work
    signal.signal(signal.SIGTERM, signal.SIG_DFL)  # not the rank's handler, which finishes a step
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent gets it too, and kills its children
    torch.set_num_threads(1)  # the others have the other cores


def _work_on_each(numbers: Sequence[int]) -> list[Any]:
    return [_work(number) for number in numbers]
