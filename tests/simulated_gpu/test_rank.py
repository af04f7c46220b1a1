"""FLOPs for which PyTorch has no formula, and bytes of all other kernels, are counted right."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable
from enum import Enum
from itertools import count
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from mcore_qwen3vl.model.decoder.experts import Groups, grouped_product
from mcore_qwen3vl.simulated_gpu import rank as te_flops
from mcore_qwen3vl.simulated_gpu.rank import BYTES, FUSED, CountWork, count_compiled

COUNTS = [3, 0, 5]


def counted(rows: Tensor, matrices: Tensor, together: bool) -> int:
    with CountWork() as flops:
        if together:
            result = grouped_product(rows, matrices, Groups.from_counts(COUNTS, rows.device))
        else:
            runs = zip(rows.split(COUNTS), matrices, strict=True)
            result = torch.cat([run @ one.T for run, one in runs])
        result.backward(torch.randn_like(result))
    return flops.counts["gemm"]


def test_a_grouped_product_counts_as_its_parts() -> None:
    rows = torch.randn(8, 12, requires_grad=True)
    matrices = torch.randn(3, 20, 12, requires_grad=True)
    together = counted(rows, matrices, True)
    assert together == counted(rows, matrices, False) == 3 * 2 * 8 * 12 * 20


def each_launches() -> CountWork:
    return CountWork(count().__next__)


def test_other_kernels_count_what_they_read_and_write() -> None:
    a, b = torch.randn(3, 5), torch.randn(5)
    with each_launches() as work:
        torch.add(a, b)
    assert work.counts == {BYTES: 4 * (15 + 5 + 15)}
    with each_launches() as work:
        a.add_(b)  # reads and writes a
    assert work.counts == {BYTES: 4 * (15 + 5 + 15)}
    with each_launches() as work:
        torch._foreach_mul_([a, b], 2.0)
    assert work.counts == {BYTES: 4 * 2 * (15 + 5)}
    with CountWork() as work:  # nothing is launched
        a.view(-1)
    assert not work.counts


TABLE, PLACES, VALUES = torch.randn(64, 8), torch.tensor([3, 60, 7]), torch.randn(3, 8)
ROWS = PLACES[:, None].expand(3, 8)


@pytest.mark.parametrize(
    ("run", "numbers"),
    [
        (lambda: TABLE[PLACES], 24 + 24),
        (lambda: TABLE.index_select(0, PLACES), 24 + 24),
        (lambda: torch.nn.functional.embedding(PLACES, TABLE), 24 + 24),
        (lambda: TABLE.gather(0, ROWS), 24 + 24),
        (lambda: TABLE.scatter_add_(0, ROWS, VALUES), 24 + 24 + 24),
        (lambda: TABLE.index_add_(0, PLACES, VALUES), 24 + 24 + 24),
        (lambda: TABLE.index_put_((PLACES,), VALUES, True), 24 + 24 + 24),
    ],
)
def test_a_kernel_that_uses_places_counts_what_it_touches(
    run: Callable[[], Tensor], numbers: int
) -> None:
    with each_launches() as work:
        run()
    assert work.counts == {BYTES: 4 * numbers + 8 * 3}  # and the places, int64


def test_what_is_overwritten_or_expanded_counts_once() -> None:
    a, b = torch.randn(3, 5), torch.randn(3, 1).expand(3, 5)
    with each_launches() as work:
        a.zero_()
    assert work.counts == {BYTES: 4 * 15}
    with each_launches() as work:
        a.copy_(b)
    assert work.counts == {BYTES: 4 * (15 + 3)}
    with each_launches() as work:
        torch._foreach_copy_([a, a], [b, b])
    assert work.counts == {BYTES: 2 * 4 * (15 + 3)}


def test_what_rarely_writes_counts_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    tensor = torch.randn(3, 5)
    monkeypatch.setattr("mcore_qwen3vl.simulated_gpu.rank.RARELY_WRITING", {"zero_"})
    with each_launches() as work:
        tensor.zero_()
    assert not work.counts[BYTES]


def test_what_would_be_compiled_counts_as_one_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "compile", lambda function, **_: function)
    count_compiled()

    @torch.compile(dynamic=True)
    def swiglu(gate: Tensor, up: Tensor) -> Tensor:
        return gate.sigmoid() * gate * up

    gate, up = torch.randn(2, 3, 5)
    with each_launches() as work:
        swiglu(gate, up)
    # The counter rises when read: twice by an operator on its own, once by one inside a kernel.
    assert work.counts == {BYTES: 4 * 3 * 15, FUSED: 3}
    assert swiglu(gate, up).shape == (3, 5)  # it also works where nothing is counted


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
