"""Which text a template makes of a conversation, and templates that cannot train it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from mcore_qwen3vl.data.encoding.rendering import Renderer
from mcore_qwen3vl.data.records.media import MediaFolder
from mcore_qwen3vl.data.records.parse import parse_record
from mcore_qwen3vl.data.records.reading import BadSample
from tests.data.conftest import chat
from tests.data.encoding.test_planning import ANSWER, RECORDS, planned, trained_text

FORGETFUL = """{%- for m in messages -%}
{{- '<|im_start|>' + m['role'] + '\n' -}}
{%- if m['role'] == 'assistant' and not loop.last -%}
{{- m['content'].split('</think>')[-1] -}}{%- else -%}{{- m['content'] -}}{%- endif -%}
{{- '<|im_end|>\n' -}}{%- endfor -%}
{%- if add_generation_prompt -%}{{- '<|im_start|>assistant\n' -}}{%- endif -%}"""


def test_an_answer_to_nothing_is_refused(processor: Any, media: Path) -> None:
    record = chat(("assistant", "hello"), ("user", "q"), ("assistant", "a"))
    with pytest.raises(BadSample, match="begins with a turn of the assistant"):
        planned(processor, record, media)
    record["messages"][0]["weight"] = 0
    plan, _ = planned(processor, record, media)
    assert (plan.loss_weights > 0).any()


def test_template_that_rewrites_history_is_refused(processor: Any, media: Path) -> None:
    processor.chat_template = FORGETFUL
    once = chat(("user", "a"), ("assistant", "<think>b</think>c"))
    plan, _ = planned(processor, once, media)
    assert trained_text(processor, plan) == ["<think>b</think>c<|im_end|>"]
    twice = chat(*[(m["role"], m["content"]) for m in once["messages"]] * 2)
    with pytest.raises(BadSample, match="renders message 2 differently"):
        planned(processor, twice, media)


def test_template_without_end_of_turn_is_refused(processor: Any, media: Path) -> None:
    processor.chat_template = FORGETFUL.replace("<|im_end|>", "")
    with pytest.raises(BadSample, match="not learn to stop"):
        planned(processor, RECORDS["text"], media)


def test_other_chatml_like_template(processor: Any, media: Path) -> None:
    """Masks are right with other markers, end of turn, system prompt and generation prefix."""
    processor.chat_template = (
        "{{- '<|box_start|>sys<|box_end|>' -}}{%- for m in messages -%}"
        "{{- '<|object_ref_start|>' + m['role'] + ': ' + m['content'] + '<|object_ref_end|>' -}}"
        "{%- endfor -%}{%- if add_generation_prompt -%}"
        "{{- '<|object_ref_start|>assistant: ' -}}{%- endif -%}"
    )
    plan, _ = planned(processor, RECORDS["multi_turn"], media)
    assert trained_text(processor, plan) == [
        f"{answer}<|object_ref_end|>" for answer in ("first", ANSWER)
    ]


def test_the_message_that_a_template_refuses_is_named(
    processor: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    fails = (
        "{% for m in messages %}{% if loop.index0 == 2 %}{{ m.gone.far }}{% endif %}{% endfor %}"
    )
    monkeypatch.setattr(processor, "chat_template", fails)
    turns = [(role, "text") for role in ("user", "assistant", "user", "assistant")]
    parsed = parse_record(chat(*turns), MediaFolder(Path(), {}))
    with pytest.raises(BadSample, match=r"refuses message 3, of role user: .*gone"):
        Renderer(processor).render(parsed)
