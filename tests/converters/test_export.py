"""What running, sharded models export is what they hold, bit for bit, and appears whole."""

from __future__ import annotations

import filecmp
import json
from contextlib import nullcontext
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from mcore_qwen3vl.config import Architecture
from mcore_qwen3vl.converters import export
from mcore_qwen3vl.converters.convert import hf_to_mcore, mcore_to_hf
from mcore_qwen3vl.converters.export import export_hf, save_hf
from mcore_qwen3vl.converters.live import load_hf
from mcore_qwen3vl.converters.mapping.table import MTP
from mcore_qwen3vl.errors import BadInput
from mcore_qwen3vl.layout import Layout
from mcore_qwen3vl.model.qwen3vl import Qwen3VLModel
from mcore_qwen3vl.runtime.launch import initialize, run_layout
from tests.converters.checkpoints import copy, edit_config, load
from tests.converters.offline.test_durability import Disk, NotDurable
from tests.converters.ranks import on_ranks
from tests.turns import slow_except

LAYOUTS = [
    ("dense", "tp2xpp2+sp"),
    ("dense", "pp2xvpp2"),
    ("dense", "cp2xdp2"),
    ("dense-tied", "tp2xpp2"),
    ("moe", "tp2xetp2+sp"),
    ("moe", "pp2xep2xdp2"),
    ("moe-v5", "ep4xdp4"),
    ("moe-v5", "tp2xetp2+sp"),
    ("mixed-listed", "pp2xep2xdp2"),
    ("bf16-sharded", "tp2xpp2xep2+sp"),
    ("hybrid-tied", "tp2xpp2"),
    ("hybrid-float32", "cp2xdp2"),
    ("hybrid-moe-tied", "tp2xep2+sp"),
    ("hybrid-moe-tied", "pp2xep2xdp2"),
]


FAST = [
    ("dense-tied", "tp2xpp2"),
    ("moe-v5", "tp2xetp2+sp"),
    ("mixed-listed", "pp2xep2xdp2"),
    ("hybrid-moe-tied", "tp2xep2+sp"),
]


SMALL_BUCKETS = 40_000


@pytest.mark.parametrize(("case", "layout"), slow_except(LAYOUTS, *FAST))
def test_what_was_loaded_is_exported_bitwise(tiny, tmp_path, case, layout):
    source, exported, offline = tiny(case), tmp_path / "live", tmp_path / "offline"
    expected = load(source)

    def work(chunks: list[Any]) -> None:
        assert not any(p.isnan().any() for chunk in chunks for p in chunk.parameters())
        seen: dict[str, Tensor] = {}
        all_reduce, gathered = dist.all_reduce, []

        def counted(tensor: Tensor) -> None:
            gathered.append(tensor.nbytes)
            all_reduce(tensor)

        with mock.patch.object(dist, "all_reduce", counted):
            for name, tensor in export_hf(chunks, bucket_bytes=SMALL_BUCKETS):
                assert torch.equal(tensor, expected[name]), name
                assert tensor.dtype == expected[name].dtype
                seen[name] = tensor
        # No model has the MTP layer; `save_hf` copies it.
        assert set(seen) == {name for name in expected if not name.startswith(MTP)}
        # Memory does not depend on the model's size: a bucket at most, or one larger tensor.
        padding = 16
        largest = max(tensor.nbytes for tensor in expected.values())
        assert max(gathered) <= max(SMALL_BUCKETS, largest) + padding
        assert len(gathered) > 1
        save_hf(
            chunks,
            exported,
            hf_config=source,
            max_shard_size="300KB",
            bucket_bytes=SMALL_BUCKETS,
        )

    on_ranks(source, layout, work)
    hf_to_mcore(source, tmp_path / "mcore")
    mcore_to_hf(tmp_path / "mcore", offline, max_shard_size="300KB")
    compared = filecmp.dircmp(exported, offline)
    assert not compared.left_only
    assert not compared.right_only
    _, different, errors = filecmp.cmpfiles(exported, offline, compared.common, shallow=False)
    assert not different
    assert not errors
    assert any("-of-" in name for name in compared.common)  # there are several shards


@pytest.mark.slow
def test_weights_of_a_quantised_model_are_not_called_quantised(tiny, tmp_path):
    source = tiny("dense-tied")
    said = {"quant_method": "fp8", "weight_block_size": [128, 128]}
    edit_config(quantised := copy(source, tmp_path / "fp8"), quantization_config=said)
    on_ranks(source, "single", lambda c: save_hf(c, tmp_path / "a", hf_config=quantised))
    configs = [json.loads((path / "config.json").read_text()) for path in (source, tmp_path / "a")]
    assert configs[0] == configs[1]


def test_weights_beside_the_config_are_not_looked_at_without_need(tiny, tmp_path):
    """Only Qwen3.5's ``mtp.*`` are copied from there; of others a part of a download suffices."""
    source = tiny("dense-tied")
    partly = copy(source, tmp_path / "partly")
    (partly / "model.safetensors").write_bytes(b"cut short")
    on_ranks(source, "single", lambda c: save_hf(c, tmp_path / "a", hf_config=partly))
    expected, exported = (load(p) for p in (source, tmp_path / "a"))
    assert all(torch.equal(expected[name], exported[name]) for name in expected)


def test_the_other_expert_layout_can_be_asked_for(tiny):
    expected = load(tiny("moe"))

    def work(chunks: list[Any]) -> None:
        for name, tensor in export_hf(chunks, expert_layout="v5"):
            stored = expected[name]
            same = stored.transpose(1, 2) if ".mlp.experts." in name else stored
            assert torch.equal(tensor, same), name

    on_ranks(tiny("moe"), "ep2xdp2", work)


def test_a_padded_vocabulary_is_zero_beyond_the_source_and_left_out_of_the_export(tiny):
    source = tiny("dense")
    layout = Layout(tp=2)
    vocab = Architecture.from_hf(source).vocab_size

    def on_rank() -> None:
        initialize(layout)
        model = Qwen3VLModel.from_hf_config(
            source, vocab_size=vocab + 32, **layout.config_overrides()
        )
        for parameter in model.parameters():
            parameter.data.fill_(torch.nan)
        load_hf(model, source)
        if dist.get_rank() == 1:
            assert not model.embedding.word_embeddings.weight[-32:].any()
            assert not model.output_layer.weight[-32:].any()
        expected = load(source)
        assert all(torch.equal(tensor, expected[name]) for name, tensor in export_hf(model))

    run_layout(on_rank, 2, timeout=60)


def test_minus_zero_keeps_its_sign(tiny):
    def work(chunks: list[Any]) -> None:
        chunks[0].decoder.final_layernorm.weight.data.fill_(-0.0)
        tensors = dict(export_hf(chunks))
        assert tensors["model.language_model.norm.weight"].signbit().all()

    on_ranks(tiny("dense"), "tp2+sp", work)


def test_a_missing_chunk_is_refused_on_every_rank(tiny):
    def work(chunks: list[Any]) -> None:
        with pytest.raises(BadInput, match=r"hold 0 of the .* pass all pipeline chunks"):
            next(export_hf(chunks[:1]))

    on_ranks(tiny("dense"), "pp2xvpp2", work)


def test_nothing_is_left_when_a_rank_cannot_write(tiny, tmp_path, monkeypatch):
    def full(*_: Any) -> None:
        raise OSError("no space left on device")

    source, target = tiny("dense"), tmp_path / "target"

    def work(chunks: list[Any]) -> None:
        if dist.get_rank() == 1:
            monkeypatch.setattr(export, "_write_tensors", full)
        with pytest.raises(
            BadInput, match=r"Rank 1 could not save the model to .*target: no space"
        ):
            save_hf(chunks, target, hf_config=source, bucket_bytes=SMALL_BUCKETS)

    on_ranks(source, "tp2", work)
    assert list(tmp_path.iterdir()) == []


def test_an_export_begins_anew_after_one_that_was_killed(tiny, tmp_path, monkeypatch):
    """Its shards may have had other sizes, and would lie beside the new ones."""
    source, target = tiny("dense"), tmp_path / "target"

    def kill(*_: Any) -> None:
        raise KeyboardInterrupt

    def work(chunks: list[Any]) -> None:
        with monkeypatch.context() as patch:
            patch.setattr(export, "copy_companions", kill)
            with pytest.raises(KeyboardInterrupt):
                save_hf(chunks, target, hf_config=source, max_shard_size="600KB")
        assert len(list(tmp_path.glob(".target.incomplete/tree/*.safetensors"))) > 1
        save_hf(chunks, target, hf_config=source)

    on_ranks(source, "single", work)
    assert [file.name for file in target.glob("model*")] == ["model.safetensors"]


def test_an_existing_target_is_refused_on_every_rank(tiny, tmp_path):
    (tmp_path / "keep").write_text("mine")

    def work(chunks: list[Any]) -> None:
        with pytest.raises(BadInput, match="exists"):
            save_hf(chunks, tmp_path, hf_config=tiny("dense"))

    on_ranks(tiny("dense"), "tp2", work)
    assert (tmp_path / "keep").read_text() == "mine"


def test_what_is_published_is_on_the_disk(tiny, tmp_path):
    """All of it is synced, each shard once and not once a tensor; without a sync, it is noticed."""
    source, target = tiny("dense"), tmp_path / "target"

    def work(chunks: list[Any]) -> None:
        for ignored in ("", "DirectFile.sync", "copy_companions", "sync_folder"):
            with pytest.MonkeyPatch.context() as patch:
                disk = Disk(patch, target, ignored)
                with pytest.raises(NotDurable) if ignored else nullcontext():
                    save_hf(chunks, target, hf_config=source, force=True, max_shard_size="600KB")
                    disk.finish()
                if not ignored:
                    shards = list(target.glob("*.safetensors"))
                    assert disk.syncs["DirectFile.sync"] == len(shards) > 1

    on_ranks(source, "single", work)
