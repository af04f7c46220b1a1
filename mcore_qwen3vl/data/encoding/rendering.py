"""From a conversation or a document to text, with the characters that are trained.

An assistant turn is found by rendering the conversation up to it twice: without the turn but with
the generation prompt, and with the turn. The text that the second adds to the first is exactly what
the model will generate after that prompt: the answer and its end-of-turn token. This needs no
markers in the template (the published ones have no ``{% generation %}`` blocks) and no token ids,
so it works for any ChatML-like template. Some templates rewrite earlier turns when later ones
follow; some of these drop past reasoning. This is detected and refused, because such a turn is
never generated in that context.

What the template leaves out is found by rendering once more, with a mark in the middle of every
text: a text whose mark does not come out is not there, although its characters may be elsewhere.
Special tokens spelt by texts are taken out there, so all special tokens in the result are the
template's own.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Any

from mcore_qwen3vl.data.processor import template_variables
from mcore_qwen3vl.data.records.documents import Document
from mcore_qwen3vl.data.records.media import Media
from mcore_qwen3vl.data.records.messages import MESSAGE, Conversation
from mcore_qwen3vl.data.records.reading import BadSample
from mcore_qwen3vl.errors import BadInput
from mcore_qwen3vl.unused.fields import Fields, Unused

_TOOL = Fields("a tool", ("type", "function", "name", "description", "parameters"))
_CALL = Fields("a tool call", ("type", "function", "name", "arguments"), inert=("id",))
# Templates take contents apart at these, so that what is on each side has a mark of its own.
_BOUNDS = re.compile("(</?(?:think|tool_call|tool_response)>)")
_MARK = re.compile("zQ([0-9]+)Qz")
_SWITCHES = (("enable_thinking", True), ("enable_thinking", False),
             ("thinking", True), ("thinking", False))  # fmt: skip
"""Arguments by which published templates begin a turn with reasoning, or without."""
_ENDING = 40
"""Characters of a prompt's end that a message shows."""


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
    unused: tuple[Unused, ...] = ()  # of the record, also by the template
    spelt: tuple[tuple[str, str], ...] = ()
    """Special tokens that a text spells, each with the place of the text."""


@dataclass
class _Marks:
    """Marks in the texts of a conversation, which come out where a template renders the text."""

    special: re.Pattern[str]
    """The tokenizer's special tokens."""
    spelt: list[tuple[str, str]] = field(default_factory=list)
    """Special tokens in the texts, which are rendered without them, and their places."""
    texts: list[tuple[str, str, str]] = field(default_factory=list)
    """The key, the place and the text of each mark."""
    left_out: list[tuple[str, str, str]] = field(default_factory=list)
    """Those whose marks did not come out."""
    rendered: set[str] = field(default_factory=set)
    """Keys of the others."""

    def mark_text(self, text: str, key: str, place: str, *, reasoning: bool = False) -> str:
        """Return a text with marks; in a content, what ends in ``</think>`` is reasoning."""
        self.spelt += [(token, place) for token in self.special.findall(text)]
        pieces = _BOUNDS.split(self.special.sub("", text))
        for number, piece in enumerate(pieces):
            if number % 2 == 0 and (stripped := piece.strip()):
                thought = reasoning and pieces[number + 1 : number + 2] == ["</think>"]
                middle = piece.index(stripped) + len(stripped) // 2
                pieces[number] = (
                    piece[:middle] + self.text_of_mark(len(self.texts)) + piece[middle:]
                )
                self.texts.append(("reasoning_content" if thought else key, place, stripped))
        return "".join(pieces)

    def mark_values(self, value: Any, key: str, place: str) -> Any:
        """Return a value of JSON with a mark in each text."""
        if isinstance(value, Mapping):
            return {name: self.mark_values(inner, key, place) for name, inner in value.items()}
        if isinstance(value, list):
            return [self.mark_values(inner, key, place) for inner in value]
        return self.mark_text(value, key, place) if isinstance(value, str) else value

    def mark_message(self, message: Mapping[str, Any], place: str) -> dict[str, Any]:
        """Return a message with a mark in each text that a template may render."""
        marked = dict(message)
        for key, value in message.items():
            if isinstance(value, str) and key not in ("role", "content", "tool_call_id"):
                marked[key] = self.mark_text(value, key, place)
        content = message["content"]
        if isinstance(content, str):
            marked["content"] = self.mark_text(content, "content", place, reasoning=True)
        else:
            marked["content"] = [
                {**part, "text": self.mark_text(part["text"], "content", place, reasoning=True)}
                if part["type"] == "text" else part
                for part in content
            ]  # fmt: skip
        if isinstance(message.get("tool_calls"), list):
            marked["tool_calls"] = [self._mark_call(call, place) for call in message["tool_calls"]]
        return marked

    def _mark_call(self, call: Any, place: str) -> Any:
        """Return a tool call with marks in its name and arguments, parsed or as JSON text."""
        if not isinstance(call, Mapping):
            return call
        if isinstance(call.get("function"), Mapping):
            return {**call, "function": self._mark_call(call["function"], place)}
        arguments = call.get("arguments")
        if isinstance(arguments, str):
            try:
                arguments = json.loads(arguments)
            except ValueError:
                marked = self.mark_text(arguments, "arguments of a tool call", place)
            else:
                marked = json.dumps(self.mark_values(arguments, "arguments of a tool call", place))
        else:
            marked = self.mark_values(arguments, "arguments of a tool call", place)
        name = self.mark_values(call.get("name"), "name of a tool call", place)
        return {**call, "name": name, "arguments": marked}

    def mark_tool(self, tool: Any) -> Any:
        """Return a tool's definition with marks in its names and descriptions."""
        if isinstance(tool, list):
            return [self.mark_tool(inner) for inner in tool]
        if not isinstance(tool, Mapping):
            return tool
        return {
            key: self.mark_text(value, key, "a tool")
            if key in ("name", "description") and isinstance(value, str)
            else self.mark_tool(value)
            for key, value in tool.items()
        }

    @staticmethod
    def text_of_mark(number: int) -> str:
        """Return a mark, which :data:`_MARK` finds."""
        return f"zQ{number}Qz"


class Renderer:
    """A renderer of records to text with the checkpoint's chat template."""

    def __init__(
        self, processor: Any, document_end: str | None = None, *, allow_dropped: bool = False
    ) -> None:
        """Raise BadInput if there is no chat template, or `document_end` is not a single token."""
        tokenizer = processor.tokenizer
        if not processor.chat_template:
            raise BadInput(
                "The processor has no chat template. Copy chat_template.jinja from the "
                "checkpoint's repository beside its tokenizer."
            )
        self._processor, self._allow_dropped = processor, allow_dropped
        self._variables = template_variables(processor)
        self._document_end = tokenizer.pad_token if document_end is None else document_end
        added = tokenizer.added_tokens_decoder.values()
        self._added = tuple(map(str, added))
        special = (
            str(token) for token in added if token.special and not _BOUNDS.fullmatch(str(token))
        )
        self._special = re.compile("|".join(map(re.escape, special)) or "(?!)")
        self._placeholders = {"image": processor.image_token, "video": processor.video_token}
        self._brackets = processor.vision_start_token, processor.vision_end_token
        ids = tokenizer(self._document_end, add_special_tokens=False)["input_ids"]
        if len(ids) != 1:
            raise BadInput(
                f"document_end {self._document_end!r} is {len(ids)} tokens in this tokenizer; name "
                "one special token."
            )

    def render(
        self, record: Conversation | Document, arguments: Mapping[str, Any] = MappingProxyType({})
    ) -> Rendered:
        """Render a record, with `arguments` of the chat template that it does not give itself."""
        if isinstance(record, Document):
            rendered = self._render_document(record)
        else:
            arguments = {**arguments, **record.chat_template_kwargs}
            rendered = self._render_conversation(replace(record, chat_template_kwargs=arguments))
        _require_characters(rendered.text)
        return rendered

    def _render_conversation(self, record: Conversation) -> Rendered:
        """Render a conversation and find the characters of its trained turns."""
        if "</think>" in str(self._processor.chat_template):
            _require_one_reasoning(record.messages)
        trains = not record.prompt
        text = self._apply_template(
            record, len(record.messages), add_generation_prompt=record.prompt
        )
        self._require_media(record, text)
        spans = []
        for index, weight in enumerate(record.weights):
            if weight > 0 and trains:
                start, end = self._turn_bounds(record, index, text)
                spans.append(Span(start, end, weight, index + 1))
        unused, spelt = self._unused_and_spelt(record, text)
        return Rendered(text, spans, record.media, trains=trains, unused=unused, spelt=spelt)

    def _require_media(self, record: Conversation, text: str) -> None:
        """Raise BadSample if the template leaves out an image or a video, and name its message."""
        for kind, token in self._placeholders.items():
            if text.count(token) >= sum(media.kind == kind for media in record.media):
                continue
            place, needed = "a message", 0
            for index, message in enumerate(record.messages):
                needed += sum(part == {"type": kind} for part in message["content"])
                with suppress(BadSample):
                    if self._apply_template(record, index + 1).count(token) < needed:
                        place = f"{_message_place(index)}, of role {message['role']}"
                        break
            raise BadSample(
                f"the chat template leaves out the {kind} of {place}, which the model then never "
                f"sees. Use a template that has a place for it, or give the {kind} in a message of "
                "the user."
            )

    def _unused_and_spelt(
        self, record: Conversation, text: str
    ) -> tuple[tuple[Unused, ...], tuple[tuple[str, str], ...]]:
        """Return what is not used of a conversation that was rendered as `text`, and what is spelt.

        Raises:
            BadSample: the template leaves out what the user did not allow it to, or a trained turn
                spells a token that the template itself writes.
        """
        marks = self._render_with_marks(record)
        unused = [
            item
            for item in record.unused
            if item.where != MESSAGE.where or item.name not in marks.rendered
        ]
        named = {item.name for item in unused if item.where == MESSAGE.where}
        # Templates write tools, and some write calls, as JSON with whatever keys they have.
        for fields, holder in [
            *((_TOOL, tool) for tool in record.tools or []),
            *((_CALL, call) for m in record.messages for call in m.get("tool_calls") or []),
        ]:
            for level in (holder, isinstance(holder, Mapping) and holder.get("function")):
                if isinstance(level, Mapping):
                    unused += [u for u in fields.unused(level) if f'"{u.name}"' not in text]
        unused += [
            Unused("chat_template_kwargs", name, "the chat template does not read it")
            for name in sorted(record.chat_template_kwargs.keys() - self._variables)
        ]
        untrained = {
            _message_place(index) for index, weight in enumerate(record.weights) if weight == 0
        }
        for key, place, dropped in marks.left_out:
            if key in named:
                continue
            earlier = key == "reasoning_content" and place in untrained
            of_tool = place == "a tool"
            if earlier or (key == "name" and not of_tool) or self._allow_dropped:
                why = "the chat template leaves it out" + (" of earlier turns" if earlier else "")
                unused.append(Unused(place if of_tool else "a message", key, why))
            else:
                raise BadSample(
                    f"the chat template leaves out the {key} of {place}, {dropped[:40]!r}, which "
                    "the model then never sees. Take it out of the record, use a template that has "
                    "a place for it, or pass --allow-dropped, which goes on and names it."
                )
        return tuple(dict.fromkeys(unused)), tuple(dict.fromkeys(marks.spelt))

    def _render_with_marks(self, record: Conversation) -> _Marks:
        """Render a conversation with marks."""
        marks = _Marks(self._special)
        messages = [
            marks.mark_message(message, _message_place(index))
            for index, message in enumerate(record.messages)
        ]
        tools = None if record.tools is None else marks.mark_tool(record.tools)
        marked = replace(record, messages=messages, tools=tools)
        rendered = self._apply_template(marked, len(messages), add_generation_prompt=record.prompt)
        came_out = set(map(int, _MARK.findall(rendered)))  # in one pass, however many there are
        for number, text in enumerate(marks.texts):
            if number in came_out:
                marks.rendered.add(text[0])
            else:
                marks.left_out.append(text)
        trained = {_message_place(index) for index, weight in enumerate(record.weights) if weight}
        media = {*self._placeholders.values(), *self._brackets}
        for token, place in marks.spelt:
            divides = token in rendered and token not in media
            if divides and place in trained and not record.prompt:
                raise BadSample(
                    f"{place}, which is trained, spells {token}, by which the chat template "
                    "divides turns: the model would learn to end or begin a turn in the middle of "
                    "an answer. Take it out, or give the turn weight 0."
                )
        return marks

    def _turn_bounds(self, record: Conversation, index: int, text: str) -> tuple[int, int]:
        """Return the characters [start, end) that the model generates as message `index`."""
        if index == 0:
            raise BadSample(
                "the conversation begins with a turn of the assistant, so there is no prompt that "
                "it answers. Put a user turn before it, or give it weight 0."
            )
        prompt = self._apply_template(record, index, add_generation_prompt=True)
        last = index + 1 == len(record.messages)
        through = text if last else self._apply_template(record, index + 1)
        if not through.startswith(prompt):
            raise BadSample(self._not_generated(record, index, prompt))
        if not text.startswith(through):
            raise BadSample(
                f"the chat template renders message {index + 1} differently once other messages "
                "follow, so this turn cannot be trained in this "
                "context. Train the last turn alone (--train-on last), make a "
                "record of each turn (data turns), or give this one weight 0."
            )
        # ChatML puts a line break between turns: the model stops before it.
        turn = through[len(prompt) :].rstrip()
        if not turn.endswith(self._added):
            raise BadSample(
                f"the chat template ends message {index + 1} with {turn[-20:]!r}, not with a "
                "special token, so a model trained on it would not learn to stop."
            )
        return len(prompt), len(prompt) + len(turn)

    def _not_generated(self, record: Conversation, index: int, prompt: str) -> str:
        """Say why a model never generates message `index`: it does not go on from its `prompt`.

        The message names a remedy after trying it here: with it the turn does go on from the
        prompt.
        """
        place, ending = _message_place(index), prompt[-_ENDING:]
        said = (
            f"the chat template renders {place} otherwise than behind its generation prompt, which "
            f"ends with {ending!r}, so no model ever generates this turn. "
        )
        for name, value in _SWITCHES:
            arguments = {**record.chat_template_kwargs, name: value}
            if name in self._variables and self._is_generated(
                replace(record, chat_template_kwargs=arguments), index
            ):
                given = json.dumps({name: value})
                own = name in record.chat_template_kwargs
                return said + (
                    f'Give the record "chat_template_kwargs": {given}'
                    + (f" in place of {json.dumps(record.chat_template_kwargs[name])}" if own else
                       f", or all records --chat-template-kwargs '{given}'")
                    + "."
                )  # fmt: skip
        messages = list(record.messages)
        messages[index] = _without_reasoning(messages[index])
        if self._is_generated(replace(record, messages=messages), index):
            return said + (
                "The prompt says that there is no reasoning, and no argument of the template "
                "changes it: take the reasoning out, or use the template of a model that thinks."
            )
        return said + (
            "Use the template of the model that these turns are for, or give this one weight 0."
        )

    def _is_generated(self, record: Conversation, index: int) -> bool:
        """Return whether message `index` goes on from its generation prompt."""
        try:
            prompt = self._apply(record, index, add_generation_prompt=True)
            return self._apply(record, index + 1).startswith(prompt)
        except BadSample:  # the time is up
            raise
        except Exception:  # of a template that refuses the other messages or arguments
            return False

    def _apply_template(self, record: Conversation, count: int, **options: bool) -> str:
        """Render the first `count` messages; raise BadSample, naming one, if it is refused."""
        try:
            return self._apply(record, count, **options)
        except BadSample:  # the time is up
            raise
        # A template may raise any error of Jinja or Python, depending on the messages.
        except Exception as error:
            place = self._name_refused_message(record, count)
            raise BadSample(f"the chat template refuses {place}: {error}.") from error

    def _apply(self, record: Conversation, count: int, **options: bool) -> str:
        arguments = record.chat_template_kwargs
        return self._processor.apply_chat_template(
            record.messages[:count],
            tools=record.tools,
            tokenize=False,
            **{name: arguments[name] for name in arguments.keys() & self._variables},
            **options,
        )

    def _name_refused_message(self, record: Conversation, count: int) -> str:
        """Name the first message that the template refuses, since its own error does not."""
        for index, message in enumerate(record.messages[: count - 1]):
            try:
                self._apply(record, index + 1)
            except BadSample:
                raise
            except Exception:
                return f"message {index + 1}, of role {message['role']}"
        return f"message {count}, of role {record.messages[count - 1]['role']}"

    def _render_document(self, record: Document) -> Rendered:
        """Render the parts one after the other; all text is trained, with the end token."""
        pieces: list[str] = []
        spans = []
        length = 0
        for part in [*record.parts, self._document_end]:
            piece = part if isinstance(part, str) else self._placeholder(part)
            if isinstance(part, str) and record.weight > 0:
                spans.append(Span(length, length + len(piece), record.weight))
            pieces.append(piece)
            length += len(piece)
        texts = "\n".join(part for part in record.parts if isinstance(part, str))
        spelt = tuple((token, "its text") for token in dict.fromkeys(self._special.findall(texts)))
        return Rendered("".join(pieces), spans, record.media, unused=record.unused, spelt=spelt)

    def _placeholder(self, media: Media) -> str:
        return self._placeholders[media.kind].join(self._brackets)


def _require_characters(text: str) -> None:
    """Raise BadSample for half of a surrogate pair, which JSON can hold and no tokenizer takes."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        before = text[max(0, error.start - 20) : error.start]
        raise BadSample(
            f"its text has {ascii(text[error.start])[1:-1]} after {before!r}: half of a surrogate "
            "pair, which is no character. Write the whole character, or take it out."
        ) from None


def _require_one_reasoning(messages: Sequence[Mapping[str, Any]]) -> None:
    """Raise BadSample if a turn has its reasoning twice, or does not end it.

    A template that writes the tags would write them around such a text, one inside the other.
    """
    for index, message in enumerate(messages):
        content = message["content"]
        if not isinstance(content, str):
            content = "".join(part.get("text", "") for part in content)
        if message["role"] != "assistant" or not (tags := re.findall("</?think>", content)):
            continue
        # An empty one counts: a template then looks for no reasoning in the content.
        if isinstance(message.get("reasoning_content"), str):
            raise BadSample(
                f"{_message_place(index)} has its reasoning twice: in reasoning_content, and "
                f"before or behind {tags[0]} in its content. Keep one of them."
            )
        if tags[-1] == "<think>":
            raise BadSample(
                f"{_message_place(index)} begins its reasoning with <think> and does not end it "
                "with </think>, so the chat template would take it for the answer. End it, or "
                "take it out."
            )


def _without_reasoning(message: Mapping[str, Any]) -> dict[str, Any]:
    """Return a message without its reasoning, which is in a key or in its text."""
    content = message["content"]
    if isinstance(content, str):
        content = content.rpartition("</think>")[2].lstrip("\n")
    kept = {key: value for key, value in message.items() if key != "reasoning_content"}
    return {**kept, "content": content}


def _message_place(index: int) -> str:
    return f"message {index + 1}"
