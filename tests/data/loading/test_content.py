"""What a data set holds is told from its bytes, not from names and times."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from mcore_qwen3vl.data import content
from mcore_qwen3vl.data.content import content_of
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
