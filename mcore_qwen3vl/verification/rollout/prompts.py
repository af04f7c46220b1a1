"""The prompts that a server and the trained model are compared on.

They are a data set's records without their last answers, read and tokenised as in training. Prompts
made of them tell one cause from another: the same text without its images and videos, and a picture
of one grey, which no decoding, resizing or order of colours changes.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from io import BytesIO
from typing import Any, Literal

from PIL import Image

from mcore_qwen3vl.data.config import DataConfig, Source
from mcore_qwen3vl.data.datasets import CrudeSamples
from mcore_qwen3vl.data.encoding.planning import Plan
from mcore_qwen3vl.data.encoding.preparation import Preparation, RawSample
from mcore_qwen3vl.data.places import place_of
from mcore_qwen3vl.data.record_form import RecordForm
from mcore_qwen3vl.data.records.media import Media, MediaFolder
from mcore_qwen3vl.data.records.messages import Conversation, read_messages
from mcore_qwen3vl.data.records.nested import parse_nested
from mcore_qwen3vl.data.records.parse import parse_record
from mcore_qwen3vl.data.records.reading import (
    BadSample,
    OverlongSample,
    Reading,
    read_observed,
    reason_of,
)
from mcore_qwen3vl.unused.fields import Unused

Kind = Literal["text", "image", "video", "grey"]

_GREY = (200, 200, 200)
"""No channel of it becomes zero when it is normalised, so that every weight of the tower counts."""
_TEXTS_ALONE = 4
"""Prompts that are asked again without images and videos, if the data have none without."""


class PromptForm(RecordForm):
    """Records as prompts: what comes before the last answer, or all of them that have none."""

    def read(
        self, record: Mapping[str, Any], folder: MediaFolder, reading: Reading
    ) -> Mapping[str, Conversation]:
        return {"": _prompt_of(_conversation_of(record, folder, reading))}


def _conversation_of(
    record: Mapping[str, Any], folder: MediaFolder, reading: Reading
) -> Conversation:
    """Parse a record that may have no answer, as data sets for RL have none."""
    if "messages" not in record and "prompt" in record:
        asked = record["prompt"]
        if isinstance(asked, str) and asked.lstrip().startswith("["):
            asked = parse_nested(asked, "prompt")
        turns = [{"role": "user", "content": asked}] if isinstance(asked, str) else asked
        record = {**{k: v for k, v in record.items() if k != "prompt"}, "messages": turns}
    if "messages" not in record:
        parsed = parse_record(record, folder, reading)
        if not isinstance(parsed, Conversation):
            raise BadSample("it is a document, which has no prompt.")
        return parsed
    parsed = read_observed(
        record, "messages", lambda seen: read_messages(seen, folder, prompt=True)
    )
    messages = reading.add_system_prompt(parsed.messages)
    return replace(parsed, messages=messages)


def _prompt_of(conversation: Conversation) -> Conversation:
    """Return a conversation without the answer that it ends with."""
    messages = list(conversation.messages)
    while messages and messages[-1]["role"] == "assistant":
        messages.pop()
    if not messages:
        raise BadSample("it has no message before the assistant's, so there is no prompt.")
    media = conversation.media[: sum(len(list(_media_parts(message))) for message in messages)]
    return replace(
        conversation, messages=messages, media=media, weights=[0.0] * len(messages), prompt=True
    )


def _media_parts(message: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
    content = message["content"]
    if not isinstance(content, str):
        yield from (part for part in content if part["type"] != "text")


@dataclass(frozen=True)
class Prompt:
    """One prompt, as both are asked it."""

    place: str
    kind: Kind  # the most demanding medium in it
    conversation: Conversation  # with all arguments of the chat template
    plan: Plan  # with decoded pixels


@dataclass
class PromptSet:
    """The prompts of a data set; `errors` has the reason for each record that gives none."""

    prompts: list[Prompt] = field(default_factory=list)
    errors: dict[str, str] = field(default_factory=dict)
    unused: dict[Unused, None] = field(default_factory=dict)


class PromptReader:
    """A reader of prompts; it sets the budgets of `config` on `processor`."""

    def __init__(
        self,
        samples: CrudeSamples,
        sources: Sequence[Source],
        processor: Any,
        config: DataConfig,
    ) -> None:
        self._samples, self._processor = samples, processor
        self._preparation = Preparation(processor, config, sources)
        self._readings = [source.reading for source in sources]
        self._arguments = self._preparation.template_arguments
        self.scale = self._preparation.scale

    def read(self, count: int) -> PromptSet:
        """Read the first `count` records, and add prompts that tell causes from each other."""
        found = PromptSet()
        samples = range(min(count, len(self._samples)))
        last: RawSample | None = None
        for number in samples:
            crude = self._samples[number]
            place = str(place_of(crude["__sources__"][0]))
            try:
                raw = self._preparation.raw(crude)
                (conversation,) = self._preparation.parse_each(raw, PromptForm()).values()
                assert isinstance(conversation, Conversation)
                found.prompts.append(self._prompt(place, raw, conversation))
            except Exception as error:  # as in training, any exception makes the record bad
                overlong = isinstance(error, OverlongSample)
                found.errors[place] = f"{'over-long: ' if overlong else ''}{reason_of(error)}"
                continue
            found.unused |= dict.fromkeys(found.prompts[-1].plan.unused)
            last = raw
        with_media = [prompt for prompt in found.prompts if prompt.kind != "text"]
        if last is not None and with_media:
            if len(with_media) == len(found.prompts):
                found.prompts += self._texts_alone(with_media[:_TEXTS_ALONE], last)
            found.prompts.append(self._prompt("a picture of one grey", last, self._grey(), "grey"))
        return found

    def _prompt(
        self, place: str, raw: RawSample, conversation: Conversation, kind: Kind | None = None
    ) -> Prompt:
        arguments = {**self._arguments[raw.source], **conversation.chat_template_kwargs}
        conversation = replace(conversation, chat_template_kwargs=arguments)
        plan = self._preparation.plan(raw, conversation)
        pixels = self._preparation.load_pixels(plan, raw.source)
        kinds = {media.kind for media in conversation.media}
        most: Kind = "video" if "video" in kinds else "image" if kinds else "text"
        return Prompt(place, kind or most, conversation, replace(plan, pixels=pixels))

    def _texts_alone(self, prompts: Sequence[Prompt], raw: RawSample) -> Iterator[Prompt]:
        for prompt in prompts:
            messages = [_without_media(message) for message in prompt.conversation.messages]
            alone = replace(prompt.conversation, messages=messages, media=[])
            yield self._prompt(f"{prompt.place} without images and videos", raw, alone)

    def _grey(self) -> Conversation:
        """Return a question about a grey picture of a few tokens."""
        images = self._processor.image_processor
        token = images.patch_size * images.merge_size
        file = BytesIO()
        Image.new("RGB", (6 * token, 4 * token), _GREY).save(file, "PNG")
        content = [{"type": "image"}, {"type": "text", "text": "What is in this picture?"}]
        media = Media("image", file.getvalue(), "a grey picture")
        return Conversation([{"role": "user", "content": content}], [media], [0.0], prompt=True)


def _without_media(message: Mapping[str, Any]) -> dict[str, Any]:
    content = message["content"]
    if isinstance(content, str):
        return dict(message)
    parts = [part for part in content if part["type"] == "text"]
    return {**message, "content": parts or "?"}
