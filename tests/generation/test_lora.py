"""Answers with an adapter equal those of the merged checkpoint."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from mcore_qwen3vl.converters.adapters.merge import merge
from mcore_qwen3vl.converters.convert import hf_to_mcore
from mcore_qwen3vl.converters.place import ADAPTER_CONFIG
from mcore_qwen3vl.generation import Request, generate_on_all_ranks
from mcore_qwen3vl.inference import adapter_for
from mcore_qwen3vl.layout import Layout
from mcore_qwen3vl.verify.parity.case import ADAPTERS, write_random_adapter
from tests.turns import slow


@pytest.mark.parametrize(
    ("model", "lora", "layout"),
    [
        pytest.param("dense", "everything", "tp2+sp"),
        *slow(("moe", "router", "tp2xep2+sp")),
    ],
)
def test_an_adapter_answers_like_the_merged_checkpoint(
    model: str, lora: str, layout: str, request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    base = request.getfixturevalue(model)
    adapter = write_random_adapter(tmp_path / "adapter", ADAPTERS[lora], base)
    merge(base, adapter, tmp_path / "merged")
    prompt = [{"role": "user", "content": "What is in the picture?"}]
    options = {"max_new_tokens": 12, "temperature": 0.0}

    def answer(checkpoint: Path, layout: str, lora: Path | None = None) -> list[int]:
        asked = Request(
            checkpoint, [prompt], layout=Layout.parse(layout), lora=lora, options=options
        )
        (generation,) = generate_on_all_ranks(asked, on_cpu=True)
        return generation.token_ids

    expected = answer(tmp_path / "merged", "single")
    assert answer(base, layout, adapter) == expected
    assert answer(base, "single") != expected


def test_an_adapter_of_another_base_is_warned_of(
    dense: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """A Megatron-Core checkpoint that was converted from the base is no other base."""
    adapter = write_random_adapter(tmp_path / "adapter", ADAPTERS["everything"], dense)
    file = adapter / ADAPTER_CONFIG
    config = json.loads(file.read_text()) | {"base_model_name_or_path": str(dense)}
    file.write_text(json.dumps(config))
    other = shutil.copytree(dense, tmp_path / "other")
    hf_to_mcore(dense, tmp_path / "mcore")
    for checkpoint in (dense, tmp_path / "mcore"):
        assert adapter_for(adapter, checkpoint, dense) is not None
    assert capfd.readouterr().err == ""
    adapter_for(adapter, other, other)
    said = f"warning: The adapter was trained on {dense}, and is used with {other}."
    assert capfd.readouterr().err.strip() == said
