"""From a record to tokens and pixels, with the settings of the run and of the data set.

A sample is planned first: its tokens, loss weights and placeholders are known before any pixel is
decoded. HF's processor writes out every placeholder token and then tokenises the long text.
Tokenising the short text and repeating the placeholders afterwards is much faster and gives the
same tokens, because a tokenizer splits at special tokens before it tokenises the text around them.
A trained answer is tokenised apart from the prompt before it, as generation has both.

HF's image and video processors decode and resize to uint8, and then normalise to float32. Here
patches stay uint8 until they are on the device (:class:`mcore_qwen3vl.model.inputs.PixelScale`):
the result is the same, bit for bit, and only a quarter of the bytes are copied and sent.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import groupby, pairwise
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from megatron.energon import CrudeSample, Sample, basic_sample_keys, edataclass
from torch import Tensor
from torch.utils.data import get_worker_info
from transformers.image_utils import ChannelDimension
from transformers.video_utils import VideoMetadata

from mcore_qwen3vl.data.config import DataConfig, MediaLimits, Source, Task
from mcore_qwen3vl.data.loading.datasets import SOURCE
from mcore_qwen3vl.data.loading.index import origin
from mcore_qwen3vl.data.records.media import Media, MediaFolder, image_size, load_image
from mcore_qwen3vl.data.records.messages import Conversation
from mcore_qwen3vl.data.records.parse import (
    Document,
    is_classification,
    is_labelled,
    is_preference,
    is_retrieval,
    join_parts,
    parse_classification,
    parse_judgements,
    parse_labelled,
    parse_pair,
    parse_record,
    parse_retrieval,
    require_preference,
)
from mcore_qwen3vl.data.records.reading import (
    BadSample,
    Observed,
    OverlongSample,
    find_hook,
    preprocess_record,
    time_limit,
)
from mcore_qwen3vl.data.records.template import Rendered, Renderer, Span
from mcore_qwen3vl.data.records.video import load_frames, probe_video, sample_frames
from mcore_qwen3vl.files import parse_json
from mcore_qwen3vl.model.inputs import PixelScale
from mcore_qwen3vl.unused import Unused

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

    They are uint8 if the :class:`PixelLoader` has a scale, and float32 otherwise.
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
            patches = images.get_number_of_image_patches(height, width, limits)
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


class PixelLoader:
    """A loader that decodes and resizes images and videos and cuts them into patches.

    They are normalised with its `scale` later; it is None if HF's processors normalise them,
    because images and videos do not have the same scale.
    """

    def __init__(self, processor: Any) -> None:
        self._images, self._videos = processor.image_processor, processor.video_processor
        self.scale = _common_scale(self._images, self._videos)
        # Passed only if needed: HF's processor validates each option.
        raw = {"do_rescale": False, "do_normalize": False}
        self._options: dict[str, Any] = {"return_tensors": "pt", **(raw if self.scale else {})}

    def load(self, media: list[PlannedMedia]) -> Pixels:
        """Decode the media of one sample."""
        images = [item for item in media if item.media.kind == "image"]
        videos = [item for item in media if item.media.kind == "video"]
        return Pixels(
            *_load_in_runs(images, self._load_images), *_load_in_runs(videos, self._load_videos)
        )

    def _options_for(self, items: list[PlannedMedia]) -> dict[str, Any]:
        """Return the options of a call for media of one size."""
        return self._options if items[0].size is None else {**self._options, "size": items[0].size}

    def _load_images(self, items: list[PlannedMedia]) -> tuple[Tensor, Tensor]:
        images = [load_image(item.media) for item in items]
        out = self._images(images=images, **self._options_for(items))
        return _require_expected_patches(items, out["pixel_values"], out["image_grid_thw"])

    def _load_videos(self, items: list[PlannedMedia]) -> tuple[Tensor, Tensor]:
        frames, metadata = [], []
        for item in items:
            assert item.metadata is not None
            decoded = load_frames(item.media, item.metadata.frames_indices)  # (F, H, W, 3)
            frames.append(torch.from_numpy(decoded).permute(0, 3, 1, 2))
            metadata.append(item.metadata)
        out = self._videos(
            videos=frames,
            video_metadata=metadata,
            do_sample_frames=False,
            input_data_format=ChannelDimension.FIRST,
            **self._options_for(items),
        )
        return _require_expected_patches(items, out["pixel_values_videos"], out["video_grid_thw"])


def _load_in_runs(
    items: list[PlannedMedia], load: Callable[[list[PlannedMedia]], tuple[Tensor, Tensor]]
) -> tuple[Tensor | None, Tensor | None]:
    """Load media of one ``size`` after another at once, since HF's processors take one a call."""
    loaded = [load(list(run)) for _, run in groupby(items, key=lambda item: item.size)]
    if len(loaded) < 2:
        return loaded[0] if loaded else (None, None)
    values, grids = zip(*loaded, strict=True)
    return torch.cat(values), torch.cat(grids)


def _common_scale(images: Any, videos: Any) -> PixelScale | None:
    """Return the scale of both processors; None unless both rescale and normalise alike."""
    settings = [
        (p.do_rescale, p.do_normalize, p.rescale_factor, tuple(p.image_mean), tuple(p.image_std))
        for p in (images, videos)
    ]
    rescales, normalizes, factor, mean, std = settings[0]
    if settings[0] != settings[1] or not (rescales and normalizes):
        return None
    # HF's own numbers, with the rescaling folded into the mean and the standard deviation.
    fused_mean, fused_std, _ = images._fuse_mean_std_and_rescale_factor(
        do_normalize=True, image_mean=mean, image_std=std, do_rescale=True, rescale_factor=factor
    )
    per_channel = images.temporal_patch_size * images.patch_size**2
    return PixelScale(
        fused_mean.repeat_interleave(per_channel), fused_std.repeat_interleave(per_channel)
    )


def _require_expected_patches(
    items: list[PlannedMedia], values: Tensor, grid: Tensor
) -> tuple[Tensor, Tensor]:
    """Return pixels and grid if they agree with the sizes that placeholders were counted from."""
    for item, patches in zip(items, grid.prod(1).tolist(), strict=True):
        if patches != item.patches:
            raise BadSample(
                f"{item.media.kind} {item.media.name} decodes to {patches} patches, but its header "
                f"promised {item.patches}. Write the file again."
            )
    return values, grid


def join_patches(pixels: Sequence[Pixels]) -> Tensor | None:
    """Join the patches of all images, then of all videos, to (P, patch_dim) with one copy.

    In a data worker they are written to shared memory, from which the batch is sent.
    """
    values = [p.pixel_values for p in pixels] + [p.pixel_values_videos for p in pixels]
    present = [tensor for tensor in values if tensor is not None]
    if not present:
        return None
    if get_worker_info() is None:
        return torch.cat(present) if len(present) > 1 else present[0]
    first = present[0]
    rows, width = sum(len(tensor) for tensor in present), first.shape[1]
    # torch's own collate function shares memory in this way.
    storage = first._typed_storage()._new_shared(rows * width, device=first.device)
    return torch.cat(present, out=first.new(storage).resize_(rows, width))


def join_grids(grids: Sequence[Tensor | None]) -> Tensor | None:
    """Join the grids that are not None, in order, to (n, 3); None if there is none."""
    present = [grid for grid in grids if grid is not None]
    return torch.cat(present) if present else None


_FILES = (".jsonl", ".json", ".parquet")


@edataclass
class RawSample(Sample):
    """A record as read, before it is parsed."""

    record: Any
    folder: MediaFolder
    source: int  # number of its data set


class Preparation:
    """The steps that every worker applies to a sample of any of the data sets."""

    def __init__(self, processor: Any, config: DataConfig, sources: Sequence[Source]) -> None:
        """Set the budgets on `processor`, and import the hooks; raise BadInput if either fails."""
        config.media.apply(processor)
        self._max_seconds, self._labels = config.max_sample_seconds, config.labels
        self._sources = list(sources)
        self._renderer = Renderer(
            processor, config.document_end, allow_dropped=config.allow_dropped
        )
        processors = [_with_limits(processor, source.limits) for source in self._sources]
        self._planners = [Planner(limited, config) for limited in processors]
        self._pixels = [PixelLoader(limited) for limited in processors]
        self.scale = self._pixels[0].scale  # see PixelLoader
        for source in self._sources:
            if source.reading.preprocess is not None:
                find_hook(source.reading.preprocess)

    def raw(self, crude: CrudeSample) -> RawSample:
        """Return energon's crude sample, of any data set, with the folder of its media."""
        source = crude["__subflavors__"][SOURCE]
        root = self._sources[source].media_root
        if root is None:
            root = origin(Path(str(crude["__sources__"][0].dataset_path)))
            root = root.parent if root.suffix in _FILES and not root.is_dir() else root
        parts = {name: part for name, part in crude.items() if not name.startswith("__")}
        record = parts.pop("json", None)
        return RawSample(
            **basic_sample_keys(crude),
            record=record,
            folder=MediaFolder(root, Observed(parts, "a sample of a tar")),
            source=source,
        )

    def parse(self, sample: RawSample) -> Conversation | Document:
        """Parse a record."""
        with time_limit(self._max_seconds):
            return parse_record(
                self._json_record(sample), sample.folder, self._sources[sample.source].reading
            )

    def parse_each(
        self, sample: RawSample, *, task: Task | Literal["any", "pairs"] | None = "any"
    ) -> dict[str, Conversation | Document]:
        """Parse a record into its parts, by their names.

        Args:
            task: the task that the record is read for; None: predicting tokens; ``any``: the one
                that its keys tell, ``embedding`` for retrieval records; ``pairs``: a loss over
                preference records.

        Returns:
            One part without a name, which has a label if the record has; chosen and rejected of a
            preference record; query, positive and negatives; or, for a reranker, positive and
            negatives, each with the query.
        """
        reading = self._sources[sample.source].reading
        with time_limit(self._max_seconds):
            record = preprocess_record(self._json_record(sample), reading)
        reading = replace(reading, preprocess=None)
        pair = is_preference(record)
        if task == "any":
            task = "classify" if is_classification(record) and not pair else None
            task = "embedding" if is_retrieval(record) else task
        others = task is not None or pair or is_labelled(record)
        if others and reading.train_on not in (None, "all"):
            raise BadSample(
                f"train_on {reading.train_on!r} chooses turns of conversations to train on, and "
                "records for other tasks have none to choose: leave it out."
            )
        if task in ("embedding", "reranker"):
            read = parse_judgements if task == "reranker" else parse_retrieval
            return dict(read(record, sample.folder, reading))
        if task == "classify":
            return {"": parse_classification(record, sample.folder, reading, self._labels)}
        if task in ("pairs", "reward"):
            loss = "--loss dpo, simpo and orpo need"
            require_preference(record, "--task reward needs" if task == "reward" else loss)
        if pair:
            return dict(parse_pair(record, sample.folder, reading))
        parse = parse_labelled if is_labelled(record) else parse_record
        return {"": parse(record, sample.folder, reading)}

    def _json_record(self, sample: RawSample) -> Any:
        """Return the record in JSON's types, with the parts of a WebDataset sample filled in."""
        record = sample.record
        if isinstance(record, bytes):  # from a WebDataset, or read by `data check`
            record = parse_json(record)
        if sample.folder.parts:
            record = join_parts(sample.folder.parts, record)
        return record

    def plan(self, sample: RawSample, parsed: Conversation | Document | None = None) -> Plan:
        """Tokenise a sample and measure its media."""
        with time_limit(self._max_seconds):
            parsed = parsed or self.parse(sample)
            rendered = self._renderer.render(parsed)
            plan = self._planners[sample.source].plan(rendered)
        unused = (*rendered.unused, *plan.unused, *sample.folder.unused)
        target = getattr(parsed, "target", None)
        return replace(plan, target=target, unused=unused, spelt=rendered.spelt)

    def plan_each(
        self, sample: RawSample, task: Task | Literal["pairs"] | None = None
    ) -> dict[str, Plan]:
        """Tokenise the sequences of a record, by their names in :meth:`parse_each`."""
        parts = self.parse_each(sample, task=task)
        return {name: self.plan(sample, part) for name, part in parts.items()}

    def load_pixels(self, plan: Plan, source: int) -> Pixels:
        """Decode the images and videos of a plan from the data set with number `source`."""
        with time_limit(self._max_seconds):
            return self._pixels[source].load(plan.media)


def _with_limits(processor: Any, limits: MediaLimits) -> Any:
    """Return a copy of the processor with other budgets, or the processor itself if none is set."""
    if limits == MediaLimits():
        return processor
    limited = copy.copy(processor)
    limited.image_processor = copy.deepcopy(processor.image_processor)
    limited.video_processor = copy.deepcopy(processor.video_processor)
    limits.apply(limited)
    return limited
