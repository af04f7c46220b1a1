"""Load a checkpoint of either kind under a layout and generate with it."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from mcore_qwen3vl.config import Architecture
from mcore_qwen3vl.converters.megatron import is_megatron
from mcore_qwen3vl.errors import BadInput
from mcore_qwen3vl.runtime import cpu
from mcore_qwen3vl.runtime.launch import run_layout
from mcore_qwen3vl.runtime.parallel import Layout, initialize

_DAY = 86400.0  # seconds; an answer may take long, and the user can interrupt it


@dataclass(frozen=True)
class Request:
    """What to generate, from which checkpoint, and how it is divided.

    Attributes:
        checkpoint: Megatron-Core or Hugging Face directory.
        hf: directory with config, tokenizer and processor; None: the checkpoint's own.
        conversations: as :func:`mcore_qwen3vl.generation.generate` takes them.
        options: its keyword arguments; `stream` is kept on the first rank alone.
    """

    checkpoint: Path
    conversations: Sequence[Any]
    layout: Layout = field(default_factory=Layout)
    spec: Any = "torch"
    hf: Path | None = None
    options: dict[str, Any] = field(default_factory=dict)

    @property
    def hf_folder(self) -> Path:
        """Where config, tokenizer and processor are.

        Raises:
            BadInput: the checkpoint has none.
        """
        own = self.checkpoint / "hf" if is_megatron(self.checkpoint) else self.checkpoint
        folder = self.hf or own
        if not (folder / "config.json").is_file():
            raise BadInput(
                f"{folder} has no config.json: name a checkpoint directory, or pass --hf-model "
                "with the Hugging Face directory that the checkpoint came from."
            )
        return folder


def run(request: Request, *, on_cpu: bool = False) -> list[Any]:
    """Generate on all ranks of the layout: those of torchrun if it started us, or forked ones.

    Returns:
        The list of ``Generation``.

    Raises:
        BadInput: see :func:`mcore_qwen3vl.generation.generate`; no GPU; or a layout that does not
            fit the model.
    """
    architecture = Architecture.from_hf(request.hf_folder)
    request.layout.validate(architecture)
    if on_cpu:
        cpu.install()
    elif not torch.cuda.device_count():
        raise BadInput("There is no GPU here: pass --cpu to generate on the CPU.")
    if "RANK" in os.environ:
        return _under_torchrun(request, architecture, on_cpu)
    if not on_cpu and torch.cuda.device_count() < request.layout.world_size:
        raise BadInput(
            f"Layout {request.layout} needs {request.layout.world_size} GPUs and this machine has "
            f"{torch.cuda.device_count()}: start it with torchrun on more machines, or divide less."
        )
    ranks = run_layout(
        generate_on_rank,
        request.layout.world_size,
        request,
        architecture,
        timeout=_DAY,
        device="cpu" if on_cpu else "cuda",
    )
    return ranks[0]


def _under_torchrun(request: Request, architecture: Architecture, on_cpu: bool) -> list[Any]:
    if not on_cpu:
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("gloo" if on_cpu else "nccl")
    try:
        return generate_on_rank(request, architecture)
    finally:
        dist.destroy_process_group()


def generate_on_rank(request: Request, architecture: Architecture) -> list[Any]:
    """Build and load this rank's part and answer; ``torch.distributed`` is initialised."""
    # Here, because megatron must not be imported before the CPU backend is installed.
    from transformers import AutoProcessor

    from mcore_qwen3vl.converters.live import load_hf
    from mcore_qwen3vl.generation.generate import generate
    from mcore_qwen3vl.generation.sampling import load_generation_config
    from mcore_qwen3vl.parity.build import build_chunks
    from mcore_qwen3vl.runtime.checkpoint import load_checkpoint

    initialize(request.layout)
    models = build_chunks(architecture, request.layout, spec=request.spec)
    load = load_checkpoint if is_megatron(request.checkpoint) else load_hf
    load(models, request.checkpoint)
    options = {"generation_config": load_generation_config(request.hf_folder), **request.options}
    if dist.get_rank():
        options.pop("stream", None)
    processor = AutoProcessor.from_pretrained(request.hf_folder)
    return generate(models, processor, request.conversations, **options)
