"""The mixture file: data sets, each with its weight and how its records are read.


.. code-block:: yaml

    datasets:
      - path: llava/train.json        # relative to this file
        name: llava                   # in the log; else the path as it is written here
        weight: 0.7                   # or epochs: 2, for all data sets
        media: /data/images           # where relative paths of media start
        preprocess: my_hooks:convert  # or format: conversations
        system: You are brief.
        train_on: last                # all, last, or a regular expression
        max_samples: 100000
        image_max_tokens: 512         # any budget of training
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
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
_OWN: dict[str, type] = {
    "path": str,
    "name": str,
    "weight": float,
    "epochs": float,
    "media": str,
    "max_samples": int,
}


def is_mixture(path: Path) -> bool:
    """Return whether `path` is a mixture file, rather than data or an energon metadataset.

    Raises:
        BadInput: `path` ends in ``.yaml`` or ``.yml`` but is not YAML.
    """
    if path.suffix not in (".yaml", ".yml") or not path.is_file():
        return False
    content = _content(path)
    return isinstance(content, Mapping) and "datasets" in content


def read_mixture(path: Path) -> list[Source]:
    """Read the data sets of a mixture file.

    Raises:
        BadInput: an entry is malformed; the message names it and the key.
    """
    content = _content(path)
    entries = content["datasets"]
    if other := sorted(set(content) - {"datasets"}):
        raise BadInput(f"{path}: unknown key {other[0]!r}; the only key is datasets.")
    if not isinstance(entries, list) or not entries:
        raise BadInput(f"{path}: datasets must be a list with at least one entry.")
    return [_source(entry, f"{path}: data set {i + 1}", path) for i, entry in enumerate(entries)]


def _content(path: Path) -> Any:
    try:
        return yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, yaml.YAMLError, RecursionError) as error:
        raise BadInput(f"{path} cannot be read as YAML: {' '.join(str(error).split())}") from error


def _source(entry: Any, where: str, file: Path) -> Source:
    if not isinstance(entry, Mapping) or "path" not in entry:
        raise BadInput(f"{where} must be an object with a path.")
    budgets = {name: _number(kind) for name, kind in get_type_hints(MediaLimits).items()}
    kinds = {**_OWN, **dict.fromkeys(_TEXTS, str), **budgets}
    values = {key: _checked(entry[key], kinds.get(key), where, key, kinds) for key in entry}
    if "weight" in values and "epochs" in values:
        raise BadInput(f"{where} has both weight and epochs; keep one of them.")
    if values.get("format") is not None:
        _check_format(values["format"], where)
    if "preprocess" in values and "format" in values:
        raise BadInput(
            f"{where} has both preprocess and format; keep one of them. The keys of the hook's "
            "records show their format."
        )
    here = file.absolute().parent
    return Source(
        path=here / values["path"],
        weight=values.get("weight", 1.0),
        epochs=values.get("epochs"),
        reading=Reading(**{key: values[key] for key in _TEXTS if key in values}),
        media_root=here / values["media"] if "media" in values else None,
        limits=MediaLimits(
            **{f.name: values[f.name] for f in fields(MediaLimits) if f.name in values}
        ),
        max_samples=values.get("max_samples"),
        name=values.get("name", values["path"]),
    )


def _number(hint: Any) -> type:
    return float if hint == float | None else int


def _checked(value: Any, kind: type | None, where: str, key: str, known: Mapping[str, type]) -> Any:
    if kind is None:
        raise BadInput(f"{where}: unknown key {key!r}; the known keys are {', '.join(known)}.")
    accepted = (int, float) if kind is float else (kind,)
    if not isinstance(value, accepted) or isinstance(value, bool):
        raise BadInput(f"{where}: {key} is {value!r:.60}; {kind.__name__} is needed.")
    if isinstance(value, int | float) and value <= 0:
        raise BadInput(f"{where}: {key} is {value!r}; it must be above 0.")
    return value


def _check_format(name: str, where: str) -> None:
    from mcore_qwen3vl.data.records.parse import FORMATS

    names = [one.name for one in FORMATS]
    if name not in names:
        raise BadInput(f"{where}: format is {name!r}; the formats are {', '.join(names)}.")
