"""Prompts and answers are the tokens that generation has, with Qwen's own vocabulary."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from mcore_qwen3vl.data import load_processor
from mcore_qwen3vl.data.records.reading import BadSample, Reading
from mcore_qwen3vl.generation.prompts import process_conversations
from mcore_qwen3vl.tiny import read_vocabulary, tiny_config, write_processor
from tests.data.encoding.test_planning import planned
from tests.data.records.published_templates import INSTRUCT, THINKING

ANSWERS = (
    "Paris.", "\nParis.", "\n\nParis.", "\n\n\n\nParis.", "\r\nParis.", " \n Paris.", "  Paris.",
    "\tParis.", "  \u4e2d", " 42", "42 is it.", "\u5df4\u9ece\u3002", "\U0001f642\U0001f680!",
    "\u0301accent", "\ufe0fstyle", "assistant", "<think>\n\n</think>\n\nParis.", "{\n\n}",
    "<think>Well.</think>Paris.", "<tool_call>\n{}\n</tool_call>", "\u00a0\u2003x", "'s", "\n's",
)  # fmt: skip


@pytest.fixture(scope="module")
def qwen(tmp_path_factory: pytest.TempPathFactory) -> Any:
    (package,) = find_spec("dashscope").submodule_search_locations  # not imported: it is a client
    vocabulary = read_vocabulary(Path(package) / "resources" / "qwen.tiktoken")
    path = tmp_path_factory.mktemp("qwen")
    write_processor(path, tiny_config()["vision_config"], vocabulary)
    return load_processor(path)


def prompt_ids(processor: Any, messages: list[dict[str, Any]]) -> list[int]:
    """Return the tokens that ``generate`` gives the model."""
    return process_conversations(processor, [messages])["input_ids"][0].tolist()


def talk(*answers: str, **last: Any) -> list[dict[str, Any]]:
    messages: list[dict[str, Any]] = [{"role": "system", "content": "Be brief."}]
    for answer in answers:
        messages += [
            {"role": "user", "content": "Capital of France?"},
            {"role": "assistant", "content": answer},
        ]
    messages[-1] |= last
    return messages


@pytest.mark.parametrize(
    ("template", "reasoning"),
    [
        pytest.param(INSTRUCT, None, id="instruct"),
        pytest.param(THINKING, "\n\nHm.\n", id="thinking"),
        *(
            pytest.param(THINKING, reasoning, id=f"thinking {reasoning!r}", marks=pytest.mark.slow)
            for reasoning in (None, "", "Hm.", " \n")
        ),
    ],
)
def test_an_answer_is_trained_after_the_prompt_that_generation_has(
    qwen: Any, template: str, reasoning: str | None
) -> None:
    qwen.chat_template = template
    extra = {} if reasoning is None else {"reasoning_content": reasoning}
    for answer in ANSWERS:
        messages = talk("\n\nBefore.", answer, **extra)
        if extra and "<think>" in answer:
            with pytest.raises(BadSample, match="message 5 has its reasoning twice"):
                planned(qwen, {"messages": messages}, Path(), Reading(train_on="last"))
            continue
        plan = planned(qwen, {"messages": messages}, Path(), Reading(train_on="last"))[0]
        prompt = prompt_ids(qwen, messages[:-1])
        assert plan.input_ids[: len(prompt)].tolist() == prompt
        answered = [1.0] * plan.trained_tokens + [0.0]  # a line break follows the end of turn
        assert plan.loss_weights.tolist() == [0.0] * len(prompt) + answered
        text = qwen.apply_chat_template(messages)
        assert qwen.tokenizer.decode(plan.input_ids.tolist()) == text


def test_every_trained_turn_follows_its_own_prompt(qwen: Any) -> None:
    qwen.chat_template = INSTRUCT
    refused = 0
    for answer in ANSWERS:
        messages = talk(answer, "Yes.", answer)
        first = prompt_ids(qwen, messages[:2])
        later = qwen.tokenizer(qwen.apply_chat_template(messages[:3]))["input_ids"]
        if later[: len(first)] != first:
            refused += 1
            with pytest.raises(BadSample, match=r"message 3 begins with .*other tokens as"):
                planned(qwen, {"messages": messages}, Path())[0]
            continue
        plan = planned(qwen, {"messages": messages}, Path())[0]
        for index in (2, 4, 6):
            prompt = prompt_ids(qwen, messages[:index])
            assert plan.input_ids[: len(prompt)].tolist() == prompt
            assert plan.loss_weights[len(prompt) - 1] == 0 < plan.loss_weights[len(prompt)]
    assert 4 <= refused < len(ANSWERS) / 2
