"""What is read out of the model for each sequence: log-probabilities, an embedding or a score."""

from __future__ import annotations

import base64
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import torch
import torch.distributed as dist
import torch.nn.functional as F
from megatron.core import parallel_state as mpu
from torch import Tensor

from mcore_qwen3vl.data.encoding.batch import Batch
from mcore_qwen3vl.data.teacher import encoded_top
from mcore_qwen3vl.labels import ONE_SCORE, Labels
from mcore_qwen3vl.model.head.module import Head
from mcore_qwen3vl.model.head.score import TaskModel
from mcore_qwen3vl.model.head.top_k import likeliest
from mcore_qwen3vl.model.inputs import to_device
from mcore_qwen3vl.model.qwen3vl import Qwen3VLModel
from mcore_qwen3vl.training.step.forward import forward
from mcore_qwen3vl.training.tasks.contrastive import EMBED
from mcore_qwen3vl.training.tasks.objectives import judge, relevance
from mcore_qwen3vl.training.tasks.pooling import SCORES

Results = dict[str, dict[str, Any]]
"""For each sequence of a batch, by its name, what JSON can hold."""


class Readout(Protocol):
    """One kind of results; `kind` is the class of model that they are read out of."""

    kind: type[Qwen3VLModel]

    def run(self, batch: Batch, model: Any) -> tuple[Tensor, Tensor]:
        """Run a micro-batch through a chunk; return its output and this rank's positions."""

    def results(self, batch: Batch, local: Tensor, output: Tensor) -> Results:
        """Return the results on the last stage, where all ranks call this; empty on all but one
        rank of a TP x CP group."""


class LogProbs:
    """Log-probabilities of trained tokens."""

    kind = Qwen3VLModel

    def __init__(self, *, temperature: float, entropy: bool) -> None:
        self._processor = partial(_scores, temperature=temperature, entropy=entropy)

    def run(self, batch: Batch, model: Any) -> tuple[Tensor, Tensor]:
        return forward(batch, model, output_processor=self._processor)

    def results(self, batch: Batch, local: Tensor, output: Tensor) -> Results:
        whole = output.new_zeros((len(output), *batch.input_ids.shape))
        whole[..., to_device(local, whole.device)] = output
        dist.all_reduce(whole, group=mpu.get_context_parallel_group())
        if mpu.get_tensor_and_context_parallel_rank() != 0:
            return {}
        return {name: self._of(*one) for name, *one in _trained(batch, whole.cpu())}

    def _of(self, labels: Tensor, values: Tensor) -> dict[str, Any]:
        """Return a sequence's results from its trained tokens (n,), and their values (rows, n)."""
        found = {
            "log_prob": float(values[0].sum()),
            "tokens": len(labels),
            "token_ids": labels.tolist(),
            "token_log_probs": values[0].tolist(),
        }
        if len(values) > 1:
            found |= {"entropy": float(values[1].mean()), "token_entropies": values[1].tolist()}
        return found


class TopK(LogProbs):
    """Log-probabilities of trained tokens, and the likeliest tokens there.

    Args:
        k: number of likeliest tokens, whose ids float32 must hold exactly.
    """

    def __init__(self, *, temperature: float, k: int) -> None:
        self._processor = partial(_top_scores, temperature=temperature, k=k)
        self._k = k

    def _of(self, labels: Tensor, values: Tensor) -> dict[str, Any]:
        ids, log_probs = values[1:].t().split([self._k, self._k + 1], 1)
        return super()._of(labels, values[:1]) | encoded_top(ids.numpy(), log_probs.numpy())


class Embeddings:
    """Embeddings of length 1, as base64 of little-endian float32."""

    kind = TaskModel

    def run(self, batch: Batch, model: Any) -> tuple[Tensor, Tensor]:
        return EMBED(batch, model)

    def results(self, batch: Batch, local: Tensor, output: Tensor) -> Results:
        rows = F.normalize(output.float(), dim=-1).cpu().numpy().astype("<f4")
        encoded = [base64.b64encode(row.tobytes()).decode() for row in rows]
        return _of_sequences(batch, [{"embedding": one} for one in encoded])


class Relevance:
    """Scores of documents as Qwen3-VL-Reranker gives them, from 0 to 1, with their logits.

    Raises:
        BadInput: a word is not a single token.
    """

    kind = Qwen3VLModel

    def __init__(self, folder: Path, words: tuple[str, str]) -> None:
        self._run = judge(folder, words)

    def run(self, batch: Batch, model: Any) -> tuple[Tensor, Tensor]:
        return self._run(batch, model)

    def results(self, batch: Batch, local: Tensor, output: Tensor) -> Results:
        logits = relevance(output.double()).cpu()
        values = zip(logits.sigmoid().tolist(), logits.tolist(), strict=True)
        return _of_sequences(batch, [{"score": score, "logit": logit} for score, logit in values])


class Rewards:
    """The scores of a reward model."""

    kind = TaskModel.of(ONE_SCORE)

    def run(self, batch: Batch, model: Any) -> tuple[Tensor, Tensor]:
        return SCORES(batch, model)

    def results(self, batch: Batch, local: Tensor, output: Tensor) -> Results:
        return _of_sequences(batch, [{"reward": value} for value in output[:, 0].tolist()])


class Classes:
    """The label of each record, and the probability of every label.

    Args:
        labels: the classifier's labels. If several may be right, all above 0.5 are written.
    """

    def __init__(self, labels: Labels) -> None:
        self._labels = labels
        self.kind = TaskModel.of(labels)

    def run(self, batch: Batch, model: Any) -> tuple[Tensor, Tensor]:
        return SCORES(batch, model)

    def results(self, batch: Batch, local: Tensor, output: Tensor) -> Results:
        logits = output.double()
        chances = logits.softmax(-1) if self._labels.is_single else logits.sigmoid()
        return _of_sequences(batch, [self._named(row) for row in chances.tolist()])

    def _named(self, row: list[float]) -> dict[str, Any]:
        chances = dict(zip(self._labels.names, row, strict=True))
        if self._labels.is_single:
            label: Any = max(chances, key=chances.__getitem__)
        else:
            label = [name for name, chance in chances.items() if chance > 0.5]
        return {"label": label, "probabilities": chances}


def _of_sequences(batch: Batch, values: list[dict[str, Any]]) -> Results:
    """Return each sequence's values, on one rank of a TP x CP group, all of which have them."""
    if mpu.get_tensor_and_context_parallel_rank() != 0:
        return {}
    return {name: one for name, one in zip(batch.names, values, strict=True) if name}


def _trained(batch: Batch, whole: Tensor) -> Iterator[tuple[str, Tensor, Tensor]]:
    """Yield each sequence's name, its trained tokens (n,), and their (rows, n) of (rows, B, S)."""
    weights, labels = batch.loss_weights.cpu(), batch.labels.cpu()
    for number, name in enumerate(batch.names):
        if not name:
            continue
        row, place = number, slice(None)
        if batch.cu_seqlens is not None:
            start, end = batch.cu_seqlens[number : number + 2].tolist()
            row, place = 0, slice(start, end)
        trained = weights[row, place] > 0
        yield name, labels[row, place][trained], whole[:, row, place][:, trained].double()


def _scores(
    *,
    hidden_states: Tensor,
    output_layer: Head,
    output_weight: Tensor | None,
    labels: Tensor,
    temperature: float,
    entropy: bool,
    **_: Any,
) -> Tensor:
    """Compute (1, B, s) log-probabilities, or (2, B, s) with entropies, instead of losses."""
    log_probs, entropies = output_layer(
        hidden_states, output_weight, targets=labels, temperature=temperature, entropy=entropy
    )
    return torch.stack([log_probs] if entropies is None else [log_probs, entropies])


def _top_scores(
    *,
    hidden_states: Tensor,
    output_layer: Head,
    output_weight: Tensor | None,
    labels: Tensor,
    temperature: float,
    k: int,
    **_: Any,
) -> Tensor:
    """Compute (2 k + 2, B, s): log-probabilities, k ids, their log-probabilities and the rest's."""
    log_probs, _entropies = output_layer(
        hidden_states, output_weight, targets=labels, temperature=temperature
    )
    ids, top = output_layer(
        hidden_states, output_weight, reduce=partial(likeliest, k=k, temperature=temperature)
    )
    return torch.cat([log_probs[..., None], ids.float(), top], -1).movedim(-1, 0)
