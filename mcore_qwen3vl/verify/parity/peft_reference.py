"""PEFT's own model, the reference for an adapter's outputs and gradients."""

from __future__ import annotations

import re
import warnings
from pathlib import Path
from typing import Any

import torch

from mcore_qwen3vl.verify.parity.reference import Reference

_PREFIX = "base_model.model."


class PeftReference(Reference):
    """Hugging Face's model with a PEFT adapter, in which only the adapter has gradients.

    Args:
        path: checkpoint directory of the base model.
        adapter: PEFT adapter directory.
        dtype: dtype of weights and computation; factors stay float32, as in PEFT, unless this is
            float64.
        device: device that it runs on; results come back to the CPU.
    """

    def __init__(
        self,
        path: Path,
        adapter: Path,
        *,
        dtype: torch.dtype = torch.float32,
        device: str = "cpu",
    ) -> None:
        from peft import PeftModel

        super().__init__(path, dtype=dtype, device=device)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # about experts' rank patterns, which work
            self.model = PeftModel.from_pretrained(self.model, adapter, is_trainable=True)
        if dtype == torch.float64:
            self.model.double()
        self.model.eval()
        self._trained = trained_parameters(self.model)

    @property
    def network(self) -> Any:
        """The model inside PEFT's, with PEFT's wrappers in place of the adapted modules."""
        return self.model.base_model.model

    def trained(self) -> dict[str, torch.nn.Parameter]:
        """Return the factors as ``PARAMETER.lora_A`` and ``.lora_B``, and whole parameters."""
        return self._trained


def trained_parameters(model: Any) -> dict[str, torch.nn.Parameter]:
    """Return what trains in PEFT's model: ``PARAMETER.lora_A`` and ``.lora_B``, and the rest."""
    from peft.tuners.lora.layer import LoraLayer

    found: dict[str, torch.nn.Parameter] = {}
    factors = set()
    for path, layer in model.named_modules():
        if not isinstance(layer, LoraLayer):
            continue
        module = path.removeprefix(_PREFIX).replace(".base_layer", "")
        name = f"{module}.{getattr(layer, 'parameter_name', 'weight')}"
        for factor in ("lora_A", "lora_B"):
            parameter = getattr(layer, factor)["default"].weight
            found[f"{name}.{factor}"] = parameter
            factors.add(parameter)
    for path, parameter in model.named_parameters():
        if parameter.requires_grad and parameter not in factors:
            found[re.sub(r"\.modules_to_save\.default", "", path.removeprefix(_PREFIX))] = parameter
    return found
