"""The CPU backend replaces existing functions, refuses untested versions, and is idempotent."""

from __future__ import annotations

import importlib
import inspect
import re
import sys
from types import ModuleType
from typing import Any

import pytest
import torch

from mcore_qwen3vl.errors import BadInput
from mcore_qwen3vl.runtime import cpu
from mcore_qwen3vl.runtime.launch import run_layout

DEVICE = cpu.DEVICE_REPLACEMENTS
ALL = cpu.TORCH_REPLACEMENTS + cpu.MEGATRON_REPLACEMENTS + cpu.TRAINING_REPLACEMENTS


def owner(module: str) -> Any:
    return torch.Tensor if module == "torch.Tensor" else importlib.import_module(module)


@pytest.mark.parametrize("r", DEVICE + ALL, ids=lambda r: f"{r.module}.{r.name}")
def test_canary_every_replaced_symbol_exists_and_is_replaced(r: cpu.Replacement) -> None:
    original = cpu.originals[r.module, r.name]
    current = getattr(owner(r.module), r.name)
    assert callable(original)
    assert current is not original
    assert r.reason


@pytest.mark.parametrize(
    "r",
    [  # torch.Tensor's are C functions without a signature
        r for r in ALL if not inspect.isclass(r.make(None)) and r.module != "torch.Tensor"
    ],
    ids=lambda r: f"{r.module}.{r.name}",
)
def test_a_replacement_takes_the_arguments_of_the_original(r: cpu.Replacement) -> None:
    original = inspect.signature(cpu.originals[r.module, r.name]).parameters.values()
    replacement = getattr(importlib.import_module(r.module), r.name)
    current = inspect.signature(replacement, follow_wrapped=False).parameters
    required = [p for p in original if p.default is p.empty and p.kind is not p.VAR_KEYWORD]
    assert len(required) <= len(current)
    named = [p.name for p in original if p.name in current]
    assert named == [name for name in current if name in named], "arguments in another order"


def test_a_vanished_symbol_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    module = ModuleType("gone")
    monkeypatch.setitem(sys.modules, "gone", module)
    with pytest.raises(BadInput, match=r"gone.away does not exist.*it was needed"):
        cpu.apply([cpu.Replacement("gone", "away", lambda original: None, "it was needed")])


def test_installing_twice_changes_nothing() -> None:
    from megatron.training import training

    before = torch.cuda.current_device, training.initialize_megatron
    cpu.install()
    cpu.install(training=True)
    assert cpu.is_installed()
    assert (torch.cuda.current_device, training.initialize_megatron) == before


def test_it_must_come_before_megatron(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cpu, "originals", {})  # as if it had not been installed
    monkeypatch.setitem(sys.modules, "megatron.core.parallel_state", ModuleType("x"))
    before = torch.cuda.current_device
    with pytest.raises(BadInput, match="must be installed before megatron is imported"):
        cpu.install()
    assert torch.cuda.current_device is before
    assert not cpu.is_installed()


def test_cuda_means_the_cpu() -> None:
    assert torch.zeros(2, device="cuda").device.type == "cpu"
    assert torch.zeros(2).cuda().to("cuda:0").device.type == "cpu"
    assert torch.zeros(2).to(torch.device("cuda", 1), torch.float64).dtype == torch.float64
    assert torch.zeros(2).new_ones(3, device="cuda").device.type == "cpu"
    assert torch.nn.Linear(2, 3, device="cuda").to("cuda").weight.device.type == "cpu"
    assert torch.zeros(2).type() == "torch.cuda.FloatTensor"
    assert torch.zeros(2).type(torch.float64).dtype == torch.float64


def test_every_function_that_makes_tensors_is_known() -> None:
    """They are those that torch itself lists, from before they were replaced."""
    from torch.utils._device import _device_constructors

    known = {r.name for r in cpu.DEVICE_REPLACEMENTS}
    unknown = {maker.__name__ for maker in _device_constructors()} - known
    rare = re.compile("sparse|quantized|nested|window|fft|range|permuted|scalar")
    assert not [name for name in unknown if not rare.search(name)]
    assert cpu.originals["torch", "empty"] in _device_constructors()


def test_other_devices_are_left_alone() -> None:
    assert torch.empty(2, device="meta").device.type == "meta"
    with torch.device("meta"):
        assert torch.empty(2).device.type == "meta"
        assert torch.nn.Linear(2, 3).weight.device.type == "meta"


def _gather_uneven() -> list[torch.Tensor]:
    rank = torch.distributed.get_rank()
    parts = [torch.zeros(3, 2), torch.zeros(1, 2)]
    torch.distributed.all_gather(parts, torch.full((3 - 2 * rank, 2), float(rank + 1)))
    return parts


def test_parts_of_unequal_length_are_gathered() -> None:
    for first, second in run_layout(_gather_uneven, 2):
        assert torch.equal(first, torch.full((3, 2), 1.0))
        assert torch.equal(second, torch.full((1, 2), 2.0))
