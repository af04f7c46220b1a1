"""Async host copies: values that are read one step later, so that no step needs a host sync."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor


class AsyncHostCopy:
    """An async host copy of a 1-D tensor's values."""

    def __init__(self, values: Tensor) -> None:
        self._event = torch.cuda.Event() if values.is_cuda else None
        self._values = values
        if self._event is not None:
            self._values = torch.empty_like(values, device="cpu", pin_memory=True)
            self._values.copy_(values, non_blocking=True)
            self._event.record()

    def read(self) -> list[float]:
        """Return the values; waits if they have not arrived, which a step later they have."""
        if self._event is not None and not self._event.query():
            self._event.synchronize()
        return list(self._values.tolist())


class NormCheck:
    """Stops a run at a non-finite gradient norm: one step late, but before that step is saved.

    Megatron's own check takes two host syncs per gradient bucket, inside the backward pass.
    """

    def __init__(self, explain: Callable[[int], FloatingPointError]) -> None:
        self._explain = explain
        self._pending: tuple[int, AsyncHostCopy] | None = None

    def add(self, norm: float | Tensor | None, iteration: int) -> None:
        """Check the norm that was added before, and start copying this one to the host.

        Args:
            norm: gradient norm of this iteration, one value; None if nothing trains on this rank's
                pipeline.

        Raises:
            FloatingPointError: the norm added before is infinite or NaN.
        """
        self.settle()
        if norm is not None:
            values = norm.detach().reshape(1) if isinstance(norm, Tensor) else torch.tensor([norm])
            self._pending = iteration, AsyncHostCopy(values)

    def settle(self) -> None:
        """Check the norm that was added last, waiting for it if necessary; see :meth:`add`."""
        pending, self._pending = self._pending, None
        if pending is None:
            return
        iteration, (norm,) = pending[0], pending[1].read()
        if not math.isfinite(norm):
            raise self._explain(iteration)
