"""A failing disk gives one clear error and exit code 2; the same command later continues."""

from __future__ import annotations

import ctypes
import errno
import json
import mmap
import os
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from mcore_qwen3vl.cli import main
from mcore_qwen3vl.converters.convert import hf_to_mcore, mcore_to_hf
from mcore_qwen3vl.converters.offline import to_hf, to_mcore
from tests.command import exit_code
from tests.converters.checkpoints import copy, tree_digests
from tests.converters.offline.test_resume import in_child

Tiny = Callable[[str], Path]
DIRECTIONS = ["hf-to-mcore", "mcore-to-hf"]


@pytest.fixture(autouse=True)
def _small_units(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (to_mcore, to_hf):
        monkeypatch.setattr(module, "unit_bytes", lambda total: 100_000)


@pytest.fixture
def source(tiny: Tiny, tmp_path: Path, direction: str) -> Path:
    if direction == "hf-to-mcore":
        return tiny("dense")
    hf_to_mcore(tiny("dense"), tmp_path / "reference")
    return tmp_path / "reference"


@pytest.fixture
def expected(source: Path, tmp_path: Path, direction: str) -> dict[str, str]:
    convert = {"hf-to-mcore": hf_to_mcore, "mcore-to-hf": mcore_to_hf}[direction]
    convert(source, tmp_path / "whole")
    return tree_digests(tmp_path / "whole")


def command(direction: str, source: Path, target: Path) -> int | str | None:
    return exit_code("convert", direction, source, target, "--workers", "1", "--json")


class Failing:
    """A system call that works `calls` times and then fails until `mend`."""

    def __init__(self, real: Callable[..., Any], calls: int, code: int) -> None:
        self.real, self.left, self.code = real, calls, code

    def __call__(self, *args: Any) -> Any:
        self.left -= 1
        if self.left < 0:
            raise OSError(self.code, os.strerror(self.code))
        return self.real(*args)

    def mend(self) -> None:
        self.left = 10**9


@pytest.mark.parametrize("direction", DIRECTIONS)
@pytest.mark.parametrize("call", ["pwrite", "fsync"])
@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EIO])
def test_writing_fails(
    direction: str,
    source: Path,
    expected: dict[str, str],
    tmp_path: Path,
    call: str,
    code: int,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    target = tmp_path / "target"
    failing = Failing(getattr(os, call), 12, code)
    monkeypatch.setattr(os, call, failing)
    assert command(direction, source, target) == 2
    failing.mend()
    message = json.loads(capsys.readouterr().out)["error"]
    assert os.strerror(code) in message
    assert "running the same command again continues from there" in message
    assert "Traceback" not in message
    assert not target.exists()
    assert command(direction, source, target) == 0
    assert json.loads(capsys.readouterr().out)["resumed_units"] > 0
    assert tree_digests(target) == expected


def test_a_round_trip_on_a_full_disk_does_not_promise_to_go_on(
    tiny: Tiny, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(os, "pwrite", Failing(os.pwrite, 12, errno.ENOSPC))
    work = tmp_path / "work"
    work.mkdir()
    words = ["verify", "roundtrip", str(tiny("dense")), "--work-dir", str(work), "--workers", "1"]
    assert exit_code(*words, "--json") == 2
    message = json.loads(capsys.readouterr().out)["error"]
    assert os.strerror(errno.ENOSPC) in message
    assert f"room for twice the checkpoint in {work}, or in another folder" in message
    assert "continues" not in message
    assert not list(work.iterdir())


@pytest.mark.parametrize("direction", DIRECTIONS)
def test_source_is_cut_short_while_it_is_read(
    direction: str,
    source: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """A page missing from a mapped file, as if the disk could not read it, is one error."""
    source = copy(source, tmp_path / "source")
    files = [*source.glob("*.safetensors"), *source.rglob("*.distcp")]
    sound = {file: (file.read_bytes(), file.stat()) for file in files}
    conversion = to_mcore.ToMcore if direction == "hf-to-mcore" else to_hf.ToHuggingFace
    run = conversion.run_unit

    def cut_at_third(self: Any, unit: Any, *args: Any) -> Any:
        if unit.name.endswith(("_3.distcp", ":3")):
            for file in files:
                os.truncate(file, mmap.PAGESIZE)
        return run(self, unit, *args)

    target = tmp_path / "target"
    with monkeypatch.context() as patch:
        patch.setattr(conversion, "run_unit", cut_at_third)
        assert command(direction, source, target) == 2
    for file, (content, stat) in sound.items():
        file.write_bytes(content)
        os.utime(file, ns=(stat.st_atime_ns, stat.st_mtime_ns))
    message = json.loads(capsys.readouterr().out)["error"]
    assert "a memory-mapped file cannot be read" in message
    assert "running the same command again continues from there" in message
    assert not target.exists()
    assert command(direction, source, target) == 0
    assert json.loads(capsys.readouterr().out)["resumed_units"] == 3
    assert command(direction, source, tmp_path / "whole") == 0
    assert tree_digests(target) == tree_digests(tmp_path / "whole")


def obey_permissions() -> None:
    """Drop the two capabilities by which root ignores a file's mode."""
    header = struct.pack("=Ii", 0x20080522, 0)
    data = bytearray(24)
    libc = ctypes.CDLL(None, use_errno=True)
    view = (ctypes.c_char * 24).from_buffer(data)
    assert libc.capget(header, view) == 0
    effective = int.from_bytes(data[:4], "little") & ~0b110  # DAC_OVERRIDE, DAC_READ_SEARCH
    data[:4] = effective.to_bytes(4, "little")
    assert libc.capset(header, view) == 0


@pytest.mark.parametrize("denied", ["source file", "target directory", "half-way"])
@pytest.mark.parametrize("direction", DIRECTIONS)
def test_permission_denied(
    direction: str,
    source: Path,
    tmp_path: Path,
    denied: str,
    capfd: pytest.CaptureFixture[str],
) -> None:
    source = copy(source, tmp_path / "source")
    place = tmp_path / "place"
    place.mkdir()
    weights = max(source.rglob("*"), key=lambda f: f.stat().st_size)

    def run() -> None:
        obey_permissions()
        if denied == "source file":
            weights.chmod(0)
        elif denied == "target directory":
            place.chmod(0o500)
        else:
            conversion = to_mcore.ToMcore if direction == "hf-to-mcore" else to_hf.ToHuggingFace
            finish = conversion.finish

            def forbid(self: Any, tree: Path, *args: Any) -> None:
                tree.chmod(0o500)
                finish(self, tree, *args)

            conversion.finish = forbid  # type: ignore[method-assign]
        main(["convert", direction, str(source), str(place / "target")])

    assert in_child(run) == 2
    message = " ".join(capfd.readouterr().err.split())
    assert message.count("error:") == 1
    assert "Permission denied" in message
    assert "Traceback" not in message
    assert not (place / "target").exists()
    for path in (weights, place, *place.rglob("tree")):
        path.chmod(0o700)
    assert command(direction, source, place / "target") == 0
    assert command(direction, source, tmp_path / "whole") == 0
    assert tree_digests(place / "target") == tree_digests(tmp_path / "whole")
