"""Megatron's flex dispatcher equals Hugging Face with a reference in place of DeepEP's kernels."""

from __future__ import annotations

from collections.abc import Iterator
from importlib import import_module
from typing import Any

import pytest
import torch

from mcore_qwen3vl.runtime.launch import RanksFailed
from mcore_qwen3vl.verification.parity.matrix import Matrix, MatrixRow
from tests.model.deepep.installed import installed
from tests.model.deepep.rows import BACKENDS, ROWS, under
from tests.turns import slow, slow_except
from tests.verification.parity.test_rules import FAR_OFF, worst

FAST = (
    "moe tp2xep2+sp deepep, overlapped experts",
    "moe-mixed tp2xep2+sp LoRA: experts and MLP deepep",
    "moe-all tp2xep2+sp hybridep, bf16",
)
MIXED = MatrixRow("moe", "ep2xdp2", ("mixed",))


@pytest.fixture(autouse=True, scope="module")
def deep_ep() -> Iterator[None]:
    with installed():
        yield


@pytest.mark.parametrize(
    "row",
    [
        pytest.param(row, id=str(row), marks=() if str(row) in FAST else pytest.mark.slow)
        for row in ROWS
    ],
)
def test_equals_hugging_face(matrix: Matrix, row: MatrixRow) -> None:
    report = matrix.compare_row(row)
    report.require()
    assert {part for _, part in report.parts()} >= {"logits", "loss", "gradients"}


def test_fast_rows_are_rows() -> None:
    assert {*FAST} <= {str(row) for row in ROWS}
    assert len({str(row) for row in ROWS}) == len(ROWS)


@pytest.mark.parametrize("backend", slow_except([*BACKENDS], "deepep"))
def test_outputs_of_experts_that_one_rank_does_not_return(
    matrix: Matrix, monkeypatch: Any, backend: str
) -> None:
    route = import_module("deep_ep.exchange").Route
    send_back = route.send_back

    def without_last(self: Any, values: torch.Tensor) -> torch.Tensor:
        last = self.group.rank() == self.group.size() - 1
        return send_back(self, torch.zeros_like(values) if last else values)

    monkeypatch.setattr(route, "send_back", without_last)
    assert worst(matrix.compare_row(under(backend, MIXED)), "logits") > FAR_OFF


@pytest.mark.parametrize(
    ("backend", "module", "owner", "name", "weights"),
    [
        *slow(("deepep", "buffer", "Buffer", "combine", "topk_weights")),
        ("hybridep", "hybrid_ep_buffer", "HybridEPBuffer", "combine_with_unpermute", "probs"),
    ],
)
def test_gradients_of_the_routers_weights_that_do_not_return(
    matrix: Matrix, monkeypatch: Any, backend: str, module: str, owner: str, name: str, weights: str
) -> None:
    buffer = getattr(import_module(f"deep_ep.{module}"), owner)
    combine = getattr(buffer, name)

    def forgetful(self: Any, *args: Any, **kwargs: Any) -> Any:
        if kwargs.get(weights) is not None:
            kwargs[weights] = torch.zeros_like(kwargs[weights])
        return combine(self, *args, **kwargs)

    monkeypatch.setattr(buffer, name, forgetful)
    report = matrix.compare_row(under(backend, MIXED))
    assert worst(report, "logits") < 2e-5
    assert worst(report, "gradients", "mlp.gate.weight") > FAR_OFF


def test_lengths_that_differ_are_padded_for_hybridep(matrix: Matrix, monkeypatch: Any) -> None:
    """A model for batches of different lengths pads them by itself; HybridEP refuses others."""
    monkeypatch.setitem(BACKENDS, "hybridep", {})
    ragged = under("hybridep", MatrixRow("moe", "ep2xdp2", ("ragged",)))
    matrix.compare_row(ragged).require()
    ragged.options["config"]["variable_seq_lengths"] = False
    with pytest.raises(RanksFailed, match="tokens"):
        matrix.compare_row(ragged)
