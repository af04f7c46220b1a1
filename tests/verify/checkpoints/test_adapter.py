"""Adapters pass through a sharded model bit for bit, and a wrongly cut factor is named."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from mcore_qwen3vl.converters import export
from mcore_qwen3vl.layout import Layout
from mcore_qwen3vl.verify.checkpoints import adapter_roundtrip
from mcore_qwen3vl.verify.parity.case import ADAPTERS, write_random_adapter


@pytest.mark.parametrize(
    ("model", "lora", "layout"),
    [
        ("dense", "everything", None),
        pytest.param("moe", "whole router", Layout(tp=2, ep=2, sp=True), marks=pytest.mark.slow),
    ],
)
def test_every_tensor_comes_back(
    model: str, lora: str, layout: Layout | None, request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    base = request.getfixturevalue(model)
    adapter = write_random_adapter(tmp_path / "adapter", ADAPTERS[lora], base)
    report = adapter_roundtrip(base, adapter, layout=layout)
    report.require()
    assert len(report.findings) > 8


def test_experts_in_another_order_would_be_seen(
    moe: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The report fails if the export orders B's columns expert by expert, as other tools do."""
    parts = export.factor_parts

    def contiguous(models: Any) -> Any:
        for part in parts(models):
            rows, columns = part.box
            if part.name.endswith("lora_B"):
                first = columns.start * part.local.shape[1]
                columns = slice(first, first + part.local.shape[1])
            yield replace(part, box=(rows, columns))

    monkeypatch.setattr(export, "factor_parts", contiguous)
    config = ADAPTERS["gate and up of experts"]
    adapter = write_random_adapter(tmp_path / "adapter", config, moe)
    report = adapter_roundtrip(moe, adapter, layout=Layout())
    assert {f.name.rpartition(".")[2] for f in report.failures} == {"lora_B"}
    assert len(report.failures) == 4
