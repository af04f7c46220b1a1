"""Unpickle only what an allow-list admits, in memory and time proportional to the data.

`pickle.Unpickler` calls nothing that `find_class` refuses, but a few bytes can still make it
reserve gigabytes (a memo index, a byte array's length), hash shared nested tuples forever, or
change the attributes of an admitted class. The unpickler written in Python keeps its memo in a
dictionary, and a subclass can refuse each of the others.

Where Megatron or torch itself calls ``torch.load(weights_only=True)``, a hostile file runs no code
either, but may fill the memory or take hours until it is refused.
"""

from __future__ import annotations

import io
import pickle
import re
import struct
from collections import OrderedDict
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, ClassVar

from mcore_qwen3vl.errors import BadInput


class Record:
    """An inert stand-in for one instance of a class named in the pickle."""

    def __init__(self, *args: Any) -> None:
        self.args = args
        self.state: Any = None

    def __setstate__(self, state: Any) -> None:
        self.state = state

    def __getitem__(self, name: str) -> Any:
        if not isinstance(self.state, dict) or name not in self.state:
            raise pickle.UnpicklingError(f"no field {name}")
        return self.state[name]


class Refused(Exception):
    """The pickle names something outside the allow-list: its module and name."""


KEYS = (str, int, Record)
"""Types allowed as dictionary keys and set members, since their hashes are cheap."""

FAILURES = (
    *(pickle.UnpicklingError, LookupError, TypeError, ValueError, EOFError, AttributeError),
    *(OverflowError, MemoryError, RuntimeError, AssertionError),
    struct.error,
)
"""The exceptions that reading a damaged pickle may raise."""

PYTHONS: Any = pickle._Unpickler
"""The unpickler written in Python; `pickle.Unpickler` is the one written in C."""


class RestrictedUnpickler(PYTHONS):
    """A base class; override `find_class` and, where needed, ``persistent_load``.

    ``load`` raises one of `FAILURES` on damaged data, and whatever the overrides raise.
    """

    stack: list[Any]
    dispatch: ClassVar[dict[int, Callable[..., None]]] = dict(PYTHONS.dispatch)

    def __init__(self, data: bytes) -> None:
        super().__init__(io.BytesIO(data))

    def find_class(self, module: str, name: str) -> Any:
        raise Refused(f"{module}.{name}")

    def load_setitem(self) -> None:
        _check_keys(self.stack[-2:-1])
        PYTHONS.load_setitem(self)

    def load_setitems(self) -> None:
        _check_keys(self.stack[::2])
        PYTHONS.load_setitems(self)

    def load_additems(self) -> None:
        _check_keys(self.stack)
        PYTHONS.load_additems(self)

    def load_build(self) -> None:
        if not isinstance(self.stack[-2], Record):
            raise pickle.UnpicklingError("state for something that has none")
        PYTHONS.load_build(self)

    def refuse(self) -> None:
        raise pickle.UnpicklingError("an instruction that no checkpoint uses")

    dispatch[pickle.SETITEM[0]] = load_setitem
    dispatch[pickle.SETITEMS[0]] = load_setitems
    dispatch[pickle.ADDITEMS[0]] = load_additems
    dispatch[pickle.BUILD[0]] = load_build
    for _code in (
        *(pickle.BYTEARRAY8, pickle.DICT, pickle.FROZENSET, pickle.INST, pickle.OBJ),
        *(pickle.EXT1, pickle.EXT2, pickle.EXT4, pickle.NEXT_BUFFER, pickle.READONLY_BUFFER),
    ):
        dispatch[_code[0]] = refuse


def make_set(members: list[Any] | None = None) -> set[Any]:
    """Make a set for a pickle; empty `members`, lest the pickle copy one list many times."""
    if members is None:
        return set()
    _check_keys(members)
    made = set(members)
    members.clear()
    return made


def make_ordered_dict() -> OrderedDict[Any, Any]:
    """Make an empty `OrderedDict` for a pickle, which sets the items afterwards."""
    return OrderedDict()


def make_tuple(members: tuple[Any, ...] = ()) -> tuple[Any, ...]:
    """Stand in for ``torch.Size`` in a pickle; return `members` itself, without a copy."""
    if not isinstance(members, tuple):
        raise pickle.UnpicklingError(f"a {type(members).__name__} as a size")
    return members


def reconstruct(cls: Callable[[], Any], *_: Any) -> Any:
    """Stand in for ``copyreg._reconstructor`` in a pickle, for admitted classes."""
    return cls()


def _check_keys(keys: Iterable[Any]) -> None:
    for key in keys:
        if not isinstance(key, KEYS):
            raise pickle.UnpicklingError(f"a {type(key).__name__} as key")


_NAMED = re.compile(r"GLOBAL (\S+)")


def refused_by_torch(place: str | Path, error: pickle.UnpicklingError) -> BadInput:
    """Turn an error of ``torch.load(weights_only=True)`` into BadInput, without its long advice."""
    if named := _NAMED.search(str(error)):
        return BadInput(
            f"{place} asks for {named[1]}, which has no place in a checkpoint. Refused: loading it "
            "could run code. Do not use this checkpoint with a tool that would."
        )
    return BadInput(f"{place} is damaged, or torch did not write it. Copy it again.")
