"""Arguments of the chat template reach it, the nearest ones; what it does not read is named."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from mcore_qwen3vl.data.config import DataConfig, parse_sources
from mcore_qwen3vl.data.encoding.preparation import Preparation, RawSample
from mcore_qwen3vl.data.records.media import MediaFolder
from mcore_qwen3vl.data.records.reading import PLAIN, BadSample, Reading
from mcore_qwen3vl.errors import BadInput
from mcore_qwen3vl.tiny.tiny_checkpoint import chat_template
from tests.data.records.format_examples import CALL, WEATHER
from tests.data.records.published_templates import SWITCHED, THINKING

OFF, ON = {"enable_thinking": False}, {"enable_thinking": True}
Q, A = {"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Yo."}
CALLED = {
    **A, "tool_calls": [{"type": "function", "function": {**CALL, "arguments": {"city": "Oslo"}}}]
}  # fmt: skip
TINY = chat_template("qwen3.5")
RECORDS: dict[str, dict[str, Any]] = {
    "an answer": {"messages": [Q, A]},
    "a system text": {"messages": [{"role": "system", "content": "Be brief."}, Q, A]},
    "reasoning": {"messages": [Q, {**A, "reasoning_content": "Hm."}]},
    "several turns": {"messages": [Q, {**A, "weight": 0}, Q, A]},
    "tools": {"messages": [Q, CALLED], "tools": [WEATHER]},
    "a result": {
        "messages": [Q, {**CALLED, "weight": 0}, {"role": "tool", "content": "wet"}, A],
        "tools": [WEATHER],
    },
}


def prepared(processor: Any, reading: Reading = PLAIN) -> Preparation:
    sources = parse_sources(["data.jsonl"], reading)
    return Preparation(processor, DataConfig(1024), sources)


def planned(preparation: Preparation, record: Any) -> Any:
    common = {"__key__": "0", "__restore_key__": ()}
    return preparation.plan(
        RawSample(**common, record=record, folder=MediaFolder(Path(), {}), source=0)
    )


@pytest.mark.parametrize("name", RECORDS)
@pytest.mark.parametrize("arguments", [{}, ON, OFF], ids=["none", "on", "off"])
@pytest.mark.parametrize(
    "template", [THINKING, SWITCHED, TINY], ids=["Thinking", "switched", "tiny Qwen3.5"]
)
def test_tokens_are_those_of_transformers_with_the_same_arguments(
    name: str, arguments: dict[str, bool], template: str, processor: Any
) -> None:
    processor.chat_template = template
    record = RECORDS[name]
    plain = [{k: v for k, v in m.items() if k != "weight"} for m in record["messages"]]
    options: Any = {"tools": record.get("tools"), "tokenize": False, **arguments}
    whole = processor.apply_chat_template(plain, **options)
    prompt = processor.apply_chat_template(plain[:-1], add_generation_prompt=True, **options)
    given = {**record, "chat_template_kwargs": arguments}
    if not whole.startswith(prompt):  # reasoning, where the prompt says that there is none
        assert (name, arguments) == ("reasoning", OFF)
        assert template in (SWITCHED, TINY)
        with pytest.raises(BadSample, match="no model ever generates this turn"):
            planned(prepared(processor), given)
        return
    plan = planned(prepared(processor), given)
    tokens = [
        processor.tokenizer(text, add_special_tokens=False)["input_ids"]
        for text in (prompt, whole[len(prompt) :])
    ]
    assert plan.input_ids.tolist() == [*tokens[0], *tokens[1]]
    trained = plan.loss_weights > 0
    answer = whole[len(prompt) :].rstrip()
    assert processor.tokenizer.decode(plan.input_ids[trained]) == answer
    assert not trained[: len(tokens[0])].any()
    named = [item.name for item in plan.unused if item.where == "chat_template_kwargs"]
    assert named == (list(arguments) if template is THINKING else [])


@pytest.mark.parametrize(
    ("name", "arguments", "answer"),
    [
        ("an answer", {}, "Yo."),
        ("an answer", ON, "\n</think>\n\nYo."),
        ("an answer", OFF, "Yo."),
        ("reasoning", {}, "<think>\nHm.\n</think>\n\nYo."),
        ("reasoning", ON, "Hm.\n</think>\n\nYo."),
        (
            "tools",
            {},
            "Yo.\n<tool_call>\n<function=weather>\n<parameter=city>\nOslo\n</parameter>\n"
            "</function>\n</tool_call>",
        ),
        ("a result", {}, "Yo."),
    ],
)
def test_the_tiny_qwen3_5_thinks_and_calls_tools(
    name: str, arguments: dict[str, bool], answer: str, processor: Any
) -> None:
    processor.chat_template = TINY
    plan = planned(prepared(processor), {**RECORDS[name], "chat_template_kwargs": arguments})
    trained = plan.input_ids[plan.loss_weights > 0]
    assert processor.tokenizer.decode(trained) == f"{answer}<|im_end|>"
    assert not plan.unused


def test_a_plain_chat_of_the_tiny_qwen3_5_is_that_of_qwen3_vl(processor: Any) -> None:
    image = {"type": "image", "image": "a.png"}
    turns = [{"role": "system", "content": "Be brief."}, {**Q, "content": [image]}, A, Q]
    options: Any = {"add_generation_prompt": True, "tokenize": False}
    texts = [
        processor.apply_chat_template(turns, chat_template=template, **options)
        for template in (chat_template(), TINY)
    ]
    assert texts[0] == texts[1]


NOT_BY_DEFAULT = SWITCHED.replace(
    "enable_thinking is defined and enable_thinking is false", "not enable_thinking"
)
"""A template that is asked to think, as those of Qwen3.5's small models."""
NEVER = SWITCHED.replace("enable_thinking is defined and enable_thinking is false", "true")
THOUGHT = RECORDS["reasoning"]
INLINE = {"messages": [Q, {**A, "content": "<think>\nHm.\n</think>\n\nYo."}]}


@pytest.mark.parametrize("record", [THOUGHT, INLINE], ids=["a key", "in the text"])
@pytest.mark.parametrize("given", [{}, OFF], ids=["by default", "asked not to"])
def test_reasoning_behind_a_prompt_without_it_names_the_argument_that_helps(
    given: dict[str, bool], record: dict[str, Any], processor: Any
) -> None:
    """The remedy of the message, typed, makes the record one that trains, with its reasoning."""
    processor.chat_template = NOT_BY_DEFAULT
    with pytest.raises(BadSample, match=r"ends with .*</think>") as caught:
        planned(prepared(processor), {**record, "chat_template_kwargs": given})
    said = str(caught.value)
    assert "--train-on" not in said
    typed = re.search('"chat_template_kwargs": ({.*?})', said)
    assert typed is not None
    plan = planned(prepared(processor), {**record, "chat_template_kwargs": json.loads(typed[1])})
    answer = processor.tokenizer.decode(plan.input_ids[plan.loss_weights > 0])
    assert answer == "Hm.\n</think>\n\nYo.<|im_end|>"
    flag = re.search("--chat-template-kwargs '(.*?)'", said)
    assert (flag is None) is bool(given)  # the record's own would win over the flag
    if flag is not None:
        reading = Reading(chat_template_kwargs=flag[1])
        assert planned(prepared(processor, reading), record).input_ids.tolist() == (
            plan.input_ids.tolist()
        )


def test_reasoning_for_a_template_that_never_thinks(processor: Any) -> None:
    processor.chat_template = NEVER
    with pytest.raises(BadSample, match="take the reasoning out, or use the template of a model"):
        planned(prepared(processor), THOUGHT)
    assert planned(prepared(processor), RECORDS["an answer"]).trained_tokens


def test_without_thinking_the_answer_follows_an_empty_block(processor: Any) -> None:
    processor.chat_template = SWITCHED
    plans = [
        planned(prepared(processor), {"messages": [Q, A], "chat_template_kwargs": arguments})
        for arguments in (ON, OFF)
    ]
    answers = [processor.tokenizer.decode(one.input_ids[one.loss_weights > 0]) for one in plans]
    assert answers == ["\n</think>\n\nYo.<|im_end|>", "Yo.<|im_end|>"]


def test_a_record_wins_over_its_data_set_and_that_over_the_run(
    processor: Any, tmp_path: Path
) -> None:
    processor.chat_template = "{{ a }} {{ b }} {{ c }}" + SWITCHED
    (tmp_path / "data.jsonl").write_text("")
    mixture = tmp_path / "mixture.yaml"
    of_data_set = json.dumps({"b": "set", "c": "set"})
    mixture.write_text(
        f"datasets:\n  - {{path: data.jsonl, chat_template_kwargs: {of_data_set}}}\n"
    )
    of_run = Reading(chat_template_kwargs=json.dumps(dict.fromkeys("abc", "run")))
    preparation = Preparation(processor, DataConfig(1024), parse_sources([str(mixture)], of_run))
    record = {"messages": [Q, A], "chat_template_kwargs": json.dumps({"c": "record"})}
    text = processor.tokenizer.decode(planned(preparation, record).input_ids)
    assert text.startswith("run set record<|im_start|>")


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ("[1]", "an object is needed"),
        ("{", "no JSON object"),
        ({"tools": []}, "'tools', which is no argument"),
        ({"chat_template": "x"}, "'chat_template', which is no argument"),
        ({"a b": 1}, "'a b', which is no argument"),
    ],
)
def test_what_is_no_argument_of_a_template_is_refused(
    given: Any, message: str, processor: Any
) -> None:
    record = {"messages": [Q, A], "chat_template_kwargs": given}
    with pytest.raises(BadSample, match=message):
        planned(prepared(processor), record)
    if isinstance(given, str):
        with pytest.raises(BadInput, match=message):
            Reading(chat_template_kwargs=given)
