"""Running, sharded models load checkpoints bit for bit, under every kind of layout."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from mcore_qwen3vl.config import Architecture
from mcore_qwen3vl.converters.convert import hf_to_mcore
from mcore_qwen3vl.converters.hf.hf_checkpoint import HuggingFaceCheckpoint
from mcore_qwen3vl.converters.live import gradient, hf_parts, load_checkpoint, load_hf
from mcore_qwen3vl.converters.storage.boxes import Selection
from mcore_qwen3vl.errors import BadInput
from mcore_qwen3vl.layout import Layout
from mcore_qwen3vl.runtime.launch import initialize, run_layout
from tests.converters.checkpoints import copy, edit_config, load
from tests.converters.ranks import build_empty, on_ranks


def test_an_expert_parallel_rank_reads_its_share_of_the_experts(tiny):
    source = tiny("moe")
    layout = Layout(ep=4, dp=4)
    tensors = load(source)
    experts = sum(t.nbytes for name, t in tensors.items() if ".mlp.experts." in name)
    rest = sum(t.nbytes for t in tensors.values()) - experts

    def on_rank() -> int:
        initialize(layout)
        read_stored, sizes = HuggingFaceCheckpoint.read_stored, []

        def read_and_note(self: HuggingFaceCheckpoint, name: str, box: Selection = ()) -> Tensor:
            stored = read_stored(self, name, box)
            sizes.append(stored.nbytes)
            return stored

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(HuggingFaceCheckpoint, "read_stored", read_and_note)
            load_hf(build_empty(layout, Architecture.from_hf(source)), source)
        return sum(sizes)

    assert run_layout(on_rank, 4, timeout=60) == [rest + experts // 4] * 4


def test_every_local_value_belongs_to_one_hf_place(tiny):
    """All ranks' main parts cover each HF value once; frozen parameters have no gradient."""

    def work(chunks: list[Any]) -> dict[str, int]:
        counts: dict[str, int] = {}
        for part in hf_parts(chunks):
            if part.main:
                counts[part.name] = counts.get(part.name, 0) + part.local.numel()
        chunks[0].requires_grad_(False)
        assert not list(hf_parts(chunks, gradient))
        return counts

    total: dict[str, int] = {}
    for counts in on_ranks(tiny("moe"), "tp2xep2xcp2+sp", work):
        for name, count in counts.items():
            total[name] = total.get(name, 0) + count
    tensors = load(tiny("moe"))
    assert total == {name: t.numel() for name, t in tensors.items()}


def test_a_checkpoint_of_another_model_is_refused(tiny):
    def on_rank() -> None:
        initialize(Layout())
        load_hf(build_empty(Layout(), Architecture.from_hf(tiny("dense"))), tiny("dense-tied"))

    with pytest.raises(BadInput, match=r"lacks the tensor lm_head\.weight"):
        run_layout(on_rank, 1, timeout=60)


def test_a_parameter_that_is_no_part_of_the_model_is_named(tiny):
    def work(chunks: list[Any]) -> None:
        layer = chunks[0].decoder.layers[0].self_attention
        layer.adapter = torch.nn.Linear(3, 3)
        with pytest.raises(BadInput, match=r"adapter\.weight.*does not belong to the model"):
            list(hf_parts(chunks))

    on_ranks(tiny("dense"), "single", work)


@pytest.mark.parametrize("megatron", [False, True])
def test_weights_beside_another_config_are_not_loaded(tiny, tmp_path, megatron):
    """The rotary base and other settings show in no tensor, and the model would compute another."""
    other = copy(tiny("moe"), tmp_path / "other")
    changes = {"rope_theta": 1e4, "rms_norm_eps": 1e-5, "num_experts_per_tok": 1}
    changes |= {"initializer_range": 0.5}
    text = {f"text_config__{name}": value for name, value in changes.items()}
    edit_config(other, dtype="bfloat16", **text)
    if megatron:
        hf_to_mcore(other, tmp_path / "mcore")

    def on_rank() -> None:
        initialize(Layout())
        chunks = build_empty(Layout(), Architecture.from_hf(tiny("moe")))
        if megatron:
            load_checkpoint(chunks, tmp_path / "mcore")
        else:
            load_hf(chunks, other)

    with pytest.raises(BadInput, match=r"another model.*") as refused:
        run_layout(on_rank, 1, timeout=60)
    said = str(refused.value)
    assert "rope_theta is 10000.0 there and 5000000.0 here" in said
    assert "rms_norm_eps" in said
    assert "num_experts_per_tok is 1 there" in said
    assert "initializer_range" not in said
    assert "dtype" not in said
    assert "Give --hf-model" in said
