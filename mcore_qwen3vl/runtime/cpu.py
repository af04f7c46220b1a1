"""Megatron-Core on CPU with gloo.

mcore assumes CUDA. :func:`install` replaces what mcore misses on the CPU, with a reason for each
replacement. Every layout then runs on a laptop with the code that runs on GPUs. Importing this
module replaces nothing: call :func:`install` before megatron is imported, or start ranks with
:func:`mcore_qwen3vl.runtime.launch.run_layout`, which calls it.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import logging
import os
import queue
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from mcore_qwen3vl.errors import BadInput

CPU = torch.device("cpu")


@dataclass(frozen=True)
class Replacement:
    """One attribute that is replaced, and why."""

    module: str
    name: str
    make: Callable[[Any], Any]  # original -> replacement
    reason: str


class NullStream:
    """A stream or event of a device that runs everything in order, so that nothing waits."""

    def __init__(self, *args: object, **kwargs: object) -> None: ...

    def _itself(self, *args: object, **kwargs: object) -> NullStream:
        return self

    def _nothing(self, *args: object, **kwargs: object) -> None: ...

    __enter__ = record_event = _itself
    __exit__ = record = synchronize = wait = wait_event = wait_stream = _nothing

    def query(self) -> bool:
        return True


# The functions below that take an original return its replacement: `Replacement.make`.


def _made_on_cpu(make: Callable[..., Any]) -> Callable[..., Any]:
    """Let a function that makes tensors take CUDA, as a device, for the CPU."""

    @functools.wraps(make)
    def on_cpu(*args: Any, **kwargs: Any) -> Any:
        args = tuple(_cuda_as_cpu(a) if isinstance(a, str | torch.device) else a for a in args)
        if "device" in kwargs:
            kwargs["device"] = _cuda_as_cpu(kwargs["device"])
        return make(*args, **kwargs)

    return on_cpu


def _with_cuda_type_name(tensor_type: Callable[..., Any]) -> Callable[..., Any]:
    """Let ``Tensor.type`` name types as on CUDA: torch.cuda.FloatTensor."""

    @functools.wraps(tensor_type)
    def type_of(self: Tensor, *args: Any, **kwargs: Any) -> Any:
        result = tensor_type(self, *args, **kwargs)
        return result.replace("torch.", "torch.cuda.", 1) if isinstance(result, str) else result

    return type_of


def _cuda_as_cpu(device: Any) -> Any:
    """Return the CPU for any CUDA device, and other devices as they are."""
    kind = device.type if isinstance(device, torch.device) else str(device)
    return CPU if kind.startswith("cuda") else device


def _padded_all_gather(all_gather: Callable[..., Any]) -> Callable[..., Any]:
    """Let ``all_gather`` pad parts of unequal length to the longest, and cut them again."""

    def padded(
        tensor_list: list[Tensor], tensor: Tensor, group: Any = None, async_op: bool = False
    ) -> Any:
        lengths = [len(t) for t in tensor_list] if tensor.ndim else [0]  # scalars are alike
        if len(set(lengths)) == 1:
            return all_gather(tensor_list, tensor, group=group, async_op=async_op)
        longest = tensor.new_zeros(max(lengths), *tensor.shape[1:])
        buffers = [torch.empty_like(longest) for _ in tensor_list]
        longest[: len(tensor)] = tensor
        all_gather(buffers, longest, group=group)
        for target, buffer in zip(tensor_list, buffers, strict=True):
            target.copy_(buffer[: len(target)])
        return None  # the call has ended, so even an asynchronous one has no work to wait for

    return padded


def _to_host(tensor: Any, as_numpy: bool = False, record_stream: bool = False) -> Any:
    return tensor.numpy() if as_numpy and torch.is_tensor(tensor) else tensor


def _get_rng_state(*_: Any, **__: Any) -> Tensor:
    return torch.get_rng_state()


def _set_rng_state(new_state: Tensor, *_: Any, **__: Any) -> None:
    torch.set_rng_state(new_state)


def _compile_that_leaves_as_written(compile_function: Callable[..., Any]) -> Callable[..., Any]:
    """Let ``torch.compile`` return the function that it is given."""

    @functools.wraps(compile_function)  # whoever wants to compile unwraps it
    def leave(model: Any = None, **options: Any) -> Any:
        # Without a function it is a decorator with options.
        return (lambda function: function) if model is None else model

    return leave


def _initializer_without_cuda(initialize: Callable[..., Any]) -> Callable[..., Any]:
    """Let Megatron's set-up do without CUDA, as if there were one device."""

    def initialize_on_cpu(*args: Any, **kwargs: Any) -> Any:
        # Megatron sets up process groups only where there is a device.
        with mock.patch.object(torch.cuda, "device_count", return_value=1):
            return initialize(*args, **{**kwargs, "allow_no_cuda": True})

    return initialize_on_cpu


_MAKERS = (
    "arange", "as_tensor", "asarray", "empty", "empty_like", "empty_strided", "eye", "full",
    "full_like", "linspace", "logspace", "normal", "ones", "ones_like", "rand", "rand_like",
    "randint", "randint_like", "randn", "randn_like", "randperm", "tensor", "tril_indices",
    "triu_indices", "zeros", "zeros_like",
)  # fmt: skip
_METHODS = (
    "new_empty", "new_empty_strided", "new_full", "new_ones", "new_tensor", "new_zeros", "to",
)  # fmt: skip
_SPELT = "schedules, gradient clipping and the optimizers name CUDA as the device: use the CPU"


def _value_replacements(module: str, reason: str, **values: Any) -> Iterator[Replacement]:
    """Yield replacements of attributes of a module by values, for one reason."""
    for name, value in values.items():
        yield Replacement(module, name, _maker_of(value), reason)


def _maker_of(value: Any) -> Callable[[Any], Any]:
    return lambda original: value


# Each function is replaced separately. A torch function mode would cover them all, but would also
# intercept every other operator, which takes a fifth of a small model's time.
DEVICE_REPLACEMENTS = (
    *(Replacement("torch", name, _made_on_cpu, _SPELT) for name in _MAKERS),
    *(Replacement("torch.Tensor", name, _made_on_cpu, _SPELT) for name in _METHODS),
    *_value_replacements("torch.Tensor", _SPELT, cuda=lambda self, *args, **kwargs: self),
    Replacement(
        "torch.Tensor",
        "type",
        _with_cuda_type_name,
        "gradients are grouped by the name of their tensor type",
    ),
)


_RNG = "the tensor-parallel RNG tracker saves and restores the device generator: use the CPU's"
_CUDA = "torch.cuda"
_NULL = NullStream()

TORCH_REPLACEMENTS = (
    Replacement(
        "torch",
        "compile",
        _compile_that_leaves_as_written,
        "mcore compiles small functions while it is imported: the compiler takes seconds to load",
    ),
    *_value_replacements(
        _CUDA, "buffers are allocated on the current device", current_device=lambda: CPU
    ),
    *_value_replacements(_CUDA, "the CPU is the only device", set_device=lambda device: None),
    *_value_replacements(
        _CUDA, "p2p communication synchronizes the device", synchronize=lambda device=None: None
    ),
    *_value_replacements(_CUDA, _RNG, get_rng_state=_get_rng_state, set_rng_state=_set_rng_state),
    *_value_replacements(
        f"{_CUDA}.random", _RNG, get_rng_state=_get_rng_state, set_rng_state=_set_rng_state
    ),
    # manual_seed_all stays, because torch.manual_seed calls it.
    *_value_replacements(
        _CUDA, _RNG, manual_seed=lambda seed: torch.default_generator.manual_seed(seed)
    ),
    *_value_replacements(
        _CUDA,
        "side streams overlap copies and collectives: the CPU runs in order",
        Stream=NullStream,
        Event=NullStream,
        current_stream=lambda device=None: _NULL,
        default_stream=lambda device=None: _NULL,
        stream=lambda stream: contextlib.nullcontext(),
        set_stream=lambda stream: None,
    ),
    *_value_replacements(
        "torch.Tensor", "the CPU has no streams", record_stream=lambda self, stream: None
    ),
    Replacement(
        "torch.distributed",
        "all_gather",
        _padded_all_gather,
        "gloo refuses parts of unequal length, which the alltoall dispatcher with ETP gathers",
    ),
)

_TP_RANDOM = "megatron.core.tensor_parallel.random"
_MOE = "megatron.core.transformer.moe"
_HOST = "returns a tensor if the input is on the CPU already; all_to_all needs a list of numbers"

MEGATRON_REPLACEMENTS = (
    *_value_replacements(
        _TP_RANDOM, _RNG, _get_cuda_rng_state=_get_rng_state, _set_cuda_rng_state=_set_rng_state
    ),
    *_value_replacements(f"{_MOE}.moe_utils", _HOST, maybe_move_tensor_to_cpu=_to_host),
    *_value_replacements(f"{_MOE}.token_dispatcher", _HOST, maybe_move_tensor_to_cpu=_to_host),
    *_value_replacements(
        "megatron.core.dist_checkpointing.strategies.filesystem_async",
        "starts a manager process that re-imports the program; a synchronous save needs none",
        get_write_results_queue=lambda mp_mode="spawn": queue.Queue(),
    ),
)

_TRAINING = "megatron.training"

TRAINING_REPLACEMENTS = (
    Replacement(
        f"{_TRAINING}.training",
        "initialize_megatron",
        _initializer_without_cuda,
        "Megatron refuses to start without CUDA",
    ),
    *_value_replacements(
        f"{_TRAINING}.training",
        "warms up fused CUDA kernels",
        set_jit_fusion_options=lambda tp_size=None: None,
    ),
    *_value_replacements(
        f"{_TRAINING}.initialize",
        "compiles an index builder for GPT datasets, which are not used",
        _compile_dependencies=lambda: None,
    ),
    *_value_replacements(
        _CUDA,
        "--moe-grouped-gemm requires compute capability 8.0",
        get_device_capability=lambda device=None: (8, 0),
    ),
    *_value_replacements(
        f"{_TRAINING}.arguments",
        "orders CUDA queues before Blackwell through CUDA_DEVICE_MAX_CONNECTIONS",
        get_device_arch_version=lambda: 10,
    ),
)
"""What Megatron's training loop needs beyond :data:`MEGATRON_REPLACEMENTS`."""

originals: dict[tuple[str, str], Any] = {}
"""The replaced originals, by (module, name). Empty until :func:`install` runs."""


def install(*, training: bool = False) -> None:
    """Make megatron-core run on the CPU in this process and in those forked from it.

    It may be called again: what is replaced already stays. With `training` it also replaces what
    ``megatron.training`` needs, which takes seconds to import.

    Raises:
        BadInput: megatron is already imported, a symbol to replace is missing, or this process
            already uses CUDA.
    """
    if not originals:
        _check_environment()
        _leave_out_transformer_engine()
        apply(TORCH_REPLACEMENTS)
        # ``with torch.device(...)`` keeps the tensor factories of its first use: the originals.
        importlib.import_module("torch.utils._device")._device_constructors()
        apply(DEVICE_REPLACEMENTS)
        apply(MEGATRON_REPLACEMENTS)
        logging.getLogger(_TP_RANDOM).addFilter(
            # Logged whenever the RNG tracker forks, since CPU and device share one generator here.
            lambda record: "CPU RNG state changed" not in record.getMessage()
        )
    if training:
        apply(TRAINING_REPLACEMENTS)


def is_installed() -> bool:
    """Return whether :func:`install` ran in this process."""
    return bool(originals)


def _check_environment() -> None:
    """Hide the GPUs; raise BadInput if megatron is imported already, or CUDA is in use."""
    if "megatron.core.parallel_state" in sys.modules:
        raise BadInput(
            "The CPU backend must be installed before megatron is imported, because megatron "
            "decorates functions for CUDA while it loads: call mcore_qwen3vl.runtime.cpu.install() "
            "first."
        )
    if not torch.cuda.is_initialized():
        os.environ["CUDA_VISIBLE_DEVICES"] = ""
    if torch.cuda.is_available():
        raise BadInput(
            "The CPU backend cannot be used in a process that already uses CUDA. Start it with "
            "CUDA_VISIBLE_DEVICES set to the empty string."
        )


def _leave_out_transformer_engine() -> None:
    """Let Megatron load as if Transformer Engine were not installed, unless it is loaded already.

    From an installed one Megatron takes the norm of the gradients, Adam and the router's product,
    whatever the layer spec, and these need a GPU.
    """
    sys.modules.setdefault("transformer_engine", None)  # type: ignore[arg-type]


def apply(replacements: Sequence[Replacement]) -> None:
    """Replace the attributes that are not replaced yet; BadInput if one does not exist."""
    for r in replacements:
        if (r.module, r.name) in originals:
            continue
        module = Tensor if r.module == "torch.Tensor" else importlib.import_module(r.module)
        if not hasattr(module, r.name):
            raise BadInput(
                f"{r.module}.{r.name} does not exist in the installed version, so the CPU backend "
                f"cannot replace it ({r.reason}). Install the versions that this package pins."
            )
        originals[r.module, r.name] = getattr(module, r.name)
        setattr(module, r.name, r.make(originals[r.module, r.name]))
