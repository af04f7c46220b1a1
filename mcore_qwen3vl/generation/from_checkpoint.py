"""Generation with a checkpoint of either kind under a layout.

Prompts are read and checked before a process starts or a weight is loaded.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Literal

import torch.distributed as dist

from mcore_qwen3vl.config import Architecture
from mcore_qwen3vl.converters.adapters.adapter import Adapter
from mcore_qwen3vl.data.loader import load_processor
from mcore_qwen3vl.errors import BadInput
from mcore_qwen3vl.generation.decoding import Sampler, load_generation_config
from mcore_qwen3vl.generation.generate import MAX_NEW_TOKENS, Generation, check_lengths, generate
from mcore_qwen3vl.generation.prompts import Prompts, encode_prompts
from mcore_qwen3vl.inference import adapter_for, hf_folder_of, load_chunks, on_all_ranks
from mcore_qwen3vl.layout import Layout


@dataclass(frozen=True)
class Request:
    """The conversations to answer, the checkpoint and the settings.

    Attributes:
        conversations: conversations in the form of :func:`mcore_qwen3vl.generation.generate`.
        dtype: dtype of weights and computation; ``config``: the dtype of the checkpoint's config.
        hf: directory with config, tokenizer and processor; None: the checkpoint's own.
        options: keyword arguments of :func:`mcore_qwen3vl.generation.generate`; only the first rank
            uses `stream`.
    """

    checkpoint: Path
    conversations: Sequence[Any]
    layout: Layout = field(default_factory=Layout)
    spec: Any = "torch"
    dtype: Literal["config", "bf16", "fp16", "fp32"] = "config"
    hf: Path | None = None
    lora: Path | None = None
    options: dict[str, Any] = field(default_factory=dict)


def run(request: Request, *, on_cpu: bool = False) -> list[Generation]:
    """Generate on all ranks: torchrun's if torchrun started us, otherwise ranks started here.

    Raises:
        BadInput: the causes in :func:`mcore_qwen3vl.generation.generate`, no GPU, or a layout that
            does not fit the model.
    """
    job = _checked(request)
    answers: list[Generation] = on_all_ranks(job, request.layout, on_cpu=on_cpu, purpose="generate")
    return answers


def _checked(request: Request) -> Callable[[], list[Generation]]:
    """Check a request and read its prompts; return what each rank calls."""
    folder, layout = hf_folder_of(request.checkpoint, request.hf, "generate"), request.layout
    architecture = Architecture.from_hf(folder)
    layout.validate(architecture, training=False)
    for name, size in (("VPP", layout.vpp), ("CP", layout.cp)):
        if size > 1:
            raise BadInput(f"{name} is {size}, but generation does not use it: drop {name}.")
    options = {"generation_config": load_generation_config(folder), **request.options}
    processor = load_processor(folder)
    multiple = layout.tp if layout.sp else 1
    prompts = encode_prompts(architecture, processor, request.conversations, multiple_of=multiple)
    check_lengths(architecture, prompts, options.get("max_new_tokens", MAX_NEW_TOKENS))
    sampling: dict[str, Any] = {
        name: options.get(name) for name in ("temperature", "top_p", "top_k")
    }
    Sampler(options["generation_config"], **sampling)  # raises if a value cannot be used
    adapter = adapter_for(request.lora, request.checkpoint, folder)
    return partial(_on_rank, request, architecture, processor, prompts, adapter, options)


def _on_rank(
    request: Request,
    architecture: Architecture,
    processor: Any,
    prompts: Prompts,
    adapter: Adapter | None,
    options: dict[str, Any],
) -> list[Generation]:
    """Load this rank's part of the model and answer, with ``torch.distributed`` initialised."""
    models = load_chunks(
        request.checkpoint,
        architecture,
        request.layout,
        spec=request.spec,
        dtype=request.dtype,
        adapter=adapter,
    )
    if dist.get_rank():
        options = {**options, "stream": None}
    return generate(models, processor, prompts, **options)
