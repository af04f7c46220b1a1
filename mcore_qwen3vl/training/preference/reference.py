"""The reference in memory: one more forward pass per step."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.utils import unwrap_model
from torch import Tensor

from mcore_qwen3vl.data.encoding.batch import Batch
from mcore_qwen3vl.model.lora.adapter_module import switched_off
from mcore_qwen3vl.training.preference.objective import answer_log_probs
from mcore_qwen3vl.training.step.forward import forward
from mcore_qwen3vl.training.step.two_passes import (
    Within,
    evaluated,
    forward_pass,
    read,
    replayed,
    two_passes,
)


def with_reference(
    within: Within, original: Callable[..., Any], *args: Any, **kwargs: Any
) -> Callable[..., Any]:
    """Replace ``get_forward_backward_func``: return schedules that first compute the reference."""
    return two_passes(original(*args, **kwargs), first=_step, use=_with, within=within)


def _with(batches: list[Batch], references: list[Tensor]) -> list[Batch]:
    pairs = zip(batches, references, strict=True)
    return [replace(batch, references=reference.view(-1, 2)) for batch, reference in pairs]


def with_baseline(
    within: Within, original: Callable[..., Any], *args: Any, **kwargs: Any
) -> Callable[..., Any]:
    """Replace ``get_forward_backward_func``: return schedules that first compute KTO's baseline.

    It is a mean over the global batch: over all micro-batches of all data-parallel ranks. So the
    policy and the reference compute the exchanged answers of a whole iteration before the first
    micro-batch is trained.
    """
    schedule = original(*args, **kwargs)

    def run(**given: Any) -> Any:
        held = read(given)
        exchanged = [[batch.exchanged() for batch in batches] for batches in held]
        policy, of_reference, reference = (
            forward_pass(schedule, given, batches, first=_step, within=model)
            for batches, model in ((exchanged, evaluated), (exchanged, within), (held, within))
        )
        if reference:  # the last stage
            baseline = _baseline(policy, of_reference)
            held[-1] = [
                replace(batch, references=one, baseline=baseline)
                for batch, one in zip(held[-1], reference, strict=True)
            ]
        return schedule(**{**given, "data_iterator": replayed(held)})

    return run


def _baseline(policy: list[Tensor], reference: list[Tensor]) -> Tensor:
    """Return the mean difference of log-probabilities over all data-parallel ranks, a scalar.

    A record that is alone in its micro-batch has kept its own answer, and is left out. If all are
    alone, the baseline is 0.
    """
    changes = [p - r for p, r in zip(policy, reference, strict=True) if len(p) > 1]
    found = torch.cat([policy[0].new_zeros(0), *changes])
    sums = torch.stack([found.sum(), torch.full_like(found.sum(), len(found))])
    dist.all_reduce(sums, group=parallel_state.get_data_parallel_group())
    return sums[0] / sums[1].clamp(min=1)


@contextmanager
def without_adapter(model: Any) -> Iterator[Any]:
    """Give the chunks in evaluation mode, without their adapters and without gradients."""
    chunks = unwrap_model(model if isinstance(model, list) else [model])
    with evaluated(model), switched_off([chunk.adapter for chunk in chunks]):
        yield model


def _step(batches: Iterator[Batch], model: Any) -> tuple[Tensor, Callable[..., Tensor]]:
    batch = next(batches)
    output, local = forward(batch, model)
    return output, partial(_log_probs, batch, local)


def _log_probs(batch: Batch, local: Tensor, losses: Tensor, *, non_loss_data: bool) -> Tensor:
    return answer_log_probs(batch, local, losses.float())[0]
