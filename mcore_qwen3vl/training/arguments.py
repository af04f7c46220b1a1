"""Our command-line flags beside Megatron's, and how both are parsed.

Every Megatron flag works. ``--hf-model`` supplies the architecture, so no size is ever typed.
Reused as they are: ``--data-path [WEIGHT PATH]...`` or ``--train-data-path``/``--valid-data-path``,
``--num-workers``, ``--spec te|torch``, ``--seq-length``, ``--micro-batch-size``.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any, get_args, get_type_hints

from mcore_qwen3vl.config import Architecture
from mcore_qwen3vl.converters.hub import resolve
from mcore_qwen3vl.data.config import DataConfig, MediaLimits
from mcore_qwen3vl.errors import BadInput
from mcore_qwen3vl.megatron_arguments import architecture_arguments
from mcore_qwen3vl.training.architecture_arguments import (
    check_explicit,
    explicit_arguments,
    recommended_arguments,
)

SPECS = ("te", "torch")
# Set by Megatron's own flags, or by what the layout needs.
_DATA_FIELDS_FROM_MEGATRON = ("seq_length", "micro_batch_size", "length_multiple", "media")


def add_arguments(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
    """Add our flags to Megatron's `parser`, as its ``extra_args_provider``."""
    _add_model_arguments(parser.add_argument_group("qwen3-vl model"))
    _add_training_arguments(parser.add_argument_group("qwen3-vl training"))
    _add_data_arguments(parser.add_argument_group("qwen3-vl data"))
    return parser


def _add_model_arguments(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--hf-model",
        metavar="DIR",
        required=True,
        help="Hugging Face checkpoint, hub id or converted checkpoint: its config gives the "
        "architecture, its tokenizer and processor prepare the data. Weights are not read from here.",
    )
    group.add_argument(
        "--load-hf",
        metavar="DIR",
        help="Start from these Hugging Face weights (a directory or hub id), under any layout.",
    )
    group.add_argument("--save-hf", metavar="DIR", help="Export Hugging Face checkpoints here.")
    group.add_argument(
        "--save-hf-interval", type=int, metavar="N", help="Export every N iterations too."
    )
    group.add_argument("--cpu", action="store_true", help="Run on the CPU with gloo.")


def _add_training_arguments(group: argparse._ArgumentGroup) -> None:
    patterns = "vision, aligner, language, or regular expressions for the start of names"
    group.add_argument("--freeze", nargs="+", default=[], metavar="PATTERN", help=patterns)
    group.add_argument(
        "--trainable", nargs="+", default=[], metavar="PATTERN", help=f"freeze the rest; {patterns}"
    )
    group.add_argument(
        "--vision-lr-mult", type=float, default=1.0, help="learning rate of the vision blocks / lr"
    )
    group.add_argument(
        "--aligner-lr-mult", type=float, default=1.0, help="learning rate of the mergers / lr"
    )
    group.add_argument(
        "--loss",
        default="cross_entropy",
        metavar="NAME",
        help="a registered loss or module:function (see mcore_qwen3vl.training.losses)",
    )
    group.add_argument(
        "--log-json", metavar="FILE", help="append each logged iteration's numbers, unrounded"
    )
    group.add_argument(
        "--peak-tflops",
        type=float,
        help="of one device, for MFU; known by itself for A100, H100, H200, B200",
    )
    group.add_argument(
        "--on-corrupt-checkpoint",
        choices=("fallback", "stop"),
        default="fallback",
        help="when the latest checkpoint cannot be read: use the one before it, or stop",
    )


def _add_data_arguments(group: argparse._ArgumentGroup) -> None:
    """One flag for each field of the data config that no Megatron flag covers."""
    for owner in (DataConfig, MediaLimits):
        types = get_type_hints(owner)
        for field in fields(owner):
            if field.name in _DATA_FIELDS_FROM_MEGATRON:
                continue
            flag, kind = "--" + field.name.replace("_", "-"), types[field.name]
            default: Any = field.default
            if kind is bool and default:
                group.add_argument(
                    "--no-" + flag[2:], dest=field.name, action="store_false", default=True
                )
            elif kind is bool:
                group.add_argument(flag, action="store_true")
            else:
                group.add_argument(flag, default=default, **_value_type(kind))


def _value_type(kind: Any) -> dict[str, Any]:
    """``type`` or ``choices`` of a flag, from ``T``, ``T | None`` or ``Literal[...]``."""
    options = [option for option in get_args(kind) if option is not type(None)]
    if options and isinstance(options[0], str):
        return {"choices": options}
    return {"type": options[0] if options else kind}


def is_cpu(argv: Sequence[str]) -> bool:
    """Whether ``--cpu`` is among the flags; asked before Megatron may be imported."""
    return "--cpu" in argv


def parse(argv: Sequence[str]) -> argparse.Namespace:
    """Parse and validate `argv` with Megatron, and set its global state.

    Raises:
        BadInput: a flag contradicts the model's config, or values do not fit together.
    """
    from megatron.training.arguments import parse_and_validate_args

    setup = ArgumentSetup(argv)
    with _command_line(argv):
        args = parse_and_validate_args(extra_args_provider=setup.prepare)
    setup.finish(args)
    return args


def validate(argv: Sequence[str], world_size: int) -> argparse.Namespace:
    """What :func:`parse` would give on `world_size` ranks; touches no global state.

    Raises:
        BadInput, AssertionError, ValueError: ours, and Megatron's own complaints.
    """
    from megatron.training.arguments import parse_args, validate_args

    setup = ArgumentSetup(argv)
    with _command_line(argv):
        args = parse_args(extra_args_provider=setup.prepare)
    args.rank, args.world_size = 0, world_size
    validate_args(args)
    setup.finish(args)
    return args


class ArgumentSetup:
    """Adds our flags and defaults to Megatron's parser for one command line."""

    def __init__(self, argv: Sequence[str]) -> None:
        self.argv = list(argv)
        own = argparse.ArgumentParser(allow_abbrev=False, add_help=False)
        known, _ = add_arguments(own).parse_known_args(self.argv)
        self.cpu = is_cpu(argv)
        self.hf_model = hf_directory(resolve(known.hf_model, weights=False))
        self.architecture = Architecture.from_hf(self.hf_model)

    def prepare(self, parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
        """Megatron's ``extra_args_provider``."""
        explicit = explicit_arguments(add_arguments(parser), self.argv)
        fixed = architecture_arguments(self.architecture)
        check_explicit(parser, explicit, fixed)
        spec = _spec(explicit.get("spec"), self.cpu)
        parser.set_defaults(
            **fixed,
            **recommended_arguments(self.architecture),
            **_loop_defaults(),
            **(_torch_spec_defaults() if spec == "torch" else {}),
            **(_cpu_defaults() if self.cpu else {}),
            spec=[spec],
        )
        if explicit.get("save"):
            # The command that started a run resumes it.
            parser.set_defaults(load=explicit["save"])
        return parser

    def finish(self, args: argparse.Namespace) -> None:
        """Checks and values that need Megatron's validation to have run."""
        from megatron.training.vocab_utils import calculate_padded_vocab_size

        args.hf_model = str(self.hf_model)
        args.calculate_per_token_loss = True
        if args.padded_vocab_size is None:
            args.padded_vocab_size = calculate_padded_vocab_size(
                args.vocab_size, args.make_vocab_size_divisible_by, args.tensor_model_parallel_size
            )
        _check(args, self.architecture)


def hf_directory(path: Path) -> Path:
    """`path`, or its ``hf/`` folder when `path` is a converted checkpoint."""
    return path / "hf" if (path / "hf" / "config.json").exists() else path


def _spec(value: list[str] | None, cpu: bool) -> str:
    spec = (value or ["torch" if cpu else "te"])[0]
    if spec not in SPECS:
        raise BadInput(f"--spec is {spec}; it is one of {', '.join(SPECS)}.")
    if cpu and spec == "te":
        raise BadInput("--spec te needs Transformer Engine on CUDA; with --cpu leave it out.")
    return spec


def _loop_defaults() -> dict[str, Any]:
    return {
        "dataloader_type": "external",
        "eval_iters": 0,
        "eval_interval": 1000,
        "ckpt_format": "torch_dist",
        # States the optimizer so that another layout can resume it exactly.
        "dist_ckpt_optim_fully_reshardable": True,
        "enable_one_logger": False,
        # It keeps every batch of an iteration to run it again; NaNs are caught in the gradients.
        "rerun_mode": "disabled",
    }


def _torch_spec_defaults() -> dict[str, Any]:
    """Without Transformer Engine: no kernel that only it or Apex brings."""
    return {
        "transformer_impl": "local",
        "gradient_accumulation_fusion": False,
        "no_persist_layer_norm": True,
        "masked_softmax_fusion": False,
    }


def _cpu_defaults() -> dict[str, Any]:
    return {
        "distributed_backend": "gloo",
        "use_cpu_initialization": True,
        "bias_swiglu_fusion": False,
        "bias_dropout_fusion": False,
        "apply_rope_fusion": False,
    }


def _check(args: argparse.Namespace, architecture: Architecture) -> None:
    if args.packing and args.micro_batch_size != 1:
        raise BadInput(
            f"--micro-batch-size is {args.micro_batch_size} with --packing: a packed micro-batch "
            "is one sequence. Use --micro-batch-size 1 and raise --seq-length."
        )
    if args.eval_iters and not args.valid_data_path:
        raise BadInput("--eval-iters is set without --valid-data-path: say what to evaluate on.")
    if args.save_hf_interval is not None and args.save_hf is None:
        raise BadInput("--save-hf-interval is set without --save-hf DIR: say where to export.")
    if architecture.is_moe and args.tensor_model_parallel_size > 1 and not args.sequence_parallel:
        raise BadInput(
            f"Megatron-Core trains MoE models under TP {args.tensor_model_parallel_size} with "
            "sequence parallelism only: add --sequence-parallel."
        )
    if args.overlap_moe_expert_parallel_comm:
        raise BadInput(
            "--overlap-moe-expert-parallel-comm runs the parts of a layer by its own schedule, "
            "which leaves DeepStack out: drop the flag. The flex dispatcher "
            "(--moe-token-dispatcher-type flex --moe-enable-deepep) speeds the exchange up instead."
        )
    if args.spec == ["torch"]:
        _check_torch_spec(args)


def _check_torch_spec(args: argparse.Namespace) -> None:
    """mcore ignores these without Transformer Engine, in silence."""
    ignored = {
        "--moe-grouped-gemm": args.moe_grouped_gemm,
        "--fp8-format": args.fp8,
        "--tp-comm-overlap": args.tp_comm_overlap,
    }
    named = [flag for flag, value in ignored.items() if value]
    if named:
        raise BadInput(
            f"{', '.join(named)} needs Transformer Engine and would do nothing with --spec torch: "
            "use --spec te, or leave it out."
        )


class _command_line:
    """Megatron parses ``sys.argv``; show it `argv` meanwhile."""

    def __init__(self, argv: Sequence[str]) -> None:
        self.argv = list(argv)

    def __enter__(self) -> None:
        self.saved = sys.argv
        sys.argv = [self.saved[0], *self.argv]

    def __exit__(self, *_: object) -> None:
        sys.argv = self.saved
