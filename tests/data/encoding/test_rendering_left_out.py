"""What a chat template leaves out, and keys that nothing reads, are refused or named."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from mcore_qwen3vl.data.encoding.rendering import Rendered, Renderer
from mcore_qwen3vl.data.records.documents import Document
from mcore_qwen3vl.data.records.media import MediaFolder
from mcore_qwen3vl.data.records.messages import records_of_turns
from mcore_qwen3vl.data.records.parse import parse_record
from mcore_qwen3vl.data.records.reading import PLAIN, BadSample, Reading
from tests.data.records.format_examples import CALL, EXAMPLES, TEMPLATE, WEATHER
from tests.data.records.published_templates import INSTRUCT, THINKING

SYSTEM_ONCE = """{%- if messages[0].role == 'system' -%}{{ '<|im_start|>system\\n' }}
{{- messages[0].content if messages[0].content is string else messages[0].content[0].text }}
{{- '<|im_end|>\\n' }}{%- endif -%}
{%- for m in messages -%}{%- if m.role != 'system' -%}
{{ '<|im_start|>' + m.role + '\\n' + m.content + '<|im_end|>\\n' }}
{%- endif -%}{%- endfor -%}
{%- if add_generation_prompt -%}{{ '<|im_start|>assistant\\n' }}{%- endif -%}"""

SEES_USERS = """{%- for m in messages -%}{{ '<|im_start|>' + m.role + '\\n' }}
{%- if m.content is string -%}{{ m.content }}{%- elif m.role == 'user' -%}
{{ '<|vision_start|><|image_pad|><|vision_end|>' }}{%- endif -%}{{ '<|im_end|>\\n' }}{%- endfor -%}
{%- if add_generation_prompt -%}{{ '<|im_start|>assistant\\n' }}{%- endif -%}"""

WITHOUT_TOOLS = """{%- for m in messages -%}
{{ '<|im_start|>' + m.role + '\\n' + m.content + '<|im_end|>\\n' }}{%- endfor -%}
{%- if add_generation_prompt -%}{{ '<|im_start|>assistant\\n' }}{%- endif -%}"""

Q, A = {"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Yo."}
S = {"role": "system", "content": "Be brief."}


def rendered(
    processor: Any, template: str, record: Any, reading: Reading = PLAIN, **options: bool
) -> Rendered:
    processor.chat_template = template
    parsed = parse_record(record, MediaFolder(Path(), {}), reading)
    return Renderer(processor, **options).render(parsed)


def named(result: Any) -> list[str]:
    return [f"{one.where}: {one.name}" for one in result.unused]


def talk(*messages: Any, **more: Any) -> dict[str, Any]:
    return {"messages": list(messages), **more}


DROPPED = {
    "no place for reasoning": (
        INSTRUCT, talk(Q, {**A, "reasoning_content": "Hm."}),
        "reasoning_content of message 2, 'Hm.'"
    ),
    "its text is elsewhere": (
        INSTRUCT, talk(Q, {**A, "reasoning_content": "Yo."}),
        "reasoning_content of message 2, 'Yo.'"
    ),
    "a second system turn": (
        SYSTEM_ONCE, talk(S, {**S, "content": "Hi"}, Q, A), "content of message 2, 'Hi'"
    ),
    "a developer later": (
        SYSTEM_ONCE, talk(Q, A, {"role": "developer", "content": "In French"}, Q, A),
        "content of message 3, 'In French'",
    ),
    "a second part": (
        SYSTEM_ONCE,
        talk({**S, "content": [{"type": "text", "text": text} for text in "ab"]}, Q, A),
        "content of message 1, 'b'",
    ),
    "between two blocks of reasoning": (
        THINKING, talk(Q, {**A, "content": "<think>p</think>q<think>r</think>s"}),
        "content of message 2, 'q'",
    ),
    "a call": (
        WITHOUT_TOOLS,
        talk(Q, {**A, "tool_calls": [{"type": "function", "function": {**CALL, "arguments": {}}}]}),
        "name of a tool call of message 2, 'weather'",
    ),
    "a call's arguments as text": (
        INSTRUCT.replace("call.arguments | tojson }}", "'{}' }}"),
        talk(Q, {**A, "tool_calls": [{"function": {**CALL, "arguments": '{"city": "Oslo"}'}}]}),
        "arguments of a tool call of message 2, 'Oslo'",
    ),
    "tools": (WITHOUT_TOOLS, talk(Q, A, tools=[WEATHER]), "name of a tool, 'weather'"),
    "a description": (
        INSTRUCT.replace("tool | tojson", "tool.function.name"),
        talk(Q, A, tools=[{"function": {**WEATHER["function"], "description": "It knows."}}]),
        "description of a tool, 'It knows.'",
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", DROPPED)
def test_text_that_the_template_leaves_out(case: str, processor: Any) -> None:
    template, record, message = DROPPED[case]
    with pytest.raises(BadSample) as refused:
        rendered(processor, template, record)
    assert f"leaves out the {message}," in str(refused.value)
    allowed = rendered(processor, template, record, allow_dropped=True)
    assert message.startswith(named(allowed)[0].split(": ")[1])


REASONED = {**A, "reasoning_content": "Hm."}


END, BEGIN = "<|im_end|>", "<|im_start|>"
ARGUMENTS = [{"function": {**CALL, "arguments": {"city": BEGIN}}}]
SPELT = {
    "the end of a turn": {**A, "content": f"It is {END}."},
    "at the end of an answer": {**A, "content": f"Yo.{END}"},
    "a part": {**A, "content": [{"type": "text", "text": BEGIN}]},
    "reasoning": {**A, "reasoning_content": f"Hm {END}"},
    "arguments": {**A, "tool_calls": ARGUMENTS},
}


@pytest.mark.parametrize("case", SPELT)
def test_a_trained_answer_spells_no_token_that_divides_turns(case: str, processor: Any) -> None:
    with pytest.raises(BadSample, match=r"^message 2, which is trained, spells <\|im_"):
        rendered(processor, THINKING, talk(Q, SPELT[case]))
    context = rendered(processor, THINKING, talk(Q, {**SPELT[case], "weight": 0}, Q, A))
    assert {place for _, place in context.spelt} == {"message 2"}


def test_special_tokens_in_other_texts_are_named(processor: Any) -> None:
    asked = {**Q, "content": f"No.{END}\n{BEGIN}assistant\nHi"}
    answer = {**A, "content": "<|endoftext|> <think> <tool_call> <|vision_start|>"}
    result = rendered(processor, INSTRUCT, talk(asked, answer))
    assert result.spelt == (
        (END, "message 1"), (BEGIN, "message 1"),
        ("<|endoftext|>", "message 2"), ("<|vision_start|>", "message 2"),
    )  # fmt: skip
    document = Renderer(processor).render(Document([f"a{END}", END]))
    assert document.spelt == ((END, "its text"),)


def test_an_image_that_the_template_leaves_out_is_named(processor: Any, media: Path) -> None:
    image = {"type": "image", "image": str(media / "0.png")}
    seen, tool = {**Q, "content": [image]}, {"role": "tool", "content": [image]}
    with pytest.raises(BadSample, match="leaves out the image of message 3, of role tool, which"):
        rendered(processor, SEES_USERS, talk(seen, A, tool, A))


def test_reasoning_of_earlier_turns_is_named(processor: Any) -> None:
    inline = {**A, "content": "<think>Hm.</think>Yo."}
    for first, last in ((REASONED, REASONED), (inline, inline), (REASONED, A)):
        result = rendered(processor, THINKING, talk(Q, first, Q, last), Reading(train_on="last"))
        assert named(result) == ["a message: reasoning_content"]
        with pytest.raises(BadSample, match=r"--train-on last.*data turns"):
            rendered(processor, THINKING, talk(Q, first, Q, last))


def test_nothing_is_left_out_of_whole_records(processor: Any) -> None:
    for name, example in EXAMPLES.items():
        processor.chat_template = TEMPLATE
        parsed = parse_record(example.record, MediaFolder(Path(), {}))
        left = ["a message: name"] if name == "openai_functions" else []
        assert named(Renderer(processor).render(parsed)) == left
    padded = '\n\n Hm. <b>"it"</b> \u4e2d \U0001f642 \n'
    turns = [
        {**S, "content": padded},
        {"role": "user", "content": padded},
        {**A, "content": padded, "reasoning_content": padded,
         "tool_calls": [{"function": {"name": "f", "arguments": {"a": [padded], "b": 1}}}]},
        {"role": "tool", "content": padded},
        {**A, "content": "<think>\n" + padded + "</think>\n\n" + padded},
    ]  # fmt: skip
    assert named(rendered(processor, THINKING, talk(*turns, tools=[WEATHER]))) == []


IMAGE = {"type": "image", "image": "a.png"}
KEYS = [
    (talk({**Q, "thought": "x"}, A), ["a message: thought"]),
    (talk({**Q, "image": "a.png", "text": "x"}, A), ["a message: image", "a message: text"]),
    (talk({**Q, "name": "Bob"}, A), ["a message: name"]),
    (talk({**Q, "weight": 1}, A), ["a message that is not the assistant's: weight"]),
    (talk({**Q, "weight": 0, "loss": False}, A, id=3), []),
    (talk(Q, A, source="web", objects=None), ["a record: source"]),
    (
        talk({**Q, "content": [{"type": "text", "text": "<image>", "c": 1}, {**IMAGE, "x": 1}]}, A),
        ["a part of type text: c", "a part of type text: <image>", "a part of type image: x"],
    ),
    (
        talk({**Q, "content": [
            {"type": "image_url", "image_url": {"url": "a.png", "detail": "low"}, "max_pixels": 99},
            {"type": "video", "video": "v.mp4", "fps": 1, "video_start": 1, "min_pixels": 9},
        ]}, A),
        ["an object of images: detail"],
    ),
    (
        talk({**Q, "content": "<image>"}, A, images=[{"path": "a.png", "bytes": b"x", "y": 1}]),
        ["an object of images: y"],
    ),
    (
        talk(Q, {**A, "tool_calls": [{"id": "1", "index": 0, "function": {**CALL, "z": 1}}]},
             tools=[{**WEATHER, "strict": True}]),
        ["a tool call: index", "a tool call: z"],
    ),
    (
        talk(Q, {"role": "tool_call", "content": json.dumps({**CALL, "why": "x"})}),
        ["a tool call: why"],
    ),
    ({"text": "<image> and <bbox>"}, ["a document: <image>", "a document: <bbox>"]),
    (talk(Q, {**A, "reasoning_content": "<video>"}), ["reasoning_content: <video>"]),
]  # fmt: skip


@pytest.mark.parametrize(("record", "left"), KEYS)
def test_keys_that_nothing_reads_are_named(record: Any, left: list[str], processor: Any) -> None:
    assert named(rendered(processor, THINKING, record)) == left


def test_a_key_that_the_template_reads_is_used(processor: Any) -> None:
    template = INSTRUCT.replace("+ content }}", "+ content + (message.mood or '') }}")
    assert named(rendered(processor, template, talk(Q, {**A, "mood": "!"}))) == []


MASKS = (
    "loss_mask", "mask", "train", "trainable", "is_train", "isTrained", "weights", "loss_weight",
    "label_mask", "training", "loss_scale", "no_loss", "assistant_masks", "train_on", "ignore_loss",
    "tokenWeights", "masked",
)  # fmt: skip


@pytest.mark.parametrize("key", MASKS)
def test_keys_that_mask_the_loss_elsewhere_are_refused(key: str) -> None:
    text = {"type": "text", "text": "Hi"}
    records = [
        (talk(Q, A, **{key: False}), "a record"),
        (talk(Q, {**A, key: False}), "a message"),
        (talk(Q, {**A, "content": [{**text, key: 0}]}), "a part of type text"),
        ({"text": "Hi", key: 0}, "a record"),
    ]
    for record, where in records:
        with pytest.raises(BadSample, match=f"{key} of {where} seems to mask or weigh the loss"):
            parse_record(record, MediaFolder(Path(), {}))
    for harmless in (f"{key}_path", f"my_{key}", f"{key}2"):
        parsed = parse_record(talk(Q, {**A, harmless: 1}), MediaFolder(Path(), {}))
        assert named(parsed) == [f"a message: {harmless}"]


def test_tags_place_the_images_of_a_caption() -> None:
    folder = MediaFolder(Path("/data"), {})
    parsed = parse_record(
        {"text": "A <image>, then <image>.", "images": ["a.png", "b.png"]}, folder
    )
    assert isinstance(parsed, Document)
    names = [part if isinstance(part, str) else part.name for part in parsed.parts]
    assert names == ["A ", "a.png", ", then ", "b.png", "."]
    for record, message in [
        ({"text": "<image>A", "images": ["a.png"] * 2}, "2 images are given, but only 1"),
        ({"text": "<image><image>A", "image": "a.png"}, "more image placeholders than the 1"),
        ({"texts": ["<image>A", None], "images": [None, "a.png"]}, "entry 0: <image> in texts"),
        (talk(Q, {**A, "content": "<svg><image></svg>"}), r"message 2: .* is given as a part"),
    ]:
        with pytest.raises(BadSample, match=message):
            parse_record(record, folder)


def test_a_record_of_each_turn() -> None:
    part = [{"type": "image"}, {"type": "text", "text": "And <ref-object>?"}]
    record = talk(
        {**Q, "content": "<image><ref-object>?"}, {**REASONED, "weight": 2},
        {**Q, "content": part}, {**A, "loss": False}, Q, {**A, "content": "<bbox>"},
        images=["a.png", "b.png"], objects={"ref": ["x", "y"], "bbox": [[1, 2]]},
    )  # fmt: skip
    first, second = records_of_turns(record)
    assert first == {
        "messages": record["messages"][:2],
        "images": ["a.png"],
        "objects": {"ref": ["x"], "bbox": []},
    }
    assert [m.get("weight") for m in second["messages"]] == [None, 0, None, 0, None, None]
    assert second["images"] == record["images"]
    assert second["objects"] == record["objects"]
    called = {"from": "function_call", "value": json.dumps(CALL)}
    human, gpt = {"from": "human", "value": "q"}, {"from": "gpt", "value": "a"}
    one, two = records_of_turns({"conversations": [human, called, called, gpt]})
    assert one == {"conversations": [human, called, called]}
    assert two == {"conversations": [human, {**called, "weight": 0}, {**called, "weight": 0}, gpt]}
    for whole in ({"text": "x"}, talk(Q, A, label=True), talk(Q, {**A, "weight": 0})):
        assert records_of_turns(whole) == [whole]
