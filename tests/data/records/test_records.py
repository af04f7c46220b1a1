"""Sound records are read, and the faults of others are named."""

from __future__ import annotations

import base64
import os
import struct
import zlib
from collections.abc import Callable
from inspect import signature
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import EpsImagePlugin, Image
from transformers.image_transforms import convert_to_rgb
from transformers.image_utils import load_image as hf_load_image

from mcore_qwen3vl.data.records.media import (
    Media,
    MediaFolder,
    image_size,
    load_image,
    peculiarities,
)
from mcore_qwen3vl.data.records.parse import Conversation, Document, join_parts, parse_record
from mcore_qwen3vl.data.records.reading import BadSample
from mcore_qwen3vl.data.records.video import load_frames, probe_video
from tests.data.conftest import chat, write_png, write_video


def parse(record: Any, root: Path = Path("/data")) -> Any:
    return parse_record(record, MediaFolder(root, {}))


def test_tags_and_parts_give_the_same_conversation() -> None:
    tags = {
        **chat(("user", "a<image>b<video>"), ("assistant", "c")),
        "images": ["i.png"],
        "videos": ["v.mp4"],
    }

    def parts(image: dict[str, str], video: dict[str, str]) -> dict[str, Any]:
        content = [
            {"type": "text", "text": "a"},
            {"type": "image", **image},
            {"type": "text", "text": "b"},
            {"type": "video", **video},
        ]
        return chat(("user", content), ("assistant", "c"))

    inline = parts({"image": "i.png"}, {"video": "v.mp4"})
    listed = {**parts({}, {}), "images": ["i.png"], "videos": ["v.mp4"]}
    for record in (tags, inline, listed):
        parsed = parse(record)
        assert isinstance(parsed, Conversation)
        assert parsed.messages[0]["content"] == [
            {"type": "text", "text": "a"},
            {"type": "image"},
            {"type": "text", "text": "b"},
            {"type": "video"},
        ]
        assert [str(m.content) for m in parsed.media] == ["/data/i.png", "/data/v.mp4"]


def test_text_stays_a_string_and_tools_are_kept() -> None:
    parsed = parse({**chat(("user", "q"), ("assistant", "a")), "tools": [{"name": "t"}]})
    assert parsed.messages == [
        {"role": "user", "content": "q"},
        {"role": "assistant", "content": "a"},
    ]
    assert parsed.tools == [{"name": "t"}]
    assert parsed.weights == [0, 1]


@pytest.mark.parametrize(
    "reference",
    [
        "{b64}",
        "data:image/png;base64,{b64}",
        {"base64": "{b64}"},
        {"bytes": b"raw"},
        {"bytes": None, "path": "0.png"},
        "0.png",
        "{absolute}",
    ],
)
def test_every_form_of_an_image_loads(reference: Any, tmp_path: Path) -> None:
    path = write_png(tmp_path / "0.png", 20, 30)
    raw = path.read_bytes()

    def filled(value: Any) -> Any:
        if value == b"raw":
            return raw
        encoded = base64.b64encode(raw).decode()
        return (
            value.format(b64=encoded, absolute=path)
            if isinstance(value, str)
            else value
        )  # fmt: skip

    if isinstance(reference, dict):
        reference = {key: filled(value) for key, value in reference.items()}
    else:
        reference = filled(reference)
    media = MediaFolder(tmp_path, {}).resolve("image", reference)
    assert image_size(media) == (20, 30)
    assert np.array_equal(np.asarray(load_image(media)), np.asarray(Image.open(path)))


@pytest.mark.parametrize("encode", [base64.b64encode, base64.encodebytes])
def test_base64_of_a_small_image_is_never_taken_for_a_file_name(
    encode: Callable[[bytes], bytes], tmp_path: Path
) -> None:
    """Without a slash it is a longer name than file systems take; base64(1) breaks its lines."""
    black = BytesIO()
    Image.new("RGB", (20, 30)).save(black, "BMP")
    encoded = encode(black.getvalue()).decode()
    assert 1000 < len(encoded) < 4096
    media = MediaFolder(tmp_path, {}).resolve("image", encoded)
    assert not np.asarray(load_image(media)).any()


@pytest.mark.parametrize(
    ("record", "said"),
    [
        ([], "must be a JSON object"),
        ({}, r"none of messages, conversations, texts.* nor chosen, rejected .* or positive"),
        (chat(("user", "q"), ("assistant", [])), "message 2, an assistant turn, is empty"),
        ({**chat(("user", "<image>"), ("assistant", "a")), "images": [7]}, "reference is 7"),
        (
            {
                **chat(("user", "<image>"), ("assistant", "a")),
                "images": ["data:image/png;base64,?"],
            },
            "not valid base64",
        ),
        ({**chat(("user", "q"), ("assistant", "a")), "weight": float("nan")}, "weight is nan"),
        ({**chat(("user", "q"), ("assistant", "a")), "weight": 0}, "nothing would be trained"),
    ],
)
def test_malformed_records_say_what_is_wrong(record: Any, said: str) -> None:
    """`test_formats` has others, of every format."""
    with pytest.raises(BadSample, match=said):
        parse(record)


def test_documents() -> None:
    assert parse({"text": "abc", "weight": 0.5}) == Document(["abc"], 0.5)
    document = parse({"texts": [None, "b"], "images": ["i.png", None]})
    assert [part if isinstance(part, str) else part.kind for part in document.parts] == [
        "image",
        "b",
    ]


def test_webdataset_parts() -> None:
    folder = MediaFolder(Path("/tars"), {"jpg": b"J", "txt": b"caption \xc3\xa9"})
    document = parse_record(join_parts(folder.parts, None), folder)
    assert document.parts[1] == "caption é"
    assert document.media[0].content == b"J"
    folder = MediaFolder(Path("/tars"), {"one.png": b"1", "two.png": b"2"})
    record = {**chat(("user", "<image><image>"), ("assistant", "a"))}
    record["images"] = ["two.png", "one.png"]
    parsed = parse_record(join_parts(folder.parts, record), folder)
    assert [m.content for m in parsed.media] == [b"2", b"1"]


@pytest.mark.parametrize("suffix", ["jpg", "png"])
def test_exif_orientation_is_applied_to_size_and_pixels(suffix: str, tmp_path: Path) -> None:
    pixels = np.random.default_rng(0).integers(0, 256, (20, 50, 3), np.uint8)
    exif = Image.Exif()
    exif[0x0112] = 6  # the orientation "rotated by a quarter"
    Image.fromarray(pixels).save(tmp_path / f"a.{suffix}", exif=exif)
    media = MediaFolder(tmp_path, {}).resolve("image", f"a.{suffix}")
    assert image_size(media) == (50, 20)
    assert_as_hf(media)


@pytest.mark.parametrize("mode", ["1", "L", "RGB", "P"])
def test_every_colour_mode_becomes_hf_s_rgb(mode: str, tmp_path: Path) -> None:
    pixels = np.random.default_rng(0).integers(0, 256, (20, 30, 4), np.uint8)
    Image.fromarray(pixels).convert("RGB").convert(mode).save(tmp_path / "a.png")
    media = MediaFolder(tmp_path, {}).resolve("image", "a.png")
    assert_as_hf(media)
    assert peculiarities(media) == []


@pytest.mark.parametrize("mode", ["LA", "RGBA", "RGB, one colour", "P, one colour"])
def test_what_is_transparent_shows_white(mode: str, tmp_path: Path) -> None:
    pixels = np.random.default_rng(0).integers(0, 256, (20, 30, 4), np.uint8)
    image = Image.fromarray(pixels).convert(mode.split(",")[0])
    transparency = {"transparency": image.getpixel((3, 4))} if "," in mode else {}
    image.save(tmp_path / "a.png", **transparency)
    media = MediaFolder(tmp_path, {}).resolve("image", "a.png")
    with Image.open(tmp_path / "a.png") as image:
        shown = np.asarray(image.convert("RGBA")).astype(float)
    alpha = shown[..., 3:] / 255
    expected = shown[..., :3] * alpha + 255 * (1 - alpha)
    found = load_image(media)
    assert (found.mode, found.size) == ("RGB", (30, 20))
    assert np.abs(np.asarray(found) - expected).max() <= 1
    assert np.abs(np.asarray(found) - np.asarray(image_as_hf(media)).astype(int)).max() > 50
    assert peculiarities(media) == ["transparent, composed on white"]


@pytest.mark.parametrize("suffix", ["png", "tiff"])
def test_16_bits_are_scaled_to_8(suffix: str, tmp_path: Path) -> None:
    values = np.linspace(0, 65535, 600).reshape(20, 30).astype(np.uint16)
    Image.fromarray(values).save(tmp_path / f"a.{suffix}")
    media = MediaFolder(tmp_path, {}).resolve("image", f"a.{suffix}")
    found = np.asarray(load_image(media))
    assert found.shape == (20, 30, 3)
    assert np.abs(found - (values / 257)[..., None]).max() <= 0.5
    assert peculiarities(media) == ["16-bit, scaled to 8 bits"]


def test_values_of_no_known_range_are_refused(tmp_path: Path) -> None:
    folder = MediaFolder(tmp_path, {})
    for name, values in (("float", np.float32(0.5)), ("wide", np.int32(70000))):
        Image.fromarray(np.full((20, 30), values)).save(tmp_path / f"{name}.tiff")
        with pytest.raises(BadSample, match="write it with 8 or 16 bits"):
            load_image(folder.resolve("image", f"{name}.tiff"))


@pytest.mark.parametrize("suffix", ["gif", "webp", "png"])
def test_the_first_frame_of_an_animation_is_read_and_named(suffix: str, tmp_path: Path) -> None:
    frames = [Image.new("RGB", (30, 20), colour) for colour in ("red", "blue")]
    file = tmp_path / f"a.{suffix}"
    frames[0].save(file, save_all=True, append_images=frames[1:])
    media = MediaFolder(tmp_path, {}).resolve("image", file.name)
    red, _, blue = np.asarray(load_image(media))[5, 5].astype(int)
    assert red > 200 > 50 > blue
    assert "animated, first frame only" in peculiarities(media)


def test_cmyk_becomes_hf_s_rgb(tmp_path: Path) -> None:
    pixels = np.random.default_rng(0).integers(0, 256, (20, 30, 4), np.uint8)
    Image.fromarray(pixels, "CMYK").save(tmp_path / "a.jpg")
    assert_as_hf(MediaFolder(tmp_path, {}).resolve("image", "a.jpg"))


def image_as_hf(media: Media) -> Image.Image:
    return hf_load_image(str(media.content))


def hf_rgb(image: Image.Image) -> Any:
    """Convert by HF, asking newer transformers to paint a background."""
    background = [True] * (len(signature(convert_to_rgb).parameters) - 1)
    return convert_to_rgb(image, *background)


def assert_as_hf(media: Media) -> None:
    ours, theirs = load_image(media), image_as_hf(media)
    assert ours.mode == "RGB"
    assert np.array_equal(np.asarray(ours), np.asarray(theirs))
    assert np.array_equal(hf_rgb(ours), hf_rgb(theirs))


def test_unreadable_media_say_so(tmp_path: Path) -> None:
    buffer = BytesIO()
    noise = np.random.default_rng(0).integers(0, 256, (64, 64, 3), np.uint8)
    Image.fromarray(noise).save(buffer, "PNG")
    (tmp_path / "cut.png").write_bytes(buffer.getvalue()[:3000])
    (tmp_path / "text.png").write_text("not an image")
    (tmp_path / "cut.mp4").write_bytes(noise.tobytes())
    folder = MediaFolder(tmp_path, {})
    with pytest.raises(BadSample, match=r"gone\.png: No such file"):
        image_size(folder.resolve("image", "gone.png"))
    with pytest.raises(BadSample, match=r"text\.png cannot be decoded"):
        image_size(folder.resolve("image", "text.png"))
    assert image_size(folder.resolve("image", "cut.png")) == (64, 64)
    with pytest.raises(BadSample, match=r"cut\.png cannot be decoded"):
        load_image(folder.resolve("image", "cut.png"))
    with pytest.raises(BadSample, match=r"cut\.mp4 cannot be decoded"):
        probe_video(folder.resolve("video", "cut.mp4"))


def test_an_image_that_unpacks_to_much_is_refused_by_its_header(tmp_path: Path) -> None:
    size = struct.pack(">IIBBBBB", 20_000, 20_000, 8, 2, 0, 0, 0)  # 1.2 GB as RGB
    content = b"\x89PNG\r\n\x1a\n"
    for kind, data in ((b"IHDR", size), (b"IDAT", b"")):
        content += struct.pack(">I", len(data)) + kind + data
        content += struct.pack(">I", zlib.crc32(kind + data))
    (tmp_path / "a.png").write_bytes(content)
    media = MediaFolder(tmp_path, {}).resolve("image", "a.png")
    for read in (image_size, load_image, peculiarities):
        with pytest.raises(BadSample, match=r"a\.png cannot be decoded: Image size \(400000000 "):
            read(media)


def test_images_start_no_program(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """EPS is refused, for which PIL would start Ghostscript."""
    ghostscript = tmp_path / "gs"
    ghostscript.write_text(f"#!/bin/sh\ntouch {tmp_path}/ran\nexit 1\n")
    ghostscript.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    monkeypatch.setattr(EpsImagePlugin, "gs_binary", None)  # so that PIL looks for it again
    Image.new("RGB", (64, 64)).save(tmp_path / "a.png", "EPS")
    media = MediaFolder(tmp_path, {}).resolve("image", "a.png")
    for read in (image_size, load_image, peculiarities):
        with pytest.raises(BadSample, match=r"a\.png cannot be decoded: it is EPS; .*PNG"):
            read(media)
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize("suffix", ["mp4", "webm"])
def test_video_is_probed_and_decoded(suffix: str, tmp_path: Path) -> None:
    path = write_video(tmp_path / f"a.{suffix}", frames=13, height=32, width=48, fps=10)
    media = MediaFolder(tmp_path, {}).resolve("video", path.name)
    metadata = probe_video(media)
    assert (metadata.total_num_frames, metadata.height, metadata.width) == (13, 32, 48)
    assert metadata.fps == pytest.approx(10)
    every = load_frames(media, np.arange(13))
    assert every.shape == (13, 32, 48, 3)
    assert np.array_equal(load_frames(media, np.array([2, 7, 7, 12])), every[[2, 7, 7, 12]])
    with pytest.raises(BadSample, match="holds 13 of the 14 frames"):
        load_frames(media, np.arange(14))


def parsed(folder: Path, answer: Any, objects: Any) -> Any:
    record = chat(("user", "<image>Where is <ref-object>?<image>"), ("assistant", answer))
    record |= {"images": ["wide.png", "tall.png"], "objects": objects}
    found = parse_record(record, MediaFolder(folder, {}))
    assert isinstance(found, Conversation)
    return found


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    write_png(tmp_path / "wide.png", 40, 80)
    write_png(tmp_path / "tall.png", 100, 50)
    return tmp_path


@pytest.mark.parametrize(
    ("objects", "answer"),
    [
        ({"bbox": [[8, 4, 80, 40]]}, "[100, 100, 1000, 1000]"),
        ({"bbox": [[8, 4, 40, 40]], "image_id": [1]}, "[160, 40, 800, 400]"),
        ({"bbox": [[7.3, 39.95]], "bbox_type": "real"}, "[91, 999]"),
        ({"bbox": [[0.25, 0.5, 1, 1]], "bbox_type": "norm1"}, "[250, 500, 1000, 1000]"),
        ({"bbox": [[1, 2, 3, 4]], "bbox_type": "norm1000"}, "[1, 2, 3, 4]"),
    ],
)
def test_boxes_are_parts_of_a_thousand(objects: Any, answer: str, folder: Path) -> None:
    objects = {"ref": ["the cat"], **objects}
    for content in ("<bbox>", [{"type": "text", "text": "<bbox>"}]):
        messages = parsed(folder, content, objects).messages
        assert messages[0]["content"][1] == {"type": "text", "text": "Where is the cat?"}
        shown = messages[1]["content"]
        assert (shown if isinstance(shown, str) else shown[0]["text"]) == answer
    record = {"text": "<image>Here <bbox> is <ref-object>.", "image": "wide.png"}
    if "image_id" not in objects:
        document = parse_record({**record, "objects": objects}, MediaFolder(folder, {}))
        assert isinstance(document, Document)
        assert document.parts[1] == f"Here {answer} is the cat."


@pytest.mark.parametrize(
    ("objects", "message"),
    [
        (None, "<ref-object> takes its text from objects.* has none"),
        ({"ref": ["a", "b"], "bbox": [[0, 0]]}, "1 tags <ref-object> and 2 entries in ref"),
        ({"ref": ["a"]}, "1 tags <bbox> and 0 entries in bbox"),
        ({"ref": ["a"], "bbox": [[0, 0, 81, 1]]}, "not inside 80 x 40"),
        ({"ref": ["a"], "bbox": [[0, -1]]}, "coordinate of bbox is -1"),
        ({"ref": ["a"], "bbox": [[0, 0, 1]]}, "x, y, x, y is needed"),
        ({"ref": ["a"], "bbox": [[0, 0]], "image_id": [2]}, "image_id 2 .* there are 2 images"),
        ({"ref": ["a"], "bbox": [[0, 0]], "image_id": [0, 1]}, "2 image_id for 1 bbox"),
        ({"ref": ["a"], "bbox": [[0, 0]], "bbox_type": "pixel"}, "one of real, norm1, norm1000"),
        ({"ref": [1], "bbox": [[0, 0]]}, "ref of objects must be a list of texts"),
    ],
)
def test_objects_that_do_not_fit_are_refused(objects: Any, message: str, folder: Path) -> None:
    with pytest.raises(BadSample, match=message):
        parsed(folder, "<bbox>", objects)


def test_other_keys_of_objects_are_named(folder: Path) -> None:
    (left,) = parsed(folder, "<bbox>", {"ref": ["a"], "bbox": [[0, 0]], "area": 3}).unused
    assert (left.where, left.name) == ("objects", "area")
