"""Scores equal Hugging Face's in any layout and packing, and a killed run's file is completed."""

from __future__ import annotations

import json
import math
import os
import signal
import time
from functools import cache
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
import transformers

from mcore_qwen3vl.cli import main
from mcore_qwen3vl.converters.convert import hf_to_mcore
from mcore_qwen3vl.data import DataConfig, load_processor
from mcore_qwen3vl.data.processor import vocabulary_fingerprint
from mcore_qwen3vl.data.scores import facts_file_of
from mcore_qwen3vl.data.showing import read_sample
from mcore_qwen3vl.errors import BadInput
from mcore_qwen3vl.layout import Layout
from mcore_qwen3vl.scoring.score import ScoreRequest, score
from mcore_qwen3vl.verification.parity.case import ADAPTERS, write_random_adapter
from tests.command import exit_code
from tests.generation.cases import clip, frames, picture
from tests.test_writer_lock import held_elsewhere
from tests.turns import slow

TOLERANCE = 2e-5
"""The largest error in float32, relative to the largest log-probability."""

TURNS: dict[str, list[tuple[str, list[dict[str, str]], str]]] = {
    "text": [("What is two plus three?", [], "It is five, as ever.")],
    "image": [("What is this?", [{"type": "image", "image": "0.png"}], "Noise of many colours.")],
    "multi-image": [
        (
            "Compare them.",
            [{"type": "image", "image": f"{i}.png"} for i in (1, 2)],
            "One is taller.",
        )
    ],
    "video": [("What moves?", [{"type": "video", "video": "clip.mp4"}], "Stripes, to the left.")],
    "turns": [
        ("And this?", [{"type": "image", "image": "2.png"}], "A picture."),
        ("Sure?", [], "Yes, quite sure of it."),
    ],
}


def messages_of(kind: str) -> list[dict[str, Any]]:
    messages = []
    for question, media, answer in TURNS[kind]:
        content = [*media, {"type": "text", "text": question}]
        messages += [{"role": "user", "content": content}]
        messages += [{"role": "assistant", "content": [{"type": "text", "text": answer}]}]
    return messages


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("score")
    for number, size in enumerate([(40, 64), (72, 24), (24, 40)]):
        picture(number, *size).save(path / f"{number}.png")
    (path / "clip.mp4").write_bytes(clip().read_bytes())
    records = [{"messages": messages_of(kind)} for kind in TURNS]
    (path / "data.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    return path


@cache
def hugging_face(checkpoint: Path, folder: Path, temperature: float = 1.0) -> list[Any]:
    """Return what the model says at each record's trained tokens.

    It is their log-probabilities (n,), the entropies (n,), their ids, and all tokens'
    log-probabilities (n, V).
    """
    processor = transformers.AutoProcessor.from_pretrained(checkpoint)
    model = transformers.AutoModelForImageTextToText.from_pretrained(
        checkpoint, dtype=torch.float32
    ).eval()
    found = []
    for kind in TURNS:
        messages = messages_of(kind)
        parts = [part for message in messages for part in message["content"]]
        images = [picture(int(p["image"][0]), *SIZES[int(p["image"][0])]) for p in parts
                  if p["type"] == "image"]  # fmt: skip
        videos = [frames(str(folder / p["video"])) for p in parts if p["type"] == "video"]

        def inputs(
            turns: list[dict[str, Any]], prompt: bool, images: Any = images, videos: Any = videos
        ) -> dict[str, Any]:
            return processor(
                text=[processor.apply_chat_template(turns, add_generation_prompt=prompt)],
                images=images or None,
                videos=[shown for shown, _ in videos] or None,
                video_metadata=[metadata for _, metadata in videos] or None,
                do_sample_frames=True,
                return_tensors="pt",
            )

        whole = inputs(messages, False)
        tokens = whole["input_ids"][0]
        trained = torch.zeros(len(tokens), dtype=torch.bool)
        for turn in range(1, len(messages), 2):
            before = inputs(messages[:turn], True)["input_ids"].shape[1]
            after = inputs(messages[: turn + 1], False)["input_ids"].shape[1]
            end = processor.tokenizer.convert_tokens_to_ids("<|im_end|>")
            last = before + int((tokens[before:after] == end).nonzero()[-1])
            trained[before : last + 1] = True
        with torch.no_grad():
            logits = model(**whole).logits[0, :-1].double() / temperature
        logs = logits.log_softmax(-1)
        own = logs.gather(1, tokens[1:, None])[:, 0]
        entropy = -(logs.exp() * logs).sum(-1)
        keep = trained[1:]
        found.append((own[keep], entropy[keep], tokens[1:][keep].tolist(), logs[keep]))
    return found


SIZES = [(40, 64), (72, 24), (24, 40)]


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def check(found: list[dict[str, Any]], right: list[Any]) -> float:
    """Check scores, and return the worst difference, which the tolerance bounds."""
    worst = 0.0
    assert [entry["line"] for entry in found] == list(range(1, len(right) + 1))
    for entry, (log_probs, entropy, ids, _) in zip(found, right, strict=True):
        assert entry["token_ids"] == ids
        assert entry["tokens"] == len(ids)
        ours = torch.tensor(entry["token_log_probs"], dtype=torch.float64)
        assert entry["log_prob"] == pytest.approx(float(ours.sum()), rel=1e-12)
        worst = max(worst, float((ours - log_probs).abs().max() / log_probs.abs().max()))
        if "token_entropies" in entry:
            ours = torch.tensor(entry["token_entropies"], dtype=torch.float64)
            worst = max(worst, float((ours - entropy).abs().max() / entropy.abs().max()))
    assert worst <= TOLERANCE
    return worst


@pytest.mark.parametrize(
    ("model", "layout", "packing"),
    [
        ("dense", "single", False),
        ("dense", "tp2xpp2+sp", True),
        ("dense", "cp2xdp2", True),
        *slow(
            ("dense", "single", True),
            ("dense", "tp2+sp", False),
            ("dense", "pp2xvpp2", True),
            ("dense", "cp2", False),
            ("dense", "dp2", False),
            ("moe", "ep2xdp2", True),
            ("moe", "tp2xep2+sp", False),
            ("moe", "pp2xvpp2xdp2", False),
        ),
    ],
)
def test_scores_are_hugging_faces(
    model: str,
    layout: str,
    packing: bool,
    folder: Path,
    tmp_path: Path,
    request: pytest.FixtureRequest,
) -> None:
    checkpoint, out = request.getfixturevalue(model), tmp_path / "out.jsonl"
    temperature = 1.3 if packing else 1.0
    asked = ScoreRequest(
        checkpoint, folder / "data.jsonl", out, layout=Layout.parse(layout), dtype="fp32",
        entropy=True, temperature=temperature, packing=packing, seq_length=512, buffer=2,
    )  # fmt: skip
    tally = score(asked, on_cpu=True)
    right = hugging_face(checkpoint, folder, temperature)
    worst = check(lines(out), right)
    print(f"observed: {model} {layout} packing {packing}: {worst:.1e}")
    every = torch.cat([one[0] for one in right])
    assert tally is not None
    assert tally.tokens == len(every)
    assert tally.perplexity == pytest.approx(math.exp(-float(every.mean())), rel=1e-5)
    entropies = torch.cat([one[1] for one in right])
    assert tally.entropy == pytest.approx(float(entropies.mean()), rel=1e-5)


@pytest.mark.parametrize(
    ("layout", "packing"),
    [
        ("tp2xpp2+sp", True),
        *slow(
            ("cp2xdp2", True),
            ("single", False),
        ),
    ],
)
def test_the_likeliest_tokens_and_the_rest_are_hugging_faces(
    layout: str, packing: bool, dense: Path, folder: Path, tmp_path: Path
) -> None:
    data, k, temperature = folder / "data.jsonl", 6, 1.3
    asked = ScoreRequest(
        dense, data, tmp_path / "out.arrow", layout=Layout.parse(layout), dtype="fp32",
        seq_length=512, temperature=temperature, packing=packing, buffer=2, top_k=k,
    )  # fmt: skip
    tally = score(asked, on_cpu=True)
    right = hugging_face(dense, folder, temperature)
    assert tally is not None
    assert tally.tokens == sum(len(one[0]) for one in right)
    rows = pa.ipc.open_file(pa.memory_map(str(tmp_path / "out.arrow"))).read_all().to_pylist()
    worst = 0.0
    for row, (own, _, _, every) in zip(rows, right, strict=True):
        likeliest = every.topk(k)
        assert row["top_ids"] == likeliest.indices.flatten().tolist()
        assert row["log_prob"] == pytest.approx(float(own.sum()), rel=TOLERANCE)
        rest = (1 - likeliest.values.exp().sum(-1, keepdim=True)).log()
        expected = torch.cat([likeliest.values, rest], 1)
        found = torch.tensor(row["top_log_probs"], dtype=torch.float64).view(expected.shape)
        worst = max(worst, float((found - expected).abs().max()))
    print(f"observed: {layout} {worst:.1e}")
    assert worst <= TOLERANCE


def test_the_vocabulary_is_hashed_for_distillation_alone(dense: Path, folder: Path) -> None:
    from mcore_qwen3vl.scoring.score import _ScoringJob

    def settings(**options: Any) -> dict[str, Any]:
        return _ScoringJob(ScoreRequest(dense, folder / "data.jsonl", **options)).output._settings

    tokenizer, size = load_processor(dense).tokenizer, 352
    assert settings(top_k=2)["vocabulary"] == vocabulary_fingerprint(tokenizer, size)
    assert "vocabulary" not in settings()


def test_a_record_of_several_sequences_has_no_likeliest_tokens(
    dense: Path, folder: Path, tmp_path: Path
) -> None:
    data = tmp_path / "data.jsonl"
    pair = {"messages": messages_of("text")[:1], "chosen": "Yes.", "rejected": "No."}
    data.write_text(f"{json.dumps(pair)}\n{json.dumps({'messages': messages_of('text')})}\n")
    score(ScoreRequest(dense, data, top_k=2, max_bad_fraction=1), on_cpu=True)
    with pa.memory_map(str(tmp_path / "data.topk.arrow")) as file:
        pair, alone = pa.ipc.open_file(file).read_all().to_pylist()
    assert pair["error"] == "--top-k is for records of one sequence; it has several."
    assert pair["top_ids"] is None
    assert alone["error"] is None
    assert len(alone["top_ids"]) == 2 * alone["tokens"]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"top_k": 0}, r"--top-k is 0; it must be from 1 to the 352 tokens"),
        ({"top_k": 353}, "--top-k is 353"),
        ({"top_k": 2, "entropy": True}, "--top-k with --entropy"),
        ({"top_k": 2, "task": "reward"}, "--top-k with --task reward"),
        ({"top_k": 2, "out": Path("out.jsonl")}, r"\(--top-k\) as Arrow.*end it with \.arrow"),
        ({"out": Path("out.arrow")}, r"end it with \.jsonl"),
    ],
)
def test_requests_for_likeliest_tokens_that_are_refused(
    options: dict[str, Any], message: str, dense: Path, folder: Path
) -> None:
    with pytest.raises(BadInput, match=message):
        score(ScoreRequest(dense, folder / "data.jsonl", **options), on_cpu=True)


def test_a_converted_checkpoint_with_an_adapter_scores_like_pefts_model(
    dense: Path, folder: Path, tmp_path: Path
) -> None:
    from mcore_qwen3vl.converters.adapters.merge import merge

    adapter = write_random_adapter(tmp_path / "adapter", ADAPTERS["language"], dense)
    merge(dense, adapter, tmp_path / "merged")
    hf_to_mcore(dense, tmp_path / "mcore")
    asked = ScoreRequest(
        tmp_path / "mcore", folder / "data.jsonl", tmp_path / "out.jsonl", dtype="fp32",
        lora=adapter, seq_length=512,
    )  # fmt: skip
    score(asked, on_cpu=True)
    check(lines(tmp_path / "out.jsonl"), hugging_face(tmp_path / "merged", folder))


def many(folder: Path, count: int, kind: str = "jsonl") -> Path:
    """Write records of all kinds, again and again, some of them bad or too long."""
    records: list[Any] = [{"messages": messages_of(k)} for _ in range(count // 5) for k in TURNS]
    said = [{"type": "text", "text": "no answer"}]
    records[4] = {"messages": [{"role": "user", "content": said}]}
    records[9]["messages"][1]["content"] = [{"type": "text", "text": "long " * 900}]
    file = folder / f"many.{kind}"
    if kind == "parquet":
        pq.write_table(pa.Table.from_pylist(records), file, row_group_size=7)
    else:
        file.write_text("".join(json.dumps(record) + "\n" for record in records))
    return file


def command(checkpoint: Path, data: Path, out: Path) -> list[str]:
    words = ["score", checkpoint, data, "--out", out, "--cpu", "--dp", 2, "--packing-buffer", 4]
    return [str(word) for word in [*words, "--seq-length", 512, "--json"]]


def test_a_bad_record_has_its_line_in_every_command(
    dense: Path, folder: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """Lines are counted as by an editor: from 1, blank lines included."""
    good, bad = json.dumps({"messages": messages_of("text")}), '{"messages": []}'
    data = tmp_path / "data.jsonl"
    data.write_text(f"\n{good}\n  \n{bad}\n{good}\n")
    assert bad in data.read_text().splitlines()[4 - 1]
    out = tmp_path / "out.jsonl"
    for words in (
        ["score", data, "--out", out, "--cpu", "--max-bad-fraction", 1, "--seq-length", 512],
        ["data", "check", data],
        ["data", "show", data, 4],
    ):
        checkpoint = [dense] if words[0] == "score" else ["--hf-model", dense]
        place = 1 if words[0] == "score" else len(words)
        exit_code(*words[:place], *checkpoint, *words[place:])
        printed = "".join(capfd.readouterr())
        assert "data.jsonl:4" in printed.replace("\n", ""), printed
    assert [(entry["line"], "error" in entry) for entry in lines(out)] == [
        (2, False),
        (4, True),
        (5, False),
    ]
    data.write_text(f"{bad}\n{good}\n")  # the index of the earlier lines must not be used
    exit_code("data", "check", data, "--hf-model", dense)
    assert "data.jsonl:1" in "".join(capfd.readouterr()).replace("\n", "")
    data.write_text(f"\n{good}\n\n\n{good}")
    with pytest.raises(BadInput, match=r"Line 1 of .* is blank"):
        read_sample(data, 1, load_processor(dense), DataConfig(512))
    assert read_sample(data, 5, load_processor(dense), DataConfig(512)).name == f"{data}:5"


@pytest.mark.parametrize("kind", ["jsonl", *slow("parquet")])
def test_a_killed_run_goes_on_to_the_same_bytes(
    kind: str, dense: Path, folder: Path, tmp_path: Path
) -> None:
    data = many(folder, 60, kind)
    whole, broken = tmp_path / "whole.jsonl", tmp_path / "broken.jsonl"
    partial = broken.with_name("broken.jsonl.partial")
    child = os.fork()  # it needs no imports of its own
    if not child:
        os.setsid()  # its ranks die with it
        os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
        main(command(dense, data, broken))
    deadline = time.monotonic() + 120
    while time.monotonic() < deadline and not (partial.exists() and partial.stat().st_size):
        time.sleep(0.002)
    os.killpg(child, signal.SIGKILL)
    os.waitpid(child, 0)
    written = partial.read_bytes()
    assert 0 < written.count(b"\n") < 60
    # Add a part of the next block, such as the disk might hold.
    partial.write_bytes(written + b'{"line": 1}\n{"line": 9, "log_pr')
    assert not broken.exists()
    assert exit_code(*command(dense, data, whole)) == 0
    assert exit_code(*command(dense, data, broken)) == 0
    assert broken.read_bytes() == whole.read_bytes()
    entries = lines(whole)
    assert len(entries) == 60
    assert "no assistant turn" in entries[4]["error"]
    assert entries[9]["error"].startswith("over-long: ")
    summary = json.loads(facts_file_of(whole).read_text())["summary"]
    assert (summary["scored"], summary["bad"], summary["overlong"]) == (58, 1, 1)


def test_a_damaged_beginning_is_computed_again_or_refused(
    dense: Path, folder: Path, tmp_path: Path, capfd: Any
) -> None:
    data, whole, broken = many(folder, 24), tmp_path / "whole.jsonl", tmp_path / "broken.jsonl"
    assert exit_code(*command(dense, data, whole)) == 0
    settings = json.loads(facts_file_of(whole).read_text())["settings"]
    partial, facts = (tmp_path / f"broken.jsonl.partial{end}" for end in ("", ".json"))
    good = whole.read_bytes().splitlines(keepends=True)
    partial.write_bytes(b"".join(good[:9]) + b'{"index": 9, "lo\n' + b"".join(good[10:20]))
    facts.write_text(json.dumps({"settings": settings})[:40])
    assert exit_code(*command(dense, data, broken)) == 2
    assert "is missing or damaged" in capfd.readouterr().out
    facts.write_text(json.dumps({"settings": settings}))
    assert exit_code(*command(dense, data, broken)) == 0
    assert broken.read_bytes() == whole.read_bytes()


def test_an_output_has_one_writer(dense: Path, folder: Path, tmp_path: Path, capfd: Any) -> None:
    out = tmp_path / "out.jsonl"
    with held_elsewhere(out) as number:
        assert exit_code(*command(dense, many(folder, 12), out)) == 2
    assert f"Process {number} on" in capfd.readouterr().out
    assert not out.exists()


def test_what_is_refused(dense: Path, folder: Path, tmp_path: Path, capfd: Any) -> None:
    data, out = folder / "data.jsonl", tmp_path / "out.jsonl"

    def said(*words: Any, code: int = 2) -> str:
        assert exit_code("score", dense, *words, "--cpu") == code
        return " ".join(capfd.readouterr().err.split())

    out.write_text("")
    assert "exists: pass --force" in said(data, "--out", out)
    assert "0.png is not a data set" in said(folder / "0.png")
    assert "must be above 0" in said(data, "--temperature", 0, "--out", tmp_path / "x.jsonl")
    message = said(data, "--max-bad-fraction", 2, "--out", tmp_path / "x.jsonl")
    assert "--max-bad-fraction is 2.0; it must be a share from 0 to 1" in message
    assert "not a multiple of 4" in said(data, "--cp", 2, "--seq-length", 510, "--out", out,
                                         "--force")  # fmt: skip
    begun = ScoreRequest(dense, data, tmp_path / "begun.jsonl", seq_length=512)
    from mcore_qwen3vl.scoring.score import _ScoringJob

    _ScoringJob(begun).output.open()
    message = said(data, "--out", tmp_path / "begun.jsonl", "--seq-length", 256)
    assert "begun with other settings (seq_length)" in message
    bad = tmp_path / "bad.jsonl"
    bad.write_text('{"messages": []}\n' * 3 + data.read_text().splitlines()[0] + "\n")
    message = said(bad)
    assert "bad.jsonl:1 left out: messages must be a list" in message
    assert "3 of 4 records are bad" in message
    assert not (tmp_path / "bad.scores.jsonl").exists()
