"""The rehearsal of a run, each role in a process of its own, and its results.

The results are measured, except for the pipeline and the step's time.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from threading import Event, Thread
from typing import Any

from mcore_qwen3vl.config import Architecture
from mcore_qwen3vl.errors import BadInput
from mcore_qwen3vl.rehearsal import holders
from mcore_qwen3vl.rehearsal.command import Command, Role, prepare_command, roles_of
from mcore_qwen3vl.rehearsal.holders import BACKWARD, FORWARD
from mcore_qwen3vl.rehearsal.pipeline import Durations, Pipeline, model_pipeline
from mcore_qwen3vl.rehearsal.step_time import (
    Constants,
    Model,
    RankWork,
    StepTime,
    TrainingTime,
)
from mcore_qwen3vl.runtime.gpus import GIB, Gpu, allowance_gib
from mcore_qwen3vl.runtime.lifetime import scratch_folder
from mcore_qwen3vl.simulated_gpu.device import (
    Interval,
    Report,
    Routing,
    Settings,
    Unavailable,
)
from mcore_qwen3vl.simulated_gpu.rank import flops_of
from mcore_qwen3vl.simulated_gpu.workbench import Failed, Workbench
from mcore_qwen3vl.training.events import LOG

SPARE = 0.05
"""Share of the GPU's memory that a run should leave free, since a rehearsal is not exact."""


@dataclass(frozen=True)
class RehearsedGpu:
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
    """The results of one role's two iterations."""

    role: Role
    measured: dict[str, Any]  # what `rank.measure` returned
    report: Report
    seconds: float
    usable: int  # bytes available to PyTorch's allocator

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
    def _fullest(self) -> dict[str, Any]:
        """The moment of the peak; if out of memory, that when an allocation failed."""
        refused = self.measured["refused"] if self.out_of_memory else None
        return dict(refused or self.measured["peak"])

    @property
    def peak(self) -> int:
        """Most bytes that tensors took, or if out of memory, held when an allocation failed."""
        return int(self._fullest["allocated"])

    @property
    def by_holder(self) -> dict[str, int]:
        """Bytes by holder at the moment of :attr:`peak`, largest first."""
        return dict(self._fullest["sizes"])

    @property
    def reserved(self) -> int:
        """Most bytes that the allocator reserved on the device."""
        return max((interval.reserved for interval in self.report.intervals), default=0)

    @property
    def spare(self) -> int:
        """Usable bytes that were not reserved. `ok` says whether the role fits."""
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
        """A micro-batch's :meth:`mcore_qwen3vl.rehearsal.rank.StageWork.take_iteration`."""
        return list(self.report.facts["work"])

    @property
    def faults(self) -> dict[str, list[str]]:
        """The names of faulty parameters and buffers, by fault."""
        names = ("without gradient", "not on the device")
        facts = self.report.facts
        return {name: facts[name] for name in names if self.ok and facts.get(name)}

    @property
    def host_sync_count(self) -> int:
        """Host syncs of one iteration, without those of periodic logging."""
        iteration = self.iteration
        syncs = iteration.host_syncs if iteration is not None else []
        return sum(sync.count for sync in syncs if sync.phase != LOG)

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
    sizes: dict[str, int] = {name: fullest.by_holder.get(name, 0) for name in parts}
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
    device: RehearsedGpu
    notes: tuple[str, ...] = ()
    outcomes: list[RoleOutcome] = field(default_factory=list)
    pipeline: Pipeline | None = None
    step: StepTime | None = None
    remedies: list[Remedy] = field(default_factory=list)
    tokens: float | None = None
    """Of a whole training."""

    @property
    def training(self) -> TrainingTime | None:
        """How long it takes; None if no tokens were given, or no step was modelled."""
        if self.tokens is None or self.step is None:
            return None
        return self.step.training(self.tokens, self.command.gpus)

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
        """The failed role, or else the one that reserved most."""
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
            "training (modelled)": None if self.training is None else asdict(self.training),
            "what would fit (measured)": [asdict(remedy) for remedy in self.remedies],
        }


@dataclass(frozen=True)
class Remedy:
    """A changed run that was rehearsed too."""

    change: str
    flags: list[str]  # to append
    gpus: int
    fits: bool
    peak: int  # most bytes of tensors, on the role that failed or reserved most
    reserved: int  # most bytes that the allocator reserved, on the same role
    why_not: str  # what stopped the changed run; empty if it fits


IMPORTS = (
    "mcore_qwen3vl.rehearsal.stubs",  # first, because it hides a package
    "mcore_qwen3vl.rehearsal.rank",
    "mcore_qwen3vl.training.run",
    "mcore_qwen3vl.training.model",
    "mcore_qwen3vl.training.data_provider",
    "megatron.training.training",
)
_ON_RANK = "mcore_qwen3vl.rehearsal.rank:measure"
_LOOK = 0.3  # seconds between two looks at what a rank is doing
_LOG_LINES = 12

Say = Callable[[str], None]


@dataclass(frozen=True)
class Options:
    """What to rehearse, and on which GPU.

    Attributes:
        memory_gib: the GPU's memory; None: what this model of GPU usually has.
        allowance_gib: memory for context and NCCL; None: :func:`.gpus.allowance_gib`.
        roles: the roles to rehearse, see :func:`.command.roles_of`.
        tokens: tokens of a whole training, without padding, whose time is modelled.
    """

    gpu: Gpu
    memory_gib: float | None = None
    allowance_gib: float | None = None
    roles: tuple[str, ...] = ("all",)
    routing: Routing = "uniform"
    constants: Constants = field(default_factory=Constants)
    tokens: float | None = None

    def device(self, command: Command) -> RehearsedGpu:
        """Return the GPU that a rank of `command` has, and its memory."""
        allowance = self.allowance_gib
        if allowance is None:
            moe = command.line.architecture.is_moe
            allowance = allowance_gib(command.layout, moe=moe)
        memory = self.gpu.memory_gib if self.memory_gib is None else self.memory_gib
        if memory <= allowance:
            raise BadInput(
                f"A GPU of {memory} GiB has nothing left after {allowance} GiB for context and "
                "NCCL: raise --memory-gib or lower --allowance-gib."
            )
        return RehearsedGpu(self.gpu, memory, allowance)


class Rehearser(ExitStack):
    """One process with all imports done, from which every role's process is forked.

    Use it as a context manager, and close it before opening another one.
    """

    def __init__(self, options: Options, say: Say = lambda text: None) -> None:
        """
        Raises:
            BadInput: the GPU cannot be simulated here.
        """
        super().__init__()
        self.options = options
        self._say = say
        self._folder = self.enter_context(scratch_folder("mcore-qwen3vl-rehearsal-"))
        self._log = self._folder / "log"
        self._made = 0
        settings = Settings(capability=options.gpu.capability)
        try:
            bench = Workbench(IMPORTS, settings, self._log, (BadInput,))
        except Unavailable as error:
            raise BadInput(str(error)) from None
        self._bench = self.enter_context(bench)

    def rehearse(
        self,
        command: Command,
        *,
        stop_at_failure: bool = False,
        what: str = "",
        routing: Routing | None = None,
    ) -> Rehearsal:
        """Rehearse all chosen roles of a run.

        Args:
            stop_at_failure: leave out the other roles once one has failed.
            what: text before the role's name in lines of progress.
            routing: of the experts; None: that of the options.

        Raises:
            BadInput: the command, its layout, its model or its data cannot be used.
        """
        architecture = checked_architecture(command)
        roles = roles_of(command, architecture, self.options.roles)
        self._made += 1  # each run has a folder of its own
        folder = self._folder / str(self._made)
        folder.mkdir()
        prepared = prepare_command(command, folder)
        rehearsal = Rehearsal(
            command,
            self.options.device(command),
            prepared.notes,
            tokens=self.options.tokens,
        )
        for number, role in enumerate(roles):
            place = f"{what}{role.name} ({number + 1} of {len(roles)}), rank {role.rank}"
            outcome = self._rehearse_role(prepared, role, place, routing or self.options.routing)
            rehearsal.outcomes.append(outcome)
            if stop_at_failure and not rehearsal.fits:
                break
        # The pipeline is modelled from all roles, so not if `options.roles` left some out.
        if len(rehearsal.outcomes) == len(roles_of(command, architecture)) and rehearsal.fits:
            rehearsal.pipeline = _modelled_pipeline(rehearsal)
            rehearsal.step = self._model_step(rehearsal)
        return rehearsal

    def _model_step(self, rehearsal: Rehearsal) -> StepTime:
        command = rehearsal.command
        top = command.line.architecture.num_experts_per_tok
        model = Model(self.options.gpu, self.options.constants, command.flags, top)
        ranks = [
            RankWork(
                outcome.role.name,
                outcome.role.stages,
                outcome.work,
                outcome.iteration,
                command.rehearsed_micro_batches,
                outcome.report.facts["tokens"],
                outcome.report.facts["useful flops"],
            )
            for outcome in rehearsal.outcomes
            if outcome.iteration is not None
        ]
        group, dp = command.micro_batch_group, command.layout.dp
        return model.step(ranks, command.micro_batches, group, command.gpus, dp)

    def _rehearse_role(
        self, prepared: Command, role: Role, what: str, routing: Routing
    ) -> RoleOutcome:
        device = self.options.device(prepared)
        started = time.monotonic()
        progress = self._folder / "progress"
        progress.write_text("starting\n", "utf-8")
        try:
            with _report_progress(progress, lambda doing: self._say(f"{what}: {doing}")):
                measured, report = self._bench.call(
                    *(_ON_RANK, list(prepared.flags), progress),
                    rank=role.rank,
                    world_size=prepared.gpus,
                    routing=routing,
                    memory_gib=device.memory_gib,
                    context_gib=device.allowance_gib,
                )
        except Failed as failed:
            lines = self._log.read_text("utf-8", errors="replace").splitlines()
            last = " / ".join(line.strip() for line in lines[-_LOG_LINES:] if line.strip())
            raise BadInput(
                f"The rehearsal of {what} ended without a result ({failed}): {last}"
            ) from failed
        return RoleOutcome(role, measured, report, time.monotonic() - started, device.usable)


def checked_architecture(command: Command) -> Architecture:
    """Return the model's shape, after checking that model and batch divide as the flags say.

    Raises:
        BadInput: model or batch do not divide so, or there is no such model.
    """
    architecture = command.line.architecture
    command.line.layout(command.gpus)  # raises BadInput if model and GPUs do not divide so
    group, stages, count = command.micro_batch_group, command.layout.pp, command.micro_batches
    # Megatron's interleaved schedule would check this at the first step.
    if command.layout.vpp > 1 and (group < stages or 0 < count % group < stages):
        raise BadInput(
            f"Virtual stages take turns every {group} micro-batches. There are {count}, so the "
            f"last turn would have fewer than PP {stages}. Change --global-batch-size, or "
            "--microbatch-group-size-per-virtual-pipeline-stage."
        )
    return architecture


def _modelled_pipeline(rehearsal: Rehearsal) -> Pipeline | None:
    """Return the modelled pipeline of a rehearsal whose roles all ran; None if PP is 1."""
    command = rehearsal.command
    if command.layout.pp == 1:
        return None
    stages = [o for outcome in rehearsal.outcomes for o in [outcome] * outcome.role.stages]
    flops = [
        [Durations(*(flops_of(chunk[d]) for d in (FORWARD, BACKWARD))) for chunk in o.work]
        for o in stages
    ]
    return model_pipeline(flops, command.micro_batches, command.micro_batch_group)


@contextmanager
def _report_progress(progress: Path, say: Say) -> Iterator[None]:
    """Call `say` with the last line of a file whenever it changes."""
    done = Event()

    def watch() -> None:
        last = ""
        while not done.wait(_LOOK):
            lines = progress.read_text("utf-8").splitlines()
            if lines and lines[-1] != last:
                last = lines[-1]
                say(last)

    watcher = Thread(target=watch, daemon=True)
    watcher.start()
    try:
        yield
    finally:
        done.set()
        watcher.join()
