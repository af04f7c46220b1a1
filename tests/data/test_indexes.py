"""Indexes of data sets are made once, in the cache, and read where energon has left them."""

from __future__ import annotations

import errno
import json
import multiprocessing
import os
import shutil
from collections.abc import Callable
from dataclasses import replace
from itertools import count
from pathlib import Path
from typing import Any

import pytest
from filelock import FileLock

from mcore_qwen3vl.data import indexes
from mcore_qwen3vl.data.indexes import ensure_index, index_beside
from mcore_qwen3vl.data.readers import json_arrays
from mcore_qwen3vl.errors import BadInput
from tests.data.conftest import WriteJsonl, chat, question, write_tar
from tests.data.loaders import PACKED, MakeLoader, lines, same
from tests.writes import kill_at


def index_at_once(path: str, barrier: Any, results: Any) -> None:
    """Index as a rank does; all ranks start at the same moment."""
    barrier.wait()
    index = json_arrays.index_of(ensure_index(Path(path)))
    results.put((index, index.stat().st_ino, index.stat().st_size))


def test_ranks_index_a_new_jsonl_at_once(write_jsonl: WriteJsonl) -> None:
    path = write_jsonl([question(i, image=False, words=200) for i in range(3000)])
    context = multiprocessing.get_context("fork")
    barrier, results = context.Barrier(4), context.Queue()
    ranks = [
        context.Process(target=index_at_once, args=(str(path), barrier, results))
        for _ in range(4)
    ]  # fmt: skip
    for rank in ranks:
        rank.start()
    found = {results.get(timeout=60) for _ in ranks}
    for rank in ranks:
        rank.join(60)
        assert rank.exitcode == 0
    # It was written once: if a second rank had written too, the inode would have changed.
    assert len(found) == 1
    assert found.pop()[2] == 8 * 3001


def test_index_is_made_anew_when_the_file_changes(
    make: MakeLoader, write_jsonl: WriteJsonl
) -> None:
    path = write_jsonl([question(i, image=False) for i in range(3)])
    assert lines(next(make(path))) == [0]
    path = write_jsonl([question(i, image=False) for i in range(9, 3, -1)])
    loader = make(path)
    assert sorted(lines(next(loader))[0] for _ in range(6)) == list(range(6))


def test_an_index_appears_after_the_blank_lines_are_counted(tmp_path: Path) -> None:
    """Whoever finds an index takes what is beside it, also after its writer was killed."""
    for number in count(1):
        path = tmp_path / str(number) / "blank.jsonl"
        path.parent.mkdir()
        path.write_text('\n{"a": 1}\n\n{"a": 2}\n')
        context = multiprocessing.get_context("fork")
        process = context.Process(target=killed_while_indexing, args=(path, number))
        process.start()
        process.join()
        if process.exitcode == 0:
            break
        index_beside(path)
        assert indexes.line_of(path, 1) == 4
    assert number > 2


def killed_while_indexing(path: Path, number: int) -> None:
    kill_at(path.parent, number)
    index_beside(path)


def test_blank_lines_are_no_samples(make: MakeLoader, tmp_path: Path) -> None:
    record = json.dumps(question(0, image=False))
    path = tmp_path / "blank.jsonl"
    path.write_text(f"\n\n{record}\n\n  \n{record}\n\n{record}")
    loader = make(path)
    # Lines keep their numbers in the file, here from 0.
    assert [lines(next(loader))[0] for _ in range(4)] == [2, 5, 7, 2]


@pytest.mark.parametrize(
    ("name", "content", "said"),
    [
        ("gone.jsonl", None, "does not exist"),
        ("empty.jsonl", "\n \n", "is empty"),
        ("data.txt", "x", "is not a data set"),
    ],
)
def test_unusable_paths_are_refused(
    name: str, content: str | None, said: str, make: MakeLoader, tmp_path: Path
) -> None:
    if content is not None:
        (tmp_path / name).write_text(content)
    with pytest.raises(BadInput, match=said):
        make(tmp_path / name)


@pytest.fixture
def _read_only(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Simulate a read-only disk, because root may write to a folder whatever its mode."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    acquire = FileLock.acquire

    def refuse(lock: FileLock, *args: Any, **options: Any) -> Any:
        if not Path(lock.lock_file).is_relative_to(tmp_path / "cache"):
            raise OSError(errno.EROFS, os.strerror(errno.EROFS))
        return acquire(lock, *args, **options)

    monkeypatch.setattr(FileLock, "acquire", refuse)


def one_tar(folder: Path, media: Path) -> Path:
    """Write a tar with a record whose image lies beside the tars."""
    talk = {**chat(("user", "<image>?"), ("assistant", "z")), "images": ["0.png"]}
    write_tar(folder / "inner" / "0.tar", [("a.json", json.dumps(talk).encode())])
    shutil.copy(media / "0.png", folder)
    return folder


def test_nothing_is_written_beside_the_data(
    make: MakeLoader,
    write_jsonl: WriteJsonl,
    media: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    records = [question(i) for i in range(6)]
    path = write_jsonl(["", *records])
    (tmp_path / "a.json").write_text(json.dumps(records))
    folder = one_tar(tmp_path / "tars", media)
    before = {*tmp_path.rglob("*")}
    for one in (path, tmp_path / "a.json", folder):
        next(make(one))
        next(make(one, config=replace(PACKED, balance=True)))
    batch = next(make(folder))
    assert batch.counts.images == 1  # found beside the tars, not beside their copy in the cache
    assert batch.names[0].startswith(f"{folder}/inner/0.tar")
    loader = make(write_jsonl([*records, question(7)]))  # the index follows the data
    assert sorted(lines(next(loader))[0] for _ in range(7)) == list(range(7))
    after = {one for one in tmp_path.rglob("*") if not one.is_relative_to(tmp_path / "cache")}
    assert after == before
    assert len([*(tmp_path / "cache").rglob("*.sizes")]) == 3


@pytest.mark.parametrize("name", ["a.jsonl", "a.json", "tars"])
def test_an_index_beside_the_data_is_read_and_kept(
    name: str, make: MakeLoader, media: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Earlier versions and energon's own preparation leave such an index."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    path = tmp_path / name
    if name == "tars":
        one_tar(path, media)
    else:
        path.write_text(json.dumps(question(0, image=False)))
    index_beside(path)
    assert ensure_index(path) == path
    next(make(path))
    cached = [file.name for file in (tmp_path / "cache").rglob("*") if file.is_file()]
    assert all(file.startswith("single-files-") for file in cached)
    assert len(cached) == (name == "tars")
    if name != "tars":
        index = json_arrays.index_of(path)
        stale = index.read_bytes()
        path.write_text(json.dumps(question(0, image=False, words=50)))
        next(make(path))
        assert ensure_index(path).is_relative_to(tmp_path / "cache")
        assert index.read_bytes() == stale


def test_a_run_is_resumed_with_another_cache(
    make: MakeLoader, records: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "one"))
    first = make(records, config=PACKED)
    next(first)
    state = first.state_dict()
    expected = [next(first) for _ in range(3)]
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "two"))
    resumed = make(records, config=PACKED)
    resumed.load_state_dict(state)
    assert all(same(next(resumed), batch) for batch in expected)
    assert len([*(tmp_path / "two").rglob("*.idx")]) == 1


@pytest.mark.usefixtures("_read_only")
def test_an_index_of_read_only_data_lies_in_the_cache(
    make: MakeLoader, write_jsonl: WriteJsonl, tmp_path: Path
) -> None:
    loader = make(write_jsonl([question(i) for i in range(6)]))
    assert [lines(next(loader))[0] for _ in range(6)] == list(range(6))
    energon = tmp_path / "energon.yaml"
    energon.write_text(
        "__module__: megatron.energon\n__class__: MetadatasetV2\n"
        "splits: {train: {path: data.jsonl}}\n"
    )
    with pytest.raises(BadInput, match=r"beside it, .*\(Read-only.*mixture file"):
        make(energon)


def test_no_place_for_an_index(
    make: MakeLoader, write_jsonl: WriteJsonl, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    (tmp_path / "cache").write_text("a file")
    with pytest.raises(BadInput, match=r"cannot be written in .*cache.*XDG_CACHE_HOME"):
        make(write_jsonl([question(0)]))


def test_a_name_that_leaves_no_room_for_that_of_its_index(
    write_jsonl: WriteJsonl, tmp_path: Path
) -> None:
    path = write_jsonl([question(0)]).rename(tmp_path / f"{'a' * 244}.jsonl")
    with pytest.raises(BadInput, match=r"has 250 bytes.*Give it a shorter name"):
        ensure_index(path)


@pytest.mark.parametrize(
    ("name", "content"), [("a.jsonl", "\n"), ("a.json", ""), ("b.json", "[1,"), ("c.json", "x")]
)
def test_what_cannot_be_indexed_is_named_where_it_really_is(
    name: str, content: str, tmp_path: Path
) -> None:
    (tmp_path / name).write_text(content)
    with pytest.raises(BadInput) as refused:
        ensure_index(tmp_path / name)
    assert str(tmp_path / name) in str(refused.value)


def test_folder_without_tars_is_refused(make: MakeLoader, tmp_path: Path) -> None:
    with pytest.raises(BadInput, match=f"{tmp_path} holds neither"):
        make(tmp_path)


def tar_of(path: Path, *members: str) -> Path:
    captions = (b"a caption" if name.endswith("txt") else name.encode() for name in members)
    return write_tar(path, zip(members, captions, strict=True))


@pytest.mark.parametrize(
    ("tars", "message"),
    [
        (
            {"0.tar": ["0.png", "1.png", "0.txt", "1.txt"]},
            r"0\.tar: the files of the sample 0 lie apart, 0\.txt after those of other samples\.",
        ),
        (
            {"0.tar": ["0.png", "0.txt"], "1.tar": ["1.txt", "0.txt"]},
            r"0\.tar and .*1\.tar both have a sample 0, and each needs a name of its own",
        ),
        ({"0.tar": ["0.txt"], "1.tar": []}, r"1\.tar holds no sample: move it out of the folder"),
    ],
)
def test_tars_that_cannot_be_indexed_say_what_is_wrong(
    tars: dict[str, list[str]], message: str, tmp_path: Path
) -> None:
    for name, members in tars.items():
        tar_of(tmp_path / "tars" / name, *members)
    with pytest.raises(BadInput, match=message):
        ensure_index(tmp_path / "tars")


@pytest.mark.parametrize("damage", [lambda tar: b"x" * len(tar), lambda tar: tar[:514]])
def test_a_tar_that_cannot_be_read_is_not_left_out(
    damage: Callable[[bytes], bytes], tmp_path: Path
) -> None:
    tar_of(tmp_path / "tars" / "0.tar", "0.txt")
    other = tar_of(tmp_path / "tars" / "1.tar", "1.txt", "2.txt")
    other.write_bytes(damage(other.read_bytes()))
    with pytest.raises(BadInput, match=r"1\.tar is damaged: "):
        ensure_index(tmp_path / "tars")
    tar_of(other, "1.txt", "2.txt")
    ensure_index(tmp_path / "tars")
