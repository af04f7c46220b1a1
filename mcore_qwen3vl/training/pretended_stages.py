"""What one pipeline stage knows from the others, where there are none.

Tensors under variable-length transfers (``--pad-to-longest``, or DeepStack features that later
stages need): a stage learns the shape of what comes from its neighbour. On the pretended device
that shape is zeros, and the tensor empty: it is given here the shape that the neighbour's would
have.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from mcore_qwen3vl.model.flops import Trained
from mcore_qwen3vl.model.freeze import Freezing
from mcore_qwen3vl.model.fusion import FusionPlan
from mcore_qwen3vl.model.qwen3vl import Qwen3VLModel
from mcore_qwen3vl.runtime.pretended.flops import CountFlops


@contextmanager
def patterns_of_other_stages() -> Iterator[None]:
    """Inside, ``--freeze`` may name what this stage has nothing of: another one may, unseen."""
    check = Freezing.check

    def of_one_stage(self: Freezing) -> Trained:
        self._used |= {*self._frozen, *self._trainable}
        return check(self)

    with mock.patch.object(Freezing, "check", of_one_stage):
        yield


@contextmanager
def shapes_from_neighbours() -> Iterator[None]:
    """Inside, empty tensors that a stage received get their shape when they are used."""
    from megatron.core.pipeline_parallel import schedules

    sent = WeakTensorKeyDictionary()  # to the shapes of what was sent, which is freed then
    free, backward = schedules.deallocate_output_tensor, schedules.custom_backward
    receive = Qwen3VLModel._receive

    def deallocate_output_tensor(out: Any, deallocate_pipeline_outputs: bool = False) -> None:
        if isinstance(out, Tensor) and out not in sent:
            sent[out] = out.shape
        free(out, deallocate_pipeline_outputs)

    def custom_backward(output: Tensor, grad_output: Tensor | None) -> None:
        if grad_output is not None and not grad_output.numel():
            grad_output = grad_output.new_empty(sent[output])
        backward(output, grad_output)

    def _receive(self: Qwen3VLModel, seq_len: int, plan: FusionPlan) -> Tensor | None:
        received = self.decoder.input_tensor
        if received is not None and not received.numel():
            batch = _micro_batch_size()
            rows = self._deepstack_in * len(plan.destination)
            # A leaf, whose gradient is sent back: its shape is changed in place.
            received.data = received.new_empty(
                seq_len + -(-rows // batch), batch, self.config.hidden_size
            )
        return receive(self, seq_len, plan)

    with (
        mock.patch.object(schedules, "deallocate_output_tensor", deallocate_output_tensor),
        mock.patch.object(schedules, "custom_backward", custom_backward),
        mock.patch.object(Qwen3VLModel, "_receive", _receive),
    ):
        yield


class Work:
    """FLOPs of each virtual stage of this rank, forward and backward told apart."""

    def __init__(self, flops: CountFlops) -> None:
        self._flops = flops
        self._stage_of = WeakTensorKeyDictionary()  # which virtual stage an output is of
        self._counts: dict[int, list[int]] = {}  # micro-batches, forward, backward

    def of_iteration(self) -> list[tuple[float, float]]:
        """Forward and backward of a micro-batch, for each virtual stage; then it starts anew."""
        counts, self._counts = self._counts, {}
        return [
            (forward / done, backward / done)
            for _, (done, forward, backward) in sorted(counts.items())
        ]

    def forward(self, original: Any) -> Any:
        """mcore's ``forward_step``, counted."""

        def forward_step(*args: Any, vp_stage: int | None = None, **kwargs: Any) -> Any:
            before = self._flops.counts.total()
            result = original(*args, vp_stage=vp_stage, **kwargs)
            counts = self._counts.setdefault(vp_stage or 0, [0, 0, 0])
            counts[0] += 1
            counts[1] += self._flops.counts.total() - before
            self._stage_of[_only(result[0])] = vp_stage or 0
            return result

        return forward_step

    def backward(self, original: Any) -> Any:
        """mcore's ``backward_step``, counted."""

        def backward_step(input_tensor: Any, output_tensor: Any, *args: Any) -> Any:
            stage, before = self._stage_of[_only(output_tensor)], self._flops.counts.total()
            result = original(input_tensor, output_tensor, *args)
            self._counts[stage][2] += self._flops.counts.total() - before
            return result

        return backward_step


def _only(output: Any) -> Any:
    """The tensor of an output, which some schedules keep in a list."""
    return output[0] if isinstance(output, list) else output


def _micro_batch_size() -> int:
    from megatron.training import get_args

    return int(get_args().micro_batch_size)
