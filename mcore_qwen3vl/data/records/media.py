"""Images and videos of a sample: where they are, how big they are, and their pixels.

Sizes come from file headers alone, so that a sample's length in tokens is known, and samples can
wait in the packing buffer, before any pixel is decoded.
"""

from __future__ import annotations

import base64
import binascii
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from io import BytesIO
from pathlib import Path
from typing import Any, BinaryIO, Literal

import av
import numpy as np
from av.video.reformatter import VideoReformatter
from PIL import ExifTags, Image, ImageOps
from transformers.video_utils import VideoMetadata

from mcore_qwen3vl.data.records.flaws import BadSample

Kind = Literal["image", "video"]

_SIDEWAYS = (5, 6, 7, 8)  # EXIF orientations that swap height and width
# Bare base64 is told from a path by its length: no image is smaller, no path is longer.
_SHORTEST_BASE64 = 64
_LONGEST_PATH = 4095


@dataclass(frozen=True)
class Media:
    """One image or video, not opened yet."""

    kind: Kind
    content: Path | bytes
    name: str  # for messages

    def open(self) -> BinaryIO:
        """The encoded bytes.

        Raises:
            BadSample: the file cannot be opened.
        """
        if isinstance(self.content, bytes):
            return BytesIO(self.content)
        try:
            return self.content.open("rb")
        except OSError as error:
            raise BadSample(f"{self.kind} {self.content}: {error.strerror}.") from error


@dataclass(frozen=True)
class MediaFolder:
    """Where a sample's references lead: files beside it, or parts of the same WebDataset sample."""

    root: Path
    parts: Mapping[str, bytes]

    def resolve(self, kind: Kind, reference: Any) -> Media:
        """Find what a record refers to.

        Args:
            kind: image or video.
            reference: a path relative to the data file, a part name, a data URI, base64 text, raw
                bytes, or a mapping with ``bytes``, ``base64``, ``path`` or ``url``.

        Raises:
            BadSample: the reference cannot be understood, or names a remote file.
        """
        if isinstance(reference, Mapping):
            reference = next(
                (
                    reference[key]
                    for key in ("bytes", "base64", "path", "url")
                    if reference.get(key)
                ),
                None,
            )
        if isinstance(reference, bytes | bytearray):
            return Media(kind, bytes(reference), f"{len(reference)} bytes")
        if not isinstance(reference, str) or not reference:
            raise BadSample(f"{kind} reference is {_shown(reference)}; a path or base64 is needed.")
        return self._resolve_text(kind, reference)

    def _resolve_text(self, kind: Kind, reference: str) -> Media:
        if reference in self.parts:
            return Media(kind, self.parts[reference], reference)
        if reference.startswith("data:"):
            _, _, encoded = reference.partition("base64,")
            return Media(kind, _decoded(kind, encoded), "data URI")
        if reference.startswith(("http://", "https://")):
            raise BadSample(f"{kind} {_shown(reference)} is remote; download it beside the data.")
        if len(reference) > _LONGEST_PATH:
            return Media(kind, _decoded(kind, reference), "base64")
        path = self.root / reference.removeprefix("file://")
        if len(reference) >= _SHORTEST_BASE64 and "." not in reference and not path.exists():
            return Media(kind, _decoded(kind, reference), "base64")
        return Media(kind, path, reference)


def _decoded(kind: Kind, encoded: str) -> bytes:
    try:
        content = base64.b64decode(encoded, validate=True)
    except (binascii.Error, ValueError):
        content = b""
    if not content:
        raise BadSample(f"{kind} {_shown(encoded)} is no valid base64.")
    return content


def _shown(reference: Any) -> str:
    text = repr(reference)
    return text if len(text) <= 80 else f"{text[:77]}..."


@contextmanager
def _image(media: Media) -> Iterator[Image.Image]:
    try:
        with media.open() as stream, Image.open(stream) as image:
            yield image
    except (OSError, SyntaxError, Image.DecompressionBombError) as error:  # PIL raises all three
        raise BadSample(f"image {media.name} cannot be decoded: {error}.") from error


def image_size(media: Media) -> tuple[int, int]:
    """(height, width) in pixels as displayed, from the header.

    Raises:
        BadSample: missing file, or no image.
    """
    with _image(media) as image:
        width, height = image.size
        # Asking a PNG without an EXIF header for EXIF would decode all of it.
        exif = image.getexif() if image.format != "PNG" or "exif" in image.info else {}
        sideways = exif.get(ExifTags.Base.Orientation) in _SIDEWAYS
    return (width, height) if sideways else (height, width)


def load_image(media: Media) -> Image.Image:
    """The RGB image, upright: as HF ``transformers.image_utils.load_image`` gives it.

    Raises:
        BadSample: missing file, no image, or a truncated one.
    """
    with _image(media) as image:
        ImageOps.exif_transpose(image, in_place=True)
        image.load()  # converting does it, too, but RGB is not converted: that would only copy
        return image if image.mode == "RGB" else image.convert("RGB")


@contextmanager
def _video(media: Media) -> Iterator[Any]:
    try:
        with media.open() as stream, av.open(stream) as container:
            if not container.streams.video:
                raise BadSample(f"video {media.name} has no video stream.")
            yield container
    except (av.error.FFmpegError, OSError) as error:
        raise BadSample(f"video {media.name} cannot be decoded: {error}.") from error


def probe_video(media: Media) -> VideoMetadata:
    """Frame count, frame rate and size, from the container.

    Raises:
        BadSample: missing file, or no video.
    """
    with _video(media) as container:
        stream = container.streams.video[0]
        if not stream.average_rate:
            raise BadSample(f"video {media.name} states no frame rate.")
        # Some containers (WebM) do not state the count; their packets do.
        count = stream.frames or sum(packet.size > 0 for packet in container.demux(stream))
        fps = float(stream.average_rate)
        return VideoMetadata(
            total_num_frames=count,
            fps=fps,
            duration=count / fps,
            video_backend="pyav",
            height=stream.height,
            width=stream.width,
        )


def load_frames(media: Media, indices: np.ndarray) -> np.ndarray:
    """Decode the frames at `indices` (ascending, repeats allowed).

    Returns:
        (F, height, width, 3) uint8 RGB.

    Raises:
        BadSample: missing file, no video, or fewer frames than its header says.
    """
    wanted = set(indices.tolist())
    frames: dict[int, np.ndarray] = {}
    # One thread, and a converter of our own: PyAV's shared one keeps threads that do not survive
    # the fork of a data worker, which then waits for them forever.
    to_rgb = VideoReformatter()
    with _video(media) as container:
        container.streams.video[0].codec_context.thread_count = 1
        for index, frame in enumerate(container.decode(video=0)):
            if index in wanted:
                frames[index] = to_rgb.reformat(frame, format="rgb24", threads=1).to_ndarray()
            if len(frames) == len(wanted):
                break
    if len(frames) < len(wanted):
        raise BadSample(
            f"video {media.name} holds {len(frames)} of the {len(wanted)} frames to sample; it is "
            "cut short."
        )
    return np.stack([frames[index] for index in indices.tolist()])
