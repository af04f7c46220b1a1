"""Which of Megatron's flags a run reads, which have no effect, and which are refused."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from packaging.specifiers import SpecifierSet
from packaging.version import Version

from mcore_qwen3vl.machine import version_of

FLAGS = Path(__file__).with_name("megatron-flags.txt")
"""The list for :meth:`Sorting.from_text`."""
LISTED = "0.19.2"
"""The version of megatron-core whose flags are all in the list."""


@dataclass(frozen=True)
class Sorting:
    """What a version of Megatron's flags does in a run: reach it, be refused, or nothing.

    Attributes:
        reaching: flags that something reads.
        acts_with: of those, the flags that something reads only with another one: that one, or
            several in turn, joined by "or".
        refused: the reason by flag: it asks for what this package does otherwise, or not at all.
        no_effect: the reason by flag: nothing reads it, and no run is another one for it.
        complete: whether the version has no other flags.
    """

    reaching: frozenset[str]
    acts_with: Mapping[str, str]
    refused: Mapping[str, str]
    no_effect: Mapping[str, str]
    complete: bool

    @property
    def known(self) -> frozenset[str]:
        """All flags of the version."""
        return self.reaching | self.refused.keys() | self.no_effect.keys()

    @classmethod
    def for_installed(cls) -> Sorting:
        """Return the sorting of the installed megatron-core."""
        return cls.from_text(FLAGS.read_text(encoding="utf-8"), version_of("megatron-core"))

    @classmethod
    def from_text(cls, text: str, megatron: str) -> Sorting:
        """Read a version's flags from a list, in which a line says what becomes of those below it.

        If only some versions have a flag, they stand behind it.
        """
        names = ("reaching", "acts with", "refused", "no effect")
        kinds: dict[str, dict[str, str]] = {name: {} for name in names}
        kind = reason = ""
        release = Version(megatron).base_version  # 0.20 of a pre-release, which has its flags
        for line in text.splitlines():
            flag, _, versions = line.partition(" ")
            # Such a line has the "KIND" or "KIND: REASON" of the flags below, or is the header.
            if not flag.startswith("-"):
                kind, _, reason = line.partition(": ")
            elif SpecifierSet(versions).contains(release):
                kinds[kind][flag] = reason
        reached, acts_with, refused, no_effect = kinds.values()
        reaching = frozenset({**reached, **acts_with})
        return cls(reaching, acts_with, refused, no_effect, megatron == LISTED)
