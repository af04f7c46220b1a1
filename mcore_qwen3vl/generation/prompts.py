"""Prompts for generation, made with the checkpoint's own processor.

The prompts of a batch are padded on the left.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image, ImageOps
from torch import Tensor
from transformers import image_utils
from transformers.video_utils import VideoMetadata

from mcore_qwen3vl.config import Architecture
from mcore_qwen3vl.data.encoding.batch import mrope_position_ids
from mcore_qwen3vl.data.encoding.rendering import Rendered, Renderer
from mcore_qwen3vl.data.processor import (
    require_fitting,
    takes_media,
    template_limit,
    template_variables,
)
from mcore_qwen3vl.data.records.media import TAG, Media, MediaFolder, load_image, to_rgb
from mcore_qwen3vl.data.records.messages import read_messages
from mcore_qwen3vl.data.records.reading import BadSample, parse_template_kwargs, read_observed
from mcore_qwen3vl.data.records.video import load_frames, probe_video, sample_frames
from mcore_qwen3vl.errors import BadInput
from mcore_qwen3vl.model.inputs import VisualInputs, visual_inputs

Messages = Sequence[Mapping[str, Any]]

_URL_SECONDS = 60.0
_HERE = MediaFolder(Path(), {})  # paths are relative to the working directory
_NO_SIZE = {"shortest_edge": 0, "longest_edge": 2**62}


@dataclass(frozen=True)
class Prompts:
    """B prompts, padded on the left to S tokens. All tensors are on the CPU."""

    input_ids: Tensor  # (B, S) int64
    attention_mask: Tensor  # (B, S) int64, 0 for padding
    position_ids: Tensor  # (3, B, S) int64
    next_position: Tensor  # (B,) int64: position, on all axes, of the first token to generate
    visual: VisualInputs | None

    @property
    def lengths(self) -> list[int]:
        """The number of tokens in each prompt, without padding."""
        return self.attention_mask.sum(1).tolist()


def user_turns(
    texts: Sequence[str], images: Sequence[Any] = (), videos: Sequence[Any] = ()
) -> list[Messages]:
    """Make a conversation of one user turn for each text.

    Without tags, all the images and videos come before every text. If texts have ``<image>`` and
    ``<video>`` tags, each tag takes the next image or video.

    Raises:
        BadInput: there are more or fewer tags than images or videos.
    """
    media = {"image": list(images), "video": list(videos)}
    tags = [tag for text in texts for tag in TAG.findall(text)]
    if not tags:
        first = [{"type": kind, kind: medium} for kind, many in media.items() for medium in many]
        contents = [[*first, {"type": "text", "text": text}] for text in texts]
    else:
        for kind, many in media.items():
            if len(many) != tags.count(kind):
                raise BadInput(
                    f"The prompts hold {tags.count(kind)} <{kind}> tags and {len(many)} {kind}s "
                    f"are given: name one {kind} for each tag, or leave all tags out to put "
                    "the media before the text."
                )
        left = {kind: iter(many) for kind, many in media.items()}
        contents = [list(_split_tags(text, left)) for text in texts]
    return [[{"role": "user", "content": content}] for content in contents]


def _split_tags(text: str, left: Mapping[str, Iterator[Any]]) -> Iterator[dict[str, Any]]:
    for number, piece in enumerate(TAG.split(text)):
        if number % 2:  # the pattern's group, a kind of medium, stands between pieces of text
            yield {"type": piece, piece: next(left[piece])}
        elif piece:
            yield {"type": "text", "text": piece}


def render_prompt(
    record: Any,
    processor: Any,
    folder: MediaFolder = _HERE,
    chat_template_kwargs: Mapping[str, Any] | None = None,
) -> Rendered:
    """Render a record's messages as a prompt, in any form that ``messages`` of data have.

    Args:
        record: a record with ``messages``, and if wanted ``tools``, ``images``, ``videos`` and
            ``chat_template_kwargs``; or its messages alone.
        folder: where the paths of images and videos begin.
        chat_template_kwargs: arguments of the chat template that the record does not give itself.

    Returns:
        The text with the generation prompt, the media, and what is not used of the record.

    Raises:
        BadInput: the record is malformed or ends with a turn of the assistant, the chat template
            refuses it or does not read an argument, or an image is to have another size.
    """
    record = {"messages": record} if isinstance(record, list) else record
    if not isinstance(record, Mapping) or "messages" not in record:
        raise BadInput("A prompt is a list of messages, or an object with the key messages.")
    arguments = parse_template_kwargs(chat_template_kwargs)
    try:
        prompt = read_observed(
            record, "messages", lambda seen: read_messages(seen, folder, prompt=True)
        )
        arguments |= prompt.chat_template_kwargs
        _require_read_arguments(processor, arguments)
        if prompt.messages[-1]["role"] == "assistant":
            raise BadSample(
                "its last message is the assistant's, so there is nothing to answer: end it with "
                "a message of the user or of a tool"
            )
        if sized := next((m for m in prompt.media if m.options.size(_NO_SIZE)), None):
            raise BadSample(
                f"pixels are given for the {sized.kind} {sized.name}; a prompt's have the "
                "processor's own size: leave min_pixels, max_pixels and total_pixels out"
            )
        # Nothing is trained. What the template leaves out is named, as servers leave it out too.
        prompt = replace(prompt, weights=[0.0] * len(prompt.messages))
        renderer = Renderer(processor, allow_dropped=True)
        with template_limit():
            return renderer.render(prompt, arguments)
    except BadSample as error:
        raise BadInput(f"The prompt cannot be used: {str(error).removesuffix('.')}.") from error


def encode_prompts(
    architecture: Architecture,
    processor: Any,
    conversations: Sequence[Messages | Rendered],
    *,
    multiple_of: int = 1,
    chat_template_kwargs: Mapping[str, Any] | None = None,
) -> Prompts:
    """Render, tokenise, load images and videos, and compute positions."""
    require_fitting(processor, architecture)
    inputs = process_conversations(
        processor,
        conversations,
        multiple_of=multiple_of,
        chat_template_kwargs=chat_template_kwargs,
    )
    return prompts_from_inputs(architecture, inputs)


def process_conversations(
    processor: Any,
    conversations: Sequence[Messages | Rendered],
    *,
    multiple_of: int = 1,
    chat_template_kwargs: Mapping[str, Any] | None = None,
) -> Mapping[str, Tensor]:
    """Process conversations with the checkpoint's processor, padded on the left.

    Args:
        conversations: the messages of each prompt, in the form that HF's chat templates take, or
            what :func:`render_prompt` made of a record. In messages, an
            image is ``{"type": "image", "image": path, URL or PIL image}``; a video is ``{"type":
            "video", "video": path, or a pair of frames (F, H, W, 3) and ``VideoMetadata``}``.
        multiple_of: number that S is rounded up to a multiple of.
        chat_template_kwargs: arguments of the chat template, such as ``enable_thinking``, for
            messages.

    Returns:
        The processor's output: tensors by name, with B rows of S tokens.

    Raises:
        BadInput: there is no conversation or no chat template, the template fails or does not read
            an argument, media cannot be read, or there are more or fewer placeholders than media.
    """
    if not conversations:
        raise BadInput("There is no conversation to answer: pass at least one.")
    if not processor.chat_template:
        raise BadInput(
            "The processor has no chat template: copy chat_template.jinja from the checkpoint's "
            "repository beside its tokenizer."
        )
    arguments = parse_template_kwargs(chat_template_kwargs)
    _require_read_arguments(processor, arguments)
    texts = [
        one.text if isinstance(one, Rendered) else _render_messages(processor, one, arguments)
        for one in conversations
    ]
    references = {kind: list(_media_references(conversations, kind)) for kind in ("image", "video")}
    if any(references.values()) and not takes_media(processor):
        raise BadInput(
            "A prompt has images or videos, and the model is a language model alone, without a "
            "vision tower: ask it in text."
        )
    images = [_load_referenced_image(part) for part in references["image"]]
    videos = [_load_referenced_video(part, processor) for part in references["video"]]
    for kind, token, media in (
        ("image", processor.image_token, images),
        ("video", processor.video_token, videos),
    ):
        placeholders = sum(text.count(token) for text in texts)
        if placeholders != len(media):
            raise BadInput(
                f"The rendered prompts hold {placeholders} placeholders {token} for {len(media)} "
                f"{kind}s: give one {kind} for each, and do not write {token} in a prompt."
            )
    try:
        return processor(
            text=texts,
            images=images or None,
            videos=[frames for frames, _ in videos] or None,
            video_metadata=[metadata for _, metadata in videos] or None,
            do_sample_frames=False,  # frames are sampled while they are decoded
            padding=True,
            padding_side="left",
            pad_to_multiple_of=multiple_of,
            return_tensors="pt",
        )
    except ValueError as error:  # a size out of the processor's range, such as a one-frame video
        raise BadInput(f"The processor cannot take these images and videos: {error}") from error


def _require_read_arguments(processor: Any, arguments: Mapping[str, Any]) -> None:
    for name in arguments.keys() - template_variables(processor):
        raise BadInput(f"The chat template does not read {name}: leave it out.")


def _render_messages(processor: Any, messages: Messages, arguments: Mapping[str, Any]) -> str:
    """Render messages in the form of HF's chat templates, with the generation prompt."""
    try:
        with template_limit():
            text: str = processor.apply_chat_template(
                list(messages), add_generation_prompt=True, **arguments
            )
    except BadInput:  # the time is up
        raise
    except Exception as error:  # the template is a program of the checkpoint's
        raise BadInput(
            f"The chat template cannot render this prompt: {type(error).__name__}: {error!s:.500}. "
            "Compare it with the template of the model that the checkpoint was made from."
        ) from error
    if not text:
        raise BadInput(
            "The chat template renders nothing of this prompt. Compare it with the "
            "template of the model that the checkpoint was made from."
        )
    return text


def prompts_from_inputs(architecture: Architecture, inputs: Mapping[str, Tensor]) -> Prompts:
    """Make prompts from the output of an HF processor, padded on the left."""
    input_ids, attention_mask = inputs["input_ids"], inputs["attention_mask"]
    image_grid, video_grid = inputs.get("image_grid_thw"), inputs.get("video_grid_thw")
    position_ids, deltas = mrope_position_ids(
        architecture, input_ids, image_grid, video_grid, attention_mask
    )
    return Prompts(
        input_ids,
        attention_mask,
        position_ids,
        next_position=attention_mask.sum(1) + deltas.squeeze(1),
        visual=visual_inputs(
            architecture,
            input_ids,
            inputs.get("pixel_values"),
            image_grid,
            inputs.get("pixel_values_videos"),
            video_grid,
        ),
    )


def _media_references(conversations: Sequence[Messages | Rendered], kind: str) -> Iterator[Any]:
    """Yield the references of all images or videos in the conversations, in order."""
    for conversation in conversations:
        if isinstance(conversation, Rendered):
            yield from (media for media in conversation.media if media.kind == kind)
            continue
        for message in conversation:
            content = message["content"]
            for part in [] if isinstance(content, str) else content:
                if part.get("type") == kind:
                    reference = next((part[k] for k in (kind, "path", "url") if k in part), None)
                    if reference is None:
                        raise BadInput(f"A message has an {kind} part without {kind!r}: {part}.")
                    yield str(reference) if isinstance(reference, Path) else reference


def _load_referenced_image(reference: Any) -> Any:
    """Return a record's image, or that at a path or URL, or a PIL image, upright and in RGB."""
    try:
        if isinstance(reference, Media):
            return load_image(reference)
        if isinstance(reference, Image.Image):
            return to_rgb(ImageOps.exif_transpose(reference))
        if isinstance(reference, str) and reference.startswith(("http://", "https://")):
            return image_utils.load_image(reference, timeout=_URL_SECONDS)
        return load_image(_HERE.resolve("image", reference))
    # PIL and transformers' HTTP library raise many types, not all of them OSError.
    except Exception as error:
        raise BadInput(f"Image {_name_of(reference)} cannot be read: {error}") from error


def _load_referenced_video(reference: Any, processor: Any) -> tuple[np.ndarray, VideoMetadata]:
    """Load frames, which the processor samples by the video's own rate and length."""
    if isinstance(reference, tuple):
        frames, metadata = reference
        if metadata.frames_indices is None:  # then these are all frames
            metadata.frames_indices = list(range(len(frames)))
        return frames, metadata

    try:
        is_media = isinstance(reference, Media)
        media = reference if is_media else _HERE.resolve("video", reference)
        metadata = probe_video(media)
        metadata.frames_indices = sample_frames(media, metadata, processor.video_processor)
        return load_frames(media, metadata.frames_indices), metadata
    except (BadSample, ValueError) as error:
        raise BadInput(f"Video {_name_of(reference)} cannot be read: {error}") from error


def _name_of(reference: Any) -> str:
    return reference.name if isinstance(reference, Media) else f"{reference!r:.120}"
