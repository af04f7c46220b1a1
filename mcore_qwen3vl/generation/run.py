"""Load a checkpoint of either kind under a layout and generate with it.

Prompts are read and checked before a process starts or a weight is loaded.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import torch
import torch.distributed as dist

from mcore_qwen3vl.config import Architecture
from mcore_qwen3vl.converters.adapters.adapter import Adapter, is_adapter
from mcore_qwen3vl.converters.adapters.read import read_adapter
from mcore_qwen3vl.converters.live.checkpoint import load_checkpoint
from mcore_qwen3vl.converters.live.load import load_hf
from mcore_qwen3vl.converters.mcore.formats import is_megatron
from mcore_qwen3vl.converters.mcore.paths import hf_folder, require_whole_model
from mcore_qwen3vl.converters.storage.dtypes import DTYPES
from mcore_qwen3vl.data.loading.loader import load_processor
from mcore_qwen3vl.errors import BadInput
from mcore_qwen3vl.generation.generate import (
    MAX_NEW_TOKENS,
    Generation,
    check_lengths,
    generate,
)
from mcore_qwen3vl.generation.prompts import Prompts, encode_prompts
from mcore_qwen3vl.generation.sampling import Sampler, load_generation_config
from mcore_qwen3vl.layout import Layout
from mcore_qwen3vl.model.build import build_chunks
from mcore_qwen3vl.model.lora.adapt import adapt
from mcore_qwen3vl.runtime.launch import run_layout
from mcore_qwen3vl.runtime.parallel import initialize

_DAY = 86400.0  # seconds; an answer may take long, and the user can interrupt it


@dataclass(frozen=True)
class Request:
    """What to generate, from which checkpoint, and how it is divided.

    Attributes:
        checkpoint: Megatron-Core or Hugging Face directory.
        conversations: as :func:`mcore_qwen3vl.generation.generate` takes them.
        layout: parallel sizes.
        spec: layer spec.
        dtype: of weights and computation; ``config``: what the checkpoint's config says.
        hf: directory with config, tokenizer and processor; None: the checkpoint's own.
        lora: PEFT adapter directory to answer with.
        options: its keyword arguments; `stream` is kept on the first rank alone.
    """

    checkpoint: Path
    conversations: Sequence[Any]
    layout: Layout = field(default_factory=Layout)
    spec: Any = "torch"
    dtype: Literal["config", "bf16", "fp16", "fp32"] = "config"
    hf: Path | None = None
    lora: Path | None = None
    options: dict[str, Any] = field(default_factory=dict)

    @property
    def hf_folder(self) -> Path:
        """Where config, tokenizer and processor are.

        Raises:
            BadInput: the checkpoint has none.
        """
        if is_adapter(self.checkpoint):
            raise BadInput(
                f"{self.checkpoint} is a LoRA adapter: `generate BASE --lora {self.checkpoint}`."
            )
        if is_megatron(self.checkpoint):
            require_whole_model(self.checkpoint)
        if self.hf is None and is_megatron(self.checkpoint):
            return hf_folder(self.checkpoint, flag="--hf-model")
        folder = self.hf or self.checkpoint
        if not (folder / "config.json").is_file():
            raise BadInput(f"{folder} has no config.json: name a checkpoint directory.")
        return folder


def run(request: Request, *, on_cpu: bool = False) -> list[Generation]:
    """Generate on all ranks of the layout: those of torchrun if it started us, or forked ones.

    Args:
        request: what to generate.
        on_cpu: without a GPU; the CPU backend must be installed.

    Raises:
        BadInput: see :func:`mcore_qwen3vl.generation.generate`; no GPU; or a layout that does not
            fit the model.
    """
    job = _Job.of(request)
    if not (on_cpu or torch.cuda.device_count()):
        raise BadInput("There is no GPU here: pass --cpu to generate on the CPU.")
    if "RANK" in os.environ:
        return _under_torchrun(job, on_cpu)
    if not on_cpu and torch.cuda.device_count() < request.layout.world_size:
        raise BadInput(
            f"Layout {request.layout} needs {request.layout.world_size} GPUs and this machine has "
            f"{torch.cuda.device_count()}: start it with torchrun on more machines, or divide less."
        )
    ranks = run_layout(
        job.on_rank, request.layout.world_size, timeout=_DAY, device="cpu" if on_cpu else "cuda"
    )
    return ranks[0]


def _under_torchrun(job: _Job, on_cpu: bool) -> list[Generation]:
    if not on_cpu:
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("gloo" if on_cpu else "nccl")
    try:
        return job.on_rank()
    finally:
        dist.destroy_process_group()


@dataclass(frozen=True)
class _Job:
    """A request, checked, with its prompts read; every rank is given the same."""

    request: Request
    architecture: Architecture
    processor: Any
    prompts: Prompts
    adapter: Adapter | None
    options: dict[str, Any]

    @classmethod
    def of(cls, request: Request) -> _Job:
        folder, layout = request.hf_folder, request.layout
        architecture = Architecture.from_hf(folder)
        layout.validate(architecture, training=False)
        for name, size in (("VPP", layout.vpp), ("CP", layout.cp)):
            if size > 1:
                raise BadInput(f"{name} is {size}, and generation has no use for it: drop {name}.")
        options = {"generation_config": load_generation_config(folder), **request.options}
        processor = load_processor(folder)
        prompts = encode_prompts(
            architecture,
            processor,
            request.conversations,
            multiple_of=layout.tp if layout.sp else 1,
        )
        check_lengths(architecture, prompts, options.get("max_new_tokens", MAX_NEW_TOKENS))
        Sampler(  # raises if a value cannot be used
            options["generation_config"],
            temperature=options.get("temperature"),
            top_p=options.get("top_p"),
            top_k=options.get("top_k"),
        )
        adapter = None if request.lora is None else read_adapter(request.lora, folder)
        return cls(request, architecture, processor, prompts, adapter, options)

    def on_rank(self) -> list[Generation]:
        """Build and load this rank's part and answer; ``torch.distributed`` is initialised."""
        request, options = self.request, self.options
        initialize(request.layout)
        dtype = {} if request.dtype == "config" else {"params_dtype": DTYPES[request.dtype]}
        models = build_chunks(self.architecture, request.layout, spec=request.spec, **dtype)
        load = load_checkpoint if is_megatron(request.checkpoint) else load_hf
        load(models, request.checkpoint)
        if self.adapter is not None:
            adapt(models, self.adapter)
        if dist.get_rank():
            options = {**options, "stream": None}
        return generate(models, self.processor, self.prompts, **options)
