"""Data that fill memory, take too long, or name other files are refused by name."""

from __future__ import annotations

import io
import json
import os
import sys
import tarfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from mcore_qwen3vl.config import Architecture
from mcore_qwen3vl.data import DataConfig, Source, indexes
from mcore_qwen3vl.data.datasets import CrudeSamples
from mcore_qwen3vl.data.encoding import pixels
from mcore_qwen3vl.data.inspection import check_data
from mcore_qwen3vl.data.measuring import Measuring
from mcore_qwen3vl.data.readers import tables
from mcore_qwen3vl.data.records import video
from mcore_qwen3vl.data.records.media import Media, image_size, load_image
from mcore_qwen3vl.data.records.reading import BadSample, Reading, record_limit
from mcore_qwen3vl.errors import BadInput
from mcore_qwen3vl.tiny.tiny_checkpoint import tiny_config
from tests.data.conftest import WriteJsonl, chat, question, write_png, write_tar, write_video

LITTLE = DataConfig(seq_length=4096, packing=True, max_decoded_pixels=100 * 100)


def test_images_and_frames_of_many_pixels_are_not_decoded(
    processor: Any, write_jsonl: WriteJsonl, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, width in (("fits", 100), ("large", 101)):
        write_png(tmp_path / f"{name}.png", 100, width)
    write_video(tmp_path / "large.mp4", frames=8, height=104, width=112)
    write_video(tmp_path / "fits.mp4", frames=8, height=96, width=96)
    answer = {"role": "assistant", "content": "a"}
    frames = [str(tmp_path / "large.png")] * 4
    files = [
        *(("image", str(tmp_path / f"{name}.png")) for name in ("fits", "large")),
        *(("video", str(tmp_path / f"{name}.mp4")) for name in ("fits", "large")),
        ("video", frames),
    ]
    path = write_jsonl(
        [
            {"messages": [{"role": "user", "content": f"<{kind}>?"}, answer], f"{kind}s": [file]}
            for kind, file in files
        ]
    )
    decoded = []
    for module, name in (
        (pixels, "load_image"),
        (video, "load_image"),
        (pixels, "load_frames"),
    ):
        read = getattr(module, name)
        monkeypatch.setattr(
            module, name, lambda media, *a, read=read: decoded.append(media) or read(media, *a)
        )
    report = check_data(path, processor, LITTLE)
    assert [Path(media.name).name for media in decoded] == ["fits.png", "fits.mp4"]
    assert len(report.tokens) == 2
    assert [flaw.sample.rsplit(":", 1)[-1] for flaw in report.bad] == ["2", "4", "5"]
    image, clip, listed = (flaw.reason for flaw in report.bad)
    more = "more than 10,000 (--max-decoded-pixels)."
    assert image.endswith(f"large.png has 101 x 100 pixels, {more}")
    assert clip.endswith(f"large.mp4 has 112 x 104 pixels a frame, {more}")
    assert "from " in listed
    assert "101 x 100 pixels a frame" in listed
    assert check_data(path, processor, DataConfig(seq_length=4096, packing=True)).bad == []


def test_a_later_frame_of_many_pixels_is_not_decoded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    frames = [
        Media("image", write_png(tmp_path / f"{i}.png", 20, 20 + 300 * i), str(i)) for i in (0, 1)
    ]
    monkeypatch.setattr(video, "load_image", lambda frame: pytest.fail(f"{frame} is decoded"))
    with pytest.raises(BadSample, match="frame 1 has 20 x 320 pixels and the first 20 x 20"):
        video.load_frames(Media("video", tuple(frames), "two"), None)  # type: ignore[arg-type]


@pytest.mark.parametrize("most", [0, -1, 2 * 10**8])
def test_a_limit_that_pil_does_not_have(most: int) -> None:
    with pytest.raises(BadInput, match="max-decoded-pixels is"):
        DataConfig(seq_length=8, max_decoded_pixels=most)


def test_a_row_group_that_unpacks_to_much(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tables, "_BOMB_BYTES", 1 << 20)
    bomb, file = pa.table({"text": ["a" * (1 << 21)]}), tmp_path / "bomb.parquet"
    with pq.ParquetWriter(file, bomb.schema, compression="zstd") as writer:
        writer.write_table(pa.table({"text": ["b"]}))
        writer.write_table(bomb)
    said = r"bomb\.parquet: row group 1 has [\d,]+ bytes, which unpack to 2,09\d,\d\d\d\. Refused"
    with pytest.raises(BadInput, match=said):
        tables.TableReader(file)
    pq.write_table(bomb, tmp_path / "plain.parquet", compression="none")
    assert len(tables.TableReader(tmp_path / "plain.parquet")[0]["json"]["text"]) == 1 << 21


@pytest.mark.parametrize("kind", ["SYMTYPE", "LNKTYPE", "CHRTYPE", "FIFOTYPE"])
def test_links_and_devices_in_tars(
    kind: str, processor: Any, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """They are not followed or opened: the image that a record names by them is missing."""
    secret = write_png(tmp_path / "secret.png", 64, 64)
    (tmp_path / "tars").mkdir()
    with tarfile.open(tmp_path / "tars" / "0.tar", "w") as tar:
        for name, record in (
            ("0", {**chat(("user", "<image>?"), ("assistant", "a")), "images": ["png"]}),
            ("1", question(1, image=False)),
        ):
            content = json.dumps(record).encode()
            entry = tarfile.TarInfo(f"{name}.json")
            entry.size = len(content)
            tar.addfile(entry, io.BytesIO(content))
            if name == "0":
                link = tarfile.TarInfo("0.png")
                link.type, link.linkname = getattr(tarfile, kind), str(secret)
                link.devmajor, link.devminor = 1, 5  # /dev/zero
                tar.addfile(link)
    report = check_data(tmp_path / "tars", processor, DataConfig(4096, packing=True))
    assert len(report.tokens) == 1
    (flaw,) = report.bad
    assert "png" in flaw.reason
    assert report.images == 0


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", r"image .*x\.png is empty: it has 0 bytes\."),
        (b"ab", r"image .*x\.png cannot be decoded: it is only 2 bytes; "),
        (b"\x89PNG\r\n\x1a\n\0\0", r"image .*x\.png cannot be decoded: it is a damaged PNG\."),
        (b"not an image at all", r"it is of no format that PIL knows; AVIF, "),
    ],
)
def test_images_that_hold_next_to_nothing(content: bytes, message: str, tmp_path: Path) -> None:
    (tmp_path / "x.png").write_bytes(content)
    for place in (tmp_path / "x.png", content):
        for read in (image_size, load_image):
            with pytest.raises(BadSample, match=message):
                read(Media("image", place, str(tmp_path / "x.png")))


LIMIT = 1.0


def stubborn(record: dict[str, Any]) -> dict[str, Any]:
    """Hang at one record, and hang once more when interrupted."""
    if "sample 1" in str(record):
        try:
            time.sleep(60)
        except BadSample:
            time.sleep(60)
    return record


@pytest.fixture
def in_time() -> Iterator[None]:
    start = time.monotonic()
    yield
    assert time.monotonic() - start < 40


@pytest.mark.usefixtures("in_time")
def test_a_hook_that_hangs(processor: Any, write_jsonl: WriteJsonl) -> None:
    sys.modules.setdefault(__name__, sys.modules[stubborn.__module__])
    path = write_jsonl([question(i, image=False) for i in range(3)])
    config = DataConfig(seq_length=256, max_sample_seconds=LIMIT)
    report = check_data(
        path, processor, config, defaults=Reading(preprocess=f"{__name__}:stubborn")
    )
    assert len(report.tokens) == 2
    (flaw,) = report.bad
    assert flaw.sample.endswith("data.jsonl:2")
    assert "takes more than 1 s (--max-sample-seconds)" in flaw.reason


@pytest.mark.usefixtures("in_time")
@pytest.mark.parametrize("name", ["b.parquet", "0.tar.idx"])
def test_a_pipe_in_a_folder_of_data_is_not_opened(
    name: str, processor: Any, tmp_path: Path
) -> None:
    os.mkfifo(tmp_path / name)
    with pytest.raises(BadInput, match="is a pipe"):
        check_data(tmp_path, processor, DataConfig(256))
    with pytest.raises(BadInput, match="is a pipe"):
        Measuring(
            tmp_path, processor, DataConfig(256, packing=True, balance=True),
            Architecture.from_hf(tiny_config()), Reading(),
        )  # fmt: skip


@pytest.mark.usefixtures("in_time")
def test_pipes_and_devices_are_not_opened(
    processor: Any, write_jsonl: WriteJsonl, tmp_path: Path
) -> None:
    os.mkfifo(tmp_path / "pipe.png")
    (tmp_path / "endless.png").symlink_to("/dev/zero")
    records = [
        {**chat(("user", "<image>?"), ("assistant", "a")), "images": [name]}
        for name in ("pipe.png", "endless.png")
    ]
    report = check_data(write_jsonl(records), processor, DataConfig(seq_length=256))
    assert [flaw.reason.rsplit("/", 1)[-1] for flaw in report.bad] == [
        "pipe.png is not a regular file.",
        "endless.png is not a regular file.",
    ]


@pytest.mark.usefixtures("in_time")
def test_the_limit_ends_with_its_block_and_the_outer_one_counts() -> None:
    with record_limit(0.2), record_limit(60), pytest.raises(BadSample, match=r"more than 0\.2 s"):
        time.sleep(60)
    time.sleep(1.5)  # an alarm that was left would interrupt this
    with record_limit(0):
        time.sleep(0.1)


@pytest.mark.parametrize("name", ["data.jsonl", "data.json", "data.yaml", "data.parquet"])
def test_a_data_set_that_is_a_pipe_is_refused(name: str, tmp_path: Path) -> None:
    """Reading it would wait for ever."""
    os.mkfifo(tmp_path / name)
    with pytest.raises(BadInput, match="is a pipe or a device"):
        CrudeSamples([Source(tmp_path / name)], split="train", trust=False)


@pytest.mark.parametrize(
    ("file", "content"),
    [
        ("state.json", {"_data_files": [{"filename": "../secret.arrow"}]}),
        ("state.json", {"_data_files": [{"filename": "/secret.arrow"}]}),
        ("state.json", {"_data_files": [3]}),
        ("state.json", {"_data_files": [{}]}),
        ("state.json", {"_data_files": [{"filename": "absent.arrow"}]}),
        ("dataset_dict.json", {"splits": ["../train"]}),
        ("dataset_dict.json", {"splits": ["."]}),
        ("dataset_dict.json", {"splits": [{"train": 1}]}),
    ],
)
def test_a_saved_data_set_that_names_files_elsewhere(
    file: str, content: Any, tmp_path: Path
) -> None:
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / file).write_text(json.dumps(content), "utf-8")
    with pytest.raises(BadInput, match=f"{file} names .* beside it"):
        tables.table_files(tmp_path / "data", "train")


@pytest.mark.parametrize(
    "splits",
    [
        {"train": {"path": "self.yaml"}},
        {"train": [1, 2]},
        {"train": {"path": "http://localhost/x"}},
        None,
        ["train"],
    ],
)
def test_a_malformed_metadataset_is_named(splits: Any, tmp_path: Path) -> None:
    """Energon ends with an error of Python's for each of them."""
    path = tmp_path / "self.yaml"
    classes = {"__module__": "megatron.energon", "__class__": "MetadatasetV2"}
    path.write_text(json.dumps({**classes, "splits": splits}), "utf-8")
    with pytest.raises(BadInput, match=r"self\.yaml is no data set that energon can read"):
        CrudeSamples([Source(path)], split="train", trust=False)


RECORD = json.dumps(chat(("user", "a"), ("assistant", "b"))).encode()


@pytest.mark.parametrize("name", ["", "index.sqlite", "dataset.yaml", "split.yaml"])
def test_the_index_of_a_metadatasets_tars_follows_no_link(name: str, tmp_path: Path) -> None:
    shards, elsewhere = tmp_path / "data" / "shards", tmp_path / "elsewhere"
    write_tar(shards / "0.tar", [("0.json", RECORD)])
    elsewhere.mkdir()
    if name:
        (shards / ".nv-meta").mkdir()
        (shards / ".nv-meta" / name).symlink_to(elsewhere / "new")
    else:
        (shards / ".nv-meta").symlink_to(elsewhere)
    with pytest.raises(BadInput, match=r"is a link, and the index .* would land in .*elsewhere"):
        indexes.index_beside(shards)
    assert not list(elsewhere.iterdir())


def test_what_is_no_database_among_the_files_of_an_index(tmp_path: Path) -> None:
    write_tar(
        tmp_path / "0.tar",
        [("0.json", RECORD)],
    )
    (tmp_path / ".nv-meta").mkdir()
    (tmp_path / ".nv-meta" / "index.sqlite").write_bytes(b"no database\n" * 99)
    with pytest.raises(BadInput, match="file is not a database"):
        indexes.index_beside(tmp_path)
