"""The optimizer: learning rates by part, and an exact resume without Transformer Engine."""

from __future__ import annotations

import argparse
from typing import Any

import torch
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from megatron.core.optimizer.optimizer_config import ParamKey, ParamWithNamePredicate
from torch import Tensor, nn

from mcore_qwen3vl.model.freeze import part_of


def chained_optimizers(optimizer: Any) -> list[Any]:
    """Return the optimizers that mcore has chained, or the single one."""
    return list(getattr(optimizer, "chained_optimizers", [optimizer]))


def learning_rate_overrides(args: argparse.Namespace) -> dict[ParamKey, Any]:
    """Return the parameter-group overrides for ``--vision-lr-mult`` and ``--aligner-lr-mult``."""
    multipliers = {"vision": args.vision_lr_mult, "aligner": args.aligner_lr_mult}
    return {
        _part_key(part): {"max_lr": args.lr * factor, "min_lr": args.min_lr * factor}
        for part, factor in multipliers.items()
        if factor != 1.0
    }


def _part_key(part: str) -> ParamKey:
    def belongs(parameter: nn.Parameter, name: str) -> bool:
        return part_of(name) == part

    return ParamKey(with_name_predicate=ParamWithNamePredicate(name=part, fn=belongs))


def make_resumable(optimizer: Any) -> bool:
    """Let torch's Adam under mcore's distributed optimizer save and load its state exactly.

    mcore supports this for Transformer Engine's and Apex's Adam. With torch's Adam it reads the
    state before it exists, gives all parameters the same ``step`` tensor, which each of them then
    advances, and looks for ``step`` in formats that store it elsewhere.

    Returns:
        Whether the optimizer was torch's Adam, and was changed.
    """
    found = False
    for part in chained_optimizers(optimizer):
        inner = getattr(part, "optimizer", None)
        if isinstance(part, DistributedOptimizer) and isinstance(inner, torch.optim.Adam):
            _start_states(inner)
            inner.register_load_state_dict_post_hook(_separate_steps)
            _tolerate_missing_step(part)
            found = True
    return found


def scale_on_host(optimizer: Any) -> None:
    """Keep the constant loss scale of 1 on the host: Megatron reads it in each step for its log."""
    for part in chained_optimizers(optimizer):
        if getattr(part, "grad_scaler", None) is None and hasattr(part, "_scale_one"):
            part._scale_one = part._scale_one.cpu().reshape(())  # multiplies any device's tensors


def _start_states(adam: torch.optim.Adam) -> None:
    """Create the state that Adam itself would create in its first step."""
    for group in adam.param_groups:
        for parameter in group["params"]:
            device = parameter.device if group["fused"] else "cpu"
            adam.state[parameter] = {
                "step": torch.zeros((), device=device),
                "exp_avg": torch.zeros_like(parameter),
                "exp_avg_sq": torch.zeros_like(parameter),
            }


def _separate_steps(adam: torch.optim.Optimizer) -> None:
    for state in adam.state.values():
        state["step"] = state["step"].clone()


def _tolerate_missing_step(optimizer: DistributedOptimizer) -> None:
    set_states = optimizer._set_main_param_and_optimizer_states

    def set_states_but_step(parameter: nn.Parameter, tensors: dict[str, Tensor | None]) -> None:
        set_states(parameter, {"step": None, **tensors})

    optimizer._set_main_param_and_optimizer_states = set_states_but_step
