"""The comparison sees what can be wrong in gated delta nets and in the attention beside them."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from megatron.core.transformer.moe.shared_experts import SharedExpertMLP

from mcore_qwen3vl.config import Architecture
from mcore_qwen3vl.model.decoder import delta_net
from mcore_qwen3vl.model.decoder.attention import RotarySelfAttention
from mcore_qwen3vl.model.decoder.delta_net import DeltaNet
from mcore_qwen3vl.model.decoder.norm import RMSNorm
from mcore_qwen3vl.tiny import write_tiny_checkpoint
from mcore_qwen3vl.verification.parity.matrix import Matrix, MatrixRow
from tests.docs.markdown import ROOT
from tests.turns import slow_except

Patch = Callable[[pytest.MonkeyPatch], None]


def after_init(module: type, change: Callable[[Any], None]) -> Patch:
    """Return a patch that changes every new module of a class."""
    build = module.__init__

    def init(self: Any, *args: Any, **kwargs: Any) -> None:
        build(self, *args, **kwargs)
        change(self)

    return lambda patch: patch.setattr(module, "__init__", init)


def swap_query_and_gate(patch: pytest.MonkeyPatch) -> None:
    projected = RotarySelfAttention.get_query_key_value_tensors

    def swapped(self: Any, *args: Any, **kwargs: Any) -> Any:
        query, key, value, gate = projected(self, *args, **kwargs)
        return gate, key, value, query

    patch.setattr(RotarySelfAttention, "get_query_key_value_tensors", swapped)


def let_samples_mix(number: int) -> Patch:
    """Return a patch of the convolution (0) or the delta rule (1): one sample fills a pack."""

    def apply(patch: pytest.MonkeyPatch) -> None:
        both = list(delta_net._PLAIN)
        function = both[number]

        def mixing(*args: Any) -> Any:
            *inputs, bounds, state = args
            return function(*inputs, (0, bounds[-1]), state)

        both[number] = mixing
        patch.setattr(delta_net, "_PLAIN", tuple(both))

    return apply


def round_decays(patch: pytest.MonkeyPatch) -> None:
    part = delta_net.get_parameter_local_cp
    patch.setattr(
        delta_net, "get_parameter_local_cp", lambda p, *args: part(p.bfloat16().to(p.dtype), *args)
    )


def leave_gradient_apart(net: Any) -> None:
    weight = net.out_norm.weight
    del weight.average_gradients_across_tp_domain
    weight._backward_hooks.clear()


def turn_whole_heads(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Architecture, "rotary_dim", property(lambda a: a.head_dim))


FAULTS: dict[str, tuple[str, str, str, str, Patch]] = {
    # model, layout, batch, first part that must differ, and the mistake
    "query and gate swapped": ("qwen3.5", "single", "text", "logits", swap_query_and_gate),
    "norm weights around one": (
        *("qwen3.5", "single", "text", "logits"),
        after_init(RMSNorm, lambda norm: setattr(norm, "zero_centered", False)),
    ),
    "delta nets' norm zero-centred": (
        *("qwen3.5", "single", "text", "logits"),
        after_init(DeltaNet, lambda net: setattr(net.out_norm, "zero_centered", True)),
    ),
    "convolution across samples": ("qwen3.5", "single", "packed", "logits", let_samples_mix(0)),
    "state across samples": ("qwen3.5", "single", "packed", "logits", let_samples_mix(1)),
    "decay of weights in bf16": ("qwen3.5", "single", "text", "logits", round_decays),
    "padding not zero": (
        *("qwen3.5", "single", "padded-left", "logits"),
        lambda patch: patch.setattr(DeltaNet, "_zero_out_padding", lambda self, x, mask: x),
    ),
    "gradient of each rank's heads": (
        *("qwen3.5", "tp2", "text", "gradients"),
        after_init(DeltaNet, leave_gradient_apart),
    ),
    "whole heads rotated": ("qwen3.5", "single", "text", "logits", turn_whole_heads),
    "shared expert without its gate": (
        *("qwen3.5-moe", "single", "text", "logits"),
        after_init(SharedExpertMLP, lambda mlp: setattr(mlp, "use_shared_expert_gate", False)),
    ),
}


@pytest.mark.parametrize(
    "name", slow_except([*FAULTS], "state across samples", "gradient of each rank's heads")
)
def test_a_mistake_is_seen(name: str, matrix: Matrix, monkeypatch: pytest.MonkeyPatch) -> None:
    model, layout, batch, part, plant = FAULTS[name]
    plant(monkeypatch)
    report = matrix.compare_row(MatrixRow(model, layout, (batch,)))
    failed = {p for (_, p), summary in report.parts().items() if summary.failed}
    assert part in failed
    assert ("logits" in failed) == (part == "logits")  # otherwise another mistake was made


@pytest.mark.slow
def test_the_reference_calls_no_kernels_that_need_a_gpu(tmp_path: Path) -> None:
    """Where flash-linear-attention is installed, transformers would call it on the CPU too."""
    package = tmp_path / "fla"
    package.mkdir()
    raising = "def {}(*arguments, **named): raise RuntimeError('it needs a GPU')\n"
    kernels = "chunk_gated_delta_rule", "fused_recurrent_gated_delta_rule"
    (package / "__init__.py").touch()
    for folder in ("ops", "ops/gated_delta_rule"):
        (package / folder).mkdir()
        (package / folder / "__init__.py").write_text("".join(map(raising.format, kernels)))
    model = write_tiny_checkpoint(tmp_path / "model", family="qwen3.5")
    done = subprocess.run(
        [sys.executable, "-m", "mcore_qwen3vl", "verify", "parity", str(model), "--no-gradients"],
        env={**os.environ, "PYTHONPATH": f"{tmp_path}:{ROOT}"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-500:] + done.stderr[-2000:]
