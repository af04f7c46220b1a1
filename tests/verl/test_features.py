"""VERL's engine replays routes, freezes parts, trains critics, offloads, and runs in its worker."""

from __future__ import annotations

import os
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

pytest.importorskip("verl", reason="make test-verl makes an environment that has VERL")

from tests.verl.engines import (
    as_accelerator,
    build,
    engine_config,
    error,
    exported,
    infer,
    optimizer_config,
    ppo,
    ppo_step,
    same,
)
from tests.verl.samples import batch
from tests.verl.test_layouts import CP2, EP2, PP2, TOLERANCE, TP2, VPP2, published_shapes

RECOMPUTE = {
    "override_transformer_config": {
        "recompute_granularity": "full",
        "recompute_method": "uniform",
        "recompute_num_layers": 1,
    }
}
RANKS = {"1": (1, {}), "tp2": (2, TP2), "pp2": (2, PP2), "cp2": (2, CP2), "dp2": (2, {})}


# Router replay.


def replayed(path: Path, layout: Any, samples: Any, expected: Any, mode: str) -> Any:
    """Return log-probabilities under recorded routes and others, and do a step under the others."""
    from verl.workers.config import EngineRouterReplayConfig

    engine = build(path, {"router_replay": EngineRouterReplayConfig(mode=mode), **layout})
    report: dict[str, Any] = {}
    if mode == "R2":
        recorded = recorded_routes(engine, samples)
        report["shapes"] = [tuple(t.shape) for t in recorded]
        report["recorded"] = under(engine, samples, recorded)
    others = made_up_routes(samples, engine.architecture)
    if mode == "R3":  # a rollout has no route for the token that it generated last
        others = [routes[:-1] for routes in others]
    report["others"] = under(engine, samples, others)
    data = with_routes(batch(samples, expected, calculate_entropy=False), others)
    with engine.train_mode():
        out = engine.train_batch(data, ppo())
    if not engine.is_mp_src_rank_with_outputs():
        return None
    return {**report, "norm": float(out["metrics"]["grad_norm"])}


def recorded_routes(engine: Any, samples: Any) -> list[Any]:
    out, _ = infer(engine, samples, enable_routing_replay=True)
    everywhere: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(
        everywhere, [t.clone() for t in out["routed_experts"].unbind()] if out else None
    )
    return next(routes for routes in everywhere if routes is not None)


def made_up_routes(samples: Any, architecture: Any) -> list[Any]:
    """Make routes that no router would choose: (s, layers, top k) distinct experts a sample."""
    generator = torch.Generator().manual_seed(3)
    layers, k = architecture.num_hidden_layers, architecture.num_experts_per_tok
    return [
        torch.rand(len(s.ids), layers, architecture.num_experts, generator=generator)
        .argsort(-1)[..., :k]
        .to(torch.uint8)
        for s in samples
    ]


def with_routes(data: Any, routes: list[Any]) -> Any:
    from verl.utils import tensordict_utils

    data["routed_experts"] = torch.nested.as_nested_tensor(routes, layout=torch.jagged)
    tensordict_utils.assign_non_tensor(data, enable_routing_replay=True)
    return data


def under(engine: Any, samples: Any, routes: list[Any]) -> Any:
    with engine.eval_mode():
        out = engine.infer_batch(with_routes(batch(samples), routes))
    if not engine.is_mp_src_rank_with_outputs():
        return None
    return [t.clone() for t in out["model_output"]["log_probs"].unbind()]


@pytest.mark.parametrize("kind", ["moe", "hybrid moe"])
@pytest.mark.parametrize("mode", ["R2", "R3"])
def test_router_replay(mode: str, kind: str, case: Any, on_ranks: Any) -> None:
    """Recorded routes repeat the log-probabilities; others change them alike in all layouts."""
    given = case(kind)
    layouts = {"1": (1, {}), "tp2ep2": (2, TP2 | EP2), "pp2": (2, PP2), "cp2": (2, CP2)}
    layouts |= (
        {"pp2vpp2": (2, VPP2), "pp2 recomputed": (2, PP2 | RECOMPUTE)} if mode == "R2" else {}
    )
    reports = {}
    for name, (ranks, layout) in layouts.items():
        found = on_ranks(ranks, replayed, given.path, layout, given.samples, given.expected, mode)
        (reports[name],) = [r for r in found if r is not None]
    first = reports["1"]
    for name, report in reports.items():
        print(mode, kind, name, report["norm"])
        if mode == "R2":
            assert report["shapes"] == [(len(s.ids), 4, 3) for s in given.samples]
            assert apart(report["recorded"], given.expected.log_probs) < TOLERANCE
        assert apart(report["others"], given.expected.log_probs) > 0.1
        assert apart(report["others"], [t[:-1] for t in first["others"]]) < TOLERANCE
        assert report["norm"] == pytest.approx(first["norm"], rel=TOLERANCE)


def apart(found: list[Any], expected: list[Any]) -> float:
    pairs = zip(found, expected, strict=True)
    return max(float((a[:-1] - b).abs().max()) for a, b in pairs)


# The router's balancing loss.

BALANCED = {"override_transformer_config": {"moe_aux_loss_coeff": 1.0}}


def norm_of_step(path: Path, engine: Any, samples: Any, expected: Any) -> float:
    return float(ppo_step(build(path, engine), samples, expected)["metrics"]["grad_norm"])


@pytest.mark.parametrize("kind", ["moe", "hybrid moe"])
def test_padding_does_not_count_in_the_balancing_loss(kind: str, case: Any, on_ranks: Any) -> None:
    given = case(kind)
    norms = {}
    for name, engine in {
        "packed": BALANCED,
        "bucket": BALANCED | {"pad_to_length": True, "pad_to_length_bucket": 64},
    }.items():
        (norms[name],) = on_ranks(
            1, norm_of_step, given.path, engine, given.samples, given.expected
        )
    print(kind, norms)
    assert norms["bucket"] == pytest.approx(norms["packed"], rel=TOLERANCE)
    assert abs(norms["packed"] / given.expected.grad_norm - 1) > 100 * TOLERANCE


# Frozen parts.


def frozen(path: Path, layout: Any, samples: Any, expected: Any, option: Any) -> Any:
    engine = build(path, {"override_mcore_model_config": option, **layout})
    before = exported(engine)
    out = ppo_step(engine, samples, expected)
    kept = same(before, exported(engine))
    norm = float(out["metrics"]["grad_norm"]) if out else None
    return norm, kept, [name for name in before if ".visual." in name]


@pytest.mark.parametrize(
    ("kind", "layout"), [("dense", "1"), ("dense", "tp2"), ("dense", "pp2"), ("hybrid", "tp2")]
)
def test_frozen_vision(kind: str, layout: str, case: Any, on_ranks: Any) -> None:
    ranks, engine = RANKS[layout]
    given, option = case(kind), {"freeze": ["vision", "aligner"]}
    reports = on_ranks(ranks, frozen, given.path, engine, given.samples, given.expected, option)
    for norm, kept, vision in reports:
        assert kept == vision
        assert norm is None or norm == pytest.approx(given.expected.frozen_norm, rel=TOLERANCE)
    assert any(norm is not None for norm, *_ in reports)


@pytest.mark.parametrize("kind", ["moe", "hybrid moe"])
def test_frozen_routers(kind: str, case: Any, on_ranks: Any) -> None:
    given, option = case(kind), {"moe_config": {"freeze_moe_router": True}}
    ((_, kept, _),) = on_ranks(1, frozen, given.path, {}, given.samples, given.expected, option)
    assert kept == [name for name in kept if name.endswith("mlp.gate.weight")]
    assert len(kept) == 4


# Critics.


def critic(path: Path, layout: Any, samples: Any, expected: Any, folder: Path) -> Any:
    """Compare a critic's values before and after a step of VERL's value loss, and after loading."""
    from verl.workers.config import CriticConfig
    from verl.workers.utils.losses import value_loss

    engine = build(path, layout, kind="value_model")
    start, own = infer(engine, samples)
    head = [
        c.module.output_layer.weight.detach().clone()
        for c in engine.module
        if c.module.post_process
    ]
    loss = partial(
        value_loss,
        config=CriticConfig(
            strategy="megatron", ppo_micro_batch_size_per_gpu=2, use_dynamic_bsz=False
        ),
    )

    def step() -> Any:
        with engine.train_mode():
            out = engine.train_batch(batch(samples, expected), loss)
        return float(out["metrics"]["grad_norm"]) if engine.is_mp_src_rank_with_outputs() else None

    norm = step()
    engine.save_checkpoint(str(folder / "critic"), global_step=1)
    saved, _ = infer(engine, samples)
    step()
    engine.load_checkpoint(str(folder / "critic"), del_local_after_load=False)
    loaded, _ = infer(engine, samples)
    if not start:
        return None
    expected_values = [hidden @ head[0][0] for hidden in expected.hidden[own]]
    return {
        "error": error(start["values"], expected_values, shifted=False),
        "largest": max(float(v.abs().max()) for v in expected_values),
        "norm": norm,
        "loaded": all(map(torch.equal, saved["values"].unbind(), loaded["values"].unbind())),
        "moved": not torch.equal(saved["values"].unbind()[0], start["values"].unbind()[0]),
    }


@pytest.mark.parametrize("kind", ["dense", "tied", "moe", "hybrid", "hybrid moe"])
def test_value_head(kind: str, case: Any, on_ranks: Any, tmp_path: Path) -> None:
    given, norms = case(kind), []
    for name in ("1", "tp2", "pp2", "cp2"):
        ranks, layout = RANKS[name]
        folder = tmp_path / name
        folder.mkdir()
        found = on_ranks(ranks, critic, given.path, layout, given.samples, given.expected, folder)
        (report,) = [r for r in found if r is not None]
        assert report["error"] < TOLERANCE * report["largest"]
        assert report["moved"]
        assert report["loaded"]
        norms.append(report["norm"])
    assert norms == pytest.approx([norms[0]] * len(norms), rel=TOLERANCE)


# Offloading, and VERL's own worker.


def offloaded(path: Path, layout: Any, samples: Any, expected: Any) -> Any:
    """Run like on an accelerator, whose memory VERL frees between its phases."""
    as_accelerator()
    engine = build(path, {"param_offload": True, "optimizer_offload": True, **layout})

    def held() -> int:
        buffers = [b for c in engine.module for b in (*c.buffers, *c.expert_parallel_buffers)]
        return sum(b.param_data.storage().size() for b in buffers)

    resting = held()
    out, own = infer(engine, samples)
    step = ppo_step(engine, samples, expected)
    between = held()
    names = set(exported(engine))
    if not out:
        return None
    return (
        error(out["log_probs"], expected.log_probs[own], shifted=True),
        float(step["metrics"]["grad_norm"]),
        (resting, between, held() > 0),
        names,
    )


@pytest.mark.parametrize(("kind", "name"), [("dense", "1"), ("dense", "tp2"), ("hybrid", "tp2")])
def test_offloading(kind: str, name: str, case: Any, on_ranks: Any) -> None:
    ranks, layout = RANKS[name]
    given = case(kind)
    found = on_ranks(ranks, offloaded, given.path, layout, given.samples, given.expected)
    ((difference, norm, (resting, between, exporting), names),) = [f for f in found if f]
    assert difference < TOLERANCE
    assert norm == pytest.approx(given.expected.grad_norm, rel=TOLERANCE)
    assert (resting, between) == (0, 0)
    assert exporting, "an export needs the weights"
    assert names == set(published_shapes(given.path))


def in_worker(path: Path, layout: Any, samples: Any, expected: Any) -> Any:
    """Run VERL's ``TrainingWorker``, which a Ray actor holds in a cluster."""
    from verl.utils import tensordict_utils
    from verl.workers.config import HFModelConfig, TrainingWorkerConfig
    from verl.workers.engine_workers import TrainingWorker

    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29511"}
    override = {"attn_implementation": "eager"}
    worker = TrainingWorker(
        TrainingWorkerConfig(
            model_type="language_model",
            model_config=HFModelConfig(
                path=str(path), override_config=override, use_fused_kernels=True
            ),
            engine_config=engine_config(
                dtype="float32", dist_ckpt_optim_fully_reshardable=True, **layout
            ),
            optimizer_config=optimizer_config(),
        )
    )
    worker.reset()
    worker.set_loss_fn(ppo())
    data = batch(samples, expected)
    inferred = worker.infer_batch(data.clone())
    tensordict_utils.assign_non_tensor(data, mini_batch_size=4, epochs=1, seed=1)
    trained = worker.train_mini_batch(data)
    if inferred is None:
        return None
    metrics = tensordict_utils.get(trained, "metrics")
    return (
        type(worker.engine).__name__,
        error(inferred["log_probs"], expected.log_probs, shifted=True),
        metrics,
    )


@pytest.mark.parametrize(
    ("kind", "name"), [("dense", "1"), ("dense", "tp2"), ("dense", "cp2"), ("hybrid", "1")]
)
def test_training_worker(kind: str, name: str, case: Any, on_ranks: Any) -> None:
    ranks, layout = RANKS[name]
    given = case(kind)
    found = on_ranks(ranks, in_worker, given.path, layout, given.samples, given.expected)
    ((engine, difference, metrics),) = [f for f in found if f]
    assert engine == "Qwen3VLEngine"
    assert difference < TOLERANCE
    assert metrics["grad_norm"] == pytest.approx([given.expected.grad_norm], rel=TOLERANCE)
