"""The files that prepare data: tokenizer, processors, chat template."""

from __future__ import annotations

from pathlib import Path

from mcore_qwen3vl.errors import BadInput
from mcore_qwen3vl.files import parse_json, refuse_special_files

_ANY = {
    "tokenizer": (("tokenizer.json",), ("vocab.json", "merges.txt")),
    "image processor": (("preprocessor_config.json",), ("processor_config.json",)),
    "video processor": (("video_preprocessor_config.json",), ("processor_config.json",)),
    "chat template": (("chat_template.jinja",), ("chat_template.json",)),
}
"""What is needed, and the sets of files that each provide it; the set on the hub comes first."""

_TEMPLATE_INSIDE = ("tokenizer_config.json", "processor_config.json")


def sentence(folder: Path) -> str | None:
    """Return a sentence on what `folder` lacks and the remedy, or None if it lacks nothing."""
    lacking: dict[str, tuple[str, ...]] = {}
    for what, choices in _ANY.items():
        there = any(all((folder / name).is_file() for name in files) for files in choices)
        if what == "chat template":
            there = there or any(_has_template(folder / name) for name in _TEMPLATE_INSIDE)
        if not there:
            lacking[what] = choices[0]
    if not lacking:
        return None
    files = dict.fromkeys(name for names in lacking.values() for name in names)
    if "tokenizer" in lacking:
        files["tokenizer_config.json"] = None
    return (
        f"There is no {' and no '.join(lacking)} in {folder}, without which no data can be "
        f"prepared: copy {', '.join(files)} of the model's repository there."
    )


def require(folder: Path) -> None:
    """Raise BadInput if `folder` lacks one of these files, or holds a special file."""
    refuse_special_files(folder)
    if said := sentence(folder):
        raise BadInput(said)


def _has_template(file: Path) -> bool:
    try:
        return bool(parse_json(file.read_text(encoding="utf-8")).get("chat_template"))
    except (OSError, ValueError, AttributeError):
        return False


def notes(folder: Path) -> tuple[str, ...]:
    """Return a conversion's note on missing processor files; empty if none are missing."""
    lacking = sentence(folder)
    return (f"Weights and config are converted. {lacking}",) if lacking else ()
