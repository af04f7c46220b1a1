"""Seconds of a training step, modelled from the work that a rehearsal counted.

In each direction and virtual stage, a micro-batch takes the GPU's time or the host's time to launch
it, whichever is longer. The GPU's time is the sum of matmuls, attention, all other kernels (by the
bytes that they move) and exchanges. :func:`mcore_qwen3vl.rehearsal.pipeline.simulate` runs the
pipeline with these times. The work of an iteration that happens once, such as the optimizer's step,
follows. If Megatron overlaps the data-parallel exchange with a micro-batch, only the part that
outlasts it counts. With ``--overlap-moe-expert-parallel-comm`` most of the experts' exchange runs
beside the opposite pass of another micro-batch, if there is one: not in the first forward and last
backward passes.
"""

from __future__ import annotations

import json
import math
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any, NamedTuple

from mcore_qwen3vl.errors import BadInput
from mcore_qwen3vl.rehearsal.holders import BACKWARD, COMBINE, DISPATCH, FORWARD
from mcore_qwen3vl.rehearsal.pipeline import Durations, simulate
from mcore_qwen3vl.runtime.gpus import Gpu
from mcore_qwen3vl.simulated_gpu.device import Interval, Traffic
from mcore_qwen3vl.simulated_gpu.rank import BYTES, KINDS, ONE_KEY
from mcore_qwen3vl.training.pipeline_order import order_of_work

GEMM, ATTENTION, MEMORY, HOST = "GEMM", "attention", "other kernels (memory)", "host"
EXPERTS = "EP exchange"
ONCE, GRADIENTS, IDLE = "optimizer and finalization", "DP exchange", "waiting for other stages"
_SHARES = ("gemm", "attention", "memory", "link", "tp_overlap", "ep_overlap")
_DATA_PARALLEL = ("DATA_PARALLEL_GROUP", "EXPERT_DATA_PARALLEL_GROUP")
_COPIES = {"all_reduce": 2.0, "all_gather": 1.0, "reduce_scatter": 1.0, "all_to_all": 1.0}
"""How often a tensor crosses the links of a ring of n ranks, in units of (n - 1) / n."""


@dataclass(frozen=True)
class Constants:
    """Assumptions about what cannot be counted without a GPU; a file can replace each of them.

    Those of one GPU and its host were measured on one H100, see docs/measurements/h100.md. Those of
    exchanges are assumed.

    Attributes:
        gemm: share of the GPU's dense bf16 peak that matmuls reach (measured: 0.70 to 0.78).
        attention: share of that peak that attention kernels reach if their queries have many keys.
        attention_keys: number of keys of a query at which they reach half of that. With both,
            attention over samples of 2,048 tokens has 250 TFLOP/s, as in the measured steps (240).
        memory: share of the memory's bandwidth that other kernels reach: 0.88 in plain copies, 0.4
            over views that are not contiguous, 0.43 to 0.71 in all of a step.
        link: share of the links' bandwidth that NCCL reaches.
        network_gb_per_s: bandwidth of each GPU to other nodes, in one direction (400 Gb/s).
        gpus_per_node: GPUs that NVLink connects.
        launch_us: microseconds of the host for one kernel, with the Python and the autograd around
            it. Steps that the host bound took 34 to 57 on a virtual machine with 16 cores; alone, a
            launch takes 9. A published run of 30B-A3B (docs/measurements/layouts.md) leaves 28.
        wait_us: microseconds that a host sync costs, until kernels follow again.
        tp_overlap: share of the TP exchange hidden by ``--tp-comm-overlap``.
        ep_overlap: share of the EP exchange hidden by ``--overlap-moe-expert-parallel-comm``, as
            far as the other micro-batch computes for that long.
    """

    gemm: float = 0.74
    attention: float = 0.5
    attention_keys: float = 1000.0
    memory: float = 0.5
    link: float = 0.75
    network_gb_per_s: float = 50.0
    gpus_per_node: int = 8
    launch_us: float = 35.0
    wait_us: float = 20.0
    tp_overlap: float = 0.7
    ep_overlap: float = 0.9

    @classmethod
    def from_file(cls, file: Path) -> Constants:
        """Read constants from a JSON file; those that it does not name keep their defaults.

        Raises:
            BadInput: the file cannot be read, or a name or a value is wrong.
        """
        try:
            values = json.loads(file.read_text("utf-8"))
        except (OSError, ValueError) as error:
            raise BadInput(f"--constants {file} cannot be read: {error}") from None
        known = [field.name for field in fields(cls)]
        if not isinstance(values, dict):
            raise BadInput(f"--constants {file} holds no JSON object.")
        for name, value in values.items():
            if name not in known:
                names = ", ".join(known)
                raise BadInput(f"--constants {file}: {name} is not one of {names}.")
            most = 1 if name in _SHARES else math.inf
            if isinstance(value, bool) or not isinstance(value, int | float) or value <= 0:
                raise BadInput(f"--constants {file}: {name} is {value!r}, not a number above 0.")
            if value > most:
                raise BadInput(f"--constants {file}: {name} is {value}, and a share is at most 1.")
        return cls(**values)


@dataclass(frozen=True)
class RoleTime:
    """One role's share of the step: seconds by activity, which add up to the step."""

    name: str
    seconds: dict[str, float]


@dataclass(frozen=True)
class TrainingTime:
    """How long training takes by a modelled step.

    Validations, checkpoints, starts and failures are not counted.
    """

    tokens: float  # without padding
    steps: float
    days: float
    gpu_hours: float

    def __str__(self) -> str:
        return (
            f"{self.tokens:,.0f} tokens without padding: {self.steps:,.0f} steps, {self.days:,.2f} "
            f"days, {self.gpu_hours:,.0f} GPU-hours, without validations, checkpoints and failures"
        )


@dataclass(frozen=True)
class StepTime:
    """A modelled step.

    Attributes:
        tokens_per_s: tokens a second of all GPUs, without padding.
        tflops: useful TFLOP/s of a GPU, without recomputed work.
        mfu: `tflops` as a share of the GPU's dense bf16 peak.
    """

    seconds: float
    tokens_per_s: float
    tflops: float
    mfu: float
    roles: list[RoleTime]
    constants: Constants

    @property
    def unit(self) -> tuple[str, float]:
        """The unit to show the step's times in, and how many of it a second has."""
        return ("ms", 1e3) if self.seconds < 1 else ("s", 1.0)

    def summary(self, gpus: int) -> str:
        """Return a sentence with the step's time, its throughput and that of each of `gpus`."""
        unit, scale = self.unit
        return (
            f"{self.seconds * scale:.2f} {unit} a step, {self.tokens_per_s:,.0f} tokens/s without "
            f"padding; on each GPU {self.tokens_per_s / gpus:,.0f} tokens/s and {self.tflops:.0f} "
            f"TFLOP/s, MFU {self.mfu:.0%}"
        )

    def training(self, tokens: float, gpus: int) -> TrainingTime:
        """Return how long training on so many tokens takes."""
        seconds = tokens / self.tokens_per_s
        hours = seconds / 3600
        return TrainingTime(tokens, seconds / self.seconds, hours / 24, hours * gpus)

    def to_dict(self) -> dict[str, Any]:
        """Return the modelled step for ``--json``."""
        return {"kind of numbers": "modelled", **asdict(self)}


@dataclass(frozen=True)
class RankWork:
    """The work that was counted on one role's rank."""

    name: str
    stages: int
    # ``forward`` and ``backward`` work of a micro-batch by virtual stage, as
    # `rank.StageWork.take_iteration` returns it.
    chunks: Sequence[Mapping[str, Mapping[str, float]]]
    iteration: Interval
    micro_batches: int  # of that iteration
    tokens: float  # of that iteration on this data-parallel rank
    useful_flops: float  # likewise


class _SecondsByActivity(NamedTuple):
    """A rank's seconds by activity."""

    chunks: list[tuple[dict[str, float], dict[str, float]]]  # micro-batch: virtual stage, direction
    after: dict[str, float]  # once a step

    def total(self, micro_batches: int) -> dict[str, float]:
        """Return the seconds of a step with so many micro-batches, by activity."""
        total: defaultdict[str, float] = defaultdict(float)
        for spent in (direction for chunk in self.chunks for direction in chunk):
            for name, seconds in spent.items():
                total[name] += micro_batches * seconds
        for name, seconds in self.after.items():
            total[name] += seconds
        return total


class Model:
    """A model that turns counted work into seconds on one kind of GPU.

    `top` is the number of experts that take a token, at random.
    """

    def __init__(
        self, gpu: Gpu, constants: Constants, flags: Iterable[str], top: int | None = None
    ) -> None:
        self._gpu = gpu
        self._constants = constants
        self._flags = set(flags)
        self._top = top or 1

    def step(
        self, ranks: Sequence[RankWork], micro_batches: int, group: int, gpus: int, dp: int
    ) -> StepTime:
        """Model a step of all GPUs.

        Args:
            ranks: one rank of each role, in the order of the pipeline.
            group: see :func:`mcore_qwen3vl.rehearsal.pipeline.simulate`.
            dp: data-parallel size, CP not included.
        """
        stages = [rank for rank in ranks for _ in range(rank.stages)]
        parts = [
            self._seconds_of_rank(r, stages.index(r), len(stages), micro_batches, group)
            for r in ranks
        ]
        order = [
            [Durations(*(sum(spent.values()) for spent in chunk)) for chunk in part.chunks]
            for rank, part in zip(ranks, parts, strict=True)
            for _ in range(rank.stages)
        ]
        after = max(sum(part.after.values()) for part in parts)
        seconds = simulate(order, micro_batches, group) + after
        scale = dp * micro_batches / ranks[0].micro_batches / seconds
        tflops = ranks[0].useful_flops * scale / gpus / 1e12
        roles = [
            RoleTime(rank.name, _add_waiting(part.total(micro_batches), seconds))
            for rank, part in zip(ranks, parts, strict=True)
        ]
        tokens = ranks[0].tokens * scale
        return StepTime(seconds, tokens, tflops, tflops / self._gpu.tflops, roles, self._constants)

    def _seconds_of_rank(
        self, rank: RankWork, stage: int, stages: int, micro_batches: int, group: int
    ) -> _SecondsByActivity:
        """Return the seconds of a rank of pipeline stage `stage`, before those of waiting."""
        spans = {t.key: t for t in rank.iteration.traffic}
        hidden = 0.0
        if "--overlap-moe-expert-parallel-comm" in self._flags:
            virtual = len(rank.chunks)
            order = order_of_work(stage, stages, virtual, micro_batches, group or stages)
            alone = [work.forward for work in order].index(False)  # forwards before a backward
            hidden = self._constants.ep_overlap * (1 - alone / (virtual * micro_batches))
        chunks = [self._pass_seconds(chunk, spans, hidden) for chunk in rank.chunks]
        inside: defaultdict[str, float] = defaultdict(float)
        for direction in (work for chunk in rank.chunks for work in chunk.values()):
            for key, amount in direction.items():
                inside[key] += amount * rank.micro_batches
        # What no micro-batch did is done once in the iteration.
        left = {
            k: n - inside[k] for k, n in _work_of_iteration(rank.iteration).items() if n > inside[k]
        }
        transfers = {k: left.pop(k) for k in list(left) if k.endswith(("\nsend", "\nrecv"))}
        after = {ONCE: sum(self._with_host_seconds(self._gpu_seconds(left, spans), left).values())}
        sent = sum(
            self._exchange_seconds(spans[k], n) for k, n in transfers.items() if k.endswith("send")
        )
        if len(rank.chunks) == 1:  # virtual stages overlap their transfers
            # Of as many micro-batches as the step has, not as were rehearsed.
            after[_exchange_name("PIPELINE_MODEL_PARALLEL")] = (
                sent / rank.micro_batches * micro_batches
            )
        after[GRADIENTS] = self._exposed_gradient_seconds(rank.iteration.traffic, chunks)
        return _SecondsByActivity(chunks, after)

    def _pass_seconds(
        self, chunk: Mapping[str, Mapping[str, float]], spans: Mapping[str, Traffic], hidden: float
    ) -> tuple[dict[str, float], dict[str, float]]:
        """Return the seconds of a forward and a backward pass; EP's exchange is partly hidden."""
        forward, backward = (self._gpu_seconds(chunk[name], spans) for name in (FORWARD, BACKWARD))
        computing = [
            sum(spent[n] for n in (GEMM, ATTENTION, MEMORY)) for spent in (backward, forward)
        ]  # of the opposite pass, behind which an exchange is hidden
        for spent, other in zip((forward, backward), computing, strict=True):
            if EXPERTS in spent:
                spent[EXPERTS] -= hidden * min(spent[EXPERTS], other)
        return self._with_host_seconds(forward, chunk[FORWARD]), self._with_host_seconds(
            backward, chunk[BACKWARD]
        )

    def _gpu_seconds(
        self, work: Mapping[str, float], spans: Mapping[str, Traffic]
    ) -> dict[str, float]:
        """Return the seconds that the GPU needs for a piece of work, by activity."""
        c, gpu = self._constants, self._gpu
        peak = gpu.tflops * 1e12
        products = work.get("gemm", 0) + work.get("convolution", 0)
        spent = {
            GEMM: products / (c.gemm * peak),
            ATTENTION: (work.get("attention", 0) + c.attention_keys * work.get(ONE_KEY, 0))
            / (c.attention * peak),
            MEMORY: work.get(BYTES, 0) / (c.memory * gpu.memory_tb_per_s * 1e12),
        }
        for key, size in work.items():
            if key in spans and not _is_overlapped(spans[key]):
                name = _exchange_name(spans[key].group)
                spent[name] = spent.get(name, 0.0) + self._exchange_seconds(spans[key], size)
        return spent

    def _with_host_seconds(
        self, spent: dict[str, float], work: Mapping[str, float]
    ) -> dict[str, float]:
        """Add the time that the host needs beyond the GPU's."""
        c, busy = self._constants, sum(spent.values())
        host = work.get("launches", 0) * c.launch_us * 1e-6
        syncs = work.get("host_syncs", 0) * c.wait_us * 1e-6
        return spent | {HOST: max(host - busy, 0.0) + syncs}

    def _exchange_seconds(self, t: Traffic, size: float) -> float:
        """Return the seconds that a group takes to exchange `size` bytes."""
        c = self._constants
        ranks = int(t.group.rpartition("[")[2].rstrip("]"))
        if ranks == 1 or t.group.partition("[")[0].endswith("(gloo)"):
            return 0.0
        apart = max((t.span - 1) // (ranks - 1), 1)
        near = max(min(ranks, c.gpus_per_node // apart), 1)  # members on one node
        nvlink = c.link * self._gpu.nvlink_gb_per_s * 1e9
        network = c.link * c.network_gb_per_s * 1e9
        if t.operation == "all_to_all":  # each GPU sends over its own network card
            return size / ranks * ((near - 1) / nvlink + (ranks - near) / network)
        if t.operation in (DISPATCH, COMBINE):  # a token once to each node, and there to each GPU
            nodes = ranks // near
            to_gpu, to_node = (1 - (1 - 1 / n) ** self._top for n in (ranks, nodes))
            inside = size * to_gpu * (near - 1) * nodes / nvlink  # those from other nodes too
            return max(inside, size * to_node * (nodes - 1) / network)  # at the same time
        copies = _COPIES[t.operation] * (ranks - 1) / ranks if t.operation in _COPIES else 1.0
        # Rings leave a node by as many network cards as it has members.
        bandwidth = nvlink if near == ranks else min(nvlink, near * network)
        seconds = size * copies / bandwidth
        hidden = "--tp-comm-overlap" in self._flags and t.group.startswith("TENSOR_MODEL_PARALLEL")
        return seconds * (1 - c.tp_overlap) if hidden else seconds

    def _exposed_gradient_seconds(
        self, traffic: Iterable[Traffic], chunks: Sequence[Sequence[Mapping[str, float]]]
    ) -> float:
        """Return the seconds of the data-parallel exchange that no micro-batch hides."""
        seconds = {True: 0.0, False: 0.0}  # by whether it is the gathering of weights
        for t in filter(_is_overlapped, traffic):
            seconds[t.operation == "all_gather"] += self._exchange_seconds(t, t.size)
        gather, scatter = seconds[True], seconds[False]
        forward, backward = (
            sum(sum(chunk[direction].values()) for chunk in chunks) for direction in (0, 1)
        )
        if "--overlap-param-gather" in self._flags:
            gather = max(gather - forward, 0.0)
        if "--overlap-grad-reduce" in self._flags:
            scatter = max(scatter - backward, 0.0)
        return gather + scatter


def _add_waiting(spent: dict[str, float], seconds: float) -> dict[str, float]:
    """Add the time in which the rank waits for others, and drop activities without time."""
    spent = {**spent, IDLE: seconds - sum(spent.values())}
    return {name: value for name, value in spent.items() if value > 1e-6}


def _work_of_iteration(interval: Interval) -> dict[str, float]:
    """Return an iteration's work like :meth:`.rank.Rank.tally`, less the overlapped exchange."""
    traffic = {t.key: t.size for t in interval.traffic if not _is_overlapped(t)}
    counters = interval.counters
    host = {"launches": counters["launches"] - interval.fused, "host_syncs": counters["host_syncs"]}
    flops = {kind: interval.flops.get(kind, 0) for kind in KINDS}
    return {**flops, ONE_KEY: interval.one_key, BYTES: interval.moved, **host, **traffic}


def _is_overlapped(t: Traffic) -> bool:
    """Return whether `t` is the exchange of gradients and weights between data-parallel ranks."""
    # Less than a megabyte is no gradients but, for example, the losses to log.
    return t.group.startswith(_DATA_PARALLEL) and t.size > 1 << 20


def _exchange_name(group: str) -> str:
    """Return the name of an exchange, from its group's name."""
    name = group.partition("[")[0].partition(" ")[0].removesuffix("_GROUP")
    short = {
        "TENSOR_MODEL_PARALLEL": "TP",
        "TENSOR_AND_CONTEXT_PARALLEL": "TP",
        "CONTEXT_PARALLEL": "CP",
        "EXPERT_MODEL_PARALLEL": "EP",
        "EXPERT_TENSOR_AND_MODEL_PARALLEL": "EP",
        "EXPERT_TENSOR_PARALLEL": "TP",
        "PIPELINE_MODEL_PARALLEL": "PP",
    }
    return f"{short.get(name, name.lower())} exchange"
