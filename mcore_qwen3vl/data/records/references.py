"""What a reference to an image or a video is, told without the libraries that read it."""

from __future__ import annotations

import os

_NO_PATH = ("http://", "https://", "data:")
_LONGEST_PATH = 1000


def is_missing_file(reference: str) -> bool:
    """Tell whether `reference` is a path, not a URL or base64, at which there is nothing."""
    is_path = not reference.startswith(_NO_PATH) and len(reference) < _LONGEST_PATH
    return is_path and not os.path.exists(reference)
