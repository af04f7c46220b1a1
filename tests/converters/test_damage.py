"""A checkpoint that cannot be converted exactly is refused, with the fault named."""

from __future__ import annotations

import json
import pickle
import re
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from mcore_qwen3vl.converters import torch_dist, torch_pickle
from mcore_qwen3vl.converters.convert import hf_to_mcore, mcore_to_hf
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
    "wrong shape": (
        "dense",
        lambda p: edit_tensors(
            p, lambda t: t.update({LAYER + "self_attn.k_proj.weight": torch.zeros(95, 48)})
        ),
        r"tensor \S+1.self_attn.k_proj.weight has shape \[95, 48\], .* makes it \[96, 48\]",
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
    "truncated shard": (
        "bf16-sharded",
        lambda p: cut(shard(p), 1000),
        r"model-00002-of-\d+.safetensors is not a complete safetensors file",
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


def check_refusal(
    convert: Callable[[Path, Path], object], source: Path, damage: Damage, message: str
) -> None:
    """Damage the checkpoint `source`, alone in its folder: one line names it, and no file comes."""
    damage(source)
    before = tree_digests(source.parent)
    with pytest.raises(BadInput) as error:
        convert(source, source.parent / "out")
    assert re.search(message, str(error.value), re.DOTALL), error.value
    assert "\n" not in str(error.value)
    assert tree_digests(source.parent) == before


@pytest.mark.parametrize("name", HF_DAMAGES)
def test_damaged_hf_checkpoint(tiny: Tiny, tmp_path: Path, name: str) -> None:
    case, damage, message = HF_DAMAGES[name]
    check_refusal(hf_to_mcore, copy(tiny(case), tmp_path / "source"), damage, message)


@pytest.mark.parametrize("case", ["moe", "moe-v5"])
def test_config_of_the_other_layout_is_a_contradiction(
    tiny: Tiny, tmp_path: Path, case: str
) -> None:
    source = copy(tiny(case), tmp_path / "source")
    other = tiny("moe-v5" if case == "moe" else "moe")
    (source / "config.json").write_bytes((other / "config.json").read_bytes())
    with pytest.raises(BadInput, match="the experts are in the other layout"):
        hf_to_mcore(source, tmp_path / "mcore")
    assert not (tmp_path / "mcore").exists()


def overwrite_archive(path: Path) -> None:
    file = path / "release" / "__0_0.distcp"
    data = bytearray(file.read_bytes())
    at = data.index(b"data.pkl") + len(b"data.pkl") + 4
    data[at : at + 20] = b"\xff" * 20
    file.write_bytes(data)


FC1 = "decoder.layers.mlp.linear_fc1.weight"


def flip_a_bit(path: Path) -> None:
    """As in a checkpoint from training, which has no manifest."""
    (path / "manifest.json").unlink()
    place = torch_dist.read_metadata(path / "release").tensors[FC1].chunks[1].data
    file = path / "release" / place.file
    data = bytearray(file.read_bytes())
    data[place.offset + place.length // 2] ^= 1
    file.write_bytes(data)


def exchange_chunks(path: Path) -> None:
    """Exchange the places of two chunks of one shape."""
    (path / "manifest.json").unlink()
    file, index = (
        path / "release" / torch_pickle.METADATA,
        torch_dist.read_metadata(path / "release"),
    )
    first, second, *others = index.tensors[FC1].chunks
    index.tensors[FC1].chunks = [
        replace(first, data=second.data),
        replace(second, data=first.data),
        *others,
    ]
    _, mark, checksum = file.read_bytes().rpartition(torch_pickle._MARK)
    file.write_bytes(torch_dist.dumps_metadata(index).rpartition(mark)[0] + mark + checksum)


MCORE_DAMAGES: dict[str, tuple[Damage, str]] = {
    "truncated metadata": (
        lambda p: cut(p / "release" / ".metadata", 3000),
        r"\.metadata is not readable checkpoint metadata",
    ),
    "metadata of something else": (
        lambda p: (p / "release" / ".metadata").write_bytes(pickle.dumps({"weights": 3})),
        r"it does not hold a Metadata object",
    ),
    "no metadata": (
        lambda p: (p / "release" / ".metadata").unlink(),
        r"\.metadata is missing\. Copy the checkpoint again",
    ),
    "missing data file": (
        lambda p: (p / "release" / "__0_0.distcp").unlink(),
        r"__0_0.distcp cannot be read",
    ),
    "truncated data file": (
        lambda p: cut(p / "release" / "__0_0.distcp", 700_000),
        r"__0_0.distcp has 700000 bytes, but .metadata places data up to",
    ),
    "a bit of the data": (
        flip_a_bit,
        r"data of decoder.layers.mlp.linear_fc1.weight at \[1, 0, 0\] is damaged .*its CRC-32 is",
    ),
    "chunks exchanged": (exchange_chunks, r"\.metadata is not .*other bytes than were saved"),
    "damaged archive": (overwrite_archive, r"__0_0.distcp: the data of visual\S+ .* is damaged"),
    "config with more layers": (
        lambda p: edit_config(p / "hf", text_config__num_hidden_layers=5),
        r"has shape \[4, .* makes it \[5, ",
    ),
    "untied checkpoint, tied config": (
        lambda p: edit_config(p / "hf", tie_word_embeddings=True),
        r"holds the tensor output_layer.weight",
    ),
    "other model": (
        lambda p: edit_config(p / "hf", vision_config__depth=6),
        r"lacks the tensor visual.blocks.5.norm1.weight",
    ),
    "no config": (
        lambda p: (p / "hf" / "config.json").unlink(),
        r"has no hf/config.json.*--hf-config",
    ),
    "tracker with more digits than Python reads": (
        lambda p: (p / "latest_checkpointed_iteration.txt").write_text("1" * 5000),
        r"says '1{40}'; a number",
    ),
    "other backend": (
        lambda p: (p / "release" / "metadata.json").write_text('{"sharded_backend": "zarr"}'),
        r"format is 'zarr', version 1; only torch_dist, version 1, can be read",
    ),
    "no backend": (
        lambda p: (p / "release" / "metadata.json").unlink(),
        r"is not a Megatron-Core torch_dist checkpoint",
    ),
    "no tracker": (
        lambda p: (p / "latest_checkpointed_iteration.txt").unlink(),
        r"holds no weights itself\. Name a checkpoint in it, such as .*release",
    ),
}


@pytest.mark.parametrize("name", MCORE_DAMAGES)
def test_damaged_mcore_checkpoint(
    mcore_dense: Path, tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    check_refusal(mcore_to_hf, copy(mcore_dense, tmp_path / "source"), *MCORE_DAMAGES[name])


@pytest.mark.parametrize(
    ("convert", "options", "message"),
    [
        (hf_to_mcore, {"dtype": "int8"}, "dtype 'int8' is not one of"),
        (hf_to_mcore, {"make_vocab_size_divisible_by": 0}, "must be at least 1"),
        (hf_to_mcore, {"tp": -1}, "must be at least 1"),
        (mcore_to_hf, {"dtype": "bfloat"}, "dtype 'bfloat' is not one of"),
        (mcore_to_hf, {"max_shard_size": "5 apples"}, "'5 apples' is not a size"),
        (mcore_to_hf, {"max_shard_size": "0GB"}, "'0GB' is not a size"),
        (mcore_to_hf, {"expert_layout": "v6"}, "expert layout 'v6'"),
        (mcore_to_hf, {"hf_config": "/nowhere"}, "/nowhere is not a directory"),
    ],
)
def test_bad_options(
    convert: Callable[..., object],
    options: dict[str, Any],
    message: str,
    tiny: Tiny,
    mcore_dense: Path,
    tmp_path: Path,
) -> None:
    source = tiny("dense") if convert is hf_to_mcore else mcore_dense
    with pytest.raises(BadInput, match=message):
        convert(source, tmp_path / "out", **options)
    assert list(tmp_path.iterdir()) == []
