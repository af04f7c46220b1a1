"""Files from elsewhere: folders that hold what is no file, and JSON that is too deep to read."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from mcore_qwen3vl.errors import BadInput


def parse_json(text: str | bytes) -> Any:
    """
    Raises:
        ValueError: `text` is no JSON, or is nested more deeply than Python can read.
    """
    try:
        return json.loads(text)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None


def refuse_special_files(folder: Path) -> None:
    """Look at what lies in `folder`, not in the folders below it; nothing is opened.

    Raises:
        BadInput: it holds a pipe, a socket or a device, or a link to one. To open a pipe is to
            wait for a writer, and a device may have no end.
    """
    if not folder.is_dir():
        return
    with os.scandir(folder) as entries:
        for entry in entries:
            if not (entry.is_file() or entry.is_dir()) and os.path.exists(entry):
                raise BadInput(
                    f"{entry.path} is a pipe, a socket or a device, or a link to one, which has no "
                    "place in a checkpoint. Put the file itself there."
                )


def refuse_links_out(files: Iterable[Path], folder: Path) -> None:
    """Check files that will be copied: their content may be published with the converted model.

    Args:
        files: in `folder`, or below it.
        folder: a model. One in the Hugging Face cache keeps its files in ``blobs`` beside it.

    Raises:
        BadInput: one is a link to a file elsewhere.
    """
    inside = folder.resolve()
    if inside.parent.name == "snapshots":
        inside = inside.parent.parent
    for file in files:
        if not (found := file.resolve()).is_relative_to(inside):
            raise BadInput(
                f"{file} is a link to {found}, outside of the model, and would be copied with it. "
                f"If that is meant, name a folder with the files themselves: cp -rL {folder} NEW."
            )
