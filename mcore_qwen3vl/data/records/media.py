"""Images and videos of a sample: where they are, how big they are, and their pixels.

Sizes come from file headers alone, so that a sample's length in tokens is known, and samples can
wait in the packing buffer, before any pixel is decoded.
"""

from __future__ import annotations

import base64
import binascii
import stat
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from io import BytesIO
from pathlib import Path
from typing import Any, BinaryIO, Literal

import numpy as np
from PIL import ExifTags, Image, ImageOps, UnidentifiedImageError

from mcore_qwen3vl.data.records.flaws import BadSample

Kind = Literal["image", "video"]

# PIL reads many more; to read some of them it starts a program, as Ghostscript for EPS.
_FORMATS = (
    "AVIF", "BMP", "DIB", "GIF", "HEIF", "ICO", "JPEG", "JPEG2000", "PCX", "PNG", "PPM", "QOI",
    "TGA", "TIFF", "WEBP",
)  # fmt: skip
_DEEP = ("I", "I;16", "I;16B", "I;16L", "I;16N", "F")  # PIL's modes of more than 8 bits
_MOST_16_BITS = 2**16 - 1
_ANIMATIONS = ("GIF", "PNG", "WEBP")  # other formats of several pictures hold one and its parts
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
            BadSample: the file cannot be opened, or is a folder, a pipe or a device.
        """
        if isinstance(self.content, bytes):
            return BytesIO(self.content)
        try:
            # Opening a pipe would wait for a writer, and a device may have no end.
            if not stat.S_ISREG(self.content.stat().st_mode):
                raise BadSample(f"{self.kind} {self.content} is not a regular file.")
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
        raise BadSample(f"{kind} {_shown(encoded)} is not valid base64.")
    return content


def _shown(reference: Any) -> str:
    text = repr(reference)
    return text if len(text) <= 80 else f"{text[:77]}..."


@contextmanager
def _image(media: Media) -> Iterator[Image.Image]:
    try:
        with media.open() as stream, Image.open(stream, formats=_formats()) as image:
            yield image
    except UnidentifiedImageError:
        raise BadSample(
            f"image {media.name} cannot be decoded: it is {_kind_of(media)}; "
            f"{', '.join(_formats())} are read."
        ) from None
    # PIL raises the first three, and `to_rgb` the last.
    except (OSError, SyntaxError, Image.DecompressionBombError, ValueError) as error:
        raise BadSample(
            f"image {media.name} cannot be decoded: {str(error).rstrip('.')}."
        ) from error


@cache
def _formats() -> list[str]:
    """Those of `_FORMATS` that this PIL, with its plugins, can read."""
    Image.init()
    return [name for name in _FORMATS if name in Image.OPEN]


def _kind_of(media: Media) -> str:
    """What a file that is refused may be, by how it begins; PIL does not decode it."""
    with media.open() as stream:
        beginning = stream.read(16)
    accepting = (name for name, (_, accept) in Image.OPEN.items() if accept and accept(beginning))
    return next(accepting, "of no format that PIL knows")


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
    """The RGB image, upright; see :func:`to_rgb`. Of an animation, the first frame.

    Raises:
        BadSample: missing file, no image, a truncated one, or one of floating-point values.
    """
    with _image(media) as image:
        ImageOps.exif_transpose(image, in_place=True)
        image.load()  # converting does it, too, but RGB is not converted: that would only copy
        return to_rgb(image)


def to_rgb(image: Image.Image) -> Image.Image:
    """8-bit RGB, as an image viewer shows it.

    As HF ``transformers.image_utils.load_image``, but for two kinds, of which PIL's conversion
    makes something else: transparency is composed on white, as Qwen's ``qwen_vl_utils`` does, where
    PIL shows what lies below it, mostly black; and 16 bits are scaled to 8, where PIL cuts off all
    that is above 255, mostly to white.

    Raises:
        ValueError: its values are floating-point, or whole numbers beyond 16 bits.
    """
    if image.has_transparency_data:
        image = image.convert("RGBA")
        white = Image.new("RGBA", image.size, "white")
        return Image.alpha_composite(white, image).convert("RGB")
    if image.mode in _DEEP:
        image = _eight_bits(image)
    return image if image.mode == "RGB" else image.convert("RGB")


def _eight_bits(image: Image.Image) -> Image.Image:
    values = np.asarray(image)
    if image.mode == "F" or values.min() < 0 or values.max() > _MOST_16_BITS:
        raise ValueError(
            f"its values are {values.dtype}, from {values.min():g} to {values.max():g}: write it "
            "with 8 or 16 bits."
        )
    return Image.fromarray(np.round(values / 257).astype(np.uint8))


def peculiarities(media: Media) -> list[str]:
    """What is not read as it lies in the file of an image, in words; from its header.

    Raises:
        BadSample: missing file, or no image.
    """
    with _image(media) as image:
        animated = image.format in _ANIMATIONS and getattr(image, "is_animated", False)
        found = {
            "transparent, composed on white": image.has_transparency_data,
            "16-bit, scaled to 8 bits": image.mode in _DEEP,
            "animated, first frame only": animated,
        }
    return [what for what, holds in found.items() if holds]
