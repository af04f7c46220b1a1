"""Unsupported options are refused by their VERL names, and VERL chooses the right engine."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("verl", reason="make test-verl makes an environment that has VERL")

from mcore_qwen3vl.errors import BadInput
from mcore_qwen3vl.verl.options import REFUSALS, ModelOptions
from tests.verl.engines import build, new

ASKING: dict[str, dict[str, Any]] = {
    "megatron.qat.enable": {"engine": {"qat": {"enable": True}}},
    "megatron.use_megatron_fsdp": {"engine": {"use_megatron_fsdp": True}},
    "megatron.dynamic_context_parallel": {
        "engine": {"dynamic_context_parallel": True, "max_seqlen_per_dp_cp_rank": 64}
    },
    "megatron.use_dist_checkpointing": {"engine": {"use_dist_checkpointing": True}},
    "megatron.vanilla_mbridge": {"engine": {"vanilla_mbridge": True}},
    "megatron.dtype": {"engine": {"dtype": "float16"}},
    "model.mtp.enable": {"model": {"mtp": {"enable": True}}},
    "model.lora_rank": {"model": {"lora_rank": 8}},
    "model.lora_adapter_path": {"model": {"lora_adapter_path": "somewhere"}},
    "model.use_liger": {"model": {"use_liger": True}},
    "model.tiled_mlp.enabled": {"model": {"tiled_mlp": {"enabled": True}}},
    "model.enable_activation_offload": {"model": {"enable_activation_offload": True}},
    "model.override_config": {"model": {"override_config": {"num_hidden_layers": 2}}},
    "model.hf_config_path": {},  # it needs a second folder, so it has a test below
    "optim.optimizer": {"optimizer": {"optimizer": "muon"}},
    "checkpoint.async_save": {"checkpoint": {"async_save": True}},
    "checkpoint.mbridge_config": {"checkpoint": {"mbridge_config": {"memory_efficient": True}}},
}


def test_every_refusal_is_tried() -> None:
    assert set(ASKING) == {refusal.option for refusal in REFUSALS}


@pytest.mark.parametrize("option", [name for name, asked in ASKING.items() if asked])
def test_refused_by_name(option: str, case: Any, on_ranks: Any) -> None:
    asked = ASKING[option]
    with pytest.raises(BadInput, match=f"this engine does not support. {option}: "):
        on_ranks(1, _build, case().path, asked)


def _build(path: Path, asked: dict[str, Any]) -> None:
    from verl.workers.config import MtpConfig

    if "mtp" in asked.get("model", {}):
        asked = {"model": {"mtp": MtpConfig(enable=True)}}
    build(path, **asked)


def test_config_of_another_folder_is_refused(case: Any, on_ranks: Any, tmp_path: Path) -> None:
    path = case().path
    (tmp_path / "config.json").write_bytes((path / "config.json").read_bytes())
    with pytest.raises(BadInput, match=r"model\.hf_config_path: the config beside the weights"):
        on_ranks(1, _build, path, {"model": {"hf_config_path": str(tmp_path)}})


@pytest.mark.parametrize(
    ("asked", "message"),
    [
        ({"override_mcore_model_config": {"frezee": ["vision"]}}, "frezee, which this model does"),
        ({"override_mcore_model_config": {"freeze": ["visoin"]}}, "visoin selects no parameter"),
        ({"override_mcore_model_config": {"spec": "local"}}, "spec is 'local'; use torch or te"),
        ({"override_mcore_model_config": {"moe_config": {"x": 1}}}, "moe_config.x, which"),
        ({"tensor_model_parallel_size": 3}, "cannot be divided over TP 3"),
        ({"expert_model_parallel_size": 2}, "EP is 2, but this model is dense"),
        ({"dist_ckpt_optim_fully_reshardable": False}, "dist_ckpt_optim_fully_reshardable=True"),
        ({"override_transformer_config": {"fp8": "hybrid"}}, "fp8 needs Transformer Engine"),
    ],
)
def test_other_bad_options(asked: Any, message: str, case: Any, on_ranks: Any) -> None:
    with pytest.raises(BadInput, match=message):
        on_ranks(1, _build, case().path, {"engine": asked})


def test_delta_sharded_is_refused(case: Any, on_ranks: Any) -> None:
    def ask(path: Path) -> None:
        build(path).get_per_tensor_param_shard()

    with pytest.raises(BadInput, match="delta_sharded needs Megatron-Bridge"):
        on_ranks(1, ask, case().path)


def test_defaults_and_verls_spelling() -> None:
    assert ModelOptions.from_config({}).freeze == ()
    given = {"freeze": "vision", "moe_config": {"freeze_moe_router": True}, "head_chunk": 7}
    options = ModelOptions.from_config(given)
    assert options.freeze[0] == "vision"
    assert "router" in options.freeze[1]
    assert (options.spec, options.head_chunk) == ("torch", 7)


def test_registered_for_gpus_beside_verls_own() -> None:
    from verl.workers.engine import EngineRegistry

    import mcore_qwen3vl.verl  # noqa: F401

    for kind, name in (("language_model", "Qwen3VLEngine"), ("value_model", "Qwen3VLValueEngine")):
        known = EngineRegistry._engines[kind]["megatron"]
        assert known["cuda", "nvidia"].__name__ == known["cuda", "amd"].__name__ == name
        assert known["cuda"].__module__.startswith("verl.")


def test_verl_asks_for_classes_where_megatron_has_a_function(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Megatron-Core 0.20 has made a function of its FSDP class."""
    from mcore_qwen3vl.verl import engine

    def function() -> None:
        raise AssertionError("it is not called")

    (classes, *_) = engine.unwrap_model.__defaults__
    monkeypatch.setattr(engine.unwrap_model, "__defaults__", ((*classes, function), "more"))
    monkeypatch.setattr(engine.mcore_fsdp_adapter, "FullyShardedDataParallel", function)
    made = type("FullyShardedDataParallelV1", (), {})
    monkeypatch.setattr(engine.mcore_fsdp_adapter, made.__name__, made, raising=False)
    engine._give_verl_a_class()
    assert engine.unwrap_model.__defaults__ == ((*classes, made), "more")
    assert engine.mcore_fsdp_adapter.FullyShardedDataParallel is made


def test_other_models_get_verls_engine(case: Any, tmp_path: Path, on_ranks: Any) -> None:
    source = case().path
    for file in source.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    config = json.loads((source / "config.json").read_text())["text_config"]
    config |= {"architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3"}
    (tmp_path / "config.json").write_text(json.dumps(config))

    def kinds(path: Path) -> list[str]:
        from verl.workers.engine import MegatronEngineWithLMHead, MegatronEngineWithValueHead

        made = [new(path), new(path, kind="value_model")]
        assert type(made[0]) is MegatronEngineWithLMHead
        assert type(made[1]) is MegatronEngineWithValueHead
        return [type(engine).__name__ for engine in made]

    assert on_ranks(1, kinds, tmp_path) == [
        ["MegatronEngineWithLMHead", "MegatronEngineWithValueHead"]
    ]
