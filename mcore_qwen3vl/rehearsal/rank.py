"""One rank of a training run on the simulated GPU, with its own entry point.

Run ``python -m mcore_qwen3vl.simulated_gpu --world-size 8 -m mcore_qwen3vl.rehearsal.rank``
followed by the flags of ``launch/train.py``. The rank must be the first of its TP x CP group. On a
later pipeline stage it reads the batches itself, because no first stage sends them.

With variable-length transfers (``--pad-to-longest``, or DeepStack features that later stages need)
a stage receives the shape of each tensor from its neighbour. On the simulated GPU that shape is all
zeros and the tensor is empty. Here such a tensor gets the shape that a real neighbour would send.
"""

from __future__ import annotations

import resource
import sys
import traceback
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn
from torch.utils.weak import WeakTensorKeyDictionary

from mcore_qwen3vl.console import visible
from mcore_qwen3vl.converters.mapping.parameters import kind_of_parameter
from mcore_qwen3vl.data.encoding.batch import Batch
from mcore_qwen3vl.errors import BadInput
from mcore_qwen3vl.memory_labels import label_module
from mcore_qwen3vl.model import flops
from mcore_qwen3vl.model.flops import Trained
from mcore_qwen3vl.rehearsal import holders, stubs
from mcore_qwen3vl.rehearsal.holders import BACKWARD, FORWARD
from mcore_qwen3vl.simulated_gpu import rank as this_rank
from mcore_qwen3vl.simulated_gpu.device import place_of
from mcore_qwen3vl.simulated_gpu.rank import (
    RARELY_WRITING,
    History,
    Rank,
    record_allocations,
)
from mcore_qwen3vl.training.arguments.command_line import CommandLine
from mcore_qwen3vl.training.events import Built, Phase, RunObserver
from mcore_qwen3vl.training.logs import metrics

label_module(__file__, None)  # what Megatron's functions allocate within ours is their callers'
RARELY_WRITING.add("zero_empty")  # an expert without a token is rare

OnSetup = Callable[[list[nn.Module], Any, list[nn.Module]], None]
"""Takes the model's chunks, the optimizer, and the chunks of the second model, if any."""


def main(argv: Sequence[str], on_setup: OnSetup = lambda *_: None) -> None:
    """Train as the flags say, and record the intervals and facts in this process's rank.

    The intervals are ``model and optimizer``, then ``iteration 1`` and so on. The facts are:

    - ``batch``: the shapes of the first batch.
    - ``parameters``: number of values that this rank trains.
    - ``without gradient``: names of trained parameters that received no gradient.
    - ``not on the device``: names of parameters and buffers that are not on the device.
    - ``work``: see :meth:`StageWork.take_iteration`.
    - ``tokens`` and ``useful flops``: those of this rank's samples in the last iteration, counted
      as for the log's tokens/s and MFU.

    Raises:
        BadInput: see :func:`mcore_qwen3vl.training.run.main`; or this process is no simulated
            rank, or not the first of its TP x CP group.
    """
    rank = this_rank.current
    if rank is None:
        raise BadInput(
            "Start it with python -m mcore_qwen3vl.simulated_gpu -m mcore_qwen3vl.rehearsal.rank."
        )
    from megatron.core.pipeline_parallel import combined_1f1b, schedules
    from megatron.core.pipeline_parallel.utils import ScheduleNode
    from megatron.training import utils

    from mcore_qwen3vl.simulated_gpu.rank import count_transformer_engine
    from mcore_qwen3vl.training import run

    command = CommandLine(argv)
    if command.settings.compute.moe_token_dispatcher_type == "flex":
        stubs.install_deep_ep()
    if command.architecture.delta_net is not None:
        stubs.install_linear_attention()

    watch = _Watch(rank, command, on_setup)
    work = watch.work
    wrapped: tuple[tuple[Any, str, Callable[[Any], Any]], ...] = (
        (schedules, "forward_step", work.wrap_forward_step),
        (schedules, "backward_step", work.wrap_backward_step),
        (combined_1f1b, "combined_forward_backward_step", work.wrap_combined_step),
        (ScheduleNode, "_backward", work.wrap_node_backward),
        (utils, "is_last_rank", lambda original: _is_in_last_group),
    )
    with ExitStack() as stack:
        for owner, name, wrap in wrapped:
            stack.enter_context(mock.patch.object(owner, name, wrap(getattr(owner, name))))
        stack.enter_context(count_transformer_engine(rank.work.counts))
        stack.enter_context(give_shapes_of_neighbours())
        run.main(command, watch, rehearsed=True)


class _Watch(RunObserver):
    """Records intervals and phases, checks the parameters, and counts the samples of a step."""

    def __init__(self, rank: Rank, command: CommandLine, on_setup: OnSetup) -> None:
        self._rank = rank
        self._architecture = command.architecture
        self._mtp = bool(command.settings.loop.mtp_num_layers)
        self._on_setup = on_setup
        self._facts = rank.report.facts
        self.work = StageWork(rank)
        self._samples = metrics.Work()
        self._built: Built | None = None
        self._reached: set[str] = set()

    def begin(self, built: Built) -> None:
        """Watch the parameters, and end the first interval."""
        from megatron.core.utils import unwrap_model

        self._built = built
        self._watch_parameters(built.chunks)
        for chunk in unwrap_model(built.chunks):
            chunk.fill_received = _fill_empty
        self._on_setup(built.chunks, built.optimizer, built.second)
        self._rank.end_interval("model and optimizer")

    def step(self, iteration: int) -> None:
        """Report the facts of the step, and end its interval."""
        assert self._built is not None
        self._facts["work"] = self.work.take_iteration()
        self._facts |= self._useful_flops(self._built.trained)
        parameters = _named_parameters(self._built.chunks).items()
        trained = {name for name, parameter in parameters if parameter.requires_grad}
        self._facts["without gradient"] = sorted(trained - self._reached)
        self._reached.clear()
        self._rank.end_interval(f"iteration {iteration}")

    def during(self, phase: Phase) -> AbstractContextManager[object]:
        """Count host syncs and launches under the phase."""
        return self._rank.device.phase(phase)

    def _useful_flops(self, trained: Trained) -> dict[str, float]:
        """Return the facts about the samples since the last call, which are then forgotten."""
        done, self._samples = self._samples, metrics.Work()
        useful = flops.model(
            self._architecture,
            done.counts.tokens,
            done.squared_lengths,
            done.counts.patches,
            done.squared_frames,
            trained,
            mtp=self._mtp,
        )
        return {"tokens": done.counts.tokens, "useful flops": useful}

    def batch(self, batch: Batch) -> None:
        """Count a batch, and report the shapes of the first one."""
        self._samples.add(batch)
        pixels = None if batch.visual is None else tuple(batch.visual.pixel_values.shape)
        # A tail of padding counts as one.
        samples = None if batch.cu_seqlens is None else len(batch.cu_seqlens) - 1
        shapes = {"tokens": tuple(batch.input_ids.shape), "packed": samples, "patches": pixels}
        self._facts.setdefault("batch", shapes)

    def _watch_parameters(self, model: list[nn.Module]) -> None:
        """Report what parameters there are, and note from now on which of them get a gradient."""
        buffers = {f"{i}.{n}": b for i, part in enumerate(model) for n, b in part.named_buffers()}
        tensors = {**_named_parameters(model), **buffers}
        self._facts["not on the device"] = sorted(n for n, t in tensors.items() if not t.is_cuda)
        trained = {n: p for n, p in _named_parameters(model).items() if p.requires_grad}
        self._facts["parameters"] = sum(p.numel() for p in trained.values())
        for name, parameter in trained.items():
            # Bound as a default: a closure would add the last parameter's name alone.
            reach = partial(self._reached.add, name)
            parameter.register_post_accumulate_grad_hook(lambda _, reach=reach: reach())


class StageWork:
    """Counts the work of each virtual stage of this rank, forward and backward separately."""

    def __init__(self, rank: Rank) -> None:
        self._rank = rank
        self._stage_of = WeakTensorKeyDictionary()  # output -> its virtual stage
        self._done: Counter[int] = Counter()  # micro-batches of each virtual stage
        self._work: defaultdict[tuple[int, str], Counter[str]] = defaultdict(Counter)
        self._backward: Counter[str] = Counter()  # of the combined step in progress

    def take_iteration(self) -> list[dict[str, dict[str, float]]]:
        """Return each virtual stage's ``forward`` and ``backward`` work, and reset the counts.

        Returns:
            For each virtual stage, the work of one micro-batch: the mean over the iteration's. See
            :meth:`mcore_qwen3vl.simulated_gpu.rank.Rank.tally` for its keys.
        """
        work = [
            {
                direction: {k: n / done for k, n in self._work[stage, direction].items()}
                for direction in (FORWARD, BACKWARD)
            }
            for stage, done in sorted(self._done.items())
        ]
        self._done.clear()
        self._work.clear()
        return work

    def wrap_forward_step(self, original: Any) -> Any:
        """Wrap mcore's ``forward_step`` to count its work."""

        def forward_step(*args: Any, vp_stage: int | None = None, **kwargs: Any) -> Any:
            stage = vp_stage or 0
            with self._count_work(stage, FORWARD):
                result = original(*args, vp_stage=vp_stage, **kwargs)
            self._done[stage] += 1
            self._stage_of[_tensor_of(result[0])] = stage
            return result

        return forward_step

    def wrap_backward_step(self, original: Any) -> Any:
        """Wrap mcore's ``backward_step`` to count its work."""

        def backward_step(input_tensor: Any, output_tensor: Any, *args: Any) -> Any:
            with self._count_work(self._stage_of[_tensor_of(output_tensor)], BACKWARD):
                return original(input_tensor, output_tensor, *args)

        return backward_step

    def wrap_combined_step(self, original: Any) -> Any:
        """Wrap mcore's ``combined_forward_backward_step``, a forward and a backward in turns."""

        def step(*args: Any, **kwargs: Any) -> Any:
            forward, backward = args[2], args[6]  # the chunks, either of which may be None
            before = self._rank.tally()
            self._backward.clear()
            result = original(*args, **kwargs)
            work = self._rank.tally() - before
            if backward is not None:
                # Without a forward beside it, all that was done is its own.
                own = self._backward if forward is not None else work
                self._work[_virtual_stage_of(backward), BACKWARD] += own
            if forward is not None:
                self._work[_virtual_stage_of(forward), FORWARD] += work - self._backward
                self._done[_virtual_stage_of(forward)] += 1
            return result

        return step

    def wrap_node_backward(self, original: Any) -> Any:
        """Wrap the backward pass of mcore's ``ScheduleNode`` to count its work."""

        def backward(node: Any, *gradients: Any) -> Any:
            before = self._rank.tally()
            result = original(node, *gradients)
            self._backward += self._rank.tally() - before
            return result

        return backward

    @contextmanager
    def _count_work(self, stage: int, direction: str) -> Iterator[None]:
        before = self._rank.tally()
        yield
        self._work[stage, direction] += self._rank.tally() - before


def _virtual_stage_of(chunk: Any) -> int:
    """Return the number of a chunk's virtual stage; 0 without any, where Megatron's is None."""
    from megatron.core.utils import get_attr_wrapped_model

    return get_attr_wrapped_model(chunk, "vp_stage") or 0


def _is_in_last_group() -> bool:
    """Return whether this rank stands for the run's last one, whose TP x CP group it is the first
    of; the last one writes ``--log-json``."""
    from megatron.core import parallel_state
    from torch import distributed as dist

    group = parallel_state.get_tensor_and_context_parallel_world_size()
    return dist.get_rank() + group >= dist.get_world_size()


def _tensor_of(output: Any) -> Any:
    """Return the tensor of an output, which some schedules keep in a list."""
    return output[0] if isinstance(output, list) else output


def _named_parameters(model: list[nn.Module]) -> dict[str, nn.Parameter]:
    return {f"{i}.{n}": p for i, chunk in enumerate(model) for n, p in chunk.named_parameters()}


def measure(flags: Sequence[str], progress: Path) -> dict[str, Any]:
    """Train on this rank, and report what held the memory.

    Args:
        progress: file to which the name of each interval is appended when it ends.

    Returns:
        ``peak``, ``refused`` (or None) and ``over time`` (a list): :class:`.History`'s moments as
        dictionaries; ``error``: None, or what stopped the run; ``parameters``: their number by
        part; ``retries`` of the allocator; ``host bytes``: peak memory of this process.

    Raises:
        BadInput: the flags or the data cannot be used.
    """
    rank = this_rank.current
    assert rank is not None
    models: list[tuple[list[nn.Module], Any, list[nn.Module]]] = []
    record_allocations()
    end_interval = rank.end_interval

    def tell_and_end_interval(name: str) -> Any:
        with progress.open("a", encoding="utf-8") as file:
            file.write(f"{name}\n")
        return end_interval(name)

    rank.end_interval = tell_and_end_interval  # type: ignore[method-assign]
    error = None
    try:
        main(list(flags), lambda *built: models.append(built))
    except BadInput:
        raise
    except BaseException as caught:
        if not isinstance(caught, SystemExit) or caught.code:  # code 0: the run ended by itself
            error = _describe_error(caught)
    history = History(holders.holder_of, _holders_of_storages(*models[0]) if models else {})
    refused = history.last_refused() if error else None
    return {
        "peak": vars(history.peak()),
        "refused": None if refused is None else vars(refused),
        "over time": [vars(moment) for moment in history.over_time()],
        "error": error,
        "parameters": count_parameters_by_kind(models[0][0]) if models else {},
        "retries": torch.cuda.memory_stats().get("num_alloc_retries", 0),
        "host bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
    }


def _describe_error(error: BaseException) -> dict[str, Any]:
    frames = reversed(traceback.extract_tb(error.__traceback__))
    return {
        "kind": type(error).__name__,
        "message": str(error).strip() or repr(error),
        "place": place_of((f.filename, f.lineno, f.name) for f in frames),
        "out of memory": isinstance(error, torch.OutOfMemoryError),
    }


def _holders_of_storages(
    model: list[nn.Module], optimizer: Any, second: list[nn.Module]
) -> dict[int, str]:
    """Return the holder of each lasting storage, by its address."""
    owners: dict[int, str] = {}

    def add(tensors: Iterable[Any], name: str) -> None:
        for tensor in tensors:
            if isinstance(tensor, Tensor) and tensor.is_cuda:
                # A storage that several tensors share has the first holder.
                owners.setdefault(tensor.untyped_storage().data_ptr(), name)

    parameters = [p for chunk in model for p in chunk.parameters()]
    add(parameters, holders.WEIGHTS)
    add((p for chunk in second for p in chunk.parameters()), holders.FROZEN)
    add((getattr(p, "main_grad", None) for p in parameters), holders.GRADIENTS)
    add((p.grad for p in parameters), holders.GRADIENTS)
    # Megatron's wrapper has an attribute named `buffers`.
    add((b for chunk in model for b in nn.Module.buffers(chunk)), holders.BUFFERS)
    add(_optimizer_tensors(optimizer), holders.OPTIMIZER)
    return owners


def _optimizer_tensors(optimizer: Any) -> Iterator[Any]:
    """Yield the main weights and states of the optimizers that Megatron chains."""
    from mcore_qwen3vl.training.optimizer import chained_optimizers

    for part in chained_optimizers(optimizer):
        inner = getattr(part, "optimizer", None)
        for group in getattr(inner, "param_groups", []):
            yield from group["params"]
        for state in getattr(inner, "state", {}).values():
            yield from state.values()


def count_parameters_by_kind(model: list[nn.Module]) -> dict[str, int]:
    """Count the parameters of each kind, as ``inspect`` names them; an adapter is one more."""
    parts: Counter[str] = Counter()
    for chunk in model:
        for name, parameter in chunk.named_parameters():
            part = "adapter" if "adapter." in name else kind_of_parameter(name)
            parts[part] += parameter.numel()
    return dict(parts.most_common())


def _fill_empty(received: Tensor, shape: tuple[int, int, int]) -> None:
    """Give a tensor that nobody has sent its shape; see :attr:`.Qwen3VLModel.fill_received`."""
    if not received.numel():
        # Changed in place: it is a leaf, whose gradient is sent back.
        received.data = received.new_empty(shape)


@contextmanager
def give_shapes_of_neighbours() -> Iterator[None]:
    """Give the empty gradients that a stage receives their shape, when they are used."""
    from megatron.core.pipeline_parallel import combined_1f1b, schedules

    sent = WeakTensorKeyDictionary()  # output -> shape that it had when it was sent; freed then
    free, backward = schedules.deallocate_output_tensor, schedules.custom_backward
    combined = combined_1f1b.combined_forward_backward_step

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

    with (
        mock.patch.object(schedules, "deallocate_output_tensor", deallocate_output_tensor),
        mock.patch.object(schedules, "custom_backward", custom_backward),
        mock.patch.object(
            combined_1f1b, "combined_forward_backward_step", combined_forward_backward_step
        ),
    ):
        yield


if __name__ == "__main__":
    try:
        main(sys.argv[1:])
    except BadInput as error:
        print(f"error: {visible(str(error))}", file=sys.stderr)
        sys.exit(error.exit_code)
