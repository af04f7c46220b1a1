"""Our command-line flags for training, which are added to Megatron's.

``--hf-model`` supplies the architecture, so no size is ever typed.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from typing import Any

from mcore_qwen3vl.objectives.settings import ANSWERS
from mcore_qwen3vl.training.arguments import lora, tasks
from mcore_qwen3vl.training.arguments.data_flags import add_data_arguments
from mcore_qwen3vl.training.arguments.losses import DISTILLATION_FLAGS, PREFERENCE_FLAGS

_INTEGERS, _NUMBER, _MANY = ("N", "K", "R", "TOKENS"), "X", "..."

_PATTERNS = "vision, aligner, language, or regular expressions for the start of names"
_MODEL = {
    "--load-hf DIR": "Start from these Hugging Face weights (a directory or hub id), under any "
    "layout.",
    "--save-hf DIR": "Export Hugging Face checkpoints here; with LoRA, PEFT adapters.",
    "--save-hf-interval N": "Export every N iterations too.",
    "--cpu": "Run on the CPU with gloo.",
    "--fp32": "Weights and computation in float32, the default with --cpu. On GPUs the default is "
    "--bf16, because fused attention needs half precision.",
}
_TRAINING = {
    "--freeze PATTERN...": _PATTERNS,
    "--trainable PATTERN...": f"freeze the rest; {_PATTERNS}",
    "--vision-lr-mult X": "learning rate of the vision blocks / lr",
    "--aligner-lr-mult X": "learning rate of the mergers / lr",
    "--num-epochs N": "read the training data N times, each record once an epoch, in place of "
    "--train-iters",
    "--loss NAME": "dpo, simpo or orpo on preference pairs, kto on labelled records, distill from "
    "--teacher or from the tokens that `mcore-qwen3vl score --top-k` wrote, a registered loss or "
    "module:function (see mcore_qwen3vl.training.step.losses)",
    "--keep-activations": "keep the outputs of the decoder's norms, SwiGLU and rotary embedding "
    "for the backward pass instead of recomputing them: more memory, a little less compute "
    "(always where activations are offloaded)",
    "--head-chunk TOKENS": "tokens whose logits are in memory at a time, forward and backward "
    "(default: as many as take half a GiB)",
    "--log-json FILE": "append each logged iteration's numbers, unrounded",
    "--verbose": "show all that Megatron prints, instead of a progress bar",
    "--peak-tflops X": "peak of one device, for the MFU; A100, H100, H200 and B200 are known",
    "--early-stop-patience N": "end the run after N validations in a row without a lower loss than "
    "before",
    "--keep-best": "save a checkpoint after each validation with the lowest loss so far, in place "
    "of the one before; validation.json in --save names it. --save-hf exports it, as best",
    "--on-corrupt-checkpoint fallback|stop": "when the latest checkpoint cannot be read: use the "
    "one before it, or stop",
}
_DEFAULTS: dict[str, object] = {
    "freeze": [],
    "trainable": [],
    "vision_lr_mult": 1.0,
    "aligner_lr_mult": 1.0,
    "loss": "cross_entropy",
    "on_corrupt_checkpoint": "fallback",
}


def add_arguments(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
    """Add our flags to Megatron's `parser`; has the signature of an ``extra_args_provider``."""
    model = parser.add_argument_group("qwen3-vl model")
    model.add_argument(
        "--hf-model",
        metavar="DIR",
        help="Hugging Face checkpoint, hub id or converted checkpoint: its config gives the "
        "architecture, its tokenizer and processor prepare the data. Weights are not read here.",
    )
    add_flags(model, _MODEL)
    training = parser.add_argument_group("qwen3-vl training")
    add_flags(training, _TRAINING, **_DEFAULTS)
    training.add_argument(
        "--recompute-vision",
        action=argparse.BooleanOptionalAction,
        help="keep only the inputs of the vision tower's blocks for the backward pass "
        "(default: with --recompute-granularity full)",
    )
    training.add_argument(
        "--no-chunked-head",
        action="store_const",
        const=0,
        dest="head_chunk",
        help="hold all logits, and use Megatron's cross entropy (--cross-entropy-loss-fusion)",
    )
    training.add_argument(
        "--compile-pointwise",
        action=argparse.BooleanOptionalAction,
        help="compile the rotary embedding and the losses' reductions to one kernel each with "
        "torch.compile; with --spec te the losses alone (default: on GPUs, where a C compiler is)",
    )
    add_flags(parser.add_argument_group("qwen3-vl lora"), lora.FLAGS)
    add_flags(parser.add_argument_group("qwen3-vl preference"), PREFERENCE_FLAGS)
    add_flags(parser.add_argument_group("qwen3-vl distillation"), DISTILLATION_FLAGS)
    task = parser.add_argument_group("qwen3-vl task")
    add_flags(task, tasks.FLAGS)
    task.add_argument(
        "--answers",
        nargs=2,
        metavar=("YES", "NO"),
        help="with --task reranker: the words, one token each, that mean relevant and irrelevant; "
        f"default: {' '.join(ANSWERS)}",
    )
    add_data_arguments(parser.add_argument_group("qwen3-vl data"))
    return parser


def add_flags(group: argparse._ArgumentGroup, flags: Mapping[str, str], **defaults: object) -> None:
    """Add flags to `group`.

    Args:
        group: a group of the parser.
        flags: help by usage: ``--switch``, ``--count N``, ``--share X``, ``--file FILE`` or any
            other text, ``--kind one|other``, ``--names NAME...``; ``--new,--old N`` has two names.
        defaults: default by ``dest`` name; else None, or False of a switch.
    """
    for usage, text in flags.items():
        named, _, value = usage.partition(" ")
        names = named.split(",")
        if not value:
            group.add_argument(*names, action="store_true", help=text)
            continue
        shape: dict[str, Any] = {"metavar": value.removesuffix(_MANY)}
        if value.endswith(_MANY):
            shape["nargs"] = "+"
        if "|" in value:
            shape = {"choices": value.split("|")}
        elif shape["metavar"] in _INTEGERS:
            shape["type"] = int
        elif shape["metavar"] == _NUMBER:
            shape["type"] = float
        default = defaults.get(names[0].lstrip("-").replace("-", "_"))
        group.add_argument(*names, default=default, help=text, **shape)
