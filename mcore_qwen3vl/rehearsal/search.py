"""The search for runs that fit: other layouts in the order of a model, or single changes."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import product
from math import inf
from typing import Any

from mcore_qwen3vl.config import Architecture
from mcore_qwen3vl.errors import BadInput
from mcore_qwen3vl.layout import Layout
from mcore_qwen3vl.model import flops
from mcore_qwen3vl.rehearsal.command import Command, sample_size
from mcore_qwen3vl.rehearsal.holders import BACKWARD, FORWARD
from mcore_qwen3vl.rehearsal.rehearse import Rehearsal, Rehearser, Remedy, checked_architecture
from mcore_qwen3vl.rehearsal.step_time import Constants, Model, RankWork
from mcore_qwen3vl.runtime.gpus import Gpu
from mcore_qwen3vl.simulated_gpu.device import Interval, Traffic
from mcore_qwen3vl.simulated_gpu.rank import ONE_KEY
from mcore_qwen3vl.training import memory
from mcore_qwen3vl.training.arguments.command_line import NONE, RESETTABLE, SIZES
from mcore_qwen3vl.training.parameter_counts import TrainedCounts, rank_parameters, trained_of

WANTED = 3
TRIED = 9
"""The most candidates to rehearse; the run's own layout may be one more."""
ESTIMATE_OFF = 1.15
"""The estimate of memory may be too high by this factor."""
NODE = 8
"""The largest TP and EP: the GPUs that NVLink connects."""
_RECOMPUTE = "--recompute-granularity"
_REPLACED = (*SIZES, "--expert-tensor-parallel-size", *RESETTABLE)


@dataclass(frozen=True)
class Candidate:
    """A layout of the same run."""

    command: Command
    flags: tuple[str, ...]  # to append to the run's own, to override them; empty for its own layout
    seconds: float  # of a step, modelled from the shape of the model
    estimate: float  # modelled bytes of the fullest rank's tensors

    @property
    def is_requested(self) -> bool:
        """Whether it is the run's own layout."""
        return not self.flags


@dataclass(frozen=True)
class Fit:
    """A candidate and its rehearsal.

    Attributes:
        skewed: the rehearsal of a model with experts again, with skewed routing, if it fits with a
            balanced one.
    """

    candidate: Candidate
    rehearsal: Rehearsal
    skewed: Rehearsal | None = None

    @property
    def good(self) -> bool:
        """Whether it fits, with memory to spare on every role, and under skewed routing at all."""
        return has_room(self.rehearsal) and (self.skewed is None or self.skewed.fits)

    @property
    def verdict(self) -> str:
        """The result in one sentence."""
        if self.skewed is None or self.skewed.fits:
            return self.rehearsal.verdict
        return f"{self.skewed.verdict} with --routing skewed"

    @property
    def seconds(self) -> float | None:
        """Seconds of a step, modelled from the rehearsal; None if the layout does not run."""
        return self.rehearsal.step.seconds if self.rehearsal.step else None

    def to_dict(self) -> dict[str, Any]:
        """Return the row for ``--json``; sizes in bytes."""
        training = self.rehearsal.training
        return {
            "layout": str(self.candidate.command.layout),
            "own": self.candidate.is_requested,
            "flags": list(self.candidate.flags),
            "fits": self.good,
            "verdict": self.verdict,
            "peak (measured)": self.rehearsal.fullest.peak,
            "reserved (measured)": self.rehearsal.fullest.reserved,
            "reserved with skewed routing (measured)": self.skewed and self.skewed.fullest.reserved,
            "usable": self.rehearsal.fullest.usable,
            "seconds a step (modelled)": self.seconds,
            "training (modelled)": training and asdict(training),
        }


def has_room(rehearsal: Rehearsal) -> bool:
    """Return whether a run fits, with memory to spare on every role."""
    return rehearsal.fits and not any(outcome.tight for outcome in rehearsal.outcomes)


def search(rehearser: Rehearser, command: Command, architecture: Architecture) -> list[Fit]:
    """Rehearse candidates, the fastest first, until three fit with memory to spare.

    The run's own layout is rehearsed in any case, if it is valid on these GPUs. One of a model with
    experts has to fit with skewed routing too, which training may come to.

    Returns:
        All rehearsed candidates: those that fit first, then the others, each by the modelled step.

    Raises:
        BadInput: no layout divides this model over these GPUs, or none is estimated to fit.
    """
    gpu, constants = rehearser.options.gpu, rehearser.options.constants
    ranked = sorted(candidates(command, architecture, gpu, constants), key=lambda c: c.seconds)

    def may_fit(candidate: Candidate) -> bool:
        # Context and NCCL take more in some layouts than in others, and on a small GPU all.
        try:
            usable = rehearser.options.device(candidate.command).usable
        except BadInput:
            return False
        return candidate.estimate <= ESTIMATE_OFF * usable

    likely = list(filter(may_fit, ranked))
    if not likely:
        raise BadInput(
            f"No layout of this model fits on {command.gpus} GPUs; {len(ranked)} were "
            "estimated. Use more or larger GPUs, or a shorter --seq-length."
        )
    possible = [c for c in ranked if c.is_requested or c in likely]
    tried: list[Fit] = []
    for number, candidate in enumerate(possible):
        done = number >= TRIED or sum(fit.good for fit in tried) >= WANTED
        if done and not candidate.is_requested:
            continue
        what = f"{candidate.command.layout}, "
        rehearsal = rehearser.rehearse(candidate.command, stop_at_failure=True, what=what)
        skewed = None
        if architecture.is_moe and rehearser.options.routing != "skewed" and has_room(rehearsal):
            skewed = rehearser.rehearse(
                candidate.command,
                stop_at_failure=True,
                what=f"{what}skewed routing, ",
                routing="skewed",
            )
        tried.append(Fit(candidate, rehearsal, skewed))
    return sorted(tried, key=lambda fit: (not fit.good, fit.seconds or inf))


def candidates(
    command: Command, architecture: Architecture, gpu: Gpu, constants: Constants
) -> Iterator[Candidate]:
    """Yield layouts of powers of two, TP and EP up to a node, with and without full recompute.

    The run's own layout is among them, with its virtual stages and its own pipeline split.
    """
    trained = trained_counts(command, architecture)

    def make_candidate(run: Command, flags: tuple[str, ...]) -> Candidate:
        peak = max(stage.total for stage in memory_of_stages(run, architecture, trained))
        return Candidate(run, flags, step_seconds(run, architecture, gpu, constants), peak)

    try:
        checked_architecture(command)
    except BadInput:
        pass
    else:
        yield make_candidate(command, ())
    sizes = [2**n for n in range(12) if 2**n <= command.gpus]
    experts = [n for n in sizes if n <= NODE] if architecture.is_moe else [1]
    bare = command.without(*_REPLACED)
    for tp, pp, cp, ep, recompute in product(sizes, sizes, sizes, experts, (False, True)):
        if tp > NODE or command.gpus % (tp * pp * cp):
            continue
        layout = Layout(tp=tp, pp=pp, cp=cp, ep=ep, sp=tp > 1)
        flags = (*layout.flags(moe=architecture.is_moe), *(FULL_RECOMPUTE if recompute else ()))
        other = bare.plus(*flags)
        if other.layout == command.layout and other.value(_RECOMPUTE) == command.value(_RECOMPUTE):
            continue
        try:
            checked_architecture(other)
        except BadInput:
            continue
        yield make_candidate(other, (*flags, *_reset_words(command, flags)))


def _reset_words(command: Command, flags: Sequence[str]) -> Iterator[str]:
    """Yield the words to take back layout flags of `command` that are not in `flags`."""
    for name in _REPLACED:
        if name not in flags and command.value(name) is not None:
            yield from (name, "1" if name.endswith("-parallel-size") else NONE)


def trained_counts(command: Command, architecture: Architecture) -> TrainedCounts | None:
    """Count the parameters that a LoRA run trains; None for a run without LoRA."""
    return trained_of(command.settings, architecture, command.line.model)


def memory_of_stages(
    command: Command, architecture: Architecture, trained: TrainedCounts | None
) -> list[memory.Memory]:
    """Return the modelled memory of a rank of each pipeline stage, in order."""
    layout = Layout.from_flags(command.settings.parallel, command.gpus, moe=architecture.is_moe)
    return memory.stages_of_settings(command.settings, architecture, layout, trained)


def checkpoint_size(
    command: Command,
    architecture: Architecture,
    stages: Sequence[memory.Memory],
    trained: TrainedCounts | None,
) -> memory.CheckpointSize:
    """Return the modelled size of the run's checkpoints; `stages`: see :func:`memory_of_stages`."""
    mtp = bool(command.settings.loop.mtp_num_layers)
    return memory.checkpoint_size(architecture, command.layout, stages, trained, mtp=mtp)


def step_seconds(
    command: Command, architecture: Architecture, gpu: Gpu, constants: Constants
) -> float:
    """Return the modelled seconds of a step, with the work that :func:`modelled_work` finds."""
    model, dp = Model(gpu, constants, command.flags), command.layout.dp
    ranks, group = modelled_work(command, architecture), command.micro_batch_group
    return model.step(ranks, command.micro_batches, group, command.gpus, dp).seconds


def modelled_work(command: Command, architecture: Architecture) -> list[RankWork]:
    """Return the work of a rank of each pipeline stage, from the model's shape instead of a run.

    * Compute: the FLOPs of :mod:`mcore_qwen3vl.model.flops`, and a second forward pass under full
      recompute. The vision tower is on the first stage; decoder layers are divided equally.
    * TP with SP: each layer has two all-gathers and two reduce-scatters of the hidden states in
      each direction, and two more all-gathers in the backward pass.
    * CP gathers keys and values of attention, and scatters their gradients. In a gated delta net an
      all-to-all takes the projected tokens to the ranks of their heads, and another takes the
      outputs back. EP sends and returns tokens.
    * DP: gradients in fp32 and weights in bf16 are exchanged once a step.

    Other kernels, their launches, host syncs and the transfers between stages are left out.
    """
    layout, settings, (sample, side) = command.layout, command.settings, sample_size(command)
    again = settings.compute.recompute_granularity == "full"
    tokens = settings.data.seq_length * settings.data.micro_batch_size
    merge = architecture.vision.spatial_merge_size**2
    # Half of the tokens are visual.
    patches = tokens / 2 * merge if architecture.has_vision else 0.0
    divided, parts = layout.tp * layout.cp, layout.pp * layout.vpp
    mtp = bool(settings.loop.mtp_num_layers)
    products = flops.language(architecture, tokens, 0, mtp=mtp) / parts
    attention = flops.language(architecture, 0, tokens * sample, mtp=mtp) / parts
    vision = flops.vision(architecture, patches, patches * side**2 * merge)
    exchanges = _exchanges(architecture, layout, tokens)
    ranks = []
    for stage in range(layout.pp):
        chunks = []
        for chunk in range(layout.vpp):
            gemm = products + vision * (stage == chunk == 0)  # the tower is on the first stage
            # A third of the FLOPs are forward; the backward pass has the other two.
            compute = {"gemm": gemm / divided / 3, "attention": attention / divided / 3}
            compute[ONE_KEY] = compute["attention"] / (sample / 2)  # half of it is before a token
            forward = compute | {t.key: size for t, size, _ in exchanges}
            backward = {name: (2 + again) * n for name, n in compute.items()}
            backward |= {t.key: size + again * first for t, first, size in exchanges}
            chunks.append({FORWARD: forward, BACKWARD: backward})
        traffic = [*(t for t, _, _ in exchanges), *_gradient_traffic(architecture, layout, stage)]
        counters = {"launches": 0, "host_syncs": 0}
        interval = Interval("iteration", 0, 0, 0, 0, counters, [], traffic, {})
        ranks.append(RankWork(f"stage {stage}", 1, chunks, interval, 1, 0, 0))
    return ranks


def _exchanges(a: Architecture, layout: Layout, tokens: int) -> list[tuple[Traffic, float, float]]:
    """Return what a virtual stage exchanges, and the bytes of its forward and backward pass."""
    counts = a.num_hidden_layers, sum(a.delta_net_layers), sum(a.moe_layers)
    layers, delta_nets, moe_layers = (count / (layout.pp * layout.vpp) for count in counts)
    of_rank = 2 * tokens / layout.cp  # bytes of a value of each token, in bf16 as all of these
    hidden = of_rank * a.hidden_size * layers
    keys = 2 * 2 * a.num_key_value_heads * a.head_dim * tokens / layout.tp * (layers - delta_nets)
    values = _values_between_heads(a) * of_rank / layout.tp * delta_nets
    routed = of_rank * a.hidden_size / layout.tp * a.num_experts_per_tok * moe_layers
    to_heads = _describe_traffic("CONTEXT_PARALLEL", layout.cp, layout.tp, "all_to_all")
    to_experts = _describe_traffic("EXPERT_MODEL_PARALLEL", layout.ep, layout.etp, "all_to_all")
    return [
        (_describe_traffic("TENSOR_MODEL_PARALLEL", layout.tp, 1), 4 * hidden, 6 * hidden),
        (_describe_traffic("CONTEXT_PARALLEL", layout.cp, layout.tp), keys, keys),
        (to_heads, values, values),
        (to_experts, 2 * routed, 2 * routed),
    ]


def _values_between_heads(a: Architecture) -> int:
    """Return how many values of a token a gated delta net sends to other CP ranks, and back.

    Query, key, value and gate, and beta and the decay of each head go; the gated output returns.
    """
    if (net := a.delta_net) is None:
        return 0
    return 2 * net.key_dim + 3 * net.value_dim + 2 * net.num_value_heads


def _gradient_traffic(a: Architecture, layout: Layout, stage: int) -> Iterator[Traffic]:
    """Yield the exchange of gradients and of weights between data-parallel ranks."""
    shared, experts = rank_parameters(a, layout, stage)
    divisions = layout.ep * layout.etp  # ranks between which a layer's experts are divided
    copies = layout.tp * layout.cp * layout.dp // divisions
    for operation, nbytes in (("reduce_scatter", 4), ("all_gather", 2)):
        ranks, size = layout.dp * layout.cp, nbytes * shared
        yield _describe_traffic("DATA_PARALLEL", ranks, layout.tp, operation, size)
        yield _describe_traffic(
            "EXPERT_DATA_PARALLEL", copies, divisions, operation, nbytes * experts
        )


def _describe_traffic(
    group: str, ranks: int, apart: int, operation: str = "all_gather", size: float = 0
) -> Traffic:
    """Describe an exchange in a group whose members are `apart` ranks from one another."""
    span = (ranks - 1) * apart + 1
    return Traffic(f"{group}_GROUP[{ranks}]", operation, 1, int(size), span)


FULL_RECOMPUTE = (
    *("--recompute-granularity", "full"),
    *("--recompute-method", "uniform"),
    *("--recompute-num-layers", "1"),
)

Change = tuple[str, tuple[object, ...], int]
"""A change in words, the flags to append for it, and the number of GPUs."""


def suggest_remedies(rehearser: Rehearser, command: Command, rehearsal: Rehearsal) -> list[Remedy]:
    """Rehearse the neighbours of a run that is out of memory; for any other run, return none.

    Each neighbour has one change. If none of them fits, full recompute is tried together with each
    of the others. A neighbour fits if all of its roles do; else its first role that fails is
    reported.
    """
    if not any(outcome.out_of_memory for outcome in rehearsal.outcomes):
        return []
    single = list(single_changes(command))
    tried = _rehearse_changes(rehearser, command, single)
    if any(remedy.fits for remedy in tried) or _recomputes_fully(command):
        return tried
    pairs = [
        (f"full recompute and {change}", (*FULL_RECOMPUTE, *flags), gpus)
        for change, flags, gpus in single
        if flags != FULL_RECOMPUTE
    ]
    return tried + _rehearse_changes(rehearser, command, pairs)


def _recomputes_fully(command: Command) -> bool:
    return command.value(_RECOMPUTE) == "full"


def single_changes(command: Command) -> Iterator[Change]:
    """Yield one change in each direction; the model or the GPUs may still not allow it."""
    layout, gpus = command.layout, command.gpus
    if not _recomputes_fully(command):
        yield "recompute of the vision tower", ("--recompute-vision",), gpus
        yield "full recompute", FULL_RECOMPUTE, gpus
    if command.value("--use-distributed-optimizer") is None and layout.dp > 1:
        yield "the distributed optimizer", ("--use-distributed-optimizer",), gpus
    if 2 * layout.tp <= NODE:
        flags = ("--tensor-model-parallel-size", 2 * layout.tp, "--sequence-parallel")
        yield f"TP {2 * layout.tp}", flags, gpus
    yield f"CP {2 * layout.cp}", ("--context-parallel-size", 2 * layout.cp), gpus
    yield f"PP {2 * layout.pp}", ("--pipeline-model-parallel-size", 2 * layout.pp), gpus
    if command.value("--use-distributed-optimizer") is not None:
        yield f"{2 * gpus} GPUs (DP {2 * layout.dp})", (), 2 * gpus


def _rehearse_changes(
    rehearser: Rehearser, command: Command, changes: Sequence[Change]
) -> list[Remedy]:
    remedies = []
    for change, flags, gpus in changes:
        neighbour = replace(command.plus(*flags), gpus=gpus)
        try:
            checked_architecture(neighbour)
            tried = rehearser.rehearse(neighbour, stop_at_failure=True, what=f"with {change}, ")
        except BadInput:  # the model or the ranks do not divide that way
            continue
        worst, words = tried.fullest, list(map(str, flags))
        why = "" if tried.fits else tried.verdict
        remedies.append(Remedy(change, words, gpus, tried.fits, worst.peak, worst.reserved, why))
    return remedies
