"""A LoRA adapter in memory, and what PEFT calls its tensors.

An adapter here has Hugging Face's parameter names and one convention for the factors of fused
experts, whatever wrote its file; `read` and `write` turn PEFT's directory into it and back.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from torch import Tensor

from mcore_qwen3vl.converters.adapters import config as config_file
from mcore_qwen3vl.converters.adapters.config import AdapterConfig
from mcore_qwen3vl.converters.adapters.peft_model import PREFIX, Applied
from mcore_qwen3vl.converters.adapters.roles import Roles
from mcore_qwen3vl.converters.storage.boxes import Shape

WEIGHTS = "adapter_model.safetensors"

BASE_LAYER = f"{PREFIX}lm_head.base_layer.weight"
"""PEFT stores the whole head beside its factors, when the head is a target."""

SHOWN = 3
"""Names in a message about many."""


@dataclass(frozen=True)
class Factors:
    """The low-rank update of one parameter: ΔW = `scaling` · B · A.

    Attributes:
        a: linear (r, in); fused experts (E*r, in), the rows of an expert together.
        b: linear (out, r); fused experts (out, r*E), the columns of an expert E apart.
        r: rank, of each expert for fused experts.
        scaling: lora_alpha / r, or / sqrt(r) with rsLoRA.
    """

    a: Tensor
    b: Tensor
    r: int
    scaling: float


@dataclass(frozen=True)
class Adapter:
    """An adapter as read.

    Attributes:
        config: its config.
        factors: by Hugging Face parameter, in the canonical roles (see `roles`).
        saved: parameters that it holds whole, by name; experts in the layout of transformers 5.
            One that has factors too is the base weight that they are added to.
        roles: those that the file has.
        notes: what a reader should know, one sentence each.
    """

    config: AdapterConfig
    factors: dict[str, Factors]
    saved: dict[str, Tensor]
    roles: Roles = "canonical"
    notes: tuple[str, ...] = ()

    def tensors(self) -> dict[str, Tensor]:
        """All factors, as ``PARAMETER.lora_A`` and ``PARAMETER.lora_B``."""
        named: dict[str, Tensor] = {}
        for name, factors in self.factors.items():
            named |= {f"{name}.lora_A": factors.a, f"{name}.lora_B": factors.b}
        return named


def is_adapter(path: Path) -> bool:
    """Whether `path` is a PEFT adapter directory, by its files' names."""
    return (path / config_file.FILE).is_file()


def whole_shape(name: str, applied: Applied) -> Shape:
    """The shape of a parameter that is stored whole."""
    return applied.saved[name] if name in applied.saved else applied.slots[name].base


def some(names: list[str]) -> str:
    """The first of many names, for a message."""
    more = f" and {len(names) - SHOWN} more" if len(names) > SHOWN else ""
    return ", ".join(name[:200] for name in names[:SHOWN]) + more
