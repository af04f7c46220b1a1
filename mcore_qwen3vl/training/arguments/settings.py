"""Our settings for training, whose fields are flags that are added to Megatron's.

``--hf-model`` supplies the architecture, so no size is ever typed.
"""

from __future__ import annotations

import argparse
from dataclasses import dataclass, fields
from typing import Annotated, Literal

from mcore_qwen3vl.data.config import DataConfig, MediaLimits
from mcore_qwen3vl.flags import File, Flag, Folder, Name, add_flags
from mcore_qwen3vl.training.arguments.lora import LoraSettings
from mcore_qwen3vl.training.arguments.losses import DistillationSettings, PreferenceSettings
from mcore_qwen3vl.training.arguments.tasks import TaskSettings

Patterns = tuple[Annotated[str, Flag("PATTERN")], ...]


@dataclass(frozen=True)
class ModelSettings:
    """The model, where its weights come from and where they go."""

    hf_model: Folder | None = None
    """Hugging Face checkpoint, hub id or converted checkpoint: its config gives the architecture,
    its tokenizer and processor prepare the data. Weights are not read here."""
    load_hf: Folder | None = None
    """Start from these Hugging Face weights (a directory or hub id), under any layout."""
    save_hf: Folder | None = None
    """Export Hugging Face checkpoints here; with LoRA, PEFT adapters."""
    save_hf_interval: int | None = None
    """Export every N iterations too."""
    cpu: bool = False
    """Run on the CPU with gloo."""
    fp32: bool = False
    """Weights and computation in float32, the default with --cpu. On GPUs the default is --bf16,
    because fused attention needs half precision."""


@dataclass(frozen=True)
class TrainingSettings:
    """What trains, how long, with which loss, and what is written about it."""

    freeze: Patterns = ()
    """vision, aligner, language, or regular expressions for the start of names"""
    trainable: Patterns = ()
    """freeze the rest; vision, aligner, language, or regular expressions for the start of names"""
    vision_lr_mult: float = 1.0
    """learning rate of the vision blocks / lr"""
    aligner_lr_mult: float = 1.0
    """learning rate of the mergers / lr"""
    num_epochs: int | None = None
    """read the training data N times, each record once an epoch, in place of --train-iters"""
    loss: Name = "cross_entropy"
    """dpo, simpo or orpo on preference pairs, kto on labelled records, distill from --teacher or
    from the tokens that `mcore-qwen3vl score --top-k` wrote, a registered loss or module:function
    (see mcore_qwen3vl.training.step.losses)"""
    keep_activations: bool = False
    """keep the outputs of the decoder's norms, SwiGLU and rotary embedding for the backward pass
    instead of recomputing them: more memory, a little less compute (always where activations are
    offloaded)"""
    head_chunk: Annotated[int | None, Flag("TOKENS")] = None
    """tokens whose logits are in memory at a time, forward and backward (default: as many as take
    half a GiB)"""
    log_json: File | None = None
    """append each logged iteration's numbers, unrounded"""
    verbose: bool = False
    """show all that Megatron prints, instead of a progress bar"""
    peak_tflops: float | None = None
    """peak of one device, for the MFU; A100, H100, H200 and B200 are known"""
    early_stop_patience: int | None = None
    """end the run after N validations in a row without a lower loss than before"""
    keep_best: bool = False
    """save a checkpoint after each validation with the lowest loss so far, in place of the one
    before; validation.json in --save names it. --save-hf exports it, as best"""
    on_corrupt_checkpoint: Literal["fallback", "stop"] = "fallback"
    """when the latest checkpoint cannot be read: use the one before it, or stop"""
    recompute_vision: bool | None = None
    """keep only the inputs of the vision tower's blocks for the backward pass (default: with
    --recompute-granularity full)"""
    compile_pointwise: bool | None = None
    """compile the rotary embedding and the losses' reductions to one kernel each with
    torch.compile; with --spec te the losses alone (default: on GPUs, where a C compiler is)"""


_SET_ELSEWHERE = (
    *("seq_length", "micro_batch_size", "length_multiple", "micro_batches", "media"),
    *("pairs", "labelled", "task", "similarities", "labels", "references", "teacher_temperature"),
)
"""Fields of the data config that Megatron's flags set, or the layout's needs, or the loss."""


@dataclass(frozen=True)
class DataSources:
    """How records are read, for data sets that do not say so themselves."""

    preprocess: Annotated[str | None, Flag("MODULE:FUNCTION")] = None
    """function, or name of an entry point, that turns a record of any shape into one of a known
    format; for data sets that name no function of their own"""
    train_on: Annotated[str | None, Flag("TURNS")] = None
    """turns of the assistant to train on: all, last, or a regular expression that must match in the
    turn's text; for data sets that choose none of their own; default: all"""


def add_arguments(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
    """Add our flags to Megatron's `parser`; has the signature of an ``extra_args_provider``."""
    add_flags(parser.add_argument_group("qwen3-vl model"), ModelSettings)
    training = parser.add_argument_group("qwen3-vl training")
    add_flags(training, TrainingSettings)
    training.add_argument(
        "--no-chunked-head",
        action="store_const",
        const=0,
        dest="head_chunk",
        help="hold all logits, and use Megatron's cross entropy (--cross-entropy-loss-fusion)",
    )
    add_flags(parser.add_argument_group("qwen3-vl lora"), LoraSettings)
    add_flags(parser.add_argument_group("qwen3-vl preference"), PreferenceSettings)
    add_flags(parser.add_argument_group("qwen3-vl distillation"), DistillationSettings)
    add_flags(parser.add_argument_group("qwen3-vl task"), TaskSettings)
    data = parser.add_argument_group("qwen3-vl data")
    add_flags(data, DataSources)
    add_flags(data, DataConfig, leave_out=_SET_ELSEWHERE, undecided=("balance",))
    add_flags(data, MediaLimits)
    return parser


def check_data_arguments(args: argparse.Namespace) -> None:
    """Raise BadInput for values that the data config refuses under every layout."""
    values = {field.name: getattr(args, field.name, None) for field in fields(DataConfig)}
    DataConfig(**{name: value for name, value in values.items() if value is not None})


def media_limits(args: argparse.Namespace) -> MediaLimits:
    """Return the budgets of the command line."""
    return MediaLimits(**{field.name: getattr(args, field.name) for field in fields(MediaLimits)})
