"""How the records of a data set are read, and the reasons for which one is not used."""

from __future__ import annotations

import errno
import json
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from math import inf, isfinite
from pathlib import Path
from typing import Any

from mcore_qwen3vl.errors import BadInput
from mcore_qwen3vl.functions import at_folder
from mcore_qwen3vl.json_and_yaml import parse_json
from mcore_qwen3vl.time_limit import time_limit
from mcore_qwen3vl.unused.fields import Fields, Unused


class BadSample(Exception):
    """The sample cannot be used, and the message says why. The loader skips it."""


class SlowSample(BadSample):
    """Reading the sample took too long."""


class OverlongSample(Exception):
    """The sample is longer than the sequence length, and the policy is to leave it out."""


def reason_of(error: Exception) -> str:
    """Return why a sample is bad: the message, after the type of an error that is not ours."""
    ours = isinstance(error, BadSample | OverlongSample | BadInput)
    return str(error) if ours else f"{type(error).__name__}: {error}"


def is_momentary(error: BaseException | None) -> bool:
    """Return whether an error may not come again: of the time, or of a disk or a network."""
    while error is not None:
        if isinstance(error, SlowSample):
            return True
        if isinstance(error, OSError) and error.errno in _MOMENTARY:
            return True
        error = error.__cause__ or error.__context__
    return False


_MOMENTARY = {
    *(errno.EIO, errno.EAGAIN, errno.EINTR, errno.ENOMEM, errno.EMFILE, errno.ENFILE),
    *(errno.ESTALE, errno.ETIMEDOUT, errno.ECONNRESET, errno.ENOTCONN, errno.EREMOTEIO),
}
"""Numbers of such errors; a file that is missing or damaged has others, or none."""


def record_limit(seconds: float) -> AbstractContextManager[None]:
    """Limit reading and decoding of one record, by the clock, with SlowSample; see `time_limit`."""
    return time_limit(
        seconds,
        lambda: SlowSample(
            f"reading and decoding it takes more than {seconds:g} s (--max-sample-seconds)."
        ),
    )


@dataclass(frozen=True)
class Reading:
    """How the records of one data set are read. It is picklable, because the hook is a name."""

    preprocess: str | None = None
    """Hook that turns a record into one of a known format: ``module:function``,
    ``file.py:function``, or the name of an entry point."""
    format: str | None = None
    """The records' format, a name of ``FORMATS``; None: recognised by their keys."""
    system: str | None = None
    """System prompt for conversations that have none."""
    train_on: str | None = None
    """Assistant turns to train on: ``all`` (None too), ``last``, or a regular expression that must
    match in the turn's text, or, in a turn without text, in its tool calls, or else in its
    reasoning."""
    chat_template_kwargs: str | None = None
    """Arguments of the chat template, a JSON object as text, for records that give none of the
    same name; see :func:`parse_template_kwargs`."""

    def __post_init__(self) -> None:
        try:
            re.compile(self.train_on or "all")
        except re.error as error:
            raise BadInput(
                f"train_on is {self.train_on!r}: neither all nor last, nor a regular expression "
                f"({error})."
            ) from error
        parse_template_kwargs(self.chat_template_kwargs)

    def with_defaults(self, of_run: Reading) -> Reading:
        """Return this with the run's hook, turns and arguments, where the data set has none."""
        arguments = {
            **parse_template_kwargs(of_run.chat_template_kwargs),
            **parse_template_kwargs(self.chat_template_kwargs),
        }
        return replace(
            self,
            preprocess=self.preprocess or of_run.preprocess,
            train_on=self.train_on or of_run.train_on,
            chat_template_kwargs=json.dumps(arguments, sort_keys=True) if arguments else None,
        )

    def at_folder(self, folder: Path) -> Reading:
        """Return this with the path of the hook's file, if it has one, begun at `folder`."""
        return replace(self, preprocess=self.preprocess and at_folder(self.preprocess, folder))

    def add_system_prompt(self, messages: list[Any]) -> list[Any]:
        """Add the data set's system prompt to messages that have none."""
        first = messages[0] if messages else None
        if self.system is None or (isinstance(first, Mapping) and first.get("role") == "system"):
            return messages
        return [{"role": "system", "content": self.system}, *messages]


_OF_RENDERING = {
    *("messages", "conversation", "conversations", "tools", "documents", "chat_template"),
    *("add_generation_prompt", "continue_final_message", "tokenize", "return_dict"),
}
"""What decides how a conversation is rendered, and is no argument of a user's."""


def parse_template_kwargs(given: Any) -> dict[str, Any]:
    """Return the arguments of a chat template, which are an object, or one as JSON text.

    Raises:
        BadInput: it is no object, or an argument is one that rendering itself gives.
    """
    key = "chat_template_kwargs"
    try:
        arguments = parse_json(given) if isinstance(given, str) else given
    except ValueError as error:
        raise BadInput(f"{key} is {given!r:.60}, which is no JSON object: {error}.") from error
    if arguments is None:
        return {}
    if not isinstance(arguments, Mapping):
        raise BadInput(
            f'{key} is {given!r:.60}; an object is needed, such as {{"enable_thinking": false}}.'
        )
    for name in arguments:
        if not str(name).isidentifier() or name in _OF_RENDERING:
            raise BadInput(f"{key} has {name!r:.60}, which is no argument of a chat template.")
    return dict(arguments)


PLAIN = Reading()
"""Records are read as they are."""


class Observed(Mapping[str, Any]):
    """A record that remembers which of its keys were read."""

    def __init__(self, record: Mapping[str, Any], where: str = "a record") -> None:
        self._record, self._where = record, where
        self._read: set[str] = set()

    @property
    def unused(self) -> list[Unused]:
        """The keys that were not read; ``id`` only names the record.

        Raises:
            BadSample: see :func:`unused_keys`.
        """
        return unused_keys(Fields(self._where, self._read, inert=("id",)), self._record)

    def __getitem__(self, key: str) -> Any:
        self._read.add(key)
        return self._record[key]

    def __iter__(self) -> Iterator[str]:
        return iter(self._record)

    def __len__(self) -> int:
        return len(self._record)


_OF_LOSS = re.compile("loss|train|learn|mask|weigh")
_WITH_LOSS = re.compile(
    "(un)?(loss(es)?|(train|learn)(s|ed|ing|able)?|mask(s|ed|ing)?|weight(s|ed|ing)?|is|do|to|be|for|"
    "no|non|not|use|without|ignored?|skip|compute|scales?|factor|labels?|tokens?|assistant|answer|"
    "sample|turn|message|response|output|completion|prompt|content|of|on|in|the|this)"
)
"""The words of a key that means a part of the loss; at least one of them is of the loss itself."""


def unused_keys(fields: Fields, content: Mapping[Any, Any]) -> list[Unused]:
    """Return the keys that are not used.

    Raises:
        BadSample: the name of one says that it masks or weighs a part of the loss, as ``loss_mask``
            and ``isTrained`` do in other programs: without it, other text would be trained.
    """
    unused = fields.unused(content)
    for item in unused:
        words = re.findall("[A-Z]?[a-z]+|[A-Z]+|[^A-Za-z_]", item.name)
        of_loss = _OF_LOSS.search(item.name.lower())
        if of_loss and all(_WITH_LOSS.fullmatch(word.lower()) for word in words):
            raise BadSample(
                f"{item.name} of {fields.where} seems to mask or weigh the loss, and is not read. "
                "Write weight on the message or on the record: 0 leaves it untrained, 1 trains it. "
                "Or take the key out."
            )
    return unused


def require_number(name: str, value: Any, *, above: float = -inf, least: float = -inf) -> float:
    """Return a value that is a finite number, `above` one number and at `least` another."""
    fits = isinstance(value, int | float) and not isinstance(value, bool) and isfinite(value)
    if not fits or value <= above or value < least:
        limits = (f" above {above:g}", above), (f" of at least {least:g}", least)
        wanted = next((said for said, limit in limits if limit > -inf), "")
        raise BadSample(f"{name} is {value!r:.40}; a number{wanted} is needed.")
    return float(value)


def weight_of(holder: Mapping[str, Any], key: str = "weight") -> float:
    """Return the weight of a record or a message: ``weight``, or ms-swift's ``loss``; default 1."""
    weight = holder.get(key)
    if weight is None:
        return 1.0
    if key == "loss" and isinstance(weight, bool):
        return float(weight)
    if isinstance(weight, bool) or not isinstance(weight, int | float) or not 0 <= weight < 1e6:
        switch = "true, false or " if key == "loss" else ""
        quoted = ", without quotes" if isinstance(weight, str) else ""
        raise BadSample(
            f"{key} is {weight!r:.40}: it takes {switch}a number from 0 to 1e6{quoted}."
        )
    return float(weight)


def read_observed[P](
    record: Mapping[str, Any], format: str, read: Callable[[Mapping[str, Any]], P]
) -> P:
    """Return what `read` makes of a record, with the format's name and what is not used of it."""
    seen = Observed(record)
    parsed: Any = read(seen)
    made: P = replace(parsed, format=format, unused=(*seen.unused, *parsed.unused))
    return made
