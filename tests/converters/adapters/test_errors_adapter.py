"""A damaged adapter, or one for another model, gives one error that names the fault."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from mcore_qwen3vl.converters.adapters.adapter import read_adapter, swap, write_adapter
from mcore_qwen3vl.errors import BadInput
from tests.converters.adapters.conftest import Made
from tests.converters.adapters.peft_made import EXPERTS, Kind, make

WEIGHTS, CONFIG = "adapter_model.safetensors", "adapter_config.json"
PREFIX = "base_model.model.model.language_model.layers.0."
QUERY_A = f"{PREFIX}self_attn.q_proj.lora_A.weight"
EXPERTS_A = f"{PREFIX}mlp.experts.lora_A.weight"

Edit = Callable[[dict[str, Tensor]], Any]


def rename(tensors: dict[str, Tensor], old: str, new: str) -> None:
    for key in list(tensors):
        tensors[key.replace(old, new, 1)] = tensors.pop(key)


def set_nan(tensors: dict[str, Tensor]) -> None:
    tensors[EXPERTS_A][3, 1] = float("nan")


@pytest.mark.parametrize(
    ("edit", "message"),
    [
        (lambda t: t.pop(QUERY_A), "lacks .*q_proj.lora_A.weight of the 48 tensors"),
        (lambda t: t.update(x=torch.ones(2)), "holds x, which adapter_config.json does not call"),
        (lambda t: t.update({QUERY_A: t[QUERY_A][:2]}), r"q_proj.* has shape \[2, 48\]; rank 4"),
        (
            lambda t: t.update({EXPERTS_A: t[EXPERTS_A][:, :9].clone()}),
            r"down_proj have shapes \[60, 9\]",
        ),
        (set_nan, "experts.lora_A.weight holds a value that is not finite"),
        (lambda t: t.update({QUERY_A: t[QUERY_A].double()}), "has dtype F64"),
        (
            lambda t: rename(t, "base_model.model.", ""),
            r"calls none of its tensors as PEFT does .* holds model\.language_model",
        ),
        (
            lambda t: rename(t, "model.model", "model._orig_mod.model"),
            r"saved from within a wrapper .* '_orig_mod' into its name",
        ),
    ],
)
def test_tensors(edit: Edit, message: str, made: Callable[[str], Made], tmp_path: Path) -> None:
    source = made("rank patterns")
    folder = Path(shutil.copytree(source.folder, tmp_path / "bad"))
    tensors = load_file(folder / WEIGHTS)
    edit(tensors)
    save_file(tensors, folder / WEIGHTS)
    with pytest.raises(BadInput, match=message):
        read_adapter(folder, source.base)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"r": 0}, "r is 0"),
        ({"r": True}, "r is True"),
        ({"lora_alpha": "x"}, "lora_alpha is 'x'"),
        ({"rank_pattern": {"q_proj": 1.5}}, "rank_pattern is"),
        ({"target_modules": [1]}, r"target_modules is \[1\]"),
        ({"peft_type": "LOHA"}, "peft_type 'LOHA'"),
        ({"use_dora": True}, "DoRA"),
        ({"r": 5}, "rank 5"),
        ({"target_modules": ["nothing"], "target_parameters": None}, "not found in the base"),
    ],
)
def test_config(
    fields: dict[str, Any], message: str, made: Callable[[str], Made], tmp_path: Path
) -> None:
    source = made("rank patterns")
    folder = Path(shutil.copytree(source.folder, tmp_path / "bad"))
    config = json.loads((folder / CONFIG).read_text())
    (folder / CONFIG).write_text(json.dumps(config | fields))
    with pytest.raises(BadInput, match=message):
        read_adapter(folder, source.base)


def test_files(made: Callable[[str], Made], tmp_path: Path) -> None:
    source = made("rank patterns")
    folder = Path(shutil.copytree(source.folder, tmp_path / "bad"))
    sound = (folder / WEIGHTS).read_bytes()
    (folder / WEIGHTS).write_bytes(sound[:-5])
    with pytest.raises(BadInput, match="not a complete safetensors file"):
        read_adapter(folder, source.base)
    (folder / WEIGHTS).rename(folder / "adapter_model.bin")
    with pytest.raises(BadInput, match="a pickle, which is not read"):
        read_adapter(folder, source.base)
    (folder / "adapter_model.bin").unlink()
    with pytest.raises(BadInput, match=r"holds no adapter_model\.safetensors"):
        read_adapter(folder, source.base)
    (folder / CONFIG).write_text("{")
    with pytest.raises(BadInput, match="cannot be read as JSON"):
        read_adapter(folder, source.base)
    (folder / CONFIG).unlink()
    with pytest.raises(BadInput, match=r"does not exist\. A PEFT adapter is a directory"):
        read_adapter(folder, source.base)


def test_an_adapter_of_another_model(made: Callable[[str], Made]) -> None:
    with pytest.raises(BadInput, match="not found in the base model"):
        read_adapter(made("rslora").folder, made("rank patterns").base)
    with pytest.raises(BadInput, match=r"lacks .*, which|holds .* and \d+ more, which"):
        read_adapter(made("rank patterns").folder, made("vision").base)


def test_a_vocabulary_that_was_resized(made: Callable[[str], Made], tmp_path: Path) -> None:
    source = made("rank patterns")
    folder = Path(shutil.copytree(source.folder, tmp_path / "resized"))
    config = json.loads((folder / CONFIG).read_text())
    (folder / CONFIG).write_text(json.dumps(config | {"modules_to_save": ["embed_tokens"]}))
    name = "base_model.model.model.language_model.embed_tokens.weight"
    save_file(load_file(folder / WEIGHTS) | {name: torch.ones(360, 48)}, folder / WEIGHTS)
    with pytest.raises(BadInput, match=r"\[360, 48\], but \[352, 48\] .* vocabulary was resized"):
        read_adapter(folder, source.base)


def test_ambiguous_roles(tiny: Callable[[str], Path], tmp_path: Path) -> None:
    """Roles of one square expert parameter are not guessed; with both parameters they are clear."""
    base, folder = tiny("moe-H=I"), tmp_path / "down"
    make(Kind("", {"target_parameters": EXPERTS[1:]}), base, folder)
    with pytest.raises(BadInput, match="do not tell which roles"):
        read_adapter(folder, base)
    straight = read_adapter(folder, base, roles="canonical").factors
    swapped = read_adapter(folder, base, roles="swapped").factors
    for name, factors in straight.items():
        a, b = swap(factors.a, factors.b, 12)
        assert torch.equal(a, swapped[name].a)
        assert torch.equal(b, swapped[name].b)
        assert not torch.equal(factors.a, a)
    make(Kind("", {"target_parameters": EXPERTS}), base, tmp_path / "both")
    assert read_adapter(tmp_path / "both", base).roles == "canonical"
    with pytest.raises(BadInput, match="are not the swapped roles"):
        read_adapter(tmp_path / "both", base, roles="swapped")


def test_writing_refuses_what_the_config_does_not_call_for(
    made: Callable[[str], Made], tmp_path: Path
) -> None:
    source = made("tied")
    adapter = read_adapter(source.folder, source.base)
    name = next(iter(adapter.factors))
    fewer = {key: value for key, value in adapter.factors.items() if key != name}
    with pytest.raises(BadInput, match=f"factors given are not those .*{name}"):
        write_adapter(tmp_path / "out", adapter.config, fewer, adapter.saved, source.base)
    with pytest.raises(BadInput, match="whole tensors given are not those"):
        write_adapter(tmp_path / "out", adapter.config, adapter.factors, {}, source.base)
    assert list(tmp_path.iterdir()) == []
    (one, *_) = adapter.saved  # one of two tied embeddings is enough
    write_adapter(
        tmp_path / "out", adapter.config, adapter.factors, {one: adapter.saved[one]}, source.base
    )
    assert (tmp_path / "out" / WEIGHTS).read_bytes() == (source.folder / WEIGHTS).read_bytes()
    with pytest.raises(BadInput, match=r"exists\. Remove it"):
        write_adapter(tmp_path / "out", adapter.config, adapter.factors, adapter.saved, source.base)
