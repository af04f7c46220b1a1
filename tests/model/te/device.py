"""Transformer Engine's modules on the CPU, with torch in place of kernels and CUDA queries.

The Python of Transformer Engine, and of Megatron-Core's extension for it, runs unchanged: modules,
autograd functions, sequence parallelism, ring attention, the choice of an attention backend. Only
what the compiled extension and the Triton kernels compute (:mod:`tests.model.te.kernels`), and
the answers that CUDA gives, are replaced.
"""

from __future__ import annotations

import contextlib
import sys
import types
from dataclasses import replace
from typing import Any

import torch
from megatron.core.tensor_parallel import random as tp_random

from mcore_qwen3vl.runtime import cpu

HOPPER = types.SimpleNamespace(major=9, minor=0, multi_processor_count=132, name="H100")
"""The GPU that Transformer Engine is told it runs on."""
CUDNN, CUBLASLT = 91900, 130100
"""The versions that it is told of: those of torch 2.11."""


class _Instead(types.ModuleType):
    """A module with other values for some of its names."""

    def __init__(self, module: Any, **names: Any) -> None:
        super().__init__(module.__name__)
        self.__dict__.update(names)
        self._module = module

    def __getattr__(self, name: str) -> Any:
        return getattr(self._module, name)


def install() -> None:
    """Replace kernels and answers in this process and its later forks; safe to call again."""
    if isinstance(torch.Tensor.is_cuda, property):
        return
    cpu.install()
    import transformer_engine.pytorch  # noqa: F401 - loads the extension
    import transformer_engine_torch as tex
    from transformer_engine.pytorch.triton import permutation as triton_permutation

    from tests.model.te.kernels import (
        attention,
        gemm,
        norms,
        optimizer,
        permutation,
        pointwise,
        ring,
    )

    for kernels in (attention, gemm, norms, optimizer, pointwise, ring):
        _replace_kernels(tex, kernels)
    _replace_everywhere(tex.multi_tensor_scale_tensor, optimizer.multi_tensor_scale)
    _replace_kernels(triton_permutation, permutation)
    _answer(tex)


def _replace_kernels(extension: Any, kernels: types.ModuleType) -> None:
    """Replace each function of `extension` that has a namesake in `kernels`."""
    for name, kernel in vars(kernels).items():
        if isinstance(kernel, types.FunctionType) and hasattr(extension, name):
            _replace_everywhere(getattr(extension, name), kernel)


def _replace_everywhere(original: Any, kernel: Any) -> None:
    """Replace `original` in every module, under any name: many import functions by name."""
    for module in [*sys.modules.values()]:
        for name, value in [*getattr(module, "__dict__", {}).items()]:
            if value is original:
                setattr(module, name, kernel)


def _answer(tex: Any) -> None:
    """Answer what Transformer Engine asks of CUDA; other libraries see the real torch."""
    cuda = _Instead(
        torch.cuda,
        is_available=lambda: True,
        get_device_capability=lambda device=None: (HOPPER.major, HOPPER.minor),
        get_device_properties=lambda device=None: HOPPER,
        is_current_stream_capturing=lambda: False,
    )
    # Its attention takes half precision only, so that what it calls float16 is float32 here.
    for name, module in [*sys.modules.items()]:
        if name.startswith("transformer_engine.") and getattr(module, "torch", None) is torch:
            half = {"float16": torch.float32} if name.endswith(".backends") else {}
            module.torch = _Instead(torch, cuda=cuda, **half)  # type: ignore[attr-defined]
    torch.Tensor.is_cuda = property(_is_cuda)  # type: ignore[assignment,method-assign]
    backend = tex.NVTE_Fused_Attn_Backend.NVTE_F16_arbitrary_seqlen
    answers = {
        "get_cudnn_version": CUDNN,
        "get_cublasLt_version": CUBLASLT,
        "get_num_cublas_streams": 1,
        "get_fused_attn_backend": (backend, ""),
    }
    for name, answer in answers.items():
        _replace_everywhere(getattr(tex, name), lambda *_, answer=answer: answer)
    _choose_as_in_half_precision()
    _wait_once()
    # The CPU has one generator, and nothing here is random.
    tp_random.CudaRNGStatesTracker.fork = (  # type: ignore[method-assign]
        lambda self, name=None: contextlib.nullcontext()
    )


_plain_is_cuda = torch.Tensor.is_cuda


def _is_cuda(tensor: torch.Tensor) -> bool:
    asker = sys._getframe(1).f_globals.get("__name__", "")
    return asker.startswith("transformer_engine.") or _plain_is_cuda.__get__(tensor)


def _choose_as_in_half_precision() -> None:
    from transformer_engine.pytorch.attention.dot_product_attention import utils

    choose = utils.get_attention_backend

    def in_half_precision(params: Any) -> Any:
        return choose(replace(params, qkv_dtype=torch.bfloat16))

    utils.get_attention_backend = in_half_precision


class _Once:
    """A transfer that is waited for once: a second wait on gloo's would take another transfer."""

    def __init__(self, transfer: Any) -> None:
        self._transfer = transfer

    def wait(self) -> None:
        if self._transfer is not None:
            self._transfer.wait()
        self._transfer = None


def _wait_once() -> None:
    """Let ring attention wait for a transfer twice: at the end of a step and before the next."""
    from transformer_engine.pytorch.attention.dot_product_attention import context_parallel

    communicate = context_parallel.flash_attn_p2p_communicate

    def waited_for_once(*args: Any) -> list[_Once]:
        return [_Once(transfer) for transfer in communicate(*args)]

    context_parallel.flash_attn_p2p_communicate = waited_for_once
