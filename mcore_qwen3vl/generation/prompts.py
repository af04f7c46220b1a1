"""One left-padded batch of conversations, made with the checkpoint's own processor."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image, ImageOps
from torch import Tensor
from transformers import image_utils
from transformers.video_utils import VideoMetadata

from mcore_qwen3vl.config import Architecture
from mcore_qwen3vl.data.encoding.batch import mrope_position_ids
from mcore_qwen3vl.data.processor import require_fitting
from mcore_qwen3vl.data.records.media import TAG, MediaFolder, load_image, to_rgb
from mcore_qwen3vl.data.records.reading import BadSample
from mcore_qwen3vl.data.records.video import load_frames, probe_video, sample_frames
from mcore_qwen3vl.errors import BadInput
from mcore_qwen3vl.model.inputs import VisualInputs, visual_inputs

Messages = Sequence[Mapping[str, Any]]

_URL_SECONDS = 60.0
_HERE = MediaFolder(Path(), {})  # paths are relative to the working directory


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
        if number % 2:
            yield {"type": piece, piece: next(left[piece])}
        elif piece:
            yield {"type": "text", "text": piece}


def encode_prompts(
    architecture: Architecture,
    processor: Any,
    conversations: Sequence[Messages],
    *,
    multiple_of: int = 1,
) -> Prompts:
    """Render, tokenise, load images and videos, and compute positions."""
    require_fitting(processor, architecture)
    inputs = process(processor, conversations, multiple_of=multiple_of)
    return prompts_from_inputs(architecture, inputs)


def process(
    processor: Any, conversations: Sequence[Messages], *, multiple_of: int = 1
) -> Mapping[str, Tensor]:
    """Process conversations with the checkpoint's processor, padded on the left.

    Args:
        conversations: the messages of each prompt, in the form that HF's chat templates take. An
            image is ``{"type": "image", "image": path, URL or PIL image}``; a video is ``{"type":
            "video", "video": path, or a pair of frames (F, H, W, 3) and ``VideoMetadata``}``.
        multiple_of: number that S is rounded up to a multiple of.

    Returns:
        The processor's output: tensors by name, with B rows of S tokens.

    Raises:
        BadInput: there is no conversation or no chat template, the template fails, media cannot be
            read, or there are more or fewer placeholders than media.
    """
    if not conversations:
        raise BadInput("There is no conversation to answer: pass at least one.")
    if not processor.chat_template:
        raise BadInput(
            "The processor has no chat template: copy chat_template.jinja from the checkpoint's "
            "repository beside its tokenizer."
        )
    try:
        texts = [
            processor.apply_chat_template(list(conversation), add_generation_prompt=True)
            for conversation in conversations
        ]
    except Exception as error:  # the template is a program of the checkpoint's
        raise BadInput(
            f"The chat template cannot render this prompt: {type(error).__name__}: {error!s:.500}. "
            "Compare it with the template of the model that the checkpoint was made from."
        ) from error
    images = [_image(part) for part in _parts(conversations, "image")]
    videos = [_video(part, processor) for part in _parts(conversations, "video")]
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


def _parts(conversations: Sequence[Messages], kind: str) -> Iterator[Any]:
    """Yield the references of all images or videos in the conversations, in order."""
    for conversation in conversations:
        for message in conversation:
            content = message["content"]
            for part in [] if isinstance(content, str) else content:
                if part.get("type") == kind:
                    reference = next((part[k] for k in (kind, "path", "url") if k in part), None)
                    if reference is None:
                        raise BadInput(f"A message has an {kind} part without {kind!r}: {part}.")
                    yield str(reference) if isinstance(reference, Path) else reference


def _image(reference: Any) -> Any:
    try:
        if isinstance(reference, Image.Image):
            return to_rgb(ImageOps.exif_transpose(reference))
        if isinstance(reference, str) and reference.startswith(("http://", "https://")):
            return image_utils.load_image(reference, timeout=_URL_SECONDS)
        return load_image(_HERE.resolve("image", reference))
    # PIL and transformers' HTTP library raise many types, not all of them OSError.
    except Exception as error:
        raise BadInput(f"Image {reference!r:.120} cannot be read: {error}") from error


def _video(reference: Any, processor: Any) -> tuple[np.ndarray, VideoMetadata]:
    """Load frames, which the processor samples by the video's own rate and length."""
    if isinstance(reference, tuple):
        frames, metadata = reference
        if metadata.frames_indices is None:
            metadata.frames_indices = list(range(len(frames)))
        return frames, metadata

    try:
        media = _HERE.resolve("video", reference)
        metadata = probe_video(media)
        metadata.frames_indices = sample_frames(media, metadata, processor.video_processor)
        return load_frames(media, metadata.frames_indices), metadata
    except (BadSample, ValueError) as error:
        raise BadInput(f"Video {reference!r:.120} cannot be read: {error}") from error
