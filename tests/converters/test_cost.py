"""What a conversion costs is estimated without its weights."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from mcore_qwen3vl.config import Architecture
from mcore_qwen3vl.converters.cost import estimate, slice_bytes
from mcore_qwen3vl.converters.mapping.table import max_rows, table
from mcore_qwen3vl.errors import BadInput
from mcore_qwen3vl.published_configs import PUBLISHED
from tests.command import exit_code

BF16 = torch.bfloat16


def transformers_bytes(file: Path) -> int:
    """Count the bytes of the weights in Hugging Face's model, without our code."""
    import transformers

    config = json.loads(file.read_text())
    name = config["architectures"][0]
    described = getattr(transformers, name.replace("ForConditionalGeneration", "Config"))
    with torch.device("meta"):
        model = getattr(transformers, name)(described.from_dict(config))
    return sum(p.numel() for p in model.parameters()) * BF16.itemsize


@pytest.mark.parametrize("model", ["2b", "30b_a3b", "235b_a22b"])
def test_bytes_are_those_of_transformers_model(model: str) -> None:
    file = PUBLISHED / f"{model}.json"
    assert estimate(file).nbytes == transformers_bytes(file)


def test_the_largest_model(capsys: pytest.CaptureFixture[str]) -> None:
    file = str(PUBLISHED / "235b_a22b.json")
    options = ["--workers", "8", "--disk-gb-per-s", "2", "--json"]
    assert exit_code("inspect", "--hf-config", file, *options) == 0
    found = json.loads(capsys.readouterr().out)
    assert round(found["nbytes"] / 1e9) == 471  # as published
    assert found["largest_slice_bytes"] == 4096 * 2 * 1536 * 2  # one expert's gate and up
    assert found["memory_bound_bytes"] == 2**30 + 8 * found["largest_slice_bytes"]
    assert found["seconds"] == pytest.approx(2 * 471 / 2, rel=0.01)
    assert found["units"] > 200


@pytest.mark.parametrize("layout", ["published", "v5"])
def test_no_slice_is_larger(layout: Any) -> None:
    """Neither stream yields more for any row of 235B-A22B, tried with meta tensors."""
    architecture = Architecture.from_hf(PUBLISHED / "235b_a22b.json")
    rows = table(architecture, expert_layout=layout)
    most = max(slice_bytes(row, BF16) for row in rows)
    seen = 0
    for row in rows:
        if row.offset and (row.offset[0] > 1 or row.offset[-1] > 1):
            continue  # these repeat the same shapes
        how, limit = row.rearrangement, max_rows(row, BF16)
        sources = [torch.empty(s.piece_shape, dtype=BF16, device="meta") for s in row.sources]
        stored = torch.empty(row.shape, dtype=BF16, device="meta")
        columns = tuple(slice(0, n) for n in row.shape[1:])
        rows_at_once = row.shape[0] if how.transposed else limit
        there = list(how.stream(lambda i, box, s=sources: s[i][box], columns, rows_at_once))
        back = [
            list(how.stream_back(n, lambda box, s=stored: s[box], columns, limit))
            for n in range(len(sources))
        ]
        for pieces, whole in ((there, [stored]), *zip(back, [[s] for s in sources], strict=True)):
            assert sum(p.nbytes for p in pieces) == sum(w.nbytes for w in whole)
            assert max(p.nbytes for p in pieces) <= slice_bytes(row, BF16) <= most
            seen += len(pieces)
    assert seen > 1000
    assert most <= 32 * 2**20


def test_text_and_errors(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = str(PUBLISHED / "2b.json")
    exit_code("inspect", "--hf-config", file, "--disk-gb-per-s", "1.5", "--workers", "2")
    text = capsys.readouterr().out
    for part in ("4.26 GB", "units of work", "for 2 workers", "6 s to read and write", "1.5 GB/s"):
        assert part in text
    exit_code("inspect", "--hf-config", file, "--workers", "1")
    assert "for 1 worker\n" in capsys.readouterr().out
    assert exit_code("inspect") == 2
    for options in ({"workers": 0}, {"disk_gb_per_s": 0.0}, {"disk_gb_per_s": float("nan")}):
        with pytest.raises(BadInput, match="must be positive"):
            estimate(file, **options)
