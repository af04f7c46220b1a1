"""What a data set holds is told from its bytes, not from names and times."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from mcore_qwen3vl.data import content
from mcore_qwen3vl.data.content import content_of, digest_of_beginning
from tests.data.conftest import WriteJsonl, question


@pytest.mark.parametrize("blocks", [content.BLOCKS, 4], ids=["whole", "blocks"])
def test_other_records_and_another_order_are_seen_and_names_are_not(
    blocks: int, write_jsonl: WriteJsonl, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(content, "BLOCKS", blocks)
    monkeypatch.setattr(content, "BLOCK", 64)
    path = write_jsonl([question(n, image=False) for n in range(10, 40)])
    lines = path.read_text().splitlines(keepends=True)
    held = content_of(path)
    assert held.sizes == (path.stat().st_size,)
    renamed = path.rename(tmp_path / "renamed.jsonl")
    os.utime(renamed, (1, 1))
    assert content_of(renamed) == held
    for others in (lines[::-1], [*lines[:-1], lines[-1].replace("1", "2").replace("3", "4")]):
        renamed.write_text("".join(others))
        other = content_of(renamed)
        assert other.sizes == held.sizes
        assert other.digest != held.digest
    renamed.write_text("".join(lines[:-1]))
    assert content_of(renamed).sizes != held.sizes


def test_what_was_appended_is_known_from_what_replaced(
    write_jsonl: WriteJsonl, tmp_path: Path
) -> None:
    path = write_jsonl([question(n, image=False) for n in range(10, 20)])
    held, text = content_of(path), path.read_text()
    assert digest_of_beginning(path, held.sizes) is None
    for more, grown in (("{}\n", True), ("{}", True), ("", False)):
        path.write_text(text + more)
        assert (digest_of_beginning(path, held.sizes) == held.digest) is grown
    path.write_text("x" + text[1:] + "{}\n")
    assert digest_of_beginning(path, held.sizes) not in (None, held.digest)
    # The last line had no end, and another record was put behind it.
    path.write_text(text[:-1])
    held = content_of(path)
    path.write_text(f"{text[:-1]}\n{{}}\n")
    assert digest_of_beginning(path, held.sizes) == held.digest
    path.write_text(f"{text[:-1]}{{}}\n")
    assert digest_of_beginning(path, held.sizes) is None


def test_an_array_that_has_grown_is_another_one_and_lines_are_not(tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    for text, more, grown in (("[1\n]", "\n", False), ('{"a": 1}\n', "{}\n", True)):
        path.write_text(text)
        held = content_of(path)
        path.write_text(text + more)
        assert (digest_of_beginning(path, held.sizes) == held.digest) is grown


def test_shards_that_come_after_the_others_are_appended(tmp_path: Path) -> None:
    (tmp_path / "a.parquet").write_bytes(b"123")
    (tmp_path / "b.parquet").write_bytes(b"4567")
    held = content_of(tmp_path)
    (tmp_path / "c.parquet").write_bytes(b"8")
    assert digest_of_beginning(tmp_path, held.sizes) == held.digest
    (tmp_path / "c.parquet").rename(tmp_path / "aa.parquet")
    assert digest_of_beginning(tmp_path, held.sizes) is None
    (tmp_path / "aa.parquet").unlink()
    (tmp_path / "b.parquet").write_bytes(b"45678")  # its footer is at its end
    assert digest_of_beginning(tmp_path, held.sizes) is None


def test_a_metadataset_counts_by_what_it_blends_and_not_by_paths(
    write_jsonl: WriteJsonl, tmp_path: Path
) -> None:
    path = write_jsonl([question(n, image=False) for n in range(10, 20)])

    def metadataset(place: Path, name: str, weight: float) -> Path:
        lines = ["__module__: megatron.energon", "__class__: MetadatasetV2", "splits:", "  train:"]
        lines += ["    blend:", f"      - path: {place}", f"        weight: {weight}"]
        (tmp_path / name).write_text("\n".join(lines) + "\n")
        return tmp_path / name

    held = content_of(metadataset(path, "a.yaml", 1))
    moved = tmp_path / "another folder" / "other.jsonl"
    moved.parent.mkdir()
    moved.write_text(path.read_text())
    assert content_of(metadataset(moved, "b.yaml", 1)) == held
    assert content_of(metadataset(moved, "b.yaml", 2)) != held
