"""Base weights have one identity under every layout and in every format."""

import json
from pathlib import Path

import pytest

from mcore_qwen3vl.config import Architecture
from mcore_qwen3vl.converters.convert import hf_to_mcore
from mcore_qwen3vl.errors import BadInput
from mcore_qwen3vl.layout import Layout
from mcore_qwen3vl.model.qwen3vl import build_chunks
from mcore_qwen3vl.runtime.launch import initialize, run_layout
from mcore_qwen3vl.tiny import write_tiny_checkpoint
from mcore_qwen3vl.training.lora import BASE_FILE, Base, Identity


def of_rank(hf: Path, mcore: Path | None, layout: Layout, folder: Path | None = None) -> Identity:
    initialize(layout)
    base = Base(str(mcore or hf))
    for chunk in build_chunks(Architecture.from_hf(hf), layout):
        base.load(chunk)
    if folder is not None:
        base.check(folder)
    found = base.identity()
    assert found is not None
    return found


def identity(*args: object, layout: str) -> Identity:
    parsed = Layout.parse(layout)
    first, *others = run_layout(of_rank, parsed.world_size, *args[:2], parsed, *args[2:])
    assert all(other == first for other in others)
    return first


def test_one_sum_under_every_layout_and_format(moe: Path, tmp_path: Path) -> None:
    hf_to_mcore(moe, tmp_path / "mcore")
    found = identity(moe, None, layout="tp2xep2xetp2xdp2")
    for layout in ("pp2xvpp2", "tp2+sp"):
        other = identity(moe, tmp_path / "mcore", layout=layout)
        assert (other["sum"], other["dtype"]) == (found["sum"], "float32")
        assert other["path"] == str(tmp_path / "mcore")


def test_other_weights_are_refused(dense: Path, tmp_path: Path) -> None:
    (tmp_path / BASE_FILE).write_text(json.dumps(identity(dense, None, layout="single")))
    identity(dense, None, tmp_path, layout="dp2")
    other = write_tiny_checkpoint(tmp_path / "other", seed=99)
    with pytest.raises(BadInput, match="has others: give the same base"):
        identity(other, None, tmp_path, layout="single")
