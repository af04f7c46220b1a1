"""A rehearsal counts every parameter, those of an adapter too."""

from __future__ import annotations

from pathlib import Path

import pytest

from mcore_qwen3vl.config import Architecture
from mcore_qwen3vl.converters.adapters.adapter import read_adapter
from mcore_qwen3vl.converters.adapters.config import apply, resolve_targets
from mcore_qwen3vl.converters.mapping import parameters
from mcore_qwen3vl.layout import Layout
from mcore_qwen3vl.model.lora import adapt
from mcore_qwen3vl.model.qwen3vl import build_chunks
from mcore_qwen3vl.runtime.launch import initialize, run_layout
from mcore_qwen3vl.training.memory import trained_parameters
from mcore_qwen3vl.verify.parity.case import ADAPTERS, write_random_adapter


def parts(hf: Path, adapter: Path) -> dict[str, int]:
    from mcore_qwen3vl.rehearsal.rank import by_part

    initialize(Layout())
    chunks = build_chunks(Architecture.from_hf(hf), Layout())
    adapt(chunks, read_adapter(adapter, hf))
    return by_part(list(chunks))


@pytest.mark.parametrize("lora", ["everything", "experts", "router"])
def test_parts_are_those_of_the_mapping_and_the_adapter(
    lora: str, dense: Path, moe: Path, tmp_path: Path
) -> None:
    hf, config = dense if lora == "everything" else moe, ADAPTERS[lora]
    adapter = write_random_adapter(tmp_path / "adapter", config, hf)
    wanted = {part: n for part, n in parameters.by_part(Architecture.from_hf(hf)).items() if n}
    targets, saved = resolve_targets(config, hf), apply(config, hf).saved
    factors = trained_parameters(targets, saved, tied=False).total()
    assert run_layout(parts, 1, hf, adapter) == [wanted | {"adapter": factors}]
