"""Our command-line flags for training, which are added to Megatron's.

``--hf-model`` supplies the architecture, so no size is ever typed.
"""

from __future__ import annotations

import argparse

from mcore_qwen3vl.training.arguments.data_flags import add_data_arguments
from mcore_qwen3vl.training.distillation.flags import add_distillation_arguments
from mcore_qwen3vl.training.lora.flags import add_lora_arguments
from mcore_qwen3vl.training.preference.flags import add_preference_arguments
from mcore_qwen3vl.training.tasks.flags import add_task_arguments


def add_arguments(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
    """Add our flags to Megatron's `parser`; has the signature of an ``extra_args_provider``."""
    _add_model_arguments(parser.add_argument_group("qwen3-vl model"))
    _add_training_arguments(parser.add_argument_group("qwen3-vl training"))
    add_lora_arguments(parser.add_argument_group("qwen3-vl lora"))
    add_preference_arguments(parser.add_argument_group("qwen3-vl preference"))
    add_distillation_arguments(parser.add_argument_group("qwen3-vl distillation"))
    add_task_arguments(parser.add_argument_group("qwen3-vl task"))
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
        help="dpo, simpo or orpo on preference pairs, kto on labelled records, distill from "
        "--teacher or from the tokens that `mcore-qwen3vl score --top-k` wrote, a registered loss "
        "or module:function (see mcore_qwen3vl.training.step.losses)",
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
