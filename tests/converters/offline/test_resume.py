"""A killed conversion leaves nothing that a loader accepts, and continues to the same bytes."""

from __future__ import annotations

import functools
import multiprocessing
import os
import random
import resource
import shutil
import signal
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from mcore_qwen3vl.converters.convert import hf_to_mcore, mcore_to_hf
from mcore_qwen3vl.converters.offline import to_hf, to_mcore
from mcore_qwen3vl.converters.storage import staging
from mcore_qwen3vl.errors import BadInput
from mcore_qwen3vl.layout import Layout
from tests.converters.checkpoints import tree_digests
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


@pytest.mark.parametrize(
    "direction",
    ["hf-to-mcore", *slow("hf-to-legacy"), "mcore-to-hf"],
)
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
        seen = 0

        def die(*_: object, point: int = point) -> None:
            nonlocal seen
            seen += 1
            if seen == point:
                os.kill(os.getpid(), signal.SIGKILL)

        run = functools.partial(convert, source, target, workers=1 + number % 2, progress=die)
        assert in_child(run) == -signal.SIGKILL
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


@pytest.mark.parametrize("direction", ["hf-to-mcore", "hf-to-legacy", "mcore-to-hf"])
def test_a_write_that_fails_is_one_error_and_resumes(
    directions: dict[str, tuple[Convert, Path]], tmp_path: Path, direction: str
) -> None:
    """A limit on the size of files makes writes fail, as on a full disk."""
    convert, source = directions[direction]
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
    seen = 0

    def die(*_: object) -> None:
        nonlocal seen
        seen += 1
        if seen == 80:
            os.kill(os.getpid(), signal.SIGKILL)

    assert in_child(lambda: hf_to_mcore(source, target, progress=die)) == -signal.SIGKILL
    summary = hf_to_mcore(tiny("moe-v5"), target)
    assert summary.resumed_units == 0
    hf_to_mcore(tiny("moe-v5"), tmp_path / "fresh")
    assert tree_digests(target) == tree_digests(tmp_path / "fresh")


def test_two_at_once_are_kept_apart(tiny: Tiny, tmp_path: Path) -> None:
    errors = []

    def second(*_: object) -> None:
        if not errors:
            with pytest.raises(BadInput, match="another process is writing") as error:
                hf_to_mcore(tiny("dense"), tmp_path / "target")
            errors.append(error)

    hf_to_mcore(tiny("dense"), tmp_path / "target", progress=second)
    assert errors
    assert (tmp_path / "target" / "release" / ".metadata").exists()


def test_unwritable_place(tiny: Tiny, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(BadInput, match="cannot be written"):
        hf_to_mcore(tiny("dense"), tmp_path / "file" / "target")
