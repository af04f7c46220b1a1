"""The program of the Slurm page does parts as Ray's tasks; `make test-ray` installs Ray for it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import psutil
import pytest

from mcore_qwen3vl.converters.convert import hf_to_mcore
from tests.converters.checkpoints import tree_digests
from tests.docs.markdown import ROOT, blocks

pytest.importorskip("ray", reason="`make test-ray` installs it")

PARTS = 3
RECORDS = 20
PROGRAM = [sys.executable, "-P", "-m", "mcore_qwen3vl"]
WAITING = """
import os
import time
from pathlib import Path

HERE = Path(__file__).parent


def wait(record):
    with (HERE / "pids").open("a") as file:
        print(os.getpid(), file=file)
    end = time.monotonic() + 3000
    while not (HERE / "killed").exists() and time.monotonic() < end:
        time.sleep(0.1)
    return record
"""
"""A hook for records: it says in which process it is, and waits until a worker was killed."""


def program(command: Sequence[object], *, merges: bool) -> str:
    """Return the program of the page for another command, and for few parts."""
    (text,) = (
        b.text for b in blocks(ROOT / "docs" / "slurm.md", "python") if "import ray" in b.text
    )
    lines = text.splitlines()
    assert lines[-1].startswith("subprocess.run([*COMMAND")
    names = {"COMMAND = ": [*PROGRAM, *map(str, command)], "N = ": PARTS}
    for start, value in names.items():
        (at,) = (number for number, line in enumerate(lines) if line.startswith(start))
        lines[at] = f"{start}{value!r}"
    return "\n".join(lines if merges else lines[:-1]).replace("num_cpus=8", "num_cpus=1")


def started(text: str, folder: Path) -> subprocess.Popen[str]:
    (folder / "program.py").write_text(text)
    output = (folder / "output.txt").open("w")
    environment = {**os.environ, "HOME": str(folder), "RAY_USAGE_STATS_ENABLED": "0"}
    environment.pop("RAY_ADDRESS", None)
    environment["RAY_process_group_cleanup_enabled"] = "0"  # which older releases do not have
    return subprocess.Popen(
        [sys.executable, "program.py"], cwd=folder, env=environment, text=True,
        stdout=output, stderr=subprocess.STDOUT,
    )  # fmt: skip


def eventually[Found](find: Callable[[], Found | None], running: subprocess.Popen[str]) -> Found:
    end = time.monotonic() + 900
    while (found := find()) is None:
        assert running.poll() is None
        assert time.monotonic() < end
        time.sleep(0.2)
    return found


def kill_a_worker(running: subprocess.Popen[str], folder: Path) -> int:
    """Kill a worker of Ray in the middle of a part; return the process that read its records."""
    pids = folder / "pids"
    reader = eventually(
        lambda: int(pids.read_text().split()[0]) if pids.exists() else None, running
    )
    above = psutil.Process(reader).parents()
    worker = next(process for process in above if process.cmdline()[0].startswith("ray::part"))
    worker.kill()
    return reader


@pytest.mark.parametrize("what", ["check", "measure"])
def test_a_part_whose_worker_was_killed_is_done_again(
    dense: Path, tmp_path: Path, what: str
) -> None:
    data = tmp_path / "train.jsonl"
    turns = [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}]
    data.write_text("".join(json.dumps({"messages": turns}) + "\n" for _ in range(RECORDS)))
    (tmp_path / "waiting.py").write_text(WAITING)
    shared = ["data", what, data, "--hf-model", dense, "--preprocess", "waiting.py:wait"]
    parts = [*shared, "--parts", tmp_path / "parts", "--workers", "1"]
    running = started(program(parts, merges=True), tmp_path)
    try:
        reader = kill_a_worker(running, tmp_path)
        eventually(lambda: None if psutil.pid_exists(reader) else True, running)
        (tmp_path / "killed").touch()
        code = running.wait(timeout=900)
    finally:
        running.terminate()
    assert code == 0, (tmp_path / "output.txt").read_text()
    readers = set((tmp_path / "pids").read_text().split())
    assert len(readers) > PARTS  # one of them was killed
    assert {file.name for file in (tmp_path / "parts").glob("*.jsonl")} == {
        f"{what}-{index:05d}-of-{PARTS:05d}.jsonl" for index in range(PARTS)
    }
    if what == "check":
        whole = said([*shared, "--json"], tmp_path)
        assert said([*parts, "--merge", "--json"], tmp_path) == whole
        assert whole["summary"]["usable"] == RECORDS


def said(command: Sequence[object], folder: Path) -> Any:
    words = [*PROGRAM, *map(str, command)]
    done = subprocess.run(words, cwd=folder, capture_output=True, text=True, check=True)
    return json.loads(done.stdout)


def test_a_conversion_in_tasks_makes_the_bytes_of_one_process(dense: Path, tmp_path: Path) -> None:
    command = ["convert", "hf-to-mcore", dense, tmp_path / "out"]
    running = started(program(command, merges=False), tmp_path)
    assert running.wait(timeout=900) == 0, (tmp_path / "output.txt").read_text()
    hf_to_mcore(dense, tmp_path / "whole")
    assert tree_digests(tmp_path / "out") == tree_digests(tmp_path / "whole")
