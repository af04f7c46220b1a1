"""A page shows a sample as the model will see it."""

from __future__ import annotations

import base64
import json
import re
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from mcore_qwen3vl.data import DataConfig
from mcore_qwen3vl.data.config import parse_sources
from mcore_qwen3vl.data.datasets import CrudeSamples
from mcore_qwen3vl.data.encoding.preparation import Preparation
from mcore_qwen3vl.data.showing import read_sample, write_page
from mcore_qwen3vl.errors import BadInput, CheckFailed
from tests.command import exit_code
from tests.data.conftest import WriteJsonl, chat

TALK = {
    **chat(
        ("user", "<image>and <video>: <b>?"),
        ("assistant", "one & two"),
        ("user", "again"),
        ("assistant", "three"),
    ),
    "images": ["media/3.png"],
    "videos": ["media/clip.mp4"],
}


def picture(uri: str) -> np.ndarray:
    return np.asarray(Image.open(BytesIO(base64.b64decode(uri.partition("base64,")[2]))))


def test_a_sample_as_the_model_sees_it(
    processor: Any, write_jsonl: WriteJsonl, media: Path
) -> None:
    talk = {**TALK, "messages": [dict(message) for message in TALK["messages"]]}
    talk["messages"][3]["weight"] = 0.25
    path = write_jsonl([chat(("user", "other"), ("assistant", "a")), talk])
    seen = read_sample(path, 2, processor, DataConfig(4096))
    assert (seen.name, seen.format) == (f"{path}:2", "messages")
    trained = [(run.text, run.weight) for run in seen.runs if run.weight > 0]
    assert trained == [("one & two<|im_end|>", 1.0), ("three<|im_end|>", 0.25)]
    assert sum(run.count for run in seen.runs) == seen.tokens
    image, video = seen.media
    placeholders = [run.count for run in seen.runs if run.kind == "image"]
    assert placeholders == [image.features] == [image.grid[1] * image.grid[2] // 4]
    assert sum(run.count for run in seen.runs if run.kind == "video") == video.features
    assert len(video.pictures) == video.grid[0] > 1
    read = "".join(run.text for run in seen.runs)
    assert re.findall(r"<[\d.]+ seconds>", read) == video.times
    assert image.times == []
    (shown,) = (picture(uri) for uri in image.pictures)
    assert shown.shape == (image.height, image.width, 3)
    # HF resizes the image so before it cuts it into patches.
    original = Image.open(media / "3.png")
    resized = original.resize((image.width, image.height), Image.Resampling.BICUBIC)
    assert np.abs(shown.astype(int) - np.asarray(resized).astype(int)).mean() < 3
    frame = picture(video.pictures[0])
    assert frame.shape == (video.height, video.width, 3)
    assert frame[:, : video.width // 3].mean() > frame[:, 2 * video.width // 3 :].mean() + 100


def test_the_command_writes_a_page_that_needs_nothing_else(
    processor_dir: Path, write_jsonl: WriteJsonl, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = write_jsonl([TALK])
    page = tmp_path / "page.html"
    assert exit_code("data", "show", path, "1", "--hf-model", processor_dir, "--out", page) == 0
    said = capsys.readouterr().out
    assert "messages, " in said
    assert "of them trained, 1 image, 1 video: " in said
    html = page.read_text()
    assert '<span class="trained" title="weight 1.0">one &amp; two' in html
    assert "&lt;b&gt;?" in html
    shown = [int(width) for width in re.findall(r'<img [^>]* width="(\d+)"', html)]
    assert shown[0] > 240  # the image; the frames are smaller
    assert all(width > 120 for width in shown[1:])
    assert not re.search(r'(src|href)="(?!data:)', html)


def test_every_token_is_shown_with_its_weight(
    processor_dir: Path,
    processor: Any,
    write_jsonl: WriteJsonl,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """A boundary is where the weight or the kind changes."""
    talk = {**TALK, "messages": [dict(message) for message in TALK["messages"]]}
    talk["messages"][3]["weight"] = 0.25
    path = write_jsonl([talk])
    sources = parse_sources([str(path)])
    preparation = Preparation(processor, DataConfig(4096), sources)
    plan = preparation.plan(preparation.raw(CrudeSamples(sources, split="train", trust=False)[0]))
    words = ("data", "show", path, "1", "--hf-model", processor_dir, "--out", tmp_path / "a.html")
    assert exit_code(*words, "--tokens", "--json") == 0
    runs = json.loads(capsys.readouterr().out)["runs"]
    places = [run["start"] for run in runs]
    assert places == np.cumsum([0, *(len(run["token_ids"]) for run in runs[:-1])]).tolist()
    assert [token for run in runs for token in run["token_ids"]] == plan.input_ids.tolist()
    weights = [run["weight"] for run in runs for _ in run["token_ids"]]
    assert weights == plan.loss_weights.tolist()
    assert all(run["text"] == "".join(run["texts"]) for run in runs if run["kind"] == "text")
    trained = [(run["text"], run["weight"]) for run in runs if run["weight"]]
    assert trained == [("one & two<|im_end|>", 1.0), ("three<|im_end|>", 0.25)]

    assert exit_code(*words, "--tokens") == 0
    said = capsys.readouterr().out.splitlines()
    assert sum(line.startswith("  -- ") for line in said) == len(runs)
    three = next(run for run in runs if run["weight"] == 0.25)
    pairs = zip(three["token_ids"], three["texts"], strict=True)
    for place, (token, text) in enumerate(pairs, three["start"]):
        assert f"{place:>8} {token:>8}   0.25  {json.dumps(text)}" in said
    image = next(run for run in runs if run["kind"] == "image")
    count = len(image["token_ids"])
    assert any(line.endswith(f'"<|image_pad|> x {count}"') for line in said)
    assert exit_code(*words) == 0
    assert "  -- " not in capsys.readouterr().out


def test_names_and_text_are_no_markup(
    processor: Any, write_jsonl: WriteJsonl, media: Path, tmp_path: Path
) -> None:
    tag = '"><script>'
    (tmp_path / f"{tag}.png").symlink_to(media / "0.png")
    talk = chat(("user", f"<image>{tag}"), ("assistant", tag))
    path = write_jsonl([{**talk, "images": [f"{tag}.png"]}], f"{tag}.jsonl")
    write_page(read_sample(path, 1, processor, DataConfig(4096)), tmp_path / "page.html")
    html = (tmp_path / "page.html").read_text()
    assert html.count("&lt;script&gt;") >= 5  # two names of the file, one of the image, two texts
    assert tag not in html


def test_a_record_that_is_not_there_or_not_usable(processor: Any, write_jsonl: WriteJsonl) -> None:
    path = write_jsonl([chat(("user", "q"), ("assistant", "")), "{broken"])
    with pytest.raises(BadInput, match="has 2 records; there is no record 3"):
        read_sample(path, 3, processor, DataConfig(4096))
    with pytest.raises(CheckFailed, match=r"data.jsonl:1 cannot be used: message 2, an assistant"):
        read_sample(path, 1, processor, DataConfig(4096))
    with pytest.raises(CheckFailed, match=r"data.jsonl:2 cannot be .*: no valid JSON"):
        read_sample(path, 2, processor, DataConfig(4096))
