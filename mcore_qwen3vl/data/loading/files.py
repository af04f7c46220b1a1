"""The files that a data set consists of, and how one state of them is told from another."""

from __future__ import annotations

import json
from pathlib import Path

_SUFFIXES = (".tar", ".parquet", ".arrow")
_NAMES = ("state.json", "dataset_dict.json")  # of Hugging Face datasets on disk


def fingerprint(path: Path) -> str:
    """Names, sizes and times of the files of a data set, which may be a file or a folder."""
    stats = [(str(file.relative_to(path.parent)), file.stat()) for file in _data_files(path)]
    return json.dumps([(name, stat.st_size, stat.st_mtime_ns) for name, stat in stats])


def _data_files(path: Path) -> list[Path]:
    """Not what lies beside them: indexes, scores, logs."""
    if not path.is_dir():
        return [path]
    return sorted(
        file
        for file in path.rglob("*")
        if (file.suffix in _SUFFIXES or file.name in _NAMES) and file.is_file()
    )
