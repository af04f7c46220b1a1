"""One training step under a layout, by Megatron's schedules and DDP, compared with HF."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from megatron.core import parallel_state as ps
from megatron.core.distributed import (
    DistributedDataParallel,
    DistributedDataParallelConfig,
    finalize_model_grads,
)
from megatron.core.pipeline_parallel import get_forward_backward_func
from torch import Tensor

from mcore_qwen3vl.layout import Layout
from mcore_qwen3vl.model.qwen3vl import Qwen3VLModel, build_chunks
from mcore_qwen3vl.runtime.launch import initialize, run_layout
from mcore_qwen3vl.verification.parity.on_rank import HEAD_CHUNK, logits_of
from tests.model import weights
from tests.model.reference import Expected, Reference
from tests.model.samples import MicroBatch

TOLERANCE = 2e-5
References = Callable[..., Reference]


@dataclass
class Case:
    """What to run; every DP rank has its own micro-batches."""

    layout: Layout
    reference: Reference
    batches: list[list[MicroBatch]]  # of each DP rank
    expected: Expected  # samples in the order of the batches
    overrides: dict[str, Any] = field(default_factory=dict)
    kind: Any = Qwen3VLModel  # the class of the chunks


@dataclass
class Errors:
    """Worst differences on one rank, relative to the largest value of the whole tensor."""

    logits: float = 0.0
    loss: float = 0.0
    gradient: float = 0.0
    where: str = ""


def run(case: Case, timeout: float = 40.0) -> Errors:
    """Return the worst errors of all ranks; every parameter of every rank is compared."""
    case.layout.validate(case.reference.architecture)
    ranks: list[Errors] = run_layout(step, case.layout.world_size, case, timeout=timeout)
    worst = max(ranks, key=lambda r: r.gradient)
    return Errors(
        max(r.logits for r in ranks), max(r.loss for r in ranks), worst.gradient, worst.where
    )


def check(case: Case) -> None:
    errors = run(case)
    assert errors.logits <= TOLERANCE, errors
    assert errors.loss <= TOLERANCE, errors
    assert errors.gradient <= TOLERANCE, errors


def build(case: Case) -> list[Qwen3VLModel]:
    initialize(case.layout)
    overrides = {"head_chunk": HEAD_CHUNK, **case.overrides}
    chunks = build_chunks(case.reference.architecture, case.layout, kind=case.kind, **overrides)
    for chunk in chunks:
        weights.load(chunk, case.reference.weights)
    return chunks


def wrap(chunks: Sequence[Qwen3VLModel]) -> list[DistributedDataParallel]:
    config = DistributedDataParallelConfig(grad_reduce_in_fp32=True)
    wrapped = [DistributedDataParallel(c.config, config, c) for c in chunks]
    for ddp in wrapped:
        ddp.zero_grad_buffer()
        ddp.config.finalize_model_grads_func = finalize_model_grads
    return wrapped


def step(case: Case) -> Errors:
    """Run forward and backward of all micro-batches on this rank, and compare the results."""
    chunks = build(case)
    logits, losses = train_step(case, wrap(chunks))
    errors = Errors()
    if logits:
        errors.logits = _compare_logits(case, chunks[-1], logits)
        errors.loss = abs(_total_loss(losses) - case.expected.loss) / case.expected.loss
    for chunk in chunks:
        for name, parameter in chunk.named_parameters():
            whole, part = weights.local(chunk, name, case.expected.gradients)
            assert whole.abs().max() > 1e-7, f"{name}: nothing to compare"
            error = float((parameter.main_grad - part).abs().max() / whole.abs().max())
            if not error <= errors.gradient:  # NaN too
                errors.gradient, errors.where = error, name
    return errors


def train_step(
    case: Case, model: list[DistributedDataParallel]
) -> tuple[list[Tensor], list[Tensor]]:
    """Return logits and losses of the micro-batches; both are empty before the last stage."""
    mine = case.batches[ps.get_data_parallel_rank()]
    logits: list[Tensor] = []
    losses: list[Tensor] = []
    last = model[-1].module
    if last.post_process:
        last.output_layer.register_forward_hook(
            lambda *call: logits.append(logits_of(*call)), with_kwargs=True
        )

    def forward_step(iterator: Any, chunk: DistributedDataParallel) -> Any:
        b: MicroBatch = next(iterator)
        output = chunk(
            b.input_ids,
            b.position_ids,
            b.attention_mask,
            labels=b.labels,
            visual=b.visual,
            packed_seq_params=b.packed_seq_params,
        )

        def loss_func(per_token: Tensor) -> Any:
            held = chunk.module.local_tokens(b.input_ids.shape[1], b.packed_seq_params)
            loss = (per_token * b.loss_mask[:, held]).sum() / case.expected.tokens
            losses.append(loss.detach().clone())
            # The schedule divides by the number of micro-batches, and DDP by that of DP ranks.
            return loss * len(mine) * case.layout.dp, {}

        return output, loss_func

    get_forward_backward_func()(
        forward_step_func=forward_step,
        data_iterator=[iter(mine) for _ in model] if len(model) > 1 else iter(mine),
        model=model if len(model) > 1 else model[0],
        num_microbatches=len(mine),
        seq_length=mine[0].input_ids.shape[1],
        micro_batch_size=mine[0].input_ids.shape[0],
        forward_only=False,
    )
    return logits, losses


def _total_loss(losses: list[Tensor]) -> float:
    total = torch.stack(losses).sum()
    torch.distributed.all_reduce(
        total, group=ps.get_data_parallel_group(with_context_parallel=True)
    )
    return float(total)


def _compare_logits(case: Case, model: Qwen3VLModel, logits: list[Tensor]) -> float:
    tp, rank = ps.get_tensor_model_parallel_world_size(), ps.get_tensor_model_parallel_rank()
    dp_rank = ps.get_data_parallel_rank()
    skip = sum(len(b.place) for other in case.batches[:dp_rank] for b in other)
    expected = iter(case.expected.logits[skip:])
    worst = 0.0
    for b, local in zip(case.batches[dp_rank], logits, strict=True):
        batch, length = b.input_ids.shape
        whole = torch.zeros(batch, length, case.reference.architecture.vocab_size)
        valid = torch.zeros(batch, length, dtype=torch.bool)
        for row, columns in b.place:
            whole[row, columns] = next(expected)
            valid[row, columns] = True
        held = model.local_tokens(length, b.packed_seq_params)
        want = whole[:, held].chunk(tp, -1)[rank]
        difference = (local.transpose(0, 1) - want)[valid[:, held]]
        assert difference.isfinite().all()
        if len(difference):
            worst = max(worst, float(difference.abs().max() / whole.abs().max()))
    return worst
