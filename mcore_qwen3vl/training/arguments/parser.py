"""Parse a command line with Megatron's parser, to which our flags and defaults are added.

Megatron's flags work, as far as `megatron_flags.Sorting` says. We reuse these:
``--data-path [WEIGHT PATH]...`` or ``--train-data-path``/``--valid-data-path``, ``--num-workers``,
``--spec te|torch``, ``--seq-length``, ``--micro-batch-size``.
"""

from __future__ import annotations

import argparse
import os
import traceback
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

from mcore_qwen3vl.converters.identify import identify
from mcore_qwen3vl.errors import BadInput
from mcore_qwen3vl.losses.loss import Loss
from mcore_qwen3vl.losses.registry import kind_of, refuse_other_losses_flags
from mcore_qwen3vl.megatron_config import architecture_arguments, recommended_arguments
from mcore_qwen3vl.training.arguments.checks import check
from mcore_qwen3vl.training.arguments.command_line import CommandLine, load_as_saved, refuse
from mcore_qwen3vl.training.arguments.settings import (
    LOOP,
    Settings,
    add_arguments,
    kernel_defaults,
    run_defaults,
)
from mcore_qwen3vl.training.arguments.values import check_values
from mcore_qwen3vl.training.contract.resumed_settings import ResumedRunSettings

SPECS = ("te", "torch")


class Parsed(NamedTuple):
    """A command line that Megatron has validated.

    Attributes:
        settings: what it says.
        args: Megatron's arguments, for its functions alone, which also write into them.
        explicit: the ``dest`` names of those that the command line sets.
        replaced: the explicit ones, with their values, that the checkpoint's values replace.
    """

    settings: Settings
    args: argparse.Namespace
    explicit: frozenset[str]
    replaced: Mapping[str, Any] = {}


def parse(command: CommandLine) -> Parsed:
    """Parse and validate a command line with Megatron, and set Megatron's global state.

    It raises BadInput if a flag is unknown, contradicts the model's config or does not fit the
    others.
    """
    from megatron.training.arguments import parse_and_validate_args

    from mcore_qwen3vl.training.checkpoints.companions import check_companions

    setup = ArgumentSetup(command, int(os.environ.get("WORLD_SIZE", "1")))
    with _explain_flag_errors():
        args = parse_and_validate_args(extra_args_provider=setup.prepare)
    parsed = setup.finish(args)
    checkpoints = parsed.settings.checkpoints
    if checkpoints.save:
        check_companions(checkpoints.save, command.architecture)
    starts = {checkpoints.load, checkpoints.pretrained_checkpoint} - {checkpoints.save}
    for folder in filter(None, starts):
        if companions := identify(folder).hf:
            command.architecture.require_settings_of(companions)
    return parsed


def validate(argv: Sequence[str], world_size: int) -> Parsed:
    """Return what :func:`parse` does for `world_size` ranks, without touching global state."""
    from megatron.training.arguments import parse_args, validate_args

    command = CommandLine(argv)
    setup = ArgumentSetup(command, world_size)
    with _explain_flag_errors(), without_help_texts():
        args = parse_args(extra_args_provider=setup.prepare)
        args.rank, args.world_size = 0, world_size
        validate_args(args)
    return setup.finish(args)


class ArgumentSetup:
    """Adds our flags and defaults to Megatron's parser for one command line."""

    def __init__(self, command: CommandLine, world_size: int) -> None:
        self._command = command
        self._world_size = world_size
        self.explicit: frozenset[str] = frozenset()
        self._kept_batch = False
        self._mtp_num_layers: int | None = None
        self.replaced: dict[str, Any] = {}
        """What the command line sets and the checkpoint has otherwise, whose values hold."""

    def prepare(self, parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
        """Add our flags and defaults to `parser`; Megatron's ``extra_args_provider``."""
        # By default every rank would print a screenful of all Megatron flags.
        parser.error = partial(refuse, parser)  # type: ignore[method-assign]
        command, architecture = self._command, self._command.architecture
        explicit = _parse_explicit(add_arguments(parser), command.words)
        fixed = architecture_arguments(architecture)
        flags = {action.dest: action.option_strings[0] for action in parser._actions if action.dest}
        _check_explicit(flags, explicit, fixed)
        spec = _chosen_spec(explicit.get("spec"), command.cpu)
        check_values(explicit, flags, spec=spec, cpu=command.cpu)
        self.explicit = frozenset(explicit)
        # Megatron's validation refuses it with positions of three axes, which our layer takes.
        self._mtp_num_layers = explicit.pop("mtp_num_layers", None)
        parser.set_defaults(
            **fixed,
            **{**recommended_arguments(architecture), **_defaults_with(kind_of(explicit))},
            **LOOP,
            moe_grouped_gemm=any(architecture.moe_layers),
            **run_defaults(architecture, explicit, cpu=command.cpu),
            **kernel_defaults(spec, cpu=command.cpu),
            spec=[spec],
        )
        if save := explicit.get("save"):
            # The same command starts a run and resumes it.
            explicit["load"] = load_as_saved(explicit.get("load", save), save)
        layout = command.layout(self._world_size)
        if kept := ResumedRunSettings.from_command(explicit):
            self._kept_batch = kept.batch is not None
            parser.set_defaults(**kept.defaults(explicit, layout.dp))
        if kept and "use_checkpoint_opt_param_scheduler" in explicit:
            taken = kept.record.rates_and_schedule()
            self.replaced = {n: v for n, v in explicit.items() if n in taken and v != taken[n]}
            explicit |= taken
        # Megatron's own call then adds the defaults to what is parsed already.
        add_defaults: Any = partial(parser.parse_args, [], argparse.Namespace(**explicit))
        parser.parse_args = add_defaults  # type: ignore[method-assign]
        return parser

    def finish(self, args: argparse.Namespace) -> Parsed:
        """Check and complete the settings, after Megatron's own validation of its arguments."""
        from megatron.training.vocab_utils import calculate_padded_vocab_size

        command, architecture = self._command, self._command.architecture
        args.hf_model, args.mtp_num_layers = str(command.model), self._mtp_num_layers
        if args.padded_vocab_size is None:
            args.padded_vocab_size = calculate_padded_vocab_size(
                args.vocab_size, args.make_vocab_size_divisible_by, args.tensor_model_parallel_size
            )
        settings = replace(Settings.from_flags(args), kept_batch=self._kept_batch)
        lora = settings.lora
        check(settings, architecture)
        lora.check(settings)
        chosen = settings.loss
        chosen.check_alone(settings)
        refuse_other_losses_flags(args, chosen)
        loss = chosen.complete(settings, lora, architecture)
        settings = replace(settings, loss=loss)
        # Checkpoints keep the arguments, and a run that goes on compares some of a loss's.
        for name, value in vars(loss).items():
            if value != getattr(chosen, name):
                setattr(args, name, value)
        # Megatron's loop counts FLOPs, and cannot where there are gated delta nets too.
        args.trained_mtp_layers, args.mtp_num_layers = args.mtp_num_layers, None
        args.full_validation = False  # Megatron's own would ask each rank's stream for its length
        args.iterations_to_skip = []  # Megatron's loop would pass by what is due after such a step
        if lora.trains_adapter:
            args.pretrained_checkpoint = None  # Megatron would read it as a checkpoint of this run
        return Parsed(settings, args, self.explicit, self.replaced)


def _defaults_with(loss: type[Loss]) -> dict[str, Any]:
    """Return the defaults of Megatron's arguments that depend on the loss."""
    # A router's balancing loss is a mean over tokens, and cannot be added to one over records.
    return {} if loss.unit == "tokens" else {"moe_aux_loss_coeff": 0.0}


def _parse_explicit(parser: argparse.ArgumentParser, argv: Sequence[str]) -> dict[str, Any]:
    """Return the arguments that `argv` itself sets, by ``dest`` name, without any default."""
    defaults = [(action, action.default) for action in parser._actions]
    for action, _ in defaults:
        action.default = argparse.SUPPRESS  # leaves out what the command line does not set
        if action.choices and callable(action.type):
            action.type = partial(_choose, action.type, list(action.choices))
    explicit = vars(parser.parse_args(list(argv)))
    for action, default in defaults:
        action.default = default
    return explicit


def _choose(convert: Any, choices: list[Any], text: str) -> Any:
    """Convert a flag's value; Megatron's own function raises KeyError for no member of an enum."""
    try:
        return convert(text)
    except KeyError:
        named = ", ".join(str(getattr(choice, "name", choice)) for choice in choices)
        raise argparse.ArgumentTypeError(f"{text!r} is none of {named}") from None


def _check_explicit(
    flags: Mapping[str, str], explicit: Mapping[str, Any], fixed: Mapping[str, Any]
) -> None:
    """Refuse flags that contradict the arguments `fixed`, set by the checkpoint's config."""
    wrong = [
        f"{flags[name]} sets {name} to {explicit[name]}, the config says {value}"
        for name, value in fixed.items()
        if name in explicit and explicit[name] != value
    ]
    if wrong:
        raise BadInput(
            f"The command line contradicts the --hf-model config: {'; '.join(wrong)}. "
            "--hf-model supplies the architecture: leave these flags out."
        )


def _chosen_spec(value: list[str] | None, cpu: bool) -> str:
    """Return the layer spec that ``--spec`` names, or the device's default."""
    spec = " ".join(["torch" if cpu else "te"] if value is None else value)
    if spec not in SPECS:
        raise BadInput(f"--spec is {spec or 'empty'}; it must be one of {', '.join(SPECS)}.")
    if cpu and spec == "te":
        raise BadInput("--spec te needs Transformer Engine on CUDA; with --cpu leave it out.")
    return spec


@contextmanager
def without_help_texts() -> Iterator[None]:
    """Leave the texts of ``--help`` out of the parsers that Megatron makes meanwhile.

    Megatron reads them from the source of 26 dataclasses, which takes a second of processor time
    for each parser. Its loop makes another one.
    """
    from megatron.training.argument_utils import ArgumentGroupFactory as Factory

    read_source = Factory._get_field_docstrings
    Factory._get_field_docstrings = lambda self, source: {}
    try:
        yield
    finally:
        Factory._get_field_docstrings = read_source


@contextmanager
def _explain_flag_errors() -> Iterator[None]:
    """Turn Megatron's errors about flags into ours."""
    try:
        yield
    except (AssertionError, ValueError, RuntimeError) as error:
        raise refusal(error) from error


def refusal(error: Exception) -> BadInput:
    """Return what to raise for an error of Megatron's about its flags."""
    # A bare assertion says no more than its condition.
    said = str(error) or traceback.extract_tb(error.__traceback__)[-1].line
    return BadInput(f"Megatron refuses these flags: {said}")


_OF_FLAGS = ("__post_init__", "initialize_model_parallel")
"""Megatron's functions that make configs and groups of the flags."""


def is_about_flags(error: Exception) -> bool:
    """Return whether Megatron raised this error because of flags, when a run had begun."""
    return traceback.extract_tb(error.__traceback__)[-1].name in _OF_FLAGS
