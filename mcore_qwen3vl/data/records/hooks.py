"""Functions of the user's, from a record of any shape to one of ours."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from functools import cache
from importlib.metadata import entry_points
from typing import Any

from mcore_qwen3vl.errors import BadInput

GROUP = "mcore_qwen3vl.preprocess"
"""Of entry points of packages that bring a hook."""

Hook = Callable[[Any], Any]


@cache
def find_hook(name: str) -> Hook:
    """A function by its name, ``module:function``, or by that of an entry point of :data:`GROUP`.

    Raises:
        BadInput: there is none.
    """
    module, colon, function = name.partition(":")
    entry = next((e for e in entry_points(group=GROUP) if e.name == name), None)
    try:
        if entry is not None:
            found = entry.load()
        elif colon:
            found = getattr(importlib.import_module(module), function)
        else:
            raise ImportError("no installed package has an entry point of this name")
    except (ImportError, AttributeError, ValueError) as error:
        raise BadInput(
            f"The hook {name!r} cannot be imported: {error}. Name it module:function, with the "
            "module on PYTHONPATH."
        ) from error
    if not callable(found):
        raise BadInput(f"The hook {name!r} is a {type(found).__name__}, not a function.")
    return found
