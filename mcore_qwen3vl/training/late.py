"""What the device will have told the host by the next step, so that no step waits for it."""

from __future__ import annotations

import math

import torch
from torch import Tensor


class Late:
    """Numbers of a device tensor, on their way to the host.

    Args:
        values: 1-D.
    """

    def __init__(self, values: Tensor) -> None:
        self._event = torch.cuda.Event() if values.is_cuda else None
        self._values = values
        if self._event is not None:
            self._values = torch.empty_like(values, device="cpu", pin_memory=True)
            self._values.copy_(values, non_blocking=True)
            self._event.record()

    def read(self) -> list[float]:
        """Waits if they have not arrived; a step later they have."""
        if self._event is not None and not self._event.query():
            self._event.synchronize()
        return list(self._values.tolist())


class NormCheck:
    """Stops a run at a gradient norm that is no number, a step late, but before it is saved.

    Megatron's own check waits twice for each bucket of gradients, inside the backward pass.
    """

    def __init__(self) -> None:
        self._pending: tuple[int, Late] | None = None

    def add(self, norm: float | Tensor | None, iteration: int) -> None:
        """
        Args:
            norm: of this iteration, one value; None: nothing trains on this rank's pipeline.
            iteration: its number.

        Raises:
            FloatingPointError: the norm before is infinite or no number.
        """
        self.settle()
        if norm is not None:
            values = norm.detach().reshape(1) if isinstance(norm, Tensor) else torch.tensor([norm])
            self._pending = iteration, Late(values)

    def settle(self) -> None:
        """Check what was added last, which may have to be waited for.

        Raises:
            FloatingPointError: it is infinite or no number.
        """
        pending, self._pending = self._pending, None
        if pending is None:
            return
        iteration, (norm,) = pending[0], pending[1].read()
        if not math.isfinite(norm):
            raise FloatingPointError(
                f"The gradient norm of iteration {iteration} is {norm}. No checkpoint holds its "
                "step. Go on from the last one, with a lower --lr or other data; without "
                "--no-check-for-nan-in-loss-and-grad Megatron says in which rank it appeared."
            )
