"""Validation losses of a run: which step was the best, and whether it is time to stop.

They are kept in ``validation.json`` in ``--save``, so that a resumed run goes on counting. Every
rank receives the same losses, and so decides the same.
"""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch.distributed as dist
from megatron.training import get_args

from mcore_qwen3vl.converters.place import folder_name
from mcore_qwen3vl.files import atomic_write
from mcore_qwen3vl.training.arguments.run import RunSettings
from mcore_qwen3vl.training.broadcast import data_state
from mcore_qwen3vl.training.logs.terminal import loss_name

FILE = "validation.json"


class Validations:
    """The validation losses by which ``--early-stop-patience`` and ``--keep-best`` decide."""

    def __init__(self, settings: RunSettings) -> None:
        self._keeps_best = settings.training.keep_best
        self._patience = settings.training.early_stop_patience
        self._wanted = self._keeps_best or self._patience is not None
        self._checkpoints, self._exports = settings.checkpoints, settings.model.save_hf
        self._losses: list[tuple[int, float]] = []  # by iteration, ascending
        self.exported: int | None = None
        """The step that ``--save-hf`` has as the best."""
        self._kept: int | None = None  # the best step, if its checkpoint is kept only for that

    @property
    def best(self) -> tuple[int, float] | None:
        """Iteration and loss of the first lowest loss; None before the first validation."""
        return min(
            self._losses,
            key=lambda entry: math.inf if math.isnan(entry[1]) else entry[1],
            default=None,
        )

    @property
    def is_exhausted(self) -> bool:
        """Whether the last ``--early-stop-patience`` validations were no better than the best."""
        if self._patience is None or self.best is None:
            return False
        return len(self._losses) - 1 - self._losses.index(self.best) >= self._patience

    def resume(self, iteration: int) -> None:
        """Read the resumed run's losses up to its checkpoint's iteration; a collective."""
        if not self._wanted:
            return
        shared: list[Any] = [None]
        load = self._checkpoints.load
        assert load is not None
        file = Path(load) / FILE
        if dist.get_rank() == 0 and file.exists():
            shared = [json.loads(file.read_text(encoding="utf-8"))]
        dist.broadcast_object_list(shared, src=0)
        if shared[0] is not None:
            self._losses = [(i, loss) for i, loss in shared[0]["losses"] if i <= iteration]
            if load == self._checkpoints.save:
                self._kept, self.exported = shared[0]["kept"], shared[0].get("exported")

    def add(self, iteration: int, losses: Mapping[str, Any]) -> None:
        """Record the loss of the validation after `iteration`; a collective.

        Only the last rank needs `losses`, the result of Megatron's ``evaluate``.
        """
        known = self._losses and self._losses[-1][0] == iteration  # Megatron validates twice there
        if known or not self._wanted:
            return
        # The last rank has the loss and broadcasts it.
        name = loss_name(losses)
        shared = [float(losses[name]) if name else math.nan]
        dist.broadcast_object_list(shared, src=dist.get_world_size() - 1)
        self._losses.append((iteration, shared[0]))
        self._write()

    def __str__(self) -> str:
        assert self.best is not None
        kept = f", kept in {self._checkpoints.save}" if self._keeps_best else ""
        if self.exported == self.best[0]:
            kept += f", exported to {self._exports}/best"
        return f"best validation loss {self.best[1]:.4f} after step {self.best[0]}{kept}"

    def is_best(self, iteration: int) -> bool:
        """Return whether to keep this iteration's checkpoint as the best."""
        return bool(self._keeps_best and self.best and self.best[0] == iteration)

    def note_export(self, iteration: int) -> None:
        """Note that ``--save-hf`` has this iteration as the best."""
        self.exported = iteration
        self._write()

    @contextmanager
    def due(self, iteration: int) -> Iterator[None]:
        """Make Megatron save after the best iteration so far, and exit when patience runs out."""
        args = get_args()  # which its loop reads after each iteration
        before = args.save_interval, args.exit_interval
        if self.is_best(iteration):
            args.save_interval = iteration
        if self.is_exhausted:
            args.exit_interval = iteration
        yield
        args.save_interval, args.exit_interval = before

    def keep(self, iteration: int) -> None:
        """Keep this iteration's checkpoint, if it is the best, and remove that of the best before.

        The checkpoint has been written. A collective.
        """
        if not self.is_best(iteration):
            return
        before, interval, save = self._kept, self._checkpoints.save_interval, self._checkpoints.save
        assert save is not None  # `checks` asks for --save with --keep-best
        self._kept = None if interval and iteration % interval == 0 else iteration
        self._write()
        dist.barrier()
        if before not in (None, iteration) and dist.get_rank() == 0:
            shutil.rmtree(Path(save) / folder_name(before), ignore_errors=True)
            shutil.rmtree(data_state.folder_of(save, before), ignore_errors=True)

    def _write(self) -> None:
        if dist.get_rank() or not self._checkpoints.save:
            return
        file = Path(self._checkpoints.save) / FILE
        content = {"best": self.best, "losses": self._losses, "kept": self._kept}
        content |= {"exported": self.exported} if self.exported else {}
        with atomic_write(file, remedy=None) as partial:
            partial.write_text(json.dumps(content) + "\n", encoding="utf-8")
