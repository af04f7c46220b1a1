"""PEFT's adapters are read and written back unchanged, and PEFT loads what is written."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from peft import LoraConfig
from safetensors.torch import load_file

from mcore_qwen3vl.config import Architecture
from mcore_qwen3vl.converters.adapters.adapter import convert_adapter, read_adapter, write_adapter
from mcore_qwen3vl.converters.adapters.config import AdapterConfig, resolve_targets
from mcore_qwen3vl.converters.convert import hf_to_mcore
from mcore_qwen3vl.errors import BadInput
from mcore_qwen3vl.verify.measurement import measure
from mcore_qwen3vl.verify.parity.comparison import TOLERANCE
from tests.converters.adapters.conftest import Made
from tests.converters.adapters.peft_made import KINDS, load, logits
from tests.turns import slow_except

WEIGHTS = "adapter_model.safetensors"


@pytest.mark.parametrize("kind", slow_except([*KINDS], *[*KINDS][1::2]))
def test_there_and_back(kind: str, made: Callable[[str], Made], tmp_path: Path) -> None:
    """Tensors come back byte for byte, and the config field by field."""
    source = made(kind)
    adapter = read_adapter(source.folder, source.base)
    assert adapter.roles == ("swapped" if KINDS[kind].swapped else "canonical")
    back = tmp_path / "back"
    write_adapter(
        back, adapter.config, adapter.factors, adapter.saved, source.base, roles=adapter.roles
    )
    before, after = load_file(source.folder / WEIGHTS), load_file(back / WEIGHTS)
    assert list(before) == list(after)
    for key, tensor in before.items():
        assert tensor.dtype == after[key].dtype
        assert torch.equal(tensor, after[key]), key
    assert (source.folder / WEIGHTS).read_bytes() == (back / WEIGHTS).read_bytes()
    configs = [json.loads((f / "adapter_config.json").read_text()) for f in (source.folder, back)]
    assert configs[0] == configs[1]
    assert LoraConfig.from_pretrained(source.folder) == LoraConfig.from_pretrained(back)


def test_a_base_from_the_hub_is_known_by_its_commit(
    made: Callable[[str], Made], tmp_path: Path
) -> None:
    """The manifest of a checkpoint that was converted from the cache names no folder."""
    source = made("tied")
    snapshot = tmp_path / "models--Qwen--tiny" / "snapshots" / "0f"
    shutil.copytree(source.base, snapshot)
    hf_to_mcore(snapshot, tmp_path / "mcore")
    adapter = read_adapter(source.folder, source.base)
    for named, notes in ((snapshot, 0), (source.base, 1)):
        config = replace(adapter.config, raw={"base_model_name_or_path": str(named)})
        assert len(replace(adapter, config=config).other_base(tmp_path / "mcore")) == notes


@pytest.mark.parametrize("kind", ["swapped roles", "tied", "lm_head"])
def test_peft_takes_it(kind: str, made: Callable[[str], Made], tmp_path: Path) -> None:
    """Every key loads, and the logits are those of the model that the adapter was saved from.

    With the source's roles, files are equal byte for byte (above), so three kinds are enough.
    """
    source = made(kind)
    adapter = read_adapter(source.folder, source.base)
    write_adapter(
        tmp_path / "canonical", adapter.config, adapter.factors, adapter.saved, source.base
    )
    loaded = load(source.base, tmp_path / "canonical")
    architecture = Architecture.from_hf(source.base)
    found, wanted = (logits(model, architecture) for model in (loaded, source.model))
    assert measure(found, wanted).relative <= TOLERANCE


def test_all_linear_is_spelled_out(made: Callable[[str], Made], tmp_path: Path) -> None:
    """Modules are listed, as PEFT does: the word's meaning depends on transformers' release."""
    source = made("all-linear")
    adapter = read_adapter(source.folder, source.base)
    short = replace(adapter.config, target_modules="all-linear")
    write_adapter(tmp_path / "short", short, adapter.factors, adapter.saved, source.base)
    assert (
        LoraConfig.from_pretrained(tmp_path / "short").target_modules
        == LoraConfig.from_pretrained(source.folder).target_modules
    )


def test_a_router_that_was_a_linear_layer(made: Callable[[str], Made], tmp_path: Path) -> None:
    """An adapter of transformers 4.57 has the same tensors; converted, it loads with version 5."""
    source, old = made("router"), tmp_path / "old"
    shutil.copytree(source.folder, old)
    config = json.loads((old / "adapter_config.json").read_text())
    config |= {"target_modules": ["k_proj", "gate"], "target_parameters": None}
    (old / "adapter_config.json").write_text(json.dumps(config | {"lora_dropout": 0.1}))
    with pytest.raises(BadInput, match=r"name mlp\.gate\.weight in target_parameters"):
        resolve_targets(AdapterConfig.from_file(old), source.base)
    assert "has its name of transformers 4.57" in " ".join(read_adapter(old, source.base).notes)
    (old / "adapter_config.json").write_text(json.dumps(config))
    convert_adapter(old, tmp_path / "new", source.base, roles="canonical")
    assert (source.folder / WEIGHTS).read_bytes() == (tmp_path / "new" / WEIGHTS).read_bytes()
    architecture = Architecture.from_hf(source.base)
    loaded = load(source.base, tmp_path / "new")
    found, wanted = (logits(model, architecture) for model in (loaded, source.model))
    assert measure(found, wanted).relative <= TOLERANCE
