"""Layouts are read, written, or refused with the remedy."""

from __future__ import annotations

import re
from argparse import Namespace
from typing import Any

import pytest

from mcore_qwen3vl.config import Architecture
from mcore_qwen3vl.errors import BadInput
from mcore_qwen3vl.layout import Layout, read_split
from mcore_qwen3vl.runtime.launch import initialize, run_layout
from mcore_qwen3vl.tiny.tiny_checkpoint import tiny_config

DENSE = Architecture.from_hf(tiny_config())
MOE = Architecture.from_hf(tiny_config(moe=True))
KV_3 = Architecture.from_hf(tiny_config(text={"num_attention_heads": 6, "num_key_value_heads": 3}))
VOCABULARY_353 = Architecture.from_hf(tiny_config(text={"vocab_size": 353}))
HYBRID = Architecture.from_hf(tiny_config(family="qwen3.5"))
SHARED_30 = Architecture.from_hf(
    tiny_config(family="qwen3.5", moe=True, text={"shared_expert_intermediate_size": 30})
)


@pytest.mark.parametrize(
    "text",
    [
        "single",
        "tp2+sp",
        "tp2xpp2xvpp2+sp",
        "ep2xetp2xcp2xdp2",
        "pp4+first1+last2",
        "pp2xvpp2+E|t*3|(t)*1|L",
    ],
)
def test_a_layout_is_written_as_it_is_read(text: str) -> None:
    assert str(Layout.parse(text)) == text


def test_any_order_and_separator() -> None:
    assert Layout.parse("SP, pp=2 x tp2") == Layout(tp=2, pp=2, sp=True)


@pytest.mark.parametrize("text", ["tp", "tp0", "zp2", "2", "tp2**pp2", ""])
def test_anything_else_is_refused(text: str) -> None:
    with pytest.raises(BadInput, match="is not understood at"):
        Layout.parse(text)


@pytest.mark.parametrize(
    ("layout", "architecture", "message"),
    [
        ("tp3", DENSE, "8 attention heads cannot be divided over TP 3: use TP 2"),
        ("tp16", DENSE, "8 attention heads cannot be divided over TP 16: use TP 8"),
        ("sp", DENSE, "TP is 1: drop SP"),
        ("vpp2", DENSE, "PP is 1: raise PP or drop VPP"),
        ("pp3", DENSE, "4 decoder layers cannot be divided over PP x VPP 3"),
        ("pp4xvpp2", DENSE, "4 decoder layers cannot be divided over PP x VPP 8"),
        ("pp2+first4", DENSE, "4 decoder layers leave 0 for 1 more"),
        ("pp2+first1+last1", DENSE, "4 decoder layers leave 2 for 0 more"),
        ("pp2xvpp2+first1", DENSE, "1 layers on the first stage cannot be divided over VPP 2"),
        ("first1", DENSE, "PP is 1"),
        ("pp2+E|tt|ttL", DENSE, "has 3 stages, which PP 2 does not divide"),
        ("pp2+Et|ttL", DENSE, "has 3 decoder layers and the model 4"),
        ("pp2+first1+Et|tttL", DENSE, "drop the counts of the first and the last stage"),
        ("ep2", DENSE, "EP is 2, but this model is dense"),
        ("etp2", DENSE, "ETP is 2, but this model is dense"),
        ("tp2", MOE, "add SP"),
        ("ep5xdp5", MOE, "12 experts cannot be divided over EP 5: use EP 4"),
        ("ep2", MOE, "EP 2 x ETP 1 = 2 does not divide the TP 1 x CP 1 x DP 1 = 1 ranks"),
        ("tp2xetp2xep4xdp2+sp", MOE, "EP 4 x ETP 2 = 8 does not divide the TP 2 x CP 1 x DP 2 = 4"),
        ("tp8xetp8+sp", MOE, "36 MoE intermediate size cannot be divided over ETP 8: use ETP 6"),
        (
            "cp8",
            HYBRID,
            "4 key heads of delta nets cannot be divided over TP x CP 8: use TP x CP 4",
        ),
        ("tp2", KV_3, "TP 2 and 3 key/value heads do not divide each other"),
        ("tp2", VOCABULARY_353, "353 vocabulary size cannot be divided over TP 2"),
        ("tp4+sp", SHARED_30, "30 shared expert's intermediate size cannot be divided over TP 4"),
    ],
)
def test_what_does_not_divide(layout: str, architecture: Architecture, message: str) -> None:
    with pytest.raises(BadInput, match=re.escape(message)):
        Layout.parse(layout).validate(architecture)


@pytest.mark.parametrize(
    ("text", "architecture", "ranks"),
    [
        ("tp4xpp4", DENSE, 16),
        ("tp8", DENSE, 8),
        ("pp2xvpp2", DENSE, 2),
        ("cp4xdp2", DENSE, 8),
        ("pp3+first1+last2", DENSE, 3),
        # Expert parallelism adds no ranks: experts are divided over the existing ones.
        ("tp2xep4xdp2+sp", MOE, 4),
        ("tp2xep2xetp2xdp2+sp", MOE, 4),
        ("ep12xdp12", MOE, 12),
        ("ep2xcp2", MOE, 2),
    ],
)
def test_layouts_that_work(text: str, architecture: Architecture, ranks: int) -> None:
    layout = Layout.parse(text)
    layout.validate(architecture)
    assert (layout.world_size, str(layout)) == (ranks, text)


def test_the_number_of_ranks_must_fit() -> None:
    with pytest.raises(BadInput, match="Layout tp2xpp2 needs 4 ranks; 2 are running"):
        run_layout(initialize, 2, Layout(tp=2, pp=2))


@pytest.mark.parametrize(
    "text", ["E|ttt|(tt|)*2t*4L", "Ett,|(t*6|)*3,tL", "E||t|L", "(E|t)*1|(tt|t|)*2L", "Et*12L"]
)
def test_a_split_is_read_as_mcore_reads_it(text: str) -> None:
    from megatron.core.transformer.enums import LayerType
    from megatron.core.transformer.pipeline_parallel_layer_layout import PipelineParallelLayerLayout

    theirs = PipelineParallelLayerLayout.parse_str_to_list(text)
    assert [part.count(LayerType.decoder) for part in theirs] == read_split(text)


@pytest.mark.parametrize("text", ["tE|L", "E|t", "EE|L", "E|tLt|L", "E|tm|L", "E|t*|L", "E|(t|L"])
def test_a_split_that_is_none(text: str) -> None:
    with pytest.raises(BadInput, match="The pipeline split"):
        read_split(text)


def test_virtual_stages_go_round_the_ranks() -> None:
    held = Layout(pp=2, vpp=2, first=4).virtual_stages(10)
    assert held == [range(2), range(2, 5), range(5, 7), range(7, 10)]
    own = Layout(pp=2, split="E|ttt|t|L")
    assert own.vpp == 2
    assert own.virtual_stages(4) == [range(0), range(3), range(3, 4), range(4, 4)]
    assert own.layers_per_stage(4) == [1, 3]


@pytest.mark.parametrize(
    ("flags", "ranks", "moe", "layout"),
    [
        ({}, 4, False, "dp4"),
        ({"tensor_model_parallel_size": 2, "sequence_parallel": True}, 4, True, "tp2xetp2xdp2+sp"),
        ({"tensor_model_parallel_size": 2}, 4, False, "tp2xdp2"),
        ({"sequence_parallel": True}, 1, False, "single"),  # Megatron turns it off without TP
        ({"expert_tensor_parallel_size": 1, "tensor_model_parallel_size": 2}, 2, True, "tp2"),
        (
            {"pipeline_model_parallel_size": 2, "num_virtual_stages_per_pipeline_rank": 2},
            4,
            False,
            "pp2xvpp2xdp2",
        ),
        (
            {"pipeline_model_parallel_size": 2, "virtual_pipeline_model_parallel_size": 3},
            2,
            False,
            "pp2xvpp3",
        ),
    ],
)
def test_flags_are_read_as_megatron_reads_them(
    flags: dict[str, Any], ranks: int, moe: bool, layout: str
) -> None:
    names = ("tensor_model", "pipeline_model", "context", "expert_model")
    sizes: dict[str, Any] = {f"{n}_parallel_size": 1 for n in names} | {
        "expert_tensor_parallel_size": None,
        "sequence_parallel": False,
    }
    assert str(Layout.from_flags(Namespace(**sizes | flags), ranks, moe=moe)) == layout
