"""How records are read for a loss: a subclass of :class:`RecordForm`.

Imports nothing heavy: the command line reads the losses before it imports torch.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from mcore_qwen3vl.data.records.reading import BadSample, Reading
from mcore_qwen3vl.lazy import Lazy

if TYPE_CHECKING:
    from mcore_qwen3vl.data.records import parse
    from mcore_qwen3vl.data.records.documents import Document
    from mcore_qwen3vl.data.records.media import MediaFolder
    from mcore_qwen3vl.data.records.messages import Conversation
else:
    parse = Lazy("mcore_qwen3vl.data.records.parse")


@dataclass(frozen=True)
class RecordForm:
    """The form of records that a loss trains on, where it does not predict each record's tokens.

    A record gives one or more sequences, which stay in one micro-batch.

    Attributes:
        needed: the names of the sequences that a record must have.
        named_by: the flag and value that choose the loss, for messages.
        uncut: why an over-long record cannot be cut, and what to do; empty: it can.
    """

    needed: ClassVar[tuple[str, ...]] = ()
    named_by: ClassVar[str] = ""

    @property
    def uncut(self) -> str:
        return (
            f"--overlong truncate with {self.named_by}: the last token of a text that is cut is "
            "another one. Leave the flag out: records that are too long are then left out."
        )

    def describes(self, record: Mapping[str, Any]) -> bool:
        """Return whether the keys of a JSON record tell that it has this form and no other."""
        return False

    def read(
        self, record: Mapping[str, Any], folder: MediaFolder, reading: Reading
    ) -> Mapping[str, Conversation | Document]:
        """Parse a record to which the data set's hook has been applied.

        Returns:
            The record's sequences by name; the name of an only one may be empty.

        Raises:
            BadSample: the record has another form, or is malformed; or the data set chooses turns
                to train on.
        """
        if reading.train_on not in (None, "all"):
            raise BadSample(
                f"train_on {reading.train_on!r} chooses turns of conversations to train on, and "
                "records for other tasks have none to choose: leave it out."
            )
        return self.parse(record, folder, reading)

    def parse(
        self, record: Mapping[str, Any], folder: MediaFolder, reading: Reading
    ) -> Mapping[str, Conversation]:
        """Parse a record as :meth:`read` does, which is called for it."""
        raise NotImplementedError

    def require_trainable(self, plans: Mapping[str, Any]) -> None:
        """Raise BadSample if the loss cannot train on a record's sequences, each a `Plan`."""
        for name in self.needed:
            if name not in plans:
                raise BadSample(
                    f"{self.named_by} trains on {' and '.join(self.needed)}; the record has no "
                    f"{name}."
                )

    def packed_length(self, lengths: Iterable[int], multiple: int, most: int) -> int:
        """Return how many tokens of a pack a record takes.

        Args:
            lengths: tokens of each of the record's sequences.
            multiple: the number of which each sequence's length in a pack is a multiple.
            most: tokens of a pack.
        """
        return sum(-(-length // multiple) * multiple for length in lengths)


@dataclass(frozen=True)
class DetectedForm(RecordForm):
    """Detects the form of each record by its keys; a record of none of `forms` is text."""

    forms: tuple[RecordForm, ...] = ()

    uncut = ""

    def read(
        self, record: Mapping[str, Any], folder: MediaFolder, reading: Reading
    ) -> Mapping[str, Conversation | Document]:
        """Parse a record in the form of its keys, otherwise as text to be predicted."""
        for form in self.forms:
            if form.describes(record):
                return form.read(record, folder, reading)
        return {"": parse.parse_record(record, folder, reading)}
