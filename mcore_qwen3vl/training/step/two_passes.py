"""Two passes over the same micro-batches in a step: the second uses what the first has found.

We call Megatron's schedule twice, first without gradients. So every pipeline split works.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import replace
from typing import Any

import torch
from megatron.core.utils import unwrap_model
from torch import Tensor

from mcore_qwen3vl.data.encoding.batch import Batch
from mcore_qwen3vl.training.step.forward import RunBatch

Within = Callable[[Any], AbstractContextManager[Any]]
"""A function that makes, from the model that trains, a context which gives the model to run."""


def two_passes(
    field: str,
    schedule: Callable[..., Any],
    *,
    first: Callable[..., Any],
    within: Within,
    values: Callable[[list[Batch], list[Any]], list[Any]] = lambda batches, found: found,
    **given: Any,
) -> Any:
    """Run Megatron's `schedule` twice, and return what its second call returns.

    An iteration's micro-batches are all read before it begins, and kept until it ends.

    Args:
        field: the field of a batch that holds what the first pass has found for it.
        schedule: the schedule; `given` are its arguments.
        first: the forward step of the first pass.
        within: gives the model of the first pass.
        values: computes the field's values from the micro-batches and from what the loss function
            of `first` returned for each. Only the last stage calls it.
    """
    held = read(given)
    if found := forward_pass(schedule, given, held, first=first, within=within):
        of_batches = zip(held[-1], values(held[-1], found), strict=True)
        held[-1] = [replace(batch, **{field: value}) for batch, value in of_batches]
    return schedule(**{**given, "data_iterator": replayed(held)})


def finding(
    run: RunBatch, values: Callable[[Batch, Tensor, Tensor], Any]
) -> Callable[..., tuple[Tensor, Callable[..., Any]]]:
    """Return the forward step of a first pass, which finds `values` in what `run` returns.

    On the last stage, these get the micro-batch, this rank's positions and the output.
    """

    def step(batches: Iterator[Batch], model: Any) -> tuple[Tensor, Callable[..., Any]]:
        batch = next(batches)
        output, local = run(batch, model)
        return output, lambda output, non_loss_data: values(batch, local, output)

    return step


def read(given: Mapping[str, Any]) -> list[list[Batch]]:
    """Read the micro-batches of an iteration for each of this rank's pipeline chunks."""
    streams, count = given["data_iterator"], given["num_microbatches"]
    several = isinstance(streams, list)
    return [[next(one) for _ in range(count)] for one in (streams if several else [streams])]


def forward_pass(
    schedule: Callable[..., Any],
    given: Mapping[str, Any],
    held: list[list[Batch]],
    *,
    first: Callable[..., Any],
    within: Within,
) -> list[Any]:
    """Run the forward passes alone; on the last stage return what `first`'s loss function gave."""
    with within(given["model"]) as model:
        found: list[Any] = schedule(
            **{
                **given,
                "model": model,
                "data_iterator": replayed(held),
                "forward_step_func": first,
                "forward_only": True,
                "collect_non_loss_data": True,
            }
        )
    return found


def replayed(held: list[list[Batch]]) -> Any:
    """Return the micro-batches as Megatron's schedule takes them: one stream, or one a chunk."""
    streams = [iter(batches) for batches in held]
    return streams if len(streams) > 1 else streams[0]


@contextmanager
def evaluated(model: Any) -> Iterator[Any]:
    """Give the chunks in evaluation mode and without gradients."""
    chunks: Sequence[Any] = unwrap_model(model if isinstance(model, list) else [model])
    training = [chunk.training for chunk in chunks]
    with ExitStack() as stack:
        stack.enter_context(torch.no_grad())
        for chunk, mode in zip(chunks, training, strict=True):
            stack.callback(chunk.train, mode)
            chunk.eval()
        yield model
