"""A checkpoint's HF processor: loaded, checked, and written with the budgets of a run."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from importlib.metadata import version
from pathlib import Path
from typing import Any

import xxhash
from jinja2 import Environment, TemplateSyntaxError
from jinja2.ext import loopcontrols
from jinja2.meta import find_undeclared_variables
from packaging.version import Version

from mcore_qwen3vl.config import Architecture, states_vision
from mcore_qwen3vl.converters.hf.companions import require_processor
from mcore_qwen3vl.converters.hf.config_file import dumps
from mcore_qwen3vl.converters.identify import PathKind, identify, resolve
from mcore_qwen3vl.data.config import MediaLimits
from mcore_qwen3vl.errors import BadInput
from mcore_qwen3vl.json_and_yaml import read_object_or_empty
from mcore_qwen3vl.time_limit import time_limit
from mcore_qwen3vl.unused.fields import Fields, Unused

OLDEST_TRANSFORMERS = "5.18"

_NESTED = "processor_config.json"
_FILES = {
    "image_processor": ("preprocessor_config.json",),
    "video_processor": ("video_preprocessor_config.json", "preprocessor_config.json"),
}
"""The files that transformers looks for if processor_config.json lacks a section, in order."""

_OF_MEDIA = ("preprocessor_config.json", "video_preprocessor_config.json")

_CLASSES = {"image_processor": "Qwen2VLImageProcessor", "video_processor": "Qwen3VLVideoProcessor"}
"""The classes whose counts and pixels are reproduced; older names end in ``Fast``."""

_BOTH = (
    "size", "patch_size", "temporal_patch_size", "merge_size", "resample",
    "do_resize", "do_rescale", "rescale_factor", "do_normalize", "image_mean", "image_std",
)  # fmt: skip
_USED = {
    "image_processor": (*_BOTH, "image_processor_type", "min_pixels", "max_pixels"),
    "video_processor": (
        *_BOTH, "video_processor_type", "do_sample_frames", "num_frames", "fps", "min_frames",
        "max_frames", "cap_pixels_per_frame", "max_video_tokens",
    ),
}  # fmt: skip
_INERT = (
    # which classes read the file, which of them wrote it, and in what form they return tensors
    "processor_class", "image_processor_type", "video_processor_type", "feature_extractor_type",
    "transformers_version", "data_format", "input_data_format", "return_tensors",
    "return_metadata", "model_input_names", "device", "disable_grouping", "default_to_square",
    "max_image_size",
)  # fmt: skip
_WITHOUT_EFFECT: dict[str, tuple[Any, ...]] = {
    "do_convert_rgb": (True,), "do_center_crop": (False,), "do_pad": (False,),
}  # fmt: skip
_REASONS = {
    "do_convert_rgb": "images are always converted to RGB",
    "do_center_crop": "transformers does not crop for this model",
    "do_pad": "transformers does not pad for this model",
    "auto_map": "code of a checkpoint is not run",
    "min_pixels": "the budget is size.shortest_edge",
    "max_pixels": "the budget is size.longest_edge",
}
_SIZE = ("shortest_edge", "longest_edge")


def load_processor(checkpoint: str | Path) -> Any:
    """Load a checkpoint's HF processor (tokenizer, image and video processor, chat template).

    Args:
        checkpoint: a Hugging Face directory, a Megatron-Core one with its ``hf/`` folder, or a hub
            id, of which no weights are fetched.

    Returns:
        A ``Qwen3VLProcessor``. That of a language model alone has the checkpoint's tokenizer and
        chat template, and :func:`takes_media` says that it takes no images.

    Raises:
        BadInput: the directory lacks one of the processor's files; a setting would give non-finite
            pixels, or is not supported; the tokenizer has a token without a row in the model's
            embedding; or transformers is older than 5.18, whose processors format and count videos
            differently.
    """
    from transformers import AutoProcessor

    if Version(installed := version("transformers")) < Version(OLDEST_TRANSFORMERS):
        raise BadInput(
            f"Data and prompts need transformers {OLDEST_TRANSFORMERS} or newer; {installed} is "
            "installed, which is enough for model, conversion, checks and VERL. Upgrade it."
        )
    place = identify(resolve(checkpoint, weights=False))
    checkpoint = place.config() if place.kind is PathKind.MEGATRON else place.path
    require_processor(checkpoint)
    # Reading the config refuses what transformers, which reads it too, would not.
    has_vision = states_vision(checkpoint)
    load = AutoProcessor.from_pretrained if has_vision else _processor_of_text
    try:
        processor = load(checkpoint, local_files_only=True, trust_remote_code=False)
    # transformers raises OSError, ValueError, KeyError and more for files that are missing.
    except Exception as error:
        raise BadInput(
            f"{checkpoint} holds no usable processor: {' '.join(str(error).split())} Copy the "
            "tokenizer, the processor configs and chat_template.jinja from the model's repository."
        ) from error
    _require_embedding_rows(processor.tokenizer, checkpoint)
    for section, (where, _) in _read_sections(checkpoint).items() if has_vision else ():
        _check_settings(section, getattr(processor, section), f"{checkpoint}: {where}")
    videos = processor.video_processor
    if getattr(videos, "cap_pixels_per_frame", False) is None:
        # Frames may be as large as the budgets allow, even if a later transformers would cap them.
        videos.cap_pixels_per_frame = False
    if processor.chat_template:
        _require_template_ends(processor)
    return processor


_NO_MEDIA = "of_language_model_alone"


def _processor_of_text(checkpoint: Path, **options: Any) -> Any:
    """Return a processor around a checkpoint's tokenizer; it has transformers' media processors.

    So one code reads records for models with and without a vision tower, and the template is
    rendered in the same way. Nothing asks the media processors of this one for anything.
    """
    from transformers import (
        AutoTokenizer,
        Qwen2VLImageProcessor,
        Qwen3VLProcessor,
        Qwen3VLVideoProcessor,
    )

    tokenizer = AutoTokenizer.from_pretrained(checkpoint, **options)
    processor = Qwen3VLProcessor(
        image_processor=Qwen2VLImageProcessor(),
        tokenizer=tokenizer,
        video_processor=Qwen3VLVideoProcessor(),
        chat_template=tokenizer.chat_template,
    )
    setattr(processor, _NO_MEDIA, True)
    return processor


def takes_media(processor: Any) -> bool:
    """Return whether a processor's model sees images and videos."""
    return not getattr(processor, _NO_MEDIA, False)


_TEMPLATE_SECONDS = 10.0
"""Processor time for rendering a prompt; a template's own takes milliseconds."""


def template_limit() -> AbstractContextManager[None]:
    """Limit rendering of a prompt with BadInput: a template is a program, and may never end."""
    return time_limit(
        _TEMPLATE_SECONDS,
        lambda: BadInput(
            f"The chat template is still rendering after {_TEMPLATE_SECONDS:g} s of processor "
            "time. Compare it with the template of the model that the checkpoint was made from."
        ),
        of_processor=True,
    )


def _require_template_ends(processor: Any) -> None:
    """Raise BadInput if the chat template does not end, before any record waits for it."""
    turns = [{"role": "user", "content": "?"}, {"role": "assistant", "content": "!"}]
    with template_limit():
        try:
            processor.apply_chat_template(turns, tokenize=False)
        except BadInput:  # the time is up
            raise
        except Exception:  # of Jinja or Python: the template wants other messages
            return


def settings_of(processor: Any) -> dict[str, Any]:
    """Return the settings of an image or a video processor that decide its pixels and counts."""
    names = {name for used in _USED.values() for name in used} - set(_INERT)
    held = {name: getattr(processor, name, None) for name in names}
    return {name: value for name, value in held.items() if value is not None}


def _require_embedding_rows(tokenizer: Any, folder: Path) -> None:
    """Raise BadInput if a token's id is beyond the rows that the model in `folder` has.

    Under TP the embedding has more rows than the config says, as padding: no layer can tell.
    """
    if not (folder / "config.json").is_file():
        return
    rows = Architecture.from_hf(folder).vocab_size
    beyond = {i: token for token, i in tokenizer.get_vocab().items() if i >= rows}
    if beyond:
        first = min(beyond)
        raise BadInput(
            f"The tokenizer in {folder} has {len(beyond)} of its tokens beyond the {rows:,} rows "
            f"of the model's embedding (vocab_size in config.json): {beyond[first]!r:.60} has the "
            f"id {first}. Give them rows with `mcore-qwen3vl convert hf-to-hf {folder} "
            f"NEW --resize-vocab {max(beyond) + 1}`, or use the tokenizer that came with the model."
        )


def _read_sections(folder: Path) -> dict[str, tuple[str, Mapping[str, Any]]]:
    """Return what transformers reads of each section: the place, for messages, and the fields."""
    nested = read_object_or_empty(folder / _NESTED)
    sections = {}
    for section, names in _FILES.items():
        file = next((name for name in names if (folder / name).is_file()), _NESTED)
        if section in nested:
            sections[section] = (f"{_NESTED}, {section}", nested[section])
        else:
            sections[section] = (file, read_object_or_empty(folder / file))
    return sections


def unused_of_processor(folder: Path) -> list[Unused]:
    """Return what nothing uses of a processor's configs; raise BadInput if one cannot be read."""
    if not states_vision(folder):
        why = "a language model alone takes no images or videos"
        there = [name for name in _OF_MEDIA if (folder / name).is_file()]
        return [Unused(name, "all of it", why) for name in there]
    sections = _read_sections(folder)
    read = {where for where, _ in sections.values()}
    unused = Fields(
        _NESTED, used=(*_FILES, "chat_template"), inert=_INERT, reasons=_REASONS
    ).unused(read_object_or_empty(folder / _NESTED))
    for name in _OF_MEDIA:
        if (folder / name).is_file() and name not in read:
            unused.append(Unused(name, "all of it", f"{_NESTED} is read in its place"))
    for section, (where, fields) in sections.items():
        if where == _NESTED:  # no section of its own, and named above
            continue
        owner = Fields(where, _USED[section], _INERT, _WITHOUT_EFFECT, _REASONS)
        unused += owner.unused(fields)
        if isinstance(size := fields.get("size"), Mapping):
            unused += Fields(f"{where}, size", _SIZE).unused(size)
    return unused


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value > 0


def _is_of_channels(value: Any) -> bool:
    return isinstance(value, list | tuple) and len(value) == 3 and all(map(_is_number, value))


_FLAGS = ("do_resize", "do_rescale", "do_normalize", "do_sample_frames")
_COUNTS = ("patch_size", "temporal_patch_size", "merge_size", "min_frames", "max_frames")
_VALUES: dict[str, tuple[Callable[[Any], bool], str]] = {
    **dict.fromkeys(_FLAGS, (lambda value: isinstance(value, bool), "true or false")),
    **dict.fromkeys(_COUNTS, (_is_count, "a number from 1")),
    "num_frames": (lambda value: value is None or _is_count(value), "a number from 1, or null"),
    "fps": (
        lambda value: value is None or (_is_number(value) and value > 0),
        "a number above 0, or null",
    ),
    "resample": (lambda value: value in range(6), "one of PIL's filters, 0 to 5"),
    "rescale_factor": (lambda value: _is_number(value) and value > 0, "a number above 0"),
    "image_mean": (_is_of_channels, "a list of three numbers"),
    "image_std": (
        lambda value: _is_of_channels(value) and min(value) > 0,
        "a list of three numbers above 0",
    ),
}
"""For each field, the values that it may have, in code and in words."""


def _check_settings(section: str, processor: Any, where: str) -> None:
    """Raise BadInput if a setting gives pixels that are not finite, or others than here."""
    if (kind := type(processor).__name__.removesuffix("Fast")) != _CLASSES[section]:
        raise BadInput(f"{where}: a {kind} is not supported; {_CLASSES[section]} is.")
    for name, (fits, wanted) in _VALUES.items():
        if hasattr(processor, name) and not fits(value := getattr(processor, name)):
            raise BadInput(f"{where}: {name} is {value!r:.80}; it must be {wanted}.")
    least, most = (processor.size.get(edge) for edge in _SIZE)
    if not (_is_count(least) and _is_count(most) and least <= most):
        raise BadInput(
            f"{where}: size has shortest_edge {least!r:.40} and longest_edge {most!r:.40}; they "
            "must be numbers of pixels, the first not above the second."
        )
    if not processor.do_resize:
        raise BadInput(
            f"{where}: do_resize is false, and images are always resized to whole tokens. Set it "
            "to true."
        )
    both = getattr(processor, "num_frames", None), getattr(processor, "fps", None)
    if None not in both and processor.do_sample_frames:
        raise BadInput(
            f"{where}: num_frames is {both[0]} and fps is {both[1]}, and transformers takes "
            "one of them. Set the other to null; the default of fps is 2."
        )


def require_fitting(processor: Any, architecture: Architecture) -> None:
    """Raise BadInput if the processor cuts images into other patches than the model takes."""
    vision = architecture.vision
    if architecture.has_vision != takes_media(processor):
        raise BadInput(
            "The processor is that of a language model alone, and the model has a vision tower, or "
            "the other way round. Use the processor that belongs to this checkpoint."
        )
    for section in _FILES if architecture.has_vision else ():
        for name, needed in (
            ("patch_size", vision.patch_size),
            ("temporal_patch_size", vision.temporal_patch_size),
            ("merge_size", vision.spatial_merge_size),
        ):
            if (value := getattr(getattr(processor, section), name)) != needed:
                raise BadInput(
                    f"The {section.replace('_', ' ')} has {name} {value}, and the model takes "
                    f"{needed}. Use the processor that belongs to this checkpoint."
                )


def configs_with_budgets(folder: Path, limits: MediaLimits) -> dict[str, bytes]:
    """Return the processor configs in `folder` with the budgets of a run, by file name.

    Only files that the budgets change are returned.

    Raises:
        BadInput: the processor cannot be loaded, or a budget is empty.
    """
    if limits == MediaLimits():
        return {}
    processor = load_processor(folder)
    if not takes_media(processor):
        return {}
    usual = {section: getattr(processor, section).to_dict() for section in _FILES}
    limits.apply(processor)
    files: dict[str, dict[str, Any]] = {}
    for section, (where, fields) in _read_sections(folder).items():
        before, after = usual[section], getattr(processor, section).to_dict()
        # `to_dict` leaves out what is null.
        names = {**before, **after}
        changed = {name: after.get(name) for name in names if after.get(name) != before.get(name)}
        if not changed:
            continue
        file = where.partition(",")[0]
        content = files.setdefault(file, read_object_or_empty(folder / file))
        if where != file:
            content[section] = content = dict(fields)
        if "size" in changed:  # which transformers would replace with these
            content.pop("min_pixels", None)
            content.pop("max_pixels", None)
        content |= changed
    return {name: dumps(content) for name, content in files.items()}


def template_variables(processor: Any) -> set[str]:
    """Return the names that a processor's chat template reads from outside; none if it is broken.

    Such a template cannot be rendered either, and the error of that names what is wrong.
    """
    # Transformers has two tags of its own, between which a template writes an answer.
    plain = re.sub(r"{%-?\s*(end)?generation\s*-?%}", "", str(processor.chat_template))
    try:
        return find_undeclared_variables(Environment(extensions=[loopcontrols]).parse(plain))
    except (TemplateSyntaxError, RecursionError):  # the latter for one that is nested too deeply
        return set()


def vocabulary_fingerprint(tokenizer: Any, vocab_size: int) -> dict[str, Any]:
    """Return what identifies a vocabulary: a hash of its tokens with their ids, and its size."""
    tokens = json.dumps(sorted(tokenizer.get_vocab().items())).encode()
    return {"tokens": xxhash.xxh3_64_hexdigest(tokens), "size": vocab_size}
