"""Qwen's own vocabulary: its ids, and data, scores, answers and gradients at its 151,936 rows."""

from __future__ import annotations

import base64
import json
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import tiktoken
from transformers import AutoProcessor

from mcore_qwen3vl.layout import Layout
from mcore_qwen3vl.published_configs import PUBLISHED
from mcore_qwen3vl.scoring.score import ScoreRequest, score
from mcore_qwen3vl.tiny import read_vocabulary, write_tiny_checkpoint
from tests.command import exit_code
from tests.generation import cases
from tests.scoring.test_score import check, folder, hugging_face, lines

__all__ = ["folder"]
TEXTS = (
    "The quick brown fox doesn't jump 12345 times.",
    "通义千问看到了一只猫。",
    "def f(x):\n\treturn x ** 2  # caf\u00e9\r\n\n",
    "Ωμέγα — Привет, мир! नमस्ते 🙂🚀",
    "   leading, and trailing   ",
)


@pytest.fixture(scope="module")
def file() -> Path:
    (package,) = find_spec("dashscope").submodule_search_locations  # not imported: it is a client
    return Path(package) / "resources" / "qwen.tiktoken"


@pytest.fixture(scope="module")
def checkpoint(file: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("real") / "hf"
    return write_tiny_checkpoint(
        path, vocabulary=read_vocabulary(file), text={"num_hidden_layers": 2}, seed=0
    )


def test_tokens_are_tiktokens(file: Path, checkpoint: Path) -> None:
    """The pattern is that of Qwen's own tokenizer, as its repository has it for tiktoken."""
    ranks = {
        base64.b64decode(token): int(rank)
        for token, rank in map(bytes.split, file.read_bytes().splitlines())
    }
    pattern = (
        r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}"
        r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
    )
    own = tiktoken.Encoding("qwen", pat_str=pattern, mergeable_ranks=ranks, special_tokens={})
    tokenizer = AutoProcessor.from_pretrained(checkpoint).tokenizer
    for text in TEXTS:
        ids = tokenizer(text)["input_ids"]
        assert ids == own.encode(text)
        assert max(ids) > 352  # not the tiny vocabulary
        assert tokenizer.decode(ids) == text


def test_special_tokens_and_rows_are_the_published_ones(checkpoint: Path) -> None:
    tokenizer = AutoProcessor.from_pretrained(checkpoint).tokenizer
    made = json.loads((checkpoint / "config.json").read_text())
    for shape in PUBLISHED.glob("[0-9]*.json"):
        published = json.loads(shape.read_text())
        for key in ("image_token_id", "video_token_id", "vision_start_token_id"):
            assert made[key] == published[key]
        for key in ("vocab_size", "bos_token_id", "eos_token_id"):
            assert made["text_config"][key] == published["text_config"][key]
    assert tokenizer.eos_token_id == made["text_config"]["eos_token_id"]
    assert tokenizer.convert_tokens_to_ids("<|image_pad|>") == made["image_token_id"]
    published = {"<tool_call>": 151_657, "<|fim_pad|>": 151_662, "<think>": 151_667}
    published |= {"</tool_call>": 151_658, "</tool_response>": 151_666, "</think>": 151_668}
    text = "".join(published)
    ids = tokenizer(text)["input_ids"]
    assert ids == list(published.values())
    # They are text of an answer, which decoding without special tokens keeps.
    assert tokenizer.decode(ids, skip_special_tokens=True) == text


@pytest.mark.slow
def test_scores_are_hugging_faces(checkpoint: Path, folder: Path, tmp_path: Path) -> None:
    out = tmp_path / "out.jsonl"
    asked = ScoreRequest(
        checkpoint, folder / "data.jsonl", out, layout=Layout(tp=2, sp=True), dtype="fp32",
        entropy=True,
        packing=True, seq_length=512,
    )  # fmt: skip
    score(asked, on_cpu=True)
    check(lines(out), hugging_face(checkpoint, folder))


@pytest.mark.slow
def test_greedy_answers_are_hugging_faces(
    checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cases, "checkpoint", lambda _: checkpoint)
    want = cases.expected("real", "batch", 8)
    assert want.margin > 1e-3
    for rank in cases.answer(
        "real", [cases.conversations("batch")], Layout(tp=2, sp=True), max_new_tokens=8
    ):
        assert [answer.token_ids for answer in rank[0]] == want.tokens


@pytest.mark.slow
def test_logits_and_gradients_are_hugging_faces(checkpoint: Path, capsys: Any) -> None:
    assert exit_code("verify", "parity", checkpoint, "--tp", 2, "--sp", "--json") == 0
    assert json.loads(capsys.readouterr().out)["ok"]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "There is no file"),
        (b"not base64 at all\n", "is no vocabulary in tiktoken's form"),
        (base64.b64encode(b"a") + b" 0\n", "has 1 tokens, and Qwen's vocabulary 151,643"),
    ],
)
def test_what_is_refused(content: bytes | None, message: str, tmp_path: Path, capsys: Any) -> None:
    file = tmp_path / "some.tiktoken"
    if content is not None:
        file.write_bytes(content)
    assert exit_code("tiny", tmp_path / "out", "--real-vocab", file) == 2
    assert message in " ".join(capsys.readouterr().err.split())
    assert not (tmp_path / "out").exists()
