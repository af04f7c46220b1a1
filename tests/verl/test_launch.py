"""The ready configurations satisfy VERL's own classes, and every option has a reason."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("verl", reason="make test-verl makes an environment that has VERL")

import verl.trainer
from hydra import compose, initialize_config_dir
from omegaconf import OmegaConf
from verl.utils.config import omega_conf_to_dataclass, validate_config

from mcore_qwen3vl.config import Architecture
from mcore_qwen3vl.layout import Layout
from mcore_qwen3vl.published_configs import PUBLISHED
from mcore_qwen3vl.verl.options import REFUSALS, Configs, ModelOptions

FOLDER = Path(__file__).parents[2] / "launch"
NAMES = sorted(path.stem for path in FOLDER.glob("grpo_*.yaml"))
VERLS = Path(verl.trainer.__path__[0]) / "config"


def composed(name: str, *given: str) -> Any:
    with initialize_config_dir(str(FOLDER if name in NAMES else VERLS), version_base=None):
        search = f"hydra.searchpath=[file://{VERLS}]"
        return compose(name, overrides=[search, *given])


def leaves(config: Any, path: str = "") -> dict[str, Any]:
    if not OmegaConf.is_dict(config):
        return {path: OmegaConf.to_container(config) if OmegaConf.is_config(config) else config}
    found: dict[str, Any] = {}
    for key in config:
        below = OmegaConf.to_container(config, resolve=False)[key] == "???"
        found |= {f"{path}.{key}": "???"} if below else leaves(config[key], f"{path}.{key}")
    return found


def written(name: str) -> dict[str, Any]:
    given = OmegaConf.load(FOLDER / f"{name}.yaml")
    del given["defaults"]
    return leaves(given)


def test_there_are_three() -> None:
    assert NAMES == ["grpo_30b_a3b", "grpo_8b", "grpo_tiny"]


@pytest.mark.parametrize("name", NAMES)
def test_everything_written_differs_from_what_it_replaces(name: str) -> None:
    if name == "grpo_tiny":
        theirs = composed("grpo_8b")
    else:
        theirs = composed("ppo_trainer", "model_engine=megatron")
    same = [
        path
        for path, value in written(name).items()
        if value == OmegaConf.select(theirs, path.lstrip("."), throw_on_missing=False)
    ]
    assert same == []


@pytest.mark.parametrize("name", NAMES)
def test_everything_written_is_explained(name: str) -> None:
    lines = (FOLDER / f"{name}.yaml").read_text().splitlines()
    body = lines[lines.index("data:") :]
    for before, line in pairwise(body):
        is_leaf = ":" in line and not line.lstrip().startswith("#") and not line.endswith(":")
        assert not is_leaf or before.lstrip().startswith("#"), f"{line.strip()} has no reason"


def as_its_worker_does(config: Any) -> None:
    """Change what ``ActorRolloutRefWorker.init_model`` changes before it reads the reference."""
    ref = config.ref
    ref.ppo_mini_batch_size = config.actor.ppo_mini_batch_size
    ref.ppo_micro_batch_size = ref.pop("log_prob_micro_batch_size")
    ref.ppo_micro_batch_size_per_gpu = ref.pop("log_prob_micro_batch_size_per_gpu")
    ref.use_dynamic_bsz = ref.pop("log_prob_use_dynamic_bsz")
    ref.ppo_max_token_len_per_gpu = ref.pop("log_prob_max_token_len_per_gpu")


@pytest.mark.parametrize("name", NAMES)
def test_verl_accepts_it(name: str, case: Any) -> None:
    path = case("moe" if "a3b" in name else "dense").path
    config = composed(name, f"actor_rollout_ref.model.path={path}")
    OmegaConf.set_struct(config, False)
    validate_config(config, use_reference_policy=True, use_critic=False)
    as_its_worker_does(config.actor_rollout_ref)
    actor = omega_conf_to_dataclass(config.actor_rollout_ref.actor)
    ref = omega_conf_to_dataclass(config.actor_rollout_ref.ref)
    model = omega_conf_to_dataclass(config.actor_rollout_ref.model)
    omega_conf_to_dataclass(config.actor_rollout_ref.rollout)
    omega_conf_to_dataclass(config.algorithm)
    for role in (actor, ref):
        configs = Configs(model, role.engine, role.optim, role.checkpoint)
        assert [r.option for r in REFUSALS if r.wrong(configs.find(r.path), configs)] == []
        ModelOptions.from_config(role.engine.override_mcore_model_config)


@pytest.mark.parametrize("name", ["grpo_30b_a3b", "grpo_8b"])
def test_layouts_fit_the_model(name: str) -> None:
    config = composed(name, "actor_rollout_ref.model.path=unread")
    megatron, trainer = config.actor_rollout_ref.actor.megatron, config.trainer
    gpus = trainer.nnodes * trainer.n_gpus_per_node
    tp = megatron.tensor_model_parallel_size
    shape = PUBLISHED / f"{name.removeprefix('grpo_')}.json"
    Layout(
        tp=tp,
        ep=megatron.expert_model_parallel_size,
        etp=megatron.expert_tensor_parallel_size or 1,
        dp=gpus // tp,
        sp=megatron.sequence_parallel,
    ).validate(Architecture.from_hf(shape))
    longest = config.data.max_prompt_length + config.data.max_response_length
    assert longest <= config.actor_rollout_ref.actor.ppo_max_token_len_per_gpu
    for role in ("actor", "ref"):
        engine = config.actor_rollout_ref[role].megatron
        assert engine.tensor_model_parallel_size == tp
        assert engine.param_offload
