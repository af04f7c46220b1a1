"""Functions of this project that the tests run on the workbench, each in a process of its own."""

from __future__ import annotations

import gc
import multiprocessing
import os
import sys
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
    from mcore_qwen3vl.verification.parity.comparison import verify_parity as verify

    _without_torchrun()
    report = verify(checkpoint, batches=["images"], device="cuda", timeout=300)
    return {f"{f.part} {f.name}": f.measured.count for f in report.findings}


def generate(checkpoint: Path, under_torchrun: bool) -> list[int]:
    """Return how many tokens each answer has."""
    from mcore_qwen3vl.generation.generate import GenerationRequest, generate_on_all_ranks
    from mcore_qwen3vl.generation.prompts import user_turns

    if not under_torchrun:
        _without_torchrun()
    request = GenerationRequest(
        checkpoint, user_turns(["What?"], [], []), options={"max_new_tokens": 3}
    )
    return [len(answer.token_ids) for answer in generate_on_all_ranks(request)]


def built_without_cuda(checkpoint: Path) -> list[str]:
    """Return the parameters and buffers of README's example that are not on the device."""
    from mcore_qwen3vl.config import Architecture
    from mcore_qwen3vl.layout import Layout
    from mcore_qwen3vl.model.qwen3vl import build_chunks
    from mcore_qwen3vl.runtime.launch import initialize

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
    """Train, and return the child processes that still run."""
    from mcore_qwen3vl.rehearsal.rank import main

    main(flags)
    return [child.name for child in multiprocessing.active_children()]


def _without_torchrun() -> None:
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK"):
        os.environ.pop(name, None)


def head_gradient(tokens: int, width: int, columns: int) -> list[str]:
    """Return the operators of a bf16 head's backward pass that write a gradient of the weight."""
    from torch.utils._python_dispatch import TorchDispatchMode

    from mcore_qwen3vl.model.log_probs import Columns, token_log_probs

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


def head_costs(
    tokens: int, width: int, columns: int, chunks: int, frozen: bool, gib: float
) -> dict[str, int]:
    """Return what the log-probabilities of bf16 states cost, with their gradients.

    The GPU has `gib` GiB, of which the context takes 0.6.
    """
    from mcore_qwen3vl.model.log_probs import Columns, token_log_probs
    from mcore_qwen3vl.simulated_gpu import rank

    def step() -> None:
        found, _ = token_log_probs(hidden, weight, targets, Columns(0, columns, tokens // chunks))
        found.backward(torch.ones_like(found))

    assert rank.current is not None
    rank.current.device.set_memory(gib)
    on: dict[str, Any] = {"device": "cuda", "dtype": torch.bfloat16}
    weight = torch.zeros(columns, width, **on).requires_grad_(not frozen)
    weight.main_grad = torch.zeros(columns, width, device="cuda")  # type: ignore[attr-defined]
    weight.grad_added_to_main_grad = False  # type: ignore[attr-defined]
    hidden = torch.zeros(tokens, 1, width, **on).requires_grad_()
    targets = torch.zeros(1, tokens, dtype=torch.int64, device="cuda")
    step()  # builds the kernels
    before = rank.current.tally()
    step()
    after = rank.current.tally()
    return {name: after[name] - before[name] for name in ("gemm", "bytes", "launches")}


def delta_net_kernels(
    operation: str, package: bool, bounds: tuple[int, ...], heads: int
) -> dict[str, Any]:
    """Call the kernels of a gated delta net, of flash-linear-attention or of its stub.

    Args:
        operation: ``rule`` or ``convolution``.
        package: whether to call flash-linear-attention, and not its stub.
        bounds: those of packed samples, or of one.

    Returns:
        The bytes that are kept for the backward pass, and the bytes at the peak and the launches of
        each direction.
    """
    from mcore_qwen3vl.model.decoder import delta_net
    from mcore_qwen3vl.model.decoder.attention import PackedSequence
    from mcore_qwen3vl.rehearsal import stubs

    if package:
        del sys.modules["fla"]
        _one_configuration()
    else:
        stubs.install_linear_attention()
    convolve, apply_rule = delta_net._KERNELS
    length, key_heads, width = bounds[-1], heads // 2, 128
    packed = None
    if len(bounds) > 2:
        cu_seqlens = torch.tensor(bounds, dtype=torch.int32, device="cuda")
        packed = PackedSequence(
            qkv_format="thd", bounds=bounds, cu_seqlens_q=cu_seqlens, cu_seqlens_kv=cu_seqlens
        )

    def leaf(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
        return torch.randn(1, length, *shape, device="cuda", dtype=dtype, requires_grad=True)

    query, key, value = leaf(key_heads, width), leaf(key_heads, width), leaf(heads, width)
    decay, beta = leaf(heads, dtype=torch.float32), leaf(heads)
    x, weight = leaf(heads * width), torch.randn(heads * width, 4, device="cuda").bfloat16()
    weight.requires_grad_()
    calls = {
        "rule": (
            (query, key, value, decay, beta),
            lambda: apply_rule(query, key, value, decay, beta, packed, None)[0],
        ),
        "convolution": ((x, weight), lambda: convolve(x, weight, packed, None)),
    }
    return _measure(*calls[operation])


def kept_by_layers(config: Path, tokens: int, cheap: bool) -> list[int]:
    """Return the bytes that each decoder layer keeps for the backward pass, its output included.

    Args:
        tokens: in a row of sixteen packed samples.
        cheap: whether outputs that are cheap to compute are computed again.
    """
    from mcore_qwen3vl.config import Architecture
    from mcore_qwen3vl.layout import Layout
    from mcore_qwen3vl.model.decoder.attention import PackedSequence
    from mcore_qwen3vl.model.qwen3vl import build_chunks
    from mcore_qwen3vl.rehearsal import stubs
    from mcore_qwen3vl.runtime.launch import initialize

    stubs.install_linear_attention()
    dist.init_process_group("nccl")
    initialize(Layout())
    a = Architecture.from_hf(config)
    (model,) = build_chunks(a, Layout())
    length = tokens // 16
    bounds = tuple(range(0, tokens + 1, length))
    cu_seqlens = torch.tensor(bounds, dtype=torch.int32, device="cuda")
    packed = PackedSequence(
        qkv_format="thd",
        bounds=bounds,
        cu_seqlens_q=cu_seqlens,
        cu_seqlens_kv=cu_seqlens,
        max_seqlen_q=length,
        max_seqlen_kv=length,
    )
    angles = model.rotary_pos_emb(torch.zeros(3, 1, tokens, dtype=torch.int64, device="cuda"))
    hidden = torch.randn(tokens, 1, a.hidden_size, device="cuda", dtype=torch.bfloat16)
    hidden.requires_grad_()

    def kept(layer: Any) -> int:
        layer.recomputes = cheap
        layer(hidden, None, rotary_pos_emb=angles, packed_seq_params=packed)  # fills caches
        gc.collect()
        before = torch.cuda.memory_allocated()
        _output = layer(hidden, None, rotary_pos_emb=angles, packed_seq_params=packed)
        gc.collect()
        return torch.cuda.memory_allocated() - before

    return [kept(layer) for layer in model.decoder.layers]


def _measure(inputs: tuple[torch.Tensor, ...], call: Any) -> dict[str, Any]:
    from mcore_qwen3vl.simulated_gpu import rank as this_rank

    assert this_rank.current is not None
    count = this_rank.current.device.count_launches
    call()  # fills caches
    gc.collect()
    peaks, launches = [], []

    def measured(run: Any) -> Any:
        torch.cuda.reset_peak_memory_stats()
        before, launched = torch.cuda.memory_allocated(), count()
        result = run()
        launches.append(count() - launched)
        peaks.append(torch.cuda.max_memory_allocated() - before)
        return result, torch.cuda.memory_allocated() - before

    output, added = measured(call)
    gradient = torch.empty_like(output)
    measured(lambda: torch.autograd.grad(output, inputs, gradient))
    kept = added - output.numel() * output.element_size()
    return {"kept": kept, "peaks": peaks, "launches": launches}


def _one_configuration() -> None:
    """Let Triton take the first configuration of a kernel; to compare them it would run all."""
    from triton.runtime.autotuner import Autotuner

    run = Autotuner.run

    def run_first(self: Any, *args: Any, **kwargs: Any) -> Any:
        self.configs = self.configs[:1]
        return run(self, *args, **kwargs)

    Autotuner.run = run_first
