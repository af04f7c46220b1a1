"""The rehearsal of a run, each role in a process of its own."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from threading import Event, Thread
from typing import Any

from mcore_qwen3vl.config import Architecture
from mcore_qwen3vl.errors import BadInput
from mcore_qwen3vl.pretended.flops import flops_of
from mcore_qwen3vl.pretended.preload import Routing, Settings, Unavailable
from mcore_qwen3vl.pretended.workbench import Failed, SimulatedRank, Workbench
from mcore_qwen3vl.rehearsal.command import Command, Role, prepare, roles_of
from mcore_qwen3vl.rehearsal.outcome import Device, Rehearsal, RoleOutcome
from mcore_qwen3vl.rehearsal.rank.holders import BACKWARD, FORWARD
from mcore_qwen3vl.rehearsal.step_time import Constants, Model, RankWork, StepTime
from mcore_qwen3vl.runtime.gpus import Gpu, allowance_gib
from mcore_qwen3vl.runtime.lifetime import scratch_folder
from mcore_qwen3vl.schedule import Durations, Pipeline, model_pipeline

IMPORTS = (
    "mcore_qwen3vl.rehearsal.rank.linear_attention",  # first, because it hides a package
    "mcore_qwen3vl.rehearsal.rank.train",
    "mcore_qwen3vl.training.run",
    "mcore_qwen3vl.training.model",
    "mcore_qwen3vl.training.data_provider",
    "megatron.training.training",
)
_ON_RANK = "mcore_qwen3vl.rehearsal.rank.train:measure"
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
    """

    gpu: Gpu
    memory_gib: float | None = None
    allowance_gib: float | None = None
    roles: tuple[str, ...] = ("all",)
    routing: Routing = "uniform"
    constants: Constants = field(default_factory=Constants)

    def device(self, command: Command) -> Device:
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
        return Device(self.gpu, memory, allowance)


class Rehearser:
    """One process with all imports done, from which every role's process is forked.

    Use it as a context manager, and close it before opening another one.
    """

    def __init__(self, options: Options, say: Say = lambda text: None) -> None:
        """
        Raises:
            BadInput: the GPU cannot be simulated here.
        """
        self.options = options
        self._say = say
        self._open = ExitStack()
        self._folder = self._open.enter_context(scratch_folder("mcore-qwen3vl-rehearsal-"))
        self._log = self._folder / "log"
        self._made = 0
        settings = Settings(capability=options.gpu.capability)
        try:
            bench = Workbench(IMPORTS, settings, self._log, (BadInput,))
        except Unavailable as error:
            raise BadInput(str(error)) from None
        self._bench = self._open.enter_context(bench)

    def __enter__(self) -> Rehearser:
        return self

    def __exit__(self, *exception: Any) -> None:
        self._open.__exit__(*exception)

    def rehearse(
        self, command: Command, *, stop_at_failure: bool = False, what: str = ""
    ) -> Rehearsal:
        """Rehearse all chosen roles of a run.

        Args:
            stop_at_failure: leave out the other roles once one has failed.
            what: text before the role's name in lines of progress.

        Raises:
            BadInput: the command, its layout, its model or its data cannot be used.
        """
        a = check_command(command)
        roles = roles_of(command, a, self.options.roles)
        self._made += 1
        folder = self._folder / str(self._made)
        folder.mkdir()
        prepared = prepare(command, folder)
        rehearsal = Rehearsal(command, self.options.device(command), prepared.notes)
        for number, role in enumerate(roles):
            place = f"{what}{role.name} ({number + 1} of {len(roles)}), rank {role.rank}"
            rehearsal.outcomes.append(self._rehearse_role(prepared, role, place))
            if stop_at_failure and not rehearsal.fits:
                break
        if len(rehearsal.outcomes) == len(roles_of(command, a)) and rehearsal.fits:
            rehearsal.pipeline = _pipeline(rehearsal)
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

    def _rehearse_role(self, prepared: Command, role: Role, what: str) -> RoleOutcome:
        device = self.options.device(prepared)
        started = time.monotonic()
        simulated = SimulatedRank(
            role.rank, prepared.gpus, device.memory_gib, device.allowance_gib, self.options.routing
        )
        progress = self._folder / "progress"
        progress.write_text("starting\n", "utf-8")
        try:
            with _report_progress(progress, lambda doing: self._say(f"{what}: {doing}")):
                measured, report = self._bench.call(
                    _ON_RANK, list(prepared.flags), progress, simulated=simulated
                )
        except Failed as failed:
            lines = self._log.read_text("utf-8", errors="replace").splitlines()
            last = " / ".join(line.strip() for line in lines[-_LOG_LINES:] if line.strip())
            raise BadInput(
                f"The rehearsal of {what} ended without a result ({failed}): {last}"
            ) from failed
        return RoleOutcome(role, measured, report, time.monotonic() - started, device.usable)


def check_command(command: Command) -> Architecture:
    """Return the model's shape, after checking that model and batch divide as the flags say.

    Raises:
        BadInput: model or batch do not divide so, or there is no such model.
    """
    a = command.line.architecture
    command.line.layout(command.gpus)
    group, stages, count = command.micro_batch_group, command.layout.pp, command.micro_batches
    # Megatron's interleaved schedule would check this at the first step.
    if command.layout.vpp > 1 and (group < stages or 0 < count % group < stages):
        raise BadInput(
            f"Virtual stages take turns every {group} micro-batches. There are {count}, so the "
            f"last turn would have fewer than PP {stages}. Change --global-batch-size, or "
            "--microbatch-group-size-per-virtual-pipeline-stage."
        )
    return a


def _pipeline(rehearsal: Rehearsal) -> Pipeline | None:
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
