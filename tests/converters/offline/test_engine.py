"""A conversion that was killed, or lost its disk, continues later to the same bytes."""

from __future__ import annotations

import ctypes
import errno
import functools
import itertools
import json
import mmap
import multiprocessing
import os
import random
import resource
import shutil
import signal
import struct
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from mcore_qwen3vl.cli import main
from mcore_qwen3vl.converters.convert import hf_to_mcore, mcore_to_hf
from mcore_qwen3vl.converters.offline import to_hf, to_mcore
from mcore_qwen3vl.converters.storage import staging
from mcore_qwen3vl.errors import BadInput
from mcore_qwen3vl.layout import Layout
from tests.command import exit_code
from tests.converters.checkpoints import copy, tree_digests
from tests.turns import slow

Tiny = Callable[[str], Path]
Convert = Callable[..., object]
KILLS = 8
KILLS_BY_THE_CLOCK = 150


@pytest.fixture(autouse=True)
def _small_units(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (to_mcore, to_hf):
        monkeypatch.setattr(module, "unit_bytes", lambda total: 100_000)


@pytest.fixture
def directions(tiny: Tiny, tmp_path: Path) -> dict[str, tuple[Convert, Path]]:
    """Return the conversion and the source of each direction."""
    mcore = tmp_path / "reference-mcore"
    hf_to_mcore(tiny("moe"), mcore)
    to_legacy = functools.partial(
        hf_to_mcore, format="torch", layout=Layout(tp=2, pp=2, ep=2, etp=2)
    )
    return {
        "hf-to-mcore": (hf_to_mcore, tiny("moe")),
        "hf-to-legacy": (to_legacy, tiny("moe")),
        "mcore-to-hf": (mcore_to_hf, mcore),
    }


def in_child(work: Callable[[], object]) -> int:
    """Run `work` in a forked process and return its exit code, negative for a signal."""
    process = multiprocessing.get_context("fork").Process(target=work)
    process.start()
    process.join(60)
    assert process.exitcode is not None
    return process.exitcode


def dying_at(point: int) -> Callable[..., None]:
    """Return a `progress` that kills its process when it is called for the `point`-th time."""
    calls = itertools.count(1)

    def die(*_: object) -> None:
        if next(calls) == point:
            os.kill(os.getpid(), signal.SIGKILL)

    return die


@pytest.mark.parametrize("direction", ["hf-to-mcore", *slow("hf-to-legacy"), "mcore-to-hf"])
def test_kill_at_any_point(
    directions: dict[str, tuple[Convert, Path]], tmp_path: Path, direction: str
) -> None:
    convert, source = directions[direction]
    whole = tmp_path / "whole"
    calls: list[int] = []
    convert(source, whole, workers=1, progress=lambda *_: calls.append(1))
    expected = tree_digests(whole)
    points = random.Random(0).sample(range(1, len(calls) + 1), KILLS)
    resumed = 0
    for number, point in enumerate(points):
        target = tmp_path / f"killed-{number}"
        options = {"workers": 1 + number % 2, "progress": dying_at(point)}
        assert in_child(functools.partial(convert, source, target, **options)) == -signal.SIGKILL
        assert not target.exists()
        summary = convert(source, target)
        resumed += summary.resumed_units  # type: ignore[attr-defined]
        assert tree_digests(target) == expected
        assert not (tmp_path / f".killed-{number}.incomplete").exists()
    assert resumed > KILLS


@pytest.mark.slow
@pytest.mark.parametrize("direction", ["hf-to-mcore", "mcore-to-hf"])
def test_kill_at_any_moment(
    directions: dict[str, tuple[Convert, Path]], tmp_path: Path, direction: str
) -> None:
    """Kills come at random times, not between two calls; a third of resumed runs are killed too."""
    convert, source = directions[direction]
    whole, target = tmp_path / "whole", tmp_path / "target"
    started = time.monotonic()
    assert in_child(functools.partial(convert, source, whole, workers=2)) == 0
    longest = 1.2 * (time.monotonic() - started)
    expected = tree_digests(whole)
    rng = random.Random(0)
    resumed = killed = 0
    while killed < KILLS_BY_THE_CLOCK:
        child = multiprocessing.get_context("fork").Process(
            target=functools.partial(convert, source, target, workers=2)
        )
        child.start()
        time.sleep(rng.uniform(0, longest))
        child.kill()
        child.join()
        killed += child.exitcode == -signal.SIGKILL
        if target.exists():  # then it must be complete
            assert tree_digests(target) == expected
        elif rng.random() < 0.3:
            continue
        else:
            resumed += convert(source, target).resumed_units  # type: ignore[attr-defined]
            assert tree_digests(target) == expected
        shutil.rmtree(target)
    shutil.rmtree(tmp_path / ".target.incomplete", ignore_errors=True)
    print(f"{direction}: {killed} kills, {resumed} units kept over them")
    assert resumed > killed


@pytest.mark.parametrize("step", ["finish", "publish", "between renames", "after renames"])
@pytest.mark.parametrize("direction", ["hf-to-mcore", *slow("mcore-to-hf")])
def test_kill_while_finishing(
    directions: dict[str, tuple[Convert, Path]],
    tmp_path: Path,
    direction: str,
    step: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It may be after the last unit, or around the two renames by which --force replaces."""
    convert, source = directions[direction]
    target = tmp_path / "target"
    convert(source, target)
    expected = tree_digests(target)
    rename = Path.rename

    def kill(*_: object) -> None:
        os.kill(os.getpid(), signal.SIGKILL)

    def kill_at_second(self: Path, new: Path) -> Path:
        return kill() if new == target else rename(self, new)  # type: ignore[return-value]

    def kill_at_target(folder: Path) -> None:
        if folder == target.parent:
            kill()

    def run() -> None:
        if step == "finish":
            conversion = to_mcore.ToMcore if convert is hf_to_mcore else to_hf.ToHuggingFace
            monkeypatch.setattr(conversion, "finish", kill)
        elif step == "publish":
            monkeypatch.setattr(staging.Staging, "publish", kill)
        elif step == "between renames":
            monkeypatch.setattr(Path, "rename", kill_at_second)
        else:
            monkeypatch.setattr(staging, "sync_folder", kill_at_target)
        convert(source, target, force=True)

    assert in_child(run) == -signal.SIGKILL
    if step == "between renames":
        assert not target.exists()
    else:
        assert tree_digests(target) == expected
    convert(source, target, force=True)
    assert tree_digests(target) == expected
    assert not (tmp_path / ".target.incomplete").exists()


def test_a_file_that_cannot_be_created_is_one_error_and_resumes(
    directions: dict[str, tuple[Convert, Path]], tmp_path: Path
) -> None:
    """Files for Hugging Face are made at their full size before any tensor is written."""
    convert, source = directions["mcore-to-hf"]
    whole, target = tmp_path / "whole", tmp_path / "target"
    convert(source, whole)
    largest = max(f.stat().st_size for f in whole.rglob("*") if f.is_file())

    def run() -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (largest - 1, resource.RLIM_INFINITY))
        with pytest.raises(BadInput, match=r"stopped: .*File too large.*running the same command"):
            convert(source, target)

    assert in_child(run) == 0
    assert not target.exists()
    convert(source, target)
    assert tree_digests(target) == tree_digests(whole)


def test_a_changed_source_is_not_resumed(
    directions: dict[str, tuple[Convert, Path]], tiny: Tiny, tmp_path: Path
) -> None:
    _, source = directions["hf-to-mcore"]
    target = tmp_path / "target"
    run = functools.partial(hf_to_mcore, source, target, progress=dying_at(80))
    assert in_child(run) == -signal.SIGKILL
    summary = hf_to_mcore(tiny("moe-v5"), target)
    assert summary.resumed_units == 0
    hf_to_mcore(tiny("moe-v5"), tmp_path / "fresh")
    assert tree_digests(target) == tree_digests(tmp_path / "fresh")


def test_unwritable_place(tiny: Tiny, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(BadInput, match="cannot be written"):
        hf_to_mcore(tiny("dense"), tmp_path / "file" / "target")


DIRECTIONS = ["hf-to-mcore", "mcore-to-hf"]


@pytest.fixture
def source(tiny: Tiny, tmp_path: Path, direction: str) -> Path:
    if direction != "mcore-to-hf":
        return tiny("dense")
    hf_to_mcore(tiny("dense"), tmp_path / "reference")
    return tmp_path / "reference"


@pytest.fixture
def expected(source: Path, tmp_path: Path, direction: str) -> dict[str, str]:
    legacy = {"format": "torch", "layout": Layout(tp=2, pp=2)} if "legacy" in direction else {}
    convert: Convert = mcore_to_hf if direction == "mcore-to-hf" else hf_to_mcore
    convert(source, tmp_path / "whole", **legacy)
    return tree_digests(tmp_path / "whole")


def command(direction: str, source: Path, target: Path) -> int | str | None:
    legacy = ("--format", "torch", "--tp", "2", "--pp", "2") if "legacy" in direction else ()
    words = ("convert", direction.replace("legacy", "mcore"), source, target, *legacy)
    return exit_code(*words, "--workers", "1", "--json")


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


@pytest.mark.parametrize("direction", [*DIRECTIONS, "hf-to-legacy"])
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
    failing = Failing(getattr(os, call), 6 if "legacy" in direction else 12, code)
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
