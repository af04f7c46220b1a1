"""The flags of tasks other than predicting tokens, and checks of them before anything is built."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Annotated

from mcore_qwen3vl.config import Architecture, read_config_file
from mcore_qwen3vl.converters.adapters.config import AdapterConfig, HFConfig
from mcore_qwen3vl.converters.hf.companions import read_form
from mcore_qwen3vl.converters.place import identify
from mcore_qwen3vl.data.config import SCORED, Task
from mcore_qwen3vl.data.loading.sources import parse_sources
from mcore_qwen3vl.errors import BadInput
from mcore_qwen3vl.flags import Flag
from mcore_qwen3vl.labels import NO_LABELS, ONE_SCORE, SINGLE, Labels, ProblemType
from mcore_qwen3vl.objectives.settings import ANSWERS, Contrastive, EmbeddingKind, Ranking
from mcore_qwen3vl.training.arguments.lora import LoraSettings
from mcore_qwen3vl.training.arguments.losses import refuse_router_losses, refuse_without
from mcore_qwen3vl.training.arguments.run import RunSettings


@dataclass(frozen=True)
class TaskSettings:
    """The task, if it is another one than predicting tokens, and its settings."""

    task: Task | None = None
    """embedding: train the embedding at the last token with the contrastive loss, on retrieval
    records; the model has no lm_head, and is written without one. reranker: train the answer, yes
    or no, to a query and a document of the same records. reward: train a score at the last token
    with the Bradley-Terry loss, on preference records; the model has the head `score` instead of
    lm_head. classify: train the same head with one value for each label, on records with `label`"""
    num_labels: int | None = None
    """with --task classify: number of labels, if records have numbers and --hf-model has no
    `id2label`; default: the labels of the training data, which are then all read first"""
    problem_type: ProblemType | None = None
    """with --task classify: whether a record has one label (the default) or any number"""
    embedding_loss: EmbeddingKind | None = None
    """with --task embedding: infonce (the default) trains a query to find its positive; cosine and
    cosent train on pairs with a score, cosine as the cosine itself, cosent for the order of all
    pairs of the global batch"""
    temperature: float | None = None
    """with --task embedding: cosines are divided by this; default 0.05"""
    matryoshka_dims: tuple[int, ...] | None = None
    """with --task embedding: add up the losses of embeddings that are cut to each of these lengths;
    default: whole embeddings only"""
    reranker_loss: Ranking | None = None
    """with --task reranker: compare each document with its label (pointwise, the default), or all
    documents of a query with one another (listwise)"""
    answers: Annotated[tuple[str, str] | None, Flag(("YES", "NO"))] = None
    """with --task reranker: the words, one token each, that mean relevant and irrelevant; default:
    yes no"""

    @property
    def contrastive(self) -> Contrastive:
        """The settings of the loss of embeddings; BadInput for a value out of range."""
        kind: EmbeddingKind = self.embedding_loss or Contrastive.kind
        if kind == "cosine" and self.temperature is not None:
            raise BadInput("--temperature has no meaning with --embedding-loss cosine: drop it.")
        temperature = Contrastive.temperature if self.temperature is None else self.temperature
        return Contrastive(temperature, self.matryoshka_dims or (), kind)

    @property
    def ranking(self) -> Ranking:
        """The reranker's loss."""
        return self.reranker_loss or "pointwise"

    @property
    def words(self) -> tuple[str, str]:
        """The reranker's answers: relevant, irrelevant."""
        return self.answers or ANSWERS

    def labels(self, run: RunSettings, lora: LoraSettings) -> Labels | None:
        """Return the labels of the model's head; none: it has no head; None: it has lm_head.

        It raises BadInput if a classifier's labels are not known, or fewer than two.
        """
        if self.task != "classify":
            return {"embedding": NO_LABELS, "reward": ONE_SCORE}.get(self.task or "")
        folders = tuple(filter(None, (lora.lora_init, run.model.hf_model)))  # an adapter's count
        labels = _labels(
            folders,
            self.num_labels,
            run.loop.training_data,
            run.sources.preprocess,
            run.data.trust_data,
        )
        return replace(labels, problem_type=self.problem_type or labels.problem_type or SINGLE)

    def hf_config(self, run: RunSettings, lora: LoraSettings) -> HFConfig:
        """Return the model's config; a classifier's names its labels."""
        folder, labels = run.model.folder, self.labels(run, lora)
        return labels.in_config(read_config_file(folder)) if labels else folder

    def check(self, run: RunSettings, lora: LoraSettings, architecture: Architecture) -> None:
        """Raise BadInput if the flags of the tasks do not fit one another or the others."""
        for other, (_, details) in _TASKS.items():
            if self.task != other:
                refuse_without(f"--task {other}", self, details)
        if self.task is None:
            return
        longest = max(self.contrastive.dimensions, default=0)
        if longest > architecture.hidden_size:
            raise BadInput(
                f"--matryoshka-dims {longest}: the model's embeddings have "
                f"{architecture.hidden_size} values."
            )
        task = f"--task {self.task}"
        if run.training.loss != "cross_entropy":
            raise BadInput(
                f"--loss {run.training.loss} with {task}, which has its own loss: drop one of them."
            )
        if self.task == "embedding":
            from mcore_qwen3vl.owners import require_last_token

            require_last_token(run.model.folder)
        if self.task in SCORED and run.checkpoints.pretrained_checkpoint:
            raise BadInput(
                f"--pretrained-checkpoint with {task}, which starts from Hugging Face weights: "
                "convert the checkpoint with `mcore-qwen3vl convert mcore-to-hf`, and give it to "
                "--load-hf."
            )
        if (labels := self.labels(run, lora)) and run.checkpoints.load:
            _require_classifier(Path(run.checkpoints.load), labels)
        if lora.trains_adapter:
            self._check_adapter(lora.adapter_config(architecture, self.task), run, lora)
        refuse_router_losses(run, task, _TASKS[self.task][0])

    def _check_adapter(self, config: AdapterConfig, run: RunSettings, lora: LoraSettings) -> None:
        if config.lora_dropout and self.task == "embedding":
            raise BadInput(
                f"lora_dropout is {config.lora_dropout:g} with --task embedding: embeddings are "
                "computed twice in a step, and dropout would make them differ. Set it to 0."
            )
        from mcore_qwen3vl.converters.adapters.config import apply  # PEFT takes seconds
        from mcore_qwen3vl.converters.mapping.forms import LM_HEAD

        applied = apply(config, self.hf_config(run, lora))
        if self.labels(run, lora) is not None and LM_HEAD in {*applied.saved, *applied.slots}:
            raise BadInput(
                f"The adapter changes {LM_HEAD} with --task {self.task}, whose model has no "
                "lm_head: leave it out of the targets and of modules_to_save."
            )
        if LM_HEAD in applied.slots:
            raise BadInput(
                f"The adapter has factors on {LM_HEAD} with --task {self.task}, which reads two of "
                "its rows: leave it out of the targets, or name it in modules_to_save."
            )


_TASKS: dict[Task, tuple[str, tuple[str, ...]]] = {
    "embedding": ("queries", ("embedding_loss", "temperature", "matryoshka_dims")),
    "reranker": ("documents or queries", ("reranker_loss", "answers")),
    "reward": ("pairs", ()),
    "classify": ("records", ("num_labels", "problem_type")),
}
"""By task, what its loss is a mean over, and the flags that have a meaning with it alone."""


@cache  # the data are read once
def _labels(
    folders: tuple[str, ...],
    count: int | None,
    data: tuple[str, ...],
    preprocess: str | None,
    trust: bool,
) -> Labels:
    if (named := _named_labels(folders)) is not None:
        folder, labels = named
        if count not in (None, len(labels)):
            raise BadInput(
                f"--num-labels {count}: config.json of {folder} names {len(labels)} labels. Leave "
                "the flag out, or take id2label and architectures out of the config."
            )
    elif count is not None:
        labels = Labels.numbered(count)
    else:
        from mcore_qwen3vl.data.loading.datasets import collect_labels

        labels = collect_labels(parse_sources(data, preprocess), trust=trust)
    if len(labels) < 2:
        raise BadInput(f"--task classify needs two labels or more; there is {len(labels)}.")
    return labels


def _named_labels(folders: tuple[str, ...]) -> tuple[str, Labels] | None:
    """Return the first folder whose ``config.json`` names labels, and the labels."""
    for folder in folders:
        config = Path(folder) / "config.json"
        labels = Labels.of_config(read_config_file(config)) if config.is_file() else None
        if labels is not None:
            return folder, labels
    return None


def _require_classifier(path: Path, labels: Labels) -> None:
    """Raise BadInput if the checkpoint at `path` has no classifier's head with these labels."""
    folder = identify(path).hf
    if folder is None:
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
