"""Damaged headers, indexes and metadata give a clean refusal or the right result."""

from __future__ import annotations

import shutil
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from mcore_qwen3vl.converters import torch_dist
from mcore_qwen3vl.converters.convert import hf_to_mcore, mcore_to_hf
from mcore_qwen3vl.layout import Layout
from mcore_qwen3vl.tiny import write_tiny_checkpoint
from tests.converters.checkpoints import load, tree_digests
from tests.converters.fuzz import (
    Damage,
    bytes_outside,
    spoil_bytes,
    spoil_header,
    spoil_json,
    trial,
)

TEXT: dict[str, Any] = {"num_hidden_layers": 2, "num_experts": 2, "num_experts_per_tok": 1}
VISION: dict[str, Any] = {"depth": 1, "deepstack_visual_indexes": [0]}
SEED = "2"
COUNTS = {
    "header": 60,
    "index": 50,
    "config": 40,
    "metadata": 60,
    "archive": 40,
    "legacy": 25,
    "small": 13,
}
"""Cases in a default run; the slow run makes 160 times as many, with another seed."""

Digests = dict[str, str]


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Return a tiny sharded HF checkpoint and the mcore checkpoint made from it."""
    folder = tmp_path_factory.mktemp("fuzz")
    hf = write_tiny_checkpoint(
        folder / "hf", moe=True, dtype="bfloat16", max_shard_size="90KB", text=TEXT, vision=VISION
    )
    for file in hf.glob("*token*"):
        file.unlink()
    hf_to_mcore(hf, folder / "mcore")
    (folder / "mcore" / "release" / "common.pt").write_bytes(b"not read")
    return hf, folder / "mcore"


def weights(digests: Digests) -> Digests:
    """Keep the stored tensors: the config is copied as it is, and the manifest quotes it."""
    return {name: value for name, value in digests.items() if name.startswith("release/")}


def same_tensors(expected: Path, found: Path, *, left_out: bool = False) -> bool:
    """Compare bit for bit; with `left_out`, the last rows of the vocabulary may be missing."""
    left, right = load(expected), load(found)
    if left_out:
        for name in ("lm_head.weight", "model.language_model.embed_tokens.weight"):
            left[name] = left[name][: len(right[name])]
    return left.keys() == right.keys() and all(
        tensor.dtype == right[name].dtype and torch.equal(tensor, right[name])
        for name, tensor in left.items()
    )


def import_attempt(source: Path, scratch: Path) -> Callable[[], str | None]:
    """Return a trial that imports: the result is the sound one, or exports as the files now say."""
    mcore, back = scratch / "mcore", scratch / "back"
    hf_to_mcore(source, mcore, workers=1)
    expected = weights(tree_digests(mcore))

    def attempt() -> str | None:
        clear(scratch)
        hf_to_mcore(source, mcore, workers=1)
        if (mcore / "hf/config.json").read_bytes() != (source / "config.json").read_bytes():
            return "another config"
        if weights(tree_digests(mcore)) == expected:
            return None
        mcore_to_hf(mcore, back, workers=1)
        return None if same_tensors(source, back) else "another result"

    return attempt


def export_attempt(source: Path, scratch: Path) -> Callable[[], str | None]:
    """Return a trial that exports: the tensors must be the sound ones."""
    back, sound = scratch / "back", scratch.parent / "sound"
    mcore_to_hf(source, sound, workers=1)

    def attempt() -> str | None:
        clear(scratch)
        notes = mcore_to_hf(source, back, workers=1).notes
        same = same_tensors(sound, back, left_out="left out" in " ".join(notes))
        return None if same else "another result"

    return attempt


def clear(scratch: Path) -> None:
    for folder in scratch.iterdir():
        shutil.rmtree(folder)


def data_ranges(folder: Path) -> dict[str, list[tuple[int, int]]]:
    """Find where the tensors' own bytes lie, by file, with the standard library's zip reader."""
    ranges: dict[str, list[tuple[int, int]]] = {}
    for tensor in torch_dist.read_metadata(folder).tensors.values():
        for chunk in tensor.chunks:
            stored = chunk.data
            with (folder / stored.file).open("rb") as file:
                file.seek(stored.offset)
                data = file.read(stored.length)
            (scratch := folder.parent / "one.zip").write_bytes(data)
            with zipfile.ZipFile(scratch) as archive:
                entry = next(i for i in archive.infolist() if "/data/" in i.filename)
                content = archive.read(entry)
            start = stored.offset + data.index(content)
            ranges.setdefault(stored.file, []).append((start, start + len(content)))
    return ranges


def legacy_damage(file: Path) -> Damage:
    """Return damage outside the tensors' own bytes: no checksum of it is read."""
    whole = file.read_bytes()
    ranges = []
    with zipfile.ZipFile(file) as archive:
        for entry in archive.infolist():
            if "/data/" in entry.filename:
                start = whole.index(archive.read(entry), entry.header_offset)
                ranges.append((start, start + entry.file_size))
    return Damage(file, bytes_outside(ranges))


def damages(part: str, source: Path) -> list[Damage]:
    release = source / "release"
    if part == "legacy":
        return [legacy_damage(file) for file in sorted(release.rglob("*.pt"))]
    if part == "header":
        return [Damage(file, spoil_header) for file in sorted(source.glob("*.safetensors"))]
    if part == "index":
        return [Damage(source / "model.safetensors.index.json", spoil_json)]
    if part == "metadata":
        return [Damage(release / ".metadata", spoil_bytes)]
    if part == "archive":
        found = data_ranges(release)
        return [Damage(release / file, bytes_outside(found[file])) for file in sorted(found)]
    small = [Damage(release / "metadata.json", spoil_json)]
    small += [Damage(file, spoil_bytes) for file in (release / "common.pt", source / TRACKER)]
    return small


TRACKER = "latest_checkpointed_iteration.txt"


def fuzz(
    part: str, checkpoints: tuple[Path, Path], tmp_path: Path, *, times: int = 1, seed: str = SEED
) -> None:
    hf, mcore = checkpoints
    importing = part in ("header", "index", "config of hf")
    source = tmp_path / "source"
    if part == "legacy":
        hf_to_mcore(hf, source, format="torch", layout=Layout(tp=2, pp=2, ep=2))
    else:
        shutil.copytree(hf if importing else mcore, source)
    scratch = tmp_path / "scratch"
    scratch.mkdir()
    attempt = (import_attempt if importing else export_attempt)(source, scratch)
    config = source / ("config.json" if importing else "hf/config.json")
    spoiled = [Damage(config, spoil_json)] if "config" in part else damages(part, source)
    count = COUNTS[part.split()[0]] * times
    trial(spoiled, attempt, count, f"{seed} {part}", tmp_path)


PARTS = [
    "header",
    "index",
    "config of hf",
    "config of mcore",
    "metadata",
    "archive",
    "legacy",
    "small",
]


@pytest.mark.parametrize("part", PARTS)
def test_fuzz(part: str, checkpoints: tuple[Path, Path], tmp_path: Path) -> None:
    fuzz(part, checkpoints, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("part", PARTS)
def test_fuzz_at_length(part: str, checkpoints: tuple[Path, Path], tmp_path: Path) -> None:
    fuzz(part, checkpoints, tmp_path, times=160, seed="long")
