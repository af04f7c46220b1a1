"""From text to tokens with loss weights and placeholders: the plan of a sample.

A sample is planned before any pixel is decoded: its media are only measured.

HF's processor writes out every placeholder token and then tokenises the long text. Tokenising the
short text and repeating the placeholders afterwards is much faster and gives the same tokens,
because a tokenizer splits at special tokens before it tokenises the text around them. A trained
answer is tokenised apart from the prompt before it, as generation has both.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers.video_utils import VideoMetadata

from mcore_qwen3vl.data.config import DataConfig
from mcore_qwen3vl.data.encoding.rendering import Rendered, Span
from mcore_qwen3vl.data.processor import takes_media
from mcore_qwen3vl.data.records.media import Media, image_size
from mcore_qwen3vl.data.records.reading import BadSample, OverlongSample
from mcore_qwen3vl.data.records.video import probe_video, sample_frames
from mcore_qwen3vl.unused.fields import Unused

_COMPOSED = 4
"""Most characters that Unicode composes to one of a token, such as letter and accents, or more."""


@dataclass(frozen=True)
class PlannedMedia:
    """One image or video of a sample: its size when decoded, and the place of its tokens."""

    media: Media
    patches: int
    frames: int  # frames or, for videos, pairs of frames: the first number of grid_thw
    metadata: VideoMetadata | None  # of a video, with the indices of the frames to decode
    size: dict[str, int] | None  # HF's ``size`` if the record gives one
    replacement: str  # the processor's text for it, with one placeholder a frame
    start: int = 0  # tokens [start, end) are its placeholders with the vision tokens around them
    end: int = 0


@dataclass(frozen=True)
class Pixels:
    """Patches of one sample's images and of its videos, in order.

    They are uint8 if the :class:`.PixelLoader` has a scale, and float32 otherwise.
    """

    pixel_values: Tensor | None = None  # (P_images, patch_dim)
    image_grid_thw: Tensor | None = None  # (images, 3) int64
    pixel_values_videos: Tensor | None = None  # (P_videos, patch_dim)
    video_grid_thw: Tensor | None = None  # (videos, 3) int64


@dataclass(frozen=True)
class Plan:
    """A tokenised sequence of T tokens, with its media, which are decoded once it is chosen."""

    input_ids: np.ndarray  # (T,) int64
    loss_weights: np.ndarray  # (T,) float32: the weight of predicting each token
    media: list[PlannedMedia]
    pixels: Pixels = Pixels()  # of the media, once they are decoded
    target: float | tuple[float, ...] | None = None  # see Conversation
    unused: tuple[Unused, ...] = ()  # of the record
    spelt: tuple[tuple[str, str], ...] = ()  # see Rendered

    @property
    def trained_tokens(self) -> int:
        """The number of tokens that are trained; the first one is never predicted."""
        return int((self.loss_weights[1:] > 0).sum())


def spare_plan(pad_id: int) -> Plan:
    """Return a sequence of two tokens that are not trained, for a batch without any."""
    return Plan(np.full(2, pad_id), np.zeros(2, np.float32), [])


class Planner:
    """A tokeniser of rendered records, with the same result as HF's processor."""

    def __init__(self, processor: Any, config: DataConfig) -> None:
        self._processor = processor
        self._config = config
        self._tokens = {"image": processor.image_token, "video": processor.video_token}
        self._merged = processor.image_processor.merge_size**2
        longest = max(map(len, processor.tokenizer.get_vocab()))  # a character a byte
        self._most_characters = _COMPOSED * longest * config.seq_length

    def plan(self, rendered: Rendered) -> Plan:
        """Tokenise a rendered record and measure its media.

        Raises:
            BadSample: media are unreadable, the text's placeholders do not match them, or no token
                is trained.
            OverlongSample: the sample is too long, and the policy is to drop it.
        """
        # Tokenising takes minutes and gigabytes for a text of 50 MB, and cannot be interrupted.
        characters = len(rendered.text)
        if characters > self._most_characters and self._config.overlong == "drop":
            raise OverlongSample(
                f"{characters:,} characters are more than seq_length {self._config.seq_length} "
                "tokens can hold."
            )
        if rendered.media and not takes_media(self._processor):
            media = rendered.media[0]
            raise BadSample(
                f"it has the {media.kind} {media.name}, and the model is a language model alone, "
                "without a vision tower."
            )
        self._check_placeholders(rendered)
        measured = [self._measure(media) for media in rendered.media]
        return self._fit_to_length(self._tokenise(rendered, measured), rendered.trains)

    def _check_placeholders(self, rendered: Rendered) -> None:
        """Raise BadSample unless the text has one placeholder for each image and video."""
        for kind, token in self._tokens.items():
            expected = sum(media.kind == kind for media in rendered.media)
            count = rendered.text.count(token)
            if count != expected:
                raise BadSample(
                    f"the rendered text holds {count} {kind} placeholders for {expected} {kind}s; "
                    f"does a message contain {token} literally?"
                )

    def _measure(self, media: Media) -> PlannedMedia:
        """Read the size of an image or a video and compute its patches; nothing is decoded."""
        if media.kind == "image":
            height, width = image_size(media)
            self._check_pixels(media, height, width)
            images = self._processor.image_processor
            size = media.options.size(images.size)
            limits = size and {
                "min_pixels": size["shortest_edge"], "max_pixels": size["longest_edge"]
            }  # fmt: skip
            try:
                patches = images.get_number_of_image_patches(height, width, limits)
            except ValueError as error:  # an image that is too thin
                raise BadSample(
                    f"image {media.name} has {height} x {width} pixels: {error}."
                ) from error
            return PlannedMedia(media, patches, 1, None, size, self._tokens["image"])
        return self._measure_video(media)

    def _measure_video(self, media: Media) -> PlannedMedia:
        videos = self._processor.video_processor
        metadata = probe_video(media)
        self._check_pixels(media, metadata.height, metadata.width)
        metadata.frames_indices = sample_frames(media, metadata, videos)
        sampled = len(metadata.frames_indices)
        size = media.options.size(videos.size, sampled, videos.temporal_patch_size)
        patches = videos.get_num_of_video_patches(
            sampled, metadata.height, metadata.width, {"size": size}
        )
        frames = -(-sampled // videos.temporal_patch_size)
        # The processor's own text for a video whose frames have one merged patch each.
        grid = torch.tensor([[frames, videos.merge_size, videos.merge_size]])
        text = self._processor.replace_video_token(
            {"video_grid_thw": grid, "video_metadata": [metadata]}, 0
        )
        return PlannedMedia(media, patches, frames, metadata, size, text)

    def _check_pixels(self, media: Media, height: int, width: int) -> None:
        """Raise BadSample for an image or a frame with more pixels than may be decoded."""
        most = self._config.max_decoded_pixels
        if height * width > most:
            what = "" if media.kind == "image" else " a frame"
            raise BadSample(
                f"{media.kind} {media.name} has {width:,} x {height:,} pixels{what}, more than "
                f"{most:,} (--max-decoded-pixels)."
            )

    def _tokenise(self, rendered: Rendered, measured: list[PlannedMedia]) -> Plan:
        """Tokenise the text with a placeholder for each frame, and then repeat the placeholders."""
        (text,), (replaced,) = self._processor.get_text_with_replacements(
            [rendered.text],
            [m.replacement for m in measured if m.media.kind == "image"],
            [m.replacement for m in measured if m.media.kind == "video"],
        )
        after = partial(_place_after, replacements=replaced)
        moved = [replace(s, start=after(s.start), end=after(s.end)) for s in rendered.spans]
        # (t,) each, before placeholders are repeated
        ids, begins, ends = self._encode(text, [s for s in moved if s.message is not None])

        weights = np.zeros(len(ids), np.float32)
        for span in moved:
            # A token is trained if it overlaps the span, as in HF's own assistant mask.
            weights[(begins < span.end) & (ends > span.start)] = span.weight

        repeats = self._repeat_counts(ids, measured)
        bounds = np.concatenate([[0], np.cumsum(repeats)])  # (t + 1,) bounds of a token's repeats
        planned = []
        for item, place in zip(measured, replaced, strict=True):
            inside = self._widen_to_brackets(text, *place["new_span"])
            within = np.flatnonzero((begins < inside[1]) & (ends > inside[0]))
            # Placeholders are never trained, nor are the vision tokens around them.
            weights[within] = 0
            start, end = bounds[within[0]], bounds[within[-1] + 1]
            planned.append(replace(item, start=start, end=end))
        return Plan(np.repeat(ids, repeats), np.repeat(weights, repeats), planned)

    def _encode(self, text: str, answers: Sequence[Span]) -> np.ndarray:
        """Tokenise a text as it comes about: the prompt alone, and then the answer to it.

        In the whole text, one token may hold the end of the prompt and the beginning of the answer,
        such as two line breaks. No model ever generates after the first half of a token.

        Returns:
            (3, t) int64: the tokens, and the characters at which each begins and ends.

        Raises:
            BadSample: an earlier answer has other tokens in the prompt of a later one, so that no
                sequence has both as generation has them.
        """
        starts = [0, *(span.start for span in answers)]
        pieces = [text[start:end] for start, end in pairwise([*starts, len(text)])]
        if len(answers) < 2:
            return self._encode_pieces(pieces)
        prompt, answer = text[: starts[-1]], text[starts[-1] :]
        encoded = self._encode_pieces([prompt, answer])
        apart = self._encode_pieces(pieces)
        if not np.array_equal(apart[0], encoded[0]):
            # The first answer up to whose successor the tokens differ.
            unequal = next(
                span
                for span, start in zip(answers[:-1], starts[2:], strict=True)
                if not np.array_equal(*(part[0, part[1] < start] for part in (apart, encoded)))
            )
            beginning = text[unequal.start : unequal.end][:8]
            raise BadSample(
                f"message {unequal.message} begins with {beginning!r}, which has other tokens as "
                "an answer than in the prompt of a later message, so both cannot be trained in one "
                "sample: take the line breaks at its beginning out, train the last turn alone "
                "(--train-on last), or make a record of each turn (data turns)."
            )
        return encoded

    def _encode_pieces(self, pieces: Sequence[str]) -> np.ndarray:
        """Tokenise the pieces of a text one by one; returns what :meth:`_encode` does."""
        columns, length = [], 0
        for piece in pieces:
            encoded = self._processor.tokenizer(
                piece, add_special_tokens=False, return_offsets_mapping=True
            )
            places = np.array(encoded["offset_mapping"], np.int64).reshape(-1, 2) + length
            columns.append(np.vstack([np.array(encoded["input_ids"], np.int64), places.T]))
            length += len(piece)
        return np.hstack(columns)

    def _repeat_counts(self, ids: np.ndarray, measured: list[PlannedMedia]) -> np.ndarray:
        """Return how often each token is repeated, (t,) int64: 1, except for placeholders."""
        repeats = np.ones(len(ids), np.int64)
        for kind, token_id in (
            ("image", self._processor.image_token_id),
            ("video", self._processor.video_token_id),
        ):
            items = [m for m in measured if m.media.kind == kind]
            counts = [[m.patches // m.frames // self._merged] * m.frames for m in items]
            repeats[ids == token_id] = np.concatenate([[], *counts]).astype(np.int64)
        return repeats

    def _widen_to_brackets(self, text: str, start: int, end: int) -> tuple[int, int]:
        """Return the characters of one placeholder with the vision tokens around it."""
        opening, closing = self._processor.vision_start_token, self._processor.vision_end_token
        if text[:start].endswith(opening) and text[end:].startswith(closing):
            return start - len(opening), end + len(closing)
        return start, end

    def _fit_to_length(self, plan: Plan, trains: bool) -> Plan:
        """Return the plan, or its beginning if it is too long; raise if it cannot be used."""
        length, limit = len(plan.input_ids), self._config.seq_length
        if length > limit:
            if self._config.overlong == "drop":
                raise OverlongSample(f"{length} tokens, more than seq_length {limit}.")
            tail = Unused("a long sample", "its tail", f"cut at seq_length {limit}")
            plan = replace(truncate(plan, limit), unused=(tail,))
        if trains and not plan.trained_tokens:
            raise BadSample(
                f"no trained token is left in the first {limit} of its {length} tokens."
                if length > limit
                else "no token of it is trained."
            )
        return plan


def truncate(plan: Plan, limit: int) -> Plan:
    """Return the first `limit` tokens, or fewer if that would cut an image or a video in two."""
    cut = next((item.start for item in plan.media if item.start < limit < item.end), limit)
    media = [item for item in plan.media if item.end <= cut]
    return Plan(plan.input_ids[:cut], plan.loss_weights[:cut], media)


def check_length(config: DataConfig, plans: Sequence[Plan]) -> None:
    """Raise if a pack cannot hold all sequences; the planner checked that each fits a row."""
    length = config.padded(*(len(plan.input_ids) for plan in plans))
    if config.packing and length > config.seq_length:
        which = "both" if len(plans) == 2 else f"all {len(plans)}"
        raise OverlongSample(
            f"{length} tokens in {which}, more than seq_length {config.seq_length}."
        )


def _place_after(position: int, replacements: list[dict[str, Any]]) -> int:
    """Return a character's place after the placeholders before it have been replaced."""
    return position + sum(
        len(r["replacement"]) - (r["span"][1] - r["span"][0])
        for r in replacements
        if r["span"][1] <= position
    )
