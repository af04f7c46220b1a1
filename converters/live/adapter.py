"""Save or merge the adapter of a running, sharded model of any layout."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import chain
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

from mcore_qwen3vl.config import ExpertLayout
from mcore_qwen3vl.converters.adapters.adapter import Factors, add_update
from mcore_qwen3vl.converters.adapters.config import AdapterConfig
from mcore_qwen3vl.converters.adapters.files import write_adapter
from mcore_qwen3vl.converters.adapters.peft_model import HFConfig, Slot, apply
from mcore_qwen3vl.converters.live.export import BUCKET_BYTES, Gatherer, together
from mcore_qwen3vl.converters.live.sharded import Models, factor_parts, hf_parts, unwrap
from mcore_qwen3vl.converters.mapping.forms import INPUT_EMBEDDING, LM_HEAD
from mcore_qwen3vl.converters.storage.boxes import Shape
from mcore_qwen3vl.errors import BadInput


def save_adapter(
    models: Models,
    path: str | Path,
    *,
    config: AdapterConfig,
    hf_config: HFConfig,
    force: bool = False,
) -> None:
    """Write a PEFT adapter directory: factors, and parameters trained whole, in the model's dtype.

    This is a collective. The first rank gathers everything in host memory and writes it. The
    directory appears complete or not at all.

    Args:
        hf_config: the base model's ``config.json``: its content, the file or its directory.
        force: replace `path` if it is an adapter.

    Raises:
        BadInput: the first rank cannot write, or the ranks together do not hold the whole adapter;
            raised on every rank.
    """
    applied = apply(config, hf_config)
    targets = applied.slots
    tied = unwrap(models)[0].architecture.tie_word_embeddings
    saved = {name: shape for name, shape in applied.saved.items() if not (tied and name == LM_HEAD)}
    if tied and LM_HEAD in applied.saved:
        saved[INPUT_EMBEDDING] = applied.saved[LM_HEAD]
    tensors = _on_first(models, saved | _factor_shapes(targets))

    def write() -> None:
        if dist.get_rank() != 0:
            return
        whole = {name: tensors[name] for name in saved}
        factors = _factors(tensors, targets)
        write_adapter(path, config, factors, whole, hf_config, force=force)

    together(write, path)


def _on_first(models: Models, shapes: dict[str, Shape]) -> dict[str, Tensor]:
    """Return the whole tensors in host memory on the first rank, nothing on the others."""
    with torch.no_grad():
        parts = chain(hf_parts(models, expert_layout="v5"), factor_parts(models))
        gatherer = Gatherer(models, (part for part in parts if part.name in shapes), shapes)
    tensors: dict[str, Tensor] = {}
    for bucket in gatherer.buckets(BUCKET_BYTES):
        gathered = gatherer.gather(bucket, only=0)
        if dist.get_rank() == 0:
            tensors |= {name: tensor.to("cpu", copy=True) for name, tensor in gathered.items()}
    return tensors


def export_merged(
    models: Models,
    targets: Mapping[str, Slot],
    *,
    expert_layout: ExpertLayout | None = None,
    bucket_bytes: int = BUCKET_BYTES,
) -> Iterator[tuple[str, Tensor]]:
    """Export like :func:`mcore_qwen3vl.converters.live.export.export_hf`, with s·B·A added.

    This is a collective. The update is added to the gathered tensors, so the model's weights do not
    change. Within float32 rounding, the result is that of ``lora merge`` with the adapter that
    ``save_adapter`` writes.

    Args:
        targets: the adapted parameters of the whole model, as
            :func:`mcore_qwen3vl.converters.adapters.targets.resolve_targets` returns them.
        expert_layout: layout of the fused experts; vLLM reads only ``published``.
        bucket_bytes: as in ``export_hf``; a bucket's factors take memory besides.

    Yields:
        (name, tensor) in the model's dtype, on the model's device.

    Raises:
        BadInput: the head of tied embeddings is adapted; a sum is too large for the dtype; or the
            ranks do not hold the whole model and its factors.
    """
    chunks = unwrap(models)
    if chunks[0].architecture.tie_word_embeddings and LM_HEAD in targets:
        raise BadInput(
            "The adapter changes the head, which is tied to the embedding, so one merged "
            "weight cannot serve as both. Export the adapter, and merge it with "
            "`mcore-qwen3vl lora merge`, which writes two tensors."
        )
    weights = Gatherer.of_model(models, expert_layout)
    gatherer = Gatherer(models, factor_parts(models), _factor_shapes(targets))
    layout = expert_layout or chunks[0].architecture.expert_layout
    for bucket in weights.buckets(bucket_bytes):
        tensors = weights.gather(bucket)
        adapted = {name: targets[name] for name in bucket if name in targets}
        names = list(_factor_shapes(adapted))
        updates = _factors(gatherer.gather(names) if names else {}, adapted)
        for name, update in updates.items():
            add_update(tensors[name], update, name, swapped=layout == "published")
        yield from tensors.items()


def _factor_shapes(targets: Mapping[str, Slot]) -> dict[str, Shape]:
    """Return the shapes of the factors, by the names that `factor_parts` gives them."""
    return {
        f"{name}.{factor}": shape
        for name, spec in targets.items()
        for factor, shape in (("lora_A", spec.a_shape), ("lora_B", spec.b_shape))
    }


def _factors(tensors: Mapping[str, Tensor], targets: Mapping[str, Slot]) -> dict[str, Factors]:
    return {
        name: Factors(tensors[f"{name}.lora_A"], tensors[f"{name}.lora_B"], spec.r, spec.scaling)
        for name, spec in targets.items()
    }
