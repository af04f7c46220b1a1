"""What a model's folder holds and nothing uses is named; what transformers knows is sorted."""

from __future__ import annotations

import json
import shutil
from dataclasses import fields
from pathlib import Path
from typing import Any

import peft
import pytest
from transformers import (
    AutoProcessor,
    AutoTokenizer,
    GenerationConfig,
    PreTrainedConfig,
    Qwen3_5Config,
    Qwen3_5MoeConfig,
    Qwen3VLConfig,
    Qwen3VLMoeConfig,
)

from mcore_qwen3vl.converters.adapters.adapter import unused_of_adapter
from mcore_qwen3vl.converters.adapters.config import _FIELDS, _OTHERS, AdapterConfig
from mcore_qwen3vl.errors import BadInput
from mcore_qwen3vl.generation.sampling import load_generation_config
from mcore_qwen3vl.losses.embedding import require_last_token_pooling
from mcore_qwen3vl.scoring.score import ScoreRequest, score
from mcore_qwen3vl.tiny import YARN, tiny_config
from mcore_qwen3vl.training.arguments.command_line import CommandLine
from mcore_qwen3vl.training.arguments.parser import validate
from mcore_qwen3vl.training.run import Run
from mcore_qwen3vl.unused.fields import Fields, Unused, as_json, sentences
from mcore_qwen3vl.unused.folder import (
    CONFIG,
    EXPERTS,
    GENERATION,
    HYBRID,
    OWNERS,
    TEXT,
    TOKENIZER,
    VISION,
    unused_of,
    unused_of_config,
)
from tests.command import exit_code

NEW = {"frobnicate": 1}


def known(owner: Fields) -> set[str]:
    return {*owner.used, *owner.inert, *owner.without_effect, *owner.reasons}


def write(folder: Path, **files: Any) -> Path:
    """Write JSON files, whose names lack the ending, and return their folder."""
    for name, content in files.items():
        (folder / f"{name}.json").write_text(json.dumps(content))
    return folder


def quantized() -> dict[str, Any]:
    return {"quant_method": "fp8", "weight_block_size": [128, 128], **NEW}


@pytest.mark.parametrize(
    ("where", "change"),
    [
        ("config.json", NEW),
        ("text_config of config.json", {"text_config": NEW}),
        ("vision_config of config.json", {"vision_config": NEW}),
        ("text_config.rope_scaling of config.json", {"text_config": {"rope_scaling": NEW}}),
        (
            "vision_config.rope_parameters of config.json",
            {"vision_config": {"rope_parameters": {"rope_theta": 1e4, **NEW}}},
        ),
        ("quantization_config of config.json", {"quantization_config": quantized()}),
        (
            "quantization_config of config.json",
            {"text_config": {"quantization_config": quantized()}},
        ),
    ],
)
@pytest.mark.parametrize("moe", [False, True])
def test_an_unknown_field_of_the_config_is_named(
    where: str, change: dict[str, Any], moe: bool, tmp_path: Path
) -> None:
    config = merged(tiny_config(moe=moe), change)
    write(tmp_path, config=config)
    for source in (tmp_path, tmp_path / "config.json"):
        assert unused_of(source) == [Unused(where, "frobnicate")]


def merged(config: dict[str, Any], change: dict[str, Any]) -> dict[str, Any]:
    """Return `config` with `change`, object by object."""
    for name, value in change.items():
        both = isinstance(value, dict) and isinstance(config.get(name), dict)
        config[name] = merged(config[name], value) if both else value
    return config


@pytest.mark.parametrize("name", ["generation_config", "tokenizer_config"])
def test_an_unknown_field_of_other_files_is_named(name: str, tmp_path: Path) -> None:
    write(tmp_path, config=tiny_config(), **{name: NEW})
    assert unused_of(tmp_path) == [Unused(f"{name}.json", "frobnicate")]


def test_a_file_that_nobody_reads_or_copies_is_named(tmp_path: Path) -> None:
    write(tmp_path, config=tiny_config())
    (tmp_path / "original").mkdir()
    for name in ("model.safetensors", "README.md", "notes.py", ".git", "iter_0000001"):
        (tmp_path / name).touch()
    for name in ("pytorch_model.bin", "training_args.bin", "original/consolidated.safetensors"):
        (tmp_path / name).touch()
    (tmp_path / "linked").symlink_to(tmp_path / "original")
    names = {unused.name for unused in unused_of(tmp_path)}
    assert names == {
        *("pytorch_model.bin", "training_args.bin", "original/consolidated.safetensors", "linked")
    }


def test_a_second_chat_template_is_named(tmp_path: Path) -> None:
    (tmp_path / "chat_template.jinja").write_text("a")
    write(tmp_path, config=tiny_config(), tokenizer_config={"chat_template": "a"})
    assert unused_of(tmp_path) == []
    write(tmp_path, tokenizer_config={"chat_template": "b"}, chat_template={"chat_template": "c"})
    assert [unused.where for unused in unused_of(tmp_path)] == [
        "chat_template.jinja",
        "tokenizer_config.json",
    ]


FILES = ("processor_config", "chat_template", "chat_template.jinja", "tokenizer_config")


@pytest.mark.parametrize("files", [FILES[i:] for i in range(3)] + [FILES[::3], FILES[1::2]])
def test_the_template_that_counts_is_transformers(
    files: tuple[str, ...], dense: Path, tmp_path: Path
) -> None:
    folder = shutil.copytree(dense, tmp_path / "model")
    (folder / "chat_template.jinja").unlink()
    for name in files:
        file = folder / (name if name == "chat_template.jinja" else f"{name}.json")
        content = json.loads(file.read_text()) if file.exists() else {}
        text = json.dumps({**content, "chat_template": file.name})
        file.write_text(file.name if file.suffix == ".jinja" else text)
    named = {unused.where: unused.why for unused in unused_of(folder)}
    counts = AutoProcessor.from_pretrained(folder).chat_template
    alone = AutoTokenizer.from_pretrained(folder).chat_template
    others = {f"{name}.json".replace(".jinja.json", ".jinja") for name in files} - {counts}
    assert named == {
        name: f"{counts} counts" + "; a tokenizer alone takes this one" * (name == alone)
        for name in others
    }


@pytest.mark.parametrize(
    ("change", "names"),
    [
        ({"text_config": {"attention_dropout": 0.1}}, ["attention_dropout"]),
        ({"text_config": {"sliding_window": 128}}, ["sliding_window"]),
        ({"text_config": {"norm_topk_prob": False}}, ["norm_topk_prob"]),
        ({"text_config": {"pad_token_id": 3}}, ["pad_token_id"]),
        ({"text_config": {"num_experts": 8}}, ["num_experts"]),
        ({"text_config": {"rope_scaling": {"factor": 4.0}}}, ["factor"]),
        ({"text_config": {"image_token_id": 1}}, ["image_token_id"]),
        ({"vision_config": {"initializer_range": 0.1}}, ["initializer_range"]),
        ({"vision_config": {"dtype": "float16"}}, ["dtype"]),
        ({"vocab_size": 77, "head_dim": 24}, ["vocab_size"]),
        ({"num_labels": 3}, ["num_labels"]),
        ({"auto_map": {"AutoModel": "evil.Model"}}, ["auto_map"]),
        ({"transformers_version": "9", "text_config": {"use_cache": False, **YARN}}, []),
    ],
)
def test_a_field_is_named_if_its_value_asks_for_something(
    change: dict[str, Any], names: list[str]
) -> None:
    assert [unused.name for unused in unused_of_config(merged(tiny_config(), change))] == names


def fields_of(config: PreTrainedConfig) -> set[str]:
    made_inside = {"_output_attentions", "_post_init_done", "ignore_keys_at_rope_validation"}
    return {*config.__dict__, *config.attribute_map} - made_inside


@pytest.mark.parametrize(
    ("kind", "more"),
    [
        (Qwen3VLConfig, ()),
        (Qwen3VLMoeConfig, EXPERTS),
        (Qwen3_5Config, HYBRID),
        (Qwen3_5MoeConfig, (*EXPERTS, *HYBRID)),
    ],
)
def test_every_field_of_transformers_configs_is_sorted(
    kind: type[PreTrainedConfig], more: tuple[str, ...]
) -> None:
    config = kind()
    labels = {"id2label", "label2id", "problem_type"}  # of interest at the top level alone
    sections = {"dtype", *labels}
    assert fields_of(config) <= known(CONFIG)
    assert fields_of(config.vision_config) - sections <= known(VISION)
    assert fields_of(config.text_config) - sections <= {*known(TEXT), *more}


def test_what_transformers_writes_is_not_named() -> None:
    """No class writes a field, by default or with a tiny model's sizes, that is named."""
    for kind in (Qwen3VLConfig, Qwen3VLMoeConfig, Qwen3_5Config, Qwen3_5MoeConfig):
        family = "qwen3.5" if kind.__name__.startswith("Qwen3_5") else "qwen3-vl"
        written = kind(**tiny_config(family=family, moe="Moe" in kind.__name__)).to_dict()
        assert unused_of_config(json.loads(json.dumps(written))) == []


def test_every_field_of_generation_config_is_sorted() -> None:
    asked = {  # named if they are there at all
        *("max_time", "stop_strings", "cache_config", "bad_words_ids", "forced_bos_token_id"),
        *("forced_eos_token_id", "exponential_decay_length_penalty", "suppress_tokens"),
        *("begin_suppress_tokens", "sequence_bias", "watermarking_config", "constraints"),
        *("decoder_start_token_id", "dola_layers", "force_words_ids"),
    }
    assert set(GenerationConfig().__dict__) - known(GENERATION) == asked - known(GENERATION)
    given = {
        "num_beams": 4,
        "no_repeat_ngram_size": 3,
        "temperature": 0.5,
        "num_return_sequences": 1,
    }
    assert [unused.name for unused in GENERATION.unused(given)] == [
        "num_beams",
        "no_repeat_ngram_size",
    ]


def test_every_field_of_a_lora_config_is_sorted() -> None:
    assert {field.name for field in fields(peft.LoraConfig)} <= known(_OTHERS) | set(_FIELDS)
    written = peft.LoraConfig(r=4, target_modules=["q_proj"]).to_dict()
    assert AdapterConfig.from_dict(json.loads(json.dumps(written, default=list))).unused == []
    config = AdapterConfig.from_dict({"peft_type": "LORA", **NEW, "fan_in_fan_out": True})
    assert [unused.name for unused in config.unused] == ["frobnicate", "fan_in_fan_out"]


def test_commands_name_what_they_do_not_use(
    dense: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = shutil.copytree(dense, tmp_path / "model")
    config = merged(tiny_config(), {"text_config": NEW, "vision_config": NEW, "new": 1})
    write(model, config=config, generation_config={"num_beams": 4}, tokenizer_config=NEW)
    data = tmp_path / "data.jsonl"
    turns = [{"role": "user", "content": "2 + 2?"}, {"role": "assistant", "content": "4"}]
    data.write_text(json.dumps({"messages": turns}))
    wanted = [as_json([unused])[0] for unused in unused_of(model)]
    assert [one["name"] for one in wanted] == ["new", *["frobnicate"] * 3, "num_beams"]
    for command in (
        ("inspect", model),
        ("inspect", "--hf-config", model),
        ("convert", "hf-to-hf", model, tmp_path / "out", "--dry-run"),
        ("convert", "hf-to-mcore", model, tmp_path / "mcore"),
        ("inspect", tmp_path / "mcore"),
        ("data", "check", data, "--hf-model", model),
    ):
        assert exit_code(*command, "--json") == 0
        named = json.loads(capsys.readouterr().out)["unused"]
        for one in named:  # `data check` lists the samples too, and files have none
            assert one.pop("samples", []) == []
        assert named == wanted
    assert exit_code("convert", "hf-to-hf", model, tmp_path / "out") == 0
    lines = capsys.readouterr().err.splitlines()
    assert [line for line in lines if "not used of" in line] == sentences(unused_of(model))


def test_the_start_of_training_names_it(
    dense: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = shutil.copytree(dense, tmp_path / "model")
    write(model, config=merged(tiny_config(), NEW))
    adapter = write(tmp_path, adapter_config={"peft_type": "LORA", "r": 2, **NEW})
    words = ["--hf-model", str(model), "--lora-config", str(adapter), "--data-path", "a.jsonl"]
    run = object.__new__(Run)
    run.settings = CommandLine(words).settings
    assert sentences(run._unused_of_files()) == [
        "not used of config.json: frobnicate",
        "not used of adapter_config.json: frobnicate",
    ]


def test_generation_without_its_config_stops_as_the_model_config_says(tmp_path: Path) -> None:
    config = merged(tiny_config(), {"text_config": {"eos_token_id": 7}})
    write(tmp_path, config=config)
    ours = load_generation_config(tmp_path)
    assert ours.eos_token_id == GenerationConfig.from_model_config(config).eos_token_id == 7


def test_the_tiny_checkpoint_has_nothing_unused(dense: Path, moe: Path) -> None:
    assert [*unused_of(dense), *unused_of(moe)] == []
    assert TOKENIZER.unused({"pad_token": "x", "padding_side": "left", "add_bos_token": True}) == [
        Unused("tokenizer_config.json", "add_bos_token", "tokenizer.json says what is added")
    ]
    assert len(OWNERS) == len(set(OWNERS))


def test_files_beside_an_adapter_that_differ_from_the_bases_are_named(
    dense: Path, tmp_path: Path
) -> None:
    adapter, config = tmp_path / "adapter", {"peft_type": "LORA", "r": 2}
    adapter.mkdir()
    write(adapter, adapter_config=config, added_tokens={"<new>": 300})
    (adapter / "chat_template.jinja").write_text("another")
    (adapter / "README.md").write_text("PEFT's")
    tokenizer = json.loads((dense / "tokenizer_config.json").read_text())
    write(adapter, tokenizer_config=dict(reversed(tokenizer.items())))  # says the same
    shutil.copy(dense / "tokenizer.json", adapter)
    where, counts = "the adapter's folder", ", and only the base counts"
    assert unused_of_adapter(adapter, dense) == [
        Unused(where, "chat_template.jinja", f"it differs from the base's{counts}"),
        Unused(where, "added_tokens.json", f"the base has none{counts}"),
    ]
    for base in (None, dense / "config.json", adapter):
        assert unused_of_adapter(adapter, base) == []
    assert unused_of_adapter(adapter / "adapter_config.json", dense) == []


@pytest.mark.parametrize(
    ("file", "content", "message"),
    [
        ("1_Pooling/config.json", {"pooling_mode_mean_tokens": True}, "pooling mean_tokens"),
        ("1_Pooling/config.json", {"pooling_mode": "cls"}, "pooling cls"),
        ("1_Pooling/config.json", {"pooling_mode": ["lasttoken", "max"]}, "pooling lasttoken, max"),
        ("2_Dense/config.json", {"out_features": 8}, "2_Dense is a layer on top"),
    ],
)
def test_embeddings_of_another_kind_are_refused(
    file: str, content: dict[str, Any], message: str, dense: Path, tmp_path: Path
) -> None:
    model = Path(shutil.copytree(dense, tmp_path / "model"))
    (model / file).parent.mkdir()
    (model / file).write_text(json.dumps(content))
    with pytest.raises(BadInput, match=message):
        require_last_token_pooling(model)
    (data := tmp_path / "data.jsonl").write_text('{"query": "a"}\n')
    with pytest.raises(BadInput, match=message):
        score(ScoreRequest(model, data, task="embedding", out=tmp_path / "x.parquet"))
    words = ["--cpu", "--hf-model", str(model), "--data-path", "x.jsonl", "--train-iters", "1"]
    with pytest.raises(BadInput, match=message):
        validate([*words, "--task", "embedding"], 1)
    validate(words, 1)


@pytest.mark.parametrize(
    "content",
    [
        {"pooling_mode": "lasttoken"},
        {"pooling_mode_lasttoken": True, "pooling_mode_mean_tokens": False, "include_prompt": True},
    ],
)
def test_embeddings_of_the_last_token_are_not(content: dict[str, Any], tmp_path: Path) -> None:
    (tmp_path / "1_Pooling").mkdir()
    (tmp_path / "1_Pooling" / "config.json").write_text(json.dumps(content))
    require_last_token_pooling(tmp_path)


def test_prompts_of_sentence_transformers_are_named(tmp_path: Path) -> None:
    plain = {"__version__": {}, "similarity_fn_name": "cosine", "default_prompt_name": None}
    write(tmp_path, config=tiny_config(), config_sentence_transformers={**plain, "prompts": {}})
    assert unused_of(tmp_path) == []
    prompts = {"prompts": {"query": "Represent: "}, "default_prompt_name": "query"}
    write(tmp_path, config_sentence_transformers={**plain, **prompts})
    why = "an instruction is a system message of the text"
    where = "config_sentence_transformers.json"
    assert unused_of(tmp_path) == [
        Unused(where, "default_prompt_name", why),
        Unused(where, "prompts", why),
    ]
