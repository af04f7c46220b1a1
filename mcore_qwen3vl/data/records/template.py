"""Rendering of a record to text, with the characters that are trained.

An assistant turn is found by rendering the conversation up to it twice: without the turn but with
the generation prompt, and with the turn. The text that the second adds to the first is exactly what
the model will generate after that prompt: the answer and its end-of-turn token. This needs no
markers in the template (the published ones have no ``{% generation %}`` blocks) and no token ids,
so it works for any ChatML-like template. A template that rewrites earlier turns when later ones
follow (some drop past reasoning) is detected and refused, because such a turn is never generated
in that context.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from mcore_qwen3vl.data.records.flaws import BadSample
from mcore_qwen3vl.data.records.media import Media
from mcore_qwen3vl.data.records.messages import Conversation
from mcore_qwen3vl.data.records.parse import Document
from mcore_qwen3vl.errors import BadInput


@dataclass(frozen=True)
class Span:
    """Characters [start, end) of the rendered text that are trained with `weight`."""

    start: int
    end: int
    weight: float
    message: int | None = None
    """Number of the message, from 1, that a model generates after all text before it; None: it is
    part of a document."""


@dataclass(frozen=True)
class Rendered:
    """A record as text, with one placeholder token for each of `media`, in order."""

    text: str
    spans: list[Span]
    media: list[Media]
    trains: bool = True  # whether some of it must be trained


class Renderer:
    """A renderer of records to text with the checkpoint's chat template."""

    def __init__(self, processor: Any, document_end: str | None = None) -> None:
        """Check the template and the token that ends documents.

        Raises:
            BadInput: the processor has no chat template, or `document_end` is not a single token.
        """
        tokenizer = processor.tokenizer
        if not processor.chat_template:
            raise BadInput(
                "The processor has no chat template. Copy chat_template.jinja from the "
                "checkpoint's repository beside its tokenizer."
            )
        self._processor = processor
        self._document_end = tokenizer.pad_token if document_end is None else document_end
        self._special = tuple(str(token) for token in tokenizer.added_tokens_decoder.values())
        ids = tokenizer(self._document_end, add_special_tokens=False)["input_ids"]
        if len(ids) != 1:
            raise BadInput(
                f"document_end {self._document_end!r} is {len(ids)} tokens in this tokenizer; name "
                "one special token."
            )

    def render(self, record: Conversation | Document) -> Rendered:
        """Render a record."""
        if isinstance(record, Document):
            return self._document(record)
        return self._conversation(record)

    def _conversation(self, record: Conversation) -> Rendered:
        if record.prompt:
            prompt = self._apply(record, len(record.messages), add_generation_prompt=True)
            return Rendered(prompt, [], record.media, trains=False)
        text = self._apply(record, len(record.messages))
        spans = []
        for index, weight in enumerate(record.weights):
            if weight > 0:
                start, end = self._turn(record, index, text)
                spans.append(Span(start, end, weight, index + 1))
        return Rendered(text, spans, record.media)

    def _turn(self, record: Conversation, index: int, text: str) -> tuple[int, int]:
        """Return the characters [start, end) that the model generates as message `index`."""
        if index == 0:
            raise BadSample(
                "the conversation begins with a turn of the assistant, so there is no prompt that "
                "it answers. Put a user turn before it, or give it weight 0."
            )
        prompt = self._apply(record, index, add_generation_prompt=True)
        last = index + 1 == len(record.messages)
        through = text if last else self._apply(record, index + 1)
        if not (text.startswith(through) and through.startswith(prompt)):
            raise BadSample(
                f"the chat template renders message {index + 1} differently once other messages "
                "follow, or without its generation prompt, so this turn cannot be trained in this "
                "context. Give it weight 0, or end the sample with it."
            )
        # ChatML puts a line break between turns: the model stops before it.
        turn = through[len(prompt) :].rstrip()
        if not turn.endswith(self._special):
            raise BadSample(
                f"the chat template ends message {index + 1} with {turn[-20:]!r}, not with a "
                "special token, so a model trained on it would not learn to stop."
            )
        return len(prompt), len(prompt) + len(turn)

    def _apply(self, record: Conversation, count: int, **options: bool) -> str:
        try:
            return self._processor.apply_chat_template(
                record.messages[:count], tools=record.tools, tokenize=False, **options
            )
        # A template may raise any error of Jinja or Python, depending on the messages.
        except Exception as error:
            place = self._refused(record, count)
            raise BadSample(f"the chat template refuses {place}: {error}.") from error

    def _refused(self, record: Conversation, count: int) -> str:
        """Name the first message that the template refuses, since its own error does not."""
        for index, message in enumerate(record.messages[: count - 1]):
            try:
                self._processor.apply_chat_template(
                    record.messages[: index + 1], tools=record.tools, tokenize=False
                )
            except Exception:
                return f"message {index + 1}, of role {message['role']}"
        return f"message {count}, of role {record.messages[count - 1]['role']}"

    def _document(self, record: Document) -> Rendered:
        pieces: list[str] = []
        spans = []
        length = 0
        for part in [*record.parts, self._document_end]:
            piece = part if isinstance(part, str) else self._placeholder(part)
            if isinstance(part, str) and record.weight > 0:
                spans.append(Span(length, length + len(piece), record.weight))
            pieces.append(piece)
            length += len(piece)
        return Rendered("".join(pieces), spans, record.media)

    def _placeholder(self, media: Media) -> str:
        processor = self._processor
        token = processor.image_token if media.kind == "image" else processor.video_token
        return processor.vision_start_token + token + processor.vision_end_token
