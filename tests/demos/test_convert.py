"""The demo passes, and fails when a conversion is wrong."""

import json

import pytest
from safetensors.torch import load_file, save_file

from mcore_qwen3vl.converters.convert import hf_to_mcore, mcore_to_hf
from mcore_qwen3vl.demos import convert as demo


@pytest.mark.parametrize("dense", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_holds_and_keeps_its_files(tmp_path, dense):
    result = demo.run_demo(dense=dense, keep=tmp_path)
    assert [step.ok for step in result.steps] == [None, None, True, None, True], result.steps
    assert result.ok
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

    monkeypatch.setattr(demo, "hf_to_mcore", swapped)
    result = demo.run_demo(keep=tmp_path)
    assert [step.ok for step in result.steps][2:] == [False, None, False]
    assert not result.ok


@pytest.mark.slow
def test_a_changed_companion_file_shows(tmp_path, monkeypatch):
    def careless(src, dst):
        summary = mcore_to_hf(src, dst)
        config = json.loads((dst / "generation_config.json").read_text())
        (dst / "generation_config.json").write_text(json.dumps(config | {"eos_token_id": 0}))
        return summary

    monkeypatch.setattr(demo, "mcore_to_hf", careless)
    result = demo.run_demo(keep=tmp_path)
    assert [step.ok for step in result.steps] == [None, None, True, None, False]
    assert "5 of 6 other files" in result.steps[-1].result
