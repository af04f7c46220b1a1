"""A step of more than one pass: those before the one that trains are without gradients.

Each rank holds a part of every sequence. So Megatron's schedule is called several times, and every
pipeline split works.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import replace
from typing import Any

import torch
from megatron.core.utils import unwrap_model
from torch import Tensor

from mcore_qwen3vl.data.encoding.batch import Batch
from mcore_qwen3vl.data.task_inputs import TaskInputs
from mcore_qwen3vl.forward import RunBatch
from mcore_qwen3vl.model.lora_modules import without_factors

Within = Callable[[Any], AbstractContextManager[Any]]
"""Makes a context of the trained model; the context gives the model to run."""


def run_two_passes(
    schedule: Callable[..., Any],
    *,
    first: Callable[..., Any],
    within: Within,
    inputs: Callable[[list[Batch], list[Any]], Iterable[TaskInputs]] = lambda batches, results: (
        results
    ),
    **arguments: Any,
) -> Any:
    """Run Megatron's `schedule` twice, and return what its second call returns.

    An iteration's micro-batches are all read before it begins, and kept until it ends.

    Args:
        schedule: the schedule, which `arguments` are for.
        first: the forward step of the first pass.
        within: gives the model of the first pass.
        inputs: makes each micro-batch's `task` from the micro-batches and from what the loss
            function of `first` returned for each. Only the last stage calls it.
    """
    of_chunks = read_batches(arguments)
    # Stages before the last have no results.
    if results := forward_pass(schedule, arguments, of_chunks, first=first, within=within):
        of_batches = zip(of_chunks[-1], inputs(of_chunks[-1], results), strict=True)
        of_chunks[-1] = [replace(batch, task=task) for batch, task in of_batches]
    return schedule(**{**arguments, "data_iterator": replay(of_chunks)})


def first_pass_step(
    run: RunBatch, values: Callable[[Batch, Tensor, Tensor], Any]
) -> Callable[..., tuple[Tensor, Callable[..., Any]]]:
    """Return the forward step of a first pass, which finds `values` in what `run` returns.

    On the last stage, these get the micro-batch, this rank's positions and the output.
    """

    def step(batches: Iterator[Batch], model: Any) -> tuple[Tensor, Callable[..., Any]]:
        batch = next(batches)
        output, local = run(batch, model)
        # Megatron passes `non_loss_data` by name where it collects what is no loss.
        return output, lambda output, non_loss_data: values(batch, local, output)

    return step


def read_batches(arguments: Mapping[str, Any]) -> list[list[Batch]]:
    """Read the micro-batches of an iteration for each of this rank's pipeline chunks."""
    streams, count = arguments["data_iterator"], arguments["num_microbatches"]
    several = isinstance(streams, list)
    return [[next(stream) for _ in range(count)] for stream in (streams if several else [streams])]


def forward_pass(
    schedule: Callable[..., Any],
    arguments: Mapping[str, Any],
    batches: list[list[Batch]],
    *,
    first: Callable[..., Any],
    within: Within,
) -> list[Any]:
    """Run the forward passes alone; on the last stage return what `first`'s loss function gave."""
    with within(arguments["model"]) as model:
        results: list[Any] = schedule(
            **{
                **arguments,
                "model": model,
                "data_iterator": replay(batches),
                "forward_step_func": first,
                "forward_only": True,
                "collect_non_loss_data": True,
            }
        )
    return results


def replay(of_chunks: list[list[Batch]]) -> Any:
    """Return the micro-batches as Megatron's schedule takes them: one stream, or one a chunk."""
    streams = [iter(batches) for batches in of_chunks]
    return streams if len(streams) > 1 else streams[0]


@contextmanager
def evaluation_mode(model: Any) -> Iterator[Any]:
    """Give the chunks in evaluation mode and without gradients."""
    with ExitStack() as stack:
        stack.enter_context(torch.no_grad())
        for chunk in unwrap_model(model if isinstance(model, list) else [model]):
            stack.callback(chunk.train, chunk.training)  # restores the mode that it had
            chunk.eval()
        yield model


@contextmanager
def without_adapter(model: Any) -> Iterator[Any]:
    """Give the chunks in evaluation mode, without their adapters and without gradients."""
    chunks = unwrap_model(model if isinstance(model, list) else [model])
    with evaluation_mode(model), without_factors([chunk.adapter for chunk in chunks]):
        yield model
