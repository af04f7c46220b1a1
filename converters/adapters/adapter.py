"""A LoRA adapter in memory, and the names of its file and tensors in PEFT.

In memory an adapter has Hugging Face's parameter names and one convention for the factors of fused
experts, whatever wrote its file; `files` converts from and to PEFT's directory.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from torch import Tensor

from mcore_qwen3vl.converters.adapters import config as config_file
from mcore_qwen3vl.converters.adapters.config import AdapterConfig
from mcore_qwen3vl.converters.adapters.peft_model import PREFIX, Applied
from mcore_qwen3vl.converters.adapters.roles import Roles
from mcore_qwen3vl.converters.offline import manifest
from mcore_qwen3vl.converters.storage.boxes import Shape
from mcore_qwen3vl.labels import Labels

WEIGHTS = "adapter_model.safetensors"

BASE_LAYER = f"{PREFIX}lm_head.base_layer.weight"
"""Key of the whole head, which PEFT stores beside its factors if the head is a target."""

SHOWN = 3
"""The most names that a message lists."""


@dataclass(frozen=True)
class Factors:
    """The low-rank update of one parameter: ΔW = `scaling` · B · A.

    Attributes:
        a: linear (r, in); fused experts (E*r, in), with the rows of an expert adjacent.
        b: linear (out, r); fused experts (out, r*E), with the columns of an expert E apart.
        r: rank; for fused experts, the rank of each expert.
        scaling: lora_alpha / r, or lora_alpha / sqrt(r) with rsLoRA.
    """

    a: Tensor
    b: Tensor
    r: int
    scaling: float


@dataclass(frozen=True)
class Adapter:
    """An adapter as it was read.

    Attributes:
        factors: factors by Hugging Face parameter, in the canonical roles (see `roles`).
        saved: whole parameters in the adapter, by name; experts in the layout of transformers 5.
            A parameter that also has factors is the base weight that their product is added to.
        labels: labels of the classifier's head among `saved`; None: it has no such head.
    """

    config: AdapterConfig
    factors: dict[str, Factors]
    saved: dict[str, Tensor]
    roles: Roles = "canonical"
    notes: tuple[str, ...] = ()
    labels: Labels | None = None

    def tensors(self) -> dict[str, Tensor]:
        """Return all factors, as ``PARAMETER.lora_A`` and ``PARAMETER.lora_B``."""
        named: dict[str, Tensor] = {}
        for name, factors in self.factors.items():
            named |= {f"{name}.lora_A": factors.a, f"{name}.lora_B": factors.b}
        return named

    def other_base(self, base: Path) -> list[str]:
        """Return a note if the adapter names another model that is on this machine.

        The checkpoint that `base` was converted from is no other model.

        Raises:
            BadInput: its manifest is damaged.
        """
        named = self.config.raw.get("base_model_name_or_path")
        if not isinstance(named, str) or not Path(named).is_dir():
            return []
        converted = manifest.find(base)
        own = [base, *([Path(manifest.read(converted)["source"]["path"])] if converted else [])]
        if any(Path(named).samefile(one) for one in own if one.exists()):
            return []
        return [f"The adapter was trained on {named}, and is used with {base}."]


def is_adapter(path: Path) -> bool:
    """Return whether `path` is a PEFT adapter directory, judging by the names of its files."""
    return (path / config_file.FILE).is_file()


def whole_shape(name: str, applied: Applied) -> Shape:
    """Return the shape of a parameter that is stored whole."""
    return applied.saved[name] if name in applied.saved else applied.slots[name].base


def some(names: list[str]) -> str:
    """Return the first `SHOWN` names and the number of the others, for a message."""
    more = f" and {len(names) - SHOWN} more" if len(names) > SHOWN else ""
    return ", ".join(name[:200] for name in names[:SHOWN]) + more
