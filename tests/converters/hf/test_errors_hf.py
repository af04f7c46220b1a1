"""An HF checkpoint that cannot be converted exactly is refused, with the fault named."""

from __future__ import annotations

import json
import pickle
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from mcore_qwen3vl.converters.convert import hf_to_mcore
from mcore_qwen3vl.errors import BadInput
from tests.converters.checkpoints import copy, cut, edit_config, load, save, tree_digests

Tiny = Callable[[str], Path]
Damage = Callable[[Path], object]
LAYER = "model.language_model.layers.1."


def edit_index(path: Path, edit: Callable[[dict[str, str]], object]) -> None:
    file = path / "model.safetensors.index.json"
    index = json.loads(file.read_text())
    edit(index["weight_map"])
    file.write_text(json.dumps(index))


def edit_tensors(path: Path, edit: Callable[[dict[str, torch.Tensor]], object]) -> None:
    tensors = load(path)
    edit(tensors)
    save(tensors, path)


def header_length(length: int) -> Damage:
    def damage(path: Path) -> None:
        file = path / "model.safetensors"
        file.write_bytes(length.to_bytes(8, "little") + file.read_bytes()[8:])

    return damage


def shard(path: Path) -> Path:
    return sorted(path.glob("model-*.safetensors"))[1]


def forget_shard_of_head(path: Path) -> None:
    """Give the head a shard of its own, as large models do, and leave that out of the index."""
    rest, head = "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"
    tensors = load(path)
    (path / "model.safetensors").unlink()
    save_file({"lm_head.weight": tensors.pop("lm_head.weight")}, path / head)
    save_file(tensors, path / rest)
    index = {"metadata": {}, "weight_map": dict.fromkeys(tensors, rest)}
    (path / "model.safetensors.index.json").write_text(json.dumps(index))


def renamed_tensor(tensors: dict[str, torch.Tensor]) -> None:
    name = LAYER + "mlp.up_proj.weight"
    tensors[name.replace("up_proj", "up_projection")] = tensors.pop(name)


def wrapped_tensors(prefix: str) -> Callable[[dict[str, torch.Tensor]], None]:
    def rename(tensors: dict[str, torch.Tensor]) -> None:
        for name in list(tensors):
            tensors[prefix + name] = tensors.pop(name)

    return rename


def move_to_export(path: Path) -> None:
    (path / "iter_0000003").mkdir()
    shutil.move(path / "model.safetensors", path / "iter_0000003")


HF_DAMAGES: dict[str, tuple[str, Damage, str]] = {
    "extra tensor": (
        "dense",
        lambda p: edit_tensors(p, lambda t: t.update({LAYER + "mlp.extra": torch.zeros(3, 5)})),
        r"holds the tensor model.language_model.layers.1.mlp.extra \[3, 5\]",
    ),
    "head in a tied model": (
        "dense-tied",
        lambda p: edit_tensors(p, lambda t: t.update({"lm_head.weight": torch.zeros(352, 48)})),
        r"tie_word_embeddings.*stored lm_head.weight differs from \S+embed_tokens.weight",
    ),
    "missing tensor": (
        "moe",
        lambda p: edit_tensors(p, lambda t: t.pop(LAYER + "mlp.experts.down_proj")),
        r"lacks the tensor \S+layers.1.mlp.experts.down_proj \[12, 36, 48\]",
    ),
    "compiled": (
        "dense",
        lambda p: edit_tensors(p, wrapped_tensors("_orig_mod.")),
        r"saved from within a wrapper \(torch.compile, DDP or FSDP\) that put '_orig_mod' into",
    ),
    "distributed": (
        "dense",
        lambda p: edit_tensors(p, wrapped_tensors("module.")),
        r"saved from within a wrapper .* that put 'module' into its name",
    ),
    "exports of a run": (
        "dense",
        move_to_export,
        r"holds no weights itself\. Name a checkpoint in it, such as .*iter_0000003",
    ),
    "adapter": (
        "dense",
        lambda p: (p / "model.safetensors").rename(p / "adapter_config.json"),
        r"holds a LoRA adapter, and not the model that it changes\. .*lora merge BASE",
    ),
    "renamed tensor": (
        "dense",
        lambda p: edit_tensors(p, renamed_tensor),
        r"lacks the tensor \S+layers.1.mlp.up_proj.weight",
    ),
    "wrong shape": (
        "dense",
        lambda p: edit_tensors(
            p, lambda t: t.update({LAYER + "self_attn.k_proj.weight": torch.zeros(95, 48)})
        ),
        r"tensor \S+1.self_attn.k_proj.weight has shape \[95, 48\], .* makes it \[96, 48\]",
    ),
    "fewer layers in the config": (
        "dense",
        lambda p: edit_config(p, text_config__num_hidden_layers=3),
        r"holds the tensor \S+layers.3.\S+ .* no part of the model",
    ),
    "integer tensor": (
        "dense",
        lambda p: edit_tensors(
            p, lambda t: t.update({LAYER + "mlp.up_proj.weight": torch.zeros(104, 48).int()})
        ),
        r"tensor \S+up_proj.weight in model.safetensors has dtype I32",
    ),
    "two dtypes in one mcore tensor": (
        "dense",
        lambda p: edit_tensors(
            p,
            lambda t: t.update({LAYER + "mlp.up_proj.weight": torch.zeros(104, 48).bfloat16()}),
        ),
        r"gate_proj.weight \(float32\) and \S+up_proj.weight \(bfloat16\) both belong to",
    ),
    "truncated file": (
        "dense",
        lambda p: cut(p / "model.safetensors", 500_000),
        r"model.safetensors is not a complete safetensors file",
    ),
    "empty file": (
        "dense",
        lambda p: cut(p / "model.safetensors", 0),
        r"model.safetensors is not a complete safetensors file",
    ),
    "truncated shard": (
        "bf16-sharded",
        lambda p: cut(shard(p), 1000),
        r"model-00002-of-\d+.safetensors is not a complete safetensors file",
    ),
    "not safetensors": (
        "dense",
        lambda p: (p / "model.safetensors").write_bytes(pickle.dumps({"weights": 1})),
        r"model.safetensors is not a complete safetensors file",
    ),
    "huge header": (
        "dense",
        header_length(2**62),
        r"model.safetensors is not a complete safetensors file",
    ),
    "no weights": (
        "dense",
        lambda p: (p / "model.safetensors").unlink(),
        r"holds no safetensors weights",
    ),
    "shards without index": (
        "bf16-sharded",
        lambda p: (p / "model.safetensors.index.json").unlink(),
        r"holds model-00001-of-\d+.safetensors.* but neither",
    ),
    "index names an absent file": (
        "bf16-sharded",
        lambda p: shard(p).unlink(),
        r"in model-00002-of-\d+.safetensors, which does not exist",
    ),
    "index reaches outside": (
        "bf16-sharded",
        lambda p: edit_index(p, lambda m: m.update({"lm_head.weight": "../x.safetensors"})),
        r"puts tensor lm_head.weight in '../x.safetensors'.*Refused",
    ),
    "index reaches an absolute path": (
        "bf16-sharded",
        lambda p: edit_index(p, lambda m: m.update({"lm_head.weight": "/etc/passwd"})),
        r"puts tensor lm_head.weight in '/etc/passwd'.*Refused",
    ),
    "index puts a tensor in the wrong file": (
        "bf16-sharded",
        lambda p: edit_index(p, lambda m: m.update({"lm_head.weight": shard(p).name})),
        r"says that tensor lm_head.weight is in model-00002\S+, but it is in",
    ),
    "index names a tensor nobody holds": (
        "bf16-sharded",
        lambda p: edit_index(p, lambda m: m.update({"ghost": shard(p).name})),
        r"says that tensor ghost is in model-00002\S+, but no file holds it",
    ),
    "index forgets a tensor": (
        "bf16-sharded",
        lambda p: edit_index(p, lambda m: m.pop("lm_head.weight")),
        r"index.json does not name lm_head.weight, but it is in model-\S+",
    ),
    "index forgets the shard of the head": (
        "moe",
        forget_shard_of_head,
        r"names 1 of the shards model-\*-of-00002\.safetensors",
    ),
    "index is not JSON": (
        "bf16-sharded",
        lambda p: (p / "model.safetensors.index.json").write_text("{"),
        r"model.safetensors.index.json cannot be read as an index",
    ),
    "single file and index": (
        "bf16-sharded",
        lambda p: shard(p).rename(p / "model.safetensors"),
        r"holds both model.safetensors and model.safetensors.index.json",
    ),
    "another model's config": (
        "dense",
        lambda p: edit_config(p, model_type="qwen2_vl"),
        r"model_type 'qwen2_vl'",
    ),
    "no config": (
        "dense",
        lambda p: (p / "config.json").unlink(),
        r"config.json does not exist",
    ),
    "config contradicts itself": (
        "moe-H=2I",
        lambda p: edit_config(p, transformers_version="5.17.0"),
        r"contradicts itself about the layout of the fused experts",
    ),
}


@pytest.mark.parametrize("name", HF_DAMAGES)
def test_damaged_hf_checkpoint(tiny: Tiny, tmp_path: Path, name: str) -> None:
    case, damage, message = HF_DAMAGES[name]
    source = copy(tiny(case), tmp_path / "source")
    damage(source)
    before = tree_digests(tmp_path)
    with pytest.raises(BadInput) as error:
        hf_to_mcore(source, tmp_path / "mcore")
    assert re.search(message, str(error.value), re.DOTALL), error.value
    assert "\n" not in str(error.value)
    assert tree_digests(tmp_path) == before


@pytest.mark.parametrize("case", ["moe", "moe-v5"])
def test_config_of_the_other_layout_is_a_contradiction(
    tiny: Tiny, tmp_path: Path, case: str
) -> None:
    """Weights of one layout with the config of the other are refused: shapes show it."""
    source = copy(tiny(case), tmp_path / "source")
    other = tiny("moe-v5" if case == "moe" else "moe")
    (source / "config.json").write_bytes((other / "config.json").read_bytes())
    with pytest.raises(BadInput, match="the experts are in the other layout"):
        hf_to_mcore(source, tmp_path / "mcore")
    assert not (tmp_path / "mcore").exists()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"dtype": "int8"}, "dtype 'int8' is not one of"),
        ({"make_vocab_size_divisible_by": 0}, "must be at least 1"),
        ({"tp": -1}, "must be at least 1"),
    ],
)
def test_bad_import_options(
    tiny: Tiny, tmp_path: Path, options: dict[str, Any], message: str
) -> None:
    with pytest.raises(BadInput, match=message):
        hf_to_mcore(tiny("dense"), tmp_path / "mcore", **options)
    assert list(tmp_path.iterdir()) == []
