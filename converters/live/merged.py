"""Export Hugging Face tensors of an adapted model, with the adapter merged into copies."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import torch.distributed as dist
from torch import Tensor

from mcore_qwen3vl.config import ExpertLayout
from mcore_qwen3vl.converters.adapters.adapter import Factors
from mcore_qwen3vl.converters.adapters.peft_model import HEAD
from mcore_qwen3vl.converters.adapters.targets import TargetSpec
from mcore_qwen3vl.converters.adapters.update import add_update
from mcore_qwen3vl.converters.live.export import BUCKET_BYTES, Gatherer, Models
from mcore_qwen3vl.converters.live.factors import factor_parts
from mcore_qwen3vl.converters.live.sharded import unwrap
from mcore_qwen3vl.errors import BadInput


def export_merged(
    models: Models,
    targets: Mapping[str, TargetSpec],
    *,
    expert_layout: ExpertLayout | None = None,
    bucket_bytes: int = BUCKET_BYTES,
    group: dist.ProcessGroup | None = None,
) -> Iterator[tuple[str, Tensor]]:
    """Export like :func:`mcore_qwen3vl.converters.live.export.export_hf`, with s·B·A added.

    This is a collective. The update is added to the gathered tensors, so the model's weights do not
    change. Within float32 rounding, the result is that of ``lora merge`` with the adapter that
    ``save_adapter`` writes.

    Args:
        models: the adapted model, or its virtual pipeline chunks.
        targets: the adapted parameters of the whole model, as
            :func:`mcore_qwen3vl.converters.adapters.targets.resolve_targets` returns them.
        expert_layout: layout of the fused experts; vLLM reads only ``published``.
        bucket_bytes, group: as in ``export_hf``; a bucket's factors take memory besides.

    Yields:
        (name, tensor) in the model's dtype, on the model's device.

    Raises:
        BadInput: the head of tied embeddings is adapted; a sum is too large for the dtype; or the
            ranks do not hold the whole model and its factors.
    """
    chunks = unwrap(models)
    if chunks[0].architecture.tie_word_embeddings and HEAD in targets:
        raise BadInput(
            "The adapter changes the head, which is tied to the embedding, so one merged "
            "weight cannot serve as both. Export the adapter, and merge it with "
            "`mcore-qwen3vl lora merge`, which writes two tensors."
        )
    weights = Gatherer.of_model(models, expert_layout, group)
    shapes = {
        f"{name}.{factor}": shape
        for name, spec in targets.items()
        for factor, shape in (("lora_A", spec.a_shape), ("lora_B", spec.b_shape))
    }
    device = next(chunks[0].parameters()).device
    factors = Gatherer(factor_parts(models), shapes, device, group)
    layout = expert_layout or chunks[0].architecture.expert_layout
    for bucket in weights.buckets(bucket_bytes):
        tensors = weights.gather(bucket)
        updates = _gathered(factors, {name: targets[name] for name in bucket if name in targets})
        for name, update in updates.items():
            add_update(tensors[name], update, name, swapped=layout == "published")
        yield from tensors.items()


def _gathered(gatherer: Gatherer, targets: dict[str, TargetSpec]) -> dict[str, Factors]:
    """Return the whole factors of `targets`, on every rank."""
    names = [f"{name}.{factor}" for name in targets for factor in ("lora_A", "lora_B")]
    tensors = gatherer.gather(names) if names else {}
    return {
        name: Factors(tensors[f"{name}.lora_A"], tensors[f"{name}.lora_B"], spec.r, spec.scaling)
        for name, spec in targets.items()
    }
