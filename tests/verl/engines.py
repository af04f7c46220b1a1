"""Engines built like VERL's workers build them, in float32, and steps with one."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from tests.verl.samples import Sample, batch, mine

LR = 1e-3


def build(
    path: Path,
    engine: dict[str, Any] | None = None,
    model: dict[str, Any] | None = None,
    *,
    kind: str = "language_model",
    checkpoint: dict[str, Any] | None = None,
    optimizer: dict[str, Any] | None = None,
) -> Any:
    """Build and initialise an engine.

    Args:
        path: Hugging Face checkpoint.
        engine: fields of ``McoreEngineConfig``.
        model: fields of ``HFModelConfig``.
        kind: VERL's model type.
        checkpoint, optimizer: fields of their configs.
    """
    made = new(path, engine, model, kind=kind, checkpoint=checkpoint, optimizer=optimizer)
    made.initialize()
    return made


def new(
    path: Path,
    engine: dict[str, Any] | None = None,
    model: dict[str, Any] | None = None,
    *,
    kind: str = "language_model",
    checkpoint: dict[str, Any] | None = None,
    optimizer: dict[str, Any] | None = None,
) -> Any:
    """Build an engine without initialising it; the arguments are :func:`build`'s."""
    from verl.workers.config import HFModelConfig, McoreCheckpointConfig
    from verl.workers.engine import EngineRegistry

    override = {"attn_implementation": "eager"}
    model_config = HFModelConfig(
        **{"path": str(path), "override_config": override, **(model or {})}
    )
    model_config.model_type = kind
    given = {
        "dist_ckpt_optim_fully_reshardable": True,
        "use_fused_kernels": True,
        "dtype": "float32",
        **(engine or {}),
    }
    return EngineRegistry.new(
        kind,
        "megatron",
        model_config=model_config,
        engine_config=engine_config(**given),
        optimizer_config=optimizer_config(**(optimizer or {})),
        checkpoint_config=McoreCheckpointConfig(**(checkpoint or {})),
    )


def engine_config(*, dtype: str = "bfloat16", **given: Any) -> Any:
    """Make VERL's engine config, or ours for float32."""
    from verl.workers.config import McoreEngineConfig

    from mcore_qwen3vl.runtime.verl_float32 import Float32EngineConfig

    if dtype == "float32":
        return Float32EngineConfig(**given)
    return McoreEngineConfig(dtype=dtype, **given)


def optimizer_config(**given: Any) -> Any:
    """Make VERL's optimizer config for a few steps with a constant learning rate."""
    from verl.workers.config import McoreOptimizerConfig

    schedule = {"lr_warmup_steps": 0, "total_training_steps": 10, "weight_decay": 0.0}
    return McoreOptimizerConfig(**{"lr": LR, **schedule, **given})


def infer(engine: Any, samples: list[Sample], **options: Any) -> tuple[dict[str, Any], slice]:
    """Return this rank's outputs, {} if it has none, and the samples that they are for."""
    data, own = mine(batch(samples, **options), engine)
    with engine.eval_mode():
        out = engine.infer_batch(data)
    return (out["model_output"] if engine.is_mp_src_rank_with_outputs() else {}), own


def error(found: Any, expected: list[Tensor], *, shifted: bool) -> float:
    """Return the largest difference.

    Args:
        found: nested tensor with one tensor for each sample.
        expected: expected tensor of each sample.
        shifted: whether the last position means nothing.
    """
    pairs = zip(found.unbind(), expected, strict=True)
    return max(float(((a[:-1] if shifted else a) - b).abs().max()) for a, b in pairs)


def ppo() -> Any:
    """Return VERL's own PPO loss."""
    from verl.workers.config import ActorConfig
    from verl.workers.utils.losses import ppo_loss

    actor = ActorConfig(
        strategy="megatron", rollout_n=1, ppo_micro_batch_size_per_gpu=2, use_dynamic_bsz=False
    )
    return partial(ppo_loss, config=actor)


def ppo_step(engine: Any, samples: list[Sample], expected: Any, **options: Any) -> dict[str, Any]:
    """Do one step with VERL's own PPO loss; return this rank's loss and metrics, if any."""
    data, _ = mine(batch(samples, expected, **{"calculate_entropy": False, **options}), engine)
    with engine.train_mode():
        out = engine.train_batch(data, ppo())
        engine.lr_scheduler_step()
    return out if engine.is_mp_src_rank_with_outputs() else {}


def exported(engine: Any) -> dict[str, Tensor]:
    """Return copies of the tensors that a rollout receives."""
    return {name: tensor.clone() for name, tensor in engine.get_per_tensor_param()[0]}


def same(one: dict[str, Tensor], other: dict[str, Tensor]) -> list[str]:
    """Return the names of the tensors that are equal bit for bit."""
    assert list(one) == list(other)
    return [name for name in one if torch.equal(one[name], other[name])]


def as_accelerator() -> None:
    """Answer "cuda" from now on in this process, so that VERL moves what it thinks is on a device.

    Pinned memory, which needs a device, is replaced by ordinary memory.
    """
    from verl.plugin.platform import get_platform
    from verl.workers.engine import EngineRegistry

    from mcore_qwen3vl.verl.engine import Qwen3VLEngine

    type(get_platform()).device_name = "cuda"
    EngineRegistry.register("language_model", "megatron", device="cuda", vendor="none")(
        Qwen3VLEngine
    )
    empty = torch.empty
    torch.empty = lambda *args, pin_memory=False, **kwargs: empty(*args, **kwargs)
    torch.Tensor.pin_memory = lambda self, *args, **kwargs: self
