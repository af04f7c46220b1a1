"""Run a function on every rank of a layout, one process per rank, and set up Megatron on a rank.

On the CPU, ranks are forked. A fork of a process that has imported torch and megatron takes
milliseconds; a fresh interpreter needs about fifteen seconds for the imports alone. On CUDA, ranks
are fresh interpreters, because CUDA does not survive a fork, and merely asking whether there is a
GPU may start it.
"""

from __future__ import annotations

import faulthandler
import gc
import multiprocessing
import os
import pickle
import pkgutil
import signal
import time
import traceback
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any, Literal

import torch
import torch.distributed as dist

from mcore_qwen3vl.console import prepare_standard_streams
from mcore_qwen3vl.errors import BadInput, CheckFailed, Unfinished
from mcore_qwen3vl.layout import Layout
from mcore_qwen3vl.runtime import cpu, shared_gpu
from mcore_qwen3vl.runtime.lifetime import (
    end_with_parent,
    how_it_ended,
    noting_ctrl_c,
    protected_children,
    scratch_folder,
)

PATIENCE = 1.0
"""Multiplies every limit of `run_layout`; tests raise it, so that only a hang meets a limit."""

SIMULATED_RANK = "SIMULATED_GPU_RANK"
"""Environment variable that a simulated GPU sets. It names, as ``module:function``, the context in
which a rank's process acts as that rank; the function takes the rank and their number."""

_LONGEST_PATIENCE = 3600.0  # seconds; a longer limit stays as it is

# Ctrl-C reaches the ranks too.
_PASSED_ON = (BadInput, CheckFailed, KeyboardInterrupt)

_GRACE = 2.0  # seconds for the other ranks to report after one has failed, and for leaving


class RanksFailed(Unfinished):
    """One or more ranks raised, died or hung; the message holds each one's traceback."""


@dataclass
class _Rank:
    process: Any
    pipe: Connection
    stacks: Path
    result: Any = None
    error: BaseException | str | None = None
    ended: float | None = None  # when it answered or died, in monotonic seconds
    died: bool = False  # of its own cause: libraries abort a rank that has lost a peer


def _count_gpus(world_size: int) -> int:
    """Return how many GPUs `world_size` ranks have; each has its own on the simulated GPU."""
    return world_size if SIMULATED_RANK in os.environ else torch.cuda.device_count()


def check_gpus() -> None:
    """Raise BadInput, before anything slow begins, if there is no GPU.

    Call it only if the ranks will run on CUDA: counting GPUs may start CUDA in this process.
    """
    if not _count_gpus(1):
        raise BadInput(
            "There is no GPU here for --device cuda: run on the CPU (verify: --device cpu)."
        )


def describe_device(device: str, world_size: int) -> str:
    """Name the device for a report, with the number of GPUs if ranks share them."""
    if device == "cpu" or (gpus := _count_gpus(world_size)) >= world_size:
        return device
    return f"{device}, {world_size} ranks on {gpus} GPU{'s' if gpus > 1 else ''}"


_to_parent: Connection | None = None  # set on ranks only


def tell(what: Any) -> None:
    """Report progress from a rank: :func:`run_layout` calls its `heard` with `what`."""
    if _to_parent is not None:
        _to_parent.send_bytes(pickle.dumps((None, what)))


def run_layout(
    fn: Callable[..., Any],
    world_size: int,
    *args: Any,
    timeout: float = 120.0,
    device: Literal["cpu", "cuda"] = "cpu",
    heard: Callable[[Any], None] = lambda what: None,
) -> list[Any]:
    """Call ``fn(*args)`` on `world_size` ranks with ``torch.distributed`` initialised.

    Args:
        fn: any callable, closures included; it learns its rank from ``torch.distributed``. On
            ``cuda`` it is pickled, so it must be a function or method that a module defines.
        args: arguments of `fn`. On ``cpu`` they pass by fork; on ``cuda`` they must be picklable.
        timeout: seconds until all ranks are killed; multiplied by `PATIENCE`.
        device: ``cpu``: gloo, one thread a rank, with the CPU backend installed. ``cuda``: NCCL,
            one GPU a rank; on a machine with fewer GPUs the ranks share them, and exchange through
            :mod:`.shared_gpu`.
        heard: called in this process with what a rank passes to :func:`tell`.

    Returns:
        What each rank returned, in rank order. Results are pickled, so they hold no CUDA tensors.

    Raises:
        BadInput, CheckFailed, KeyboardInterrupt: a rank raised it, or see :func:`check_gpus`.
        RanksFailed: a rank raised anything else, died, or did not finish in time.
    """
    timeout = max(timeout, min(timeout * PATIENCE, _LONGEST_PATIENCE))
    if device == "cpu" and dist.is_initialized():
        raise BadInput(
            "Ranks are forked, and this process is a rank itself, since it called load_model or "
            "torch.distributed.init_process_group: start them in another process."
        )
    if device == "cpu":
        cpu.install()
    else:
        check_gpus()
    context: Any = multiprocessing.get_context("fork" if device == "cpu" else "spawn")
    ranks: list[_Rank] = []
    with noting_ctrl_c() as raise_if_interrupted, scratch_folder("mcore-qwen3vl-ranks-") as scratch:
        try:
            for rank in range(world_size):
                ours, theirs = context.Pipe(duplex=False)
                work = _Work(fn, args, rank, world_size, timeout, device, scratch)
                process = context.Process(target=_run_rank, args=(work, theirs), daemon=True)
                with protected_children():
                    process.start()
                theirs.close()
                ranks.append(_Rank(process, ours, work.stacks))
                raise_if_interrupted()
            _collect_answers(ranks, timeout, heard)
        finally:
            for r in ranks:
                if r.ended is not None:  # it may still be cleaning up
                    r.process.join(_GRACE)
                r.process.kill()
                r.process.join()
        raise_if_interrupted()
        _raise_errors(ranks, timeout)
    return [r.result for r in ranks]


def initialize(layout: Layout, *, seed: int = 1234) -> None:
    """Set up Megatron's process groups and random states for this rank, unless that is done.

    Raises:
        BadInput: ``torch.distributed`` has another number of ranks than the layout, or the process
            groups are those of other sizes.
    """
    # Imported here, because megatron must not be imported before the CPU backend is installed.
    from megatron.core import parallel_state, tensor_parallel

    if dist.get_world_size() != layout.world_size:
        raise BadInput(
            f"Layout {layout} needs {layout.world_size} ranks; {dist.get_world_size()} are running."
        )
    if parallel_state.model_parallel_is_initialized():
        _require_running_sizes(layout)
        return
    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=layout.tp,
        pipeline_model_parallel_size=layout.pp,
        virtual_pipeline_model_parallel_size=layout.vpp if layout.vpp > 1 else None,
        context_parallel_size=layout.cp,
        expert_model_parallel_size=layout.ep,
        expert_tensor_parallel_size=layout.etp,
    )
    tensor_parallel.model_parallel_cuda_manual_seed(seed)


def _require_running_sizes(layout: Layout) -> None:
    """Raise BadInput if Megatron's process groups have other sizes than the layout."""
    from megatron.core import parallel_state

    running = Layout(
        tp=parallel_state.get_tensor_model_parallel_world_size(),
        pp=parallel_state.get_pipeline_model_parallel_world_size(),
        ep=parallel_state.get_expert_model_parallel_world_size(),
        etp=parallel_state.get_expert_tensor_parallel_world_size(),
        cp=parallel_state.get_context_parallel_world_size(),
        dp=parallel_state.get_data_parallel_world_size(),
    )
    wanted = Layout(layout.tp, layout.pp, 1, layout.ep, layout.etp, layout.cp, layout.dp)
    if running != wanted:
        raise BadInput(
            f"Layout {layout} is not that of this process, {running}: a process has one layout, "
            "that of its first model. Use it again, or another process."
        )


@dataclass
class _Work:
    fn: Callable[..., Any]
    args: tuple[Any, ...]
    rank: int
    world_size: int
    timeout: float
    device: str
    scratch: Path

    @property
    def stacks(self) -> Path:
        """The file in which this rank leaves its stack if it does not finish."""
        return self.scratch / f"stack-{self.rank}"


def _run_rank(work: _Work, pipe: Connection) -> None:
    """Answer with the function's result or with what it raised: the main function of a rank."""
    global _to_parent
    _to_parent = pipe
    # A collection would visit, and so copy, each object that a fork shares with its parent.
    gc.freeze()
    end_with_parent()
    prepare_standard_streams()  # a fresh interpreter's are as Python made them
    with work.stacks.open("w", encoding="utf-8") as stacks:
        faulthandler.dump_traceback_later(max(work.timeout - 1, 0.9 * work.timeout), file=stacks)
        try:
            answer = pickle.dumps((True, _call_in_group(work)))
        except _PASSED_ON as error:
            answer = pickle.dumps((False, error))
        except BaseException:
            answer = pickle.dumps((False, traceback.format_exc()))
        faulthandler.cancel_dump_traceback_later()
    pipe.send_bytes(answer)
    pipe.close()


def _gpu_and_backend(work: _Work) -> tuple[int, str]:
    """Return the number of the rank's GPU, and how the ranks exchange."""
    if work.device == "cpu":
        return work.rank, "gloo"
    gpus = _count_gpus(work.world_size)
    shared = gpus < work.world_size
    return work.rank % gpus, shared_gpu.register() if shared else "nccl"


def _call_in_group(work: _Work) -> Any:
    """Call the rank's function between the beginning and the end of ``torch.distributed``."""
    gpu, backend = _gpu_and_backend(work)
    around: AbstractContextManager[object] = nullcontext()
    if work.device == "cpu":
        # More threads would oversubscribe the machine, and OpenMP threads do not survive a fork.
        torch.set_num_threads(1)
    elif acting := os.environ.get(SIMULATED_RANK):
        around = pkgutil.resolve_name(acting)(work.rank, work.world_size)
    else:
        torch.cuda.set_device(gpu)
    os.environ |= {
        "RANK": str(work.rank),
        "LOCAL_RANK": str(gpu),
        "WORLD_SIZE": str(work.world_size),
    }
    with around:
        dist.init_process_group(
            backend,
            # A file, because a TCP server would be a thread in the process that forks.
            store=dist.FileStore(str(work.scratch / "store"), work.world_size),
            rank=work.rank,
            world_size=work.world_size,
            # The parent's limit comes first: its report says more about which rank is late.
            timeout=timedelta(seconds=work.timeout + _GRACE),
        )
        result = work.fn(*work.args)
        dist.barrier()  # a rank that leaves early would break the others' collectives
        dist.destroy_process_group()
        return result


def _collect_answers(ranks: list[_Rank], timeout: float, heard: Callable[[Any], None]) -> None:
    """Wait until every rank answered, one failed, or the time is up.

    A rank that has not answered keeps ``ended`` None, which :func:`_raise_errors` reports.
    """
    deadline = time.monotonic() + timeout
    while waiting := [r for r in ranks if r.ended is None]:
        ready = wait([r.pipe for r in waiting], max(deadline - time.monotonic(), 0))
        if not ready:
            return
        for r in waiting:
            if r.pipe in ready:
                _receive_message(r, heard)
                if r.error is not None:
                    deadline = min(deadline, time.monotonic() + _GRACE)


def _receive_message(r: _Rank, heard: Callable[[Any], None]) -> None:
    """Take a message of a rank: its answer, what it tells, or the end of its pipe."""
    try:
        succeeded, value = pickle.loads(r.pipe.recv_bytes())
    except EOFError:
        r.ended = time.monotonic()
        r.process.join()
        r.died = r.process.exitcode != -signal.SIGABRT
        r.error = f"{how_it_ended(r.process.exitcode)}\n"
        return
    if succeeded is None:
        heard(value)
        return
    r.ended = time.monotonic()
    if succeeded:
        r.result = value
    else:
        r.error = value


def _raise_errors(ranks: list[_Rank], timeout: float) -> None:
    """Raise the error of the failed ranks, or else of the unfinished ones, if any."""
    failed = [r for r in ranks if r.error is not None]
    # Put the cause first. It is a dead rank, even if others reported the lost connection before its
    # death was noticed here; else it is the first rank that failed.
    failed.sort(key=lambda r: (not r.died, r.ended or 0.0))
    for r in failed:
        if isinstance(r.error, _PASSED_ON):
            raise r.error
    if failed:
        report = [f"rank {ranks.index(r)}: {r.error}" for r in failed]
        raise RanksFailed(
            f"rank {ranks.index(failed[0])}: {_last_words(failed[0])}", "\n".join(report)
        )
    if hanging := [r for r in ranks if r.ended is None]:
        late = [f"rank {ranks.index(r)} did not finish within {timeout:g} s" for r in hanging]
        stacks = [f"{line}:\n{_stack_text(r)}" for line, r in zip(late, hanging, strict=True)]
        said = f"{late[0]}, so the result is unknown. Pass a larger --timeout."
        raise RanksFailed(said, "\n".join(stacks))


def _last_words(r: _Rank) -> str:
    """Return what the rank raised, without the traceback, or how it died."""
    lines = str(r.error).splitlines()
    traced = (line for line in lines[1:] if line and not line.startswith(" "))
    return next(traced, lines[0])


def _stack_text(r: _Rank) -> str:
    """Return the stack of a hanging rank, innermost first, down to the function that it runs."""
    if not r.stacks.exists():
        return "it had not begun"
    lines = r.stacks.read_text("utf-8", errors="replace").splitlines()
    # The function that the rank runs may be waiting in `initialize`.
    ours = (line for line in lines if f'"{__file__}"' in line)
    first = next((line for line in ours if not line.endswith(" in initialize")), None)
    return "\n".join(lines if first is None else lines[: lines.index(first)])
