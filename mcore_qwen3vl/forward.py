"""A micro-batch through a pipeline chunk, as losses, training and scoring run it."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from megatron.core.utils import get_attr_wrapped_model
from torch import Tensor

from mcore_qwen3vl.data.encoding.batch import Batch
from mcore_qwen3vl.memory_labels import label_module
from mcore_qwen3vl.model.decoder.attention import PackedSequence
from mcore_qwen3vl.model.inputs import to_device

label_module(__file__, "logits and loss")

RunBatch = Callable[..., tuple[Tensor, Tensor]]
"""A function with the arguments and results of :func:`forward`."""


def forward(
    batch: Batch,
    model: torch.nn.Module,
    *,
    plan: bool = False,
    processor: Callable[..., Tensor] | None = None,
    **options: Any,
) -> tuple[Tensor, Tensor]:
    """Run one micro-batch through one pipeline chunk, wrapped or not.

    Args:
        plan: only build the plan of :meth:`.Qwen3VLModel.build_schedule_plan`, and return it in
            place of the output.
        processor: computes what the last stage returns: Megatron's ``output_processor``, with the
            batch and the chunk before its own arguments.
        options: passed to :class:`~mcore_qwen3vl.model.qwen3vl.Qwen3VLModel`.

    Returns:
        The chunk's output, which for the last chunk is (B, s) cross entropies unless `options` say
        otherwise; and the (s,) int64 positions of this rank.
    """
    chunk = get_attr_wrapped_model(model, "local_tokens", return_model_obj=True)
    has_lm_head = chunk.post_process and chunk.head_labels is None
    packing = _packed_sequence(batch)
    if processor is not None:
        options["output_processor"] = partial(processor, batch, chunk)
    output = (chunk.build_schedule_plan if plan else model)(
        batch.input_ids,
        batch.position_ids,
        padding_mask=batch.padding_mask,
        # -100 becomes 0, a column that exists: the loss weights alone decide what counts.
        labels=batch.labels.clamp(min=0) if has_lm_head else None,
        visual=batch.visual,
        packed_seq_params=packing,
        **options,
    )
    return output, chunk.local_tokens(batch.input_ids.shape[1], packing)


def _packed_sequence(batch: Batch) -> PackedSequence | None:
    """Return the sub-sequences' bounds, on the device for kernels and on the host for shapes."""
    if batch.cu_seqlens is None:
        return None
    bounds = to_device(batch.cu_seqlens, batch.input_ids.device)
    return PackedSequence(
        qkv_format="thd",
        cu_seqlens_q=bounds,
        cu_seqlens_kv=bounds,
        max_seqlen_q=batch.max_seqlen,
        max_seqlen_kv=batch.max_seqlen,
        bounds=tuple(batch.cu_seqlens.tolist()),
    )
