"""Names and boxes of a record's ``objects``, in place of their tags.

ms-swift's grounding data have them.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from mcore_qwen3vl.data.records.media import Media, image_size
from mcore_qwen3vl.data.records.reading import BadSample, require_number, unused_keys
from mcore_qwen3vl.unused.fields import Fields, Unused

OBJECT_TAG = re.compile("<(ref-object|bbox)>")
"""The place of an object's name or box in a text."""
_SCALE = 1000
"""Qwen3-VL writes coordinates in thousandths of an image's width and height."""
_FIELDS = Fields("objects", ("ref", "bbox", "bbox_type", "image_id"))
_TYPES = ("real", "norm1", "norm1000")


def place_objects(
    texts: Sequence[str], objects: Any, images: Sequence[Media]
) -> tuple[list[str], list[Unused]]:
    """Return the texts of a record with its objects in place of the tags, and what is not used.

    Args:
        objects: the value of the record's key: ``ref``, the names in the order of their tags, and
            ``bbox``, as many numbers x, y, x, y, ... as a box, point or polygon has. They are
            pixels of an image's file, upright; with ``bbox_type`` norm1 or norm1000 they are parts
            of its width and height. ``image_id`` has the index of each one's image; the default
            is 0.
        images: the record's images, in order.

    Raises:
        BadSample: there are other numbers of tags and objects, or a box is not inside its image.
    """
    kinds = [kind for text in texts for kind in OBJECT_TAG.findall(text)]
    if not kinds:
        return list(texts), []
    if not isinstance(objects, Mapping):
        raise BadSample(
            f"<{kinds[0]}> takes its text from objects, an object with ref and bbox; the record "
            f"has {'none' if objects is None else type(objects).__name__}. Write the text out, or "
            "add them."
        )
    written = {"ref-object": _object_names(objects), "bbox": _box_texts(objects, images)}
    for (kind, values), key in zip(written.items(), ("ref", "bbox"), strict=True):
        if kinds.count(kind) != len(values):
            raise BadSample(
                f"there are {kinds.count(kind)} tags <{kind}> and {len(values)} entries in {key} "
                "of objects."
            )
    left = {kind: iter(values) for kind, values in written.items()}
    placed = [OBJECT_TAG.sub(lambda tag: next(left[tag[1]]), text) for text in texts]
    return placed, unused_keys(_FIELDS, objects)


def _object_names(objects: Mapping[str, Any]) -> list[str]:
    names = objects.get("ref") or []
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        raise BadSample("ref of objects must be a list of texts.")
    return names


def _box_texts(objects: Mapping[str, Any], images: Sequence[Media]) -> list[str]:
    """Return the record's boxes as the text that Qwen3-VL writes for them."""
    boxes, indices = objects.get("bbox") or [], objects.get("image_id") or []
    kind = objects.get("bbox_type") or "real"
    if kind not in _TYPES:
        raise BadSample(f"bbox_type of objects is {kind!r:.40}; one of {', '.join(_TYPES)}.")
    if not isinstance(boxes, list) or not isinstance(indices, list):
        raise BadSample("bbox and image_id of objects must be lists.")
    indices = [*indices, *[0] * (len(boxes) - len(indices))]
    if len(indices) != len(boxes):
        raise BadSample(f"objects has {len(indices)} image_id for {len(boxes)} bbox.")
    written = []
    for box, index in zip(boxes, indices, strict=True):
        if kind != "real":
            size = (1, 1) if kind == "norm1" else (_SCALE, _SCALE)
        elif isinstance(index, int) and 0 <= index < len(images):
            size = image_size(images[index])
        else:
            raise BadSample(f"image_id {index!r:.40} of objects: there are {len(images)} images.")
        written.append(_box_text(box, *size))
    return written


def _box_text(box: Any, height: int, width: int) -> str:
    """Return pairs of x and y in thousandths, ``[x, y, ...]``, of an image of that size."""
    if not isinstance(box, list) or not box or len(box) % 2:
        raise BadSample(f"a bbox of objects is {box!r:.60}; a list of x, y, x, y is needed.")
    numbers = [require_number("a coordinate of bbox", value, least=0) for value in box]
    limits = [width, height] * (len(box) // 2)
    if any(value > limit for value, limit in zip(numbers, limits, strict=True)):
        raise BadSample(f"bbox {box!r:.60} of objects is not inside {width} x {height}.")
    scaled = [round(value / limit * _SCALE) for value, limit in zip(numbers, limits, strict=True)]
    return f"[{', '.join(map(str, scaled))}]"
