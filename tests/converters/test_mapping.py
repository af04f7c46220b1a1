"""The table and its transforms agree with the layouts written again in plain indexing."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from mcore_qwen3vl.config import Architecture
from mcore_qwen3vl.converters.mapping import parameters
from mcore_qwen3vl.converters.mapping.table import (
    Rearrangement,
    Row,
    concatenate,
    hf_shapes,
    identity,
    pad_rows,
    qkv,
    table,
    transpose,
)
from mcore_qwen3vl.converters.storage.boxes import Selection, Shape
from mcore_qwen3vl.errors import BadInput
from mcore_qwen3vl.shapes import SHAPES
from mcore_qwen3vl.tiny import tiny_config
from tests.turns import slow

TEXT = {
    "vocab_size": 101,
    "hidden_size": 20,
    "intermediate_size": 14,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "rope_theta": 5e6,
    "rope_scaling": {"mrope_section": [2, 1, 1], "rope_type": "default"},
    "max_position_embeddings": 64,
}
MOE = {"num_experts": 5, "num_experts_per_tok": 2, "moe_intermediate_size": 11}
VISION = {
    "depth": 4,
    "hidden_size": 12,
    "intermediate_size": 18,
    "num_heads": 3,
    "in_channels": 3,
    "patch_size": 4,
    "spatial_merge_size": 2,
    "temporal_patch_size": 2,
    "out_hidden_size": 20,
    "num_position_embeddings": 9,
    "deepstack_visual_indexes": [1, 2],
}
TOKENS = {
    "image_token_id": 1,
    "video_token_id": 2,
    "vision_start_token_id": 3,
    "vision_end_token_id": 4,
}


def architecture(moe: bool = False, tie: bool = False, **text: Any) -> Architecture:
    return Architecture.from_hf(
        {
            "model_type": "qwen3_vl_moe" if moe else "qwen3_vl",
            "text_config": TEXT | (MOE if moe else {}) | text,
            "vision_config": VISION,
            "tie_word_embeddings": tie,
            **TOKENS,
        }
    )


def weights(rows: list[Row], seed: int = 0) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {n: torch.randn(s, generator=generator) for n, s in hf_shapes(rows).items()}


def assemble(rows: list[Row], hf: dict[str, Tensor]) -> dict[str, Tensor]:
    """Put every row where its key and offset say, in whole mcore tensors; NaN where none went."""
    mcore = {row.key: torch.full(row.global_shape, torch.nan) for row in rows}
    for row in rows:
        pieces = [hf[s.name] if s.index is None else hf[s.name][s.index] for s in row.sources]
        mcore[row.key][row.offset] = row.to_mcore(*pieces)
    return mcore


def test_qkv_puts_each_kv_group_together() -> None:
    # Row i of query head h is 100 h + i; keys start at 1000 and values at 2000.
    def numbered(heads: int, base: int) -> Tensor:
        return torch.tensor([[base + 100 * h + i] for h in range(heads) for i in range(3)])

    got = qkv(heads=4, kv_heads=2, head_dim=3).to_mcore(
        numbered(4, 0), numbered(2, 1000), numbered(2, 2000)
    )
    # fmt: off
    assert got.flatten().tolist() == [
        0, 1, 2, 100, 101, 102, 1000, 1001, 1002, 2000, 2001, 2002,
        200, 201, 202, 300, 301, 302, 1100, 1101, 1102, 2100, 2101, 2102,
    ]
    # fmt: on


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
    a = Architecture.from_hf(SHAPES / "qwen3.5_27b.json")
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


def test_vocabulary_padding_is_zero_and_goes_away() -> None:
    pad = pad_rows(3, 5)
    stored = torch.tensor([[1, 2], [3, 4], [5, 6]])
    padded = pad.to_mcore(stored)
    assert padded.tolist() == [[1, 2], [3, 4], [5, 6], [0, 0], [0, 0]]
    padded[3:] = 7  # training moves the padding rows too
    assert torch.equal(pad.to_hf(padded)[0], stored)


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


def expected_qkv(hf: dict[str, Tensor], i: int) -> Tensor:
    """Interleave by KV head: its queries, its key, its value (mcore ``SelfAttention``)."""
    q, k, v = (hf[layer_name(i, f"self_attn.{n}_proj.weight")] for n in "qkv")
    groups = q.view(2, 3, 8, 20), k.view(2, 1, 8, 20), v.view(2, 1, 8, 20)
    return torch.cat(groups, dim=1).reshape(80, 20)


def expected_attention(hf: dict[str, Tensor]) -> dict[str, Tensor]:
    def stack(name: str) -> Tensor:
        return torch.stack([hf[layer_name(i, name)] for i in range(3)])

    attention = "decoder.layers.self_attention."
    return {
        f"{attention}linear_qkv.weight": torch.stack([expected_qkv(hf, i) for i in range(3)]),
        f"{attention}linear_qkv.layer_norm_weight": stack("input_layernorm.weight"),
        f"{attention}linear_proj.weight": stack("self_attn.o_proj.weight"),
        f"{attention}q_layernorm.weight": stack("self_attn.q_norm.weight"),
        f"{attention}k_layernorm.weight": stack("self_attn.k_norm.weight"),
    }


def expected_ends(hf: dict[str, Tensor], tie: bool) -> dict[str, Tensor]:
    ends = {
        "embedding.word_embeddings.weight": hf["model.language_model.embed_tokens.weight"],
        "decoder.final_layernorm.weight": hf["model.language_model.norm.weight"],
    }
    return ends if tie else ends | {"output_layer.weight": hf["lm_head.weight"]}


def expected_vision(hf: dict[str, Tensor]) -> dict[str, Tensor]:
    return {n.removeprefix("model."): t for n, t in hf.items() if n.startswith("model.visual.")}


def assert_equal(got: dict[str, Tensor], want: dict[str, Tensor]) -> None:
    assert set(got) == set(want)
    for key, tensor in want.items():
        assert got[key].shape == tensor.shape, key
        assert torch.equal(got[key], tensor), key


@pytest.mark.parametrize("tie", [True, False])
def test_dense_model(tie: bool) -> None:
    rows = table(architecture(tie=tie))
    hf = weights(rows)

    def stack(name: str) -> Tensor:
        return torch.stack([hf[layer_name(i, name)] for i in range(3)])

    gate, up = stack("mlp.gate_proj.weight"), stack("mlp.up_proj.weight")
    assert_equal(
        assemble(rows, hf),
        expected_attention(hf)
        | expected_ends(hf, tie)
        | expected_vision(hf)
        | {
            "decoder.layers.mlp.linear_fc1.weight": torch.cat([gate, up], dim=1),
            "decoder.layers.mlp.linear_fc1.layer_norm_weight": stack(
                "post_attention_layernorm.weight"
            ),
            "decoder.layers.mlp.linear_fc2.weight": stack("mlp.down_proj.weight"),
        },
    )


@pytest.mark.parametrize("layout", ["published", "v5"])
@pytest.mark.parametrize("dims", [(20, 11), (20, 10), (20, 20)], ids=["plain", "H=2I", "H=I"])
def test_moe_model(layout: Any, dims: tuple[int, int]) -> None:
    rows = table(architecture(moe=True, moe_intermediate_size=dims[1]), expert_layout=layout)
    hf = weights(rows)

    def stack(name: str) -> Tensor:
        return torch.stack([hf[layer_name(i, name)] for i in range(3)])

    gate_up, down = stack("mlp.experts.gate_up_proj"), stack("mlp.experts.down_proj")
    if layout == "published":
        gate_up, down = gate_up.transpose(-1, -2), down.transpose(-1, -2)
    assert_equal(
        assemble(rows, hf),
        expected_attention(hf)
        | expected_ends(hf, tie=False)
        | expected_vision(hf)
        | {
            "decoder.layers.mlp.experts.experts.linear_fc1.weight": gate_up,
            "decoder.layers.mlp.experts.experts.linear_fc2.weight": down,
            "decoder.layers.mlp.router.weight": stack("mlp.gate.weight"),
            "decoder.layers.pre_mlp_layernorm.weight": stack("post_attention_layernorm.weight"),
        },
    )


def test_mixed_layers_have_keys_of_their_own() -> None:
    rows = table(architecture(moe=True, mlp_only_layers=[1]))
    hf = weights(rows)
    got = assemble(rows, hf)
    names = {key.removeprefix("decoder.layers.") for key in got if "decoder.layers." in key}
    assert {name.split(".")[0] for name in names} == {"0", "1", "2"}
    gate, up = (hf[layer_name(1, f"mlp.{n}_proj.weight")] for n in ("gate", "up"))
    dense, sparse = "decoder.layers.1.", "decoder.layers.2."
    assert torch.equal(got[f"{dense}mlp.linear_fc1.weight"], torch.cat([gate, up]))
    assert torch.equal(
        got[f"{dense}mlp.linear_fc1.layer_norm_weight"],
        hf[layer_name(1, "post_attention_layernorm.weight")],
    )
    assert f"{dense}pre_mlp_layernorm.weight" not in got
    assert torch.equal(got[f"{sparse}self_attention.linear_qkv.weight"], expected_qkv(hf, 2))
    assert torch.equal(
        got[f"{sparse}mlp.experts.experts.linear_fc2.weight"],
        hf[layer_name(2, "mlp.experts.down_proj")].transpose(-1, -2),
    )


@pytest.mark.parametrize("moe", [False, True])
def test_each_hf_value_is_used_once_and_comes_back(moe: bool) -> None:
    rows = table(architecture(moe=moe), padded_vocab_size=128)
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


def test_padded_vocabulary() -> None:
    rows = {row.key: row for row in table(architecture(), padded_vocab_size=128)}
    for key in ("embedding.word_embeddings.weight", "output_layer.weight"):
        assert rows[key].global_shape == (128, 20)
        assert rows[key].sources[0].shape == (101, 20)
    with pytest.raises(BadInput, match="padded vocabulary 100 is smaller"):
        table(architecture(), padded_vocab_size=100)


def test_an_expert_slice_reads_only_that_expert() -> None:
    rows = table(architecture(moe=True))
    row = next(
        r for r in rows if r.key.endswith("experts.linear_fc1.weight") and r.offset == (1, 3)
    )
    hf = weights(rows)
    fetched = []

    def fetch(name: str, box: Selection) -> Tensor:
        fetched.append((name, box))
        return hf[name][box]

    got = row.take(fetch, (slice(2, 6), slice(0, 20)))
    name = layer_name(1, "mlp.experts.gate_up_proj")
    assert fetched == [(name, (3, slice(0, 20), slice(2, 6)))]
    assert torch.equal(got, hf[name][3].T[2:6])


def test_undeclared_expert_layout_is_refused() -> None:
    with pytest.raises(BadInput, match="how the fused experts are laid out"):
        table(replace(architecture(moe=True), expert_layout=None))


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
        config = AutoConfig.from_pretrained(SHAPES / f"{size}.json")
        model = AutoModelForImageTextToText.from_config(config)
    a = Architecture.from_hf(SHAPES / f"{size}.json")
    assert parameters.total(a) == sum(p.numel() for p in model.parameters())
    assert parameters.count_by_part(a)["vision"] == sum(
        p.numel() for p in model.model.visual.parameters()
    )


def test_active_parameters_are_those_of_the_experts_that_are_asked() -> None:
    a = Architecture.from_hf(SHAPES / "30b_a3b.json")
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
