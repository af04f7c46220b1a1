"""What the losses of ``--task`` share: another task than predicting tokens has its own loss."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Self

from mcore_qwen3vl.config import Architecture, read_config_file
from mcore_qwen3vl.converters.adapters.config import AdapterConfig, HFConfig
from mcore_qwen3vl.converters.hf.companions import read_form
from mcore_qwen3vl.converters.identify import identify
from mcore_qwen3vl.errors import BadInput
from mcore_qwen3vl.labels import Labels
from mcore_qwen3vl.losses.loss import Loss, refuse_router_losses
from mcore_qwen3vl.settings.lora import LoraSettings
from mcore_qwen3vl.settings.run import RunSettings


@dataclass(frozen=True)
class TaskLoss(Loss):
    """A loss of ``--task``."""

    flag = "--task"
    groups = True
    group = "qwen3-vl task"

    def check_alone(self, run: RunSettings) -> None:
        """Raise BadInput if ``--loss`` names another loss."""
        if run.training.loss != "cross_entropy":
            raise BadInput(
                f"--loss {run.training.loss} with {self.chosen_by}, which has its own loss: drop "
                "one of them."
            )

    def complete(self, run: RunSettings, lora: LoraSettings, architecture: Architecture) -> Self:
        """Return the loss; it raises BadInput if flags do not fit it."""
        assert self.records is not None, "a task has records of its own form"
        if run.data.overlong == "truncate":
            raise BadInput(self.records.uncut)
        self.check_model(run, lora)
        if self.trains_score and run.checkpoints.pretrained_checkpoint:
            raise BadInput(
                f"--pretrained-checkpoint with {self.chosen_by}, which starts from Hugging Face "
                "weights: convert the checkpoint with `mcore-qwen3vl convert mcore-to-hf`, and "
                "give it to --load-hf."
            )
        if (labels := self.labels(run, lora)) and run.checkpoints.load:
            _require_labels(Path(run.checkpoints.load), labels)
        if lora.trains_adapter:
            self.check_adapter(lora.adapter_config(architecture, self.scored_by), run, lora)
        refuse_router_losses(run, self.chosen_by, self.unit)
        return self

    def check_model(self, run: RunSettings, lora: LoraSettings) -> None:
        """Raise BadInput if the run's model or checkpoint is none for the task."""

    def check_adapter(self, config: AdapterConfig, run: RunSettings, lora: LoraSettings) -> None:
        """Raise BadInput if the adapter has targets that the task cannot train."""
        from mcore_qwen3vl.converters.adapters.config import apply_with_peft  # PEFT takes seconds
        from mcore_qwen3vl.converters.mapping.forms import LM_HEAD

        labels = self.labels(run, lora)
        applied = apply_with_peft(config, hf_config_with(labels, run))
        if labels is not None and LM_HEAD in {*applied.saved, *applied.slots}:
            raise BadInput(
                f"The adapter changes {LM_HEAD} with {self.chosen_by}, whose model has no "
                "lm_head: leave it out of the targets and of modules_to_save."
            )
        if LM_HEAD in applied.slots:
            raise BadInput(
                f"The adapter has factors on {LM_HEAD} with {self.chosen_by}, which reads two of "
                "its rows: leave it out of the targets, or name it in modules_to_save."
            )


def hf_config_with(labels: Labels | None, run: RunSettings) -> HFConfig:
    """Return the model's config; a classifier's names its labels."""
    folder = run.model.folder
    return labels.in_config(read_config_file(folder)) if labels else folder


def _require_labels(path: Path, labels: Labels) -> None:
    """Raise BadInput if the checkpoint at `path` has no classifier's head with these labels."""
    if (folder := identify(path).hf) is None:
        return
    if read_form(folder).head.labels != len(labels):
        raise BadInput(
            f"{path} has no classifier's head of {len(labels)} labels to go on with. To begin from "
            "a language model, name its Hugging Face weights with --load-hf."
        )
    there = Labels.of_config(read_config_file(folder))
    if labels.problem_type and there != labels:
        raise BadInput(
            f"{path} was trained with the labels {there}, and the data or flags say {labels}: go "
            "on with the same data and --problem-type."
        )
