"""``--task reranker``: the answer, yes or no, to a query and a document.

The losses are over the documents of each query; the first document is the right one:

- ``pointwise``: binary cross entropy of each document by itself.
- ``listwise``: cross entropy of the right document among those of its query. Cao et al., "Learning
  to Rank: From Pairwise Approach to Listwise Approach", 2007, with one right document (ListNet).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from mcore_qwen3vl.data.record_form import RecordForm
from mcore_qwen3vl.data.records.reading import Reading
from mcore_qwen3vl.errors import BadInput
from mcore_qwen3vl.flags import Flag
from mcore_qwen3vl.lazy import Lazy
from mcore_qwen3vl.losses.task import TaskLoss
from mcore_qwen3vl.settings.lora import LoraSettings
from mcore_qwen3vl.settings.run import RunSettings

if TYPE_CHECKING:
    import torch
    import torch.nn.functional as F
    from torch import Tensor

    from mcore_qwen3vl.data import processor
    from mcore_qwen3vl.data.encoding.batch import Batch
    from mcore_qwen3vl.data.records import tasks
    from mcore_qwen3vl.data.records.media import MediaFolder
    from mcore_qwen3vl.data.records.messages import Conversation
    from mcore_qwen3vl.forward import RunBatch
    from mcore_qwen3vl.losses import last_token, reduction
    from mcore_qwen3vl.losses.reduction import Objective, Reduced
    from mcore_qwen3vl.model import inputs as model_inputs
else:
    torch, F = map(Lazy, ("torch", "torch.nn.functional"))
    tasks = Lazy("mcore_qwen3vl.data.records.tasks")
    processor = Lazy("mcore_qwen3vl.data.processor")
    last_token = Lazy("mcore_qwen3vl.losses.last_token")
    model_inputs = Lazy("mcore_qwen3vl.model.inputs")
    reduction = Lazy("mcore_qwen3vl.losses.reduction")

Ranking = Literal["pointwise", "listwise"]

ANSWERS = "yes", "no"
"""Qwen3-VL-Reranker's answers to a relevant and an irrelevant document."""


@dataclass(frozen=True)
class JudgedRecords(RecordForm):
    """Retrieval records as one prompt for each document, which holds the query too."""

    needed = ("positive",)
    named_by = "--task reranker"

    def parse(
        self, record: Mapping[str, Any], folder: MediaFolder, reading: Reading
    ) -> Mapping[str, Conversation]:
        return tasks.parse_judgements(record, folder, reading)


@dataclass(frozen=True)
class Reranker(TaskLoss):
    """The losses of rerankers."""

    reranker_loss: Annotated[Ranking | None, Flag(last=True)] = None
    """with --task reranker: compare each document with its label (pointwise, the default), or all
    documents of a query with one another (listwise)"""
    answers: Annotated[tuple[str, str] | None, Flag(("YES", "NO"), last=True)] = None
    """with --task reranker: the words, one token each, that mean relevant and irrelevant; default:
    yes no"""

    names = ("reranker",)
    help = "reranker: train the answer, yes or no, to a query and a document of the same records"
    unit = "documents or queries"
    records = JudgedRecords()
    logged = ("reranker loss",)

    @property
    def ranking(self) -> Ranking:
        """The formula."""
        return self.reranker_loss or "pointwise"

    @property
    def words(self) -> tuple[str, str]:
        """The answers: relevant, irrelevant."""
        return self.answers or ANSWERS

    def summary(self, run: RunSettings, lora: LoraSettings) -> list[tuple[str, str]]:
        return [("loss", f"{self.ranking}, from the answers {' and '.join(self.words)}")]

    def objective(self, run: RunSettings, lora: LoraSettings) -> Objective:
        return partial(ranking_objective, self.ranking)

    def compute(self, run: RunSettings) -> RunBatch:
        return answer_word_runner(run.model.folder, self.words)


def ranking_objective(ranking: Ranking, batch: Batch, local: Tensor, logits: Tensor) -> Reduced:
    """Compute the mean loss of rerankers over documents (``pointwise``) or queries (``listwise``).

    Its values are the logits of ``yes`` and ``no`` after a query and a document.
    """
    losses, right = ranking_losses(relevance(logits), batch.groups, ranking)
    return reduction.reduce_units(losses.sum(), batch, {"reranker loss": losses, "accuracy": right})


def answer_word_runner(folder: str | Path, words: tuple[str, str]) -> RunBatch:
    """Return what runs a micro-batch, whose values are the logits (N, 2) of two words.

    It raises BadInput if a word is not a single token.
    """
    tokenizer = processor.load_processor(folder).tokenizer
    tokens = []
    for word in words:
        ids = tokenizer(word, add_special_tokens=False)["input_ids"]
        if len(ids) != 1:
            raise BadInput(
                f"The answer {word!r} is {len(ids)} tokens in this tokenizer; a reranker's "
                "answers are one token each: name two others with --answers."
            )
        tokens += ids
    return last_token.last_token_runner(
        lambda states, head, weight: head(states, weight, tokens=tokens)[0]
    )


def relevance(logits: Tensor) -> Tensor:
    """Return each document's logit of relevance (N,), from the logits (N, 2) of the answers."""
    # The sigmoid of it is the score of Qwen3-VL-Reranker.
    return logits[:, 0] - logits[:, 1]


def ranking_losses(
    scores: Tensor, groups: Sequence[int], ranking: Ranking
) -> tuple[Tensor, Tensor]:
    """Compute the loss of each document or query.

    Args:
        scores: (N,) float32, the logit of each document's relevance, a query's after the other's.
        groups: the number of documents of each query, its right one first.

    Returns:
        Losses (documents,) or (queries,), float32, with a gradient for `scores`; and for each 1.0
        if the document is on the right side of 0, or the query's right one has the highest score,
        else 0.0.
    """
    if ranking == "pointwise":
        right = [float(place == 0) for size in groups for place in range(size)]
        labels = model_inputs.to_device(torch.tensor(right), scores.device)
        losses = F.binary_cross_entropy_with_logits(scores, labels, reduction="none")
        return losses, ((scores > 0) == (labels > 0)).float()
    rows = torch.nn.utils.rnn.pad_sequence(
        list(scores.split(list(groups))), batch_first=True, padding_value=-torch.inf
    )
    return rows.logsumexp(1) - rows[:, 0], (rows.argmax(1) == 0).float()
