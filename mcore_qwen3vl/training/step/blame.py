"""Which records a step was made of, for the message about a loss that is no number."""

from __future__ import annotations

from torch import Tensor

Names = tuple[str, ...]
"""Of the samples of a micro-batch: file and line."""

_SHOWN = 8
_KEPT_STEPS = 2  # the gradient norm is checked a step late


class StepRecords:
    """The micro-batches of this rank's last steps, and their losses where they are known."""

    def __init__(self) -> None:
        self._running: dict[Names, Tensor | None] = {}
        self._done: dict[int, dict[Names, Tensor | None]] = {}

    def add(self, names: Names, loss: Tensor | None = None) -> None:
        """Note a micro-batch of the step that runs.

        Args:
            names: of its samples.
            loss: scalar, on the device, which it stays on; None before it is known, and on the
                ranks that compute none.
        """
        self._running[names] = loss

    def finish(self, step: int) -> None:
        """Count what was added to `step`, as the log counts."""
        self._done[step], self._running = self._running, {}
        self._done = dict(list(self._done.items())[-_KEPT_STEPS:])

    def explain(self, step: int) -> FloatingPointError:
        """Make the error that names the records of `step`; waits for the device."""
        batches = self._done.get(step, self._running)
        bad = [n for n, loss in batches.items() if loss is not None and not loss.isfinite().item()]
        what = "loss is" if bad else "gradients are"
        return FloatingPointError(
            f"In step {step} the {what} NaN or infinite, on {_listing(bad or list(batches))}. No "
            "checkpoint holds that step. To go on without its records, run the same command with "
            f"--iterations-to-skip {step}. Where loss or gradient norm had grown before, lower "
            "--lr: begin anew, or from a checkpoint with --load DIR --finetune and another --save"
        )


def _listing(batches: list[Names]) -> str:
    names = list(dict.fromkeys(name for batch in batches for name in batch))
    rest = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return ", ".join(names[:_SHOWN]) + rest if names else "records that this rank does not know"
