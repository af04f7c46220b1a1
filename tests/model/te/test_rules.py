"""Deliberate mistakes that the ``te`` rows detect.

Ranks are forked from this process, so a function replaced here is replaced there.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from tests.model.te.installed import require

require()

import torch  # noqa: E402
from megatron.core.transformer.transformer_layer import TransformerLayer  # noqa: E402

from mcore_qwen3vl.config import Architecture  # noqa: E402
from mcore_qwen3vl.model import (  # noqa: E402
    lora,
    lora_modules,
    qwen3vl,
)
from mcore_qwen3vl.model.decoder import layer  # noqa: E402
from mcore_qwen3vl.model.decoder.attention import InterleavedMRoPE, PackedSequence  # noqa: E402
from mcore_qwen3vl.verification.parity.matrix import Matrix, MatrixRow  # noqa: E402
from tests.model.te.rows import with_te  # noqa: E402
from tests.verification.parity.test_rules import worst  # noqa: E402

pytestmark = pytest.mark.slow
FAR_OFF = 1e-3
"""Far above the tolerance of 2e-5, because each of the mistakes is a gross one."""


def row(model: str, layout: str, batch: str, lora: str = "", **config: Any) -> MatrixRow:
    return with_te(MatrixRow(model, layout, (batch,), {"config": config}, "", lora))


@pytest.mark.parametrize("epsilon", [1e-5, 0.021])
def test_epsilon_of_the_fused_norms(matrix: Matrix, epsilon: float) -> None:
    report = matrix.compare_row(row("epsilon", "single", "mixed", layernorm_epsilon=epsilon))
    assert worst(report, "logits") > FAR_OFF


def test_gamma_is_not_zero_centred(matrix: Matrix) -> None:
    report = matrix.compare_row(row("dense", "single", "mixed", layernorm_zero_centered_gamma=True))
    assert worst(report, "logits") > FAR_OFF


@pytest.mark.parametrize("layout", ["single", "cp2"])
def test_samples_of_a_pack_are_apart(
    matrix: Matrix, monkeypatch: pytest.MonkeyPatch, layout: str
) -> None:
    """Errors show when attention alone takes a pack for one sample."""
    complete = PackedSequence.from_params.__func__  # type: ignore[attr-defined]

    def of(cls: Any, params: Any, device: Any) -> Any:
        packed = complete(cls, params, device)
        whole = packed.cu_seqlens_q[[0, -1]]
        length = packed.bounds[-1]
        return replace(
            packed,
            cu_seqlens_q=whole,
            cu_seqlens_kv=whole,
            max_seqlen_q=length,
            max_seqlen_kv=length,
        )

    monkeypatch.setattr(PackedSequence, "from_params", classmethod(of))
    assert worst(matrix.compare_row(row("dense", layout, "packed")), "logits") > FAR_OFF


def test_deepstack_is_added(matrix: Matrix, monkeypatch: pytest.MonkeyPatch) -> None:
    def without(self: Any, *args: Any, context: Any = None, **kwargs: Any) -> Any:
        kwargs.pop("context_mask", None)
        return TransformerLayer.forward(self, *args, **kwargs)[0], context

    monkeypatch.setattr(layer.DeepStackLayer, "forward", without)
    report = matrix.compare_row(row("dense", "single", "image"))
    assert worst(report, "logits") > FAR_OFF
    assert worst(report, "gradients", "visual.deepstack_merger_list") > FAR_OFF


def test_rotary_axes_alternate(matrix: Matrix, monkeypatch: pytest.MonkeyPatch) -> None:
    """Errors show when the axes are in chunks, as in Megatron."""
    make = InterleavedMRoPE.__init__

    def chunked(self: Any, architecture: Architecture) -> None:
        make(self, architecture)
        self.axis = torch.arange(3).repeat_interleave(torch.tensor(architecture.mrope_section))

    monkeypatch.setattr(InterleavedMRoPE, "__init__", chunked)
    assert worst(matrix.compare_row(row("dense", "tp2+sp", "mixed")), "logits") > FAR_OFF


@pytest.mark.parametrize("batch", ["mixed", "packed"])
def test_context_parallel_ranks_hold_two_chunks(
    matrix: Matrix, monkeypatch: pytest.MonkeyPatch, batch: str
) -> None:
    """Errors show when each rank holds one run of tokens in order."""

    def in_order(seq_len: int, *, cp_size: int, cp_rank: int, **_: Any) -> torch.Tensor:
        return torch.arange(seq_len).chunk(cp_size)[cp_rank]

    monkeypatch.setattr(qwen3vl, "local_positions", in_order)
    assert worst(matrix.compare_row(row("dense", "cp2", batch)), "logits") > FAR_OFF


def test_adapters_beside_a_fused_norm_take_its_output(
    matrix: Matrix, monkeypatch: pytest.MonkeyPatch
) -> None:
    install = lora._install_sites

    def unnormed(module: Any, kind: Any, sites: Any) -> None:
        install(module, kind, sites)
        if hasattr(module, "return_layernorm_output"):
            module.return_layernorm_output = False

    monkeypatch.setattr(lora, "_install_sites", unnormed)
    report = matrix.compare_row(row("dense", "single", "mixed", "language"))
    assert worst(report, "logits") > FAR_OFF
    assert worst(report, "gradients", "q_proj.weight.lora_A") > FAR_OFF


def test_adapters_of_grouped_experts_keep_their_order(
    matrix: Matrix, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        lora_modules.GroupedSite,
        "__init__",
        lambda self, sites: setattr(self, "_sites", [*sites][::-1]),
    )
    assert worst(matrix.compare_row(row("moe", "single", "mixed", "experts")), "logits") > FAR_OFF
