"""Command-line flags made of a dataclass's fields: one flag a field, on any argparse parser.

The annotation gives the type, the field's default the default, and its docstring the help. So a
setting is written once, and stands in ``--help``, in the check for misspelt flags, in the launch
scripts' check and in the Python interface alike. Megatron makes its own flags in the same way
(``megatron.training.argument_utils.ArgumentGroupFactory``), but needs seconds to be imported.

| annotation                     | flag                                                     |
|--------------------------------|----------------------------------------------------------|
| ``bool = False``               | ``--name``                                               |
| ``bool = True``                | ``--no-name``                                            |
| ``bool | None = None``         | ``--name`` and ``--no-name``; other flags decide without |
| ``int | None``, ``float``, ... | ``--name N``, ``--name X``                               |
| ``Literal["a", "b"] | None``   | ``--name {a,b}``                                         |
| ``tuple[int, ...]``            | ``--name N [N ...]``                                     |
| ``tuple[str, str] | None``     | two values                                               |
| ``Annotated[T, Flag(...)]``    | as ``T``, with the metavar or the older names of `Flag`  |
"""

from __future__ import annotations

import argparse
import ast
import inspect
from collections.abc import Collection, Mapping
from dataclasses import dataclass, fields, is_dataclass
from functools import cache
from itertools import pairwise
from pathlib import Path
from types import MappingProxyType
from typing import Annotated, Any, Literal, get_args, get_origin, get_type_hints

_METAVARS = {int: "N", float: "X", str: "TEXT"}


@dataclass(frozen=True)
class Flag:
    """What a field's annotation adds to its flag.

    Attributes:
        metavar: stands for the value in ``--help``; a tuple for as many values.
        aliases: further names, such as ``--dpo-beta``.
        name: the flag, if it is not called as the field is.
        nargs: argparse's number of values, if a list may be empty.
        last: whether it stands behind the other flags of its group in ``--help``.
    """

    metavar: str | tuple[str, ...] | None = None
    aliases: tuple[str, ...] = ()
    name: str | None = None
    nargs: str | None = None
    last: bool = False


Folder = Annotated[str, Flag("DIR")]
"""A directory, or a hub id where the field says so."""
File = Annotated[str, Flag("FILE")]
Name = Annotated[str, Flag("NAME")]


def flag_of(name: str) -> str:
    """Return the flag of the field or ``dest`` `name`."""
    return f"--{name.replace('_', '-')}"


def add_flags(
    group: argparse._ArgumentGroup,
    owner: type,
    *,
    leave_out: Collection[str] = (),
    undecided: Collection[str] = (),
    texts: Mapping[str, str] = MappingProxyType({}),
) -> None:
    """Add a flag for each field of a dataclass.

    Args:
        group: a group of the parser.
        owner: the dataclass.
        leave_out: names of fields that something else sets.
        undecided: names of switches that other flags decide where the command line says nothing;
            their default is None, whatever the field's is.
        texts: the help of fields whose docstring is not their help.
    """
    kinds, helps = get_type_hints(owner, include_extras=True), {**field_docs(owner), **texts}
    for field in fields(owner):
        if field.name not in leave_out:
            default = None if field.name in undecided else field.default
            text = helps.get(field.name, "")
            _add_flag(group, field.name, kinds[field.name], default, text)


def stands_last(owner: type) -> dict[str, bool]:
    """Return for each field of a dataclass whether its flag stands last in its group."""
    kinds = get_type_hints(owner, include_extras=True)
    return {field.name: _unwrap_annotation(kinds[field.name])[1].last for field in fields(owner)}


def make_from_flags[T](owner: type[T], flags: argparse.Namespace, **others: Any) -> T:
    """Make a dataclass of the parsed `flags` of its fields, and of `others`; lists become tuples.

    A field that is neither a flag nor in `others` has its default.
    """
    values = {f.name: getattr(flags, f.name) for f in fields(owner) if hasattr(flags, f.name)}  # type: ignore[arg-type]
    values = {name: tuple(v) if isinstance(v, list) else v for name, v in values.items()}
    return owner(**{**values, **others})


@cache
def field_docs(owner: type) -> dict[str, str]:
    """Return the docstring of each field of the dataclass `owner`, on one line, by its name."""
    base = owner.__mro__[1]
    inherited = field_docs(base) if is_dataclass(base) else {}
    file = inspect.getsourcefile(owner)
    assert file is not None
    module = ast.parse(Path(file).read_text(encoding="utf-8"))
    classes = {node.name: node.body for node in module.body if isinstance(node, ast.ClassDef)}
    return inherited | {
        field.target.id: " ".join(text.value.value.split())
        for field, text in pairwise(classes[owner.__name__])
        if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name)
        if isinstance(text, ast.Expr) and isinstance(text.value, ast.Constant)
        if isinstance(text.value.value, str)
    }


def _add_flag(
    group: argparse._ArgumentGroup, dest: str, kind: Any, default: Any, text: str
) -> None:
    kind, extra = _unwrap_annotation(kind)
    flag = extra.name or flag_of(dest)
    names = (flag, *extra.aliases)
    if kind is bool and default is None:
        action = argparse.BooleanOptionalAction
        group.add_argument(*names, dest=dest, action=action, default=None, help=text)
    elif kind is bool and default:
        off = f"--no-{flag.removeprefix('--')}"
        group.add_argument(off, dest=dest, action="store_false", default=True, help=text)
    elif kind is bool:
        group.add_argument(*names, dest=dest, action="store_true", help=text)
    else:
        if isinstance(default, tuple):
            default = list(default)  # as argparse makes the values
        elif default is not None and "default:" not in text:
            text += "; default: %(default)s"
        group.add_argument(
            *names, dest=dest, default=default, help=text, **_value_options(kind, extra)
        )


def _unwrap_annotation(kind: Any) -> tuple[Any, Flag]:
    """Return an annotation without ``| None`` and ``Annotated``, and what the latter adds."""
    options = [option for option in get_args(kind) if option is not type(None)]
    if type(None) in get_args(kind) and len(options) == 1:
        return _unwrap_annotation(options[0])
    if get_origin(kind) is Annotated:
        inner, flag = get_args(kind)
        return _unwrap_annotation(inner)[0], flag
    return kind, Flag()


def _value_options(kind: Any, flag: Flag) -> dict[str, Any]:
    """Return argparse's type, number and choices of a value that is not a switch."""
    if get_origin(kind) is Literal:
        return {"choices": list(get_args(kind))}
    if get_origin(kind) is tuple:
        item, *rest = get_args(kind)  # the rest of ``tuple[T, ...]`` is the ellipsis itself
        item, inner = _unwrap_annotation(item)
        several = flag.nargs or ("+" if rest == [...] else 1 + len(rest))
        metavar = flag.metavar or inner.metavar or _METAVARS[item]
        return {"nargs": several, "type": item, "metavar": metavar}
    return {"type": kind, "metavar": flag.metavar or _METAVARS[kind]}
