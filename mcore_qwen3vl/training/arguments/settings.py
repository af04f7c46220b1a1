"""All settings of a training run, and their flags, which are added to Megatron's."""

from __future__ import annotations

import argparse
from dataclasses import dataclass

from mcore_qwen3vl.converters.adapters.config import HFConfig
from mcore_qwen3vl.data.config import DataConfig, MediaLimits
from mcore_qwen3vl.flags import add_flags
from mcore_qwen3vl.labels import Labels
from mcore_qwen3vl.training.arguments.lora import LoraSettings
from mcore_qwen3vl.training.arguments.losses import (
    DistillationSettings,
    PreferenceSettings,
    Reference,
)
from mcore_qwen3vl.training.arguments.run import (
    NOT_READ_EARLY,
    CheckpointSettings,
    ComputeSettings,
    DataSources,
    LogSettings,
    LoopSettings,
    ModelSettings,
    ParallelSettings,
    RunSettings,
    TrainingSettings,
)
from mcore_qwen3vl.training.arguments.tasks import TaskSettings


@dataclass(frozen=True)
class Settings(RunSettings):
    """All settings of a run."""

    lora: LoraSettings
    preference: PreferenceSettings
    distillation: DistillationSettings
    task: TaskSettings
    kept_batch: bool = False
    """Whether the global batch is that of the run that is resumed, which no flag says."""

    @property
    def reference(self) -> Reference | None:
        """Where the reference's log-probabilities come from; None: the loss has no reference."""
        return self.preference.reference_of(self.training.loss, self.lora)

    @property
    def labels(self) -> Labels | None:
        """The labels of the model's head; see :meth:`TaskSettings.labels`."""
        return self.task.labels(self, self.lora)

    @property
    def hf_config(self) -> HFConfig:
        """The model's config; a classifier's names its labels."""
        return self.task.hf_config(self, self.lora)


_SET_ELSEWHERE = (
    *("seq_length", "micro_batch_size", "length_multiple", "micro_batches", "media"),
    *("pairs", "labelled", "task", "similarities", "labels", "references", "teacher_temperature"),
)
"""Fields of the data config that Megatron's flags set, or the layout's needs, or the loss."""


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


def add_early_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the flags of Megatron's that we read, for a parser that needs no megatron."""
    for owner in (CheckpointSettings, LoopSettings, ParallelSettings, ComputeSettings, LogSettings):
        add_flags(parser.add_argument_group(), owner, leave_out=NOT_READ_EARLY)
