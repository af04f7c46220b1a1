"""The canary's table: each symbol of Megatron that we wrap, replace, override or call by name.

``python -m tests.training.megatron_symbols`` writes the signatures of the installed Megatron to the
table. Do so only for the version that the tests run with.
"""

from __future__ import annotations

import enum
import inspect
from importlib import import_module
from pathlib import Path
from typing import Any

from mcore_qwen3vl.runtime import cpu

TABLE = Path(__file__).with_name("megatron_symbols.txt")

_SHOWN = (int, float, str, tuple, type(None))  # of the kinds of defaults; bool is an int


def read_table() -> dict[str, str]:
    """Return the signatures of the table by the dotted names of their symbols."""
    lines = [line for line in TABLE.read_text().splitlines() if line and not line.startswith("#")]
    return {line[: f"{line}(".index("(")]: line[f"{line}(".index("(") :] for line in lines}


def signature(symbol: str) -> str:
    """Return the arguments of a symbol with their defaults, or "" if it cannot be called.

    Annotations are left out, because Python's versions print them differently.

    Raises:
        AttributeError: the installed Megatron has no such symbol.
    """
    value = _original(symbol)
    if not callable(value):
        return ""
    parameters = [
        parameter.replace(annotation=parameter.empty, default=_default(parameter.default))
        for parameter in inspect.signature(value).parameters.values()
    ]
    return str(inspect.Signature(parameters))


def differences(table: dict[str, str]) -> list[str]:
    """Return a sentence for each symbol that the installed Megatron lacks or has changed."""
    sentences = []
    for symbol, expected in table.items():
        try:
            installed = signature(symbol)
        except (AttributeError, ImportError):
            sentences.append(f"{symbol} is gone; it was {symbol.rpartition('.')[2]}{expected}")
            continue
        if installed != expected:
            sentences.append(f"{symbol} takes {installed or 'no call'}, and not {expected}")
    return sentences


def _original(symbol: str) -> Any:
    """Return what a dotted name stands for in Megatron, whatever this process has replaced."""
    parts = symbol.split(".")
    for end in range(len(parts) - 1, 0, -1):
        try:
            value = import_module(".".join(parts[:end]))
        except ModuleNotFoundError:
            continue
        break
    else:
        raise ImportError(symbol)
    module = ".".join(parts[:end])
    for name in parts[end:]:
        value = cpu.originals.get((module, name)) or inspect.getattr_static(value, name)
    value = value.__func__ if isinstance(value, staticmethod | classmethod) else value
    return getattr(value, "__wrapped__", value)  # not a run's wrapper


def _default(value: Any) -> Any:
    if value is inspect.Parameter.empty or (
        isinstance(value, _SHOWN) and not isinstance(value, enum.Enum)
    ):
        return value
    return ...


def main() -> None:
    """Write the signatures of the installed Megatron to the table, and keep its comments."""
    symbols = read_table()
    lines = []
    for line in TABLE.read_text().splitlines():
        symbol = line[: f"{line}(".index("(")]
        lines.append(symbol + signature(symbol) if symbol in symbols else line)
    TABLE.write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    cpu.install(training=True)
    main()
