"""Parts of a conversion, in processes of their own, make the bytes that one process makes."""

from __future__ import annotations

import functools
import json
import multiprocessing
import os
import shutil
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from mcore_qwen3vl.converters.convert import (
    PartResult,
    hf_to_mcore,
    mcore_to_hf,
    plan_hf_to_hf,
    plan_hf_to_mcore,
    plan_mcore_to_hf,
    write,
    write_part,
)
from mcore_qwen3vl.converters.offline import to_hf, to_mcore
from mcore_qwen3vl.converters.storage import part_staging
from mcore_qwen3vl.errors import BadInput, CheckFailed
from mcore_qwen3vl.layout import Layout
from mcore_qwen3vl.part import Part
from tests.command import exit_code
from tests.converters.checkpoints import copy, tree_digests
from tests.turns import slow

Tiny = Callable[[str], Path]
Plan = Callable[[], Any]
SHARDS = "50KB"


@pytest.fixture(autouse=True)
def _small_units(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (to_mcore, to_hf):
        monkeypatch.setattr(module, "unit_bytes", lambda total: 30_000)


@pytest.fixture
def plan(tiny: Tiny, tmp_path: Path, direction: str) -> Plan:
    """Return what plans the conversion of a direction, such as ``mcore-to-hf moe``."""
    way, model = direction.split()
    if way == "mcore-to-hf":
        hf_to_mcore(tiny(model), tmp_path / "mcore")
        return functools.partial(plan_mcore_to_hf, tmp_path / "mcore", max_shard_size=SHARDS)
    if way == "hf-to-hf":
        return functools.partial(plan_hf_to_hf, tiny(model), max_shard_size=SHARDS)
    legacy = {"format": "torch", "layout": Layout(tp=2, pp=2)} if way == "hf-to-legacy" else {}
    return functools.partial(plan_hf_to_mcore, tiny(model), **legacy)


@pytest.fixture
def expected(plan: Plan, tmp_path: Path) -> dict[str, str]:
    write(plan, tmp_path / "whole")
    return tree_digests(tmp_path / "whole")


def started(work: Callable[[], object]) -> Any:
    process = multiprocessing.get_context("fork").Process(target=work)
    process.start()
    return process


def ended(process: Any) -> int:
    process.join(60)
    assert process.exitcode is not None
    return int(process.exitcode)


def die(*_: object) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def die_in_the_middle(done: int, total: int, _: str) -> None:
    """Kill the process; this is a `progress`."""
    if done > total / 2:
        die()


ALL = ["hf-to-mcore dense", "hf-to-mcore moe", "mcore-to-hf dense", "mcore-to-hf moe"]
BOTH = ["hf-to-mcore moe", "mcore-to-hf moe"]


@pytest.mark.parametrize("count", [1, 4, 7])
@pytest.mark.parametrize("direction", [*ALL, "hf-to-hf moe", *slow("hf-to-legacy dense")])
def test_parts_at_once_make_the_bytes_of_one_process(
    plan: Plan, expected: dict[str, str], tmp_path: Path, count: int
) -> None:
    target = tmp_path / "parts"
    units = plan().units
    parts = [
        started(functools.partial(write_part, plan, target, Part(index, count), workers=2))
        for index in range(count)
    ]
    assert [ended(part) for part in parts] == [0] * count
    assert len(units) >= 7
    assert tree_digests(target) == expected
    assert not (tmp_path / ".parts.incomplete").exists()


@pytest.mark.parametrize("direction", BOTH)
def test_no_two_parts_write_to_one_file(
    plan: Plan, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The parts take all units, and each its own files, of which some have several units."""
    conversion = type(plan().conversion)
    run_unit = conversion.run_unit
    written: list[Path] = []

    def record(self: Any, unit: Any, tree: Path, advance: Any) -> Any:
        written.append(self.file(unit, tree))
        return run_unit(self, unit, tree, advance)

    monkeypatch.setattr(conversion, "run_unit", record)
    of_part = []
    for index in range(3):
        written.clear()
        done = write_part(plan, tmp_path / "parts", Part(index, 3))
        assert done.units == len(written) > 0
        of_part.append(list(written))
    assert sum(map(len, of_part)) == len(plan().units)
    files = [file for some in of_part for file in set(some)]
    assert len(files) == len(set(files))
    assert plan().direction == "hf-to-mcore" or len(plan().units) > len(files)


@pytest.mark.parametrize("direction", BOTH)
def test_a_part_that_was_killed_is_done_again_alone(
    plan: Plan, expected: dict[str, str], tmp_path: Path
) -> None:
    target = tmp_path / "parts"
    killed = functools.partial(
        write_part, plan, target, Part(1, 3), workers=1, progress=die_in_the_middle
    )
    assert ended(started(killed)) == -signal.SIGKILL
    assert write_part(plan, target, Part(0, 3)).missing == (Part(1, 3), Part(2, 3))
    assert write_part(plan, target, Part(2, 3)).missing == (Part(1, 3),)
    assert not target.exists()
    again = write_part(plan, target, Part(1, 3))
    assert 0 < again.resumed_units < again.units
    assert again.published is not None
    assert tree_digests(target) == expected


@pytest.mark.parametrize("where", ["finish", "publish", "a line of the journal"])
@pytest.mark.parametrize("direction", BOTH)
def test_the_last_part_is_killed_at_its_end(
    plan: Plan,
    expected: dict[str, str],
    tmp_path: Path,
    where: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Any part then publishes, that of the dead process or another."""
    target = tmp_path / "parts"
    write_part(plan, target, Part(0, 2))

    def run() -> None:
        if where == "publish":
            monkeypatch.setattr(part_staging.PartStaging, "publish", die)
        elif where == "finish":
            conversion = type(plan().conversion)
            monkeypatch.setattr(conversion, "finish", die)
        else:
            monkeypatch.setattr(part_staging, "append_durably", half_a_line)
        write_part(plan, target, Part(1, 2))

    def half_a_line(file: Path, line: bytes) -> None:
        with file.open("ab") as journal:
            journal.write(line[:-9])
        die()

    assert ended(started(run)) == -signal.SIGKILL
    assert not target.exists()
    index = 1 if where == "a line of the journal" else 0
    assert write_part(plan, target, Part(index, 2)).published is not None
    assert tree_digests(target) == expected


def test_a_part_writes_behind_the_half_a_line_of_one_that_died(tmp_path: Path) -> None:
    target, depends = tmp_path / "parts", {"source": "A"}
    with part_staging.part_staging(
        target, Part(0, 2), "plan", depends, force=False, replaceable=lambda path: False
    ) as stage:
        stage.record_held("first", 1)
        with stage.released():
            with stage.journal.open("ab") as journal:
                journal.write(b'{"unit": "of the dead", "res')
            stage.record_finished("second", 2)
        assert stage.done == {"first": 1, "second": 2}


@pytest.mark.parametrize("direction", BOTH)
def test_a_missing_part(
    plan: Plan, tmp_path: Path, capsys: pytest.CaptureFixture[str], direction: str
) -> None:
    """Nothing has the target's name, and `inspect` says so."""
    target = tmp_path / "parts"
    source = plan().source
    words = ["convert", direction.split()[0], source, target]
    words += ["--max-shard-size", SHARDS] if "mcore-to" in direction else []
    for index in (0, 2):
        assert exit_code(*words, "--part", f"{index}/3", "--json") == 0
        said = json.loads(capsys.readouterr().out)
    assert (said["part"], said["of"], said["missing"]) == (2, 3, ["1/3"])
    assert said["published"] is None
    assert not target.exists()
    assert exit_code("inspect", target) == 2
    message = " ".join(capsys.readouterr().err.split())
    assert "parts is not written yet" in message
    assert "the parts that are missing" in message
    assert exit_code("inspect", tmp_path / ".parts.incomplete" / "tree") == 2
    assert exit_code(*words, "--part", "1/3", "--json") == 0
    capsys.readouterr()
    assert exit_code("inspect", target, "--json") == 0
    assert exit_code(*words, "--part", "1/3") == 2
    assert "exists" in capsys.readouterr().err


@pytest.mark.parametrize("direction", ["hf-to-mcore moe"])
def test_a_part_that_is_done_stays(plan: Plan, tmp_path: Path) -> None:
    first, again = (write_part(plan, tmp_path / "parts", Part(0, 2)) for _ in range(2))
    assert first.resumed_units == 0
    assert again.resumed_units == again.units == first.units > 0
    assert again.missing == (Part(1, 2),)


@pytest.mark.parametrize("direction", ["hf-to-mcore dense"])
def test_a_part_without_work_is_awaited(
    plan: Plan, expected: dict[str, str], tmp_path: Path
) -> None:
    """Otherwise it would find the target there, and fail."""
    target, count = tmp_path / "parts", len(plan().units) + 1
    for index in range(count - 1):
        assert write_part(plan, target, Part(index, count)).published is None
    last = write_part(plan, target, Part(count - 1, count))
    assert (last.units, last.missing) == (0, ())
    assert tree_digests(target) == expected


@pytest.mark.parametrize("direction", BOTH)
def test_a_file_that_is_lost_is_made_again(
    plan: Plan, expected: dict[str, str], tmp_path: Path
) -> None:
    target = tmp_path / "parts"
    write_part(plan, target, Part(0, 2))
    done = json.loads((tmp_path / ".parts.incomplete/journal").read_bytes().splitlines()[1])
    name = done["unit"].split(":")[0]
    (lost,) = (tmp_path / ".parts.incomplete/tree").rglob(name)
    lost.unlink()
    assert write_part(plan, target, Part(1, 2)).missing == (Part(0, 2),)
    again = write_part(plan, target, Part(0, 2))
    assert again.resumed_units < again.units
    assert tree_digests(target) == expected


@pytest.mark.parametrize("direction", ["hf-to-mcore dense"])
def test_the_same_part_twice_at_once_is_refused(
    plan: Plan, expected: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(part_staging, "_PATIENCE", 0.2)
    target, here = tmp_path / "parts", tmp_path / "here"

    def wait(*_: object) -> None:
        here.touch()
        while not (tmp_path / "go").exists():
            time.sleep(0.01)

    first = started(lambda: write_part(plan, target, Part(0, 2), progress=wait))
    while not here.exists():
        time.sleep(0.01)
    with pytest.raises(BadInput, match=r"Another process is doing part 0/2 of .*Wait for it"):
        write_part(plan, target, Part(0, 2))
    with pytest.raises(BadInput, match=r"holds parts of a conversion to .*delete it"):
        write(plan, target)
    assert write_part(plan, target, Part(1, 2)).missing == (Part(0, 2),)
    (tmp_path / "go").touch()
    assert ended(first) == 0
    assert tree_digests(target) == expected


@pytest.mark.parametrize("direction", ["hf-to-mcore dense"])
def test_a_part_while_one_process_converts_all_is_refused(
    plan: Plan, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(part_staging, "_PATIENCE", 0.2)
    target = tmp_path / "target"

    def during(*_: object) -> None:
        with pytest.raises(BadInput, match=r"Another process is writing .*, without --part"):
            write_part(plan, target, Part(0, 2))

    def run() -> None:
        write(plan, target, workers=1, progress=during)

    assert ended(started(run)) == 0
    assert target.exists()


@pytest.mark.parametrize("direction", ["hf-to-mcore moe"])
def test_parts_go_on_with_what_one_process_left(
    plan: Plan, expected: dict[str, str], tmp_path: Path
) -> None:
    target = tmp_path / "target"
    killed = functools.partial(write, plan, target, workers=1, progress=die_in_the_middle)
    assert ended(started(killed)) == -signal.SIGKILL
    results = [write_part(plan, target, Part(index, 2)) for index in range(2)]
    assert sum(part.resumed_units for part in results) > 1
    assert tree_digests(target) == expected


def work_in(folder: Path) -> dict[str, str]:
    digests = tree_digests(folder / ".parts.incomplete")
    return {name: digest for name, digest in digests.items() if not name.endswith(".lock")}


def test_parts_of_other_work_are_refused(tiny: Tiny, tmp_path: Path) -> None:
    """The message names what differs and the remedy; what is done stays as it was."""
    source, target = copy(tiny("dense"), tmp_path / "source"), tmp_path / "parts"
    do = functools.partial(functools.partial, plan_hf_to_mcore)
    write_part(do(source), target, Part(0, 4))
    before = work_in(tmp_path)
    other = copy(tiny("dense"), tmp_path / "other")
    weights = next(source.glob("*.safetensors"))
    remedy = "Give every part the same source and flags, or delete .*incomplete and begin anew"

    def refused(name: str, plan: Plan, index: str = "1/4", **flags: Any) -> None:
        with pytest.raises(BadInput, match=f"which differs in {name}.*{remedy}"):
            write_part(plan, target, Part.parse(index), **flags)
        assert work_in(tmp_path) == before

    refused("the number of parts: 4 there, 7 here", do(source), "1/7")
    refused('--dtype: "keep" there, "bf16" here', do(source, dtype="bf16"))
    refused("the source", do(other))
    refused("the rows of the padded vocabulary", do(source, make_vocab_size_divisible_by=1000))
    refused("--dialect", do(source, dialect="megatron-bridge"))
    refused("--strict: false there, true here", do(source), strict=True)
    refused("the direction", functools.partial(plan_hf_to_hf, source))
    os.utime(weights, ns=(1, 1))
    refused(f"size and time of the source's {weights.name}", do(source))


def test_an_export_with_other_shards_is_refused(tiny: Tiny, tmp_path: Path) -> None:
    hf_to_mcore(tiny("moe"), tmp_path / "mcore")
    do = functools.partial(functools.partial, plan_mcore_to_hf, tmp_path / "mcore")
    write_part(do(max_shard_size=SHARDS), tmp_path / "parts", Part(0, 2))
    for name, flags in {
        "--max-shard-size, in bytes: 50000 there, 60000 here": {"max_shard_size": "60KB"},
        "the layout": {"max_shard_size": SHARDS, "expert_layout": "v5"},
    }.items():
        with pytest.raises(BadInput, match=f"which differs in {name}"):
            write_part(do(**flags), tmp_path / "parts", Part(1, 2))


@pytest.mark.parametrize("part", ["4/4", "-1/4", "1", "a/b"])
def test_no_such_part(
    tiny: Tiny, tmp_path: Path, part: str, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["convert", "hf-to-mcore", tiny("dense"), tmp_path / "parts", f"--part={part}"]
    assert exit_code(*words) == 2
    assert "the index of a part and their number" in " ".join(capsys.readouterr().err.split())
    assert not (tmp_path / ".parts.incomplete").exists()


def test_a_dry_run_of_a_part_is_refused(
    tiny: Tiny, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["convert", "hf-to-mcore", tiny("dense"), tmp_path / "parts", "--part", "0/2"]
    assert exit_code(*words, "--dry-run") == 2
    assert "leave --part out" in capsys.readouterr().err


@pytest.mark.parametrize("direction", ["mcore-to-hf dense"])
def test_force_replaces_only_when_all_parts_are_done(
    plan: Plan, expected: dict[str, str], tmp_path: Path
) -> None:
    target = tmp_path / "parts"
    shutil.copytree(plan().source, target)
    old = tree_digests(target)
    with pytest.raises(BadInput, match="exists"):
        write_part(plan, target, Part(0, 2))
    done: list[PartResult] = []
    for index in range(2):
        assert tree_digests(target) == old
        done.append(write_part(plan, target, Part(index, 2), force=True))
    assert tree_digests(target) == expected


def test_strict_parts_write_nothing(tiny: Tiny, tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    source, target = copy(tiny("dense"), tmp_path / "source"), tmp_path / "parts"
    weights = next(source.glob("*.safetensors"))
    tensors = load_file(weights)
    name = next(iter(tensors))
    tensors[name].view(-1)[0] = float("nan")
    save_file(tensors, weights, metadata={"format": "pt"})
    plan = functools.partial(plan_hf_to_mcore, source)
    (index,) = (
        n % 2
        for n, unit in enumerate(plan().units)
        if any(source.name == name for row in unit.work for source in row.sources)
    )
    with pytest.raises(CheckFailed, match=rf"{name}\. .*parts will not be written: delete .*"):
        write_part(plan, target, Part(index, 2), strict=True)
    other = write_part(plan, target, Part(1 - index, 2), strict=True)
    assert other.missing == (Part(index, 2),)
    assert not target.exists()


@pytest.mark.parametrize("direction", BOTH)
def test_both_directions_are_the_inverse(plan: Plan, tiny: Tiny, tmp_path: Path) -> None:
    """Parts one way, one process the other way, give the source's tensors."""
    from safetensors.torch import load_file

    for index in range(2):
        write_part(plan, tmp_path / "parts", Part(index, 2))
    back = tmp_path / "parts"
    if plan().direction == "hf-to-mcore":
        mcore_to_hf(back, back := tmp_path / "back")
    made = {k: v for f in back.glob("*.safetensors") for k, v in load_file(f).items()}
    source = {k: v for f in tiny("moe").glob("*.safetensors") for k, v in load_file(f).items()}
    assert made.keys() == source.keys()
    assert all(made[name].equal(source[name]) for name in source)
