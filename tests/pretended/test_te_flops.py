"""FLOPs of Transformer Engine's own kernels are counted where its Python code calls them."""

from __future__ import annotations

import sys
from collections import Counter
from enum import Enum
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from mcore_qwen3vl.pretended import rank as te_flops

TOKENS, INNER, OUTER = 5, 3, 7
INPUT, OUTPUT = torch.empty(TOKENS, INNER), torch.empty(TOKENS, OUTER)
WEIGHT = torch.empty(OUTER, INNER)


class NVTE_Mask_Type(Enum):
    NVTE_PADDING_CAUSAL_MASK = 1
    NVTE_NO_MASK = 2


@pytest.fixture
def extension(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    names = ("generic_gemm", "te_general_grouped_gemm", "fused_attn_fwd", "fused_attn_bwd")
    made = SimpleNamespace(**{name: lambda *args, **kwargs: args for name in names})
    monkeypatch.setitem(sys.modules, "transformer_engine_torch", made)
    return made


@pytest.mark.parametrize(
    ("a", "transposed", "b"),
    [(WEIGHT, True, INPUT), (WEIGHT, False, OUTPUT), (INPUT, False, OUTPUT)],
    ids=["forward", "gradient of the input", "gradient of the weight"],
)
def test_all_three_products_of_a_linear_layer_are_as_large(
    extension: SimpleNamespace, a: Any, transposed: bool, b: Any
) -> None:
    counts: Counter[str] = Counter()
    with te_flops.count_transformer_engine(counts):
        assert extension.generic_gemm(a, transposed, b, "rest")[3] == "rest"
        extension.te_general_grouped_gemm([a, a], transposed, [b, b])
    extension.generic_gemm(a, transposed, b)  # not counted outside the context
    assert counts == {"gemm": 3 * 2 * TOKENS * INNER * OUTER}


def test_attention_is_over_the_pairs_of_each_segment(extension: SimpleNamespace) -> None:
    heads, width = 2, 3
    query = torch.empty(9, heads, width)
    bounds = torch.tensor([0, 4, 9], dtype=torch.int32)
    full = 4 * heads * width * (4**2 + 5**2)
    counts: Counter[str] = Counter()
    with te_flops.count_transformer_engine(counts):
        extension.fused_attn_fwd(9, NVTE_Mask_Type.NVTE_NO_MASK, bounds, bounds, query)
        one_key = 4 * heads * width * 9
        assert counts == {"attention": full, te_flops.ONE_KEY: one_key}
        extension.fused_attn_bwd(
            9, NVTE_Mask_Type.NVTE_PADDING_CAUSAL_MASK, True, bounds, bounds, query
        )
    assert counts == {"attention": full + 2.5 * full / 2, te_flops.ONE_KEY: 3.5 * one_key}


def test_without_transformer_engine_nothing_happens(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "transformer_engine_torch", raising=False)
    with te_flops.count_transformer_engine(counted := Counter()):
        pass
    assert not counted
    assert "transformer_engine_torch" not in sys.modules
