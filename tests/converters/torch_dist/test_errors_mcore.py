"""An mcore checkpoint that cannot be exported exactly is refused, with the fault named."""

from __future__ import annotations

import pickle
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from mcore_qwen3vl.converters import torch_dist
from mcore_qwen3vl.converters.convert import mcore_to_hf
from mcore_qwen3vl.errors import BadInput
from tests.converters.checkpoints import copy, cut, edit_config, tree_digests

Tiny = Callable[[str], Path]
Damage = Callable[[Path], object]


def metadata_with(path: Path, content: bytes) -> None:
    (path / "release" / ".metadata").write_bytes(content)


class Bomb:
    """An object whose pickle would run code."""

    def __reduce__(self) -> Any:
        return Path.touch, (Path("pickle-was-run"),)


def drop_file(path: Path) -> None:
    (path / "release" / "__0_0.distcp").unlink()


def other_dense_config(path: Path) -> None:
    edit_config(path / "hf", text_config__num_hidden_layers=5)


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
    file, index = path / "release" / torch_dist.METADATA, torch_dist.read_metadata(path / "release")
    first, second, *others = index.tensors[FC1].chunks
    index.tensors[FC1].chunks = [
        replace(first, data=second.data),
        replace(second, data=first.data),
        *others,
    ]
    _, mark, checksum = file.read_bytes().rpartition(torch_dist._MARK)
    file.write_bytes(torch_dist.dumps_metadata(index).rpartition(mark)[0] + mark + checksum)


MCORE_DAMAGES: dict[str, tuple[Damage, str]] = {
    "hostile metadata": (
        lambda p: metadata_with(p, pickle.dumps(Bomb())),
        r"\.metadata asks for pathlib\S*, which has no place in a checkpoint",
    ),
    "truncated metadata": (
        lambda p: cut(p / "release" / ".metadata", 3000),
        r"\.metadata is not readable checkpoint metadata",
    ),
    "metadata of something else": (
        lambda p: metadata_with(p, pickle.dumps({"weights": 3})),
        r"it does not hold a Metadata object",
    ),
    "no metadata": (
        lambda p: (p / "release" / ".metadata").unlink(),
        r"\.metadata is missing\. Copy the checkpoint again",
    ),
    "missing data file": (drop_file, r"__0_0.distcp cannot be read"),
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
    "config with more layers": (other_dense_config, r"has shape \[4, .* makes it \[5, "),
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
    "tracker of another iteration": (
        lambda p: (p / "latest_checkpointed_iteration.txt").write_text("12"),
        r"names iter_0000012, but",
    ),
    "unreadable tracker": (
        lambda p: (p / "latest_checkpointed_iteration.txt").write_text("../../x"),
        r"says '../../x'",
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
    damage, message = MCORE_DAMAGES[name]
    monkeypatch.chdir(tmp_path)
    source = copy(mcore_dense, tmp_path / "source")
    damage(source)
    before = tree_digests(tmp_path)
    with pytest.raises(BadInput) as error:
        mcore_to_hf(source, tmp_path / "back")
    assert re.search(message, str(error.value), re.DOTALL), error.value
    assert "\n" not in str(error.value)
    assert tree_digests(tmp_path) == before


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"dtype": "bfloat"}, "dtype 'bfloat' is not one of"),
        ({"max_shard_size": "5 apples"}, "'5 apples' is not a size"),
        ({"max_shard_size": "0GB"}, "'0GB' is not a size"),
        ({"expert_layout": "v6"}, "expert layout 'v6'"),
        ({"hf_config": "/nowhere"}, "/nowhere is not a directory"),
    ],
)
def test_bad_export_options(
    mcore_dense: Path, tmp_path: Path, options: dict[str, Any], message: str
) -> None:
    with pytest.raises(BadInput, match=message):
        mcore_to_hf(mcore_dense, tmp_path / "back", **options)
    assert list(tmp_path.iterdir()) == []
