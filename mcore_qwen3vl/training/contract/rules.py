"""What becomes of a setting that differs where a run goes on: the rules of the contract's rows.

A difference is said in one line with its effect, or it stops the run with the flags to give.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol

Values = Mapping[str, Any]
"""The values of a row by the ``dest`` names of its flags, or by names of its own; plain data."""

Steering = Literal["command", "checkpoint"] | None
"""Whose rates and schedule hold, by ``--override-opt-param-scheduler`` or
``--use-checkpoint-opt-param-scheduler``; None: no flag says so."""

STEER = (
    "Add --override-opt-param-scheduler to take the command's, or "
    "--use-checkpoint-opt-param-scheduler to take the checkpoint's."
)
AS_BEFORE = "Give the checkpoint's values."


@dataclass(frozen=True)
class Change:
    """A setting with another value than the checkpoint's, and both in words."""

    setting: str
    before: Any
    after: Any
    was: str
    is_now: str


@dataclass(frozen=True)
class Notice:
    """What a row says of its changes: a line for the user, or the reason why the run stops."""

    row: str
    text: str
    refused: bool = False


class ChangeRule(Protocol):
    """What a row does with its changes; `text` stands in the documentation's table."""

    @property
    def text(self) -> str: ...

    def judge(
        self, row: str, changes: Sequence[Change], before: Values, now: Values, steering: Steering
    ) -> Iterator[Notice]:
        """Yield what is to be said of one or more `changes`."""


def values_before(changes: Sequence[Change]) -> str:
    """Return the checkpoint's values in words."""
    return ", ".join(change.was for change in changes)


def values_now(changes: Sequence[Change]) -> str:
    """Return the command's values in words."""
    return ", ".join(change.is_now for change in changes)


@dataclass(frozen=True)
class AllowedChange:
    """A change that holds from the next step on, with its effect."""

    effect: str

    @property
    def text(self) -> str:
        return f"allowed: {self.effect}"

    def judge(
        self, row: str, changes: Sequence[Change], before: Values, now: Values, steering: Steering
    ) -> Iterator[Notice]:
        was = values_before(changes)
        yield Notice(row, f"{row}: {values_now(changes)} in place of {was}: {self.effect}")


@dataclass(frozen=True)
class RefusedChange:
    """A change that stops the run, with the reason."""

    why: str

    @property
    def text(self) -> str:
        return f"refused: {self.why}"

    def judge(
        self, row: str, changes: Sequence[Change], before: Values, now: Values, steering: Steering
    ) -> Iterator[Notice]:
        text = f"{row}: the checkpoint has {values_before(changes)}, and this command "
        text += f"{values_now(changes)}: {self.why}. {AS_BEFORE}"
        yield Notice(row, text, refused=True)


@dataclass(frozen=True)
class Steered:
    """A change that one of two flags decides: the command's value, or the checkpoint's.

    Attributes:
        of_command: whether the second flag, too, takes the command's value.
    """

    of_command: bool = False

    @property
    def text(self) -> str:
        if self.of_command:
            return f"allowed with {FLAGS_IN_TABLE}: the command's value holds from the next step on"
        return (
            "`--override-opt-param-scheduler` takes the command's values from the next step on, "
            "`--use-checkpoint-opt-param-scheduler` the checkpoint's; refused without"
        )

    def judge(
        self, row: str, changes: Sequence[Change], before: Values, now: Values, steering: Steering
    ) -> Iterator[Notice]:
        was, is_now = values_before(changes), values_now(changes)
        if steering is None:
            remedy = (
                "Leave it out to keep the checkpoint's, or add --override-opt-param-scheduler to "
                "take the command's." if self.of_command else STEER
            )  # fmt: skip
            text = f"{row}: the checkpoint has {was}, and this command {is_now}. {remedy}"
            yield Notice(row, text, refused=True)
        elif steering == "command" or self.of_command:
            yield Notice(row, f"{row}: {is_now} from the next step on, in place of {was}")
        else:
            yield Notice(row, f"{row}: the checkpoint's {was}, and not {is_now}")


FLAGS_IN_TABLE = "`--override-opt-param-scheduler` or `--use-checkpoint-opt-param-scheduler`"


@dataclass(frozen=True)
class WithoutPacks:
    """A change that is allowed where each row has one record, and refused with packs.

    Packs that wait to be read were made with the checkpoint's values.
    """

    effect: str

    @property
    def text(self) -> str:
        return f"allowed: {self.effect}. With `--packing` refused: {_OTHER_PACKS}"

    def judge(
        self, row: str, changes: Sequence[Change], before: Values, now: Values, steering: Steering
    ) -> Iterator[Notice]:
        rule: ChangeRule = (
            RefusedChange(_OTHER_PACKS) if now["packing"] else AllowedChange(self.effect)
        )
        yield from rule.judge(row, changes, before, now, steering)


_OTHER_PACKS = "samples that are packed already would have other lengths"


@dataclass(frozen=True)
class Elsewhere:
    """Something that is compared where it is read, and is not kept in the contract."""

    text: str

    def judge(
        self, row: str, changes: Sequence[Change], before: Values, now: Values, steering: Steering
    ) -> Iterator[Notice]:
        return iter(())
