"""Our command-line flags, and how they are parsed together with Megatron's.

Every Megatron flag works. ``--hf-model`` supplies the architecture, so no size is ever typed.
We reuse these Megatron flags: ``--data-path [WEIGHT PATH]...`` or
``--train-data-path``/``--valid-data-path``, ``--num-workers``, ``--spec te|torch``,
``--seq-length``, ``--micro-batch-size``.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from mcore_qwen3vl.config import Architecture
from mcore_qwen3vl.converters.hf.hub import resolve
from mcore_qwen3vl.converters.mcore.paths import config_folder
from mcore_qwen3vl.errors import BadInput
from mcore_qwen3vl.megatron_config import architecture_arguments, recommended_arguments
from mcore_qwen3vl.training.arguments.checks import check, complaint
from mcore_qwen3vl.training.arguments.data_flags import add_data_arguments
from mcore_qwen3vl.training.arguments.defaults import run_defaults
from mcore_qwen3vl.training.arguments.explicit import check_explicit, explicit_arguments
from mcore_qwen3vl.training.arguments.kept import Kept
from mcore_qwen3vl.training.arguments.layout import check_layout, data_parallel_size
from mcore_qwen3vl.training.arguments.refusal import StrictParser, refuse_by
from mcore_qwen3vl.training.arguments.resets import take_back
from mcore_qwen3vl.training.lora.flags import add_lora_arguments, check_flags
from mcore_qwen3vl.training.preference.flags import (
    add_preference_arguments,
    check_preference,
    preference_defaults,
)

SPECS = ("te", "torch")


def add_arguments(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
    """Add our flags to Megatron's `parser`; has the signature of an ``extra_args_provider``."""
    _add_model_arguments(parser.add_argument_group("qwen3-vl model"))
    _add_training_arguments(parser.add_argument_group("qwen3-vl training"))
    add_lora_arguments(parser.add_argument_group("qwen3-vl lora"))
    add_preference_arguments(parser.add_argument_group("qwen3-vl preference"))
    add_data_arguments(parser.add_argument_group("qwen3-vl data"))
    return parser


def _add_model_arguments(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--hf-model",
        metavar="DIR",
        required=True,
        help="Hugging Face checkpoint, hub id or converted checkpoint: its config gives the "
        "architecture, its tokenizer and processor prepare the data. Weights are not read here.",
    )
    group.add_argument(
        "--load-hf",
        metavar="DIR",
        help="Start from these Hugging Face weights (a directory or hub id), under any layout.",
    )
    group.add_argument(
        "--save-hf",
        metavar="DIR",
        help="Export Hugging Face checkpoints here; with LoRA, PEFT adapters.",
    )
    group.add_argument(
        "--save-hf-interval", type=int, metavar="N", help="Export every N iterations too."
    )
    group.add_argument("--cpu", action="store_true", help="Run on the CPU with gloo.")
    group.add_argument(
        "--fp32",
        action="store_true",
        help="Weights and computation in float32, the default with --cpu. On GPUs the default is "
        "--bf16, because fused attention needs half precision.",
    )


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
        help="dpo on preference pairs, a registered loss or module:function (see "
        "mcore_qwen3vl.training.step.losses)",
    )
    group.add_argument(
        "--recompute-vision",
        action=argparse.BooleanOptionalAction,
        default=None,
        help="keep only the inputs of the vision tower's blocks for the backward pass "
        "(default: with --recompute-granularity full)",
    )
    group.add_argument(
        "--keep-activations",
        action="store_true",
        help="keep the outputs of the decoder's norms, SwiGLU and rotary embedding for the "
        "backward pass instead of recomputing them: more memory, a little less compute "
        "(always where activations are offloaded)",
    )
    group.add_argument(
        "--head-chunk",
        type=int,
        metavar="TOKENS",
        help="tokens whose logits are in memory at a time, forward and backward "
        "(default: as many as take half a GiB)",
    )
    group.add_argument(
        "--no-chunked-head",
        action="store_const",
        const=0,
        dest="head_chunk",
        help="hold all logits, and use Megatron's cross entropy (--cross-entropy-loss-fusion)",
    )
    group.add_argument(
        "--compile-pointwise",
        action=argparse.BooleanOptionalAction,
        help="compile the rotary embedding and the losses' reductions to one kernel each with "
        "torch.compile; with --spec te the losses alone (default: on GPUs, where a C compiler is)",
    )
    group.add_argument(
        "--log-json", metavar="FILE", help="append each logged iteration's numbers, unrounded"
    )
    group.add_argument(
        "--verbose",
        action="store_true",
        help="show all that Megatron prints, instead of a progress bar",
    )
    group.add_argument(
        "--peak-tflops",
        type=float,
        help="peak of one device, for the MFU; A100, H100, H200 and B200 are known",
    )
    group.add_argument(
        "--early-stop-patience",
        type=int,
        metavar="N",
        help="end the run after N validations in a row without a lower loss than before",
    )
    group.add_argument(
        "--keep-best",
        action="store_true",
        help="save a checkpoint after each validation with the lowest loss so far, in place of the "
        "one before; validation.json in --save names it",
    )
    group.add_argument(
        "--on-corrupt-checkpoint",
        choices=("fallback", "stop"),
        default="fallback",
        help="when the latest checkpoint cannot be read: use the one before it, or stop",
    )


def is_cpu(argv: Sequence[str]) -> bool:
    """Return whether ``--cpu`` is among the flags; needed before Megatron may be imported."""
    return "--cpu" in argv


def hf_model_of(argv: Sequence[str]) -> Path:
    """Return the folder with the config that ``--hf-model`` names.

    Raises:
        BadInput: one of our flags is missing or has an invalid value.
    """
    own = StrictParser(allow_abbrev=False, add_help=False)
    known, _ = add_arguments(own).parse_known_args(list(argv))
    return config_folder(resolve(known.hf_model, weights=False))


def parse(argv: Sequence[str]) -> tuple[argparse.Namespace, frozenset[str]]:
    """Parse and validate `argv` with Megatron, and set Megatron's global state.

    Returns:
        The arguments, and the ``dest`` names of those that the command line sets.

    Raises:
        BadInput: a flag is unknown, contradicts the model's config or does not fit the others.
    """
    from megatron.training.arguments import parse_and_validate_args

    from mcore_qwen3vl.training.checkpoints.resume import check_companions

    setup = ArgumentSetup(argv, int(os.environ.get("WORLD_SIZE", "1")))
    with _megatron_reads(setup.argv):
        args = parse_and_validate_args(extra_args_provider=setup.prepare)
    setup.finish(args)
    if args.save:
        check_companions(args.save, setup.architecture)
    return args, setup.explicit


def validate(argv: Sequence[str], world_size: int) -> argparse.Namespace:
    """Return the arguments of :func:`parse` for `world_size` ranks, without touching global state.

    Raises:
        BadInput: a flag is unknown, contradicts the model's config or does not fit the others.
    """
    from megatron.training.arguments import parse_args, validate_args

    setup = ArgumentSetup(argv, world_size)
    with _megatron_reads(setup.argv):
        args = parse_args(extra_args_provider=setup.prepare)
        args.rank, args.world_size = 0, world_size
        validate_args(args)
    setup.finish(args)
    return args


class ArgumentSetup:
    """Adds our flags and defaults to Megatron's parser for one command line."""

    def __init__(self, argv: Sequence[str], world_size: int) -> None:
        """
        Args:
            argv: the command line.
            world_size: number of ranks.
        """
        self.argv = _train_data_path(take_back(argv))
        self._world_size = world_size
        self.explicit: frozenset[str] = frozenset()
        self._kept: Kept | None = None
        self.cpu = is_cpu(argv)
        self.hf_model = hf_model_of(self.argv)
        self.architecture = Architecture.from_hf(self.hf_model)

    def prepare(self, parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
        """Add our flags and defaults to `parser`; Megatron's ``extra_args_provider``."""
        # By default every rank would print a screenful of all Megatron flags.
        parser.error = refuse_by(parser)  # type: ignore[assignment, method-assign]
        explicit = explicit_arguments(add_arguments(parser), self.argv)
        fixed = architecture_arguments(self.architecture)
        check_explicit(parser, explicit, fixed)
        self.explicit = frozenset(explicit)
        spec = _spec(explicit.get("spec"), self.cpu)
        parser.set_defaults(
            **fixed,
            **{**recommended_arguments(self.architecture), **preference_defaults(explicit)},
            **_loop_defaults(),
            moe_grouped_gemm=any(self.architecture.moe_layers),
            **run_defaults(self.architecture, explicit, cpu=self.cpu),
            **(_torch_spec_defaults() if spec == "torch" else _te_spec_defaults()),
            **(_cpu_defaults() if self.cpu else {}),
            spec=[spec],
        )
        if explicit.get("save"):
            # The same command starts a run and resumes it.
            parser.set_defaults(load=explicit["save"])
        self._kept = Kept.of(explicit)
        if self._kept and self._kept.batch:
            parser.set_defaults(global_batch_size=self._kept.batch)
        args = parser.parse_args(self.argv)
        check_layout(args, self.architecture, self._world_size)
        if self._kept:
            ranks = data_parallel_size(args, self._world_size)
            workers = self._kept.workers_of_a_rank(ranks)
            if "num_workers" not in explicit and workers is not None:
                args.num_workers = workers
                parser.set_defaults(num_workers=workers)
            self._kept.check(args, ranks=ranks)
        return parser

    def finish(self, args: argparse.Namespace) -> None:
        """Check and set what depends on Megatron's own validation, which has run."""
        from megatron.training.vocab_utils import calculate_padded_vocab_size

        args.hf_model = str(self.hf_model)
        args.kept_global_batch = bool(self._kept and self._kept.batch)
        if args.padded_vocab_size is None:
            args.padded_vocab_size = calculate_padded_vocab_size(
                args.vocab_size, args.make_vocab_size_divisible_by, args.tensor_model_parallel_size
            )
        check(args, self.architecture)
        check_flags(args)
        check_preference(args)


def _train_data_path(argv: Sequence[str]) -> list[str]:
    """Rename ``--data-path``: with ``--valid-data-path`` Megatron wants ``--train-data-path``."""
    if "--valid-data-path" not in argv:
        return list(argv)
    return ["--train-data-path" if word == "--data-path" else word for word in argv]


def _spec(value: list[str] | None, cpu: bool) -> str:
    spec = (value or ["torch" if cpu else "te"])[0]
    if spec not in SPECS:
        raise BadInput(f"--spec is {spec}; it must be one of {', '.join(SPECS)}.")
    if cpu and spec == "te":
        raise BadInput("--spec te needs Transformer Engine on CUDA; with --cpu leave it out.")
    return spec


def _loop_defaults() -> dict[str, Any]:
    return {
        "dataloader_type": "external",
        # We divide once by the global batch's normaliser: see ForwardStep.normalise.
        "calculate_per_token_loss": True,
        # SIGTERM and Ctrl-C end a run with a checkpoint.
        "exit_signal_handler": True,
        "eval_iters": 0,
        "eval_interval": 1000,
        "ckpt_format": "torch_dist",
        # Stores the optimizer so that another layout can resume it exactly. If its state has to be
        # gathered, the first DP rank alone does it, not all of them.
        "dist_ckpt_optim_fully_reshardable": True,
        "distrib_optim_fully_reshardable_mem_efficient": True,
        "enable_one_logger": False,
        # It would keep every batch of an iteration for a rerun; we catch NaNs in the gradients.
        "rerun_mode": "disabled",
    }


def _te_spec_defaults() -> dict[str, Any]:
    # The output layer is Megatron's own linear layer, which takes this kernel from Apex.
    apex = find_spec("fused_weight_gradient_mlp_cuda") is not None
    return {"gradient_accumulation_fusion": apex}


def _torch_spec_defaults() -> dict[str, Any]:
    """Return the defaults without Transformer Engine: no kernel that needs it or Apex."""
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


@contextmanager
def _megatron_reads(argv: Sequence[str]) -> Iterator[None]:
    """Give Megatron `argv` as ``sys.argv``, which it parses, and turn its errors into ours."""
    saved = sys.argv
    sys.argv = [saved[0], *argv]
    try:
        yield
    except (AssertionError, ValueError, RuntimeError) as error:
        raise complaint(error) from error
    finally:
        sys.argv = saved
