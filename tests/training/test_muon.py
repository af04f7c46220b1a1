"""Muon trains as the package's own optimizer does on Hugging Face's model: `make test-muon`."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import pytest
import torch
from torch import nn

from mcore_qwen3vl.layout import Layout
from mcore_qwen3vl.verification.curves import (
    LEARNING_RATE,
    WEIGHT_DECAY,
    Job,
    adamw,
    curve_of,
    hf_curve,
    train,
    worst_difference,
)

muon = pytest.importorskip(
    "emerging_optimizers.orthogonalized_optimizers", reason="`make test-muon` installs it"
)

TOLERANCE = 2e-5
MUON = ("--optimizer", "muon", "--muon-fp32-matmul-prec", "high")


class Plain:
    """The package's Muon for matrices, and AdamW for the embedding, the head and all else.

    Megatron orthogonalises the query, key and value weights apart, and joins gate and up.
    """

    def __init__(self, trained: Mapping[str, nn.Parameter]) -> None:
        adams = ("embed_tokens.weight", "lm_head.weight")
        matrices = {n: p for n, p in trained.items() if p.ndim == 2 and not n.endswith(adams)}
        joined = [
            [weight, matrices[name.replace("gate", "up")]] if ".gate_proj" in name else [weight]
            for name, weight in matrices.items()
            if ".up_proj" not in name
        ]
        self._joined = [(parts, nn.Parameter(torch.cat(parts).detach())) for parts in joined]
        self._muon = muon.Muon(
            [whole for _, whole in self._joined],
            lr=LEARNING_RATE,
            momentum=0.9,
            weight_decay=WEIGHT_DECAY,
            fp32_matmul_prec="high",
        )
        self._adam = adamw({n: p for n, p in trained.items() if n not in matrices})
        self._trained = trained

    def zero_grad(self) -> None:
        for parameter in self._trained.values():
            parameter.grad = None

    @torch.no_grad()
    def step(self) -> None:
        for parts, whole in self._joined:
            whole.grad = torch.cat([part.grad for part in parts if part.grad is not None])
        self._muon.step()
        self._adam.step()
        for parts, whole in self._joined:
            for part, value in zip(parts, whole.split([len(one) for one in parts]), strict=True):
                part.copy_(value)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("layout", "flags"),
    [("single", ()), ("dp2", ()), ("pp2", ()), ("tp2+sp", ("--muon-tp-mode", "duplicated"))],
)
def test_loss_and_gradient_norm_are_those_of_a_plain_loop(
    layout: str, flags: tuple[str, ...], dense: Path, data: Path, tmp_path: Path
) -> None:
    job = Job(dense, data, Layout.parse(layout), steps=4, flags=(*MUON, *flags))
    ours, theirs = curve_of(train(job, tmp_path)), hf_curve(job, Plain)
    difference = worst_difference(ours, theirs)
    print(f"observed: {layout} loss {difference.loss:.1e}, norm {difference.grad_norm:.1e}")
    assert theirs[-1].loss < theirs[0].loss - 0.1
    assert difference.loss <= TOLERANCE
    assert difference.grad_norm <= TOLERANCE
