"""Functions of this project that the tests run on the workbench, each in a process of its own."""

from __future__ import annotations

import multiprocessing
import os
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist


def _answer(number: int) -> tuple[int, int, str, int]:
    x = torch.ones(number, device="cuda")
    return dist.get_rank(), dist.get_world_size(), str(x.device), x.numel()


def spawned_ranks() -> list[Any]:
    """Start ranks like `generate` and `verify parity`, from a process that has used CUDA."""
    from mcore_qwen3vl.runtime.launch import run_layout

    _without_torchrun()
    assert torch.cuda.is_available()
    torch.zeros(1, device="cuda")
    return run_layout(_answer, 2, 5, device="cuda")


def verify_parity(checkpoint: Path) -> dict[str, int]:
    """Compare our model on the device with HF's on the host; return the numbers of values."""
    from mcore_qwen3vl.verify.parity.comparison import verify_parity as verify

    _without_torchrun()
    report = verify(checkpoint, batches=["images"], device="cuda", timeout=300)
    return {f"{f.part} {f.name}": f.measured.count for f in report.findings}


def generate(checkpoint: Path, under_torchrun: bool) -> list[int]:
    """Return how many tokens each answer has."""
    from mcore_qwen3vl.generation.decoding import Request, generate_on_all_ranks
    from mcore_qwen3vl.generation.prompts import user_turns

    if not under_torchrun:
        _without_torchrun()
    request = Request(checkpoint, user_turns(["What?"], [], []), options={"max_new_tokens": 3})
    return [len(answer.token_ids) for answer in generate_on_all_ranks(request)]


def built_without_cuda(checkpoint: Path) -> list[str]:
    """Return the parameters and buffers of README's example that are not on the device."""
    from mcore_qwen3vl.config import Architecture
    from mcore_qwen3vl.layout import Layout
    from mcore_qwen3vl.model.qwen3vl import build_chunks
    from mcore_qwen3vl.runtime.parallel import initialize

    dist.init_process_group("nccl")
    initialize(Layout())
    (model,) = build_chunks(Architecture.from_hf(checkpoint), Layout())
    tensors = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    return [name for name, tensor in tensors.items() if not tensor.is_cuda]


def own_parts(folder: Path) -> dict[str, Any]:
    """Save a bf16 model's optimizer from the device and load it onto the device again."""
    from mcore_qwen3vl.layout import Layout
    from tests.training.checkpoints.trained import BF16 as MODEL
    from tests.training.checkpoints.trained import Trained, stored

    dist.init_process_group("nccl")
    trained = Trained.build(Layout(), MODEL, None)
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    described = trained.parts[0].sharded_param_state_fully_reshardable(trained.described())
    boxes = [box.data for states in described.values() for of in states.values() for box in of]
    trained.write(folder)
    more = torch.cuda.max_memory_allocated() - before
    trained.read(folder)
    return {
        "devices": {box.device.type for box in boxes},
        "declared": sum(box.numel() for box in boxes),
        "stored": sum(tensor.numel() for tensor in stored(folder).values()),
        "more memory": more,
    }


def processes_after_training(flags: list[str]) -> list[str]:
    """Train, and return the processes that this one has started and that still run."""
    from mcore_qwen3vl.rehearsal.rank.train import main

    main(flags)
    return [child.name for child in multiprocessing.active_children()]


def _without_torchrun() -> None:
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK"):
        os.environ.pop(name, None)


def head_gradient(tokens: int, width: int, columns: int) -> list[str]:
    """Return the operators of a bf16 head's backward pass that write a gradient of the weight."""
    from torch.utils._python_dispatch import TorchDispatchMode

    from mcore_qwen3vl.model.head import Columns, token_log_probs

    class Writers(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None):  # type: ignore[no-untyped-def]
            result = func(*args, **(kwargs or {}))
            if isinstance(result, torch.Tensor) and result.shape == (columns, width):
                names.append(str(func))
            return result

    names: list[str] = []
    weight = torch.randn(columns, width, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    weight.main_grad = torch.zeros(columns, width, device="cuda")  # type: ignore[attr-defined]
    weight.grad_added_to_main_grad = False  # type: ignore[attr-defined]
    hidden = torch.randn(tokens, 1, width, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    targets = torch.zeros(1, tokens, dtype=torch.int64, device="cuda")
    log_probs, _ = token_log_probs(hidden, weight, targets, Columns(0, columns, tokens // 2))
    with Writers():
        log_probs.sum().backward()
    return [name for name in names if "empty" not in name]
