"""Checkpoints in other forms fill a running model with the same weights, or are refused."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from mcore_qwen3vl.config import Architecture
from mcore_qwen3vl.converters.convert import hf_to_mcore
from mcore_qwen3vl.converters.live.export import export_hf
from mcore_qwen3vl.converters.live.load import load_checkpoint, load_hf
from mcore_qwen3vl.errors import BadInput
from mcore_qwen3vl.layout import Layout
from mcore_qwen3vl.model.build import build_chunks
from mcore_qwen3vl.runtime.launch import run_layout
from mcore_qwen3vl.runtime.parallel import initialize
from tests.converters.checkpoints import load
from tests.converters.forms import FORMS

Make = Callable[[str], Path]


@pytest.mark.parametrize("name", ["before the move", "head stored though tied", "base, tied"])
def test_a_language_model_is_loaded(form: Make, tiny: Make, name: str) -> None:
    source, plain = form(name), tiny(FORMS[name].source)

    def on_rank() -> None:
        initialize(Layout())
        chunks = build_chunks(Architecture.from_hf(plain), Layout(), params_dtype=torch.float32)
        load_hf(chunks, source)
        found, expected = dict(export_hf(chunks)), load(plain)
        assert found.keys() == expected.keys()
        for tensor, value in expected.items():
            assert torch.equal(found[tensor], value), tensor

    run_layout(on_rank, 1, timeout=120)


def test_a_model_without_its_head_is_refused(form: Make, tiny: Make, tmp_path: Path) -> None:
    source, plain, mcore = form("base"), tiny("dense-v5"), tmp_path / "mcore"
    hf_to_mcore(source, mcore)

    def on_rank() -> None:
        initialize(Layout())
        chunks = build_chunks(Architecture.from_hf(plain), Layout(), params_dtype=torch.float32)
        with pytest.raises(BadInput, match=r"headless model.*Name a checkpoint that has one"):
            load_hf(chunks, source)
        with pytest.raises(BadInput, match=r"headless model.*Name a checkpoint that has one"):
            load_checkpoint(chunks, mcore)

    run_layout(on_rank, 1, timeout=120)
