"""The names that a reader knows, and the names without a use.

Whatever has named fields (a config file, a record, an archive) has one owner, a :class:`Fields`
that lists the names it knows. A name unknown to its owner is an :class:`Unused`. It is reported
once by ``inspect``, ``data check``, the start of ``train`` and the command that meets it.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any


@dataclass(frozen=True)
class Unused:
    """One thing that was handed over and is not used."""

    where: str
    """What holds it: a file's name with the section in it, ``a message``, ``the command line``."""
    name: str
    """The field, key, flag or member, as its author wrote it; may hold control characters."""
    why: str = ""
    """What becomes of it, or what to do: part of a sentence, without a full stop."""

    def __str__(self) -> str:
        return f"{self.name} ({self.why})" if self.why else self.name


@dataclass(frozen=True)
class Fields:
    """The fields that one owner knows.

    A field is used, or changes no result whatever its value (`inert`), or is not used and then
    changes no result only with certain values (`without_effect`). Every other field is unused.
    """

    where: str
    used: Collection[str]
    inert: Collection[str] = ()
    without_effect: Mapping[str, Collection[Any]] = field(default_factory=dict)
    """Values of a field that mean the same as leaving it out; of other values it is unused."""
    reasons: Mapping[str, str] = field(default_factory=dict)
    """For fields that are not used: what becomes of them, see :attr:`Unused.why`."""

    def unused(self, values: Mapping[Any, Any]) -> list[Unused]:
        """Return the fields of `values` that are not used, in their order.

        A field whose value is null is left out by its author, and so is not named.
        """
        return [
            Unused(self.where, str(name), self.reasons.get(str(name), ""))
            for name, value in values.items()
            if value is not None and not self._is_known(str(name), value)
        ]

    def _is_known(self, name: str, value: Any) -> bool:
        if name in self.used or name in self.inert:
            return True
        # 1 == True in Python, but they are two different values of a field; 1 and 1.0 are not.
        is_flag = isinstance(value, bool)
        harmless = self.without_effect.get(name, ())
        return any(value == known and is_flag == isinstance(known, bool) for known in harmless)


def sentences(unused: Iterable[Unused]) -> list[str]:
    """Return one line for each place: ``not used of generation_config.json: num_beams (…), …``."""
    by_place: dict[str, dict[str, None]] = {}
    for item in unused:
        by_place.setdefault(item.where, {})[str(item)] = None
    return [f"not used of {where}: {', '.join(names)}" for where, names in by_place.items()]


def as_json(unused: Iterable[Unused]) -> list[dict[str, str]]:
    """Return what ``--json`` shows under the key ``unused``."""
    return [asdict(item) for item in unused]
