"""``--task embedding``: the state of the last token, close to that of what belongs to it.

``infonce``: van den Oord et al., "Representation Learning with Contrastive Predictive Coding",
2018, as sentence-transformers' ``MultipleNegativesRankingLoss`` computes it, whose scale is
1 / temperature. With the query q, its positive p and the documents d of the batch, which are all
positives and all hard negatives, the loss of q is -log(exp(cos(q, p) / t) / sum over d of
exp(cos(q, d) / t)).

A pair of texts has a score s that says how similar they are, and c is the cosine of the two:

- ``cosine``: (c - s)^2, as sentence-transformers' ``CosineSimilarityLoss`` computes it.
- ``cosent``: log(1 + sum of exp((c' - c) / t) over all pairs (c, s) and (c', s') of the batch with
  s > s'). Su, "CoSENT: A more efficient sentence vector scheme than Sentence-BERT", 2022, as
  sentence-transformers' ``CoSENTLoss`` computes it. The loss of each pair is that of the batch.

With several dimensions the loss is the sum over them of the loss of embeddings that are cut to so
many values. Kusupati et al., "Matryoshka Representation Learning", 2022, as
sentence-transformers' ``MatryoshkaLoss`` computes it with weights of 1.

The loss of a query depends on every document of the global batch, and these are never in one
forward pass. So the embeddings are first computed without gradients, gathered, and the loss is
differentiated with respect to them; a second pass then takes each micro-batch's part of that
gradient through the model. Source: Gao et al., "Scaling Deep Contrastive Learning Batch Size under
Memory Limited Setup", 2021 (GradCache). With one micro-batch a rank, one pass is enough.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import accumulate
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, Self

from mcore_qwen3vl.config import Architecture
from mcore_qwen3vl.converters.adapters.config import AdapterConfig
from mcore_qwen3vl.data.record_form import RecordForm
from mcore_qwen3vl.data.records.reading import BadSample, Reading
from mcore_qwen3vl.data.task_inputs import TaskInputs
from mcore_qwen3vl.errors import BadInput
from mcore_qwen3vl.flags import Flag
from mcore_qwen3vl.json_and_yaml import read_object
from mcore_qwen3vl.labels import NO_LABELS, Labels
from mcore_qwen3vl.lazy import Lazy
from mcore_qwen3vl.losses.loss import refuse_noise, require
from mcore_qwen3vl.losses.task import TaskLoss
from mcore_qwen3vl.settings.lora import LoraSettings
from mcore_qwen3vl.settings.run import RunSettings

if TYPE_CHECKING:
    import torch
    import torch.distributed as dist
    import torch.nn.functional as F
    from megatron.core import parallel_state
    from torch import Tensor

    from mcore_qwen3vl.data.encoding.batch import Batch
    from mcore_qwen3vl.data.encoding.planning import Plan
    from mcore_qwen3vl.data.records import parse, tasks
    from mcore_qwen3vl.data.records.media import MediaFolder
    from mcore_qwen3vl.data.records.messages import Conversation
    from mcore_qwen3vl.forward import RunBatch
    from mcore_qwen3vl.losses import last_token, passes, reduction
    from mcore_qwen3vl.losses.reduction import Objective, Reduced
    from mcore_qwen3vl.model import inputs as model_inputs
else:
    torch, dist, F = map(Lazy, ("torch", "torch.distributed", "torch.nn.functional"))
    parallel_state = Lazy("megatron.core.parallel_state")
    parse = Lazy("mcore_qwen3vl.data.records.parse")
    tasks = Lazy("mcore_qwen3vl.data.records.tasks")
    last_token = Lazy("mcore_qwen3vl.losses.last_token")
    passes = Lazy("mcore_qwen3vl.losses.passes")
    model_inputs = Lazy("mcore_qwen3vl.model.inputs")
    reduction = Lazy("mcore_qwen3vl.losses.reduction")

Kind = Literal["infonce", "cosine", "cosent"]


@dataclass(frozen=True)
class RetrievalRecords(RecordForm):
    """Retrieval records: a query with its documents, or two texts with a score."""

    similarities: bool = False
    """Whether records are pairs with a score."""

    needed = ("query", "positive")
    named_by = "--task embedding"

    def describes(self, record: Mapping[str, Any]) -> bool:
        return parse.is_retrieval(record)

    def parse(
        self, record: Mapping[str, Any], folder: MediaFolder, reading: Reading
    ) -> Mapping[str, Conversation]:
        return tasks.parse_retrieval(record, folder, reading)

    def require_trainable(self, plans: Mapping[str, Plan]) -> None:
        super().require_trainable(plans)
        score = plans["query"].target
        if self.similarities and (score is None or len(plans) != len(self.needed)):
            raise BadSample(
                "--embedding-loss cosine and cosent train on two texts with a score; the record "
                f"has {'no score' if score is None else 'negatives'}."
            )
        if not self.similarities and score not in (None, 1.0):
            raise BadSample(
                f"its score is {score:g}, and this would train on it as on any positive: add "
                "--embedding-loss cosine or cosent, or take the key out."
            )


@dataclass(frozen=True)
class Scores(TaskInputs):
    """How similar two texts are; a query with documents needs nothing."""

    scores: Tensor  # (records,) float32 similarities

    @classmethod
    def of_records(
        cls, records: Sequence[Any], assemble: Callable[..., Any], config: Any
    ) -> Self | None:
        targets = [record.target for record in records]
        return None if None in targets else cls(torch.tensor(targets, dtype=torch.float32))


@dataclass(frozen=True)
class Contrast(TaskInputs):
    """A batch's part of the global batch's loss, which a first pass has found."""

    losses: Tensor  # (queries,) float32
    gradients: Tensor  # (samples, H) float32: of the sum of all losses, by the embeddings


@dataclass(frozen=True)
class Embedding(TaskLoss):
    """The losses of embeddings."""

    embedding_loss: Annotated[Kind | None, Flag(last=True)] = None
    """with --task embedding: infonce (the default) trains a query to find its positive; cosine and
    cosent train on pairs with a score, cosine as the cosine itself, cosent for the order of all
    pairs of the global batch"""
    temperature: Annotated[float | None, Flag(last=True)] = None
    """with --task embedding: cosines are divided by this; default 0.05"""
    matryoshka_dims: Annotated[tuple[int, ...] | None, Flag(last=True)] = None
    """with --task embedding: add up the losses of embeddings that are cut to each of these lengths;
    default: whole embeddings only"""

    names = ("embedding",)
    help = (
        "embedding: train the embedding at the last token with the contrastive loss, on retrieval "
        "records; the model has no lm_head, and is written without one"
    )
    unit = "queries"
    lm_head = False
    records = RetrievalRecords()
    logged = ("contrastive loss", "similarity loss")

    @property
    def contrastive(self) -> Contrastive:
        """The settings of the formula; BadInput for a value out of range."""
        kind: Kind = self.embedding_loss or Contrastive.kind  # the field's default
        if kind == "cosine" and self.temperature is not None:
            raise BadInput("--temperature has no meaning with --embedding-loss cosine: drop it.")
        temperature = Contrastive.temperature if self.temperature is None else self.temperature
        return Contrastive(temperature, self.matryoshka_dims or (), kind)

    def complete(self, run: RunSettings, lora: LoraSettings, architecture: Architecture) -> Self:
        longest = max(self.contrastive.dimensions, default=0)
        if longest > architecture.hidden_size:
            raise BadInput(
                f"--matryoshka-dims {longest}: the model's embeddings have "
                f"{architecture.hidden_size} values."
            )
        return super().complete(run, lora, architecture)

    def check_model(self, run: RunSettings, lora: LoraSettings) -> None:
        require_last_token_pooling(run.model.folder)
        refuse_noise(
            run,
            self.chosen_by,
            "embeddings are computed twice in a step, and this would make them differ.",
        )

    def check_adapter(self, config: AdapterConfig, run: RunSettings, lora: LoraSettings) -> None:
        if config.lora_dropout:
            raise BadInput(
                f"lora_dropout is {config.lora_dropout:g} with --task embedding: embeddings are "
                "computed twice in a step, and dropout would make them differ. Set it to 0."
            )
        super().check_adapter(config, run, lora)

    def labels(self, run: RunSettings, lora: LoraSettings) -> Labels:
        return NO_LABELS

    def reads(self, run: RunSettings, lora: LoraSettings) -> dict[str, Any]:
        return {"records": RetrievalRecords(self.contrastive.takes_scores), "inputs": Scores}

    def summary(self, run: RunSettings, lora: LoraSettings) -> list[tuple[str, str]]:
        loss = self.contrastive
        lengths = ", ".join(map(str, loss.dimensions))
        cut = f", embeddings cut to {lengths}" if loss.dimensions else ""
        scale = "" if loss.kind == "cosine" else f", temperature {loss.temperature:g}"
        return [
            ("loss", f"{loss.kind} of embeddings{scale}{cut}"),
            ("head", "none: the model is trained and written without lm_head"),
        ]

    def objective(self, run: RunSettings, lora: LoraSettings) -> Objective:
        return embedding_objective(self.contrastive)

    def compute(self, run: RunSettings) -> RunBatch:
        return last_token.STATES

    def schedule(self, run: RunSettings, lora: LoraSettings, frozen: Any) -> Callable[..., Any]:
        return partial(run_with_contrasts, self.contrastive)


@dataclass(frozen=True)
class Contrastive:
    """The settings of the formulas.

    Attributes:
        temperature: number that cosines are divided by; not for ``cosine``.
        dimensions: numbers of values that embeddings are cut to (Matryoshka); empty: not cut.
        kind: the loss.

    Raises:
        BadInput: a value is out of range.
    """

    temperature: float = 0.05
    dimensions: tuple[int, ...] = ()
    kind: Kind = "infonce"

    @property
    def takes_scores(self) -> bool:
        """Whether records are pairs of texts with a score."""
        return self.kind != "infonce"

    @property
    def name(self) -> str:
        """The loss's name in the log."""
        return "similarity loss" if self.takes_scores else "contrastive loss"

    def __post_init__(self) -> None:
        require("temperature", self.temperature, self.temperature > 0, "above 0")
        if any(dimension < 1 for dimension in self.dimensions):
            raise BadInput(f"matryoshka_dims is {self.dimensions}: each must be at least 1.")


def embedding_objective(contrastive: Contrastive) -> Objective:
    """Return the objective of embedding training: a mean over the queries of the global batch."""

    def objective(batch: Batch, local: Tensor, embeddings: Tensor) -> Reduced:
        contrast = batch.task
        if not isinstance(contrast, Contrast):  # no first pass has found it
            (contrast,) = contrasts(contrastive, [batch], [embeddings.detach()])
        # The gradient of this is that of the global batch's loss.
        total = (embeddings * contrast.gradients).sum()
        return reduction.reduce_units(total, batch, {contrastive.name: contrast.losses})

    return objective


def run_with_contrasts(
    contrastive: Contrastive, schedule: Callable[..., Any], **arguments: Any
) -> Any:
    """Run Megatron's `schedule` after a pass for all embeddings, if there are several to gather."""
    if arguments["num_microbatches"] == 1:
        return schedule(**arguments)
    inputs = partial(contrasts, contrastive)
    first = passes.first_pass_step(last_token.STATES, lambda batch, local, embeddings: embeddings)
    return passes.run_two_passes(
        schedule, first=first, within=passes.evaluation_mode, inputs=inputs, **arguments
    )


def contrasts(
    contrastive: Contrastive, batches: Sequence[Batch], embeddings: Sequence[Tensor]
) -> list[Contrast]:
    """Differentiate the loss of all DP ranks' micro-batches with respect to their embeddings.

    All data-parallel ranks call this, each with its own micro-batches, and all compute the same
    loss of all queries.

    Args:
        embeddings: (N, H) float32 for each of them, without a gradient.

    Returns:
        For each of `batches`, the losses of its queries, and the gradient of the sum of all ranks'
        losses.
    """
    groups_of_batches = [() if batch.is_spare else batch.groups for batch in batches]
    vectors = [rows[: sum(of)] for rows, of in zip(embeddings, groups_of_batches, strict=True)]
    groups: list[Any] = [None] * parallel_state.get_data_parallel_world_size()
    dist.all_gather_object(
        groups, groups_of_batches, group=parallel_state.get_data_parallel_group_gloo()
    )
    sizes = [sum(map(sum, of_rank)) for of_rank in groups]
    everyone = _gather_rows(torch.cat(vectors), sizes).requires_grad_()
    queries = [sum(map(len, of_rank)) for of_rank in groups]
    scores = None
    if contrastive.takes_scores:
        of_batches = zip(batches, groups_of_batches, strict=True)
        own = [batch.inputs_of(Scores).scores[: len(of)] for batch, of in of_batches]
        scores = _gather_rows(torch.cat(own)[:, None], queries)[:, 0]
    texts = [size for of_rank in groups for rows in of_rank for size in rows]
    with torch.enable_grad():
        losses = contrastive_losses(everyone, texts, contrastive, scores)
        (gradients,) = torch.autograd.grad(losses.sum(), everyone)
    rank = parallel_state.get_data_parallel_rank()
    mine = losses.detach().split(queries)[rank].split([len(rows) for rows in groups_of_batches])
    of_own = gradients.split(sizes)[rank].split([sum(rows) for rows in groups_of_batches])
    return [
        # A spare batch takes part in no loss.
        Contrast(torch.zeros(len(batch.groups), device=rows.device), torch.zeros_like(rows))
        if batch.is_spare
        else Contrast(losses, gradient)
        for batch, rows, losses, gradient in zip(batches, embeddings, mine, of_own, strict=True)
    ]


def _gather_rows(rows: Tensor, sizes: Sequence[int]) -> Tensor:
    """Return the rows (n, H) of all data-parallel ranks, whose numbers are `sizes`, in order."""
    padded = rows.new_zeros(max(sizes), rows.shape[1])
    padded[: len(rows)] = rows
    everyone = rows.new_empty(len(sizes) * len(padded), rows.shape[1])
    dist.all_gather_into_tensor(everyone, padded, group=parallel_state.get_data_parallel_group())
    of_ranks = zip(everyone.chunk(len(sizes)), sizes, strict=True)
    return torch.cat([rows[:count] for rows, count in of_ranks])


def contrastive_losses(
    embeddings: Tensor,
    groups: Sequence[int],
    contrastive: Contrastive,
    scores: Tensor | None = None,
) -> Tensor:
    """Compute the loss of each query.

    Args:
        embeddings: (N, H) float32, of any length, in the order query, positive, negatives, query
            and so on.
        groups: the number of texts of each query: itself, its positive and its negatives. Losses of
            pairs have no negatives.
        scores: (queries,) float32, for losses of pairs.

    Returns:
        (queries,) float32, with a gradient for `embeddings`.
    """
    if not groups:  # no rank has a record that can be used in this step
        return embeddings.sum(-1)
    total = embeddings.new_zeros(len(groups))
    for dimension in contrastive.dimensions or (embeddings.shape[1],):
        unit = F.normalize(embeddings[:, :dimension], dim=-1)
        if scores is None:
            total = total + _infonce_losses(unit, groups, contrastive.temperature)
        else:
            total = total + _similarity_losses(unit, scores, contrastive)
    return total


def _infonce_losses(unit: Tensor, groups: Sequence[int], temperature: float) -> Tensor:
    """Compute the losses (queries,) from embeddings of length 1."""
    queries = torch.tensor([0, *accumulate(groups)][:-1])  # the first text of each group
    of_documents = torch.ones(len(unit), dtype=torch.bool)
    of_documents[queries] = False
    rank = of_documents.cumsum(0) - 1  # a text's number among the documents
    positives = model_inputs.to_device(rank[queries + 1], unit.device)
    documents = model_inputs.to_device(of_documents.nonzero()[:, 0], unit.device)
    queries = model_inputs.to_device(queries, unit.device)
    cosines = unit.index_select(0, queries) @ unit.index_select(0, documents).T
    return F.cross_entropy(cosines / temperature, positives, reduction="none")


def _similarity_losses(unit: Tensor, scores: Tensor, contrastive: Contrastive) -> Tensor:
    """Compute the losses (pairs,) from embeddings of length 1 and scores (pairs,)."""
    cosines = (unit[::2] * unit[1::2]).sum(-1)
    if contrastive.kind == "cosine":
        return (cosines - scores).square()
    gaps = (cosines[None] - cosines[:, None]) / contrastive.temperature
    gaps = gaps.where(scores[:, None] > scores, -torch.inf)
    # The zero before them is the 1 in the logarithm.
    return torch.cat([gaps.new_zeros(1), gaps.flatten()]).logsumexp(0).expand(len(scores))


def require_last_token_pooling(folder: Path) -> None:
    """Raise BadInput if sentence-transformers would make other embeddings of the model in `folder`.

    They are the state of the last token with length 1, here: no other pooling, and no layer on it.
    """
    for file in sorted(folder.glob("*_Pooling/config.json")):
        content = read_object(file, file.name, "")
        flags = [name for name, on in content.items() if name.startswith("pooling_mode_") and on]
        named = content.get("pooling_mode") or [
            flag.removeprefix("pooling_mode_") for flag in flags
        ]
        modes = {named} if isinstance(named, str) else set(map(str, named))
        if modes - {"lasttoken"}:
            raise BadInput(
                f"{file} says that an embedding is the pooling {', '.join(sorted(modes))}, and "
                "here it is the state of the last token (lasttoken): use sentence-transformers, or "
                "change the file if the model was trained with the last token."
            )
    for layer in sorted(folder.glob("*_Dense")):  # the first one is enough
        raise BadInput(
            f"{layer} is a layer on top of the embeddings, which is not supported: use "
            "sentence-transformers, or remove it to have the embeddings below it."
        )
