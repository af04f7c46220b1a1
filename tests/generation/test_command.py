"""``mcore-qwen3vl generate`` takes every kind of checkpoint and prompt, and refuses bad input."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from mcore_qwen3vl.config import Architecture
from mcore_qwen3vl.console import visible
from mcore_qwen3vl.converters.convert import hf_to_mcore
from mcore_qwen3vl.converters.live import load_hf
from mcore_qwen3vl.errors import BadInput
from mcore_qwen3vl.generation.generate import CachedModel, inference
from mcore_qwen3vl.generation.prompts import prompts_from_inputs
from mcore_qwen3vl.inference import hf_folder_of
from mcore_qwen3vl.layout import Layout
from mcore_qwen3vl.model.qwen3vl import build_chunks
from mcore_qwen3vl.runtime.launch import initialize, run_layout
from mcore_qwen3vl.verification.measurement import measure
from mcore_qwen3vl.verification.parity.comparison import HALF_PRECISION_FACTOR
from tests.command import exit_code, without_version
from tests.generation.cases import (
    NEW_TOKENS,
    checkpoint,
    clip,
    conversations,
    expected,
    hugging_face_inputs,
    hugging_face_model,
    picture,
)

FEW = 6
"""New tokens: enough to decode, and fewer than Hugging Face's answers have."""

IMAGES = {"a": (0, 40, 64), "b": (1, 40, 64), "c": (2, 72, 24), "d": (3, 24, 24)}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Make images, and the dense checkpoint both as converted and as saved by Megatron."""
    path = tmp_path_factory.mktemp("generate")
    for name, image in IMAGES.items():
        picture(*image).save(path / f"{name}.png")
    mcore = path / "mcore"
    hf_to_mcore(checkpoint("dense"), mcore)
    trained = path / "trained"
    shutil.copytree(mcore / "release", trained / "iter_0000012")
    (trained / "latest_checkpointed_iteration.txt").write_text("12")
    return path


def run(source: Path, *arguments: Any) -> int:
    return exit_code("generate", source, "--cpu", *arguments)


def tokens(capsys: Any, *arguments: Any) -> list[list[int]]:
    assert run(*arguments, "--max-new-tokens", FEW, "--json") == 0
    return [answer["token_ids"] for answer in json.loads(capsys.readouterr().out)["answers"]]


def first(model: str, kind: str) -> list[list[int]]:
    """Return the beginning of Hugging Face's answers."""
    return [answer[:FEW] for answer in expected(model, kind).tokens]


def test_one_image_from_every_format(folder: Path, capsys: Any) -> None:
    asked = ("--image", folder / "a.png", "--prompt", "What is this?")
    want = first("dense", "image")
    assert tokens(capsys, checkpoint("dense"), *asked) == want
    assert tokens(capsys, folder / "mcore", *asked, "--tp", 2) == want
    assert tokens(capsys, folder / "mcore" / "release", *asked) == want
    hf_model = ("--hf-model", checkpoint("dense"))
    assert tokens(capsys, folder / "trained", *asked, *hf_model, "--pp", 2) == want


def test_media_before_the_text_or_at_their_tags(folder: Path, capsys: Any) -> None:
    images = [argument for n in "bcd" for argument in ("--image", folder / f"{n}.png")]
    want = first("dense", "multi-image")
    assert tokens(capsys, folder / "mcore", *images, "--prompt", "Compare these.") == want
    prompts = ("--prompt", "<image>What is this?", "--prompt", "<video>What moves?")
    media = ("--image", folder / "a.png", "--video", clip())
    together = [*first("dense", "image"), *first("dense", "video")]
    assert tokens(capsys, folder / "mcore", *media, *prompts) == together


def test_experts_over_tensor_parallel_ranks(folder: Path, capsys: Any) -> None:
    asked = ("--image", folder / "a.png", "--prompt", "What is this?")
    want = first("moe", "image")
    assert tokens(capsys, checkpoint("moe"), *asked, "--tp", 2, "--etp", 2) == want
    assert tokens(capsys, checkpoint("moe"), *asked, "--tp", 2, "--no-sp") == want


def test_streams_to_the_terminal(folder: Path, capfd: Any) -> None:
    asked = ("--image", folder / "a.png", "--prompt", "What is this?")
    assert run(folder / "mcore", *asked, "--max-new-tokens", FEW) == 0
    printed = capfd.readouterr()
    tokenizer = transformers.AutoTokenizer.from_pretrained(checkpoint("dense"))
    want = tokenizer.decode(first("dense", "image")[0], skip_special_tokens=True)
    assert printed.out == f"{visible(want)}\n"
    assert f"{FEW} new ones, ended by length" in printed.err


def test_the_time_is_that_of_imports_too(
    folder: Path, capfd: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("mcore_qwen3vl.console.quiet_libraries", lambda: time.sleep(2))
    assert run(folder / "mcore", "--prompt", "?", "--max-new-tokens", 1, "--json") == 0
    assert json.loads(capfd.readouterr().out)["seconds"] > 2


@torch.no_grad()
def test_half_precision(folder: Path) -> None:
    """In bfloat16, each step of a given answer is as near to float32 as HF's own bfloat16."""
    path = checkpoint("dense")
    inputs = hugging_face_inputs(
        transformers.AutoProcessor.from_pretrained(path), conversations("image")[0]
    )
    answer = torch.tensor(expected("dense", "image").tokens)
    length = inputs["input_ids"].shape[1]
    whole = dict(inputs)
    for name, more in (("input_ids", answer), ("attention_mask", torch.ones_like(answer))):
        whole[name] = torch.cat([inputs[name], more], 1)
    whole["mm_token_type_ids"] = torch.nn.functional.pad(
        inputs["mm_token_type_ids"], (0, answer.shape[1])
    )
    half_model = transformers.AutoModelForImageTextToText.from_pretrained(
        path, dtype=torch.bfloat16
    )
    exact, half = (
        model(**whole).logits[0, length - 1 : -1].float()
        for model in (hugging_face_model("dense"), half_model)
    )

    def work() -> torch.Tensor:
        initialize(Layout())
        architecture = Architecture.from_hf(path)
        (model,) = build_chunks(architecture, Layout(), params_dtype=torch.bfloat16)
        load_hf(model, path)
        with inference(model):
            cache = CachedModel(model, prompts_from_inputs(architecture, inputs), NEW_TOKENS)
            steps = [cache.prefill(), *(cache.decode(t) for t in answer[0, :-1, None])]
        return torch.cat([step for step in steps if step is not None])

    (ours,) = run_layout(work, 1)
    assert ours.dtype == torch.bfloat16
    error, allowed = measure(ours, exact).relative, measure(half, exact).relative
    print(f"observed: {error:.1e}, Hugging Face's {allowed:.1e}")
    assert 1e-4 < error < HALF_PRECISION_FACTOR * allowed


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["nowhere", "--prompt", "?"], "nowhere"),
        (["trained", "--prompt", "?"], "--hf-model"),
        (["mcore", "--prompt", "<image> and <image>", "--image", "a.png"], "2 <image> tags and 1"),
        (
            ["mcore", "--prompt", "<image>", "--image", "a.png", "--image", "b.png"],
            "1 <image> tags",
        ),
        (["mcore", "--prompt", "<|image_pad|>"], "placeholder"),
        (
            ["mcore", "--prompt", "?", "--image", "missing.png"],
            "Image 'missing.png': no such file.",
        ),
        (["mcore", "--prompt", "?", "--video", "gone.mp4"], "Video 'gone.mp4': no such file."),
        (["mcore", "--prompt", "?", "--video", "a.png"], "Give a single frame as an image"),
        (["mcore", "--prompt", "?", "--video", "mcore"], "mcore"),
        (
            ["mcore", "--prompt", "?", "--image", "http://127.0.0.1:9/a.png"],
            "Image 'http://127.0.0.1:9/a.png' cannot be read",
        ),
        (["mcore", "--prompt", "?", "--tp", "3"], "8 attention heads cannot be divided over TP 3"),
        (["mcore", "--prompt", "?", "--ep", "2"], "dense: drop EP"),
        (["mcore", "--prompt", "?", "--cp", "2"], "No such option"),
        (["mcore", "--prompt", "?", "--vpp", "2"], "No such option"),
        (["mcore", "--prompt", "?" * 9000], "4096 positions"),
        (["mcore", "--prompt", "?", "--top-p", "0.5"], "set a temperature"),
        (["mcore"], "--prompt"),
    ],
)
def test_bad_input_is_one_message(
    folder: Path, capsys: Any, monkeypatch: Any, arguments: list[str], message: str
) -> None:
    monkeypatch.chdir(folder)
    monkeypatch.setattr("mcore_qwen3vl.inference.run_layout", pytest.fail)
    assert run(*arguments) == 2
    printed = capsys.readouterr()
    assert message in printed.err
    assert printed.out == ""


def test_a_missing_image_is_said_before_libraries_are_imported(folder: Path) -> None:
    code = (
        "import sys, mcore_qwen3vl.cli as cli\n"
        "try: cli.main(sys.argv[1:])\n"
        "except SystemExit as left: sys.exit(left.code + 40 * ('torch' in sys.modules))"
    )
    command = ["generate", str(folder / "mcore"), "--prompt", "?", "--image", "missing.png"]
    done = subprocess.run([sys.executable, "-c", code, *command], capture_output=True, text=True)
    assert done.returncode == 2, done.stderr
    assert without_version(done.stderr) == "error: Image 'missing.png': no such file.\n"


def test_adapters_and_lora_runs_are_told_from_models(
    folder: Path, tmp_path: Path, capsys: Any
) -> None:
    run_of_lora = tmp_path / "run"
    shutil.copytree(folder / "mcore", run_of_lora)
    for adapter in (tmp_path / "adapter", run_of_lora / "lora"):
        adapter.mkdir()
        (adapter / "adapter_config.json").write_text("{}")
    assert run(str(tmp_path / "adapter"), "--prompt", "?") == 2
    assert "is a LoRA adapter: `generate BASE --lora" in capsys.readouterr().err
    for path in (run_of_lora, next(run_of_lora.glob("release"))):
        assert run(str(path), "--prompt", "?") == 2
        assert "is a LoRA run, and its checkpoints hold no base weights" in capsys.readouterr().err


def test_of_a_folder_of_exports_the_last_is_named(dense: Path, tmp_path: Path) -> None:
    for iteration in (4, 12):
        (tmp_path / f"iter_{iteration:07d}").symlink_to(dense)
    with pytest.raises(BadInput, match=r"Name a checkpoint in it, such as .*/iter_0000012\.$"):
        hf_folder_of(tmp_path, None, "generate")
