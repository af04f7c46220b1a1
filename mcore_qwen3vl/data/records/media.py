"""Images and videos of a sample: where they are, how big they are, and their pixels.

Sizes are read from file headers alone, so that a sample's length in tokens is known, and samples
can wait in the packing buffer, before any pixel is decoded.
"""

from __future__ import annotations

import base64
import binascii
import os
import re
import stat
import struct
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from functools import cache
from io import BytesIO
from pathlib import Path
from typing import Any, BinaryIO, Literal, get_args

import numpy as np
from PIL import ExifTags, Image, ImageOps, UnidentifiedImageError

from mcore_qwen3vl.data.records.reading import BadSample, Observed, require_number, unused_keys
from mcore_qwen3vl.unused.fields import Fields, Unused

Kind = Literal["image", "video"]
KINDS: tuple[Kind, ...] = get_args(Kind)

# PIL reads many more formats; for some it starts a program, such as Ghostscript for EPS.
_FORMATS = (
    "AVIF", "BMP", "DIB", "GIF", "HEIF", "ICO", "JPEG", "JPEG2000", "PCX", "PNG", "PPM", "QOI",
    "TGA", "TIFF", "WEBP",
)  # fmt: skip
_DEEP = ("I", "I;16", "I;16B", "I;16L", "I;16N", "F")  # PIL's modes with more than 8 bits
_MOST_16_BITS = 2**16 - 1
_ANIMATIONS = ("GIF", "PNG", "WEBP")  # in other formats, several pictures are parts of one
_SIDEWAYS = (5, 6, 7, 8)  # EXIF orientations that swap height and width
# Length tells bare base64 from a path: shorter text is no image, and longer text is no path.
_SHORTEST_BASE64 = 64
_LONGEST_PATH = 4095
_OF_RECORD = (
    "fps", "sample_fps", "nframes", "min_frames", "max_frames",
    "min_pixels", "max_pixels", "total_pixels",
)  # fmt: skip
"""Keys of a record that hold for all of its media; they have no other meaning there."""
TAG = re.compile("<(image|video)>")
"""The place of an image or a video in a text."""


@dataclass(frozen=True)
class MediaOptions:
    """Choices for one image or video; None: those of the data set."""

    fps: float | None = None  # frames a second to sample from a file, or of a list of frames
    start: float | None = None  # seconds of a file between which its clip is
    end: float | None = None
    frames: float | None = None  # to sample from a file
    min_frames: float | None = None  # to sample from a file at a rate
    max_frames: float | None = None
    raw_fps: float | None = None  # frames a second by which a list's frames are timed
    timestamps: tuple[float, ...] | None = None  # seconds, of the frames of a list
    frames_indices: tuple[float, ...] | None = None  # of a list's frames, in a video of `raw_fps`
    min_pixels: float | None = None  # of the resized image, or of each resized frame
    max_pixels: float | None = None
    total_pixels: float | None = None  # of all resized frames; frames of one patch count once

    def size(
        self, usual: Mapping[str, int], frames: int = 1, in_patch: int = 1
    ) -> dict[str, int] | None:
        """Return the ``size`` for HF's processor if it differs from `usual`, else None.

        Args:
            usual: the processor's own ``size``, in pixels of the image or of all frames.
            frames: the frames that are sampled.
            in_patch: the frames that a patch covers.
        """
        if (self.min_pixels, self.max_pixels, self.total_pixels) == (None, None, None):
            return None
        low, upper = usual["shortest_edge"], []
        if self.min_pixels is not None:
            low = int(self.min_pixels) * frames
        if self.max_pixels is not None:
            upper.append(int(self.max_pixels) * frames)
        if self.total_pixels is not None:  # as in `qwen_vl_utils`, a little above min_pixels
            least = int((self.min_pixels or 0) * 1.05) * frames
            upper.append(max(int(self.total_pixels * in_patch), least))
        high = min(upper, default=max(low, usual["longest_edge"]))
        if self.min_pixels is None:
            low = min(low, high)
        if low > high:
            raise BadSample(f"min_pixels {low // frames} is above max_pixels {high // frames}.")
        return {"shortest_edge": low, "longest_edge": high}


USUAL = MediaOptions()
_PIXELS: dict[str, tuple[str, ...]] = {"min_pixels": ("min_pixels",), "max_pixels": ("max_pixels",)}
_OPTION_KEYS: dict[Kind, dict[str, tuple[str, ...]]] = {
    "image": _PIXELS,
    "video": {
        **_PIXELS,
        "total_pixels": ("total_pixels",),
        "fps": ("fps", "sample_fps"),
        "frames": ("nframes",),
        "min_frames": ("min_frames",),
        "max_frames": ("max_frames",),
        "raw_fps": ("raw_fps",),
        "start": ("video_start", "start"),
        "end": ("video_end", "end"),
        "timestamps": ("timestamps",),
        "frames_indices": ("frames_indices",),
    },
}
"""Keys of a record for each option; the names are those of ``qwen_vl_utils``, and shorter ones."""

OPTION_NAMES: dict[Kind, tuple[str, ...]] = {
    kind: tuple(key for keys in options.values() for key in keys)
    for kind, options in _OPTION_KEYS.items()
}
"""The keys of a part, or of a reference's object, that :func:`read_options` reads."""

_OF_FILES: dict[str, str] = {
    "start": "start and end", "end": "start and end",
    "frames": "nframes", "min_frames": "min_frames", "max_frames": "max_frames",
}  # fmt: skip
_OF_LISTS = ("timestamps", "frames_indices", "raw_fps")
"""Options that hold for video files only, as messages call them, and for lists of frames only."""


def unused_of_lists(record: Mapping[str, Any]) -> list[Unused]:
    """Return what is not used of the objects in a record's ``images`` and ``videos``."""
    return [
        item
        for kind in KINDS
        for reference in media_list(record, kind)
        for item in unused_of_reference(kind, reference)
    ]


def unused_of_reference(kind: Kind, reference: Any) -> list[Unused]:
    """Return what is not used of a reference to an image or a video."""
    if not isinstance(reference, Mapping):
        return []
    keys = ("bytes", "base64", "path", "url", "frames")
    place = next((key for key in keys if reference.get(key)), "")
    # The path beside an image's bytes is its name, as in the ``Image`` feature of ``datasets``.
    fields = Fields(f"an object of {kind}s", (place, *OPTION_NAMES[kind]), inert=("path",))
    return unused_keys(fields, reference)


def read_options(kind: Kind, fields: Mapping[str, Any]) -> MediaOptions:
    """Read the options of an image or video among the keys of its part or reference."""
    options: dict[str, Any] = {}
    for option, keys in _OPTION_KEYS[kind].items():
        key = next((key for key in keys if fields.get(key) is not None), None)
        if key in ("timestamps", "frames_indices"):
            options[option] = _ascending_numbers(key, fields[key])
        elif key is not None:
            limit = {"least" if option in ("start", "end") else "above": 0}
            options[option] = require_number(f"{kind}'s {key}", fields[key], **limit)
    if "frames" in options and options.keys() & {"fps", "min_frames", "max_frames"}:
        raise BadSample("nframes is given with fps, min_frames or max_frames: keep one of them.")
    if "frames_indices" in options and ("raw_fps" not in options or "timestamps" in options):
        raise BadSample("frames_indices need raw_fps, their frames a second, and no timestamps.")
    return MediaOptions(**options)


def _ascending_numbers(key: str, values: Any) -> tuple[float, ...]:
    """Return the values of a list of numbers from 0; raise BadSample unless they ascend."""
    if not isinstance(values, list | tuple):
        what = "second" if key == "timestamps" else "number"
        raise BadSample(f"{key} is {values!r:.40}; a list with the {what} of each frame.")
    numbers = tuple(require_number(f"one of {key}", value, least=0) for value in values)
    if list(numbers) != sorted(numbers):
        raise BadSample(f"{key} do not ascend.")
    return numbers


@dataclass(frozen=True)
class Media:
    """One image or video, not opened yet."""

    kind: Kind
    content: Path | bytes | tuple[Media, ...]  # several: the images that are a video's frames
    name: str  # for messages
    options: MediaOptions = USUAL

    def open(self) -> BinaryIO:
        """Open the encoded bytes."""
        content = self.content
        assert not isinstance(content, tuple)
        try:
            # Opening a pipe would wait for a writer, and a device may have no end.
            if isinstance(content, Path) and not stat.S_ISREG(content.stat().st_mode):
                raise BadSample(f"{self.kind} {content} is not a regular file.")
            size = content.stat().st_size if isinstance(content, Path) else len(content)
            if size == 0:
                raise BadSample(f"{self.kind} {self.name} is empty: it has 0 bytes.")
            return content.open("rb") if isinstance(content, Path) else BytesIO(content)
        except OSError as error:
            raise BadSample(f"{self.kind} {content!s}: {error.strerror}.") from error


@dataclass(frozen=True)
class MediaFolder:
    """The place of a sample's media: files beside it, or parts of the same WebDataset sample."""

    root: Path
    parts: Mapping[str, bytes]

    @property
    def unused(self) -> list[Unused]:
        """The parts that nothing has read, if `parts` remember it."""
        return self.parts.unused if isinstance(self.parts, Observed) else []

    def resolve(self, kind: Kind, reference: Any, fields: Mapping[str, Any] | None = None) -> Media:
        """Return the image or video that a record refers to.

        Args:
            reference: a path relative to the data file, a part name, a data URI, base64 text, raw
                bytes, or a mapping with ``bytes``, ``base64``, ``path`` or ``url``. A video may be
                a list of images, or a mapping with ``frames``.
            fields: keys beside the reference, see :func:`read_options`; a mapping's own take
                precedence.
        """
        fields = fields or {}
        if isinstance(reference, Mapping):
            fields = {**fields, **reference}
            keys = ("bytes", "base64", "path", "url", "frames")
            reference = next((reference[key] for key in keys if reference.get(key)), None)
        options = read_options(kind, fields)
        if kind == "video" and isinstance(reference, list | tuple) and reference:
            return self._resolve_frames(reference, options)
        for name in _OF_LISTS:
            if getattr(options, name) is not None:
                raise BadSample(f"{name} is given for a video file; it is for a list of frames.")
        return replace(self._locate(kind, reference), options=options)

    def _resolve_frames(self, references: Sequence[Any], options: MediaOptions) -> Media:
        """Return the video that a list of images is; raise BadSample for options of files."""
        frames = tuple(self.resolve("image", reference) for reference in references)
        name = f"of {len(frames)} frames from {frames[0].name}"
        for option, called in _OF_FILES.items():
            if getattr(options, option) is not None:
                verb = "are" if " " in called else "is"
                raise BadSample(
                    f"video {name}: {called} {verb} for video files; list fewer frames."
                )
        for key in ("timestamps", "frames_indices"):
            if (times := getattr(options, key)) is not None and len(times) != len(frames):
                raise BadSample(f"video {name} has {len(times)} {key}.")
        return Media("video", frames, name, options)

    def _locate(self, kind: Kind, reference: Any) -> Media:
        """Return the media of a path, part name, data URI, base64 text or bytes, not opened yet."""
        if isinstance(reference, bytes | bytearray):
            return Media(kind, bytes(reference), f"{len(reference)} bytes")
        if not isinstance(reference, str) or not reference:
            raise BadSample(f"{kind} reference is {reference!r:.80}; a path or base64 is needed.")
        if reference in self.parts:
            return Media(kind, self.parts[reference], reference)
        if reference.startswith("data:"):
            _, _, encoded = reference.partition("base64,")
            return Media(kind, _decode_base64(kind, encoded), "data URI")
        if reference.startswith(("http://", "https://")):
            raise BadSample(f"{kind} {reference!r:.80} is remote; download it beside the data.")
        if len(reference) > _LONGEST_PATH:
            return Media(kind, _decode_base64(kind, reference), "base64")
        path = self.root / reference.removeprefix("file://")
        may_be_base64 = len(reference) >= _SHORTEST_BASE64 and "." not in reference
        # Path.exists would raise for a name that is longer than file systems take.
        if may_be_base64 and not os.path.exists(path):
            return Media(kind, _decode_base64(kind, reference), "base64")
        return Media(kind, path, reference)


def _decode_base64(kind: Kind, encoded: str) -> bytes:
    try:
        # Lines may be broken, as base64(1) and mail do; other strange characters are errors.
        content = base64.b64decode("".join(encoded.split()), validate=True)
    except (binascii.Error, ValueError):
        content = b""
    if not content:
        raise BadSample(f"{kind} {encoded!r:.80} is not valid base64.")
    return content


class RecordMedia:
    """A record's images and videos: a list or a single one, under the plural or singular key."""

    def __init__(self, record: Mapping[str, Any], folder: MediaFolder) -> None:
        self._folder = folder
        self._options = options_of_all(record)
        self._left = {kind: media_list(record, kind) for kind in KINDS}
        self._totals = {kind: len(left) for kind, left in self._left.items()}
        self.media: list[Media] = []
        for key in ("audio", "audios"):
            if record.get(key):
                raise BadSample(f"{key} is given, and the model takes images and videos only.")

    def take(
        self, kind: Kind, reference: Any = None, fields: Mapping[str, Any] | None = None
    ) -> None:
        """Add an image or video; without a reference, the next unused entry of the record's list.

        `fields` are keys of its part of the message, such as ``fps``; they override the record's.
        """
        if reference is None:
            if not self._left[kind]:
                raise BadSample(
                    f"there are more {kind} placeholders than the {self._totals[kind]} given in "
                    f"{kind}s."
                )
            reference = self._left[kind].pop(0)
        fields = {**self._options, **(fields or {})}
        self.media.append(self._folder.resolve(kind, reference, fields))

    def split_tags(self, text: str) -> Iterator[dict[str, Any]]:
        """Yield parts for the template: ``<image>`` and ``<video>`` tags, and the text between."""
        for place, piece in enumerate(TAG.split(text)):
            if place % 2:  # what the group of TAG matched
                kind: Kind = "image" if piece == "image" else "video"
                self.take(kind)
                yield {"type": kind}
            elif piece:
                yield {"type": "text", "text": piece}

    def check_all_used(self, texts: Mapping[str, str]) -> None:
        """Raise if media are left over; `texts`: tags that were read as text, and where."""
        for kind, left in self._left.items():
            if left:
                said = (
                    f"{self._totals[kind]} {kind}s are given, but only "
                    f"{self._totals[kind] - len(left)} {kind} placeholders use them."
                )
                if where := texts.get(f"<{kind}>"):
                    said += (
                        f' <{kind}> in {where} is text: write a part {{"type": "{kind}"}} where '
                        f"the {kind} belongs."
                    )
                raise BadSample(said)


def options_of_all(record: Mapping[str, Any]) -> dict[str, Any]:
    """Return what a record says of all its media: keys that have no other meaning in a record."""
    return {key: record[key] for key in _OF_RECORD if record.get(key) is not None}


def media_list(record: Mapping[str, Any], kind: str) -> list[Any]:
    """Return, as a list, the values of ``images`` or ``image`` (or of ``videos`` or ``video``)."""
    many, single = record.get(f"{kind}s"), record.get(kind)
    if many is not None and single is not None:
        raise BadSample(f"both {kind} and {kind}s are given; keep one of them.")
    value = single if many is None else many
    if value is None or value == "":
        return []
    return list(value) if isinstance(value, list) else [value]


@contextmanager
def _open_image(media: Media) -> Iterator[Image.Image]:
    """Open an image; raise BadSample if it, or the code in the block, cannot decode it."""
    try:
        with media.open() as stream, Image.open(stream, formats=_readable_formats()) as image:
            yield image
    except (UnidentifiedImageError, struct.error):  # the latter for a few bytes
        kind, read = _format_of_refused(media), _readable_formats()
        what = f"a damaged {kind}" if kind in read else f"{kind}; {', '.join(read)} are read"
        raise BadSample(f"image {media.name} cannot be decoded: it is {what}.") from None
    # PIL raises the first three, `to_rgb` the last.
    except (OSError, SyntaxError, Image.DecompressionBombError, ValueError) as error:
        reason = str(error).rstrip(".")
        raise BadSample(f"image {media.name} cannot be decoded: {reason}.") from error


@cache
def _readable_formats() -> list[str]:
    """Return the names in `_FORMATS` that the installed PIL, with its plugins, can read."""
    Image.init()
    return [name for name in _FORMATS if name in Image.OPEN]


def _format_of_refused(media: Media) -> str:
    """Return the format of a refused file, as its first bytes suggest; nothing is decoded."""
    with media.open() as stream:
        beginning = stream.read(16)
    accepting = (name for name, (_, accept) in Image.OPEN.items() if accept and accept(beginning))
    with suppress(struct.error):
        return next(accepting, "of no format that PIL knows")
    return f"only {len(beginning)} bytes"


def image_size(media: Media) -> tuple[int, int]:
    """Read (height, width) in pixels, as displayed, from the header."""
    with _open_image(media) as image:
        width, height = image.size
        # getexif() decodes the whole of a PNG that has no EXIF header.
        exif = image.getexif() if image.format != "PNG" or "exif" in image.info else {}
        sideways = exif.get(ExifTags.Base.Orientation) in _SIDEWAYS
    return (width, height) if sideways else (height, width)


def load_image(media: Media) -> Image.Image:
    """Decode an image to RGB, upright (see :func:`to_rgb`); of an animation, the first frame."""
    with _open_image(media) as image:
        ImageOps.exif_transpose(image, in_place=True)
        image.load()  # conversion would load it too, but an RGB image is not converted
        return to_rgb(image)


def to_rgb(image: Image.Image) -> Image.Image:
    """Convert an image to 8-bit RGB, as an image viewer shows it.

    The result is that of HF ``transformers.image_utils.load_image``, except for two kinds of
    images. Transparent ones are composed on white, as Qwen's ``qwen_vl_utils`` does; PIL would show
    the colour below, mostly black. 16-bit ones are scaled to 8 bits; PIL would clip values above
    255, so that most of the image were white.

    Raises:
        ValueError: the values are floating-point, or integers beyond 16 bits.
    """
    if image.has_transparency_data:
        image = image.convert("RGBA")
        white = Image.new("RGBA", image.size, "white")
        return Image.alpha_composite(white, image).convert("RGB")
    if image.mode in _DEEP:
        image = _to_eight_bits(image)
    return image if image.mode == "RGB" else image.convert("RGB")


def _to_eight_bits(image: Image.Image) -> Image.Image:
    """Scale 16 bits to 8; raise ValueError for other values."""
    values = np.asarray(image)
    if image.mode == "F" or values.min() < 0 or values.max() > _MOST_16_BITS:
        raise ValueError(
            f"its values are {values.dtype}, from {values.min():g} to {values.max():g}: write it "
            "with 8 or 16 bits."
        )
    return Image.fromarray(np.round(values / 257).astype(np.uint8))


def peculiarities(media: Media) -> list[str]:
    """Describe in words how an image is changed when it is read; only its header is read here."""
    with _open_image(media) as image:
        animated = image.format in _ANIMATIONS and getattr(image, "is_animated", False)
        peculiar = {
            "transparent, composed on white": image.has_transparency_data,
            "16-bit, scaled to 8 bits": image.mode in _DEEP,
            "animated, first frame only": animated,
        }
    return [what for what, holds in peculiar.items() if holds]
