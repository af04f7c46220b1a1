"""The validation losses of a run: which step was the best, and whether it is time to stop.

They are kept in ``validation.json`` in ``--save``, so that a resumed run goes on counting. Every
rank receives the same losses, and so decides the same.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from operator import itemgetter
from pathlib import Path
from typing import Any

import torch.distributed as dist
from megatron.training import get_args

from mcore_qwen3vl.errors import BadInput
from mcore_qwen3vl.files import write_at_once
from mcore_qwen3vl.json_and_yaml import read_object_or_empty
from mcore_qwen3vl.settings.run import RunSettings
from mcore_qwen3vl.training.checkpoints.removal import remove_checkpoint
from mcore_qwen3vl.training.logs.terminal import loss_name

FILE = "validation.json"


def _read_validations(
    file: Path,
) -> tuple[list[tuple[int, float]], int | None, int | None] | None:
    """Return the losses in a ``validation.json``, and the steps that are kept and exported.

    Raises:
        BadInput: the file holds something else.
    """
    if not (saved := read_object_or_empty(file)):
        return None
    try:
        losses = [(int(i), math.nan if x is None else float(x)) for i, x in saved["losses"]]
        kept, exported = (step and int(step) for step in (saved["kept"], saved.get("exported")))
    except (LookupError, OverflowError, TypeError, ValueError) as error:
        raise BadInput(f"{file} is damaged ({error!r:.200}). Copy it again.") from None
    return losses, kept, exported


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
        self._last_elsewhere = 0  # up to this step, checkpoints are in another folder than --save

    @property
    def best(self) -> tuple[int, float] | None:
        """Iteration and value of the lowest finite loss, the earliest of equal ones, or None."""
        known = [entry for entry in self._losses if math.isfinite(entry[1])]
        return min(known, key=itemgetter(1), default=None)

    @property
    def is_exhausted(self) -> bool:
        """Whether the last ``--early-stop-patience`` validations were no better than the best."""
        if self._patience is None or not self._losses:
            return False
        best = self._losses.index(self.best) if self.best else 0
        return len(self._losses) - 1 - best >= self._patience

    def read_losses(self, iteration: int, *, comparable: bool = True) -> bool:
        """Read the resumed run's losses up to its checkpoint's iteration; a collective.

        If they are not `comparable` with those to come, they are forgotten. The checkpoint of the
        best of them stays, since nothing shows that a later one is better.

        Returns:
            Whether there were losses that are forgotten.
        """
        if not self._wanted:
            return False
        shared: list[Any] = [None]
        load = self._checkpoints.load
        assert load is not None
        file = Path(load) / FILE
        if dist.get_rank() == 0:
            try:
                shared = [_read_validations(file)]
            except BadInput as flaw:
                shared = [flaw]
        dist.broadcast_object_list(shared, src=0)
        if isinstance(saved := shared[0], BadInput):
            raise saved
        if saved is not None:
            losses, *steps = saved
            self._losses = [entry for entry in losses if entry[0] <= iteration]
            # Of another folder's checkpoints none is ours to remove.
            if load == self._checkpoints.save:
                # A later step than the checkpoint's is one that this run makes again.
                self._kept, self.exported = (s if s and s <= iteration else None for s in steps)
            else:
                self._last_elsewhere = iteration
        forgets = bool(self._losses) and not comparable
        if forgets:
            self._losses, self._kept, self.exported = [], None, None
        return forgets

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
        if self.best is None:
            return "no validation has a loss"
        kept = ""
        if self._keeps_best:
            own = self.best[0] > self._last_elsewhere
            kept = f", kept in {self._checkpoints.save if own else self._checkpoints.load}"
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
    def forcing_save_and_exit(self, iteration: int) -> Iterator[None]:
        """Make Megatron save after the best iteration so far, and exit when patience runs out."""
        args = get_args()  # which its loop reads after each iteration
        before = args.save_interval, args.exit_interval
        # Megatron saves and exits where the interval divides the step.
        if self.is_best(iteration):
            args.save_interval = iteration
        if self.is_exhausted:
            args.exit_interval = iteration
        yield
        args.save_interval, args.exit_interval = before

    def keep_if_best(self, iteration: int) -> None:
        """Keep this iteration's checkpoint, if it is the best, and remove that of the best before.

        The checkpoint has been written. A collective.
        """
        if not self.is_best(iteration):
            return
        before, interval, save = self._kept, self._checkpoints.save_interval, self._checkpoints.save
        assert save is not None  # `checks` asks for --save with --keep-best
        # A checkpoint of --save-interval stays anyway, so it is not noted for removal.
        self._kept = None if interval and iteration % interval == 0 else iteration
        # Written before the removal: a crash between them leaves one checkpoint too many, and never
        # a file that names a removed checkpoint.
        self._write()
        dist.barrier()
        if before not in (None, iteration) and dist.get_rank() == 0:
            remove_checkpoint(save, before, ignore_errors=True)

    def _write(self) -> None:
        """Write ``validation.json``, on the first rank of a run that saves."""
        if dist.get_rank() or not self._checkpoints.save:
            return
        file = Path(self._checkpoints.save) / FILE
        # JSON has no NaN and no infinity.
        losses = [(i, loss if math.isfinite(loss) else None) for i, loss in self._losses]
        content = {"best": self.best, "losses": losses, "kept": self._kept}
        content |= {"exported": self.exported} if self.exported else {}
        write_at_once(file, json.dumps(content) + "\n")
