"""A LoRA run: its base weights, the model that it builds, its checkpoints and its exports."""

from __future__ import annotations

import json
import warnings
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, TypedDict

import torch
import torch.distributed as dist
from megatron.core.utils import unwrap_model
from torch import Tensor

from mcore_qwen3vl.config import Architecture
from mcore_qwen3vl.converters.adapters.adapter import read_adapter
from mcore_qwen3vl.converters.adapters.config import (
    AdapterConfig,
    HFConfig,
    apply_with_peft,
    resolve_targets,
)
from mcore_qwen3vl.converters.export import save_adapter
from mcore_qwen3vl.converters.identify import ADAPTER_CONFIG, LORA_FOLDER, PathKind, identify
from mcore_qwen3vl.converters.live import hf_parts, initialize_factors, load_factors
from mcore_qwen3vl.converters.storage.dtypes import dtype_name
from mcore_qwen3vl.errors import BadInput
from mcore_qwen3vl.files import write_at_once
from mcore_qwen3vl.json_and_yaml import read_object_or_empty
from mcore_qwen3vl.model.freeze import Freezing
from mcore_qwen3vl.model.lora import (
    attach,
    load_saved,
    trained_names,
    whole_patterns,
    whole_tensors,
)
from mcore_qwen3vl.model.qwen3vl import Qwen3VLModel
from mcore_qwen3vl.settings.lora import LoraSettings
from mcore_qwen3vl.training.arguments.settings import Settings
from mcore_qwen3vl.training.parameter_counts import trained_parameters
from mcore_qwen3vl.training.second_model import start_from

BASE_FILE = "base.json"

_INTEGERS = {2: torch.int16, 4: torch.int32}


class Identity(TypedDict):
    """Identifies base weights by the sum of their bits, which is the same under every layout."""

    path: str
    dtype: str
    sum: int


class Base:
    """The weights that a LoRA run leaves as they are: --load-hf or --pretrained-checkpoint."""

    def __init__(self, path: str | None) -> None:
        self.path = path
        self._sum: Tensor | None = None
        self._dtype = ""
        self._total: int | None = None

    def load(self, chunk: Qwen3VLModel) -> None:
        """Fill a pipeline chunk, which has no adapter yet."""
        if self.path is None:
            return
        start_from([chunk], self.path)
        weights = next(chunk.parameters())
        if self._sum is None:
            self._sum = torch.zeros((), dtype=torch.int64, device=weights.device)
            self._dtype = dtype_name(weights.dtype)
        for part in hf_parts(chunk):
            if part.main:  # copies on other ranks are not counted
                # The sum of the bits as integers does not depend on the order.
                bits = part.local.view(_INTEGERS[part.local.element_size()])
                self._sum += bits.sum(dtype=torch.int64)

    def identity(self) -> Identity | None:
        """Return what identifies these weights, or None if none were read; a collective."""
        if self.path is None or self._sum is None:
            return None
        if self._total is None:
            dist.all_reduce(self._sum)  # in place, so only in the first call
            self._total = int(self._sum)
        return Identity(path=str(self.path), dtype=self._dtype, sum=self._total)

    def check(self, folder: Path) -> None:
        """Raise BadInput if the checkpoints by `folder` had other base weights; a collective."""
        mine, file = self.identity(), folder / BASE_FILE
        if mine is None or not file.is_file():
            return
        theirs = read_object_or_empty(file)
        if lacks := mine.keys() - theirs.keys():
            raise BadInput(f"{file} is damaged: it has no {min(lacks)}. Copy it again.")
        if theirs["dtype"] == mine["dtype"] and theirs["sum"] != mine["sum"]:
            raise BadInput(
                f"{folder.parent} was trained with the base weights of {theirs['path']}, and "
                f"{mine['path']} has others: give the same base, or choose another --save."
            )


class LoraRun:
    """A LoRA run as its flags describe it.

    Args:
        settings: the adapter's.
        architecture: the model's shape.
        model: the model's config.
        base: the checkpoint of the weights that the run leaves as they are, if it reads any.
        scored_by: the task, of a model that gives records a score; None: it predicts tokens.
        seed: of the factors' initial values, which are the same under every layout.

    Attributes:
        config: the adapter's config.
        targets: the matrices that it adapts, of the whole model.
        parameters: number of trained parameters, in the whole model.

    Raises:
        BadInput: flags contradict one another or the model; or ``--lora-init`` cannot be read.
    """

    def __init__(
        self,
        settings: LoraSettings,
        architecture: Architecture,
        model: HFConfig,
        *,
        base: str | None,
        scored_by: str | None,
        seed: int,
    ) -> None:
        self._seed = seed
        self.base = Base(base)
        config = settings.adapter_config(architecture, scored_by)
        named = config.raw.get("base_model_name_or_path") or self.base.path
        self.config = replace(config, raw={**config.raw, "base_model_name_or_path": named})
        self._model = model
        self.targets = resolve_targets(self.config, model)
        self._saved = apply_with_peft(self.config, model).saved
        tied = architecture.tie_word_embeddings
        self.parameters = trained_parameters(self.targets, self._saved, tied=tied).total()
        self._start = read_adapter(settings.lora_init, model) if settings.lora_init else None
        self._refuse_undeclared(settings.lora_init)
        if self._start is not None and self.base.path and Path(self.base.path).exists():
            for note in self._start.other_base_notes(Path(self.base.path)):
                warnings.warn(note, stacklevel=2)  # shown by the first rank

    def _refuse_undeclared(self, source: str | None) -> None:
        """Raise BadInput if the adapter to start from holds embeddings that would not be saved."""
        held = set() if self._start is None else set(self._start.saved)
        if undeclared := held - set(self._saved) - set(self.targets):
            raise BadInput(
                f"--lora-init {source} holds {', '.join(sorted(undeclared))}, which its config "
                "does not name in modules_to_save: this run would neither train nor export it. "
                "Merge the adapter into its base first: `mcore-qwen3vl lora merge`."
            )

    @classmethod
    def from_settings(cls, settings: Settings, architecture: Architecture) -> LoraRun | None:
        """Build the LoRA run that the flags describe; None if no flag asks for LoRA."""
        if not settings.lora.trains_adapter:
            return None
        return cls(
            settings.lora,
            architecture,
            settings.hf_config,
            base=settings.start,
            scored_by=settings.loss.scored_by,
            seed=settings.loop.seed,
        )

    def adapt(self, chunk: Qwen3VLModel, choice: Freezing) -> None:
        """Add the adapter to a chunk that has the base weights; a resume loads its values later.

        `choice`, of :func:`mcore_qwen3vl.model.lora.adapter_freezing`, is the same for all
        chunks, and is applied to each afterwards.
        """
        attach(chunk, self.targets, dropout=self.config.lora_dropout)
        if self._start is None:
            initialize_factors(chunk, self._seed)
        else:
            load_factors(chunk, self._start.factors)
            load_saved([chunk], whole_tensors(self._start))
        choice.add_trainable(whole_patterns(chunk, self._saved))

    def export(self, model: Any, folder: Path, files: Mapping[str, bytes] = {}) -> None:
        """Write a PEFT adapter directory with these further files; a collective."""
        save_adapter(
            model, folder, config=self.config, hf_config=self._model, force=True, files=files
        )

    def save_config(self, save: str) -> None:
        """Write what :func:`check_checkpoint` reads, beside the checkpoints; a collective."""
        identity = self.base.identity()
        if dist.get_rank() != 0:
            return
        folder = Path(save) / LORA_FOLDER
        folder.mkdir(parents=True, exist_ok=True)
        if identity is not None:
            write_at_once(folder / BASE_FILE, json.dumps(identity, indent=2) + "\n")
        # Last, because a resumed run asks for it first.
        write_at_once(folder / ADAPTER_CONFIG, self.config.to_json() + "\n")


def keep_trained(original: Any, args: Any, model: Any, *rest: Any, **kwargs: Any) -> dict[str, Any]:
    """Replace ``generate_state_dict``: keep a chunk's trained entries, to save and load."""
    state: dict[str, Any] = original(args, model, *rest, **kwargs)
    for number, chunk in enumerate(unwrap_model(model)):
        key = "model" if len(model) == 1 else f"model{number}"
        names = trained_names(chunk)
        state[key] = {name: entry for name, entry in state[key].items() if name in names}
    return state


def check_checkpoint(load: str | None, lora: LoraRun | None) -> None:
    """Raise BadInput if `load` has checkpoints of another run, adapter or base; a collective."""
    if load is None or identify(load).kind is not PathKind.MEGATRON:
        return
    file = Path(load) / LORA_FOLDER / ADAPTER_CONFIG
    if lora is None:
        if file.exists():
            raise BadInput(
                f"{load} holds the checkpoints of a LoRA run: add its --lora flags, or "
                f"--lora-config {file}."
            )
        return
    if not file.exists():
        raise BadInput(
            f"{load} holds checkpoints of a whole model, not of an adapter: give it as "
            "--pretrained-checkpoint, with another --save."
        )
    there = AdapterConfig.from_file(file)
    if _deciding_fields(there) != _deciding_fields(lora.config):
        raise BadInput(
            f"{load} was trained with another adapter config than the flags give: resume "
            f"with --lora-config {file}, or choose another --save."
        )
    lora.base.check(file.parent)


def _deciding_fields(config: AdapterConfig) -> tuple[Any, ...]:
    """Return the fields that decide which values a checkpoint has, and what they mean."""
    ordered = (
        tuple(sorted(value)) if isinstance(value, tuple) else value
        for value in (config.target_modules, config.target_parameters, config.modules_to_save)
    )
    patterns = (tuple(sorted(p.items())) for p in (config.rank_pattern, config.alpha_pattern))
    return (
        config.r,
        config.lora_alpha,
        config.use_rslora,
        *ordered,
        *patterns,
        config.exclude_modules,
        config.layers_to_transform,
    )
