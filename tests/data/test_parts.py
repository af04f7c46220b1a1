"""Work in parts makes what one process makes, and parts that do not belong together are refused."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from mcore_qwen3vl.config import Architecture
from mcore_qwen3vl.data import DataConfig, Loader, Source, load_processor
from mcore_qwen3vl.data.encoding import balanced
from tests.command import exit_code
from tests.data.conftest import WriteJsonl, question
from tests.data.test_inspection_side_by_side import odd_records

Run = Callable[..., tuple[int | str, str, str]]


@pytest.fixture
def data(write_jsonl: WriteJsonl, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return write_jsonl(odd_records(61))


@pytest.fixture
def run(data: Path, processor_dir: Path, capsys: pytest.CaptureFixture[str]) -> Run:
    """Return a function that runs ``data WORK`` with flags, and returns what came of it."""

    def run(work: str, *flags: object) -> tuple[int | str, str, str]:
        words = ["data", work, data, "--hf-model", processor_dir, "--seq-length", 200]
        code = exit_code(*words, "--workers", 1, *flags)
        printed = capsys.readouterr()
        return code, printed.out, " ".join(printed.err.split())

    return run


def sizes_in(folder: Path) -> dict[str, bytes]:
    return {file.name: file.read_bytes() for file in folder.rglob("*.sizes")}


def do_parts(run: Run, work: str, folder: Path, count: int, *flags: object) -> None:
    for index in reversed(range(count)):
        code, said, _ = run(work, "--part", f"{index}/{count}", "--parts", folder, *flags)
        assert code == 0, said


@pytest.mark.parametrize("count", [1, 4, 7])
def test_a_merged_report_is_that_of_one_process(
    count: int, run: Run, data: Path, tmp_path: Path
) -> None:
    flags = ["--dp", 2, "--global-batch-size", 4, "--packing-buffer", 8]
    do_parts(run, "check", tmp_path / "parts", count)
    merge = ["--merge", "--parts", tmp_path / "parts", *flags]
    for more in ([], ["--json"]):
        code, out, _ = whole = run("check", *flags, *more)
        assert run("check", *merge, *more) == whole
        assert code == 1
        assert "key 0" in out
    clean = [data.with_name(f"clean{n}.jsonl") for n in range(2)]
    assert run("check", *merge, "--write-clean", clean[0])[0] == 0
    assert run("check", *flags, "--write-clean", clean[1])[0] == 0
    assert clean[0].read_bytes() == clean[1].read_bytes() != b""


@pytest.mark.parametrize("count", [1, 4, 7])
def test_merged_sizes_are_those_of_one_process_and_training_takes_them(
    count: int,
    run: Run,
    data: Path,
    processor_dir: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert run("measure")[0] == 0
    whole = sizes_in(tmp_path / "cache")
    assert len(whole) == 1
    shutil.rmtree(tmp_path / "cache")
    do_parts(run, "measure", tmp_path / "parts", count)
    assert sizes_in(tmp_path / "cache") == {}
    code, said, _ = run("measure", "--merge", "--parts", tmp_path / "parts", "--json")
    assert code == 0
    assert sizes_in(tmp_path / "cache") == whole
    (measured,) = json.loads(said)["data_sets"]
    assert (measured["path"], measured["samples"]) == (str(data), 61)
    assert (measured["bad"], measured["overlong"]) == (3, 4)

    def measured_again(*_: Any) -> Any:
        raise AssertionError("training measures")

    monkeypatch.setattr(balanced.BalancedTaskEncoder, "measure_sample", measured_again)
    config = DataConfig(200, packing=True, balance=True, packing_buffer=8)
    shape = Architecture.from_hf(processor_dir)
    next(Loader([Source(data)], shape, load_processor(processor_dir), config, num_workers=0))


def test_the_data_sets_of_a_mixture_are_divided_together(
    run: Run, data: Path, processor_dir: Path, tmp_path: Path
) -> None:
    other = data.with_name("other.jsonl")
    other.write_text("".join(json.dumps(question(i, image=False)) + "\n" for i in range(9)))
    mixture = tmp_path / "mixture.yaml"
    mixture.write_text("datasets:\n  - path: data.jsonl\n  - path: other.jsonl\n")
    command = ["data", "measure", mixture, "--hf-model", processor_dir, "--seq-length", 200]
    assert exit_code(*command) == 0
    whole = sizes_in(tmp_path / "cache")
    assert len(whole) == 2
    shutil.rmtree(tmp_path / "cache")
    for index in range(3):
        assert exit_code(*command, "--part", f"{index}/3", "--parts", tmp_path / "p") == 0
    assert exit_code(*command, "--merge", "--parts", tmp_path / "p") == 0
    assert sizes_in(tmp_path / "cache") == whole


@pytest.mark.parametrize("work", ["check", "measure"])
def test_parts_that_do_not_belong_together_are_refused(
    work: str, run: Run, data: Path, tmp_path: Path
) -> None:
    parts = tmp_path / "parts"
    merge = ["--merge", "--parts", parts]

    def refusal(*flags: object) -> str:
        code, out, error = run(work, *merge, *flags)
        assert (code, out) == (2, "")
        return error

    assert f"holds no part of data {work}" in refusal()
    do_parts(run, work, parts, 4)
    file = parts / f"{work}-00002-of-00004.jsonl"
    kept = file.read_bytes()
    file.rename(tmp_path / "away")
    assert f"{parts} lacks 1 of 4 parts: do --part 2/4, and merge again" in refusal()
    (tmp_path / "away").rename(file)

    copy = shutil.copy(file, parts / f"{work}-00002-of-00004 copy.jsonl")
    error = refusal()
    assert "are both part 2/4: remove one of them" in error
    assert str(copy) in error
    Path(copy).unlink()

    run(work, "--part", "0/7", "--parts", parts)
    assert "holds parts of 4" in refusal()
    (parts / f"{work}-00000-of-00007.jsonl").unlink()

    file.write_bytes(b"".join(kept.splitlines(keepends=True)[:-1]))
    assert f"{file} is damaged or cut off" in refusal()
    file.write_bytes(kept[:30])
    assert f"{file} is damaged or cut off" in refusal()
    file.write_bytes(kept)

    assert "differ in --image-max-tokens: do --part 0/4 again" in refusal("--image-max-tokens", 9)
    assert f"differ in how {data} is read" in refusal("--train-on", "last")
    if work == "check":
        assert "differ in --limit" in refusal("--limit", 60)
    lines = data.read_text().splitlines()
    lines[5], lines[6] = lines[6], lines[5]
    data.write_text("\n".join(lines) + "\n")
    assert f"differ in the content of {data}" in refusal()
    # The parts of other data are not taken for done; the others of them are then in the way.
    assert run(work, "--part", "2/4", "--parts", parts)[0] == 0
    assert f"{work}-00000-of-00004.jsonl and this command differ" in refusal()
    do_parts(run, work, parts, 4)
    assert run(work, *merge)[0] == (1 if work == "check" else 0)


def test_a_hook_of_other_content_makes_another_part(run: Run, tmp_path: Path) -> None:
    hook = tmp_path / "hook.py"
    hook.write_text("def same(record):\n    return record\n")
    flags = ["--parts", tmp_path / "parts", "--preprocess", f"{hook}:same"]
    assert run("check", "--part", "0/1", *flags)[0] == 0
    assert run("check", "--merge", *flags)[0] == 1
    hook.write_text("def same(record):\n    return {**record}\n")
    code, _, error = run("check", "--merge", *flags)
    assert code == 2
    assert f"differ in the file of {hook}:same" in error


def test_a_part_that_was_killed_is_done_again_alone(
    run: Run, data: Path, processor_dir: Path, tmp_path: Path
) -> None:
    parts = tmp_path / "parts"
    hook = tmp_path / "hook.py"
    began = tmp_path / "began"
    hook.write_text(
        "import pathlib, time\n\n\ndef waits(record):\n"
        f"    if pathlib.Path({str(tmp_path / 'slow')!r}).exists():\n"
        f"        pathlib.Path({str(began)!r}).touch()\n        time.sleep(60)\n"
        "    return record\n"
    )
    flags = ["--parts", parts, "--preprocess", f"{hook}:waits"]
    do_parts(run, "check", parts, 3, *flags[2:])
    (parts / "check-00001-of-00003.jsonl").unlink()
    times = {file.name: file.stat().st_mtime_ns for file in parts.iterdir()}
    (tmp_path / "slow").touch()
    words = ["data", "check", data, "--hf-model", processor_dir, "--seq-length", 200, *flags]
    code = "from mcore_qwen3vl.cli import main; main()"
    command = [sys.executable, "-c", code, *map(str, words), "--part", "1/3", "--workers", "2"]
    with subprocess.Popen(command, env={**os.environ}) as process:
        while not began.exists():
            assert process.poll() is None
            time.sleep(0.1)
        process.kill()
    (tmp_path / "slow").unlink()
    code, _, error = run("check", "--merge", *flags)
    assert code == 2
    assert "lacks 1 of 3 parts: do --part 1/3" in error
    do_parts(run, "check", parts, 3, *flags[2:])
    assert run("check", "--merge", *flags) == run("check", *flags[2:])
    left = {file.name: file.stat().st_mtime_ns for file in parts.iterdir()}
    assert left.pop("check-00001-of-00003.jsonl")
    assert left == times  # the other parts were done already; what the killed one wrote is gone


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        ("--part 4/4 --parts P", "with I from 0 to N - 1"),
        ("--part 1 --parts P", "it is I/N"),
        ("--part 0/2", "--part needs --parts DIR"),
        ("--merge", "--merge needs --parts DIR"),
        ("--parts P", "does nothing alone"),
        ("--part 0/2 --merge --parts P", "give one of the two"),
        ("--part 0/2 --parts P --plot a.png", "give it to --merge"),
        ("--part 0/2 --parts P --write-clean a.jsonl", "give it to --merge"),
    ],
)
def test_flags_of_parts_that_do_not_fit(flags: str, said: str, run: Run, tmp_path: Path) -> None:
    code, _, error = run("check", *flags.replace(" P", f" {tmp_path / 'p'}").split())
    assert code == 2
    assert said in error
