"""A file beside each data set, for a loss that needs more than the data: :class:`Sidecar`.

Imports nothing heavy: the command line reads the losses before it imports torch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar


class OpenSidecar:
    """The open sidecar of one data set.

    Its methods get a record's number in its file, from 0, and the record's sequences, each a
    :class:`~mcore_qwen3vl.data.encoding.planning.Plan`.
    """

    def require(self, number: int, plans: Sequence[Any]) -> None:
        """Raise what :meth:`look_up` would, before records are chosen for packs.

        Without it, a pack is smaller by each record for which nothing is found.
        """

    def look_up(self, number: int, plans: Sequence[Any]) -> Any:
        """Return what belongs to a record that has been chosen for a batch.

        Raises:
            BadSample: there is nothing for the record.
            BadInput: the record is not what it was when the sidecar was made.
        """
        raise NotImplementedError


@dataclass(frozen=True)
class Sidecar:
    """Which sidecars a loss reads; a subclass is a frozen dataclass of what distinguishes them.

    :meth:`.Loss.sidecar` returns one. What it has for a record is `beside` of the
    :class:`~mcore_qwen3vl.data.encoding.encoder.PlannedRecord`. The :class:`.TaskInputs` of the
    loss put it into the batch.

    Attributes:
        uncut: why an over-long record cannot be cut, and what to do; empty: it can.
    """

    uncut: ClassVar[str] = ""

    def file_of(self, data: Path) -> Path:
        """Return the file beside a data set. A resumed run compares its content."""
        raise NotImplementedError

    def open(self, paths: Sequence[Path], tokenizer: Any, vocab_size: int) -> Sequence[OpenSidecar]:
        """Open the sidecars of data sets, for the tokens of a tokenizer and a model.

        Raises:
            BadInput: one is missing, damaged, or of other data or another vocabulary.
        """
        raise NotImplementedError

    def flags(self) -> dict[str, Any]:
        """Return the flags that decide which sidecar fits, with their values."""
        return {}

    def make_up(
        self, data: Path, records: Sequence[Sequence[Any]], tokenizer: Any, vocab_size: int
    ) -> None:
        """Write the sidecar of a rehearsal's made-up data, where only the sizes matter.

        `records` are the sequences of each. Without this method, a rehearsal needs data.
        """
        raise NotImplementedError
