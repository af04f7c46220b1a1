"""A training run as flags and a number of GPUs, its kinds of ranks, and what is rehearsed of it.

Of the made-up model, data and teacher of a rehearsal only the sizes matter.
"""

from __future__ import annotations

import os
import shlex
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from importlib.util import find_spec
from pathlib import Path

from mcore_qwen3vl.config import Architecture
from mcore_qwen3vl.converters.identify import identify, resolve
from mcore_qwen3vl.data.record_form import DetectedForm
from mcore_qwen3vl.data.sidecar import Sidecar
from mcore_qwen3vl.errors import BadInput
from mcore_qwen3vl.launch import catalogue
from mcore_qwen3vl.layout import Layout
from mcore_qwen3vl.published_configs import PUBLISHED
from mcore_qwen3vl.training.arguments.command_line import (
    CommandLine,
    StrictParser,
    drop_unset_flags,
    without_flags,
)
from mcore_qwen3vl.training.arguments.settings import Settings
from mcore_qwen3vl.training.second_model import source_of

_ENTRY = "train.py"


@dataclass(frozen=True)
class Command:
    """A run: the flags of ``launch/train.py``, where the last one wins, and the number of GPUs."""

    flags: tuple[str, ...]
    gpus: int
    script: str | None = None
    notes: tuple[str, ...] = ()  # choices that were made for the user

    def __post_init__(self) -> None:
        # The class is frozen, so the field cannot simply be assigned to.
        object.__setattr__(self, "flags", tuple(drop_unset_flags(self.flags)))

    def value(self, flag: str, default: str | None = None) -> str | None:
        """Return the value of `flag`, ``""`` if it is there without one, or else `default`."""
        result = default
        for i, word in enumerate(self.flags):
            name, equals, value = word.partition("=")
            if name == flag:
                # At the end of the line there is no value, as before another flag.
                following = self.flags[i + 1] if i + 1 < len(self.flags) else "--"
                result = value if equals else "" if following.startswith("--") else following
        return result

    def without(self, *names: str) -> Command:
        """Return the same command without these flags and their values."""
        return replace(self, flags=tuple(without_flags(self.flags, frozenset(names))))

    def plus(self, *words: object) -> Command:
        """Return the same command with words appended, which override earlier ones."""
        return replace(self, flags=(*self.flags, *map(str, words)))

    def with_note(self, note: str) -> Command:
        return replace(self, notes=(*self.notes, note))

    @property
    def model(self) -> str:
        """The value of ``--hf-model``; for a published config, its file's name: ``8b``."""
        named = self.value("--hf-model", "") or ""
        return Path(named).stem if Path(named).parent == PUBLISHED else named

    @cached_property
    def layout(self) -> Layout:
        """The parallel sizes, not checked. DP follows from the number of GPUs.

        Raises:
            BadInput: a flag has an invalid value, or there is no such model.
        """
        moe = self.line.architecture.is_moe
        return Layout.from_flags(self.settings.parallel, self.gpus, moe=moe)

    @cached_property
    def line(self) -> CommandLine:
        """The flags as training reads them."""
        return CommandLine(self.flags)

    @property
    def settings(self) -> Settings:
        """What the flags say; see :attr:`CommandLine.settings`."""
        return self.line.settings

    @property
    def micro_batches(self) -> int:
        """Micro-batches of one rank in one iteration."""
        rows = self.settings.data.micro_batch_size * self.layout.dp
        return max((self.settings.loop.global_batch_size or rows) // rows, 1)

    @property
    def rehearsed_micro_batches(self) -> int:
        """As many of them as fill the pipeline; more do not change the peak of memory."""
        layout = self.layout
        enough = 2 * self.micro_batch_group if layout.vpp > 1 else layout.pp + 1
        return min(self.micro_batches, enough)

    @property
    def micro_batch_group(self) -> int:
        """Micro-batches that a rank runs through a virtual stage before it turns to the next."""
        group = self.settings.parallel.microbatch_group_size_per_vp_stage
        return group or self.layout.pp


def read_command(words: Sequence[str], gpus: int | None) -> Command:
    """Return the run that `words` start: a launch script with further flags, or `train`'s flags.

    A script of ``launch/`` without ``--hf-model`` takes the published config of the size in its
    name. If Transformer Engine is not installed, the ``torch`` spec is used.

    Args:
        gpus: number of GPUs of the whole run; None: as many as the script starts.

    Raises:
        BadInput: there is no such script, it fails, it does not start ``launch/train.py``, a flag
            is unknown, or the number of GPUs or the model is not given.
    """
    if gpus is not None and gpus < 1:
        raise BadInput(f"--gpus is {gpus}; a run has at least one.")
    if words and not words[0].startswith("--"):
        command = _read_script(Path(words[0]), words[1:], gpus)
    elif gpus is None:
        raise BadInput("Say how many GPUs the run has: --gpus N, or name a script of launch/.")
    else:
        command = Command(tuple(words), gpus)
    command.line.check_names()
    _ = command.settings  # reading them raises if a value cannot be used
    if command.value("--spec", "te") == "te" and find_spec("transformer_engine") is None:
        if command.script is not None:  # the script knows the flags that go with a spec
            command = _read_script(Path(words[0]), [*words[1:], "--spec", "torch"], gpus)
        else:
            command = command.plus("--spec", "torch")
        command = command.with_note(
            "--spec torch, because Transformer Engine is not installed here: "
            "docs/measurements/launch_scripts.md has the memory and the launches of both specs"
        )
    if not command.value("--hf-model"):
        raise BadInput(
            "No model is named: give --hf-model DIR, a checkpoint or a directory that holds "
            "only its config.json."
        )
    return command


def _read_script(name: Path, words: Sequence[str], gpus: int | None) -> Command:
    """Return the run that a script would start, as its ``--dry-run`` prints it."""
    # A name in the list never means a file in the current folder: that file would run.
    listed = catalogue.scripts().get(str(name))
    script = listed or (name if name.is_file() else catalogue.find(name.name))
    if script is not None and script.suffix == ".yaml":
        raise BadInput(f"{script.name} is a configuration of another program: it has no flags.")
    if script is None:
        raise BadInput(
            f"There is no script {name}: give a path, a name that `mcore-qwen3vl launch list` "
            "prints, or the flags of train, each of which begins with --."
        )
    # Inside a job, Slurm's variables would set the number of nodes of the script.
    clean = {n: v for n, v in os.environ.items() if not n.startswith("SLURM_")}
    done = subprocess.run(
        ["bash", str(script), *words, "--dry-run"],
        # This package checks the layout itself, for the ranks of --gpus.
        env={**clean, "LAUNCH_DIR": str(script.parent.absolute()), "CHECK_RANKS": "0"},
        capture_output=True,
        encoding="utf-8",
        check=False,
    )
    if done.returncode:
        raise BadInput(f"bash {script} --dry-run fails: {done.stderr.strip()[-500:]}")
    started = shlex.split(done.stdout)
    entry = next((i for i, w in enumerate(started) if Path(w).name == _ENTRY), None)
    if entry is None:
        raise BadInput(
            f"bash {script} --dry-run does not print a torchrun command with {_ENTRY}, as the "
            "scripts of launch/ do: give the flags of train instead."
        )
    torchrun = StrictParser(allow_abbrev=False, add_help=False)
    torchrun.add_argument("--nnodes", type=int, default=1)
    torchrun.add_argument("--nproc-per-node", type=int, default=1)
    ranks = torchrun.parse_known_args(started[:entry])[0]
    command = Command(
        tuple(started[entry + 1 :]), gpus or ranks.nnodes * ranks.nproc_per_node, str(script)
    )
    size = script.stem.partition("_")[2]
    shape = PUBLISHED / f"{size}.json"
    if command.value("--hf-model") or not shape.exists():
        return command
    return command.plus("--hf-model", shape).with_note(f"the published config of {size}")


@dataclass(frozen=True)
class Role:
    """One rank that stands for all ranks with the same work."""

    name: str
    rank: int  # global rank: the first of its TP x CP group, with data-parallel rank 0
    stage: int  # pipeline stage, from 0
    stages: int = 1  # number of pipeline stages like this one


def roles_of(
    command: Command, architecture: Architecture, chosen: Sequence[str] = ("all",)
) -> list[Role]:
    """Return the distinct roles of a run, in the order of the pipeline.

    A role has all virtual stages of its rank. Middle stages are one role if their virtual stages
    have equally many layers; the first of them keeps the most micro-batches and stands for the
    others. Ranks of one TP, CP, DP or EP group are assumed to be alike.

    Args:
        chosen: ``all``, or some of ``first``, ``middle`` and ``last``.

    Raises:
        BadInput: a name in `chosen` is not known, or the run has no such role.
    """
    if unknown := set(chosen) - {"all", "first", "middle", "last"}:
        raise BadInput(
            f"--roles: {', '.join(sorted(unknown))} is not one of all, first, middle, last."
        )
    every, last = _all_roles(command, architecture), command.layout.pp - 1
    if "all" in chosen:
        return every
    stages = {"first": {0}, "last": {last}, "middle": {*range(1, last)}}
    wanted = set().union(*(stages[name] for name in chosen))
    kept = [role for role in every if role.stage in wanted]
    if not kept:
        raise BadInput(f"--roles {','.join(chosen)}: PP {command.layout.pp} has no such stage.")
    return kept


def _all_roles(command: Command, architecture: Architecture) -> list[Role]:
    layout = command.layout
    if layout.pp == 1:
        return [Role("every rank", 0, 0)]
    each_stage_is_a_role = command.settings.parallel.has_own_split
    layers_of_stages = layout.virtual_stages(architecture.num_hidden_layers)
    middle: dict[object, list[int]] = {}
    for stage in range(1, layout.pp - 1):
        alike = tuple(len(layers) for layers in layers_of_stages[stage :: layout.pp])
        middle.setdefault(stage if each_stage_is_a_role else alike, []).append(stage)
    virtual = f", {layout.vpp} virtual" if layout.vpp > 1 else ""
    roles = [Role(f"first stage{virtual}", _first_rank_of_stage(command, 0), 0)]
    for stages in middle.values():
        name = f"stage {stages[0]}" if len(stages) == 1 else f"middle stages (as {stages[0]})"
        roles.append(
            Role(name + virtual, _first_rank_of_stage(command, stages[0]), stages[0], len(stages))
        )
    last = layout.pp - 1
    return [*roles, Role(f"last stage{virtual}", _first_rank_of_stage(command, last), last)]


def _first_rank_of_stage(command: Command, stage: int) -> int:
    """Return a stage's global rank with TP, CP and DP rank 0, in Megatron's order of ranks."""
    layout = command.layout
    before = 1 if command.value("--use-tp-pp-dp-mapping") is not None else layout.dp
    return stage * layout.tp * layout.cp * before


SAMPLES_OF_A_PACK = 16
SHORTEST = 128  # tokens of a sample: below that there is no room for the chat template
LARGEST_IMAGE = 16  # tokens along its side
_FEWEST_SAMPLES = 64
_RANDOM_START = (
    *("--load", "--load-hf", "--pretrained-checkpoint", "--finetune"),
    *("--save", "--save-interval", "--save-hf", "--save-hf-interval"),
)
_NOT_REHEARSED = (
    *("--valid-data-path", "--eval-iters", "--eval-interval", "--full-validation"),
    *("--tensorboard-dir", "--wandb-project", "--wandb-exp-name", "--wandb-save-dir"),
    *("--log-json", "--log-records", "--log-to", "--log-project", "--log-run"),
    *("--train-samples", "--rampup-batch-size"),
    *("--lr-warmup-fraction", "--lr-warmup-iters", "--lr-warmup-samples"),
    *("--lr-decay-style", "--lr-decay-iters", "--lr-decay-samples"),
    *("--lr-wsd-decay-iters", "--lr-wsd-decay-samples", "--lr-wsd-decay-style"),
)
ITERATIONS = 2
"""The first iteration allocates Adam's moments; the second is the one that counts."""


def _delta_net_note(command: Command) -> str:
    if command.value("--deterministic-mode") is not None or command.settings.model.fp32:
        return "gated delta nets run in plain torch, as in deterministic mode and in float32"
    return (
        "gated delta nets run with a stub of flash-linear-attention 0.6, with its launches and "
        "sizes, whether or not it is installed; on a GPU they need it in half precision, and "
        "--deterministic-mode takes plain torch in its place"
    )


def prepare_command(command: Command, folder: Path) -> Command:
    """Return the command to rehearse: two short iterations, random weights, data from `folder`.

    With ``--data-path`` the user's own data and processor are used. Otherwise both are made up:
    conversations half of whose tokens are one or more images, sixteen to a pack, in a byte-level
    vocabulary of our own. They go through the real encoding, packing and batching.

    Raises:
        BadInput: ``--data-path`` without a processor, sequences too short to make data for, or a
            task without ``--data-path``.
    """
    model = command.line.model
    data = command.value("--data-path") or command.value("--train-data-path")
    task = command.value("--task")
    if task is not None and data is None:
        raise BadInput(
            f"--task {task} is rehearsed on your own records: give --data-path. Or drop --task, to "
            "rehearse the same layout with a language model's loss on made-up data."
        )
    prepared = command.without(*_RANDOM_START, *_NOT_REHEARSED)
    if data is None:
        prepared = _with_made_up_data(prepared, model, folder)
    elif not (model / "tokenizer_config.json").exists():
        raise BadInput(
            f"{model} has no tokenizer, so {data} cannot be read: copy the tokenizer and processor "
            "files beside the config, or leave --data-path out for made-up data."
        )
    elif source := source_of(command.settings):  # no flag names what training starts from any more
        prepared = prepared.plus(*source)
    if command.settings.compute.moe_token_dispatcher_type == "flex":
        prepared = prepared.with_note(
            "DeepEP is a stub here, with its launches, host syncs and sizes, whether or not it is "
            "installed"
        )
    if command.line.architecture.delta_net is not None:
        prepared = prepared.with_note(_delta_net_note(command))
    count = command.rehearsed_micro_batches
    batch = count * command.settings.data.micro_batch_size * command.layout.dp
    if count < command.micro_batches:
        prepared = prepared.with_note(
            f"only {count} of the {command.micro_batches} micro-batches of an iteration were run: "
            "launches, host syncs, bytes and FLOPs count these alone"
        )
    return prepared.plus(
        *("--train-iters", ITERATIONS, "--num-workers", 0, "--global-batch-size", batch),
        "--no-balance",  # so that nothing is read twice
    )


def sample_size(command: Command) -> tuple[int, int]:
    """Return the tokens of each made-up sample, and those along the side of its images."""
    tokens = command.settings.data.seq_length
    if command.value("--packing") is not None:
        tokens = max(tokens // SAMPLES_OF_A_PACK, SHORTEST)
    return tokens, min(int((tokens / 2) ** 0.5), LARGEST_IMAGE)


def _with_made_up_data(command: Command, model: Path, folder: Path) -> Command:
    """Write a model's stand-in and data into `folder`; return the command that uses them."""
    # Imported here, because torch takes seconds.
    from mcore_qwen3vl.tiny.records import write_half_images
    from mcore_qwen3vl.tiny.tiny_checkpoint import write_stand_in

    settings, seq_length = command.settings, command.settings.data.seq_length
    if seq_length < SHORTEST:
        raise BadInput(
            f"--seq-length {seq_length}: made-up samples have at least {SHORTEST} tokens; raise "
            "it, or give --data-path."
        )
    tokens, side = sample_size(command)
    config = _config_file(model)
    architecture = Architecture.from_hf(config)
    images = max(round(tokens / 2 / side**2), 1) if architecture.has_vision else 0
    write_stand_in(config, folder / "model")
    if source := source_of(command.settings):
        second = identify(resolve(source.path, weights=False)).config()
        write_stand_in(_config_file(second), folder / "second")
        command = command.plus(source.flag, folder / "second")  # the last flag of a name wins
    vision = architecture.vision
    file = write_half_images(
        folder / "data",
        # A pack holds samples of one epoch, so each rank has enough of them for two.
        samples=max(_FEWEST_SAMPLES, 2 * SAMPLES_OF_A_PACK * command.layout.dp),
        tokens=tokens,
        images=images,
        image_side=side,
        token_pixels=vision.patch_size * vision.spatial_merge_size,
        **settings.loss.made_up_records,
    )
    if (sidecar := settings.loss.sidecar(settings, settings.lora)) is not None:
        write_made_up_sidecar(sidecar, file, folder / "model", settings)
    return command.plus("--hf-model", folder / "model", "--data-path", file).with_note(
        f"made-up data: samples of {tokens} tokens"
        + f", with {images} image{'s' * (images > 1)} of {side} x {side} tokens each" * bool(images)
    )


def _config_file(model: Path) -> Path:
    """Return the config of a model that is named by its directory or by the file itself."""
    return model / "config.json" if model.is_dir() else model


def write_made_up_sidecar(sidecar: Sidecar, data: Path, model: Path, settings: Settings) -> None:
    """Write what a loss reads beside made-up data; raise BadInput if it cannot be made up."""
    # Imported here, because they take seconds.
    from mcore_qwen3vl.data.config import DataConfig, Source
    from mcore_qwen3vl.data.datasets import CrudeSamples
    from mcore_qwen3vl.data.encoding.preparation import Preparation
    from mcore_qwen3vl.data.processor import load_processor

    processor, architecture = load_processor(model), Architecture.from_hf(model)
    sources = [Source(data)]
    config = DataConfig(settings.data.seq_length, media_limits=settings.data.media_limits)
    preparation = Preparation(processor, config, sources)
    form = settings.loss.records or DetectedForm()
    samples = CrudeSamples(sources, split="train", trust=False)
    records = [
        list(preparation.plan_each(preparation.raw(sample), form).values()) for sample in samples
    ]
    try:
        sidecar.make_up(data, records, processor.tokenizer, architecture.vocab_size)
    except NotImplementedError:
        raise BadInput(
            f"{settings.loss.chosen_by} reads a file beside the data, and its class "
            f"{type(sidecar).__name__} makes none up (make_up): give --data-path, with such a file "
            "beside the data."
        ) from None
