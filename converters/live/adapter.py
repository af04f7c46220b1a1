"""Save PEFT adapters from a running, sharded model of any layout."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import chain
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

from mcore_qwen3vl.converters.adapters.adapter import Factors
from mcore_qwen3vl.converters.adapters.config import AdapterConfig
from mcore_qwen3vl.converters.adapters.peft_model import EMBEDDING, HEAD, HFConfig, apply
from mcore_qwen3vl.converters.adapters.targets import specs
from mcore_qwen3vl.converters.adapters.write import write_adapter
from mcore_qwen3vl.converters.live.export import BUCKET_BYTES, Gatherer, Models, together
from mcore_qwen3vl.converters.live.factors import factor_parts
from mcore_qwen3vl.converters.live.sharded import Part, hf_parts, unwrap
from mcore_qwen3vl.converters.storage.boxes import Shape


def save_adapter(
    models: Models,
    path: str | Path,
    *,
    config: AdapterConfig,
    hf_config: HFConfig,
    force: bool = False,
    bucket_bytes: int = BUCKET_BYTES,
    group: dist.ProcessGroup | None = None,
) -> None:
    """Write a PEFT adapter directory: factors, and parameters trained whole, in the model's dtype.

    This is a collective. The first rank gathers everything in host memory and writes it. The
    directory appears complete or not at all.

    Args:
        models: the adapted model, or its virtual pipeline chunks.
        path: directory to write.
        config: the config that the model was adapted with.
        hf_config: the base model's ``config.json``: its content, the file or its directory.
        force: replace `path` if it is an adapter.
        bucket_bytes, group: as in :func:`mcore_qwen3vl.converters.live.export.export_hf`.

    Raises:
        BadInput: the first rank cannot write, or the ranks together do not hold the whole adapter;
            raised on every rank.
    """
    applied = apply(config, hf_config)
    targets = specs(applied)
    tied = unwrap(models)[0].architecture.tie_word_embeddings
    saved = {name: shape for name, shape in applied.saved.items() if not (tied and name == HEAD)}
    if tied and HEAD in applied.saved:
        saved[EMBEDDING] = applied.saved[HEAD]
    shapes: dict[str, Shape] = dict(saved)
    for name, spec in targets.items():
        shapes |= {f"{name}.lora_A": spec.a_shape, f"{name}.lora_B": spec.b_shape}
    tensors = _on_first(models, shapes, bucket_bytes, group)

    def write() -> None:
        if dist.get_rank(group) != 0:
            return
        factors = {
            name: Factors(
                tensors[f"{name}.lora_A"], tensors[f"{name}.lora_B"], spec.r, spec.scaling
            )
            for name, spec in targets.items()
        }
        whole = {name: tensors[name] for name in saved}
        write_adapter(path, config, factors, whole, hf_config, force=force)

    together(write, path, group)


def _on_first(
    models: Models,
    shapes: dict[str, Shape],
    bucket_bytes: int,
    group: dist.ProcessGroup | None,
) -> dict[str, Tensor]:
    """Return the whole tensors in host memory on the first rank, nothing on the others."""
    device = next(unwrap(models)[0].parameters()).device
    gatherer = Gatherer(_parts(models, shapes), shapes, device, group)
    tensors: dict[str, Tensor] = {}
    for bucket in gatherer.buckets(bucket_bytes):
        gathered = gatherer.gather(bucket, only=0)
        if dist.get_rank(group) == 0:
            tensors |= {name: tensor.to("cpu", copy=True) for name, tensor in gathered.items()}
    return tensors


def _parts(models: Models, shapes: dict[str, Shape]) -> Iterator[Part]:
    with torch.no_grad():
        for part in chain(hf_parts(models, expert_layout="v5"), factor_parts(models)):
            if part.name in shapes:
                yield part
