"""Every form of an image loads as Hugging Face loads it, and what cannot be read is named."""

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
from mcore_qwen3vl.data.records.reading import BadSample
from mcore_qwen3vl.data.records.video import probe_video
from tests.data.conftest import write_png


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
