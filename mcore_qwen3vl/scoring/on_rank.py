"""Scoring on a rank: micro-batches go through Megatron's schedule, results to the first rank.

A readout says what is read out of the model for each sequence: log-probabilities, an embedding or a
score.
"""

from __future__ import annotations

import base64
import math
from collections.abc import Callable, Iterator, Sequence
from functools import partial, reduce
from operator import or_
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from megatron.core import parallel_state as mpu
from megatron.core.pipeline_parallel import get_forward_backward_func
from torch import Tensor

from mcore_qwen3vl.data.encoding.batch import Batch
from mcore_qwen3vl.data.sharing import SharedBatches, StageFeed, new_host_group, rank_reads
from mcore_qwen3vl.forward import forward
from mcore_qwen3vl.labels import ONE_SCORE, Labels
from mcore_qwen3vl.losses.last_token import SCORES, STATES
from mcore_qwen3vl.losses.reranker import answer_word_runner, relevance
from mcore_qwen3vl.losses.teacher_file import encode_top
from mcore_qwen3vl.model.head import Head
from mcore_qwen3vl.model.inputs import to_device
from mcore_qwen3vl.model.log_probs import token_log_probs
from mcore_qwen3vl.model.qwen3vl import Qwen3VLModel, TaskModel
from mcore_qwen3vl.model.top_tokens import likeliest
from mcore_qwen3vl.scoring.records import BlockResults, SequenceSource

Results = dict[str, dict[str, Any]]
"""For each sequence of a batch, by its name, what JSON can hold."""


class Readout:
    """One kind of results: of sequences, of which every rank of a TP x CP group has those of all.

    `kind` is the class of model that they are read out of. `compute` runs a micro-batch through a
    chunk and returns its output and this rank's positions; `values` makes JSON values of an output.
    """

    kind: type[Qwen3VLModel] = TaskModel
    compute: Callable[[Batch, Any], tuple[Tensor, Tensor]] = staticmethod(SCORES)
    values: Callable[[Tensor], list[dict[str, Any]]]

    def results(self, batch: Batch, local: Tensor, output: Tensor) -> Results:
        """Return the results on the last stage, where all ranks call this."""
        # A spare sequence has no name.
        return {name: v for name, v in zip(batch.names, self.values(output), strict=True) if name}


class LogProbs(Readout):
    """Log-probabilities of trained tokens."""

    kind = Qwen3VLModel

    def __init__(self, *, temperature: float, entropy: bool = False) -> None:
        self._options: dict[str, Any] = {"temperature": temperature, "entropy": entropy}

    def compute(self, batch: Batch, model: Any) -> tuple[Tensor, Tensor]:
        return forward(batch, model, output_processor=self._read_out)

    def _read_out(
        self,
        *,
        hidden_states: Tensor,
        output_layer: Head,
        output_weight: Tensor | None,
        labels: Tensor,
        **_: Any,
    ) -> Tensor:
        """Compute (1, B, s) log-probabilities, or (2, B, s) with entropies, instead of losses."""
        reduce = partial(token_log_probs, targets=labels, **self._options)
        log_probs, entropies = output_layer(hidden_states, output_weight, reduce=reduce)
        return torch.stack([log_probs] if entropies is None else [log_probs, entropies])

    def results(self, batch: Batch, local: Tensor, output: Tensor) -> Results:
        rows = output.new_zeros((len(output), *batch.input_ids.shape))
        rows[..., to_device(local, rows.device)] = output
        dist.all_reduce(rows, group=mpu.get_context_parallel_group())
        return {
            name: self._result_of(*sequence)
            for name, *sequence in _split_sequences(batch, rows.cpu())
        }

    def _result_of(self, labels: Tensor, values: Tensor) -> dict[str, Any]:
        """Return a sequence's results from its trained tokens (n,), and their values (rows, n)."""
        result = {
            "log_prob": float(values[0].sum()),
            "tokens": len(labels),
            "token_ids": labels.tolist(),
            "token_log_probs": values[0].tolist(),
        }
        if len(values) > 1:
            result |= {"entropy": float(values[1].mean()), "token_entropies": values[1].tolist()}
        return result


class TopK(LogProbs):
    """Log-probabilities of trained tokens, and the `k` likeliest there; float32 holds their ids."""

    def __init__(self, *, temperature: float, k: int) -> None:
        super().__init__(temperature=temperature)
        self._k, self._reduce = k, partial(likeliest, k=k, temperature=temperature)

    def _read_out(self, **output: Any) -> Tensor:
        """Compute (2 k + 2, B, s): log-probabilities, k ids, theirs, and that of the rest."""
        log_probs = super()._read_out(**output)
        ids, top = output["output_layer"](
            output["hidden_states"], output["output_weight"], reduce=self._reduce
        )
        return torch.cat([log_probs, ids.float().movedim(-1, 0), top.movedim(-1, 0)])

    def _result_of(self, labels: Tensor, values: Tensor) -> dict[str, Any]:
        ids, log_probs = values[1:].t().split([self._k, self._k + 1], 1)
        return super()._result_of(labels, values[:1]) | encode_top(ids.numpy(), log_probs.numpy())


class Embeddings(Readout):
    """Embeddings of length 1, as base64 of little-endian float32."""

    compute = staticmethod(STATES)

    def values(self, output: Tensor) -> list[dict[str, Any]]:
        rows = F.normalize(output.float(), dim=-1).cpu().numpy().astype("<f4")
        return [{"embedding": base64.b64encode(row.tobytes()).decode()} for row in rows]


class Relevance(Readout):
    """Scores of documents as Qwen3-VL-Reranker gives them, from 0 to 1, with their logits.

    `words` mean relevant and irrelevant to the tokenizer in `folder`.

    Raises:
        BadInput: a word is not a single token.
    """

    kind = Qwen3VLModel

    def __init__(self, folder: Path, words: tuple[str, str]) -> None:
        self.compute = answer_word_runner(folder, words)

    def values(self, output: Tensor) -> list[dict[str, Any]]:
        logits = relevance(output.double()).cpu()
        values = zip(logits.sigmoid().tolist(), logits.tolist(), strict=True)
        return [{"score": score, "logit": logit} for score, logit in values]


class Rewards(Readout):
    """The scores of a reward model."""

    kind = TaskModel.with_labels(ONE_SCORE)

    def values(self, output: Tensor) -> list[dict[str, Any]]:
        return [{"reward": value} for value in output[:, 0].tolist()]


class Classes(Readout):
    """The label of each record, and the probability of every label.

    If several labels may be right, all above 0.5 are written.
    """

    def __init__(self, labels: Labels) -> None:
        self._labels = labels
        self.kind = TaskModel.with_labels(labels)

    def values(self, output: Tensor) -> list[dict[str, Any]]:
        logits = output.double()
        chances = logits.softmax(-1) if self._labels.are_exclusive else logits.sigmoid()
        return [self._label_of(row) for row in chances.tolist()]

    def _label_of(self, row: list[float]) -> dict[str, Any]:
        """Return the likeliest label, or all above 0.5, from the probabilities of a record."""
        chances = dict(zip(self._labels.names, row, strict=True))
        if self._labels.are_exclusive:
            label: Any = max(chances, key=chances.__getitem__)
        else:
            label = [name for name, chance in chances.items() if chance > 0.5]
        return {"label": label, "probabilities": chances}


def _split_sequences(batch: Batch, rows: Tensor) -> Iterator[tuple[str, Tensor, Tensor]]:
    """Yield each sequence's name, its trained tokens (n,), and their (rows, n) of (rows, B, S)."""
    weights, labels = batch.loss_weights.cpu(), batch.labels.cpu()
    for number, name in enumerate(batch.names):
        if not name:
            continue
        row, place = number, slice(None)
        if batch.cu_seqlens is not None:
            row, place = 0, slice(*batch.cu_seqlens[number : number + 2].tolist())
        trained = weights[row, place] > 0
        yield name, labels[row, place][trained], rows[:, row, place][:, trained].double()


class Scorer:
    """A scorer with this rank's part of the model and of the data.

    Only ranks that read data call `records`, to open them.
    """

    def __init__(
        self,
        chunks: Sequence[Qwen3VLModel],
        records: Callable[[], SequenceSource],
        readout: Readout,
    ) -> None:
        self._chunks = list(chunks)
        for chunk in self._chunks:
            chunk.eval()
        self._readout = readout
        self._records = records() if rank_reads() else None
        self._host_group, self._feed = new_host_group(), StageFeed.between_stages()
        self._device = next(self._chunks[0].parameters()).device

    @torch.no_grad()
    def score_block(self, records: Sequence[int]) -> BlockResults | None:
        """Score `records` on all ranks; return all results on the first rank, None on others."""
        rank, ranks = mpu.get_data_parallel_rank(), mpu.get_data_parallel_world_size()
        mine = records[rank::ranks]
        micros = [] if self._records is None else self._records.plan(mine)
        count = self._agree_on_count(len(micros))
        read = None if self._records is None else self._records.batches(micros, count)
        outputs = self._run_forward(read, count)
        results = BlockResults() if self._records is None else self._records.take_results()
        for batch, local, output in outputs:  # only the last stage has any
            scores = self._readout.results(batch, local, output)
            if mpu.get_tensor_and_context_parallel_rank() == 0:  # all of a TP x CP group are equal
                results.scores |= scores
        everyone: list[Any] | None = [None] * dist.get_world_size() if not dist.get_rank() else None
        dist.gather_object(results, everyone)
        return None if everyone is None else reduce(or_, everyone)

    def _agree_on_count(self, count: int) -> int:
        """Return how many micro-batches all replicas run: the most of any, rounded up for VPP."""
        most = torch.tensor(count, device=self._device)
        dist.all_reduce(most, op=dist.ReduceOp.MAX)
        stages = mpu.get_pipeline_model_parallel_world_size() if len(self._chunks) > 1 else 1
        return math.ceil(int(most) / stages) * stages

    def _run_forward(
        self, read: Iterator[Batch] | None, count: int
    ) -> list[tuple[Batch, Tensor, Tensor]]:
        """Run the micro-batches; return each batch, its positions and results on the last stage."""
        if not count:
            return []
        shared = SharedBatches(
            read,
            device=self._device,
            group=mpu.get_tensor_and_context_parallel_group(),
            host_group=self._host_group,
            feed=self._feed,
            chunks=len(self._chunks),
        )
        seen: list[tuple[Batch, Tensor]] = []

        def step(batches: Iterator[Batch], model: Qwen3VLModel) -> tuple[Tensor, None]:
            batch = next(batches)
            output, local = self._readout.compute(batch, model)
            if model.post_process:
                seen.append((batch, local))
            return output, None

        outputs = get_forward_backward_func()(
            forward_step_func=step,
            data_iterator=[shared.chunk(i) for i in range(len(self._chunks))],
            model=self._chunks,
            num_microbatches=count,
            seq_length=1,  # not used, because stages send the shapes
            micro_batch_size=1,
            forward_only=True,
        )
        return [(*pair, output) for pair, output in zip(seen, outputs, strict=True)]
