"""A part of work that several processes share, by index, on any machines."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from mcore_qwen3vl.errors import BadInput


@dataclass(frozen=True)
class Part:
    """One of several parts of the work: its index, from 0, and how many there are."""

    index: int
    count: int

    @classmethod
    def parse(cls, text: str) -> Part:
        """Read ``I/N``; raise BadInput unless I is from 0 to N - 1."""
        match = re.fullmatch(r"(\d{1,9})/(\d{1,9})", text)
        if match is None or not int(match[1]) < int(match[2]):
            raise BadInput(
                f"--part {text}: it is I/N, the index of a part and their number, with I from 0 "
                "to N - 1, such as 0/16 to 15/16."
            )
        return cls(int(match[1]), int(match[2]))

    def __str__(self) -> str:
        return f"{self.index}/{self.count}"

    def of(self, total: int) -> range:
        """Return the numbers of this part's samples, of `total`."""
        bounds = (total * index // self.count for index in (self.index, self.index + 1))
        return range(*bounds)

    def in_turn[T](self, items: Sequence[T]) -> list[T]:
        """Return this part's items, where the parts take them in turn."""
        return list(items[self.index :: self.count])
