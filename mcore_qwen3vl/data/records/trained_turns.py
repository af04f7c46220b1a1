"""The turns of a conversation that a data set trains on, and its system prompt."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from mcore_qwen3vl.data.records.messages import Conversation
from mcore_qwen3vl.data.records.reading import BadSample, Reading
from mcore_qwen3vl.unused.fields import Unused


def select_turns(parsed: Conversation, reading: Reading) -> Conversation:
    """Add the data set's system prompt, and choose the turns to train on."""
    weights, left = _weights_of_turns(parsed, reading.train_on)
    if not any(weights):
        raise BadSample(f"train_on {reading.train_on!r} selects no assistant turn.")
    messages = reading.add_system_prompt(parsed.messages)
    # The system prompt that was added has a weight too.
    weights = [0.0] * (len(messages) - len(weights)) + weights
    unused = tuple(dict.fromkeys((*parsed.unused, *left)))
    return replace(parsed, messages=messages, weights=weights, unused=unused)


def _weights_of_turns(
    parsed: Conversation, train_on: str | None
) -> tuple[list[float], list[Unused]]:
    """Return the messages' weights, with 0 for turns that `train_on` does not choose.

    Of turns whose text a pattern does not match, what else it matches is returned too.
    """
    if train_on in (None, "all"):
        return parsed.weights, []
    if train_on == "last":
        last = max(i for i, m in enumerate(parsed.messages) if m["role"] == "assistant")
        return [weight if i == last else 0.0 for i, weight in enumerate(parsed.weights)], []
    weights: list[float] = []
    unused: list[Unused] = []
    for message, weight in zip(parsed.messages, parsed.weights, strict=True):
        # One text decides, so that a pattern that forbids a word means it, too.
        said, *others = _texts_of(message)
        chosen = re.search(train_on, said[1]) is not None
        weights.append(weight if chosen else 0.0)
        if weight and not chosen:
            why = f"train_on matches there and not in the turn's {said[0]}, which decides"
            unused += [
                Unused("a turn of the assistant", f"its {what}", why)
                for what, text in others
                if re.search(train_on, text)
            ]
    return weights, unused


_THINKING = re.compile(r"(<think>)?.*?</think>", re.DOTALL)


def _texts_of(message: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Return what a model says in a turn, and what it is: text, tool calls, and reasoning.

    The first decides for a pattern: the text, which may hold reasoning too, or what there is in a
    turn without any.
    """
    content = message["content"]
    if not isinstance(content, str):
        content = "".join(part.get("text", "") for part in content)
    calls = [call.get("function", call) for call in message.get("tool_calls") or []]
    reasoning = message.get("reasoning_content")
    spoken = _THINKING.sub("", content, count=1).strip()
    texts = [
        ("text", content if spoken else ""),
        ("tool calls", " ".join(json.dumps(call, ensure_ascii=False) for call in calls)),
        ("reasoning", reasoning if isinstance(reasoning, str) and reasoning else ""),
        ("reasoning", "" if spoken else content),
    ]
    return [(what, text) for what, text in texts if text] or [("text", "")]
