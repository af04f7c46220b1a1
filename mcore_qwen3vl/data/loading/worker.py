"""Signals and lifetime of a data worker: it ignores SIGTERM from outside and ends with its rank."""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
from collections.abc import Callable
from pathlib import Path

_LOOK = 1.0  # seconds between two checks that the parent lives


def start_worker(start: Callable[[int], None], temporary: Path, worker: int) -> None:
    """Start a data worker that ignores SIGTERM from all but its parent (``worker_init_fn``).

    torchrun and Slurm signal a rank's whole process group. The rank then finishes its step and
    saves the loader's state; it would crash if a worker were gone.

    A worker ends within a second of its parent. PyTorch's own worker checks for its parent too, but
    not while it prepares a batch, and it waits for ever to write to a full pipe.

    Args:
        start: the loader's own ``worker_init_fn``, which is called first.
        temporary: folder for the sockets through which the worker sends tensors.
        worker: the worker's number.
    """
    start(worker)
    # The worker's own folder would be left behind when the worker is terminated.
    multiprocessing.current_process()._config["tempdir"] = str(temporary)  # type: ignore[attr-defined]
    if hasattr(signal, "sigtimedwait"):  # not on macOS
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
        threading.Thread(target=_obey, args=(os.getppid(),), daemon=True).start()


def _obey(parent: int) -> None:
    while os.getppid() == parent:
        received = signal.sigtimedwait({signal.SIGTERM}, _LOOK)
        if received is not None and received.si_pid == parent:
            break
    os._exit(0)
