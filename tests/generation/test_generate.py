"""Stop tokens, streaming, sampling, the cost of a decoding step, and bad input."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import AutoProcessor, GenerationConfig

from mcore_qwen3vl.errors import BadInput
from mcore_qwen3vl.generation import Sampler, generate, stop_tokens
from mcore_qwen3vl.layout import Layout
from mcore_qwen3vl.runtime.launch import run_layout
from tests.generation.cases import (
    NEW_TOKENS,
    answer,
    checkpoint,
    conversations,
    expected,
    hugging_face_inputs,
    hugging_face_model,
    load,
    user,
)


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


def test_draws_equal_hugging_face_with_the_same_seed() -> None:
    options = {"temperature": 1.3, "top_p": 0.9, "top_k": 40}
    conversation = conversations("image")[0]
    inputs = hugging_face_inputs(AutoProcessor.from_pretrained(checkpoint("dense")), conversation)
    torch.manual_seed(7)
    out = hugging_face_model("dense").generate(
        **inputs, do_sample=True, max_new_tokens=NEW_TOKENS, **options
    )
    want = out[0, inputs["input_ids"].shape[1] :].tolist()
    for layout in (Layout(), Layout(tp=2, sp=True)):
        for rank in answer("dense", [[conversation]], layout, seed=7, **options):
            assert rank[0][0].token_ids == want
    assert want != expected("dense", "image").tokens[0]


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
    ("options", "message"),
    [
        ({"temperature": -1.0}, "temperature"),
        ({"temperature": 1.0, "top_p": 0.0}, "top_p"),
        ({"temperature": 1.0, "top_k": -1}, "top_k"),
        ({"top_p": 0.5}, "set a temperature"),
    ],
)
def test_sampling_values_out_of_range(options: dict[str, Any], message: str) -> None:
    with pytest.raises(BadInput, match=message):
        Sampler(GenerationConfig(), **options)


@pytest.mark.parametrize(
    "given",
    [
        {"temperature": -1.0},
        {"temperature": "0.7"},
        {"top_p": 2.0},
        {"top_k": -1},
        {"repetition_penalty": -1.0},
    ],
)
def test_a_generation_config_that_cannot_be_used_is_refused(given: dict[str, Any]) -> None:
    config = GenerationConfig(do_sample=True)
    vars(config).update(given)
    with pytest.raises(BadInput, match=r"generation_config\.json cannot be used: "):
        Sampler(config)
    vars(config).update(eos_token_id=["end"])
    with pytest.raises(BadInput, match=r"eos_token_id of generation_config\.json is \['end'\]"):
        stop_tokens(config, SimpleNamespace(eos_token_id=None))


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
