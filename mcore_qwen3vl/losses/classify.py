"""``--task classify``: one value for each label at the last token.

Where one label of a record is right, its loss is the cross entropy. Where any number of labels may
be right, it is the mean of their binary cross entropies. Source: HF's
``ForSequenceClassificationLoss``.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

from mcore_qwen3vl.config import read_config_file
from mcore_qwen3vl.data.config import parse_sources
from mcore_qwen3vl.data.record_form import RecordForm
from mcore_qwen3vl.data.records.reading import Reading
from mcore_qwen3vl.data.task_inputs import TaskInputs
from mcore_qwen3vl.errors import BadInput
from mcore_qwen3vl.labels import SINGLE, Labels, ProblemType
from mcore_qwen3vl.lazy import Lazy
from mcore_qwen3vl.losses.task import TaskLoss
from mcore_qwen3vl.settings.lora import LoraSettings
from mcore_qwen3vl.settings.run import RunSettings

if TYPE_CHECKING:
    import torch
    import torch.nn.functional as F
    from torch import Tensor

    from mcore_qwen3vl.data.encoding.batch import Batch
    from mcore_qwen3vl.data.records import parse, tasks
    from mcore_qwen3vl.data.records.media import MediaFolder
    from mcore_qwen3vl.data.records.messages import Conversation
    from mcore_qwen3vl.forward import RunBatch
    from mcore_qwen3vl.losses import last_token, reduction
    from mcore_qwen3vl.losses.reduction import Objective, Reduced
else:
    torch, F = map(Lazy, ("torch", "torch.nn.functional"))
    parse = Lazy("mcore_qwen3vl.data.records.parse")
    tasks = Lazy("mcore_qwen3vl.data.records.tasks")
    last_token = Lazy("mcore_qwen3vl.losses.last_token")
    reduction = Lazy("mcore_qwen3vl.losses.reduction")


@dataclass(frozen=True)
class ClassificationRecords(RecordForm):
    """Records with one label or more."""

    labels: Labels | None = None
    """The labels that records may have; None: their labels are not used."""

    needed = ("",)
    named_by = "--task classify"

    def describes(self, record: Mapping[str, Any]) -> bool:
        has_another_form = parse.is_preference(record) or parse.is_retrieval(record)
        return tasks.is_classification(record) and not has_another_form

    def parse(
        self, record: Mapping[str, Any], folder: MediaFolder, reading: Reading
    ) -> Mapping[str, Conversation]:
        return {"": tasks.parse_classification(record, folder, reading, self.labels)}


@dataclass(frozen=True)
class RightLabels(TaskInputs):
    """Which labels are right."""

    right: Tensor  # (records, labels) float32: 1 for labels that are right, else 0

    @classmethod
    def of_records(
        cls, records: Sequence[Any], assemble: Callable[..., Any], config: Any
    ) -> Self | None:
        return cls(torch.tensor([record.target for record in records], dtype=torch.float32))


@dataclass(frozen=True)
class Classify(TaskLoss):
    """The loss of classifiers."""

    num_labels: int | None = None
    """with --task classify: number of labels, if records have numbers and --hf-model has no
    `id2label`; default: the labels of the training data, which are then all read first"""
    problem_type: ProblemType | None = None
    """with --task classify: whether a record has one label (the default) or any number"""

    names = ("classify",)
    help = "classify: train the same head with one value for each label, on records with `label`"
    unit = "records"
    lm_head = False
    records = ClassificationRecords()
    logged = ("classification loss",)
    trains_score = True

    def labels(self, run: RunSettings, lora: LoraSettings) -> Labels:
        """Return the labels; BadInput if they are not known, or fewer than two."""
        folders = tuple(filter(None, (lora.lora_init, run.model.hf_model)))  # an adapter's count
        labels = _find_labels(
            folders,
            self.num_labels,
            run.loop.training_data,
            run.sources.preprocess,
            run.data.trust_data,
        )
        return replace(labels, problem_type=self.problem_type or labels.problem_type or SINGLE)

    def reads(self, run: RunSettings, lora: LoraSettings) -> dict[str, Any]:
        return {"records": ClassificationRecords(self.labels(run, lora)), "inputs": RightLabels}

    def summary(self, run: RunSettings, lora: LoraSettings) -> list[tuple[str, str]]:
        labels = self.labels(run, lora)
        names = ", ".join(labels.names)
        return [
            ("loss", f"{'binary ' * (not labels.are_exclusive)}cross entropy over labels"),
            ("head", f"score, {len(labels)} labels at the last token: {names:.200}"),
        ]

    def objective(self, run: RunSettings, lora: LoraSettings) -> Objective:
        return partial(classification_objective, self.labels(run, lora))

    def compute(self, run: RunSettings) -> RunBatch:
        return last_token.SCORES


def classification_objective(
    labels: Labels, batch: Batch, local: Tensor, logits: Tensor
) -> Reduced:
    """Compute the mean loss over the records of the global batch."""
    inputs = batch.inputs_of(RightLabels)
    losses, right = classification_losses(logits, inputs.right, exclusive=labels.are_exclusive)
    numbers = {"classification loss": losses, "accuracy": right}
    return reduction.reduce_units(losses.sum(), batch, numbers)


def classification_losses(
    logits: Tensor, right: Tensor, *, exclusive: bool
) -> tuple[Tensor, Tensor]:
    """Compute the loss of each record.

    Args:
        logits: (N, labels) float32.
        right: (N, labels) float32, 1 for labels that are right and 0 for others.
        exclusive: whether one label is right, so that they exclude one another: cross entropy.
            Otherwise each label is judged by itself: the mean of their binary cross entropies.

    Returns:
        Losses (N,) float32, with a gradient for `logits`; and for each 1.0 if all its labels are
        predicted right, else 0.0.
    """
    if exclusive:
        losses = F.cross_entropy(logits, right, reduction="none")
        return losses, (logits.argmax(1) == right.argmax(1)).float()
    losses = F.binary_cross_entropy_with_logits(logits, right, reduction="none").mean(1)
    return losses, ((logits > 0) == (right > 0)).all(1).float()


@cache  # the data are read once
def _find_labels(
    folders: tuple[str, ...],
    count: int | None,
    data: tuple[str, ...],
    preprocess: str | None,
    trust: bool,
) -> Labels:
    """Return the labels that a config names, or else `count` numbers, or else the data's labels."""
    if (named := _labels_named_in_configs(folders)) is not None:
        folder, labels = named
        if count not in (None, len(labels)):
            raise BadInput(
                f"--num-labels {count}: config.json of {folder} names {len(labels)} labels. Leave "
                "the flag out, or take id2label and architectures out of the config."
            )
    elif count is not None:
        labels = Labels.numbered(count)
    else:
        from mcore_qwen3vl.data.datasets import collect_labels

        labels = collect_labels(parse_sources(data, Reading(preprocess=preprocess)), trust=trust)
    if len(labels) < 2:
        raise BadInput(f"--task classify needs two labels or more; there is {len(labels)}.")
    return labels


def _labels_named_in_configs(folders: tuple[str, ...]) -> tuple[str, Labels] | None:
    """Return the first folder whose ``config.json`` names labels, and the labels."""
    for folder in folders:
        config = Path(folder) / "config.json"
        labels = Labels.of_config(read_config_file(config)) if config.is_file() else None
        if labels is not None:
            return folder, labels
    return None
