"""How records are read counts by the content of files, and not by where they lie."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from mcore_qwen3vl.training.contract.record import compare
from tests.training.contract.conftest import record


def edit_json(file: Path, **values: Any) -> None:
    file.write_text(json.dumps({**json.loads(file.read_text()), **values}))


def other_template(model: Path) -> None:
    file = model / "chat_template.jinja"
    file.write_text(file.read_text() + "!")


def other_pixels(section: str) -> Callable[[Path], None]:
    def change(model: Path) -> None:
        file = model / "processor_config.json"
        held = json.loads(file.read_text())[section]
        edit_json(file, **{section: {**held, "size": {"shortest_edge": 256, "longest_edge": 2048}}})

    return change


def other_tokenizer(model: Path) -> None:
    added = {"id": 0, "content": "!", "special": False, "single_word": True}
    more = {"lstrip": False, "rstrip": False, "normalized": False}
    content = json.loads((model / "tokenizer.json").read_text())
    edit_json(model / "tokenizer.json", added_tokens=[added | more, *content["added_tokens"]])


@pytest.mark.parametrize("packing", ["", "--packing"])
@pytest.mark.parametrize(
    ("change", "words"),
    [
        (other_template, "a chat template of other content"),
        (other_tokenizer, "a tokenizer of other content"),
        (other_pixels("image_processor"), "other settings of the image processor"),
        (other_pixels("video_processor"), "other settings of the video processor"),
    ],
)
def test_files_of_the_model_that_decide_how_records_are_read_count_by_their_content(
    change: Callable[[Path], None], words: str, packing: str, dense: Path, folder: Path,
    tmp_path: Path,
) -> None:  # fmt: skip
    model = tmp_path / "model"
    shutil.copytree(dense, model)
    before = record(dense, folder, packing)
    assert compare(before, record(model, folder, packing)) == []
    record.cache_clear()
    change(model)
    (found,) = compare(before, record(model, folder, packing))
    assert (found.row, found.refused) == ("reading of records", bool(packing))
    assert words in found.text


def test_a_tokenizer_that_was_saved_again_and_a_template_elsewhere_are_the_same(
    dense: Path, folder: Path, tmp_path: Path
) -> None:
    model = tmp_path / "model"
    shutil.copytree(dense, model)
    before = record(dense, folder, "--packing")
    file = model / "tokenizer.json"
    file.write_text(json.dumps(json.loads(file.read_text()), indent=4, sort_keys=True))
    template = (model / "chat_template.jinja").read_text()
    (model / "chat_template.json").write_text(json.dumps({"chat_template": template}))
    (model / "chat_template.jinja").unlink()
    assert compare(before, record(model, folder, "--packing")) == []


def test_a_hook_counts_by_the_content_of_its_file(
    dense: Path, folder: Path, tmp_path: Path
) -> None:
    (tmp_path / "hook.py").write_text("def keep(record):\n    return record\n")
    flags = f"--preprocess {tmp_path / 'hook.py'}:keep"
    before = record(dense, folder, flags)
    record.cache_clear()
    assert compare(before, record(dense, folder, flags)) == []
    record.cache_clear()
    (tmp_path / "hook.py").write_text("def keep(record):\n    return {**record}\n")
    (found,) = compare(before, record(dense, folder, flags))
    assert "--preprocess function whose file has other content" in found.text
