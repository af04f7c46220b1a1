"""Energon's indexes, made on first use, once, however many ranks arrive at the same time."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stdout
from pathlib import Path

from filelock import FileLock, Timeout
from megatron.energon.epathlib import EPath
from megatron.energon.flavors import BaseWebdatasetFactory
from megatron.energon.flavors.jsonl.ijsonl import IJsonlIndexReader, IJsonlIndexWriter

from mcore_qwen3vl.errors import BadInput

_PATIENCE = 3600.0  # seconds that other ranks wait for the one that indexes
_CRUDE = "__module__: megatron.energon\n__class__: CrudeWebdataset\n"


def ensure_index(path: Path) -> None:
    """Make the index of a JSONL file, or of a folder of WebDataset tars, unless it is up to date.

    Args:
        path: a ``.jsonl`` file, a folder of ``.tar`` files, or an energon metadataset ``.yaml``,
            whose own data sets must be JSONL or indexed already.

    Raises:
        BadInput: nothing is there, or it is empty, or the index cannot be written.
    """
    if not path.exists():
        raise BadInput(f"The data set {path} does not exist; check the path.")
    if path.suffix == ".jsonl":
        _ensure(path, path.with_name(path.name + ".idx.lock"), _jsonl_is_indexed, _index_jsonl)
    elif path.is_dir():
        _ensure(path, path / ".energon.lock", _tars_are_indexed, _index_tars)
    elif path.suffix not in (".yaml", ".yml"):
        raise BadInput(
            f"{path} is no data set: a .jsonl file, a folder of WebDataset .tar files or an "
            "energon metadataset .yaml is needed."
        )


def _ensure(path: Path, lock: Path, is_indexed, index) -> None:  # type: ignore[no-untyped-def]
    if is_indexed(path):
        return
    with _locked(path, lock):
        if not is_indexed(path):  # another rank may have done it meanwhile
            index(path)


@contextmanager
def _locked(path: Path, lock: Path) -> Iterator[None]:
    try:
        with FileLock(lock, timeout=_PATIENCE):
            yield
    except Timeout:
        raise BadInput(
            f"Waited {_PATIENCE:.0f} s for another process to index {path}. If none is running, "
            f"remove {lock}."
        ) from None
    except OSError as error:
        raise BadInput(
            f"The index of {path} cannot be written beside it: {error.strerror}. Make its folder "
            "writable, or link the data from one that is."
        ) from error


def _jsonl_is_indexed(path: Path) -> bool:
    index = path.with_name(path.name + ".idx")
    return (
        index.exists()
        and index.stat().st_mtime_ns >= path.stat().st_mtime_ns
        and IJsonlIndexReader.size(EPath(path)) == path.stat().st_size
    )


def _index_jsonl(path: Path) -> None:
    """Energon's own preparation refuses a file for one broken line; here it is a bad sample."""
    with path.open("rb") as lines, IJsonlIndexWriter(EPath(path)) as index:
        start = end = 0
        for line in lines:
            end += len(line)
            if line.strip():  # blank lines go with the sample before or after them
                index.append(start)
                start = end
        if start == 0:
            raise BadInput(f"The data set {path} is empty.")
        index.append(end)


def _tars_are_indexed(path: Path) -> bool:
    return (path / ".nv-meta" / "dataset.yaml").exists()


def _index_tars(path: Path) -> None:
    tars = sorted(str(tar.relative_to(path)) for tar in path.rglob("*.tar"))
    if not tars:
        raise BadInput(f"{path} holds neither .tar files nor an energon index (.nv-meta).")
    with redirect_stdout(sys.stderr):  # a command's own output may be JSON
        BaseWebdatasetFactory.prepare_dataset(
            path, tars, split_parts_ratio=[("train", 1.0)], workers=min(8, len(tars))
        )
    # Last: whoever finds this file finds the rest complete.
    (path / ".nv-meta" / "dataset.yaml").write_text(_CRUDE, encoding="utf-8")
