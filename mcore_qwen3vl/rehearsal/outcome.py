"""A rehearsal's results, which are measured, except for the pipeline and the step's time."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from mcore_qwen3vl.layout import Pipeline
from mcore_qwen3vl.pretended.device import Interval, Report
from mcore_qwen3vl.rehearsal.command import Command, Role
from mcore_qwen3vl.rehearsal.rank import holders
from mcore_qwen3vl.rehearsal.step_time import StepTime
from mcore_qwen3vl.runtime.gpus import GIB, Gpu

SPARE = 0.05
"""Share of the GPU's memory that a run should leave free, since a rehearsal is not exact."""


@dataclass(frozen=True)
class Device:
    """The GPU of a rehearsal, and its memory."""

    gpu: Gpu
    memory_gib: float
    allowance_gib: float

    @property
    def usable(self) -> int:
        """Bytes available to PyTorch's allocator."""
        return int((self.memory_gib - self.allowance_gib) * GIB)


@dataclass(frozen=True)
class RoleOutcome:
    """The results of one role's two iterations.

    Attributes:
        measured: the result of :func:`.rank.train.measure`.
        usable: bytes available to PyTorch's allocator.
    """

    role: Role
    measured: dict[str, Any]
    report: Report
    seconds: float
    usable: int

    @property
    def error(self) -> dict[str, Any] | None:
        return self.measured["error"]

    @property
    def out_of_memory(self) -> bool:
        return bool(self.error and self.error["out of memory"])

    @property
    def ok(self) -> bool:
        return self.error is None

    @property
    def peak(self) -> int:
        """Most bytes that tensors took, or if out of memory, held when an allocation failed."""
        moment = self.measured["refused"] if self.out_of_memory else None
        return int((moment or self.measured["peak"])["allocated"])

    @property
    def by_holder(self) -> dict[str, int]:
        """Bytes by holder at the moment of :attr:`peak`, largest first."""
        moment = self.measured["refused"] if self.out_of_memory else None
        return dict((moment or self.measured["peak"])["sizes"])

    @property
    def reserved(self) -> int:
        """Most bytes that the allocator reserved on the device."""
        return max((interval.reserved for interval in self.report.intervals), default=0)

    @property
    def spare(self) -> int:
        """Usable bytes that were not reserved; below 0 the role does not fit."""
        return self.usable - self.reserved

    @property
    def tight(self) -> bool:
        """Whether it fits with less than `SPARE` left, or after the allocator freed its cache."""
        return self.ok and (self.spare < SPARE * self.usable or self.measured["retries"] > 0)

    @property
    def iteration(self) -> Interval | None:
        """The last whole iteration; None if there is none or the role failed."""
        iterations = [s for s in self.report.intervals if s.name.startswith("iteration")]
        return iterations[-1] if iterations and self.ok else None

    @property
    def work(self) -> list[dict[str, dict[str, float]]]:
        """A micro-batch's :meth:`mcore_qwen3vl.rehearsal.rank.train.StageWork.of_iteration`."""
        return list(self.report.facts["work"])

    @property
    def faults(self) -> dict[str, list[str]]:
        """The names of faulty parameters and buffers, by fault."""
        names = ("without gradient", "not on the device")
        facts = self.report.facts
        return {name: facts[name] for name in names if self.ok and facts.get(name)}

    @property
    def host_syncs(self) -> int:
        """Host syncs of one iteration, without those of periodic logging."""
        iteration = self.iteration
        syncs = iteration.host_syncs if iteration is not None else []
        return sum(sync.count for sync in syncs if sync.phase != holders.LOG)

    def to_dict(self) -> dict[str, Any]:
        """Return the role's results for ``--json``; sizes in bytes."""
        iteration = self.iteration
        return {
            "role": asdict(self.role),
            "fits": self.ok,
            "tight": self.tight,
            "error": self.error,
            "faults": self.faults,
            "kind of numbers": "measured",
            "peak": self.peak,
            "max_memory_allocated": max((s.peak for s in self.report.intervals), default=0),
            "held at the peak": self.by_holder,
            "reserved": self.reserved,
            "usable": self.usable,
            "spare": self.spare,
            "allocator retries": self.measured["retries"],
            "parameters": self.measured["parameters"],
            "batch": self.report.facts.get("batch"),
            "launches": iteration and iteration.counters["launches"],
            "launches saved by compilation": iteration and iteration.fused,
            "host syncs": iteration and [asdict(sync) for sync in iteration.host_syncs],
            "flops": iteration and iteration.flops,
            "bytes of other kernels": iteration and iteration.moved,
            "traffic": iteration and [asdict(t) for t in iteration.traffic],
            "seconds of the host": round(self.seconds, 1),
            "memory of the host": self.measured["host bytes"],
        }


def memory_line(outcomes: Sequence[RoleOutcome]) -> str:
    """Return one line about the fullest role, as in the headers of the launch scripts."""
    fullest = max(outcomes, key=lambda outcome: outcome.reserved)
    parts = [holders.WEIGHTS, holders.GRADIENTS, holders.OPTIMIZER, holders.LOGITS]
    parts += [holders.FROZEN] if holders.FROZEN in fullest.by_holder else []
    sizes = {name: fullest.by_holder.get(name, 0) for name in parts}
    sizes["the rest"] = fullest.peak - sum(sizes.values())
    listing = ", ".join(f"{name} {size / 1e9:.1f}" for name, size in sizes.items())
    return (
        f"{fullest.reserved / 1e9:.1f} GB reserved of {fullest.usable / 1e9:.1f}, "
        f"{fullest.peak / 1e9:.1f} held ({listing})"
    )


@dataclass
class Rehearsal:
    """The results of all rehearsed roles of one run."""

    command: Command
    device: Device
    notes: tuple[str, ...] = ()
    outcomes: list[RoleOutcome] = field(default_factory=list)
    pipeline: Pipeline | None = None
    step: StepTime | None = None
    remedies: list[Remedy] = field(default_factory=list)

    @property
    def title(self) -> str:
        """What was rehearsed, and on what."""
        run = self.command
        name = "training" if run.script is None else Path(run.script).stem
        where = f"{run.layout} on {run.gpus} x {self.device.gpu.name}"
        return f"Rehearsal of {name}: {Path(run.model).name}, {where}"

    @property
    def fits(self) -> bool:
        """Whether every rehearsed role ran to its end."""
        return all(outcome.ok for outcome in self.outcomes)

    @property
    def fullest(self) -> RoleOutcome:
        """The role that failed, or else the one that reserved most."""
        return max(self.outcomes, key=lambda outcome: (not outcome.ok, outcome.reserved))

    @property
    def verdict(self) -> str:
        """The result in one sentence."""
        for outcome in self.outcomes:
            if outcome.out_of_memory:
                return f"does not fit: {outcome.role.name} runs out of memory"
            if outcome.error:
                return f"does not run: {outcome.role.name} stops with {outcome.error['kind']}"
        tight = [o.role.name for o in self.outcomes if o.tight]
        if tight:
            return f"fits, with less than {SPARE:.0%} to spare on {', '.join(tight)}"
        return "fits"

    def to_dict(self) -> dict[str, Any]:
        """Return the whole result for ``--json``."""
        run, device = self.command, self.device
        return {
            "verdict": self.verdict,
            "fits": self.fits,
            "command": list(run.flags),
            "script": run.script,
            "model": run.model,
            "layout": str(run.layout),
            "gpus": run.gpus,
            "gpu": {**asdict(device.gpu), "memory_gib": device.memory_gib},
            "allowance for context and NCCL, GiB (assumed)": device.allowance_gib,
            "micro-batches of an iteration": run.micro_batches,
            "micro-batches rehearsed": run.rehearsed_micro_batches,
            "notes": list(self.notes),
            "memory": memory_line(self.outcomes),
            "roles": [outcome.to_dict() for outcome in self.outcomes],
            "pipeline": None if self.pipeline is None else self.pipeline.to_dict(),
            "step": None if self.step is None else self.step.to_dict(),
            "what would fit (measured)": [asdict(remedy) for remedy in self.remedies],
        }


@dataclass(frozen=True)
class Remedy:
    """A changed run that was rehearsed too.

    Attributes:
        flags: flags to append.
        peak: most bytes that tensors took, on the role that failed or reserved most.
        reserved: most bytes that the allocator reserved, on the same role.
        why_not: what stopped the changed run; empty if it fits.
    """

    change: str
    flags: list[str]
    gpus: int
    fits: bool
    peak: int
    reserved: int
    why_not: str = ""
