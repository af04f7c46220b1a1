"""The small files beside the weights: config, tokenizer, processor, chat template and the rest.

One of them is the record of a checkpoint's form, in the ``hf`` folder of a Megatron checkpoint:
neither the config nor Megatron's tensors tell names and head of what was converted. A checkpoint in
transformers' own form has no record.
"""

from __future__ import annotations

import hashlib
import json
import re
from pathlib import Path
from typing import TYPE_CHECKING

from mcore_qwen3vl.config import read_config_file, states_vision
from mcore_qwen3vl.converters.identify import INDEX
from mcore_qwen3vl.converters.mapping.forms import (
    CLASSIFIER,
    HEADS,
    NAMES,
    Form,
    HeadForm,
    names_in_transformers,
)
from mcore_qwen3vl.converters.storage.staging import write_durably
from mcore_qwen3vl.errors import BadInput
from mcore_qwen3vl.files import refuse_links_out, refuse_special_files
from mcore_qwen3vl.json_and_yaml import parse_json
from mcore_qwen3vl.unused.fields import Unused

if TYPE_CHECKING:
    from mcore_qwen3vl.converters.hf.config_file import Changes

LARGEST = 256 * 2**20
"""Largest size of a companion file, in bytes."""

FORM_FILE = "checkpoint_form.json"
WEIGHTS = (".safetensors", ".bin", ".pt", ".pth", ".gguf", ".onnx", ".h5", ".msgpack", ".distcp")
MEGATRON = re.compile(r"iter_\d+|latest_checkpointed_iteration\.txt")
"""Names of the Megatron checkpoint that ms-swift saves in the folder of Hugging Face weights."""


def companion_files(path: Path) -> dict[str, Path]:
    """Return every small file of an HF checkpoint that is not weights, by relative path.

    Left out are weights, their index, the record of their form, files over `LARGEST`, hidden
    directories (``.git``, ``.cache``) and a Megatron checkpoint in the same folder. A link to a
    file counts as the file, since the Hugging Face cache stores files as links; a link to a
    directory is not followed.

    Raises:
        BadInput: a file is a link that leads out of the checkpoint.
    """
    files = [
        file
        for file in _files_below(path)
        if file.name not in (INDEX, FORM_FILE) and file.suffix not in WEIGHTS and _is_small(file)
    ]
    refuse_links_out(files, path)
    return {str(file.relative_to(path)): file for file in files}


def unused_files(path: Path) -> list[Unused]:
    """Return the files of an HF checkpoint that are neither read nor copied.

    They are weights in other formats and states of training, files over `LARGEST`, and links to
    folders. The safetensors files of the folder itself are judged by
    :func:`.hf_checkpoint.unread_files`.
    """
    unused = {}
    for file in _files_below(path):
        if file.is_dir():
            unused[file] = "a link to a folder"
        elif file.suffix in WEIGHTS and (file.suffix != ".safetensors" or file.parent != path):
            unused[file] = "weights or state that is not read, nor copied"
        elif file.suffix not in WEIGHTS and not _is_small(file):
            unused[file] = f"larger than {LARGEST // 2**20} MiB, so it is not copied"
    return [
        Unused("the model's folder", str(file.relative_to(path)), why)
        for file, why in unused.items()
    ]


def _files_below(path: Path) -> list[Path]:
    """Return the files below `path`, sorted, and links to folders, without what is left out."""
    below = []
    for folder, folders, files in path.walk():
        folders[:] = [n for n in folders if not (n.startswith(".") or MEGATRON.fullmatch(n))]
        links = [name for name in folders if (folder / name).is_symlink()]
        below += [folder / name for name in (*files, *links) if not MEGATRON.fullmatch(name)]
    return sorted(below)


def _is_small(file: Path) -> bool:
    return file.is_file() and file.stat().st_size <= LARGEST


def copy_companions(source: Path, target: Path, changes: Changes) -> None:
    """Copy the companion files in `source`, durably, to go beside converted weights in `target`.

    `changes` says how the weights in `target` differ from those of `source`, and which files do.

    Raises:
        BadInput: the config cannot be read.
        OSError: reading or writing failed.
    """
    config = changes.changed_config(read_config_file(source))
    changed = dict(changes.files) if config is None else {**changes.files, "config.json": config}
    for name, file in companion_files(source).items():
        copy = target / name
        copy.parent.mkdir(parents=True, exist_ok=True)
        write_durably(copy, changed.pop(name) if name in changed else file.read_bytes())
    for name, content in changed.items():
        write_durably(target / name, content)


def sha256_of(file: Path) -> str:
    """Return the SHA-256 of a file's content, in hexadecimal."""
    with file.open("rb") as handle:
        return hashlib.file_digest(handle, "sha256").hexdigest()


def write_form(folder: Path, form: Form) -> None:
    """Write the record into `folder`, durably, unless `form` needs none.

    Raises:
        OSError: writing failed.
    """
    if form == Form():
        return
    write_durably(folder / FORM_FILE, (json.dumps(form.record, indent=1) + "\n").encode())


def read_form(folder: Path) -> Form:
    """Return the form that the record in `folder` states; without a record, transformers' own.

    Its names depend on whether the config beside it has a vision tower.

    Raises:
        BadInput: the record is damaged.
    """
    file = folder / FORM_FILE
    if not file.is_file():
        return Form(names_in_transformers(has_vision=states_vision(folder)))
    try:
        content = parse_json(file.read_bytes())
        kind, labels, bias = content["head"], content["labels"], content["bias"]
        sound = kind in HEADS and type(labels) is int and type(bias) is bool
        if not sound or (labels > 0) != (kind == CLASSIFIER):
            raise ValueError(f"head {kind!r:.40}, labels {labels!r:.40}, bias {bias!r:.40}")
        split = content.get("split_experts", [])
        if not isinstance(split, list) or not all(isinstance(start, str) for start in split):
            raise ValueError(f"split_experts {split!r:.40}")
        return Form(NAMES[content["names"]], HeadForm(kind, labels, bias), tuple(split))
    except (OSError, ValueError, LookupError, TypeError) as error:
        raise BadInput(
            f"{file} does not say how the checkpoint's tensors are called ({error!r:.200}). "
            "Restore the file that was written with the checkpoint."
        ) from None


_PROCESSOR = {
    "tokenizer": (("tokenizer.json",), ("vocab.json", "merges.txt")),
    "image processor": (("preprocessor_config.json",), ("processor_config.json",)),
    "video processor": (("video_preprocessor_config.json",), ("processor_config.json",)),
    "chat template": (("chat_template.jinja",), ("chat_template.json",)),
}
"""What data needs, and the sets of files that each provide it; the set on the hub comes first."""


def lacking_processor_note(folder: Path) -> str | None:
    """Return a sentence on what `folder` lacks to prepare data, and the remedy; None if nothing.

    Raises:
        BadInput: its config cannot be read.
    """
    lacking: dict[str, tuple[str, ...]] = {}
    needed = _PROCESSOR.keys() if states_vision(folder) else ("tokenizer", "chat template")
    for what in needed:
        choices = _PROCESSOR[what]
        there = any(all((folder / name).is_file() for name in files) for files in choices)
        if what == "chat template":
            configs = (folder / "tokenizer_config.json", folder / "processor_config.json")
            there = there or any(map(_has_template, configs))
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


def require_processor(folder: Path) -> None:
    """Raise BadInput if `folder` lacks what prepares data, or holds a special file."""
    refuse_special_files(folder)
    if said := lacking_processor_note(folder):
        raise BadInput(said)


def _has_template(file: Path) -> bool:
    try:
        return bool(parse_json(file.read_text(encoding="utf-8")).get("chat_template"))
    except (OSError, ValueError, AttributeError):
        return False


def processor_notes(folder: Path) -> tuple[str, ...]:
    """Return a conversion's note on missing processor files; empty if none are missing."""
    lacking = lacking_processor_note(folder)
    return (f"Weights and config are converted. {lacking}",) if lacking else ()
