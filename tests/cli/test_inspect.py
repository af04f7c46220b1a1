"""What a path or a config is, and the table of its tensors, as text and JSON."""

from __future__ import annotations

import json

from mcore_qwen3vl.config import Architecture
from mcore_qwen3vl.converters.mapping.table import table
from tests.command import exit_code


def test_inspect(checkpoint, tmp_path, capsys):
    assert exit_code("inspect", checkpoint, "--json") == 0
    inspection = json.loads(capsys.readouterr().out)
    assert inspection["kind"] == "huggingface"
    assert inspection["total_parameters"] == sum(inspection["parameters"].values()) == 532_168
    assert exit_code("inspect", checkpoint) == 0
    summary = capsys.readouterr().out
    assert "12, 3 a token, layout published" in summary
    assert "2.13 MB in 1 file\n" in summary
    assert "134 Hugging Face tensors; --tensors lists them" in summary
    assert "lm_head.weight" not in summary
    assert exit_code("inspect", checkpoint, "--tensors") == 0
    assert "lm_head.weight" in capsys.readouterr().out


def test_inspect_table_is_the_mapping_of_a_checkpoint(checkpoint, tmp_path, capsys):
    assert exit_code("inspect", checkpoint, "--table", "--json") == 0
    lines = {line["mcore"]: line for line in json.loads(capsys.readouterr().out)["mapping"]}
    qkv = lines["decoder.layers.self_attention.linear_qkv.weight"]
    layer = "model.language_model.layers.{0..3}."
    assert qkv["hf"] == [f"{layer}self_attn.{n}_proj.weight" for n in "qkv"]
    assert qkv["hf_shapes"] == [[192, 48], [96, 48], [96, 48]]
    assert (qkv["shape"], qkv["stacked"], qkv["rows"]) == ([384, 48], [4], 4)
    assert (qkv["transform"], qkv["tp_axis"]) == ("interleave rows in 4 groups", 0)
    experts = lines["decoder.layers.mlp.experts.experts.linear_fc1.weight"]
    assert experts["hf"] == [f"{layer}mlp.experts.gate_up_proj"]
    assert (experts["shape"], experts["stacked"], experts["rows"]) == ([72, 48], [4, 12], 48)
    assert (experts["transform"], experts["tp_parts"], experts["cut_by"]) == ("transpose", 2, "ETP")
    assert lines["decoder.layers.mlp.router.weight"]["cut_by"] is None
    assert sum(line["rows"] for line in lines.values()) == len(
        table(Architecture.from_hf(checkpoint))
    )

    assert exit_code("inspect", checkpoint, "--table") == 0
    printed = capsys.readouterr().out
    assert "model.visual.blocks.{0..4}.attn.qkv.weight" in printed
    assert "…" not in printed


def test_inspect_table_of_a_config_and_of_a_padded_checkpoint(checkpoint, tmp_path, capsys):
    assert exit_code("inspect", checkpoint / "config.json", "--table", "--json") == 0
    alone = json.loads(capsys.readouterr().out)
    assert alone["kind"] == "config"
    assert exit_code("inspect", checkpoint, "--table", "--json") == 0
    assert json.loads(capsys.readouterr().out)["mapping"] == alone["mapping"]
    padded = tmp_path / "mcore"
    exit_code("convert", "hf-to-mcore", checkpoint, padded, "--make-vocab-size-divisible-by", 128)
    capsys.readouterr()
    assert exit_code("inspect", padded, "--table", "--json") == 0
    lines = json.loads(capsys.readouterr().out)["mapping"]
    head = next(line for line in lines if line["mcore"] == "output_layer.weight")
    assert (head["shape"], head["transform"]) == ([384, 48], "append 32 zero rows")
    assert exit_code("inspect", "--hf-config", checkpoint, "--table") == 2
