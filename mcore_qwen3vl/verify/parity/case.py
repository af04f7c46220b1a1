"""One parity case: a layout and everything else that must not change the numbers."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch.overrides import TorchFunctionMode

from mcore_qwen3vl.config import Architecture
from mcore_qwen3vl.errors import BadInput
from mcore_qwen3vl.layout import Layout
from mcore_qwen3vl.model.inputs import length_multiple
from mcore_qwen3vl.verify.parity.batches import Batch

if TYPE_CHECKING:  # imports megatron, before which the CPU backend must be installed
    from mcore_qwen3vl.model.transformer_config import Spec

Dtype = Literal["fp32", "bf16", "fp64"]

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp64": torch.float64}


class _DoubleForFloat(TorchFunctionMode):
    """Gives float64 wherever code asks for float32, as norms, softmax and losses of models do."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.Tensor.float:
            return args[0].double()
        args = [torch.float64 if value is torch.float32 else value for value in args]
        asked = (kwargs or {}).items()
        kwargs = {k: torch.float64 if value is torch.float32 else value for k, value in asked}
        return func(*args, **kwargs)


@contextmanager
def computing_in(dtype: torch.dtype) -> Iterator[None]:
    """Within this context, compute all in float64 if that is `dtype`: weights alone do not do it.

    Models ask for float32 by name at many places, and float64 that went through one of them has
    its rounding.
    """
    if dtype != torch.float64:
        yield
        return
    usual = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        with _DoubleForFloat():
            yield
    finally:
        torch.set_default_dtype(usual)


@dataclass(frozen=True)
class AdamW:
    """The settings of one optimizer step, by the names of Megatron's ``OptimizerConfig``.

    Decay spares biases and one-dimensional weights, as Megatron's default does. The large `eps`
    keeps the step a smooth function of the gradient: with a usual one, a gradient that is zero up
    to rounding would move its parameter by the full learning rate in a random direction. With this
    one, a parameter's relative error after the step is at most twice that of its gradient (the
    derivative of ``lr * g / (|g| + eps)`` is at most ``lr / eps``). With 1e-4 it was up to 17 times
    as large for LoRA's factors.
    """

    lr: float = 1e-2
    weight_decay: float = 0.1
    adam_beta1: float = 0.9
    adam_beta2: float = 0.95
    adam_eps: float = 1e-3
    clip_grad: float = 0.5


@dataclass(frozen=True)
class Case:
    """The settings under which a model runs.

    Attributes:
        device: device that the model runs on; see :func:`.run_layout`.
        gradients: run the backward pass and compare gradients.
        adamw: optimizer step to take after that, to compare parameters; None: take none.
        distributed_optimizer: shard optimizer states and gradients over DP.
        overlap: overlap gradient reduction (and parameter gathering, if distributed) with compute.
        overlap_experts: ``--overlap-moe-expert-parallel-comm``. Megatron's config refuses it in
            fp32, so it is set after the model is built.
        freeze: parts and patterns to freeze, see :class:`mcore_qwen3vl.model.freeze.Freezing`.
        config: further ``TransformerConfig`` fields, such as recompute.
        compile_pointwise: see :mod:`mcore_qwen3vl.model.kernels`.
        weights_in_files: hold the weights of both models, on the CPU, in temporary files, so that
            they leave memory where it is short and are read again when they are used.
    """

    layout: Layout = field(default_factory=Layout)
    spec: Spec = "torch"
    dtype: Dtype = "fp32"
    device: Literal["cpu", "cuda"] = "cpu"
    gradients: bool = True
    adamw: AdamW | None = None
    distributed_optimizer: bool = False
    overlap: bool = False
    overlap_experts: bool = False
    freeze: tuple[str, ...] = ()
    config: Mapping[str, Any] = field(default_factory=dict)
    compile_pointwise: bool = False
    weights_in_files: bool = False

    @property
    def torch_dtype(self) -> torch.dtype:
        return DTYPES[self.dtype]

    @property
    def overlaps_gather(self) -> bool:
        """Whether new parameters are gathered during the forward pass that follows a step."""
        return self.overlap and self.distributed_optimizer

    @property
    def length_multiple(self) -> int:
        """The number that sequence lengths must be a multiple of."""
        return length_multiple(self.layout.cp, self.layout.tp, self.layout.sp)

    def validate(self, architecture: Architecture, batches: tuple[Batch, ...]) -> None:
        """Check before any process starts that the model and the batches can be run this way.

        Raises:
            BadInput: the model or a batch cannot be run this way.
        """
        self.layout.validate(architecture)
        for batch in batches:
            if self.spec == "te" and batch.padded_left:
                raise BadInput(
                    f"The te spec accepts padding on the right only, and the batch {batch.name} "
                    "is padded on the left: leave that batch out, or use the torch spec."
                )
            per_rank = len(batch.numbers_of_rank(0, self.layout.dp))
            if self.layout.vpp > 1 and per_rank % self.layout.pp:
                raise BadInput(
                    f"An interleaved pipeline needs a multiple of PP {self.layout.pp} micro-batches"
                    f" on each data-parallel rank; DP {self.layout.dp} leaves {per_rank}: lower DP."
                )

    def __str__(self) -> str:
        extras = [
            "distributed optimizer" if self.distributed_optimizer else "",
            "overlap" if self.overlap else "",
            "overlapped experts" if self.overlap_experts else "",
            f"freeze {' '.join(self.freeze)}" if self.freeze else "",
            *(f"{name}={value}" for name, value in self.config.items()),
        ]
        return ", ".join([str(self.layout), *filter(None, extras)])
