"""The process of a data worker: how it starts, and that it ends with its parent."""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from megatron.energon.savable_loader import SavableCheckpoint
from torch.utils.data import get_worker_info

_LOOK = 1.0  # seconds between two checks that the parent lives


def start_worker(start: Callable[[int], None], temporary: Path, worker: int) -> None:
    """Start a data worker that ignores SIGTERM from all but its parent (``worker_init_fn``).

    torchrun and Slurm signal a rank's whole process group. The rank then finishes its step and
    saves the loader's state; it would crash if a worker were gone.

    A worker ends within a second of its parent. PyTorch's own worker checks for its parent too, but
    not while it prepares a batch, and it waits for ever to write to a full pipe.
    """
    start(worker)
    _note_start(get_worker_info())
    # The worker's own folder would be left behind when the worker is terminated.
    multiprocessing.current_process()._config["tempdir"] = str(temporary)  # type: ignore[attr-defined]
    if hasattr(signal, "sigtimedwait"):  # not on macOS
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
        threading.Thread(target=_exit_with_parent, args=(os.getppid(),), daemon=True).start()


def _note_start(info: Any) -> None:
    """Note where this worker starts, so that a state saved before its first batch is right.

    Energon's worker answers a request for its state as soon as its thread runs, which may be before
    it restores its own. Without this note, it would answer that it starts at the first sample and
    skips one batch more than it should (megatron-energon 7.4, `SavableDatasetWrapper.__iter__`).
    """
    dataset = info.dataset
    state = dataset._workers_restore_from[(info.id + dataset._worker_offset) % info.num_workers]
    index = 0 if state is None else state.sample_index
    dataset._last_checkpoints = [
        SavableCheckpoint(state=state, checkpoint_time=time.perf_counter(), sample_index=index)
    ]


def _exit_with_parent(parent: int) -> None:
    """Wait until the parent sends SIGTERM or is gone, then end this process at once."""
    while os.getppid() == parent:
        received = signal.sigtimedwait({signal.SIGTERM}, _LOOK)
        if received is not None and received.si_pid == parent:
            break
    os._exit(0)
