"""A guard against energon's settings files that name Python code, which energon would run."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, BinaryIO
from unittest import mock

from megatron.energon import dataset_config
from megatron.energon.eyaml import load_yaml

from mcore_qwen3vl.errors import BadInput

_OWN_MODULE = "megatron.energon"
_PYTHON_FILES = ("sample_loader", "part_filter")
"""Settings of a WebDataset that can name a function in a Python file beside it."""


@contextmanager
def code_refused(*, unless: bool) -> Iterator[None]:
    """Refuse metadatasets and WebDatasets that name code other than energon's classes.

    The check reads a file's content as energon's own parser returns it, before energon acts on it.

    Args:
        unless: True if the user trusts the data: nothing is refused.

    Raises (while energon loads files inside the block):
        BadInput: a file names code; the message gives the file and the line.
    """
    if unless:
        yield
        return
    with mock.patch.object(dataset_config, "load_yaml", _load_checked):
        yield


def _load_checked(stream: BinaryIO) -> Any:
    text = stream.read()
    content = load_yaml(text)
    for key, value in _named_code(content):
        lines = text.decode("utf-8", errors="replace").splitlines()
        line = next((n for n, one in enumerate(lines, 1) if key in one and value in one), 1)
        raise BadInput(
            f"{stream.name}:{line} names code to run: {key}: {value}. Refused; if you trust who "
            "wrote the data set, read that code and pass --trust-data."
        )
    return content


def _named_code(content: Any) -> Iterator[tuple[str, str]]:
    """Yield the keys and values that make energon import or run code that is not its own."""
    if isinstance(content, dict):
        for key, value in content.items():
            if (
                (key == "__module__" and value != _OWN_MODULE)
                or key == "__function__"
                or (key in _PYTHON_FILES and isinstance(value, str))
            ):
                yield key, str(value)
            yield from _named_code(value)
    elif isinstance(content, list):
        for value in content:
            yield from _named_code(value)
