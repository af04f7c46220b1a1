"""Functions that the tests run on the workbench, each in a process of its own."""

from __future__ import annotations

import contextlib
import json
import os
import tempfile
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F

MIB = 1 << 20
BF16 = {"device": "cuda", "dtype": torch.bfloat16}


def operators() -> str:
    """Run the kernels, libraries and optimizers that training uses, forwards and backwards."""
    from torch.nn.attention import SDPBackend, sdpa_kernel
    from torch.nn.attention.varlen import varlen_attn

    layer = torch.nn.Linear(1024, 1024, **BF16)
    for kind in ({"fused": True}, {"foreach": True}):
        optimizer = torch.optim.AdamW(layer.parameters(), **kind)
        layer(torch.randn(8, 1024, **BF16)).sum().backward()
        torch.nn.utils.clip_grad_norm_(layer.parameters(), 1.0)
        optimizer.step()
    q = torch.randn(1, 8, 1024, 128, **BF16, requires_grad=True)
    flash, efficient = SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION
    for backend in (flash, efficient, SDPBackend.CUDNN_ATTENTION, SDPBackend.MATH):
        with sdpa_kernel(backend):
            F.scaled_dot_product_attention(q, q, q, is_causal=True).sum().backward()
    t = torch.randn(2048, 8, 128, **BF16, requires_grad=True)
    bounds = torch.tensor([0, 1000, 2048], dtype=torch.int32, device="cuda")
    varlen_attn(t, t, t, bounds, bounds, 1048, 1048).sum().backward()
    logits = torch.randn(1024, 151936, **BF16, requires_grad=True)
    F.cross_entropy(logits.float(), torch.zeros(1024, dtype=torch.long, device="cuda")).backward()
    convolution = torch.nn.Conv3d(3, 64, (2, 16, 16), stride=(2, 16, 16), **BF16)
    convolution(torch.randn(64, 3, 2, 16, 16, **BF16)).sum().backward()
    return torch.cuda.get_device_name()


def exchange_through_the_host() -> list[str]:
    """Call every operation of a group whose ranks share a GPU, and return the results' devices."""
    from mcore_qwen3vl.runtime.shared_gpu import StagedGroup

    gloo = dist.ProcessGroupGloo(dist.HashStore(), 0, 1, timedelta(seconds=60))
    group = StagedGroup(gloo, 0, 1)
    own, out = torch.ones(4, 3, **BF16), torch.empty(4, 3, **BF16)
    first = [[out], [[own]]]
    for options in (dist.AllreduceOptions(), None):
        group.allreduce([own], options).wait()
    group.broadcast([own], dist.BroadcastOptions()).wait()
    group.allgather([[out]], [own]).wait()
    group._allgather_base(out, own).wait()
    group.gather([[out]], [own], dist.GatherOptions()).wait()
    group.scatter(*first, dist.ScatterOptions()).wait()
    group.reduce_scatter(*first).wait()
    group._reduce_scatter_base(out, own).wait()
    group.alltoall_base(out, own, [4], [4]).wait()
    group.alltoall([out], [own]).wait()
    group.reduce([own], dist.ReduceOptions()).wait()
    group.barrier().wait()
    return [str(own.device), str(out.device)]


def memory() -> dict[str, Any]:
    """Allocate more than the host has, then more than the device has."""
    before = _resident()
    held = torch.empty(60 << 30, dtype=torch.uint8, device="cuda")
    taken = _resident() - before
    try:
        torch.empty(30 << 30, dtype=torch.uint8, device="cuda")
    except torch.OutOfMemoryError as error:
        return {"host": taken, "allocated": held.numel(), "refused": str(error)}
    return {"host": taken, "allocated": held.numel()}


def _resident() -> int:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")


def properties() -> dict[str, Any]:
    found = torch.cuda.get_device_properties(0)
    names = ("total_memory", "multi_processor_count", "major", "minor", "L2_cache_size")
    more = ("max_threads_per_multi_processor", "warp_size", "shared_memory_per_block_optin")
    return {name: getattr(found, name) for name in (*names, *more)}


def integers() -> dict[str, Any]:
    ids = torch.tensor([5, 3, 5, 9], device="cuda")
    mask = ids == 5
    lengths = torch.tensor([3, 1, 2]).cuda()
    ids[1] = 7
    return {
        "item": ids.sum().item(),
        "selected": ids[mask].tolist(),
        "nonzero": mask.nonzero().flatten().tolist(),
        "bounds": F.pad(lengths.cumsum(0), (1, 0)).tolist(),
        "sorted": ids.argsort().tolist(),
        "histogram": torch.bincount(lengths, minlength=4).tolist(),
        "weighted histogram": list(torch.bincount(lengths, lengths.float(), 5).shape),
        "repeated": torch.repeat_interleave(ids, lengths.repeat(2)[:4]).tolist(),
        "product": torch.stack([ids, ids + 1]).prod(-1).tolist(),
        "router": torch.randn(3, 4, device="cuda").topk(2).indices.tolist(),
        "on the host": torch.tensor(-7.5).item(),
        "floats": [torch.tensor(x).cuda().item() for x in (-7.5, float("nan"), 2.5)],
        "floats are below": (torch.randn(2, device="cuda") > 0).tolist(),
    }


def host_syncs() -> None:
    """Cause one host sync of each kind, in this function."""
    x = torch.ones(4, device="cuda")
    x.sum().item()
    x.cpu()
    torch.cuda.synchronize()
    x.to("cpu", non_blocking=True)  # no sync: the copy goes into pinned memory
    pinned = torch.empty(4, pin_memory=True)
    pinned.copy_(x, non_blocking=True)  # no sync
    torch.ones(4).pin_memory().to("cuda", non_blocking=True)  # no sync
    event = torch.cuda.Event()
    event.record()
    event.synchronize()


def launches() -> int:
    """Launch three kernels from one line, among others; return the count of all but products."""
    from mcore_qwen3vl.simulated_gpu import rank as this_rank

    rank = this_rank.current
    assert rank is not None
    x = torch.ones(4, 4, device="cuda")
    rank.end_interval("before")
    rank.device.watch_launches()
    with rank.device.phase("here"):
        for _ in range(3):
            x.tan()
        x.exp()
    interval = rank.end_interval("watched")
    rank.device.watch_launches(False)
    x.exp()
    return interval.counters["launches"]


def collectives() -> dict[str, Any]:
    dist.init_process_group("nccl")
    group = dist.new_group([0, 1, 2], backend="gloo", group_desc="three")
    everyone: list[Any] = [None] * 4
    dist.all_gather_object(everyone, "me")
    total = torch.tensor([2.0])
    dist.all_reduce(total, group=group)
    ids = torch.tensor([1, 2], device="cuda")
    gathered = torch.empty(8, dtype=torch.int64, device="cuda")
    dist.all_gather_into_tensor(gathered, ids)
    wrong = ""
    with contextlib.suppress(ValueError):
        dist.all_to_all_single(torch.empty(4), torch.empty(4), [1, 1, 1, 1], [2, 1, 1, 1])
        wrong = "accepted"
    return {
        "backends": (dist.get_backend(), dist.get_backend(group)),
        "rank": (dist.get_rank(), dist.get_world_size(), group.size()),
        "objects": everyone,
        "sum": total.item(),
        "gathered": gathered.tolist(),
        "wrong splits": wrong,
    }


def two_devices() -> None:
    """Add tensors of two devices, which is an error on a GPU and here."""
    torch.ones(3, device="cuda") + torch.ones(3)


def fork_after_asking() -> str:
    """Use CUDA in a fork, which it does not survive, and return the child's error."""
    torch.zeros(1, device="cuda")
    readable, writable = os.pipe()
    if not os.fork():
        try:
            torch.zeros(1, device="cuda")
        except RuntimeError as error:
            os.write(writable, str(error).encode())
        os._exit(0)
    os.close(writable)
    os.wait()
    return os.read(readable, 4096).decode()


def late_events() -> tuple[int, int]:
    """Free blocks that a side stream holds; return the peaks of reserved and allocated memory."""
    stream = torch.cuda.Stream()
    for _ in range(4):
        block = torch.empty(64 * MIB, dtype=torch.uint8, device="cuda")
        block.record_stream(stream)
        del block
    return torch.cuda.max_memory_reserved(), torch.cuda.max_memory_allocated()


def routing() -> list[list[int]]:
    """Return what a router of 16 experts chooses for four tokens."""
    return torch.randn(4, 16, device="cuda").topk(2).indices.tolist()


def flops() -> None:
    """Run products and attention whose operations can be counted by hand."""
    from torch.nn.attention.varlen import varlen_attn

    layer = torch.nn.Linear(30, 50, **BF16)  # 2 * 30 * 50 a row, and twice that backwards
    layer(torch.randn(7, 30, **BF16, requires_grad=True)).sum().backward()
    torch.randn(3, 11, 13, **BF16).bmm(torch.randn(3, 13, 17, **BF16))
    total = torch.zeros(23, 19, device="cuda")  # float32, and what is added to it is bf16
    a, b = torch.randn(23, 7, **BF16), torch.randn(7, 19, **BF16)
    torch.addmm(total, a, b, out_dtype=torch.float32, out=total)
    t = torch.randn(30, 4, 16, **BF16, requires_grad=True)
    bounds = torch.tensor([0, 10, 30], dtype=torch.int32, device="cuda")
    varlen_attn(t, t, t, bounds, bounds, 20, 20, window_size=(-1, 0)).sum().backward()
    varlen_attn(t, t, t, bounds, bounds, 20, 20)
    query = torch.randn(2, 6, 5, 16, **BF16, requires_grad=True)
    pair = torch.randn(2, 3, 9, 16, **BF16, requires_grad=True)
    F.scaled_dot_product_attention(query, pair, pair, enable_gqa=True).sum().backward()


def received_shape() -> list[int]:
    """Receive integers that no rank has sent."""
    dist.init_process_group("nccl")
    shape = torch.full((3,), 7, device="cuda")
    dist.recv(shape, 1)
    return shape.tolist()


def messages() -> dict[int, list[Any]]:
    """Exchange two messages between two ranks, which both receive before they send."""
    shared = tempfile.mkdtemp() + "/store"
    readable, writable = os.pipe()
    child = os.fork()
    rank = int(not child)
    store, most = dist.FileStore(shared, 2), timedelta(seconds=20)
    dist.init_process_group("nccl", store=store, timeout=most, rank=rank, world_size=2)
    peer = 1 - rank
    for _ in range(3):
        dist.new_group([rank])  # groups are made in the same order, but not by the same ranks
    pair = dist.new_group([0, 1])
    received = []
    for group in (None, pair):
        shape, more = torch.empty(3, dtype=torch.long, device="cuda"), torch.empty(2)
        floats = torch.ones(2, 4, device="cuda")
        works = dist.batch_isend_irecv(
            [
                dist.P2POp(dist.irecv, shape, peer, group),
                dist.P2POp(dist.irecv, more, peer, group),
                dist.P2POp(dist.irecv, floats, peer, group),
                dist.P2POp(dist.isend, torch.tensor([7, rank, 9], device="cuda"), peer, group),
                dist.P2POp(dist.isend, torch.tensor([0.5, rank]), peer, group),
                dist.P2POp(dist.isend, floats, peer, group),
            ]
        )
        for work in works:
            work.wait()
        received += [shape.tolist(), more.tolist()]
    if not child:
        os.write(writable, json.dumps(received).encode())
        os._exit(0)
    os.close(writable)
    os.waitpid(child, 0)
    return {0: received, 1: json.loads(os.read(readable, 4096))}
