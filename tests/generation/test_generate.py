"""Stop tokens, streaming, adapters, the cost of a step, and the rules of the cache."""

from __future__ import annotations

import shutil
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from megatron.core.inference.contexts import StaticInferenceContext
from transformers import GenerationConfig

from mcore_qwen3vl.converters.adapters.merge import merge
from mcore_qwen3vl.converters.convert import hf_to_mcore
from mcore_qwen3vl.errors import BadInput
from mcore_qwen3vl.generation import generate as generate_module
from mcore_qwen3vl.generation import prompts
from mcore_qwen3vl.generation.generate import (
    CachedModel,
    GenerationRequest,
    generate,
    generate_on_all_ranks,
)
from mcore_qwen3vl.inference import read_adapter_for
from mcore_qwen3vl.layout import Layout
from mcore_qwen3vl.runtime.launch import RanksFailed, run_layout
from mcore_qwen3vl.verification.parity.case import ADAPTERS, write_random_adapter
from tests.converters.adapters.peft_made import edit_config
from tests.generation.cases import (
    NEW_TOKENS,
    answer,
    checkpoint,
    conversations,
    expected,
    load,
    user,
)
from tests.turns import slow


def on_single_rank(fn: Any, *args: Any) -> Any:
    checkpoint("dense")
    return run_layout(fn, 1, *args)[0]


def test_stops_and_streams() -> None:
    want = expected("dense", "batch").tokens
    stop = [want[0][4], want[2][9]]
    assert len({next((i for i, t in enumerate(r) if t in stop), None) for r in want}) > 1

    def work() -> Any:
        model, processor = load(checkpoint("dense"), Layout())
        shown = [""] * len(want)

        def stream(number: int, text: str) -> None:
            shown[number] += text

        config = GenerationConfig(eos_token_id=stop, pad_token_id=0)
        answers = generate(
            model,
            processor,
            conversations("batch"),
            max_new_tokens=NEW_TOKENS,
            generation_config=config,
            stream=stream,
        )
        return answers, shown

    answers, shown = on_single_rank(work)
    assert shown == [a.text for a in answers]
    for row, got in zip(want, answers, strict=True):
        end = next((i for i, token in enumerate(row) if token in stop), None)
        assert got.token_ids == (row if end is None else row[: end + 1])
        assert got.finish_reason == ("length" if end is None else "stop")


def test_images_are_encoded_once_and_each_step_takes_one_token() -> None:
    def work() -> Any:
        model, processor = load(checkpoint("dense"), Layout())
        images, lengths = [], []
        model.visual.register_forward_hook(lambda m, i, o: images.append(len(o[0])))
        layer = model.decoder.layers[0].self_attention.linear_qkv
        layer.register_forward_hook(lambda m, i, o: lengths.append(len(i[0])))
        generate(model, processor, conversations("multi-image"), max_new_tokens=6)
        return images, lengths

    images, lengths = on_single_rank(work)
    assert len(images) == 1
    assert lengths[0] > images[0] > 1
    assert lengths[1:] == [1] * 5


def test_the_model_is_afterwards_as_it_was() -> None:
    """Sequence parallelism, which decoding cannot use, and training mode are restored."""

    def work() -> Any:
        model, processor = load(checkpoint("dense"), Layout(tp=2, sp=True))

        def flags() -> dict[tuple[str, str], bool]:
            modules = [("config", model.config), *model.named_modules()]
            return {
                (name, flag): value
                for name, module in modules
                for flag, value in vars(module).items()
                if isinstance(value, bool)
            }

        before = flags()
        generate(model, processor, conversations("text"), max_new_tokens=3)
        return before, flags()

    checkpoint("dense")
    for before, after in run_layout(work, 2):
        assert before["config", "sequence_parallel"]
        # Megatron's main branch adds a flag to each layer in its first forward.
        assert [flag for flag, value in before.items() if after.get(flag) is not value] == []


@pytest.mark.parametrize(
    ("asked", "options", "message"),
    [
        ([], {}, "no conversation"),
        ([user("?", {"type": "image", "image": "missing.png"})], {}, r"missing\.png"),
        ([user("?", {"type": "video", "video": "missing.mp4"})], {}, r"missing\.mp4"),
        ([user("?", {"type": "image"})], {}, "image part"),
        ([user("?")], {"max_new_tokens": 0}, "max_new_tokens"),
        ([user("?")], {"max_new_tokens": 5000}, "4096 positions"),
    ],
)
def test_bad_input(asked: Any, options: dict[str, Any], message: str) -> None:
    with pytest.raises(BadInput, match=message):
        answer("dense", [asked], Layout(), **options)


@pytest.mark.parametrize(
    ("model", "lora", "layout"),
    [
        pytest.param("dense", "everything", "tp2+sp"),
        *slow(("moe", "router", "tp2xep2+sp")),
    ],
)
def test_an_adapter_answers_like_the_merged_checkpoint(
    model: str, lora: str, layout: str, request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    base = request.getfixturevalue(model)
    adapter = write_random_adapter(tmp_path / "adapter", ADAPTERS[lora], base)
    merge(base, adapter, tmp_path / "merged")
    prompt = [{"role": "user", "content": "What is in the picture?"}]
    options = {"max_new_tokens": 12, "temperature": 0.0}

    def answer_of(checkpoint: Path, layout: str, lora: Path | None = None) -> list[int]:
        asked = GenerationRequest(
            checkpoint, [prompt], layout=Layout.parse(layout), lora=lora, options=options
        )
        (generation,) = generate_on_all_ranks(asked, on_cpu=True)
        return generation.token_ids

    expected = answer_of(tmp_path / "merged", "single")
    assert answer_of(base, layout, adapter) == expected
    assert answer_of(base, "single") != expected


def test_an_adapter_of_another_base_is_warned_of(
    dense: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """A Megatron-Core checkpoint that was converted from the base is no other base."""
    adapter = write_random_adapter(tmp_path / "adapter", ADAPTERS["everything"], dense)
    edit_config(adapter, base_model_name_or_path=str(dense))
    other = shutil.copytree(dense, tmp_path / "other")
    hf_to_mcore(dense, tmp_path / "mcore")
    for base in (dense, tmp_path / "mcore"):
        assert read_adapter_for(adapter, base, dense) is not None
    assert capfd.readouterr().err == ""
    read_adapter_for(adapter, other, other)
    said = f"warning: The adapter was trained on {dense}, and is used with {other}."
    assert capfd.readouterr().err.strip() == said


# A rule of cached decoding that is broken deliberately makes answers differ from HF's. Ranks are
# forked from this process, so a function replaced here is replaced there.


def equal(kind: str, layout: str = "single") -> list[bool]:
    """Return for each conversation whether the answer is Hugging Face's."""
    [[answers], *_] = answer("dense", [conversations(kind)], Layout.parse(layout))
    found = [
        a.token_ids == want for a, want in zip(answers, expected("dense", kind).tokens, strict=True)
    ]
    print(f"observed: {found.count(False)} of {len(found)} answers differ")
    return found


def with_next_position(monkeypatch: Any, change: Any) -> None:
    made = prompts.prompts_from_inputs

    def changed(*arguments: Any) -> Any:
        right = made(*arguments)
        return replace(right, next_position=change(right))

    monkeypatch.setattr(prompts, "prompts_from_inputs", changed)


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
    monkeypatch.setattr(generate_module, "_without_sequence_parallel", lambda model: nullcontext())
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
    forward = CachedModel._run_micro_batch

    def with_images(self: CachedModel, *arguments: Any, **inputs: Any) -> Any:
        return forward(self, *arguments, **{**inputs, "visual": self._prompts.visual})

    monkeypatch.setattr(CachedModel, "_run_micro_batch", with_images)
    with pytest.raises(RanksFailed, match=r"index_copy_.*out of bounds"):
        equal("image")
