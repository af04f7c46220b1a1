"""Stand-ins for what a pipeline stage gets from other stages, which a simulated rank lacks.

The first stage would send the batches; here each stage reads them itself. With variable-length
transfers (``--pad-to-longest``, or DeepStack features that later stages need) a stage receives the
shape of each tensor from its neighbour. On the simulated GPU that shape is all zeros and the tensor
is empty. Here such a tensor gets the shape that a real neighbour would send.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any
from unittest import mock

from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from mcore_qwen3vl.data.encoding.batch import Batch
from mcore_qwen3vl.data.loader import Loader
from mcore_qwen3vl.errors import BadInput
from mcore_qwen3vl.model.flops import Trained
from mcore_qwen3vl.model.freeze import Freezing
from mcore_qwen3vl.model.fusion import FusionPlan
from mcore_qwen3vl.model.qwen3vl import Qwen3VLModel


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
    from megatron.core.pipeline_parallel import combined_1f1b, schedules
    from megatron.training import get_args

    sent = WeakTensorKeyDictionary()  # output -> shape that it had when it was sent; freed then
    free, backward = schedules.deallocate_output_tensor, schedules.custom_backward
    combined = combined_1f1b.combined_forward_backward_step
    receive = Qwen3VLModel._receive

    def deallocate_output_tensor(out: Any, deallocate_pipeline_outputs: bool = False) -> None:
        if isinstance(out, Tensor) and out not in sent:
            sent[out] = out.shape
        free(out, deallocate_pipeline_outputs)

    def custom_backward(output: Tensor, grad_output: Tensor | None) -> None:
        if grad_output is not None and not grad_output.numel():
            grad_output = grad_output.new_empty(sent[output])
        backward(output, grad_output)

    def combined_forward_backward_step(*args: Any, **kwargs: Any) -> Any:
        *before, output, gradient, config = args
        if isinstance(gradient, Tensor) and not gradient.numel():
            gradient = gradient.new_empty(sent.get(output, output.shape))
        return combined(*before, output, gradient, config, **kwargs)

    def _receive(self: Qwen3VLModel, seq_len: int, plan: FusionPlan) -> Tensor | None:
        received = self.decoder.input_tensor
        if received is not None and not received.numel():
            batch = get_args().micro_batch_size
            rows = self._deepstack_in * len(plan.destination)
            # Changed in place: it is a leaf, whose gradient is sent back.
            received.data = received.new_empty(
                seq_len + -(-rows // batch), batch, self.config.hidden_size
            )
        return receive(self, seq_len, plan)

    with (
        mock.patch.object(schedules, "deallocate_output_tensor", deallocate_output_tensor),
        mock.patch.object(schedules, "custom_backward", custom_backward),
        mock.patch.object(
            combined_1f1b, "combined_forward_backward_step", combined_forward_backward_step
        ),
        mock.patch.object(Qwen3VLModel, "_receive", _receive),
    ):
        yield


def reads_itself(base: Any, on_batch: Callable[[Batch], None], made: Callable[[Any], None]) -> Any:
    """Derive a data provider that reads batches itself on every pipeline stage."""
    from megatron.core import parallel_state

    from mcore_qwen3vl.data.encoding.batch import without_pixels

    class OwnBatches:
        """Replaces the first stage, and returns the batches that it would send."""

        is_source = False

        def __init__(self, loader: Loader) -> None:
            self._loader = loader

        def receive(self) -> Batch:
            batch = next(self._loader)
            if batch.visual is None:
                return batch
            return replace(batch, visual=without_pixels(batch.visual))

    class OwnData(base):
        def _reads(self) -> bool:
            if parallel_state.get_tensor_and_context_parallel_rank() != 0:
                raise BadInput(
                    f"Rank {parallel_state.get_tensor_and_context_parallel_rank()} of a TP x CP "
                    "group is sent its batches, which the simulated GPU cannot do: choose the "
                    "first rank of the group, which does the same work."
                )
            return True

        def __init__(self, *args: Any) -> None:
            super().__init__(*args)
            made(self)

        def _share(self, loader: Any, host_group: Any, feed: Any, *others: Any) -> Any:
            later = parallel_state.get_pipeline_model_parallel_rank() > 0
            loader, feed = (None, OwnBatches(loader)) if later else (loader, None)
            return super()._share(loader, host_group, feed, on_batch, *others)

    return OwnData
