"""A checkpoint of either kind on all ranks of a layout, for commands that do not train."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import torch
import torch.distributed as dist

from mcore_qwen3vl import console
from mcore_qwen3vl.config import Architecture
from mcore_qwen3vl.converters.adapters.adapter import (
    Adapter,
    read_adapter,
    unused_of_adapter,
)
from mcore_qwen3vl.converters.identify import PathKind, identify
from mcore_qwen3vl.converters.live import load_weights
from mcore_qwen3vl.converters.mapping.forms import SCORE
from mcore_qwen3vl.converters.storage.dtypes import DTYPES
from mcore_qwen3vl.errors import BadInput
from mcore_qwen3vl.layout import Layout
from mcore_qwen3vl.model.lora import adapt
from mcore_qwen3vl.model.qwen3vl import Qwen3VLModel, build_chunks
from mcore_qwen3vl.runtime.launch import initialize, run_layout
from mcore_qwen3vl.unused.fields import Unused
from mcore_qwen3vl.unused.folder import unused_of

_WEEK = 7 * 86400.0  # seconds: a command may take long, and the user can interrupt it


@dataclass(frozen=True)
class ModelRequest:
    """The checkpoint that a command runs, and how.

    Attributes:
        dtype: dtype of weights and computation; ``config``: the dtype of the checkpoint's config.
        hf: directory with config, tokenizer and processor; None: the checkpoint's own.
        lora: PEFT adapter to run it with.
    """

    checkpoint: Path
    layout: Layout = field(default_factory=Layout, kw_only=True)
    spec: Any = field(default="torch", kw_only=True)
    dtype: Literal["config", "bf16", "fp16", "fp32"] = field(default="config", kw_only=True)
    hf: Path | None = field(default=None, kw_only=True)
    lora: Path | None = field(default=None, kw_only=True)


class CheckedModel:
    """A model that can be loaded under the requested layout; no weight has been read yet.

    Attributes:
        folder: folder with config, tokenizer and processor.
    """

    def __init__(self, request: ModelRequest, command: str, *, task: str | None = None) -> None:
        """Check a request; the task is that of :func:`read_adapter_for`.

        Raises:
            BadInput: the causes in :func:`hf_folder_of` and :func:`read_adapter_for`, or the layout
                does not fit the model.
        """
        self._request, self._place = request, identify(request.checkpoint)
        self.folder = hf_folder_of(request.checkpoint, request.hf, command)
        self.architecture = Architecture.from_hf(self.folder)
        request.layout.validate(self.architecture, training=False)
        self.adapter = read_adapter_for(request.lora, request.checkpoint, self.folder, task=task)

    @property
    def stages(self) -> int:
        """The number of pipeline stages."""
        return self._request.layout.pp

    def load(self, kind: type[Qwen3VLModel] = Qwen3VLModel, **overrides: Any) -> list[Qwen3VLModel]:
        """Build and load this rank's part; all ranks call it, with ``torch.distributed`` set up.

        A classifier's head may be in the adapter alone.
        """
        request = self._request
        initialize(request.layout)
        if request.dtype != "config":
            overrides["params_dtype"] = DTYPES[request.dtype]
        chunks = build_chunks(
            self.architecture, request.layout, spec=request.spec, kind=kind, **overrides
        )
        full_modules = () if self.adapter is None else self.adapter.saved
        load_weights(chunks, self._place, spare_value_head=SCORE in full_modules)
        if self.adapter is not None:
            adapt(chunks, self.adapter)
        return chunks


def unused_by(request: ModelRequest, command: str) -> list[Unused]:
    """Return what a command does not use of the checkpoint's files and of the adapter.

    Raises:
        BadInput: see :func:`hf_folder_of`, or a file cannot be read.
    """
    folder = hf_folder_of(request.checkpoint, request.hf, command)
    adapter = [] if request.lora is None else unused_of_adapter(request.lora, folder)
    return [*unused_of(folder), *adapter]


def hf_folder_of(checkpoint: Path, hf: Path | None, command: str) -> Path:
    """Return the folder with the config, tokenizer and processor of `checkpoint`.

    Raises:
        BadInput: the checkpoint has no such folder, or is a LoRA adapter.
    """
    place = identify(checkpoint)
    if place.kind is PathKind.ADAPTER:
        raise BadInput(f"{checkpoint} is a LoRA adapter: `{command} BASE --lora {place.folder}`.")
    place.require_whole()
    if place.kind is PathKind.MEGATRON:
        place.require_base()
    folder = hf or place.config(flag="--hf-model")
    if not (folder / "config.json").is_file():
        raise BadInput(f"{folder} has no config.json: name the model's directory with --hf-model.")
    return folder


def read_adapter_for(
    lora: Path | None, checkpoint: Path, folder: Path, *, task: str | None = None
) -> Adapter | None:
    """Read the adapter that a command uses with a checkpoint; warn if it names another base.

    `task` is the task of training whose output the command reads; None: predicting tokens.

    Raises:
        BadInput: see :func:`read_adapter`; the adapter holds a head for another task; or the
            checkpoint's manifest is damaged.
    """
    if lora is None:
        return None
    adapter = read_adapter(lora, folder)
    if adapter.labels is not None:
        several = len(adapter.labels) > 1
        used_by, model = ("classify", "classifier") if several else ("reward", "reward model")
        if task != used_by:
            raise BadInput(
                f"{lora} is the adapter of a {model}, whose head only `score --task {used_by}` "
                f"uses: `score {checkpoint} DATA --lora {lora} --task {used_by}`."
            )
    if os.environ.get("RANK", "0") == "0":
        for note in adapter.other_base_notes(checkpoint):
            console.messages.print(f"warning: {console.plain(note)}", soft_wrap=True)
    return adapter


def require_device(*, on_cpu: bool, purpose: str) -> None:
    """Raise BadInput if there is no GPU and the CPU is not to be used."""
    if not (on_cpu or torch.cuda.device_count()):
        raise BadInput(f"There is no GPU here: pass --cpu to {purpose} on the CPU.")


def on_all_ranks(on_rank: Callable[[], Any], layout: Layout, *, on_cpu: bool, purpose: str) -> Any:
    """Call `on_rank` on torchrun's ranks if torchrun started us, otherwise on ranks started here.

    In a program that has begun its process group already, the ranks are those of the group.

    The function must be picklable if it runs on GPUs; on the CPU the backend must be installed.

    Returns:
        What the first rank returned; under torchrun, what this rank returned.

    Raises:
        BadInput: there is no GPU, or there are too few.
    """
    if dist.is_initialized():
        return on_rank()
    require_device(on_cpu=on_cpu, purpose=purpose)
    if "RANK" in os.environ:
        if not on_cpu:
            torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
        dist.init_process_group("gloo" if on_cpu else "nccl")
        try:
            return on_rank()
        finally:
            dist.destroy_process_group()
    if not on_cpu and torch.cuda.device_count() < layout.world_size:
        raise BadInput(
            f"Layout {layout} needs {layout.world_size} GPUs and this machine has "
            f"{torch.cuda.device_count()}: start it with torchrun on more machines, or use a "
            "smaller layout."
        )
    device: Any = "cpu" if on_cpu else "cuda"
    return run_layout(on_rank, layout.world_size, timeout=_WEEK, device=device)[0]
