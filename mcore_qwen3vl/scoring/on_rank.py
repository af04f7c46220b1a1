"""Scoring on a rank: micro-batches go through Megatron's schedule, results to the first rank."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from functools import reduce
from operator import or_
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state as mpu
from megatron.core.pipeline_parallel import get_forward_backward_func
from torch import Tensor

from mcore_qwen3vl.data.encoding.batch import Batch
from mcore_qwen3vl.model.qwen3vl import Qwen3VLModel
from mcore_qwen3vl.scoring.readouts import Readout, Results
from mcore_qwen3vl.scoring.records import Found, Records
from mcore_qwen3vl.training.broadcast.batches import SharedBatches
from mcore_qwen3vl.training.broadcast.groups import StageFeed, host_group, reads, stages_group


class Scorer:
    """A scorer with this rank's part of the model and of the data.

    Args:
        records: function that opens the records; only ranks that read data call it.
    """

    def __init__(
        self,
        chunks: Sequence[Qwen3VLModel],
        records: Callable[[], Records],
        readout: Readout,
    ) -> None:
        self._chunks = list(chunks)
        for chunk in self._chunks:
            chunk.eval()
        self._readout = readout
        self._records = records() if reads() else None
        self._host_group, stages = host_group(), stages_group()
        self._feed = StageFeed(stages, 0) if stages else None
        self._device = next(self._chunks[0].parameters()).device

    @torch.no_grad()
    def block(self, records: Sequence[int]) -> Found | None:
        """Score `records` on all ranks; return all results on the first rank, None on others."""
        rank, ranks = mpu.get_data_parallel_rank(), mpu.get_data_parallel_world_size()
        mine = records[rank::ranks]
        micros = [] if self._records is None else self._records.plan(mine)
        count = self._agree(len(micros))
        read = None if self._records is None else self._records.batches(micros, count)
        outputs = self._forward(read, count)
        found = Found() if self._records is None else self._records.take_found()
        found.scores = self._gathered(outputs)
        everyone: list[Any] | None = [None] * dist.get_world_size() if not dist.get_rank() else None
        dist.gather_object(found, everyone)
        return None if everyone is None else reduce(or_, everyone)

    def _agree(self, own: int) -> int:
        """Return how many micro-batches all replicas run: the most of any, rounded up for VPP."""
        most = torch.tensor(own, device=self._device)
        dist.all_reduce(most, op=dist.ReduceOp.MAX)
        stages = mpu.get_pipeline_model_parallel_world_size() if len(self._chunks) > 1 else 1
        return math.ceil(int(most) / stages) * stages

    def _forward(
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
            output, local = self._readout.run(batch, model)
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
        return [(*one, output) for one, output in zip(seen, outputs, strict=True)]

    def _gathered(self, outputs: list[tuple[Batch, Tensor, Tensor]]) -> Results:
        """Return scores by name, on the first rank of every last stage's TP x CP group."""
        scores: Results = {}
        for batch, local, output in outputs:
            scores |= self._readout.results(batch, local, output)
        return scores
