"""Records as tables and other programs leave them, and what is refused in words that help."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import av
import numpy as np
import pytest

from mcore_qwen3vl.data import DataConfig
from mcore_qwen3vl.data.inspection import DataReport, check_data
from mcore_qwen3vl.data.records.media import Media, MediaFolder
from mcore_qwen3vl.data.records.parse import parse_record
from mcore_qwen3vl.data.records.reading import BadSample
from mcore_qwen3vl.data.records.tasks import labels_in, parse_labelled, parse_pair
from mcore_qwen3vl.data.records.video import load_frames, probe_video
from mcore_qwen3vl.data.rewriting import write_turns
from mcore_qwen3vl.data.sizes import Size
from tests.command import exit_code
from tests.data.conftest import WriteJsonl, chat, write_png
from tests.data.encoding.test_rendering_left_out import A, Q, rendered, talk

FOLDER = MediaFolder(Path(), {})
CONFIG = DataConfig(seq_length=4096)
HALF = "half \ud83d of it"


def test_half_of_a_surrogate_pair(processor: Any, write_jsonl: WriteJsonl, tmp_path: Path) -> None:
    records = [
        chat(("user", HALF), ("assistant", "a")),
        chat(("user", "q"), ("assistant", HALF)),
        {"text": HALF},
        chat(("user", "q"), ("assistant", "\ud83d\ude42 whole")),
    ]
    path = write_jsonl(records)
    report = check_data(path, processor, CONFIG)
    assert len(report.tokens) == 1
    for flaw in report.bad:
        assert "its text has \\ud83d after" in flaw.reason
        assert "half ': half of a surrogate pair" in flaw.reason
    assert len(report.bad) == 3
    assert write_turns(path, tmp_path / "turns.jsonl") == (4, 4)
    again = check_data(tmp_path / "turns.jsonl", processor, CONFIG)
    assert [flaw.reason for flaw in again.bad] == [flaw.reason for flaw in report.bad]


def test_a_thin_image_is_named(processor: Any, write_jsonl: WriteJsonl, tmp_path: Path) -> None:
    write_png(tmp_path / "thin.png", 2, 500)
    record = {**chat(("user", "<image>?"), ("assistant", "a")), "images": ["thin.png"]}
    (flaw,) = check_data(write_jsonl([record]), processor, CONFIG).bad
    assert "image thin.png has 2 x 500 pixels: absolute aspect ratio" in flaw.reason


def write_cut_video(path: Path, frames: int, cut: int) -> Path:
    """Write a video whose edit list leaves out its first frames, as a phone does to trim it."""
    with av.open(str(path), "w") as container:
        stream = container.add_stream("mpeg4", rate=10)
        stream.height, stream.width, stream.pix_fmt = 32, 48, "yuv420p"
        for index in range(frames):
            picture = av.VideoFrame.from_ndarray(np.full((32, 48, 3), 11 * index, np.uint8))
            picture.pts = index
            for packet in [
                *stream.encode(picture),
                *(stream.encode() if index + 1 == frames else ()),
            ]:
                packet.pts -= cut
                packet.dts -= cut
                container.mux(packet)
    return path


@pytest.mark.parametrize("cut", [0, 1, 5])
def test_frames_that_an_edit_list_leaves_out(cut: int, tmp_path: Path) -> None:
    video = Media("video", write_cut_video(tmp_path / "cut.mp4", 23, cut), "cut")
    metadata = probe_video(video)
    assert metadata.total_num_frames == 23 - cut
    assert metadata.duration == pytest.approx((23 - cut) / 10)
    for indices in (np.arange(23 - cut), np.array([0, 22 - cut])):  # in order, and by seeking
        shown = load_frames(video, indices).mean((1, 2, 3))
        assert shown == pytest.approx(11 * (indices + cut), abs=5)


def columns(*messages: dict[str, Any]) -> dict[str, list[Any]]:
    keys = dict.fromkeys(key for message in messages for key in message)
    return {key: [message.get(key) for message in messages] for key in keys}


CALLED = {**A, "tool_calls": [{"function": {"name": "f", "arguments": {"a": 1}}}]}


@pytest.mark.parametrize("messages", [(Q, A), (Q, CALLED, {"role": "tool", "content": "x"}, A)])
def test_a_struct_of_lists(messages: tuple[dict[str, Any], ...]) -> None:
    expected = parse_record(talk(*messages), FOLDER)
    assert parse_record({"messages": columns(*messages)}, FOLDER) == expected
    assert parse_record({"messages": json.dumps(columns(*messages))}, FOLDER) == expected
    llava = [{"from": "human", "value": "q"}, {"from": "gpt", "value": "a"}]
    assert parse_record({"conversations": columns(*llava)}, FOLDER) == parse_record(
        {"conversations": llava}, FOLDER
    )
    calls = {**A, "tool_calls": columns(*CALLED["tool_calls"])}
    assert parse_record(talk(Q, calls), FOLDER) == parse_record(talk(Q, CALLED), FOLDER)
    answers = {"chosen": [Q, A], "rejected": [Q, {**A, "content": "No."}]}
    assert parse_pair({k: columns(*v) for k, v in answers.items()}, FOLDER) == parse_pair(
        answers, FOLDER
    )
    labelled = {"label": True}
    assert parse_labelled({"messages": columns(Q, A), **labelled}, FOLDER) == parse_labelled(
        {"messages": [Q, A], **labelled}, FOLDER
    )


@pytest.mark.parametrize("wrong", [{"role": ["user"], "content": []}, {"role": ["a"], "x": "y"}])
def test_a_struct_of_unequal_lists(wrong: Any) -> None:
    with pytest.raises(BadSample, match="messages is a struct of lists, of which each must have"):
        parse_record({"messages": wrong}, FOLDER)


def test_labels_of_a_column_with_gaps() -> None:
    assert labels_in({"label": 0.0}) == [0]
    assert labels_in({"label": [2.0, 1]}) == [2, 1]
    for wrong in (0.5, -1.0, float("nan")):
        with pytest.raises(BadSample, match="a number from 0 or a name"):
            labels_in({"label": wrong})


YES, NO = {**A, "content": "Yes"}, {**A, "content": "No"}
PAIR = parse_pair({"chosen": [Q, YES], "rejected": [Q, NO]}, FOLDER)


@pytest.mark.parametrize(
    "record",
    [
        {"prompt": "Hi", "chosen": "Yes", "rejected": "No"},
        {"prompt": [Q], "chosen": [YES], "rejected": [NO]},
        {"prompt": Q, "chosen": YES, "rejected": NO},
        {"prompt": "Hi", "chosen": [Q, YES], "rejected": [Q, NO]},
        {"prompt": columns(Q), "chosen": columns(YES), "rejected": columns(NO)},
        {"prompt": None, "messages": [Q], "chosen": "Yes", "rejected": "No"},
        {"messages": json.dumps([Q]), "chosen": "Yes", "rejected": "No"},
    ],
)
def test_a_pair_with_a_prompt(record: Any) -> None:
    assert parse_pair(record, FOLDER) == PAIR


@pytest.mark.parametrize(
    ("record", "message"),
    [
        ({"chosen": "Yes", "rejected": "No"}, "neither messages nor a prompt before it"),
        ({"chosen": YES, "rejected": NO}, "neither messages nor a prompt before it"),
        (
            {"prompt": "Hi", "messages": [Q], "chosen": "Yes", "rejected": "No"},
            "both messages and prompt are given",
        ),
        (
            {"prompt": "Ho", "chosen": [Q, YES], "rejected": [Q, NO]},
            "chosen begins with a message of the user, and not with the prompt",
        ),
    ],
)
def test_a_pair_whose_prompt_is_unclear(record: Any, message: str) -> None:
    with pytest.raises(BadSample, match=message):
        parse_pair(record, FOLDER)


def test_many_unknown_keys_take_no_more_than_their_number(
    processor: Any, write_jsonl: WriteJsonl, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They are found again by name, and not by a search through all."""
    compared = [0]

    class Counted(str):
        __slots__ = ()

        def __eq__(self, other: object) -> bool:
            compared[0] += 1
            return str.__eq__(self, other)

        __hash__ = str.__hash__

    from mcore_qwen3vl.data import inspection
    from mcore_qwen3vl.unused.fields import Unused

    report = DataReport(Path("x"), 8)
    fold = inspection.Fold(report, [])
    for number in range(400):
        item = Unused(Counted("a record"), Counted(f"key {number}"))
        fold.add(inspection.Finding("s", size=Size(1, 0, 0.0), unused=(item,)))
    assert len(report.unused) == 400
    assert compared[0] < 4000


def test_time_that_is_up_in_a_template_is_not_the_templates_fault(
    processor: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def slow(*_: Any, **__: Any) -> str:
        time.sleep(0)
        raise BadSample("it takes more than 1 s")

    monkeypatch.setattr(type(processor), "apply_chat_template", slow)
    with pytest.raises(BadSample, match=r"^it takes more than 1 s$"):
        rendered(processor, processor.chat_template, talk(Q, A))


def test_the_size_of_many_turns_is_said(
    write_jsonl: WriteJsonl, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = write_jsonl([talk(*[Q, A] * 60)])
    assert exit_code("data", "turns", path, "--out", tmp_path / "turns.jsonl") == 0
    said = " ".join(capsys.readouterr().out.split())
    assert "60 records of 1 record" in said
    assert "0.2 MB of 0.0 MB, since each has all turns before it" in said
