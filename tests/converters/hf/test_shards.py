"""Which tensors share a file, how large one may be, and how a file is filled."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from mcore_qwen3vl.converters.hf.shards import (
    TensorSpec,
    parse_size,
    plan_shards,
)
from mcore_qwen3vl.converters.storage.archive import as_bytes
from mcore_qwen3vl.converters.storage.disk import DirectFile
from mcore_qwen3vl.errors import BadInput


def test_a_tensor_larger_than_a_file_has_one_of_its_own() -> None:
    sizes = {"a": 4, "b": 40, "c": 4, "d": 9}
    tensors = {name: TensorSpec(torch.float32, (n,)) for name, n in sizes.items()}
    assert [set(s.tensors) for s in plan_shards(tensors, 40)] == [{"b"}, {"a", "c"}, {"d"}]


@pytest.mark.parametrize(
    ("text", "size"),
    [("5GB", 5 * 10**9), ("2GiB", 2 * 2**30), ("1.5 MB", 1_500_000), (" 700 ", 700), ("1KB", 1000)],
)
def test_sizes(text: str, size: int) -> None:
    assert parse_size(text) == size


@pytest.mark.parametrize("text", ["", "5G", "GB", "-1GB", "0GB", "5gb", "1PB", "nan"])
def test_what_is_no_size(text: str) -> None:
    with pytest.raises(BadInput, match="is not a size; write it like 5GB"):
        parse_size(text)


def test_a_shard_is_filled_from_anywhere(tmp_path: Path) -> None:
    """Parts may come in any order, by several writers, chunk by chunk."""
    tensors = {"a": torch.randn(3, 5), "b": torch.randn(4099).bfloat16(), "c": torch.randn(2)}
    specs = {name: TensorSpec(t.dtype, tuple(t.shape)) for name, t in tensors.items()}
    (shard,) = plan_shards(specs, 10**9)
    shard.create(tmp_path)
    for places in (
        {shard.offset("c"): [tensors["c"]], shard.offset("b") + 2 * 2000: [tensors["b"][2000:]]},
        {shard.offset("a"): tensors["a"], shard.offset("b"): tensors["b"][:2000].split(7)},
    ):
        with DirectFile(tmp_path / shard.file, create=False) as out:
            for offset, chunks in places.items():
                out.seek(offset)
                for chunk in chunks:
                    out.write(as_bytes(chunk))
            out.sync()
    found = load_file(tmp_path / shard.file)
    assert all(torch.equal(found[name], tensor) for name, tensor in tensors.items())
