"""Each rule of cached decoding matters: if it is broken deliberately, answers differ from HF's.

Ranks are forked from this process, so a function replaced here is replaced there.
"""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import pytest
from megatron.core.inference.contexts import StaticInferenceContext

from mcore_qwen3vl import generation
from mcore_qwen3vl.errors import BadInput
from mcore_qwen3vl.generation import CachedModel
from mcore_qwen3vl.layout import Layout
from mcore_qwen3vl.runtime.launch import RanksFailed
from tests.generation.cases import answer, conversations, expected


def equal(kind: str, layout: str = "single") -> list[bool]:
    """Return for each conversation whether the answer is Hugging Face's."""
    [[answers], *_] = answer("dense", [conversations(kind)], Layout.parse(layout))
    found = [
        a.token_ids == want for a, want in zip(answers, expected("dense", kind).tokens, strict=True)
    ]
    print(f"observed: {found.count(False)} of {len(found)} answers differ")
    return found


def with_next_position(monkeypatch: Any, change: Any) -> None:
    made = generation.prompts_from_inputs

    def changed(*arguments: Any) -> Any:
        right = made(*arguments)
        return replace(right, next_position=change(right))

    monkeypatch.setattr(generation, "prompts_from_inputs", changed)


def test_no_rope_delta(monkeypatch: Any) -> None:
    """Merged images and videos take fewer positions than tokens; text takes as many."""
    with_next_position(monkeypatch, lambda p: p.attention_mask.sum(1))
    assert equal("batch") == [True, False, False, True]


def test_rope_delta_that_counts_padding(monkeypatch: Any) -> None:
    """All answers differ but that to the longest prompt, which has no padding."""
    with_next_position(monkeypatch, lambda p: p.next_position + (p.attention_mask == 0).sum(1))
    found = equal("batch")
    assert found.count(True) == 1


def test_padding_that_is_attended(monkeypatch: Any) -> None:
    build = CachedModel.__init__

    def unmasked(self: CachedModel, *arguments: Any) -> None:
        build(self, *arguments)
        self._mask = None

    monkeypatch.setattr(CachedModel, "__init__", unmasked)
    assert equal("batch").count(True) == 1


def test_sequence_parallelism_left_on(monkeypatch: Any) -> None:
    """One token cannot be divided over TP, and the model says so."""
    monkeypatch.setattr(generation, "_without_sequence_parallel", lambda model: nullcontext())
    with pytest.raises(BadInput, match="cuts the 1 tokens of each CP rank"):
        equal("image", "tp2+sp")


@pytest.mark.parametrize("shift", [-1, 1])
def test_cache_written_in_the_wrong_place(monkeypatch: Any, shift: int) -> None:
    """Answers differ if it overwrites the prompt's last token, or leaves a hole after it.

    Megatron does not initialise the cache, and what memory holds may leave the answer as it is.
    """
    prefill = CachedModel.prefill

    def shifted(self: CachedModel) -> Any:
        logits = prefill(self)
        hole = self._context.sequence_len_offset
        for key, value in self._context.key_value_memory_dict.values():
            key[hole], value[hole] = 0.0, 3.0
        self._context.sequence_len_offset += shift
        return logits

    monkeypatch.setattr(CachedModel, "prefill", shifted)
    assert equal("image") == [False]


def test_cache_that_does_not_grow(monkeypatch: Any) -> None:
    """Answers differ if every new token overwrites the one before."""
    grow = StaticInferenceContext.increment_sequence_len_offset

    def once(self: StaticInferenceContext, count: int) -> None:
        if not self.sequence_len_offset:
            grow(self, count)

    monkeypatch.setattr(StaticInferenceContext, "increment_sequence_len_offset", once)
    assert equal("text") == [False]


def test_images_kept_after_prefill(monkeypatch: Any) -> None:
    """Ranks fail if images are encoded again for a token, where they have no placeholders."""
    forward = CachedModel._forward

    def with_images(self: CachedModel, *arguments: Any, **inputs: Any) -> Any:
        return forward(self, *arguments, **{**inputs, "visual": self._prompts.visual})

    monkeypatch.setattr(CachedModel, "_forward", with_images)
    with pytest.raises(RanksFailed, match=r"index_copy_.*out of bounds"):
        equal("image")
