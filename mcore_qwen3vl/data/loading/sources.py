"""The data sets that a command line or a mixture file names; docs/data.md shows such a file.

Imports nothing heavy.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, get_type_hints

import yaml

from mcore_qwen3vl.data.config import MediaLimits
from mcore_qwen3vl.data.records.reading import Reading
from mcore_qwen3vl.errors import BadInput


@dataclass(frozen=True)
class Source:
    """A data set, its weight in a blend, and how its records are read."""

    path: Path
    weight: float = 1.0
    epochs: float | None = None
    """How often the data set is read in an epoch of the blend; set for all data sets or none."""
    reading: Reading = field(default_factory=Reading)
    media_root: Path | None = None
    """Folder that relative paths of media start from; None: the data's own folder."""
    limits: MediaLimits = field(default_factory=MediaLimits)
    """Budgets of this data set; those that are set replace the run's."""
    max_samples: int | None = None
    """Number of samples to read, from the first; None: all."""
    name: str | None = None
    """Name of this data set's loss in the log; None: the path."""


_TEXTS = ("preprocess", "format", "system", "train_on")
_NUMBERS: dict[str, type] = {"weight": float, "epochs": float, "max_samples": int}
_BUDGETS: dict[str, type] = {
    name: float if hint == float | None else int
    for name, hint in get_type_hints(MediaLimits).items()
}
_OF_YAML = {"datasets", "splits", "__class__"}
"""Keys of a YAML file, one of which says that it is a mixture file or a metadataset."""
_KEYS = {**dict.fromkeys(("path", "name", "media", *_TEXTS), str), **_NUMBERS, **_BUDGETS}


def parse_sources(
    words: Sequence[str], preprocess: str | None = None, train_on: str | None = None
) -> list[Source]:
    """Read ``PATH`` or ``WEIGHT PATH WEIGHT PATH ...``, as in Megatron's ``--data-path``.

    A mixture file among the paths is replaced by its data sets, and `preprocess` and `train_on` are
    those of the data sets that name none.

    Raises:
        BadInput: numbers and paths do not alternate, or a mixture file is malformed.
    """
    weights, paths = (["1"], words) if len(words) == 1 else (words[0::2], words[1::2])
    try:
        numbers = [float(weight) for weight in weights]
    except ValueError:
        numbers = []
    if not words or len(numbers) != len(paths) or min(numbers) <= 0:
        raise BadInput(
            f"The data path {' '.join(words)!r} is neither one path nor positive weights and "
            "paths in turn, like '0.3 a.jsonl 0.7 b.jsonl'."
        )
    sources = [
        source
        for path, number in zip(paths, numbers, strict=True)
        for source in _expand_mixture(Path(path), number)
    ]
    if len({source.epochs is None for source in sources}) > 1:
        raise BadInput(
            "Some data sets have epochs and some have weights. Give all of them epochs, or all "
            "of them weights."
        )
    return [
        replace(source, reading=source.reading.with_defaults(preprocess, train_on))
        for source in sources
    ]


def source_names(sources: Sequence[Source]) -> tuple[str, ...]:
    """Return the name of each source in the log; nothing if all sources have the same name."""
    names = tuple(source.name or str(source.path) for source in sources)
    return names if len(set(names)) > 1 else ()


def require_data_set(path: Path) -> Path:
    """Return `path` if it exists."""
    if not path.exists():
        raise BadInput(f"The data set {path} does not exist; check the path.")
    return path


def _expand_mixture(path: Path, weight: float) -> list[Source]:
    """Return the data sets of `path`, if it is a mixture file and not data or a metadataset."""
    if path.suffix not in (".yaml", ".yml") or not path.is_file():
        return [Source(path, weight)]
    content = _content(path)
    # A file that names code, by a key such as __function__, is refused as such where it is loaded.
    if not isinstance(content, Mapping) or not any(
        key in _OF_YAML or str(key).startswith("__") for key in content
    ):
        raise BadInput(
            f"{path} is neither a mixture file, which has the key datasets, nor an energon "
            "metadataset, which has splits."
        )
    if "datasets" not in content:
        return [Source(path, weight)]
    sources = _mixture(content, path)
    total = sum(source.weight for source in sources)
    return [replace(source, weight=weight * source.weight / total) for source in sources]


def _content(path: Path) -> Any:
    try:
        return yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, yaml.YAMLError, RecursionError) as error:
        raise BadInput(f"{path} cannot be read as YAML: {' '.join(str(error).split())}") from error


def _mixture(content: Mapping[str, Any], path: Path) -> list[Source]:
    """Return the data sets in the content of a mixture file."""
    entries = content["datasets"]
    if other := sorted(set(content) - {"datasets"}):
        raise BadInput(f"{path}: unknown key {other[0]!r}; the only key is datasets.")
    if not isinstance(entries, list) or not entries:
        raise BadInput(f"{path}: datasets must be a list with at least one entry.")
    return [_source(entry, f"{path}: data set {i + 1}", path) for i, entry in enumerate(entries)]


def _source(entry: Any, where: str, file: Path) -> Source:
    if not isinstance(entry, Mapping) or "path" not in entry:
        raise BadInput(f"{where} must be an object with a path.")
    for key, value in entry.items():
        _check(key, value, where)
    if "weight" in entry and "epochs" in entry:
        raise BadInput(f"{where} has both weight and epochs; keep one of them.")
    if "format" in entry and (name := entry["format"]) not in (names := _formats()):
        raise BadInput(f"{where}: format is {name!r}; the formats are {', '.join(names)}.")
    if "preprocess" in entry and "format" in entry:
        raise BadInput(
            f"{where} has both preprocess and format; keep one of them. The keys of the hook's "
            "records show their format."
        )

    def values_of(keys: Iterable[str]) -> dict[str, Any]:
        return {key: entry[key] for key in keys if key in entry}

    here = file.absolute().parent
    if (inner := here / entry["path"]).suffix in (".yaml", ".yml") and inner.is_file():
        content = _content(inner)
        if isinstance(content, Mapping) and "datasets" in content:
            raise BadInput(
                f"{where} is a mixture file itself, {entry['path']}: write its data sets here."
            )
    return Source(
        here / entry["path"],
        reading=Reading(**values_of(_TEXTS)),
        media_root=here / entry["media"] if "media" in entry else None,
        limits=MediaLimits(**values_of(_BUDGETS)),
        name=entry.get("name", entry["path"]),
        **values_of(_NUMBERS),
    )


def _check(key: str, value: Any, where: str) -> None:
    kind = _KEYS.get(key)
    if kind is None:
        raise BadInput(f"{where}: unknown key {key!r}; the known keys are {', '.join(_KEYS)}.")
    accepted = (int, float) if kind is float else (kind,)
    if not isinstance(value, accepted) or isinstance(value, bool):
        raise BadInput(f"{where}: {key} is {value!r:.60}; {kind.__name__} is needed.")
    if isinstance(value, int | float) and value <= 0:
        raise BadInput(f"{where}: {key} is {value!r}; it must be above 0.")


def _formats() -> list[str]:
    from mcore_qwen3vl.data.records.parse import FORMATS

    return [form.name for form in FORMATS]
