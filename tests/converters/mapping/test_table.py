"""The table names every tensor, uses each value once, and cuts where Megatron cuts.

Where each value goes is seen in loaded models, which `test_load_into_model` compares with rules of
its own.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from mcore_qwen3vl.config import Architecture
from mcore_qwen3vl.converters.mapping.table import Row, hf_shapes, table
from mcore_qwen3vl.converters.storage.boxes import Selection
from mcore_qwen3vl.errors import BadInput
from mcore_qwen3vl.published_configs import PUBLISHED
from mcore_qwen3vl.tiny import tiny_config

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
    """27B has 851 tensors of the language model with the head, and 15 of the MTP layer."""
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
