"""A model without a vision tower trains, exports, adapts and answers as transformers' does."""

from __future__ import annotations

import json
import random
import warnings
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from mcore_qwen3vl.converters.convert import mcore_to_hf
from mcore_qwen3vl.data.processor import load_processor
from mcore_qwen3vl.errors import BadInput
from mcore_qwen3vl.generation.prompts import process_conversations
from mcore_qwen3vl.hf_kernels import without_gpu_kernels
from mcore_qwen3vl.layout import Layout
from mcore_qwen3vl.tiny import write_tiny_checkpoint
from mcore_qwen3vl.training.arguments.command_line import CommandLine
from mcore_qwen3vl.verification.curves import (
    TOLERANCE,
    Job,
    curve_of,
    hf_curve,
    train,
    worst_difference,
)
from tests.command import exit_code
from tests.turns import slow

LORA = ("--lora-rank", "3", "--lora-target", "language")


@pytest.fixture(scope="module", params=[False, True], ids=["dense", "moe"])
def alone(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("alone")
    return write_tiny_checkpoint(folder, family="qwen3.5", moe=request.param, text_only=True)


@pytest.fixture(scope="module")
def texts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a file of 16 questions and answers of different lengths."""
    draw = random.Random(7)
    words = ["sea", "river", "ship", "on the", "other", "side", "tells", "a story"]
    file = tmp_path_factory.mktemp("texts") / "train.jsonl"
    records = [
        {"messages": [
            {"role": "user", "content": " ".join(draw.choices(words, k=draw.randint(1, 6)))},
            {"role": "assistant", "content": " ".join(draw.choices(words, k=draw.randint(1, 9)))},
        ]}
        for _ in range(16)
    ]  # fmt: skip
    file.write_text("".join(json.dumps(record) + "\n" for record in records))
    return file


def load(path: Path) -> torch.nn.Module:
    """Load a checkpoint with transformers' defaults; no tensor may be missing or unread."""
    with without_gpu_kernels():
        model, info = AutoModelForCausalLM.from_pretrained(
            path, dtype=torch.float32, output_loading_info=True
        )
    assert not any(info[what] for what in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    return model


@pytest.mark.parametrize("layout", ["tp2xcp2+sp", *slow("single, packed", "pp2xdp2")])
def test_a_run_equals_a_plain_loop_and_its_exports_load_in_transformers(
    alone: Path, texts: Path, layout: str, tmp_path: Path
) -> None:
    name, _, packed = layout.partition(", ")
    job = Job(alone, texts, Layout.parse(name), steps=3, packing=bool(packed))
    save, exports = tmp_path / "save", tmp_path / "exports"
    log = train(job, tmp_path, "--save", str(save), "--save-hf", str(exports))
    difference = worst_difference(curve_of(log), hf_curve(job))
    assert difference.loss <= TOLERANCE
    assert difference.grad_norm <= TOLERANCE
    export = exports / "iter_0000003"
    load(export)
    mcore_to_hf(save, tmp_path / "converted", hf_config=alone)
    source = load_file(alone / "model.safetensors")
    written, converted = (
        load_file(folder / "model.safetensors") for folder in (export, tmp_path / "converted")
    )
    assert written.keys() == converted.keys() == source.keys()
    assert all(torch.equal(written[key], converted[key]) for key in written)
    changed = [key for key in source if not torch.equal(source[key], written[key])]
    assert len(changed) == len([key for key in source if not key.startswith("mtp.")])


def test_an_adapter_has_pefts_keys_of_transformers_model(
    alone: Path, texts: Path, tmp_path: Path
) -> None:
    from peft import PeftModel

    job = Job(alone, texts, Layout.parse("tp2+sp"), steps=2, flags=LORA)
    train(job, tmp_path, "--save-hf", str(tmp_path / "exports"))
    export = tmp_path / "exports" / "iter_0000002"
    factors = load_file(export / "adapter_model.safetensors")
    assert all(key.startswith("base_model.model.model.layers.") for key in factors)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of names that transformers deprecates
        adapted = PeftModel.from_pretrained(load(alone), export)
    held = {
        name.replace(".default.", "."): p
        for name, p in adapted.named_parameters()
        if "lora_" in name
    }
    assert held.keys() == factors.keys()
    assert all(torch.equal(held[key], factor) for key, factor in factors.items())


def test_prompts_are_those_of_the_tokenizer(alone: Path) -> None:
    turns = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "What is the sea?"},
    ]
    ours = process_conversations(load_processor(alone), [turns])["input_ids"]
    theirs = AutoTokenizer.from_pretrained(alone).apply_chat_template(
        turns, add_generation_prompt=True, return_dict=True, return_tensors="pt"
    )["input_ids"]
    assert torch.equal(ours, theirs)


def test_answers_are_those_of_transformers(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = write_tiny_checkpoint(tmp_path / "m", family="qwen3.5", text_only=True, seed=3)
    words = ("--cpu", "--prompt", "Say something.", "--max-new-tokens", "12", "--json")
    assert exit_code("generate", model, *words) == 0
    tokenizer = AutoTokenizer.from_pretrained(model)
    inputs = tokenizer.apply_chat_template(
        [{"role": "user", "content": "Say something."}],
        add_generation_prompt=True, return_dict=True, return_tensors="pt",
    )  # fmt: skip
    out = load(model).generate(
        **inputs,
        max_new_tokens=12,
        do_sample=False,
        output_logits=True,
        return_dict_in_generate=True,
    )
    best = torch.cat(out.logits).topk(2).values
    assert float((best[:, 0] - best[:, 1]).min()) > 1e-3  # no choice of rounding
    (answer,) = json.loads(capsys.readouterr().out)["answers"]
    assert answer["token_ids"] == out.sequences[0, inputs["input_ids"].shape[1] :].tolist()


def test_images_are_refused_by_name_and_flags_about_them_named(
    alone: Path, data: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert exit_code("data", "check", data, "--hf-model", alone) == 1
    said = " ".join(capsys.readouterr().out.split())
    assert "train.jsonl:1: it has the image" in said
    assert "the model is a language model alone, without a vision tower" in said
    asked = [{"role": "user", "content": [{"type": "image", "image": "a.png"}]}]
    with pytest.raises(BadInput, match="without a vision tower: ask it in text"):
        process_conversations(load_processor(alone), [asked])
    flags = ["--image-max-pixels", "9000", "--vision-lr-mult", "0.5", "--seq-length", "64"]
    unused = CommandLine(["--cpu", "--hf-model", str(alone), *flags]).unused()
    assert [item.name for item in unused] == ["--image-max-pixels", "--vision-lr-mult"]
    assert {item.why for item in unused} == {"the model has no vision tower"}
