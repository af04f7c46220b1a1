"""The optimizer: rates and norms by part, and kernels without Transformer Engine.

mcore's own fallbacks for the kernels of Transformer Engine and Apex take a host sync per tensor
(the norm), or a launch and a temporary per tensor (clipping). torch's default Adam takes
temporaries of the parameters' size. Updated weights go to the model one tensor at a time. torch has
kernels over lists of tensors for all four.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.optimizer import clip_grads
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from megatron.core.optimizer.optimizer_config import ParamKey, ParamWithNamePredicate
from megatron.core.tensor_parallel.layers import param_is_not_tensor_parallel_duplicate
from megatron.core.transformer.module import param_is_not_shared
from megatron.core.utils import get_model_config, local_multi_tensor_l2_norm
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from mcore_qwen3vl.memory_labels import label_module
from mcore_qwen3vl.model.freeze import PARTS, part_of
from mcore_qwen3vl.settings.run import RunSettings
from mcore_qwen3vl.training.gradient_shards import shard_of_rank

label_module(__file__, "optimizer, temporary")

PIECE_VALUES = 1 << 22
"""Values of a gradient that are in memory in float64 at a time."""


def chained_optimizers(optimizer: Any) -> list[Any]:
    """Return the optimizers that mcore has chained, or the single one."""
    return list(getattr(optimizer, "chained_optimizers", [optimizer]))


def with_adam(optimizer: Any) -> Iterator[tuple[Any, torch.optim.Adam]]:
    """Yield each of the chained optimizers that holds torch's Adam, and the Adam."""
    for part in chained_optimizers(optimizer):
        adam = getattr(part, "optimizer", None)
        if isinstance(adam, torch.optim.Adam):
            yield part, adam


def learning_rate_overrides(settings: RunSettings) -> dict[ParamKey, Any]:
    """Return the parameter-group overrides for ``--vision-lr-mult`` and ``--aligner-lr-mult``."""
    training, schedule = settings.training, settings.schedule
    multipliers = {"vision": training.vision_lr_mult, "aligner": training.aligner_lr_mult}
    return {
        _part_key(part): {"max_lr": schedule.lr * factor, "min_lr": schedule.min_lr * factor}
        for part, factor in multipliers.items()
        if factor != 1.0
    }


def scale_warmup_start(scheduler: Any) -> None:
    """Let every part begin its warm-up at the same share of its rate; Megatron's at the same rate.

    `scheduler` is Megatron's ``OptimizerParamScheduler``. Its ``--lr-warmup-init`` would be above
    the highest rate of a part with a small factor.
    """
    rate_of, start = scheduler.get_lr, scheduler.init_lr

    def rate_of_part(group: dict[str, Any]) -> float:
        highest = scheduler.max_lr
        share = group.get("max_lr", highest) / highest if highest else 1.0
        scheduler.init_lr = start * share
        rate: float = rate_of(group)
        scheduler.init_lr = start
        return rate

    scheduler.get_lr = rate_of_part
    scheduler.step(0)  # sets the rates of the first step anew


def _part_key(part: str) -> ParamKey:
    """Return what tells Megatron which parameters are in a part of the model."""

    def is_in_part(parameter: nn.Parameter, name: str) -> bool:
        return part_of(name) == part

    return ParamKey(with_name_predicate=ParamWithNamePredicate(name=part, fn=is_in_part))


def part_grad_norms(model: list[Any]) -> dict[str, Tensor]:
    """Return the 2-norm of each part's reduced gradient over all ranks, which all call this.

    The gradients still have fp16's loss scale, which Megatron's optimizer takes away later.
    """
    squares = torch.zeros(len(PARTS), device=torch.cuda.current_device())
    for chunk in model:
        parts = {parameter: part_of(name) for name, parameter in chunk.named_parameters()}
        for buffer in (*chunk.buffers, *chunk.expert_parallel_buffers):
            _add_squares(squares, buffer, parts, chunk)
    dist.all_reduce(squares)
    norms = squares.sqrt()
    if scale_loss := get_model_config(model[0]).grad_scale_func:
        norms = norms / scale_loss(torch.ones_like(norms))
    return dict(zip(PARTS, norms, strict=True))


def _add_squares(squares: Tensor, buffer: Any, parts: dict[nn.Parameter, Any], chunk: Any) -> None:
    """Add this rank's share: its shard of each bucket, or, unsharded, all on the first DP rank."""
    sharded = chunk.ddp_config.use_distributed_optimizer
    if not sharded and buffer.data_parallel_group.rank() != 0:
        return
    for bucket in buffer.buckets:
        size, first = bucket.grad_data.numel(), 0
        if sharded:
            size, first = shard_of_rank(bucket, buffer)
        for parameter in bucket.params:
            if not _is_counted(parameter):
                continue
            start, end, _ = buffer.param_index_map[parameter]
            low = max(start - bucket.offset, first)
            high = min(end - bucket.offset, first + size)
            if low < high:
                part = tuple(PARTS).index(parts[parameter])
                squares[part] += bucket.grad_data[low:high].float().square().sum()


def _is_counted(parameter: nn.Parameter) -> bool:
    """Return whether to count this copy: as in mcore's norm, ties and TP replicas count once."""
    return param_is_not_shared(parameter) and param_is_not_tensor_parallel_duplicate(
        parameter,
        tp_group=parallel_state.get_tensor_model_parallel_group(),
        expert_tp_group=parallel_state.get_expert_tensor_parallel_group(),
    )


def keep_scale_on_host(optimizer: Any) -> None:
    """Keep the constant loss scale of 1 on the host: Megatron reads it in each step for its log."""
    for part in chained_optimizers(optimizer):
        if getattr(part, "grad_scaler", None) is None and hasattr(part, "_scale_one"):
            part._scale_one = part._scale_one.cpu().reshape(())  # multiplies any device's tensors


def use_multi_tensor() -> None:
    """Give mcore's gradient clipping the functions below, if it has only its own fallbacks."""
    if clip_grads.l2_norm_impl is not local_multi_tensor_l2_norm:
        return
    clip_grads.l2_norm_impl = multi_tensor_l2_norm
    clip_grads.multi_tensor_scale_impl = multi_tensor_scale
    clip_grads.multi_tensor_scale_tensor_impl = multi_tensor_scale


def multi_tensor_l2_norm(
    chunk_size: int, overflow: Tensor, tensors: list[list[Tensor]], per_tensor: bool
) -> tuple[Tensor, None]:
    """Return the (1,) float32 norm of all values, like Apex's ``multi_tensor_l2norm``.

    On the CPU, torch adds up float32 squares one after another: of 1.6e8 normally distributed
    values the norm is 2 % too small. So they are added in float64 there, piece by piece, because
    torch copies what it converts.
    """
    every = [tensor for group in tensors for tensor in group]
    if every[0].device.type == "cpu":
        pieces = [piece for tensor in every for piece in tensor.flatten().split(PIECE_VALUES)]
        norms = [torch.linalg.vector_norm(piece, dtype=torch.float64) for piece in pieces]
    else:
        norms = [*torch._foreach_norm(every)]
    return torch.linalg.vector_norm(torch.stack(norms)).float().reshape(1), None


def multi_tensor_scale(
    chunk_size: int, overflow: Tensor, tensors: list[list[Tensor]], factor: float | Tensor
) -> None:
    """Write the first list times `factor` into the second, as ``multi_tensor_scale`` does."""
    source, target = tensors
    # Clipping passes the same list twice.
    if any(a is not b for a, b in zip(source, target, strict=True)):
        torch._foreach_copy_(target, source)
    torch._foreach_mul_(target, factor.reshape(()) if isinstance(factor, Tensor) else factor)


def copy_weights_together(optimizer: Any) -> None:
    """Let the distributed optimizer copy the updated weights to the model's in one call."""
    for part in chained_optimizers(optimizer):
        # Those that are quantized are not copied.
        plain = isinstance(part, DistributedOptimizer) and not (
            part.ddp_config.fp8_param_gather or part.ddp_config.fp4_param_gather
        )
        if plain and not part.ddp_config.use_megatron_fsdp:
            part._copy_main_params_to_model_params = RepeatedCopies(
                part._copy_main_params_to_model_params
            )


class RepeatedCopies:
    """A function that copies between the same tensors at each call, and does nothing else.

    The first call runs `function`, and notes what it copies. The later ones copy that again, with
    one call for all tensors of a pair of dtypes.
    """

    def __init__(self, function: Callable[[], None]) -> None:
        self._function = function
        self._targets_and_sources: list[tuple[list[Tensor], list[Tensor]]] | None = None

    def __call__(self) -> None:
        if self._targets_and_sources is None:
            noting = _NotingCopies()
            with noting:
                self._function()
            self._targets_and_sources = list(noting.by_dtypes.values())
            return
        for targets, sources in self._targets_and_sources:
            torch._foreach_copy_(targets, sources)


class _NotingCopies(TorchFunctionMode):
    """Notes the targets and sources of all calls of ``copy_``, by their dtypes."""

    def __init__(self) -> None:
        super().__init__()
        self.by_dtypes: dict[Any, tuple[list[Tensor], list[Tensor]]] = {}

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func is Tensor.copy_:
            target, source = args
            targets, sources = self.by_dtypes.setdefault((target.dtype, source.dtype), ([], []))
            targets.append(target)
            sources.append(source)
        return func(*args, **(kwargs or {}))


def use_fused_adam(optimizer: Any) -> None:
    """Let torch's Adam update parameters without temporaries."""
    # On a GPU a kernel updates many parameters; on the CPU it takes one pass, not a dozen.
    for _, adam in with_adam(optimizer):
        _set_fused(adam)
        # A loaded checkpoint's groups bring the setting of the run that wrote it.
        adam.register_load_state_dict_post_hook(_set_fused)


def _set_fused(adam: torch.optim.Optimizer) -> None:
    """Choose the fused kernels, which want each ``step`` on its parameter's device."""
    for group in adam.param_groups:
        group["fused"] = True
        for parameter in group["params"]:
            if "step" in adam.state.get(parameter, {}):
                state = adam.state[parameter]
                state["step"] = state["step"].to(parameter.device)
