"""Stand-ins for what a pipeline stage learns from other stages, which a simulated rank lacks.

With variable-length transfers (``--pad-to-longest``, or DeepStack features that later stages need)
a stage receives the shape of each tensor from its neighbour. On the pretended device that shape is
all zeros and the tensor is empty. Here such a tensor gets the shape that a real neighbour would
send.
"""

from __future__ import annotations

from collections import Counter, defaultdict
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
from mcore_qwen3vl.runtime.pretended.rank import Rank
from mcore_qwen3vl.training.phases import BACKWARD, FORWARD


@contextmanager
def patterns_of_other_stages() -> Iterator[None]:
    """Let ``--freeze`` name parts that this stage lacks, because an absent stage may have them."""
    check = Freezing.check

    def of_one_stage(self: Freezing) -> Trained:
        self._used |= {*self._frozen, *self._trainable}
        return check(self)

    with mock.patch.object(Freezing, "check", of_one_stage):
        yield


@contextmanager
def shapes_from_neighbours() -> Iterator[None]:
    """Give the empty tensors that a stage receives their shape, when they are used."""
    from megatron.core.pipeline_parallel import schedules

    sent = WeakTensorKeyDictionary()  # output -> shape that it had when it was sent; freed then
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
            # Changed in place: it is a leaf, whose gradient is sent back.
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
    """Counts the work of each virtual stage of this rank, forward and backward separately."""

    def __init__(self, rank: Rank) -> None:
        self._rank = rank
        self._stage_of = WeakTensorKeyDictionary()  # output -> its virtual stage
        self._done: Counter[int] = Counter()  # micro-batches of each virtual stage
        self._work: defaultdict[tuple[int, str], Counter[str]] = defaultdict(Counter)

    def of_iteration(self) -> list[dict[str, dict[str, float]]]:
        """Return each virtual stage's ``forward`` and ``backward`` work, and reset the counts.

        Returns:
            For each virtual stage, the work of one micro-batch: the mean over the iteration's. See
            :meth:`.rank.Rank.tally` for its keys.
        """
        found = [
            {
                direction: {k: n / done for k, n in self._work[stage, direction].items()}
                for direction in (FORWARD, BACKWARD)
            }
            for stage, done in sorted(self._done.items())
        ]
        self._done.clear()
        self._work.clear()
        return found

    def forward(self, original: Any) -> Any:
        """Wrap mcore's ``forward_step`` to count its work."""

        def forward_step(*args: Any, vp_stage: int | None = None, **kwargs: Any) -> Any:
            stage = vp_stage or 0
            with self._counted(stage, FORWARD):
                result = original(*args, vp_stage=vp_stage, **kwargs)
            self._done[stage] += 1
            self._stage_of[_only(result[0])] = stage
            return result

        return forward_step

    def backward(self, original: Any) -> Any:
        """Wrap mcore's ``backward_step`` to count its work."""

        def backward_step(input_tensor: Any, output_tensor: Any, *args: Any) -> Any:
            with self._counted(self._stage_of[_only(output_tensor)], BACKWARD):
                return original(input_tensor, output_tensor, *args)

        return backward_step

    @contextmanager
    def _counted(self, stage: int, direction: str) -> Iterator[None]:
        before = self._rank.tally()
        yield
        self._work[stage, direction] += self._rank.tally() - before


def _only(output: Any) -> Any:
    """Return the tensor of an output, which some schedules keep in a list."""
    return output[0] if isinstance(output, list) else output


def _micro_batch_size() -> int:
    from megatron.training import get_args

    return int(get_args().micro_batch_size)
