"""The demo of conversion passes, and fails when one is wrong; an exported model answers by HF."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from mcore_qwen3vl import demos
from mcore_qwen3vl.converters.convert import hf_to_mcore, mcore_to_hf
from mcore_qwen3vl.layout import Layout
from mcore_qwen3vl.tiny.records import write_image_qa
from mcore_qwen3vl.verification.curves import Job, train


@pytest.mark.parametrize("dense", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_holds_and_keeps_its_files(tmp_path, dense):
    steps = demos.convert_demo(dense=dense, keep=tmp_path)
    assert [step.ok for step in steps] == [None, None, True, None, True], steps
    assert (tmp_path / "mcore" / "latest_checkpointed_iteration.txt").read_text() == "release"
    assert {folder.name for folder in tmp_path.iterdir()} == {"hf", "mcore", "hf-again"}


def test_a_wrong_weight_on_the_way_there_shows_in_the_logits(tmp_path, monkeypatch):
    def swapped(src, dst):
        weights = load_file(src / "model.safetensors")
        keys, values = (
            f"model.language_model.layers.1.self_attn.{n}_proj.weight" for n in ("k", "v")
        )
        weights[keys], weights[values] = weights[values], weights[keys]
        source = tmp_path / "wrong"
        source.mkdir()
        for file in src.iterdir():
            (source / file.name).write_bytes(file.read_bytes())
        save_file(weights, source / "model.safetensors", {"format": "pt"})
        return hf_to_mcore(source, dst)

    monkeypatch.setattr(demos, "hf_to_mcore", swapped)
    steps = demos.convert_demo(keep=tmp_path)
    assert [step.ok for step in steps][2:] == [False, None, False]


@pytest.mark.slow
def test_a_changed_companion_file_shows(tmp_path, monkeypatch):
    def careless(src, dst):
        summary = mcore_to_hf(src, dst)
        config = json.loads((dst / "generation_config.json").read_text())
        (dst / "generation_config.json").write_text(json.dumps(config | {"eos_token_id": 0}))
        return summary

    monkeypatch.setattr(demos, "mcore_to_hf", careless)
    steps = demos.convert_demo(keep=tmp_path)
    assert [step.ok for step in steps] == [None, None, True, None, False]
    assert "5 of 6 other files" in steps[-1].result


@pytest.mark.slow  # `make train-demo` shows the same
@pytest.mark.parametrize("layout", ["tp2+sp"])
def test_the_exported_model_answers_what_was_learnt(
    layout: str, dense: Path, tmp_path: Path
) -> None:
    data = write_image_qa(tmp_path / "data", 8, text_only_every=None)
    job = Job(dense, data, Layout.parse(layout), steps=70, batch=1, seq_length=512, packing=True)
    log = train(
        job, tmp_path / "run", "--save-hf", str(tmp_path / "hf"), "--lr", "5e-3",
        "--packing-buffer", "8", "--weight-decay", "0", timeout=300,
    )  # fmt: skip
    assert log[-1]["lm loss"] < 0.02
    records = [json.loads(line)["messages"] for line in data.read_text().splitlines()]
    with torch.no_grad():
        answers = demos.answer_first_turns(tmp_path / "hf" / "iter_0000070", records, data.parent)
    assert answers == [messages[-1]["content"] for messages in records]
