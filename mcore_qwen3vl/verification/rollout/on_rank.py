"""Log-probabilities of the server's answers by the trained model, under every meaning at once."""

from __future__ import annotations

import gc
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from transformers.generation.logits_process import TopKLogitsWarper, TopPLogitsWarper

from mcore_qwen3vl.config import Architecture
from mcore_qwen3vl.data.config import DataConfig
from mcore_qwen3vl.data.encoding.batch import IGNORED, Batch
from mcore_qwen3vl.data.encoding.planning import Plan, spare_plan
from mcore_qwen3vl.forward import forward
from mcore_qwen3vl.inference import CheckedModel
from mcore_qwen3vl.model.head import Head
from mcore_qwen3vl.model.inputs import PixelScale, to_device
from mcore_qwen3vl.model.log_probs import CHUNK_BYTES, Columns, flat_sides, in_pairs
from mcore_qwen3vl.model.qwen3vl import Qwen3VLModel
from mcore_qwen3vl.scoring.on_rank import LogProbs, Scorer
from mcore_qwen3vl.scoring.records import BlockResults, Planned, assemble


@dataclass(frozen=True)
class Meaning:
    """What a log-probability is that of: a token of logits over the temperature, then masked.

    The masks are those of sampling: the others have no probability. Top-p 1 and top-k 0 are off.
    """

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0

    @property
    def has_mask(self) -> bool:
        """Whether tokens are left out."""
        return bool(self.top_k) or self.top_p < 1

    def __str__(self) -> str:
        parts = [f"of the logits divided by {self.temperature:g}"]
        if self.temperature == 1:
            parts = ["of the logits as they are"]
        if self.top_k:
            parts.append(f"of the {self.top_k} likeliest tokens alone (top-k)")
        if self.top_p < 1:
            parts.append(f"of the likeliest tokens that make up {self.top_p:g} alone (top-p)")
        return ", ".join(parts)


@dataclass(frozen=True)
class ReadySequences:
    """Sequences with pixels, one a micro-batch, by their places in `plans`."""

    plans: Sequence[Plan]
    architecture: Architecture
    config: DataConfig
    pad_id: int
    scale: PixelScale | None
    multiple: int

    def plan(self, records: Sequence[int]) -> list[list[Planned]]:
        return [[Planned(number, str(number), self.plans[number], 0)] for number in records]

    def batches(self, micros: Sequence[Sequence[Planned]], count: int) -> Iterator[Batch]:
        for micro in [*micros, *[()] * (count - len(micros))]:
            named = {one.name: one.plan for one in micro} or {"": spare_plan(self.pad_id)}
            yield assemble(
                named, self.architecture, self.config, self.pad_id, self.scale, self.multiple
            )

    def take_results(self) -> BlockResults:
        return BlockResults()


class Meanings(LogProbs):
    """Log-probabilities of trained tokens under some meanings, and the largest logit there."""

    def __init__(self, meanings: Sequence[Meaning]) -> None:
        super().__init__(temperature=1.0)
        self._meanings = meanings

    def compute(self, batch: Batch, model: Any) -> tuple[Tensor, Tensor]:
        return forward(batch, model, processor=self._read)

    def _read(
        self,
        batch: Batch,
        chunk: Qwen3VLModel,
        *,
        hidden_states: Tensor,
        output_layer: Head,
        output_weight: Tensor | None,
        labels: Tensor,
        **_: Any,
    ) -> Tensor:
        """Compute (meanings + 1, B, s)."""
        local = to_device(chunk.local_tokens(batch.input_ids.shape[1]), labels.device)
        targets = labels.where(batch.loss_weights[:, local] > 0, IGNORED)
        reduce = partial(log_probs_under, targets=targets, meanings=self._meanings)
        values, _none = output_layer(hidden_states, output_weight, reduce=reduce)
        return values

    def _result_of(self, labels: Tensor, values: Tensor) -> dict[str, Any]:
        return {"values": values.numpy()}


@torch.no_grad()
def log_probs_under(
    hidden: Tensor,
    weight: Tensor,
    columns: Columns,
    *,
    targets: Tensor,
    meanings: Sequence[Meaning],
    more: Sequence[tuple[Tensor, Tensor]] = (),
) -> tuple[Tensor, None]:
    """Compute each target's log-probability under each meaning.

    A mask needs the logits of a position over the whole vocabulary, so ranks gather them, for some
    positions at a time and only for those that have a target.

    Args:
        hidden, weight, columns, more: as for :func:`.log_probs.token_log_probs`.
        targets: (B, s) integers; :data:`.IGNORED` at left-out positions, which get 0.

    Returns:
        (meanings + 1, B, s) float32, the same on all ranks: at last the largest absolute logit.
    """
    length, rows = hidden.shape[:2]
    places = targets.t().reshape(-1)
    wanted = (places != IGNORED).nonzero().squeeze(1)
    terms = [(x[wanted], w) for x, w in in_pairs(flat_sides(hidden, weight, more))]
    ranks = 1 if columns.group is None else columns.group.size()
    values = hidden.new_zeros((len(meanings) + 1, len(places)), dtype=torch.float32)
    size = max(CHUNK_BYTES // (4 * len(weight) * ranks), 1)  # equal on all ranks, who gather
    for start in range(0, len(wanted), size):
        some = slice(start, start + size)
        logits = _whole_logits(columns, terms, some, len(weight))
        at = places[wanted[some], None]
        for row, meaning in enumerate(meanings):
            chosen = masked(logits / meaning.temperature, meaning).log_softmax(-1).gather(1, at)
            values[row, wanted[some]] = chosen.squeeze(1)
        values[-1, wanted[some]] = logits.where(logits.isfinite(), 0).abs().amax(-1)
    return values.view(-1, length, rows).transpose(1, 2), None


def _whole_logits(
    columns: Columns, terms: Sequence[tuple[Tensor, Tensor]], rows: slice, width: int
) -> Tensor:
    """Return logits (n, V and padding) of all ranks; minus infinity in the padding."""
    mine = columns.logits(terms, rows)
    padded = mine.new_full((len(mine), width), -torch.inf)
    padded[:, : columns.count] = mine
    if columns.group is None or columns.group.size() == 1:
        return padded
    everyone = [torch.empty_like(padded) for _ in range(columns.group.size())]
    dist.all_gather(everyone, padded, group=columns.group)
    return torch.cat(everyone, 1)


def masked(logits: Tensor, meaning: Meaning) -> Tensor:
    """Return logits (n, V) with minus infinity where the masks leave a token out."""
    ids: Any = None  # which these processors do not read
    if meaning.top_k:
        logits = TopKLogitsWarper(meaning.top_k)(ids, logits)
    if meaning.top_p < 1:
        logits = TopPLogitsWarper(meaning.top_p)(ids, logits)
    return logits


def with_answer(plan: Plan, token_ids: Sequence[int]) -> Plan:
    """Return a prompt's plan with an answer behind it, whose tokens are scored."""
    weights = [np.zeros(len(plan.input_ids), np.float32), np.ones(len(token_ids), np.float32)]
    ids = np.concatenate([plan.input_ids, np.array(token_ids, np.int64)])
    return replace(plan, input_ids=ids, loss_weights=np.concatenate(weights))


def score_on_rank(
    models: Sequence[CheckedModel], sequences: ReadySequences, meanings: Sequence[Meaning]
) -> list[dict[int, np.ndarray]] | None:
    """Score the sequences with one model after the other; all ranks call it.

    Returns:
        On the first rank, for each model the result of each sequence, (meanings + 1, n) float64.
    """
    found = []
    for model in models:
        overrides = {"variable_seq_lengths": True} if model.stages > 1 else {}
        readout = Meanings(meanings)
        scorer = Scorer(model.load(readout.kind, **overrides), lambda: sequences, readout)
        results = scorer.score_block(range(len(sequences.plans)))
        if results is not None:
            found.append({int(name): one["values"] for name, one in results.scores.items()})
        del scorer  # before the next model is loaded
        gc.collect()
    return found or None
