"""A data worker outlives the signal that stops its rank, and ends with its rank."""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
from collections.abc import Callable
from pathlib import Path

_LOOK = 1.0  # seconds between two looks for the parent


def start_worker(start: Callable[[int], None], temporary: Path, worker: int) -> None:
    """``worker_init_fn`` of a loader: `start`, then ignore SIGTERM from all but the parent.

    torchrun and Slurm signal a rank's whole process group. The rank goes on to finish its step and
    to save the loader's state, which a worker that is gone would turn into a crash.

    A worker ends within a second of its parent. PyTorch's looks for it too, but not while it
    prepares a batch, and it waits for ever for somebody to empty a full pipe.

    Args:
        start: the loader's own function.
        temporary: folder for the sockets through which it hands over tensors.
        worker: its number.
    """
    start(worker)
    # In place of a folder of its own, which would stay behind when the worker is told to end.
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
