"""What a record says about one image or video, told without the libraries that read it."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from mcore_qwen3vl.data.records.flaws import BadSample
from mcore_qwen3vl.data.records.reading import number


@dataclass(frozen=True)
class MediaOptions:
    """Choices for one image or video; None: those of the data set."""

    fps: float | None = None  # frames a second to sample from a file, or of a list of frames
    start: float | None = None  # seconds of a file between which its clip is
    end: float | None = None
    timestamps: tuple[float, ...] | None = None  # seconds, of the frames of a list
    min_pixels: float | None = None  # of the resized image, or of each resized frame
    max_pixels: float | None = None

    def size(self, usual: Mapping[str, int], frames: int = 1) -> dict[str, int] | None:
        """Return the ``size`` for HF's processor if it differs from `usual`, else None.

        Args:
            usual: the processor's own ``size``, in pixels of the image or of all frames.
        """
        if self.min_pixels is None and self.max_pixels is None:
            return None
        low, high = (
            usual[edge] if given is None else int(given) * frames
            for edge, given in (
                ("shortest_edge", self.min_pixels),
                ("longest_edge", self.max_pixels),
            )
        )
        if self.min_pixels is None:
            low = min(low, high)
        if self.max_pixels is None:
            high = max(low, high)
        if low > high:
            raise BadSample(f"min_pixels {low // frames} is above max_pixels {high // frames}.")
        return {"shortest_edge": low, "longest_edge": high}


_NO_PATH = ("http://", "https://", "data:")
_LONGEST_PATH = 1000
USUAL = MediaOptions()
_PIXELS: dict[str, tuple[str, ...]] = {"min_pixels": ("min_pixels",), "max_pixels": ("max_pixels",)}
_KEYS: dict[str, dict[str, tuple[str, ...]]] = {
    "image": _PIXELS,
    "video": {
        **_PIXELS,
        "fps": ("fps", "sample_fps"),
        "start": ("video_start", "start"),
        "end": ("video_end", "end"),
    },
}
"""Keys of a record for each option; the names are those of ``qwen_vl_utils``, and shorter ones."""


def read_options(kind: Literal["image", "video"], said: Mapping[str, Any]) -> MediaOptions:
    """Read the options of an image or video.

    Args:
        said: the keys of its part or reference; other keys are left alone.
    """
    found: dict[str, Any] = {}
    for option, keys in _KEYS[kind].items():
        if (key := next((key for key in keys if said.get(key) is not None), None)) is not None:
            limit = {"least" if option in ("start", "end") else "above": 0}
            found[option] = number(f"{kind}'s {key}", said[key], **limit)
    if kind == "video" and said.get("timestamps") is not None:
        found["timestamps"] = _timestamps(said["timestamps"])
    return MediaOptions(**found)


def _timestamps(values: Any) -> tuple[float, ...]:
    if not isinstance(values, list | tuple):
        raise BadSample(f"timestamps is {values!r:.40}; a list with the second of each frame.")
    seconds = tuple(number("a timestamp", value, least=0) for value in values)
    if list(seconds) != sorted(seconds):
        raise BadSample("timestamps do not ascend.")
    return seconds


def is_missing_file(reference: str) -> bool:
    """Tell whether `reference` is a path, not a URL or base64, at which there is nothing."""
    is_path = not reference.startswith(_NO_PATH) and len(reference) < _LONGEST_PATH
    return is_path and not os.path.exists(reference)
