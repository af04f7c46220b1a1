"""Functions of the user's own, such as a loss, which a flag or a mixture file names.

``module:function`` names a module that is installed or lies in a folder of ``PYTHONPATH``, and
``folder/file.py:function`` a file, by its path. A module is not looked for in the current folder,
where anything that somebody has downloaded may lie.
"""

from __future__ import annotations

import importlib
import inspect
import sys
import zlib
from collections.abc import Callable, Sequence
from functools import cache
from importlib.util import module_from_spec, spec_from_file_location
from operator import attrgetter
from pathlib import Path
from types import ModuleType
from typing import Any

from mcore_qwen3vl.errors import BadInput

RULE = "module:function, with a module that is installed or on PYTHONPATH, or file.py:function"


@cache
def find_function(name: str, *arguments: str) -> Callable[..., Any]:
    """Return the function that a `name` with a colon stands for.

    Args:
        name: the function, see the module.
        arguments: names, for the message, of what it will be called with, by position; none: the
            function takes what it likes.

    Raises:
        BadInput: there is none, its module cannot be imported, it is no function, or it does not
            take these arguments. The message begins with the name.
    """
    module, _, attribute = name.rpartition(":")
    try:
        found = attrgetter(attribute)(_load(module))
    except Exception as error:  # importing runs the user's code, which may raise anything
        reason = " ".join(str(error).split())
        raise BadInput(
            f"{name} cannot be imported: {type(error).__name__}: {reason}. {_remedy(name, module)}"
        ) from error
    if not callable(found):
        raise BadInput(f"{name} is of type {type(found).__name__}, and no function.")
    function: Callable[..., Any] = found
    if arguments:
        _require_arguments(name, function, arguments)
    return function


def _require_arguments(name: str, function: Callable[..., Any], arguments: Sequence[str]) -> None:
    """Raise BadInput unless `function` can be called with so many arguments."""
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):  # of a function in C, which does not tell
        return
    try:
        signature.bind(*arguments)
    except TypeError as error:
        wanted = ", ".join(arguments)
        raise BadInput(
            f"{name} is called as f({wanted}), and it is defined as f{signature}: {error}. Define "
            f"it as f({wanted}); other parameters need defaults."
        ) from None


def at_folder(name: str, folder: Path) -> str:
    """Return the name with the path of its file, if it has one, begun at `folder`."""
    file, colon, attribute = name.rpartition(":")
    return f"{folder / file}:{attribute}" if colon and file.endswith(".py") else name


def _load(module: str) -> ModuleType:
    return _load_file(Path(module)) if module.endswith(".py") else importlib.import_module(module)


def _load_file(file: Path) -> ModuleType:
    """Import a file as a module whose name no other has, once."""
    place = str(file.absolute())
    name = f"{file.stem}_{zlib.crc32(place.encode()):08x}"
    if name not in sys.modules:
        spec = spec_from_file_location(name, place)
        assert spec is not None
        assert spec.loader is not None
        sys.modules[name] = module = module_from_spec(spec)
        try:
            spec.loader.exec_module(module)
        except BaseException:
            del sys.modules[name]
            raise
    return sys.modules[name]


def _remedy(name: str, module: str) -> str:
    here = Path(f"{module.replace('.', '/')}.py")
    if module and not module.endswith(".py") and here.is_file():
        _, _, attribute = name.rpartition(":")
        return (
            f"{here} lies in the current folder, where no module is looked for: name it "
            f"{here}:{attribute}, or set PYTHONPATH=. ."
        )
    return f"Name it {RULE}."
