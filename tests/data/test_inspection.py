"""The report of data agrees with what the loader does."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from mcore_qwen3vl.cli.data import show_report
from mcore_qwen3vl.config import Architecture
from mcore_qwen3vl.data import DataConfig, Loader, Source, load_processor
from mcore_qwen3vl.data.config import MediaLimits
from mcore_qwen3vl.data.datasets import CrudeSamples
from mcore_qwen3vl.data.inspection import DataReport, check_data, plot_report
from mcore_qwen3vl.data.records.reading import Reading
from mcore_qwen3vl.errors import BadInput
from mcore_qwen3vl.losses.registry import detected_form
from mcore_qwen3vl.losses.teacher_file import TeacherFile
from mcore_qwen3vl.rehearsal.command import write_made_up_sidecar
from mcore_qwen3vl.scoring.records import Records
from mcore_qwen3vl.tiny.records import write_half_images
from mcore_qwen3vl.training.arguments.command_line import CommandLine
from mcore_qwen3vl.unused.fields import Unused
from tests.command import exit_code
from tests.data.conftest import WriteJsonl, chat, question, write_tar
from tests.data.encoding.test_planning import planned
from tests.data.records.test_video import write


def test_report(
    processor: Any,
    write_jsonl: WriteJsonl,
    media: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    (tmp_path / "cut.png").write_bytes((media / "2.png").read_bytes()[:2000])
    good = [question(i, image=i % 2 > 0, words=3 * i) for i in range(8)]
    cut = {**chat(("user", "<image>"), ("assistant", "a")), "images": ["cut.png"]}
    path = write_jsonl([*good, cut, "{broken", question(0, image=False, words=200)])
    config = DataConfig(seq_length=200, packing=True, packing_buffer=3)
    report = check_data(path, processor, config)

    plans = [planned(processor, record, tmp_path)[0] for record in good]
    assert report.tokens == [len(plan.input_ids) for plan in plans]
    assert report.trained_tokens == [int((plan.loss_weights > 0).sum()) for plan in plans]
    assert report.patches == [sum(m.patches for m in plan.media) for plan in plans]
    assert (report.samples, report.images, report.videos) == (11, 4, 0)
    assert [flaw.sample.rsplit("/", 1)[-1] for flaw in report.bad] == [
        "data.jsonl:9",
        "data.jsonl:10",
    ]
    assert "cut.png cannot be decoded" in report.bad[0].reason
    assert report.bad[1].reason == (
        "ValueError: no valid JSON: Expecting property name enclosed in double quotes, at "
        "character 2"
    )
    assert [flaw.sample.rsplit("/", 1)[-1] for flaw in report.overlong] == ["data.jsonl:11"]
    assert report.packing_efficiency == sum(report.tokens) / (200 * report.packed_sequences)
    assert dict(report.summary())["bad"] == "2"
    for counts, edges in report.histograms().values():
        assert counts.sum() == 8
        assert len(counts) <= edges[-1] - edges[0] + 1  # no bin between integers

    assert capsys.readouterr() == ("", "")  # stdout may be used for JSON

    headers = check_data(path, processor, config, decode=False, limit=9)
    assert (headers.samples, headers.bad) == (9, [])  # the cut image's header is whole

    plot_report(report, tmp_path / "histograms.png")
    with Image.open(tmp_path / "histograms.png") as image:
        assert image.width > 1000


def test_what_is_done_with_unusual_media_and_texts_is_said(
    processor: Any, write_jsonl: WriteJsonl, tmp_path: Path
) -> None:
    for name, image in (
        ("deep", Image.fromarray(np.full((64, 64), 40000, np.uint16))),
        ("clear", Image.new("RGBA", (64, 64), (255, 0, 0, 0))),
        ("plain", Image.new("RGB", (64, 64), "blue")),
    ):
        image.save(tmp_path / f"{name}.png")
    names = ("plain", "deep", "clear", "deep")
    records = [
        {**chat(("user", "<image>?"), ("assistant", "a")), "images": [str(tmp_path / f"{n}.png")]}
        for n in names
    ]
    for uneven in (False, True):
        clip = write(tmp_path / f"{uneven}.mp4", "mpeg4", uneven=uneven, g="12", bf="2")
        asked = chat(("user", "<video>?<|im_end|>"), ("assistant", "a"))
        records.append({**asked, "videos": [str(clip.content)]})
    path = write_jsonl(records)
    rows = dict(check_data(path, processor, DataConfig(4096)).summary())
    assert rows["videos with a variable frame rate, whose times are those of a constant one"] == (
        f"1, the first in {path}:6"
    )
    assert rows["texts that spell <|im_end|>, which is then the token"] == (
        f"2, the first in {path}:5, message 1"
    )
    assert rows["images 16-bit, scaled to 8 bits"] == f"2, the first in {path}:2"
    assert rows["images transparent, composed on white"] == f"1, the first in {path}:3"


def test_keys_that_training_does_not_read_are_counted(
    processor: Any, write_jsonl: WriteJsonl, capsys: pytest.CaptureFixture[str]
) -> None:
    plain = [{**question(i, image=False), "id": i} for i in range(3)]
    labelled = {**plain[0], "objects": {"bbox": []}, "label": "cat", "rejected_response": None}
    misspelt = json.loads(json.dumps(plain[2]))
    misspelt["messages"][1]["wieght"] = 0
    path = write_jsonl([*plain, labelled, {**plain[1], "label": 0}, misspelt])
    report = check_data(path, processor, DataConfig(seq_length=200))
    assert {(one.where, one.name): len(one.samples) for one in report.unused} == {
        ("a record", "objects"): 1,
        ("a record", "label"): 2,  # the null of rejected_response means that it is missing
        ("a message", "wieght"): 1,
    }
    shown = dict(report.summary())
    assert shown["not used of a record"].startswith("objects (1), label (2), the first in ")
    assert shown["not used of a record"].endswith("data.jsonl:4")
    assert shown["not used of a message"].startswith("wieght (1), the first in ")
    show_report(report)
    assert "--preprocess" in capsys.readouterr().out
    show_report(check_data(write_jsonl(plain), processor, DataConfig(seq_length=200)))
    assert "--preprocess" not in capsys.readouterr().out


def test_records_for_another_task_are_flaws_that_name_their_flag(
    processor: Any, write_jsonl: WriteJsonl
) -> None:
    plain = question(0, image=False)
    keys = {
        "rejected_response": "no", "rejected_messages": [{"role": "assistant", "content": "no"}],
        "rejected_images": ["a.png"],
    }  # fmt: skip
    path = write_jsonl([plain, *({**plain, key: value} for key, value in keys.items())])
    report = check_data(path, processor, DataConfig(seq_length=200))
    assert len(report.tokens) == 1
    for flaw, key in zip(report.bad, keys, strict=True):
        assert re.search(rf"^{key} .*--loss dpo", flaw.reason), flaw


def test_preference_records_are_one_sample_of_both_answers(
    processor: Any, write_jsonl: WriteJsonl
) -> None:
    shared = question(1, image=True, words=4)
    asked, answer = shared["messages"]
    pair = {**shared, "messages": [asked], "chosen": answer["content"], "rejected": "No idea."}
    single = {**shared, "messages": [asked, {"role": "assistant", "content": "No idea."}]}
    path = write_jsonl([pair, shared, single, {**pair, "rejected": 3}])
    report = check_data(
        path, processor, DataConfig(seq_length=400, packing=True, records=detected_form())
    )
    assert report.formats == {"preference": 1, "messages": 2}
    first, *others = report.tokens
    assert first == sum(others)
    assert (report.images, report.patches[0]) == (4, sum(report.patches[1:]))
    assert "rejected must be text" in report.bad[0].reason
    tight = check_data(
        path,
        processor,
        DataConfig(seq_length=first - 1, packing=True, records=detected_form()),
        limit=1,
    )
    assert "tokens in both" in tight.overlong[0].reason


def test_a_hook_is_asked_once_for_a_preference_record(
    processor: Any, write_jsonl: WriteJsonl, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A second call could count its errors twice, be slow, or give another random record."""
    asked: list[str] = []

    def hook(record: dict[str, str]) -> dict[str, Any]:
        asked.append(record["q"])
        turns = [{"role": "user", "content": record["q"]}]
        return {"messages": turns, "chosen": "Yes.", "rejected": "No."}

    monkeypatch.setattr(sys.modules[__name__], "as_pair", hook, raising=False)
    path = write_jsonl([{"q": "One?"}, {"q": "Two?"}])
    config = DataConfig(seq_length=400, packing=True, records=detected_form())
    report = check_data(path, processor, config, defaults=Reading(preprocess=f"{__name__}:as_pair"))
    assert (report.formats, asked) == ({"preference": 2}, ["One?", "Two?"])


@pytest.mark.parametrize(("length", "code"), [(8, 1), (1024, 0)])
def test_the_command_takes_a_converted_checkpoint_and_wants_a_usable_sample(
    length: int,
    code: int,
    processor_dir: Path,
    write_jsonl: WriteJsonl,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    (tmp_path / "mcore").mkdir()
    (tmp_path / "mcore" / "hf").symlink_to(processor_dir)
    path = write_jsonl([question(0, image=False), question(1, image=False)])
    command = ["data", "check", str(path), "--hf-model", str(tmp_path / "mcore")]
    assert exit_code(*command, "--seq-length", length) == code
    printed = " ".join(capsys.readouterr().err.split())
    assert ("all 2 are longer than 8 tokens; raise --seq-length." in printed) == bool(code)


def test_the_command_takes_the_budgets_of_training(
    processor_dir: Path, write_jsonl: WriteJsonl, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = write_jsonl([question(0), question(2)])
    command = ["data", "check", str(path), "--hf-model", str(processor_dir), "--json"]
    patches = []
    for budget in ([], ["--image-max-tokens", "6"]):
        assert exit_code(*command, *budget) == 0
        patches.append(json.loads(capsys.readouterr().out)["patches"])
    assert max(patches[0]) > 4 * 6
    assert max(patches[1]) <= 4 * 6  # a token has two by two patches


def test_nothing_to_draw(tmp_path: Path) -> None:
    with pytest.raises(BadInput, match="no usable sample"):
        plot_report(DataReport(tmp_path, 8), tmp_path / "a.png")


def test_the_balance_of_the_ranks_work(
    processor_dir: Path, write_jsonl: WriteJsonl, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = write_jsonl([question(i, image=i % 5 == 0, words=3 + i**2 % 90) for i in range(40)])
    command = ["data", "check", str(path), "--hf-model", str(processor_dir), "--seq-length", "256"]
    command += ["--dp", "4", "--global-batch-size", "16", "--packing-buffer", "32"]
    assert exit_code(*command, "--json", "--plot", tmp_path / "plot.png") == 0
    found = json.loads(capsys.readouterr().out)
    by_length, by_work = (found["balance"][way] for way in ("by length", "by work"))
    assert 1 <= by_work["micro_batch_step"] < by_length["micro_batch_step"]
    assert sum(by_work["packs"]) == pytest.approx(len(by_work["packs"]))
    with Image.open(tmp_path / "plot.png") as image:
        assert image.width >= 4 * 4 * 150
    exit_code(*command)
    assert "most over mean of the ranks, packed by work" in capsys.readouterr().out


def check(path: Path, model: Path, *flags: str) -> int:
    return exit_code("data", "check", path, "--hf-model", model, "--seq-length", "200", *flags)


def test_a_sample_that_takes_too_long_is_bad(
    dense: Path,
    write_jsonl: WriteJsonl,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    path = write_jsonl([question(0, image=False, words=3)])
    path.with_name("slow_hook.py").write_text(
        "import time\n\n\ndef slow(record):\n    time.sleep(1)\n    return record\n"
    )
    monkeypatch.syspath_prepend(path.parent)
    slow = ("--preprocess", "slow_hook:slow")
    assert check(path, dense, *slow, "--max-sample-seconds", "0.2") == 1
    printed = capsys.readouterr()
    assert "takes more than 0.2 s (--max-sample-seconds)" in printed.out
    assert "error: 1 sample of" in printed.err
    assert check(path, dense, *slow, "--max-sample-seconds", "0") == 0
    assert "% in 1 sequence " in capsys.readouterr().out


def test_samples_that_are_cut_are_counted(
    processor_dir: Path, write_jsonl: WriteJsonl, capsys: pytest.CaptureFixture[str]
) -> None:
    cut = chat(("user", "q"), ("assistant", "word " * 200))
    path = write_jsonl(
        [
            cut,
            chat(("user", "word " * 200), ("assistant", "a")),
            chat(("user", "q"), ("assistant", "a")),
        ]
    )
    assert check(path, processor_dir, "--overlong", "truncate", "--json") == 1
    found = json.loads(capsys.readouterr().out)
    (left,) = found["unused"]
    assert (left["name"], left["why"]) == ("its tail", "cut at seq_length 200")
    assert left["samples"] == [f"{path}:1"]
    assert found["summary"]["most_tokens"] == 200
    (bad,) = found["bad"]
    assert bad["sample"] == f"{path}:2"
    assert bad["reason"].startswith("no trained token is left in the first 200 of its")


def test_a_teachers_tokens_are_checked_too_and_others_stop_a_run(
    dense: Path, tmp_path: Path
) -> None:
    file = write_half_images(tmp_path / "data", 4, tokens=200, image_side=4, token_pixels=8)
    flags = ["--hf-model", str(dense), "--loss", "distill", "--seq-length", "512"]
    write_made_up_sidecar(TeacherFile(1.0), file, dense, CommandLine(flags).settings)

    def checked(temperature: float, media: MediaLimits) -> list[str]:
        sidecar = TeacherFile(temperature)
        config = DataConfig(512, packing=True, sidecar=sidecar, media_limits=media)
        shape = Architecture.from_hf(dense)
        report = check_data(file, load_processor(dense), config, architecture=shape)
        return [flaw.reason for flaw in report.bad]

    assert checked(1.0, MediaLimits()) == []
    other = checked(1.0, MediaLimits(image_max_tokens=4))
    assert len(other) == 4
    assert f"{file}:1 no longer has the tokens" in other[0]
    with pytest.raises(BadInput, match="made with temperature 1, and 2 is needed"):
        checked(2.0, MediaLimits())
    # In a run the records are not at fault, so they are no bad samples.
    media = MediaLimits(image_max_tokens=4)
    config = DataConfig(512, sidecar=TeacherFile(1.0), media_limits=media)
    sources, shape = [Source(file)], Architecture.from_hf(dense)
    loader = Loader(sources, shape, load_processor(dense), config, num_workers=0)
    with pytest.raises(BadInput, match=r"^\S+train\.jsonl:\d no longer has the tokens"):
        next(loader)


def test_every_member_of_a_tar_is_used_or_counted(
    processor: Any, media: Path, tmp_path: Path
) -> None:
    """A caption belongs to all images of its sample; a part that nothing reads is named."""
    picture = (media / "0.png").read_bytes()
    record = json.dumps(
        chat(("user", [{"type": "image", "image": "a.png"}]), ("assistant", "this"))
    ).encode()
    members = {
        "0.left.png": picture, "0.right.png": picture, "0.txt": b"Two of them.",
        "1.a.png": picture, "1.b.png": picture, "1.json": record, "1.npy": b"1", "1.txt": b"no",
    }  # fmt: skip
    write_tar(tmp_path / "tars" / "0.tar", members.items())
    report = check_data(tmp_path / "tars", processor, DataConfig(4096, packing=True))
    assert (report.bad, report.images) == ([], 3)
    assert {(left.where, left.name) for left in report.unused} == {
        ("a sample of a tar", name) for name in ("b.png", "npy", "txt")
    }
    caption = {"text": "Two of them.", "images": ["0.png", "0.png"]}
    assert report.tokens[0] == len(planned(processor, caption, media)[0].input_ids)


def test_a_mixture_that_names_a_mixture_is_refused(processor: Any, tmp_path: Path) -> None:
    mixture = tmp_path / "mixture.yaml"
    mixture.write_text("datasets:\n  - path: mixture.yaml\n")
    with pytest.raises(BadInput, match=r"data set 1 is a mixture file itself, mixture\.yaml"):
        check_data(mixture, processor, DataConfig(64))
    mixture.write_text("data:\n  - path: a.jsonl\n")
    with pytest.raises(BadInput, match=r"neither a mixture file, .* nor an energon metadataset"):
        check_data(mixture, processor, DataConfig(64))


THOUGHT = {"role": "assistant", "content": "a", "reasoning_content": "r", "mood": "good"}


def test_commands_name_what_is_not_used(
    processor_dir: Path, write_jsonl: WriteJsonl, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    asked = {"role": "user", "content": "q"}
    path = write_jsonl([{"messages": [asked, THOUGHT, asked, {**THOUGHT, "weight": 0}]}])
    hf = "--hf-model", processor_dir
    assert exit_code("data", "check", path, *hf, "--json") == 1
    (bad,) = json.loads(capsys.readouterr().out)["bad"]
    assert "leaves out the reasoning_content of message 2, 'r'" in bad["reason"]
    assert exit_code("data", "check", path, *hf, "--json", "--allow-dropped") == 0
    named = json.loads(capsys.readouterr().out)["unused"]
    assert [(one["where"], one["name"], one["samples"]) for one in named] == [
        ("a message", "mood", [f"{path}:1"]),
        ("a message", "reasoning_content", [f"{path}:1"]),
        ("a message", "reasoning_content", [f"{path}:1"]),
    ]
    assert exit_code("data", "check", path, *hf, "--train-on", "last") == 1
    assert "train_on 'last' selects no assistant turn" in capsys.readouterr().out
    page = tmp_path / "page.html"
    assert exit_code("data", "show", path, 1, *hf, "--allow-dropped", "--out", page) == 0
    assert "not used of a message: mood, reasoning_content" in capsys.readouterr().err
    out = tmp_path / "turns.jsonl"
    assert exit_code("data", "turns", path, "--out", out, "--json") == 0
    counts = json.loads(capsys.readouterr().out)
    assert (counts["read"], counts["written"]) == (1, 1)
    assert json.loads(out.read_text())["messages"] == [asked, THOUGHT]
    assert exit_code("data", "turns", path, "--out", out) == 2
    assert "exists already" in capsys.readouterr().err


def test_loading_and_scoring_name_what_is_not_used_once(
    architecture: Architecture,
    processor: Any,
    write_jsonl: WriteJsonl,
    caplog: pytest.LogCaptureFixture,
) -> None:
    records = [{**question(i, image=False), "source": "web"} for i in range(4)]
    sources = [Source(write_jsonl(records))]
    loader = Loader(sources, architecture, processor, DataConfig(seq_length=200), num_workers=0)
    for _ in range(4):
        next(loader)
    (line,) = [one.getMessage() for one in caplog.records if "not used" in one.getMessage()]
    assert line.startswith(f"not used of a record: source, the first in {sources[0].path}:")
    samples = CrudeSamples(sources, split="train", trust=False)
    reader = Records(samples, sources, architecture, processor, DataConfig(seq_length=200), 1)
    reader.plan(range(4))
    assert list(reader.take_results().unused) == [Unused("a record", "source")]


BUDGETS = [f"--{name.replace('_', '-')} {n}" for name in vars(MediaLimits()) for n in (0, -1)]
OF_CHECK = ("--packing-buffer 0", "--limit 0", "--limit -1", "--max-sample-seconds -1")


@pytest.mark.parametrize(
    ("command", "flags"),
    [
        *(("check", flags) for flags in (*BUDGETS, *OF_CHECK, "--video-fps nan")),
        *(("show", flags) for flags in BUDGETS),
    ],
)
def test_a_limit_that_is_none(
    command: str,
    flags: str,
    dense: Path,
    write_jsonl: WriteJsonl,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """A negative budget was taken for none, and a buffer of 0 ended in a traceback."""
    words = [write_jsonl([question(0, image=False)]), *(["1"] if command == "show" else [])]
    assert exit_code("data", command, *words, "--hf-model", dense, *flags.split()) == 2
    assert flags.split()[0] in capsys.readouterr().err


def test_a_length_that_no_sample_has(
    dense: Path, write_jsonl: WriteJsonl, capsys: pytest.CaptureFixture[str]
) -> None:
    path = write_jsonl([question(i, image=False) for i in range(3)])
    assert exit_code("data", "check", path, "--hf-model", dense, "--seq-length", "3") == 1
    assert "all 3 are longer than 3 tokens; raise --seq-length" in capsys.readouterr().err
