"""A data worker outlives the signal that stops its rank."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable


def start_worker(start: Callable[[int], None], worker: int) -> None:
    """``worker_init_fn`` of a loader: `start`, then ignore SIGTERM from all but the parent.

    torchrun and Slurm signal a rank's whole process group. The rank goes on to finish its step and
    to save the loader's state, which a worker that is gone would turn into a crash.

    Args:
        start: the loader's own function.
        worker: its number.
    """
    start(worker)
    if hasattr(signal, "sigwaitinfo"):  # not on macOS
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
        threading.Thread(target=_obey, args=(os.getppid(),), daemon=True).start()


def _obey(parent: int) -> None:
    while signal.sigwaitinfo({signal.SIGTERM}).si_pid != parent:
        pass
    os._exit(0)
