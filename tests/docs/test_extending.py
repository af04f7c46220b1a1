"""The recipes of the page on extending do what they say."""

from __future__ import annotations

import argparse
import importlib
import json
import textwrap
from importlib import import_module
from itertools import islice
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import pytest
import torch

from mcore_qwen3vl import config
from mcore_qwen3vl.config import Architecture
from mcore_qwen3vl.converters.convert import hf_to_mcore, mcore_to_hf
from mcore_qwen3vl.converters.mapping import forms, table
from mcore_qwen3vl.data import DataConfig, Source, load_processor
from mcore_qwen3vl.data.loader import Loader
from mcore_qwen3vl.data.records import parse
from mcore_qwen3vl.data.records.media import MediaFolder
from mcore_qwen3vl.data.records.parse import parse_record
from mcore_qwen3vl.errors import BadInput
from mcore_qwen3vl.flags import add_flags, field_docs, make_from_flags
from mcore_qwen3vl.losses.tokens import cross_entropy, find_loss
from mcore_qwen3vl.model.transformer_config import transformer_config
from mcore_qwen3vl.published_configs import PUBLISHED
from mcore_qwen3vl.settings import run
from mcore_qwen3vl.tiny import write_tiny_checkpoint
from mcore_qwen3vl.tiny.records import write_half_images
from mcore_qwen3vl.training.arguments.parser import validate
from mcore_qwen3vl.training.logs.trackers import Trackers
from mcore_qwen3vl.training.model import fields_from_flags
from tests.converters.checkpoints import load
from tests.converters.forms import rewritten
from tests.docs.markdown import ROOT, blocks


def extension(named: str) -> str:
    """Return the one example of the page on extending that begins with a comment on `named`."""
    page = blocks(ROOT / "docs" / "extending.md", "python")
    (example,) = (one.text for one in page if named in one.text.partition("\n")[0])
    return example


def test_format_example(tmp_path, monkeypatch):
    changed = dict(vars(parse))
    exec(extension("records/parse.py"), changed)
    monkeypatch.setattr(parse, "FORMATS", changed["FORMATS"])
    record = {"question": "What is it?", "picture": "a.png", "reply": "A cat."}
    parsed = parse_record(record, MediaFolder(tmp_path, {}))
    assert [part.kind for part in parsed.media] == ["image"]
    assert [message["role"] for message in parsed.messages] == ["user", "assistant"]
    assert parsed.weights == [0.0, 1.0]


@mock.patch.dict(config.MODEL_TYPES)
@mock.patch.dict(forms.NAMES)
def test_model_example(tmp_path):
    exec(extension("config.py"), vars(forms) | vars(config))
    make = rewritten(as_my_vl, model_type="my_vl")
    make(write_tiny_checkpoint(tmp_path / "model"), tmp_path / "my_vl")
    there = hf_to_mcore(tmp_path / "my_vl", tmp_path / "mcore")
    mcore_to_hf(tmp_path / "mcore", tmp_path / "back")
    assert "names of My-VL" in " ".join(there.notes)
    written, read = load(tmp_path / "back"), load(tmp_path / "my_vl")
    assert read.keys() - written.keys() == {"audio.conv.weight"}
    assert all(torch.equal(tensor, read[name]) for name, tensor in written.items())
    assert "decoder.layers.0.self_attn.q_proj.weight" in written


def as_my_vl(tensors):
    renamed = {
        name.replace("model.language_model.", "decoder.").replace("model.visual.", "eyes."): tensor
        for name, tensor in tensors.items()
    }
    return renamed | {"audio.conv.weight": torch.ones(2)}


def test_loss_example(tmp_path, monkeypatch):
    (tmp_path / "my_losses.py").write_text(extension("my_losses.py"))
    monkeypatch.chdir(tmp_path)
    focal = find_loss("my_losses.py:focal")
    losses = torch.tensor([[0.5, 2.0, torch.inf]])
    total, count = focal(losses, torch.tensor([[1.0, 1.0, 0.0]]))
    assert count == 2
    assert 0 < total < cross_entropy(losses, torch.tensor([[1.0, 1.0, 0.0]]))[0]


def test_tracker_example(tmp_path, monkeypatch):
    (tmp_path / "my_tracker.py").write_text(extension("my_tracker.py"))
    monkeypatch.setenv("MY_LINES", str(tmp_path / "lines"))
    trackers = Trackers([f"{tmp_path}/my_tracker.py:Lines"])
    trackers.begin(None, None, {"lr": 1e-5, "freeze": ["vision", "aligner"]})
    trackers.log({"lm loss": 1.25}, 10)
    trackers.finish(0)
    assert list(map(json.loads, (tmp_path / "lines").read_text().splitlines())) == [
        {"freeze": "vision aligner", "lr": 1e-5},
        {"step": 10, "lm loss": 1.25},
    ]


def test_whole_loss_example(tmp_path, monkeypatch):
    """Each sample counts once, and the parts of two CP ranks add up to the whole."""
    (tmp_path / "my_objective.py").write_text(extension("my_objective.py"))
    monkeypatch.syspath_prepend(tmp_path)
    loss = import_module("my_objective").PerSample
    assert field_docs(loss)["sample_power"].startswith("per_sample: a sample of n tokens")
    per_sample = loss("per_sample").complete(None, None, None).objective(None, None)
    with pytest.raises(BadInput, match="sample_power is -1: it must be 0 or above"):
        loss("per_sample", -1.0).complete(None, None, None)
    weights = torch.tensor([[1.0, 0.0, 1.0, 1.0, 1.0, 0.0]])
    sequences = torch.tensor([[0, 0, 1, 1, 1, 2]])  # the third is padding alone
    batch = SimpleNamespace(loss_weights=weights, sequences=lambda: sequences)
    losses = torch.tensor([[3.0, torch.inf, 1.0, 2.0, 6.0, torch.inf]])
    whole = per_sample(batch, torch.arange(6), losses)
    assert (float(whole.total), float(whole.normaliser)) == (3 + 3, 2)
    own = [torch.tensor([0, 1, 5]), torch.tensor([2, 3, 4])]
    parts = [per_sample(batch, local, losses[:, local]) for local in own]
    assert sum(float(part.total) for part in parts) == 6
    assert sum(float(part.normaliser) for part in parts) == 2


def test_sidecar_example(dense, tmp_path, monkeypatch):
    """Each sample has its own number, also in balanced packs, and a missing file is refused."""
    (tmp_path / "my_sidecar.py").write_text(extension("my_sidecar.py"))
    monkeypatch.syspath_prepend(tmp_path)
    mine = import_module("my_sidecar")
    data = write_half_images(tmp_path / "data", 8, tokens=100, image_side=4, token_pixels=8)
    read = {"inputs": mine.SampleWeights, "sidecar": mine.WeightFile()}
    architecture, processor = Architecture.from_hf(dense), load_processor(dense)

    def batches(**options):
        settings = DataConfig(256, **read, **options)
        return Loader([Source(data)], architecture, processor, settings, num_workers=0)

    with pytest.raises(BadInput, match=r"train\.weights\.json cannot be read"):
        batches()
    data.with_suffix(".weights.json").write_text(json.dumps([number / 2 for number in range(8)]))
    for options in ({"micro_batch_size": 2}, {"packing": True}, {"packing": True, "balance": True}):
        seen = []
        for batch in islice(batches(**options), 4):
            lines = [int(name.rpartition(":")[2]) for name in batch.names]
            weights = batch.inputs_of(mine.SampleWeights).values
            assert weights.tolist() == [(line - 1) / 2 for line in lines]
            seen += lines
        assert len(set(seen)) > 4


@pytest.mark.parametrize("moe", [False, True])
def test_tensor_example(moe, tmp_path, monkeypatch):
    exec(extension("mapping/table.py"), vars(table))
    layer_of = table._layer

    def layer(a, index, layout):
        yield from layer_of(a, index, layout)
        yield from table._gates(a, table._Layer(index, a.num_hidden_layers, stacked=True))

    write_tiny_checkpoint(tmp_path / "model", moe=moe)
    architecture = Architecture.from_hf(tmp_path / "model")
    shapes = {"query": architecture.num_attention_heads, "key": architecture.num_key_value_heads}
    gates = {
        f"model.language_model.layers.{index}.self_attn.{name}_gate.weight": torch.randn(
            rows, architecture.hidden_size
        )
        for index in range(architecture.num_hidden_layers)
        for name, rows in shapes.items()
    }
    rewritten(lambda tensors: tensors | gates)(tmp_path / "model", tmp_path / "gated")
    monkeypatch.setattr(table, "_layer", layer)
    hf_to_mcore(tmp_path / "gated", tmp_path / "mcore")
    mcore_to_hf(tmp_path / "mcore", tmp_path / "back")
    written, read = load(tmp_path / "back"), load(tmp_path / "gated")
    assert written.keys() == read.keys() > gates.keys()
    assert all(torch.equal(tensor, read[name]) for name, tensor in written.items())
    del table._gates


def test_megatrons_flag_reaches_the_model():
    architecture = Architecture.from_hf(PUBLISHED / "2b.json")
    least = [
        "--hf-model",
        str(PUBLISHED / "2b.json"),
        "--data-path",
        "x.jsonl",
        "--train-iters",
        "1",
    ]
    args = validate([*least, "--cpu", "--hidden-dropout", "0.1"], 1).args
    assert transformer_config(architecture, **fields_from_flags(args)).hidden_dropout == 0.1


def test_flag_example(tmp_path, monkeypatch):
    first = "    freeze: Patterns = ()\n"
    source = Path(run.__file__).read_text()
    assert source.count(first) == 1
    field = textwrap.indent(extension("run.py, TrainingSettings"), "    ")
    (tmp_path / "extended_flags.py").write_text(source.replace(first, f"{field}\n{first}"))
    monkeypatch.syspath_prepend(tmp_path)
    extended = importlib.import_module("extended_flags")
    parser = argparse.ArgumentParser()
    add_flags(parser.add_argument_group(), extended.TrainingSettings)
    lines = (parser.parse_args(words) for words in (["--logit-scale", "0.5"], []))
    given = (make_from_flags(extended.TrainingSettings, line) for line in lines)
    assert [training.logit_scale for training in given] == [0.5, 1.0]
