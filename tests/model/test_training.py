"""Recompute, freezing, data parallelism and the optimizer step."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from megatron.core import parallel_state as ps
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer

from mcore_qwen3vl.model.freeze import Freezing
from mcore_qwen3vl.model.qwen3vl import Qwen3VLModel
from mcore_qwen3vl.runtime.launch import run_layout
from tests.model import weights
from tests.model.engine import TOLERANCE, Case, References, build, check, train_step, wrap
from tests.model.test_layouts import image_case

RECOMPUTE: dict[str, dict[str, Any]] = {
    "uniform 1": {"recompute_method": "uniform", "recompute_num_layers": 1},
    "uniform 2": {"recompute_method": "uniform", "recompute_num_layers": 2},
    "uniform 4": {"recompute_method": "uniform", "recompute_num_layers": 4},
    "block 2": {"recompute_method": "block", "recompute_num_layers": 2},
    "selective": {"recompute_granularity": "selective", "recompute_modules": ["core_attn"]},
    "mlp": {"recompute_granularity": "selective", "recompute_modules": ["core_attn", "mlp"]},
}
FULL = {"recompute_granularity": "full"}


@pytest.mark.parametrize("layout", ["single", "tp2xcp2+sp"])
@pytest.mark.parametrize("mode", RECOMPUTE)
def test_recompute(reference: References, mode: str, layout: str) -> None:
    check(image_case(reference(), layout, overrides={**FULL, **RECOMPUTE[mode]}))


@pytest.mark.parametrize("mode", ["uniform 1", "uniform 2", "block 2"])
def test_recompute_where_features_cross_stages(reference: References, mode: str) -> None:
    check(image_case(reference(), "pp2xvpp2", overrides={**FULL, **RECOMPUTE[mode]}))
    check(image_case(reference(), "pp2", overrides={**FULL, **RECOMPUTE[mode]}))


def test_recompute_moe(reference: References) -> None:
    overrides = {"recompute_granularity": "selective", "recompute_modules": ["core_attn", "moe"]}
    check(image_case(reference(moe=True), "tp2xep2+sp", overrides=overrides))
    check(image_case(reference(moe=True), "pp2", overrides={**FULL, **RECOMPUTE["uniform 2"]}))


FROZEN = {
    "vision": ["vision"],
    "aligner": ["aligner"],
    "both": ["vision", "aligner"],
    "language": ["language"],
    "all but the last layers": ["vision", "aligner", "embedding", r"decoder\.layers\.[012]\."],
}


@pytest.mark.parametrize("recompute", [False, True], ids=["", "recompute"])
@pytest.mark.parametrize("layout", ["single", "pp2xvpp2", "tp2+sp"])
@pytest.mark.parametrize("what", FROZEN)
def test_freezing_leaves_the_other_gradients_alone(
    reference: References, what: str, layout: str, recompute: bool
) -> None:
    def prepare(model: Qwen3VLModel) -> None:
        Freezing(FROZEN[what]).apply(model)

    overrides = {**FULL, **RECOMPUTE["uniform 2"]} if recompute else {}
    check(image_case(reference(), layout, prepare=prepare, overrides=overrides))


@pytest.mark.parametrize("moe", [False, True], ids=["dense", "moe"])
@pytest.mark.parametrize("layout", ["single", "pp2xvpp2", "pp4"])
def test_tied_embeddings(reference: References, layout: str, moe: bool) -> None:
    check(image_case(reference(moe=moe, tie=True), layout))


OVERLAP = {"overlap_grad_reduce": True, "bucket_size": 20000}


@pytest.mark.parametrize("moe", [False, True], ids=["dense", "moe"])
@pytest.mark.parametrize("overlap", [False, True], ids=["", "overlap"])
@pytest.mark.parametrize("distributed", [False, True], ids=["plain", "distributed"])
@pytest.mark.parametrize("layout", ["dp2", "tp2xdp2+sp"])
def test_adamw_step_with_clipping(
    reference: References, layout: str, distributed: bool, overlap: bool, moe: bool
) -> None:
    ddp: dict[str, Any] = {"use_distributed_optimizer": distributed}
    if overlap:
        ddp |= {**OVERLAP, "overlap_param_gather": distributed}
    layout = layout.replace("dp2", "ep2xdp2") if moe else layout
    case = image_case(reference(moe=moe), layout, ddp=ddp)
    expected = _torch_step(case)
    case.layout.validate(case.reference.architecture)
    worst = max(run_layout(_megatron_step, case.layout.world_size, case, expected, timeout=60))
    assert worst <= TOLERANCE


LEARNING = {"lr": 1e-3, "weight_decay": 0.01}
BETAS, EPS, CLIP = (0.9, 0.95), 1e-4, 1.0


def _torch_step(case: Case) -> dict[str, torch.Tensor]:
    """torch's AdamW on HF's gradients; Megatron decays matrices only."""
    parameters = {n: torch.nn.Parameter(p.clone()) for n, p in case.reference.weights.items()}
    for name, parameter in parameters.items():
        parameter.grad = case.expected.gradients[name].clone()
    norm = torch.nn.utils.clip_grad_norm_(parameters.values(), CLIP)
    assert norm > CLIP, "nothing to clip"
    groups = [
        {"params": [p for p in parameters.values() if p.ndim > 1]},
        {"params": [p for p in parameters.values() if p.ndim == 1], "weight_decay": 0.0},
    ]
    torch.optim.AdamW(groups, **LEARNING, betas=BETAS, eps=EPS).step()
    return {name: p.detach() for name, p in parameters.items()}


def _megatron_step(case: Case, expected: dict[str, torch.Tensor]) -> float:
    """Worst difference of a parameter after the step, relative to the learning rate."""
    chunks = build(case)
    model = wrap(case, chunks)
    distributed = case.ddp["use_distributed_optimizer"]
    optimizer = get_megatron_optimizer(
        OptimizerConfig(
            **LEARNING,
            adam_beta1=BETAS[0],
            adam_beta2=BETAS[1],
            adam_eps=EPS,
            clip_grad=CLIP,
            use_distributed_optimizer=distributed,
        ),
        model,
    )
    train_step(case, model)
    optimizer.step()
    if case.ddp.get("overlap_param_gather"):
        for ddp in model:
            ddp.start_param_sync(force_sync=True)
    worst = 0.0
    for chunk in chunks:
        for name, parameter in chunk.named_parameters():
            whole, part = weights.local(chunk, name, expected)
            worst = max(worst, float((parameter - part).abs().max() / whole.abs().max()))
    assert ps.get_data_parallel_world_size() == case.layout.dp
    return worst
