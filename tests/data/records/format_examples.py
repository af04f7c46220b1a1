"""Records in each format as its authors document it, the plain chat behind each record, and records
that are not quite right."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

TEMPLATE = """{%- if tools -%}{{- '<|im_start|>system\\n' -}}
{%- if messages[0]['role'] == 'system' -%}{{- messages[0]['content'] + '\\n' -}}{%- endif -%}
{%- for tool in tools -%}{{- tool | tojson + '\\n' -}}{%- endfor -%}{{- '<|im_end|>\\n' -}}
{%- endif -%}
{%- for message in messages -%}
{%- if not (tools and loop.first and message['role'] == 'system') -%}
{{- '<|im_start|>' + ('user' if message['role'] == 'tool' else message['role']) + '\\n' -}}
{%- if message['role'] == 'tool' -%}{{- '<tool_response>' -}}{%- endif -%}
{%- if message['content'] is string -%}{{- message['content'] -}}{%- else -%}
{%- for part in message['content'] -%}
{%- if part['type'] == 'image' -%}{{- '<|vision_start|><|image_pad|><|vision_end|>' -}}
{%- elif part['type'] == 'video' -%}{{- '<|vision_start|><|video_pad|><|vision_end|>' -}}
{%- else -%}{{- part['text'] -}}{%- endif -%}{%- endfor -%}{%- endif -%}
{%- for call in message['tool_calls'] or [] -%}
{%- set call = call['function'] -%}
{{- '<tool_call>' + call['name'] + ' ' -}}
{%- if call['arguments'] is string -%}{{- call['arguments'] -}}
{%- else -%}{{- call['arguments'] | tojson -}}{%- endif -%}{{- '</tool_call>' -}}
{%- endfor -%}
{{- '<|im_end|>\\n' -}}
{%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- '<|im_start|>assistant\\n' -}}{%- endif -%}"""
"""A chat template with tools, similar to the published one."""

WEATHER = {
    "type": "function",
    "function": {"name": "weather", "parameters": {"type": "object", "properties": {}}},
}
CALL = {"name": "weather", "arguments": {"city": "Oslo"}}


@dataclass(frozen=True)
class Example:
    """A record, and the chat that it stands for."""

    format: str
    record: dict[str, Any]
    chat: list[dict[str, Any]]  # in the form of Hugging Face's template, images by path
    trained: list[str]  # the trained text, without the end of turn
    tools: list[Any] | None = None


def _image(name: str) -> dict[str, str]:
    return {"type": "image", "path": f"media/{name}"}


def _text(text: str) -> dict[str, str]:
    return {"type": "text", "text": text}


def _called(*calls: dict[str, Any], content: str = "") -> dict[str, Any]:
    made = [{"type": "function", "function": call} for call in calls]
    return {"role": "assistant", "content": content, "tool_calls": made}


def _turn(role: str, content: Any) -> dict[str, Any]:
    return {"role": role, "content": content}


_SPOKEN = '<tool_call>weather {"city": "Oslo"}</tool_call>'

EXAMPLES = {
    "openai": Example(
        "messages",
        {
            "messages": [
                _turn("developer", "Be brief."),
                _turn(
                    "user",
                    [
                        {"type": "image_url", "image_url": {"url": "media/0.png"}},
                        _text("What is it?"),
                    ],
                ),
                {"role": "assistant", "content": "A guess.", "weight": 0},
                _turn("user", "Look again."),
                {"role": "assistant", "content": "Noise.", "weight": 1},
            ]
        },
        [
            _turn("system", "Be brief."),
            _turn("user", [_image("0.png"), _text("What is it?")]),
            _turn("assistant", "A guess."),
            _turn("user", "Look again."),
            _turn("assistant", "Noise."),
        ],
        ["Noise."],
    ),
    "openai_tools": Example(
        "messages",
        {
            "messages": [
                _turn("user", "How is Oslo?"),
                _called({**CALL, "arguments": '{"city": "Oslo"}'}) | {"content": None},
                {"role": "tool", "tool_call_id": "1", "content": "Rain."},
                _turn("assistant", "It rains."),
            ],
            "tools": [WEATHER],
        },
        [
            _turn("user", "How is Oslo?"),
            _called({**CALL, "arguments": '{"city": "Oslo"}'}),
            _turn("tool", "Rain."),
            _turn("assistant", "It rains."),
        ],
        [_SPOKEN, "It rains."],
        [WEATHER],
    ),
    "openai_functions": Example(
        "messages",
        {
            "messages": [
                _turn("user", "How is Oslo?"),
                {"role": "assistant", "content": None, "function_call": CALL},
                {"role": "function", "name": "weather", "content": "Rain."},
                _turn("assistant", "It rains."),
            ],
            "functions": [WEATHER["function"]],
        },
        [
            _turn("user", "How is Oslo?"),
            _called(CALL),
            _turn("tool", "Rain."),
            _turn("assistant", "It rains."),
        ],
        [_SPOKEN, "It rains."],
        [WEATHER],
    ),
    "swift": Example(
        "messages",
        {
            "messages": [
                _turn("system", "You are careful."),
                _turn("user", "<image><image>Which is older?"),
                {"role": "assistant", "content": "The first.", "loss": False},
                _turn("user", "<image>And now?"),
                {"role": "assistant", "content": "The third.", "loss": True},
            ],
            "images": ["media/1.png", "media/0.png", "media/2.png"],
        },
        [
            _turn("system", "You are careful."),
            _turn("user", [_image("1.png"), _image("0.png"), _text("Which is older?")]),
            _turn("assistant", "The first."),
            _turn("user", [_image("2.png"), _text("And now?")]),
            _turn("assistant", "The third."),
        ],
        ["The third."],
    ),
    "swift_agent": Example(
        "messages",
        {
            "tools": json.dumps([WEATHER]),
            "messages": [
                _turn("user", "How are Oslo and Rome?"),
                _turn("tool_call", json.dumps(CALL)),
                _turn("tool_call", json.dumps({**CALL, "arguments": {"city": "Rome"}})),
                _turn("tool_response", "Rain."),
                _turn("tool_response", "Sun."),
                _turn("assistant", "Wet and dry."),
            ],
        },
        [
            _turn("user", "How are Oslo and Rome?"),
            _called(CALL, {**CALL, "arguments": {"city": "Rome"}}),
            _turn("tool", "Rain."),
            _turn("tool", "Sun."),
            _turn("assistant", "Wet and dry."),
        ],
        [_SPOKEN + _SPOKEN.replace("Oslo", "Rome"), "Wet and dry."],
        [WEATHER],
    ),
    "llava": Example(
        "conversations",
        {
            "id": "000000033471",
            "image": "media/3.png",
            "conversations": [
                {"from": "human", "value": "<image>\nWhat are the colors?"},
                {"from": "gpt", "value": "White and red."},
                {"from": "human", "value": "What is at the back?"},
                {"from": "gpt", "value": "Nothing."},
            ],
        },
        [
            _turn("user", [_image("3.png"), _text("\nWhat are the colors?")]),
            _turn("assistant", "White and red."),
            _turn("user", "What is at the back?"),
            _turn("assistant", "Nothing."),
        ],
        ["White and red.", "Nothing."],
    ),
    "llava_many": Example(
        "conversations",
        {
            "image": ["media/3.png", "media/1.png"],
            "conversations": [
                {"from": "human", "value": "<image> and\n<image>\nCompare."},
                {"from": "gpt", "value": "Both are noise."},
            ],
        },
        [
            _turn("user", [_image("3.png"), _text(" and\n"), _image("1.png"), _text("\nCompare.")]),
            _turn("assistant", "Both are noise."),
        ],
        ["Both are noise."],
    ),
    "sharegpt_tools": Example(
        "conversations",
        {
            "system": "Use your tools.",
            "tools": json.dumps([WEATHER]),
            "images": ["media/2.png"],
            "conversations": [
                {"from": "human", "value": "<image>Which city, and how is it?"},
                {"from": "function_call", "value": json.dumps(CALL)},
                {"from": "observation", "value": "Rain."},
                {"from": "gpt", "value": "Oslo; it rains.", "weight": 0.5},
            ],
        },
        [
            _turn("system", "Use your tools."),
            _turn("user", [_image("2.png"), _text("Which city, and how is it?")]),
            _called(CALL),
            _turn("tool", "Rain."),
            _turn("assistant", "Oslo; it rains."),
        ],
        [_SPOKEN, "Oslo; it rains."],
        [WEATHER],
    ),
}

DOCUMENTS = {
    "caption": ("caption", {"image": "media/0.png", "caption": "Two owls."}),
    "captions of images": (
        "caption",
        {"images": ["media/0.png", "media/1.png"], "text": "Two owls, a hen."},
    ),
    "interleaved": (
        "interleaved",
        {"texts": ["One ", None, " two"], "images": [None, "media/0.png", None]},
    ),
}


def _talk(*turns: Any, **more: Any) -> dict[str, Any]:
    made = [_turn(*turn) if isinstance(turn, tuple) else turn for turn in turns]
    return {"messages": made, **more}


def _llava(*turns: Any, **more: Any) -> dict[str, Any]:
    made = [
        {"from": turn[0], "value": turn[1]} if isinstance(turn, tuple) else turn for turn in turns
    ]
    return {"conversations": made, **more}


_Q, _A, _PIC = ("user", "q"), ("assistant", "a"), ("user", "<image>q")
_HUMAN, _GPT, _SEEN = ("human", "q"), ("gpt", "a"), ("human", "<image>\nq")

MALFORMED: dict[str, list[tuple[dict[str, Any], str]]] = {
    "messages": [
        ({"messages": []}, "at least one message"),
        ({"messages": "no json"}, "messages is text, but not JSON"),
        ({"messages": [["user", "q"]]}, "message 1 must be an object"),
        (_talk({"content": "q"}, _A), "message 1 must be an object with a role"),
        (
            _talk(("narrator", "q"), _A),
            "the role 'narrator' is not known; use one of system",
        ),
        (_talk(_Q), "nothing would be trained"),
        (_talk(_Q, ("assistant", "  ")), "message 2, an assistant turn, is empty"),
        (_talk(("user", 3), _A), "message 1: content is int"),
        (
            _talk({"role": "user", "contents": "q"}, _A),
            "has no content; its keys are role, contents",
        ),
        (_talk(("user", None), _A), "message 1 has no content"),
        (
            _talk(("user", [{"type": "text", "txt": "q"}]), _A),
            "has no text; its keys are type, txt",
        ),
        (_talk(("user", [{"type": "audio"}]), _A), "not 'audio'"),
        (_talk(_PIC, _A), "more image placeholders than the 0"),
        (_talk(_PIC, _A, images=["media/0.png"] * 2), "2 images are given, but only 1"),
        (_talk(_PIC, _A, images=["media/none.png"]), "media/none.png: No such file"),
        (_talk(_PIC, _A, images=["https://x/0.png"]), "is remote"),
        (
            _talk(_Q, {**_turn(*_A), "loss": "false"}),
            "loss is 'false': it takes true, false or a number from 0 to 1e6, without quotes.",
        ),
        (
            _talk(_Q, {**_turn(*_A), "weight": -1}),
            "weight is -1: it takes a number from 0 to 1e6.",
        ),
        (_talk(_Q, {**_turn(*_A), "loss": False}), "nothing would be trained"),
        (_talk(_Q, _A, audios=["a.wav"]), "audios is given"),
        (
            _talk(("user", [{"type": "text", "text": "<image>?"}]), _A, images=["media/0.png"]),
            "but only 0 image placeholders use them. <image> in a part of type text is text: "
            'write a part {"type": "image"} where the image belongs.',
        ),
        (_talk(("user", "<ref-object>?"), _A), "message 1: <ref-object> takes its text"),
        (_talk(_Q, ("tool_call", "not json"), _A), "message 2, a tool call, is text"),
        (_talk(_Q, ("tool_call", '{"arguments": {}}'), _A), "a tool call, has no name"),
        (_talk(_Q, _A, tools="{"), "tools is text, but not JSON"),
        (_talk(_Q, _A, tools=json.dumps({"a": 1})), "tools is dict; a list"),
    ],
    "conversations": [
        ({"conversations": []}, "at least one message"),
        ({"conversations": {"from": "human"}}, "must be a list"),
        ({"conversations": "[1"}, "conversations is text, but not JSON"),
        (_llava("q", "a"), "turn 1 must be an object with from and value"),
        (_llava({"value": "q"}, _GPT), "turn 1 must be an object with from"),
        (_llava(_HUMAN, {"from": "gpt"}), "turn 2: value is NoneType"),
        (_llava(_HUMAN, {"from": "gpt", "value": ["a"]}), "turn 2: value is list"),
        (
            _llava(("alien", "q"), _GPT),
            "the role 'alien' is not known; use one of system, human",
        ),
        (_llava(_HUMAN), "nothing would be trained"),
        (_llava(_HUMAN, ("gpt", "")), "message 2, an assistant turn, is empty"),
        (_llava(_SEEN, _GPT), "more image placeholders than the 0"),
        (_llava(_HUMAN, _GPT, image="media/0.png"), "1 images are given, but only 0"),
        (_llava(_SEEN, _GPT, image="media/0.png", images=["media/0.png"]), "both image and images"),
        (_llava(_SEEN, _GPT, image="media/none.png"), "media/none.png: No such file"),
        (_llava(_SEEN, _GPT, image={"path": None}), "image reference is None"),
        (_llava(("system", "s"), _HUMAN, _GPT, system="t"), "both a system text and a system turn"),
        (_llava(_HUMAN, _GPT, system=["s"]), "system is list"),
        (_llava(_HUMAN, ("function_call", "x"), _GPT), "a tool call, is text, but not JSON"),
    ],
    "caption": [
        ({"text": None, "caption": None, "image": "media/0.png"}, "none of messages"),
        ({"text": ""}, "holds no text"),
        ({"text": " \n"}, "holds no text"),
        ({"text": 3}, "must be text"),
        ({"caption": ["a"]}, "must be text"),
        ({"caption": "a", "image": "media/none.png"}, "media/none.png: No such file"),
        ({"caption": "a", "image": 5}, "reference is 5"),
        ({"caption": "a", "image": "data:image/png;base64,!"}, "not valid base64"),
        ({"caption": "a", "image": "http://x/y.png"}, "is remote"),
        ({"caption": "a", "image": "media/0.png", "images": ["media/0.png"]}, "both image and"),
        ({"caption": "a", "weight": "heavy"}, "weight is 'heavy'"),
        ({"caption": "a", "weight": 0}, "no token of it is trained"),
        ({"caption": "<|image_pad|>"}, "1 image placeholders for 0 images"),
    ],
    "interleaved": [
        ({"texts": []}, "holds no text"),
        ({"texts": "a"}, "must be lists"),
        ({"texts": ["a"], "images": "media/0.png"}, "must be lists"),
        ({"texts": ["a", "b"], "images": [None]}, "pad with null"),
        ({"texts": ["a", None], "images": [None, None]}, "entry 1: exactly one"),
        ({"texts": ["a"], "images": ["media/0.png"]}, "entry 0: exactly one"),
        ({"texts": [None], "images": ["media/0.png"]}, "holds no text"),
        ({"texts": ["a", {"user": "b"}], "images": [None, None]}, "entry 1: texts holds dict"),
        ({"texts": ["a", None], "images": [None, "media/none.png"]}, "none.png: No such file"),
        ({"texts": ["a", None], "images": [None, 7]}, "reference is 7"),
        ({"texts": ["a"], "weight": -2}, "weight is -2"),
        ({"texts": [" "]}, "holds no text"),
    ],
}
"""At least ten malformed records of each format, each with a part of its message."""
