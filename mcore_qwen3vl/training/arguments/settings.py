"""All settings of a training run, their flags, which are added to Megatron's, and our defaults.

The defaults are for arguments that the command line leaves out and Megatron has no value for.
"""

from __future__ import annotations

import argparse
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any, Self

from mcore_qwen3vl.config import Architecture
from mcore_qwen3vl.converters.adapters.config import HFConfig
from mcore_qwen3vl.data.config import DataConfig, MediaLimits, default_packing_buffer
from mcore_qwen3vl.flags import add_flags
from mcore_qwen3vl.labels import Labels
from mcore_qwen3vl.losses.loss import Loss
from mcore_qwen3vl.losses.registry import add_loss_flags, help_of_loss, loss_of
from mcore_qwen3vl.losses.task import hf_config_with
from mcore_qwen3vl.runtime.gpus import c_compiler
from mcore_qwen3vl.settings import run
from mcore_qwen3vl.settings.lora import LoraSettings
from mcore_qwen3vl.settings.schedule import ScheduleSettings


@dataclass(frozen=True)
class Settings(run.RunSettings):
    """All settings of a run."""

    lora: LoraSettings
    loss: Loss
    kept_batch: bool = False
    """Whether the global batch is the resumed run's; no flag says this."""

    @property
    def rows_differ(self) -> bool:
        """Whether the rows of two micro-batches of training may differ in length."""
        return self.data.pad_to_longest or (self.loss.groups and not self.data.packing)

    @property
    def labels(self) -> Labels | None:
        """The labels of the model's head; see :meth:`.Loss.labels`."""
        return self.loss.labels(self, self.lora)

    @property
    def hf_config(self) -> HFConfig:
        """The model's config; a classifier's names its labels."""
        return hf_config_with(self.labels, self)

    @classmethod
    def from_flags(cls, flags: argparse.Namespace, **others: Any) -> Self:
        loss = loss_of(flags)
        # A pack's rows are balanced by their tokens, and a loss of records counts these.
        balances = loss.unit == "tokens"
        return super().from_flags(flags, balances=balances, loss=loss, **others)


_SET_ELSEWHERE = (
    *("seq_length", "micro_batch_size", "length_multiple", "micro_batches", "media_limits"),
    *("records", "inputs", "sidecar", "counts_again"),
)
"""Fields of the data config without a flag: Megatron's flags, the layout, the loss, or whether it
is a validation's set them."""


def add_arguments(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
    """Add our flags to Megatron's `parser`; has the signature of an ``extra_args_provider``."""
    add_flags(parser.add_argument_group("qwen3-vl model"), run.ModelSettings)
    training = parser.add_argument_group("qwen3-vl training")
    add_flags(training, run.TrainingSettings, texts={"loss": help_of_loss()})
    training.add_argument(
        "--no-chunked-head",
        action="store_const",
        const=0,
        dest="head_chunk",
        help="hold all logits, and use Megatron's cross entropy (--cross-entropy-loss-fusion)",
    )
    add_flags(parser.add_argument_group("qwen3-vl lora"), LoraSettings)
    add_loss_flags(parser)
    data = parser.add_argument_group("qwen3-vl data")
    add_flags(data, run.DataSources)
    add_flags(data, DataConfig, leave_out=_SET_ELSEWHERE, undecided=("balance",))
    add_flags(data, MediaLimits)
    return parser


def add_early_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the Megatron flags that we read, for a parser without megatron."""
    owners = (
        run.CheckpointSettings,
        run.LoopSettings,
        ScheduleSettings,
        run.ParallelSettings,
        run.ComputeSettings,
        run.LogSettings,
    )
    for owner in owners:
        add_flags(parser.add_argument_group(), owner, leave_out=run.NOT_READ_EARLY)


SEQ_LENGTH = 8192
"""Default row length, for ``data check`` too; less if the model has fewer positions."""

WHOLE = -1
"""The number of a validation's batches that stands for all of its data."""

_DTYPES = {"bf16", "fp16", "fp32"}

LOOP = {
    "dataloader_type": "external",
    # We divide once by the global batch's normaliser: see ForwardStep.normalise.
    "calculate_per_token_loss": True,
    # SIGTERM and Ctrl-C end a run with a checkpoint.
    "exit_signal_handler": True,
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
"""Defaults of Megatron's loop, by ``dest`` name."""

_TORCH_SPEC = {
    "transformer_impl": "local",
    "no_persist_layer_norm": True,
    "masked_softmax_fusion": False,
}
"""Defaults without Transformer Engine: no kernel that needs it or Apex."""

_CPU = {
    "distributed_backend": "gloo",
    "use_cpu_initialization": True,
    "bias_swiglu_fusion": False,
    "bias_dropout_fusion": False,
    "apply_rope_fusion": False,
}


def kernel_defaults(spec: str, *, cpu: bool) -> dict[str, Any]:
    """Return the defaults of flags that choose kernels, by ``dest`` name, for a layer spec."""
    return {**(_TORCH_SPEC if spec == "torch" else {}), **(_CPU if cpu else {})}


def run_defaults(
    architecture: Architecture, explicit: Mapping[str, Any], *, cpu: bool
) -> dict[str, Any]:
    """Return the default of each argument not in `explicit`, by ``dest`` name.

    :func:`statement_of_defaults` reports them to the user.
    """
    seq_length = min(SEQ_LENGTH, architecture.max_position_embeddings)
    defaults: dict[str, Any] = {
        "micro_batch_size": 1,
        "seq_length": seq_length,
        "packing_buffer": default_packing_buffer(explicit.get("seq_length", seq_length)),
        "lr": ScheduleSettings.lr,
        "log_interval": 10,
        "eval_iters": WHOLE if "valid_data_path" in explicit else 0,
    }
    if not {"seq_length", "packing"} & set(explicit):
        defaults["pad_to_longest"] = True  # rows of the full length would be mostly padding
    if not cpu and not _DTYPES & set(explicit):
        defaults["bf16"] = True  # fused attention and Transformer Engine's packed attention need it
    if not cpu and c_compiler() is not None:
        defaults["compile_pointwise"] = True
    if "save" in explicit:
        defaults["save_interval"] = 500
    return {name: value for name, value in defaults.items() if name not in explicit}


def statement_of_defaults(settings: Settings, explicit: Collection[str]) -> str | None:
    """Return the flags that were not given, with the values in use; None if all were given."""
    loop, data, save = settings.loop, settings.data, settings.checkpoints
    values = {
        "micro_batch_size": data.micro_batch_size,
        **({} if loop.step_batch_size_schedule else {"global_batch_size": loop.global_batch_size}),
        "seq_length": data.seq_length,
        "lr": settings.schedule.lr,
        "log_interval": settings.logs.log_interval,
        **({"packing_buffer": data.buffer} if data.packing else {}),
        **({"save_interval": save.save_interval} if save.save else {}),
    }
    switches = {
        "bf16": settings.compute.bf16,
        "compile_pointwise": settings.training.compile_pointwise,
        "pad_to_longest": data.pad_to_longest,
    }
    taken = {**values, **{name: "" for name, is_on in switches.items() if is_on}}
    texts = [
        f"--{name.replace('_', '-')} {value}".rstrip()
        for name, value in taken.items()
        if name not in explicit
    ]
    return " ".join(texts) or None
