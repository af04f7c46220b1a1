"""The --lora flags give the right adapter config, and wrong ones are refused."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from mcore_qwen3vl.config import Architecture
from mcore_qwen3vl.converters.adapters.config import AdapterConfig
from mcore_qwen3vl.errors import BadInput
from mcore_qwen3vl.tiny import tiny_config
from mcore_qwen3vl.training.arguments.command_line import CommandLine
from mcore_qwen3vl.training.arguments.settings import Settings

DENSE, MOE = (Architecture.from_hf(tiny_config(moe=moe)) for moe in (False, True))
TIED = Architecture.from_hf(tiny_config(tie=True))


def parse(*flags: str) -> Settings:
    return CommandLine(["--load-hf", "base", "--save", "run", *flags]).settings


def config(*flags: str, architecture: Architecture = DENSE) -> AdapterConfig:
    settings = parse(*flags)
    return settings.lora.adapter_config(architecture, settings.loss.scored_by)


def test_one_flag_is_enough() -> None:
    assert not parse().lora.trains_adapter
    made = config("--lora-target", "language")
    assert (made.r, made.lora_alpha, made.use_rslora) == (16, 32, False)
    assert config("--lora-rank", "8").target_modules == made.target_modules
    assert made.target_parameters is None
    moe = config("--lora-rank", "8", architecture=MOE)
    assert moe.target_parameters == ("mlp.experts.gate_up_proj", "mlp.experts.down_proj")


def test_names_are_modules_parameters_or_a_pattern() -> None:
    names = ("q_proj", "down_proj", "mlp.gate.weight", "mlp.experts.down_proj", "attn.qkv")
    made = config("--lora-target", *names)
    assert made.target_modules == ("q_proj", "down_proj", "attn.qkv")
    assert made.target_parameters == ("mlp.gate.weight", "mlp.experts.down_proj")
    assert config("--lora-target", "all-linear").target_modules == "all-linear"
    pattern = r".*layers\.[0-3]\.self_attn\.[qv]_proj"
    assert config("--lora-target", pattern).target_modules == pattern


def test_tied_embeddings_stay_tied(tmp_path: Path) -> None:
    flags = ("--lora-rank", "8", "--lora-modules-to-save", "embed_tokens")
    assert config(*flags, architecture=TIED).ensure_weight_tying
    assert not config(*flags, architecture=DENSE).ensure_weight_tying
    apart = AdapterConfig(target_modules=("q_proj",), modules_to_save=("lm_head",))
    (tmp_path / "adapter_config.json").write_text(apart.to_json())
    with pytest.raises(BadInput, match="without ensure_weight_tying"):
        config("--lora-init", str(tmp_path), architecture=TIED)
    file = str(tmp_path / "adapter_config.json")
    assert config("--lora-config", file, architecture=TIED).ensure_weight_tying


def test_a_config_file_decides_everything(tmp_path: Path) -> None:
    made = AdapterConfig(r=3, target_modules=("q_proj",), rank_pattern={"q_proj": 5})
    file = tmp_path / "adapter_config.json"
    file.write_text(made.to_json())
    assert config("--lora-config", str(file)).rank_pattern == {"q_proj": 5}
    with pytest.raises(BadInput, match=r"--lora-config decides this already: drop --lora-rank"):
        config("--lora-config", str(file), "--lora-rank", "4")
    file.write_text(json.dumps({**made.to_dict(), "init_lora_weights": "gaussian"}))
    with pytest.raises(BadInput, match="pass it as --lora-init"):
        config("--lora-config", str(file))


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (("--lora-target", "language", "q_proj"), "language cannot be combined"),
        (("--lora-config", "/nowhere.json"), "does not exist"),
    ],
)
def test_what_makes_no_sense_is_refused(flags: tuple[str, ...], message: str) -> None:
    with pytest.raises(BadInput, match=message):
        config(*flags)


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (("--lora-rank", "0"), "ranks start at 1"),
        (("--lora-rank", "4", "--lora-dropout", "1.5"), "a probability below 1"),
        (("--lora-alpha", "4"), r"--lora-alpha is set, but nothing asks for LoRA"),
        (("--lora-rslora",), r"add --lora-rank 16"),
        (("--lora-rank", "4", "--freeze", "vision"), "LoRA freezes them all"),
        (("--lora-rank", "4", "--ckpt-format", "torch"), "store an adapter without its base"),
        (("--lora-rank", "4", "--load-hf", ""), "add --load-hf DIR"),
        (("--lora-rank", "4", "--pretrained-checkpoint", "mcore"), "both give the base"),
    ],
)
def test_flags_that_do_not_go_with_lora(flags: tuple[str, ...], message: str) -> None:
    settings = parse(*flags)
    with pytest.raises(BadInput, match=message):
        settings.lora.check(settings)
    unsaved = CommandLine(["--lora-rank", "4"]).settings
    unsaved.lora.check(unsaved)  # allowed: nothing is saved


def test_a_reward_models_head_belongs_to_its_task(tmp_path: Path) -> None:
    with pytest.raises(BadInput, match="add --task reward"):
        config("--lora-rank", "4", "--lora-modules-to-save", "score")
    (tmp_path / "adapter_config.json").write_text(AdapterConfig().to_json())
    with pytest.raises(BadInput, match="has no head score"):
        config("--lora-init", str(tmp_path), "--task", "reward")
