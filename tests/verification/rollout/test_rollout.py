"""What makes a server differ is planted in it, and `verify rollout` names it."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image, ImageOps

from mcore_qwen3vl.errors import BadInput
from mcore_qwen3vl.layout import Layout
from mcore_qwen3vl.tiny import write_tiny_checkpoint
from mcore_qwen3vl.verification.rollout.causes import (
    LANGUAGE,
    MEANING,
    PIXELS,
    PROMPT,
    ROUNDING,
    TOWER,
)
from mcore_qwen3vl.verification.rollout.comparison import (
    RolloutComparison,
    RolloutRequest,
    compare_rollout,
)
from mcore_qwen3vl.verification.rollout.server import Sampling
from tests.command import exit_code
from tests.data.conftest import chat, write_png, write_video
from tests.turns import slow, slow_except
from tests.verification.rollout.openai_server import Fault, serving

RECORDS = [
    chat(("user", "Say something about the sea."), ("assistant", "It is wide.")),
    chat(("system", "Be brief."), ("user", "Why is it so?"), ("assistant", "Because."),
         ("user", "And then?")),
    {**chat(("user", "<image>What is this?"), ("assistant", "Noise.")), "images": ["0.png"]},
    {"prompt": [{"role": "user", "content": "<image>and<image>Compare."}],
     "images": ["1.png", "2.png"]},
    {**chat(("user", "<video>What moves?")), "videos": ["clip.mp4"]},
]  # fmt: skip


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("prompts")
    for number, (height, width) in enumerate([(48, 80), (50, 31), (64, 64)]):
        write_png(folder / f"{number}.png", height, width, seed=number)
    write_video(folder / "clip.mp4", frames=23, height=32, width=48)
    (folder / "data.jsonl").write_text("".join(f"{json.dumps(r)}\n" for r in RECORDS))
    return folder / "data.jsonl"


def compared(
    checkpoint: Path,
    data: Path,
    fault: Fault | None = None,
    *,
    served: Path | None = None,
    sampling: dict[str, Any] | None = None,
    **options: Any,
) -> RolloutComparison:
    with serving(served or checkpoint, fault) as (address, _):
        request = RolloutRequest(
            checkpoint,
            server=address,
            data=data,
            sampling=Sampling(**{"max_tokens": 40, **(sampling or {})}),
            **options,
        )
        return compare_rollout(request, on_cpu=True)


def causes(report: RolloutComparison) -> list[str]:
    return [cause.name for cause in report.causes]


@pytest.mark.parametrize(
    ("model", "layout"), [("dense", "single"), *slow(("moe", "tp2xep2+sp"), ("hybrid", "pp2")),
                          *slow(("dense", "cp2"), ("dense", "dp2"))]
)  # fmt: skip
def test_a_right_server_agrees(
    model: str, layout: str, data: Path, request: pytest.FixtureRequest
) -> None:
    checkpoint = request.getfixturevalue(model)
    report = compared(checkpoint, data, layout=Layout.parse(layout))
    assert report.ok, report.failures
    assert not report.causes
    kinds = {one.context for one in report.findings if one.part == "log-probabilities"}
    assert kinds == {"text", "image", "video", "grey"}


@pytest.mark.parametrize("temperature", [0.7, *slow(0.0)])
def test_the_temperature_divides_both(temperature: float, dense: Path, data: Path) -> None:
    asked = {"temperature": temperature}
    report = compared(dense, data, Fault(processed=temperature > 0), sampling=asked)
    assert report.ok, report.failures


def _add(part: str, name: str, layer: int = 1, by: float = 3.0) -> Callable[[Any], object]:
    """Return a function that adds to one weight of a layer of the model."""

    def change(model: Any) -> None:
        holder = getattr(model.model, part)
        layers = holder.layers if part == "language_model" else holder.blocks
        layers[layer].get_parameter(name)[3, 5] += by

    return change


def _half_and_back(image: Image.Image) -> Image.Image:
    small = image.resize((image.width // 2, image.height // 2))
    return small.resize(image.size)


def _swap_colours(image: Image.Image) -> Image.Image:
    return Image.merge("RGB", image.split()[::-1])


def _less_pixels(processor: Any) -> None:
    processor.image_processor.size = {"shortest_edge": 256, "longest_edge": 2048}


def _more_frames(processor: Any) -> None:
    processor.video_processor.fps = 5


def _other_mean(processor: Any) -> None:
    processor.image_processor.image_mean = [0.48, 0.45, 0.4]


PLANTED: dict[str, tuple[Fault, dict[str, Any], str, str]] = {
    "a system prompt": (
        Fault(system="You are a helpful assistant."), {}, PROMPT, "its chat template",
    ),
    "a token before the text": (
        Fault(before="<|endoftext|>"), {}, PROMPT, "begins prompts with '<|endoftext|>'",
    ),
    "a prompt that is cut": (Fault(cut_to=12), {}, PROMPT, "to their last 12 tokens"),
    "another max_pixels": (
        Fault(processor=_less_pixels), {}, PIXELS, "compare min_pixels and max_pixels",
    ),
    "other frames": (Fault(processor=_more_frames), {}, PIXELS, "pairs of frames from"),
    "a resized image": (Fault(picture=_half_and_back), {}, PIXELS, "a picture of one grey agrees"),
    "colours in another order": (
        Fault(picture=_swap_colours), {}, PIXELS, "a picture of one grey agrees",
    ),
    "a weight": (
        Fault(model=_add("language_model", "mlp.down_proj.weight")), {}, LANGUAGE,
        "prompts of text alone differ",
    ),
    "a weight that does as little as rounding": (
        Fault(model=_add("language_model", "mlp.down_proj.weight", by=0.2)), {}, LANGUAGE,
        "prompts of text alone differ",
    ),
    "a weight of the tower": (
        Fault(model=_add("visual", "mlp.linear_fc1.weight")), {}, TOWER, "text alone agrees",
    ),
    "another normalisation": (Fault(processor=_other_mean), {}, TOWER, "image_mean and image_std"),
    "a temperature of its own": (
        Fault(temperature=0.7, processed=True), {}, MEANING, "divided by 0.7",
    ),
    "raw log-probabilities": (
        Fault(), {"temperature": 0.7}, MEANING, "of the logits as they are",
    ),
    "a mask of top-k": (
        Fault(processed=True), {"top_k": 5}, MEANING, "the 5 likeliest tokens alone",
    ),
    "a mask of top-p": (
        Fault(processed=True), {"top_p": 0.6}, MEANING, "make up 0.6 alone",
    ),
    "half precision": (
        Fault(dtype=torch.bfloat16), {}, ROUNDING, "it computes in half precision",
    ),
}  # fmt: skip


FAST = ("a system prompt", "a resized image", "a weight of the tower", "a mask of top-k",
        "half precision")  # fmt: skip


@pytest.mark.parametrize("name", slow_except(list(PLANTED), *FAST))
def test_what_was_planted_is_named_and_nothing_else(name: str, dense: Path, data: Path) -> None:
    fault, sampling, cause, said = PLANTED[name]
    report = compared(dense, data, fault, sampling=sampling)
    assert not report.ok
    assert causes(report) == [cause]
    assert said in report.causes[0].why


@pytest.mark.slow
def test_two_causes_are_both_named(dense: Path, data: Path) -> None:
    tower = _add("visual", "mlp.linear_fc1.weight")
    both = Fault(temperature=0.7, processed=True, model=tower)
    assert causes(compared(dense, data, both)) == [MEANING, TOWER]
    both = Fault(dtype=torch.bfloat16, model=_add("visual", "mlp.linear_fc1.weight", by=30))
    assert causes(compared(dense, data, both)) == [ROUNDING, TOWER]
    both = Fault(processor=_less_pixels, model=_add("language_model", "mlp.down_proj.weight"))
    assert causes(compared(dense, data, both)) == [PIXELS, LANGUAGE]


@pytest.mark.slow
def test_half_precision_is_right_where_it_is_expected(dense: Path, data: Path) -> None:
    bf16 = Fault(dtype=torch.bfloat16)
    report = compared(dense, data, bf16, dtype="bf16")
    assert report.ok, report.failures
    wrong = replace(bf16, model=_add("language_model", "mlp.down_proj.weight"))
    assert causes(compared(dense, data, wrong, dtype="bf16")) == [LANGUAGE]


def test_another_tokenizer_of_the_same_text_is_named(
    dense: Path, data: Path, tmp_path: Path
) -> None:
    other = tmp_path / "other"
    shutil.copytree(dense, other)
    file = other / "tokenizer.json"
    swapped = {"<|im_start|>": "<|box_start|>", "<|box_start|>": "<|im_start|>"}
    content = json.loads(file.read_text())
    for token in content["added_tokens"]:
        token["content"] = swapped.get(token["content"], token["content"])
    vocabulary = content["model"]["vocab"]
    content["model"]["vocab"] = {swapped.get(k, k): v for k, v in vocabulary.items()}
    file.write_text(json.dumps(content))
    report = compared(dense, data, served=other)
    assert causes(report) == [PROMPT]
    assert "for the same text: it has another tokenizer" in report.causes[0].why


@pytest.mark.slow
def test_texts_are_asked_alone_where_the_data_have_none(
    dense: Path, data: Path, tmp_path: Path
) -> None:
    lines = data.read_text().splitlines(keepends=True)
    only_media = data.with_name("media.jsonl")
    only_media.write_text("".join(lines[2:]))
    weight = _add("language_model", "mlp.down_proj.weight")
    report = compared(dense, only_media, Fault(model=weight))
    assert causes(report) == [LANGUAGE]
    names = [one.name for one in report.findings if one.context == "text"]
    assert all(name.endswith("without images and videos") for name in names)
    assert len(names) == 6


def test_tools_arguments_and_sampling_reach_the_server(dense: Path, tmp_path: Path) -> None:
    tool = {"type": "function", "function": {"name": "add", "parameters": {}}}
    call = {"type": "function", "function": {"name": "add", "arguments": {"a": 1}}}
    turns = [
        {"role": "user", "content": "Add."},
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "content": "2"},
    ]
    record = {"messages": turns, "tools": [tool]}
    data = tmp_path / "data.jsonl"
    data.write_text(json.dumps(record) + "\n")
    sampling = Sampling(0.5, 0.9, 7, max_tokens=8, seed=3)
    with serving(dense) as (address, oracle):
        request = RolloutRequest(dense, server=f"{address}/v1", data=data, sampling=sampling)
        report = compare_rollout(request, on_cpu=True)
    (asked,) = oracle.asked
    wanted = {"temperature": 0.5, "top_p": 0.9, "top_k": 7, "max_tokens": 8, "seed": 3}
    assert asked.items() >= wanted.items()
    assert asked["tools"] == [tool]
    assert asked["tool_choice"] == "none"
    sent = asked["messages"][1]["tool_calls"][0]
    assert sent == {"id": "call_0", "type": "function",
                    "function": {"name": "add", "arguments": '{"a": 1}'}}  # fmt: skip
    assert causes(report) == [MEANING]  # of raw ones, and the prompt with its tools is equal


def test_a_record_that_the_server_refuses_is_listed(dense: Path, data: Path) -> None:
    def refuse(image: Image.Image) -> Image.Image:
        if image.size == (80, 48):
            raise ValueError("too wide")
        return ImageOps.exif_transpose(image)

    report = compared(dense, data, Fault(picture=refuse))
    assert report.ok, report.failures
    (line,) = report.not_compared
    assert line.endswith("the server refuses it: 400 ValueError: too wide")


@pytest.mark.parametrize(
    ("left_out", "said"),
    [
        ("prompt_token_ids", "vLLM 0.10.2 and newer do for return_token_ids"),
        ("logprobs", "sends no log-probabilities with an answer"),
    ],
)
def test_a_server_that_lacks_what_is_needed_is_bad_input(
    left_out: str, said: str, dense: Path, data: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with serving(dense, Fault(left_out=(left_out,))) as (address, _):
        code = exit_code("verify", "rollout", address, dense, data, "--cpu", "--prompts", "1")
    assert code == 2
    assert said in " ".join(capsys.readouterr().err.split())


def test_a_server_that_is_not_there_is_bad_input(
    dense: Path, data: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for address in ("http://127.0.0.1:9", "127.0.0.1:9"):
        assert exit_code("verify", "rollout", address, dense, data, "--cpu") == 2
        assert "cannot be reached" in capsys.readouterr().err


def test_the_command_prints_json_and_exits_by_the_verdict(
    dense: Path, data: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = (dense, data, "--cpu", "--json", "--prompts", "2", "--max-tokens", "20")
    with serving(dense) as (address, _):
        assert exit_code("verify", "rollout", address, *words) == 0
    assert json.loads(capsys.readouterr().out)["ok"]
    with serving(dense, Fault(before="<|endoftext|>")) as (address, _):
        assert exit_code("verify", "rollout", address, *words) == 1
    printed = json.loads(capsys.readouterr().out)
    assert printed["notes"]["What explains the difference"].startswith(f"{PROMPT}: ")


@pytest.mark.slow
def test_a_model_without_a_tower_is_compared(tmp_path: Path) -> None:
    checkpoint = write_tiny_checkpoint(tmp_path / "hf", family="qwen3.5", text_only=True)
    data = tmp_path / "data.jsonl"
    data.write_text("".join(f"{json.dumps(record)}\n" for record in RECORDS[:2]))
    report = compared(checkpoint, data)
    assert report.ok, report.failures


def test_a_machine_without_a_gpu_is_told_before_the_server_is_asked(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("torch.cuda.device_count", lambda: 0)
    request = RolloutRequest(tmp_path / "model", server="http://127.0.0.1:9", data=data)
    with pytest.raises(BadInput, match="pass --cpu to verify rollout on the CPU"):
        compare_rollout(request)
