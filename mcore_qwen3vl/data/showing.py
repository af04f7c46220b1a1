"""A page that shows a sample as the model will see it: one HTML file."""

from __future__ import annotations

import base64
from collections.abc import Iterator
from dataclasses import dataclass
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image
from torch import Tensor

from mcore_qwen3vl.data.config import DataConfig, parse_sources
from mcore_qwen3vl.data.datasets import CrudeSamples
from mcore_qwen3vl.data.encoding.planning import Pixels, Plan, PlannedMedia
from mcore_qwen3vl.data.encoding.preparation import Preparation
from mcore_qwen3vl.data.indexes import ensure_index, record_of
from mcore_qwen3vl.data.places import sample_id
from mcore_qwen3vl.data.records.reading import PLAIN, Reading, reason_of
from mcore_qwen3vl.errors import BadInput, CheckFailed
from mcore_qwen3vl.files import atomic_write
from mcore_qwen3vl.html_pages import templates
from mcore_qwen3vl.unused.fields import Unused

PICTURES = 16
"""The largest number of a video's frames that are shown."""
SHOWN_WIDTH = {"image": 480, "video": 240}
"""Width on the page in pixels; narrower pictures are enlarged by a whole number."""


@dataclass(frozen=True)
class TokenRun:
    """Consecutive tokens of the same kind and weight."""

    text: str
    kind: str  # text, or image or video for its placeholders
    start: int  # the first one's place in the sample, from 0
    token_ids: list[int]
    texts: list[str]  # of each token; part of a character is U+FFFD
    weight: float  # 0: not trained

    @property
    def count(self) -> int:
        """The number of tokens."""
        return len(self.token_ids)


@dataclass(frozen=True)
class Shown:
    """One image or video on the page."""

    name: str
    kind: str
    grid: tuple[int, int, int]  # (T, H, W) in patches
    height: int
    width: int
    features: int  # placeholders
    pictures: list[str]  # data URIs
    times: list[str]  # a video's time tokens, one for each of the pictures

    @property
    def zoom(self) -> int:
        """The whole number by which the picture is enlarged, in both directions."""
        return max(SHOWN_WIDTH[self.kind] // self.width, 1)


@dataclass(frozen=True)
class Seen:
    """A sample in the form that the page shows."""

    name: str
    format: str
    tokens: int
    trained: int
    runs: list[TokenRun]
    media: list[Shown]
    unused: tuple[Unused, ...] = ()


def read_sample(
    path: Path,
    number: int,
    processor: Any,
    config: DataConfig,
    *,
    split: str = "train",
    defaults: Reading = PLAIN,
) -> Seen:
    """Read, tokenise and decode one sample, whose `number` is the line or the record, from 1.

    Raises:
        BadInput: there is no such record.
        CheckFailed: the record cannot be used; the message says why.
    """
    sources = parse_sources([str(path)], defaults)
    preparation = Preparation(processor, config, sources)
    samples = CrudeSamples(sources, split=split, trust=config.trust_data)
    record = record_of(ensure_index(path), number) if path.suffix == ".jsonl" else number - 1
    if record >= len(samples):
        raise BadInput(f"{path} has {len(samples):,} records; there is no record {number:,}.")
    crude = samples[record]
    try:
        raw = preparation.raw(crude)
        parsed = preparation.parse(raw)
        plan = preparation.plan(raw, parsed)
        pixels = preparation.load_pixels(plan, raw.source)
    except Exception as error:  # as in the loader, any exception makes the sample bad
        raise CheckFailed(f"{sample_id(crude)} cannot be used: {reason_of(error)}") from error
    return Seen(
        name=sample_id(crude),
        format=parsed.format,
        tokens=len(plan.input_ids),
        trained=plan.trained_tokens,
        runs=_split_runs(plan, processor),
        media=_shown_media(plan, pixels, processor),
        unused=plan.unused,
    )


def write_page(seen: Seen, file: Path) -> None:
    """Write the HTML page of a sample."""
    template = templates("mcore_qwen3vl.data").get_template("sample.html.jinja")
    with atomic_write(file, "Choose another --out.") as partial:
        partial.write_text(template.render(seen=seen), "utf-8", "backslashreplace")


def _split_runs(plan: Plan, processor: Any) -> list[TokenRun]:
    """Split the tokens where the weight or the kind of token changes."""
    placeholders = {processor.image_token_id: "image", processor.video_token_id: "video"}
    ids = plan.input_ids
    kinds = np.array([placeholders.get(int(token), "text") for token in ids])
    edges = np.flatnonzero((kinds[1:] != kinds[:-1]) | (np.diff(plan.loss_weights) != 0)) + 1
    runs = []
    for start, end in zip([0, *edges.tolist()], [*edges.tolist(), len(ids)], strict=True):
        tokens = ids[start:end].tolist()
        text = processor.tokenizer.decode(tokens) if kinds[start] == "text" else ""
        texts = processor.tokenizer.batch_decode([[token] for token in tokens])
        weight = float(plan.loss_weights[start])
        runs.append(TokenRun(text, str(kinds[start]), start, tokens, texts, weight))
    return runs


def _shown_media(plan: Plan, pixels: Pixels, processor: Any) -> list[Shown]:
    """Return the images and videos of a sample in the form that the page shows."""
    images, videos = processor.image_processor, processor.video_processor
    queues = {
        "image": _reassemble_pictures(pixels.pixel_values, pixels.image_grid_thw, images),
        "video": _reassemble_pictures(pixels.pixel_values_videos, pixels.video_grid_thw, videos),
    }
    shown = []
    for item in plan.media:
        grid, frames = next(queues[item.media.kind])
        shown.append(
            Shown(
                name=item.media.name,
                kind=item.media.kind,
                grid=grid,
                height=grid[1] * images.patch_size,
                width=grid[2] * images.patch_size,
                features=item.patches // images.merge_size**2,
                pictures=[_data_uri(frame) for frame in frames[:PICTURES]],
                times=_timestamp_texts(item, processor)[:PICTURES],
            )
        )
    return shown


def _timestamp_texts(item: PlannedMedia, processor: Any) -> list[str]:
    """Return the texts before each pair of frames, in the form of HF's ``replace_video_token``.

    They are for display. The tokens that train are in the plan.
    """
    if item.metadata is None:
        return []
    seconds = processor._calculate_timestamps(
        item.metadata.frames_indices,
        item.metadata.fps,
        processor.video_processor.temporal_patch_size,
    )
    return [f"<{second:.1f} seconds>" for second in seconds]


def _reassemble_pictures(
    values: Tensor | None, grids: Tensor | None, processor: Any
) -> Iterator[tuple[tuple[int, int, int], np.ndarray]]:
    """Reassemble the images, or the videos, of a sample from their patches, one after the other.

    Yields:
        (frames, rows, columns) in patches, and the pictures (F, height, width, 3) uint8, as
        resized: the first of each pair of frames.
    """
    if values is None or grids is None:
        return
    merge, patch = processor.merge_size, processor.patch_size
    counts = grids.prod(1).tolist()
    for (frames, rows, columns), patches in zip(grids.tolist(), values.split(counts), strict=True):
        # HF's order: patches that are merged lie together; in each, channel, frame, row, column.
        cut = patches.reshape(
            frames, rows // merge, columns // merge, merge, merge, 3,
            processor.temporal_patch_size, patch, patch,
        )[:, :, :, :, :, :, 0]  # fmt: skip
        pixels = cut.permute(0, 1, 3, 6, 2, 4, 7, 5).reshape(
            frames, rows * patch, columns * patch, 3
        )
        shown = pixels.numpy()
        if pixels.is_floating_point():
            shown = shown * np.array(processor.image_std) + np.array(processor.image_mean)
            shown = (shown * 255).round().clip(0, 255).astype(np.uint8)
        yield (frames, rows, columns), shown


def _data_uri(picture: np.ndarray) -> str:
    buffer = BytesIO()
    Image.fromarray(np.ascontiguousarray(picture)).save(buffer, "PNG")
    return "data:image/png;base64," + base64.b64encode(buffer.getvalue()).decode()
