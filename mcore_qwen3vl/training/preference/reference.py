"""The reference as the model with its adapter switched off: one more forward pass per step.

We call Megatron's schedule twice on the same micro-batches, first without the adapter and without
gradients. So every pipeline split works, and there is no second model.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from megatron.core.utils import unwrap_model
from torch import Tensor

from mcore_qwen3vl.data.encoding.batch import Batch
from mcore_qwen3vl.model.lora.adapter_module import switched_off
from mcore_qwen3vl.training.preference.objective import answer_log_probs
from mcore_qwen3vl.training.step.forward import forward


def with_reference(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Callable[..., Any]:
    """Replace ``get_forward_backward_func``: return schedules that first compute the reference.

    An iteration's micro-batches are all read before it begins, and kept until it ends.
    """
    schedule = original(*args, **kwargs)

    def run(**given: Any) -> Any:
        streams = given["data_iterator"]
        several = isinstance(streams, list)
        count = given["num_microbatches"]
        held = [[next(one) for _ in range(count)] for one in (streams if several else [streams])]
        with _reference_model(given["model"]):
            found = schedule(
                **{
                    **given,
                    "data_iterator": _replayed(held, several),
                    "forward_step_func": _step,
                    "forward_only": True,
                    "collect_non_loss_data": True,
                }
            )
        if found:  # the last stage
            pairs = zip(held[-1], found, strict=True)
            held[-1] = [replace(batch, references=reference) for batch, reference in pairs]
        return schedule(**{**given, "data_iterator": _replayed(held, several)})

    return run


def _replayed(held: list[list[Batch]], several: bool) -> Any:
    streams = [iter(batches) for batches in held]
    return streams if several else streams[0]


@contextmanager
def _reference_model(model: Any) -> Iterator[None]:
    """Run the chunks in evaluation mode, without their adapters and without gradients."""
    chunks = unwrap_model(model if isinstance(model, list) else [model])
    training = [chunk.training for chunk in chunks]
    with ExitStack() as stack:
        stack.enter_context(torch.no_grad())
        stack.enter_context(switched_off([chunk.adapter for chunk in chunks]))
        for chunk, mode in zip(chunks, training, strict=True):
            stack.callback(chunk.train, mode)
            chunk.eval()
        yield


def _step(batches: Iterator[Batch], model: Any) -> tuple[Tensor, Callable[..., Tensor]]:
    batch = next(batches)
    output, local = forward(batch, model)
    return output, partial(_log_probs, batch, local)


def _log_probs(batch: Batch, local: Tensor, losses: Tensor, *, non_loss_data: bool) -> Tensor:
    return answer_log_probs(batch, local, losses.float())[0]
