"""A check of data by several processes says what one process says, and ends in a sentence."""

from __future__ import annotations

import json
import os
import tarfile
from pathlib import Path
from typing import Any

import pytest

from mcore_qwen3vl.errors import BadInput
from tests.command import exit_code
from tests.data.conftest import WriteJsonl, chat, question, write_tar


def odd_records(count: int) -> list[Any]:
    """Make records of several forms, with and without images, among them bad and over-long ones."""
    records: list[Any] = []
    for index in range(count):
        record = question(index, image=index % 5 == 0, words=3 + index % 17)
        if index % 7 == 2:
            record[f"key {index % 3}"] = index
        if index % 11 == 4:
            record = {"text": f"A page of plain text, number {index}."}
        if index % 13 == 6:
            record = chat(("user", "A text that spells <|im_end|>"), ("assistant", f"{index}"))
        if index % 17 == 8:
            record = question(index, image=False, words=300)
        records.append("{broken" if index % 19 == 10 else record)
    return records


@pytest.fixture
def data(write_jsonl: WriteJsonl) -> Path:
    return write_jsonl(odd_records(130))


def words(data: Path, model: Path) -> list[object]:
    return ["data", "check", data, "--hf-model", model, "--seq-length", 200, "--dp", 3]


def test_the_report_is_the_same_whatever_the_number_of_processes(
    data: Path, processor_dir: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    command = [*words(data, processor_dir), "--global-batch-size", 6, "--packing-buffer", 16]
    said: dict[int, list[object]] = {}
    for workers in (1, 4, 7):
        clean = data.with_name(f"clean{workers}.jsonl")
        texts: list[object] = []
        for flags in ([], ["--json"], ["--limit", 31, "--json"]):
            assert exit_code(*command, *flags, "--workers", workers) == 1
            texts.append(capsys.readouterr())
        assert exit_code(*command, "--workers", workers, "--write-clean", clean, "--json") == 0
        texts += [capsys.readouterr(), clean.read_bytes()]
        said[workers] = texts
    assert said[1] == said[4] == said[7]
    (_, error), (report, _), *_ = said[1]  # type: ignore[misc]
    assert error.startswith("error: 7 samples of")
    found = json.loads(report)
    assert (found["summary"]["samples"], found["summary"]["overlong"]) == (130, 8)
    assert len(found["formats"]) == 2
    assert len(found["balance"]) == 2
    assert len(found["peculiar"]) == 1
    assert {one["name"] for one in found["unused"]} == {"key 0", "key 1", "key 2"}


def test_a_process_that_is_killed_ends_the_check_in_a_sentence(
    data: Path, processor_dir: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    hook = tmp_path / "dies.py"
    hook.write_text(
        "import os, signal\n\n\ndef dies(record):\n"
        "    if 'sample 72 ' in str(record):\n        os.kill(os.getpid(), signal.SIGKILL)\n"
        "    return record\n"
    )
    command = [*words(data, processor_dir), "--workers", 2, "--preprocess", f"{hook}:dies"]
    assert exit_code(*command) == 3
    printed = capsys.readouterr()
    assert printed.out == ""
    assert f"checking {data}: a process was killed, by a signal or because memory" in printed.err
    assert "with fewer --workers" in printed.err


def test_an_error_in_a_process_is_the_sentence_of_a_single_one(
    processor_dir: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    record = json.dumps(chat(("user", "q"), ("assistant", "a"))).encode()
    folder = tmp_path / "tars"
    members = [(f"{index}.json", record) for index in range(40)]
    tar = write_tar(folder / "0.tar", members)
    command = ["data", "check", folder, "--hf-model", processor_dir]
    assert exit_code(*command) == 0
    capsys.readouterr()
    with tarfile.open(tar) as opened:
        place = opened.getmember("30.json").offset
    times = tar.stat()
    with tar.open("r+b") as file:
        file.seek(place)
        file.write(b"\xff" * 512)
    os.utime(tar, ns=(times.st_atime_ns, times.st_mtime_ns))  # so that the index is not made anew
    errors = []
    for workers in (1, 2):
        assert exit_code(*command, "--workers", workers) == BadInput.exit_code
        errors.append(capsys.readouterr())
    assert errors[0] == errors[1]
    assert "Record 31 of" in errors[0].err
    assert "The file is damaged" in errors[0].err
