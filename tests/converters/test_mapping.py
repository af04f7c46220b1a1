"""Transforms have an inverse and fetch no more than a slice needs; parameters are counted.

Where each value goes is seen in loaded models, which `test_load_into_model` compares with rules of
its own.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from mcore_qwen3vl.config import Architecture
from mcore_qwen3vl.converters.mapping import parameters
from mcore_qwen3vl.converters.mapping.rearrangement import (
    Rearrangement,
    concatenate,
    identity,
    pad_rows,
    qkv,
    transpose,
)
from mcore_qwen3vl.converters.mapping.table import Row, hf_shapes, table
from mcore_qwen3vl.converters.storage.boxes import Selection, Shape
from mcore_qwen3vl.errors import BadInput
from mcore_qwen3vl.published_configs import PUBLISHED
from mcore_qwen3vl.tiny import tiny_config
from tests.turns import slow

MOE = Architecture.from_hf(tiny_config(moe=True))


def weights(rows: list[Row]) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(0)
    return {n: torch.randn(s, generator=generator) for n, s in hf_shapes(rows).items()}


def assemble(rows: list[Row], hf: dict[str, Tensor]) -> dict[str, Tensor]:
    """Put every row where its key and offset say, in whole mcore tensors; NaN where none went."""
    mcore = {row.key: torch.full(row.global_shape, torch.nan) for row in rows}
    for row in rows:
        pieces = [hf[s.name] if s.index is None else hf[s.name][s.index] for s in row.sources]
        mcore[row.key][row.offset] = row.to_mcore(*pieces)
    return mcore


def test_gates_follow_the_queries_of_their_group() -> None:
    """HF has the query of head h at 100 h, then its gate at 100 h + 50."""

    def numbered(*starts: int) -> Tensor:
        return torch.tensor([[start + i] for start in starts for i in (0, 1)])

    query = numbered(0, 50, 100, 150, 200, 250, 300, 350)
    key, value = numbered(1000, 1100), numbered(2000, 2100)
    how = qkv(heads=4, kv_heads=2, head_dim=2, gated=True)
    got = how.to_mcore(query, key, value)
    # fmt: off
    assert got.flatten().tolist() == [
        0, 1, 100, 101, 50, 51, 150, 151, 1000, 1001, 2000, 2001,
        200, 201, 300, 301, 250, 251, 350, 351, 1100, 1101, 2100, 2101,
    ]
    # fmt: on
    for found, wanted in zip(how.to_hf(got), (query, key, value), strict=True):
        assert torch.equal(found, wanted)


def test_a_delta_net_is_cut_where_megatron_cuts_it() -> None:
    """Each part has its rows of the HF tensor, and a box of it fetches no others."""
    a = Architecture.from_hf(tiny_config(family="qwen3.5"))
    rows = {row.key: row for row in table(a)}
    name = layer_name(1, "linear_attn.in_proj_qkv.weight")
    hf = {name: torch.randn(288, 48)}
    starts = {"query": (0, 64), "key": (64, 128), "value": (128, 288)}
    for part, (first, last) in starts.items():
        row = rows[f"decoder.layers.1.self_attention.in_proj.weight.{part}"]
        assert (row.global_shape, row.offset, row.tp_axis) == ((last - first, 48), (), 0)
        box = (slice(3, 9), slice(10, 20))
        fetched = row.take(lambda n, place: hf[n][place], box)
        assert torch.equal(fetched, hf[name][first + 3 : first + 9, 10:20])
        source = row.sources[0]
        assert (source.piece_shape, source.first_value) == ((last - first, 48), first * 48)


def test_the_further_layer_has_the_keys_of_megatrons_mtp_block() -> None:
    """As ``MultiTokenPredictionLayer`` has them: it joins (norm of embedding, norm of state)."""
    a = Architecture.from_hf(tiny_config(family="qwen3.5"))
    rows = {row.key: row for row in table(a, mtp=True) if row.key.startswith("mtp.")}
    names = {
        key.removeprefix("mtp.layers.0."): [source.name for source in row.sources]
        for key, row in rows.items()
    }
    assert {key: n for key, n in names.items() if not key.startswith("transformer_layer.")} == {
        "enorm.weight": ["mtp.pre_fc_norm_embedding.weight"],
        "hnorm.weight": ["mtp.pre_fc_norm_hidden.weight"],
        "eh_proj.weight": ["mtp.fc.weight"],
        "final_layernorm.weight": ["mtp.norm.weight"],
    }
    assert names["transformer_layer.self_attention.linear_qkv.weight"] == [
        f"mtp.layers.0.self_attn.{n}_proj.weight" for n in "qkv"
    ]
    assert (rows["mtp.layers.0.eh_proj.weight"].tp_axis, len(rows)) == (0, 12)
    assert not any(row.key.startswith("mtp.") for row in table(a))


def test_published_tensors_of_qwen3_5_are_all_named() -> None:
    """27B has 851 tensors of the language model with the head, and 15 of the further layer."""
    a = Architecture.from_hf(PUBLISHED / "qwen3.5_27b.json")
    names = hf_shapes(table(a, mtp=True)).keys()
    assert sum(not name.startswith(("model.visual.", "mtp.")) for name in names) == 851
    inside = ("input_layernorm", "post_attention_layernorm")
    inside += tuple(f"self_attn.{n}" for n in ("q_norm", "k_norm"))
    inside += tuple(f"self_attn.{n}_proj" for n in "qkvo")
    inside += tuple(f"mlp.{n}_proj" for n in ("gate", "up", "down"))
    outside = ("fc", "norm", "pre_fc_norm_embedding", "pre_fc_norm_hidden")
    assert {name for name in names if name.startswith("mtp.")} == {
        *(f"mtp.layers.0.{name}.weight" for name in inside),
        *(f"mtp.{name}.weight" for name in outside),
    }


@pytest.mark.parametrize(
    ("how", "shapes"),
    [
        (identity(7), [(7, 3, 2)]),
        (identity(7), [(7,)]),
        (qkv(6, 2, 4), [(24, 5), (8, 5), (8, 5)]),
        (concatenate(5, 5), [(5, 3), (5, 3)]),
        (transpose(9), [(4, 9)]),
        (pad_rows(7, 12), [(7, 5)]),
    ],
)
def test_inverse_and_every_slice(how: Rearrangement, shapes: list[Shape]) -> None:
    hf = [torch.randn(shape) for shape in shapes]
    mcore = how.to_mcore(*hf)
    assert len(mcore) == how.rows
    assert mcore.is_contiguous()
    for back, original in zip(how.to_hf(mcore), hf, strict=True):
        assert torch.equal(back, original)
        assert back.is_contiguous()
    columns = tuple(slice(0, n) for n in mcore.shape[1:])
    narrow = tuple(slice(1, n) for n in mcore.shape[1:])
    for start in range(how.rows):
        for stop in range(start + 1, how.rows + 1):
            for rest in (columns, narrow):
                box = (slice(start, stop), *rest)
                assert torch.equal(how.take(lambda s, part: hf[s][part], box), mcore[box])


def test_a_slice_fetches_nothing_it_does_not_need() -> None:
    how = concatenate(8, 8)
    fetched: list[tuple[int, tuple[slice, ...]]] = []

    def fetch(source: int, part: tuple[slice, ...]) -> Tensor:
        fetched.append((source, part))
        return torch.zeros([s.stop - s.start for s in part])

    how.take(fetch, (slice(6, 9), slice(2, 3)))
    assert fetched == [(0, (slice(6, 8), slice(2, 3))), (1, (slice(0, 1), slice(2, 3)))]


def layer_name(i: int, name: str) -> str:
    return f"model.language_model.layers.{i}.{name}"


@pytest.mark.parametrize("moe", [False, True])
def test_each_hf_value_is_used_once_and_comes_back(moe: bool) -> None:
    rows = table(Architecture.from_hf(tiny_config(moe=moe)), padded_vocab_size=384)
    hf = weights(rows)
    mcore = assemble(rows, hf)
    assert not any(t.isnan().any() for t in mcore.values())
    seen = {name: torch.zeros(t.shape) for name, t in hf.items()}
    for row in rows:
        for source, back in zip(row.sources, row.to_hf(mcore[row.key][row.offset]), strict=True):
            at = ... if source.index is None else source.index
            assert torch.equal(hf[source.name][at], back), source
            seen[source.name][at] += 1
    assert all((count == 1).all() for count in seen.values())


def test_a_padded_vocabulary_is_not_smaller() -> None:
    with pytest.raises(BadInput, match="padded vocabulary 100 is smaller"):
        table(Architecture.from_hf(tiny_config()), padded_vocab_size=100)


def test_an_expert_slice_reads_only_that_expert() -> None:
    rows = table(MOE)
    row = next(
        r for r in rows if r.key.endswith("experts.linear_fc1.weight") and r.offset == (1, 3)
    )
    hf = weights(rows)
    fetched = []

    def fetch(name: str, box: Selection) -> Tensor:
        fetched.append((name, box))
        return hf[name][box]

    got = row.take(fetch, (slice(2, 6), slice(0, 48)))
    name = layer_name(1, "mlp.experts.gate_up_proj")
    assert fetched == [(name, (3, slice(0, 48), slice(2, 6)))]
    assert torch.equal(got, hf[name][3].T[2:6])


def test_undeclared_expert_layout_is_refused() -> None:
    with pytest.raises(BadInput, match="how the fused experts are laid out"):
        table(replace(MOE, expert_layout=None))


@pytest.mark.parametrize(
    "size",
    [
        *("2b", "4b", "8b", "32b", "30b_a3b"),
        *("qwen3.5_0.8b", "qwen3.5_9b", "qwen3.5_27b"),
        *slow("235b_a22b", "qwen3.5_35b_a3b"),
    ],
)
def test_parameters_are_those_of_the_hf_model(size: str) -> None:
    from transformers import AutoConfig, AutoModelForImageTextToText

    with torch.device("meta"):
        config = AutoConfig.from_pretrained(PUBLISHED / f"{size}.json")
        model = AutoModelForImageTextToText.from_config(config)
    a = Architecture.from_hf(PUBLISHED / f"{size}.json")
    assert parameters.total(a) == sum(p.numel() for p in model.parameters())
    assert parameters.count_by_part(a)["vision"] == sum(
        p.numel() for p in model.model.visual.parameters()
    )


def test_active_parameters_are_those_of_the_experts_that_are_asked() -> None:
    a = Architecture.from_hf(PUBLISHED / "30b_a3b.json")
    idle = (a.num_experts - a.num_experts_per_tok) * 3 * a.hidden_size * a.moe_intermediate_size
    assert parameters.active(a) == parameters.total(a) - a.num_hidden_layers * idle
    dense = Architecture.from_hf(tiny_config())
    assert parameters.active(dense) == parameters.total(dense)


@pytest.mark.parametrize("mixed", [False, True])
def test_every_layer_has_its_own(mixed: bool) -> None:
    text = {"mlp_only_layers": [1]} if mixed else {}
    a = Architecture.from_hf(tiny_config(moe=True, text=text))
    held = parameters.count(a)
    for layer, moe in enumerate(a.moe_layers):
        parts = {group.part for group in held if group.layer == layer}
        assert parts == {"attention", "norms", *(("router", "experts") if moe else ("mlp",))}
    assert {group.part for group in held if group.layer is None} == {
        "vision", "embedding", "output layer", "norms",
    }  # fmt: skip
    divided = {group.part for group in held if group.divided}
    assert not divided & {"vision", "norms", "router"}
    whole = {group.part for group in held if not group.divided}
    assert not divided & whole
