"""The reference as the model with its adapter switched off: one more forward pass per step."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any

from megatron.core.utils import unwrap_model
from torch import Tensor

from mcore_qwen3vl.data.encoding.batch import Batch
from mcore_qwen3vl.model.lora.adapter_module import switched_off
from mcore_qwen3vl.training.preference.objective import answer_log_probs
from mcore_qwen3vl.training.step.forward import forward
from mcore_qwen3vl.training.step.two_passes import evaluated, in_two_passes


def with_reference(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Callable[..., Any]:
    """Replace ``get_forward_backward_func``: return schedules that first compute the reference."""
    schedule = original(*args, **kwargs)

    def run(**given: Any) -> Any:
        return in_two_passes(schedule, given, first=_step, use=_with, within=_reference_model)

    return run


def _with(batches: list[Batch], references: list[Tensor]) -> list[Batch]:
    pairs = zip(batches, references, strict=True)
    return [replace(batch, references=reference) for batch, reference in pairs]


@contextmanager
def _reference_model(model: Any) -> Iterator[None]:
    """Run the chunks in evaluation mode, without their adapters and without gradients."""
    chunks = unwrap_model(model if isinstance(model, list) else [model])
    with evaluated(model), switched_off([chunk.adapter for chunk in chunks]):
        yield


def _step(batches: Iterator[Batch], model: Any) -> tuple[Tensor, Callable[..., Tensor]]:
    batch = next(batches)
    output, local = forward(batch, model)
    return output, partial(_log_probs, batch, local)


def _log_probs(batch: Batch, local: Tensor, losses: Tensor, *, non_loss_data: bool) -> Tensor:
    return answer_log_probs(batch, local, losses.float())[0]
