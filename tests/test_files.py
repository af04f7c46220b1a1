"""Commands leave nothing half-written on a full disk."""

from __future__ import annotations

import json
import os
import resource
import shutil
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from safetensors import SafetensorError, safe_open

from mcore_qwen3vl.converters.hf.hf_checkpoint import HuggingFaceCheckpoint
from mcore_qwen3vl.converters.storage.staging import staging
from mcore_qwen3vl.data.indexes import ensure_index
from mcore_qwen3vl.data.readers import json_arrays
from mcore_qwen3vl.errors import BadInput
from mcore_qwen3vl.files import LONGEST_NAME, atomic_write, hidden_beside
from mcore_qwen3vl.published_configs import PUBLISHED
from mcore_qwen3vl.rehearsal.command import Command
from mcore_qwen3vl.rehearsal.rehearse import Rehearsal, RehearsedGpu
from mcore_qwen3vl.rehearsal.report import write_page
from mcore_qwen3vl.runtime.gpus import find_gpu
from mcore_qwen3vl.scoring.records import Output
from mcore_qwen3vl.tiny.records import write_image_qa
from mcore_qwen3vl.writer_lock import only_writer
from tests.command import exit_code


@contextmanager
def full_disk(room: int) -> Iterator[None]:
    """Keep files from growing beyond `room` bytes; the error differs from a full disk's."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(sys, "dont_write_bytecode", True)  # or truncated bytecode would be kept
        resource.setrlimit(resource.RLIMIT_FSIZE, (room, hard))
        try:
            yield
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


COMMANDS = {
    "tiny": ("tiny", "{out}"),
    "scripts": ("launch", "copy", "{out}"),
    "page": ("data", "show", "{data}", "1", "--hf-model", "{hf}", "--out", "{out}"),
    "plot": ("data", "check", "{data}", "--hf-model", "{hf}", "--plot", "{out}"),
    "report": ("verify", "tensors", "{hf}", "{hf}", "--report", "{out}"),
}


@pytest.mark.parametrize("name", COMMANDS)
def test_nothing_half_written(
    name: str, dense: Path, data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    places = {"hf": dense, "data": data, "out": tmp_path / "new" / "out"}
    places["out"].parent.mkdir()
    ensure_index(places["data"])
    with full_disk(1000):
        assert exit_code(*(word.format(**places) for word in COMMANDS[name])) == 2
    said = capsys.readouterr().err
    assert f"{places['out']}" in said
    assert "cannot be written: " in said
    assert "File too large" in said
    assert [file for file in places["out"].parent.rglob("*") if not file.is_dir()] == []


def test_clean_records(dense: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """They lie beside the data, so the data are copied to a folder of their own."""
    file, out = write_image_qa(tmp_path / "new", 40), tmp_path / "new" / "clean.jsonl"
    ensure_index(file)
    before = sorted(out.parent.iterdir())
    with full_disk(1000):
        words = ("data", "check", file, "--hf-model", dense, "--write-clean", out)
        assert exit_code(*words) == 2
    assert f"{out} cannot be written: File too large." in capsys.readouterr().err
    assert sorted(out.parent.iterdir()) == before


def test_the_page_of_a_rehearsal(tmp_path: Path) -> None:
    device = RehearsedGpu(find_gpu("h100-80gb"), 80.0, 2.0)
    run = Command(("--hf-model", str(PUBLISHED / "8b.json")), 1)
    found = Rehearsal(run, device)
    said = r"page\.html cannot be written: File too large.*--report"
    with full_disk(10), pytest.raises(BadInput, match=said):
        write_page(found, tmp_path / "page.html")
    assert list(tmp_path.iterdir()) == []


def test_what_was_there_is_kept(tmp_path: Path) -> None:
    file = tmp_path / "a"
    file.write_text("before")
    (tmp_path / "link").symlink_to(file)
    with full_disk(10), pytest.raises(BadInput), atomic_write(tmp_path / "link") as partial:
        partial.write_text("a" * 100)
    assert file.read_text() == "before"
    with atomic_write(tmp_path / "link") as partial:
        partial.write_text("after")
    assert file.read_text() == "after"
    assert (tmp_path / "link").is_symlink()
    with pytest.raises(ZeroDivisionError), atomic_write(file):
        raise ZeroDivisionError
    assert sorted(one.name for one in tmp_path.iterdir()) == ["a", "link"]


def test_a_device_stays_one(tmp_path: Path) -> None:
    """For example, `--report /dev/stdout` does not replace it, even if the user could."""
    os.mkfifo(tmp_path / "pipe")
    with atomic_write(tmp_path / "pipe") as partial:
        assert partial == tmp_path / "pipe"
    assert partial.is_fifo()


def test_an_index_of_a_json_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is an error, where numpy's `tofile` would silently leave an empty file."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    (tmp_path / "a.json").write_text(json.dumps([{"text": "a"}] * 100))
    with full_disk(1000), pytest.raises(BadInput, match=r"cannot be written in .*File too large"):
        ensure_index(tmp_path / "a.json")
    assert not [*tmp_path.rglob("*.idx"), *tmp_path.rglob("*.tmp")]
    assert json_arrays.is_json_indexed(ensure_index(tmp_path / "a.json"))


def test_a_lock_is_held_though_its_holder_cannot_be_written(tmp_path: Path) -> None:
    with full_disk(0), only_writer(tmp_path):
        assert (tmp_path / ".lock").exists()
    assert not (tmp_path / ".lock").exists()


def test_scores(tmp_path: Path) -> None:
    output = Output(tmp_path / "scores", {}, block=1)
    output.open()
    output.append([{"line": 1}])
    with full_disk(20), pytest.raises(BadInput, match=r"scores cannot be written: .* continues"):
        output.append([{"line": 2}])
    assert output.open() == 1


@pytest.mark.parametrize("letter", ["n", "\N{CJK UNIFIED IDEOGRAPH-540D}"])
def test_names_as_long_as_the_file_system_takes(letter: str, tmp_path: Path) -> None:
    name = letter * (LONGEST_NAME // len(letter.encode()))
    ours, theirs = (
        hidden_beside(tmp_path / name, ".end"),
        hidden_beside(tmp_path / name[1:], ".end"),
    )
    assert ours != theirs
    assert {len(os.fsencode(place.name)) <= LONGEST_NAME for place in (ours, theirs)} == {True}
    assert (ours.name[0], ours.suffix, ours.parent) == (".", ".end", tmp_path)
    with atomic_write(tmp_path / name) as partial:
        partial.write_text("one")
    assert (tmp_path / name).read_text() == "one"
    with staging(tmp_path / name[1:], None, force=False, replaceable=lambda _: False) as stage:
        (stage.tree / "file").touch()
        stage.publish()
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted([name, name[1:]])


def test_a_path_that_is_no_utf8_is_refused(
    dense: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    odd = Path(os.fsdecode(os.fsencode(tmp_path) + b"/mod\xffel"))
    shutil.copytree(dense, odd)
    for words in (("inspect", odd), ("convert", "hf-to-mcore", dense, odd / "out"),
                  ("train", "--cpu", "--hf-model", odd)):  # fmt: skip
        assert exit_code(*words) == 2
        said = " ".join(capfd.readouterr().err.split())
        assert "mod\\udcffel" in said
        assert "is no UTF-8, and safetensors and tokenizers open no such path: rename it" in said
    with pytest.raises(SafetensorError, match="not valid UTF-8"):  # as the message says
        safe_open(odd / "model.safetensors", framework="pt")
    monkeypatch.chdir(odd)
    with pytest.raises(BadInput, match="is no UTF-8"):
        HuggingFaceCheckpoint(Path.cwd())
