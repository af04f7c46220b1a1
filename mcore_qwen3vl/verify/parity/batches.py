"""Named global batches that together hold every kind of input, built for any Qwen3-VL shape.

Content is random from a seed. Most images and frames are not square, and text stands before and
between them, so that the three axes of the position ids differ.
"""

from __future__ import annotations

import random
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import TYPE_CHECKING, Literal, NamedTuple

import torch
from torch import Tensor

from mcore_qwen3vl.config import Architecture
from mcore_qwen3vl.data.encoding.batch import mrope_position_ids
from mcore_qwen3vl.errors import BadInput
from mcore_qwen3vl.model.inputs import VisualInputs, visual_inputs

if TYPE_CHECKING:  # imports megatron, before which the CPU backend must be installed
    from mcore_qwen3vl.model.transformer_config import Spec

Piece = int | tuple[str, int, int, int]
"""A number of text tokens, or ``image`` or ``video`` with frames, rows and columns."""

Form = Literal["even", "ragged", "padded", "padded-left", "packed"]
"""How samples make micro-batches. ``even``, ``ragged``: one sample each, of equal or of different
lengths. ``padded``, ``padded-left``: two samples each, padded on the right or on the left.
``packed``: several samples in one row, with padding at its end."""


@dataclass(frozen=True)
class Sample:
    """One sequence with its images and videos, as the Hugging Face processor would give it."""

    input_ids: Tensor  # (L,) int64
    pixel_values: Tensor | None  # (P_images, patch_dim) float32
    image_grid_thw: Tensor | None  # (images, 3) int64
    pixel_values_videos: Tensor | None  # (P_videos, patch_dim) float32
    video_grid_thw: Tensor | None  # (videos, 3) int64
    loss_mask: Tensor  # (L,) float32: 1 where the next token is predicted and counts

    @property
    def labels(self) -> Tensor:
        """The next tokens, (L,) int64; the last one has none, and its loss is masked."""
        return torch.cat([self.input_ids[1:], self.input_ids.new_zeros(1)])


@dataclass(frozen=True)
class SampleSpan:
    """The place of a sample in its micro-batch."""

    row: int
    start: int
    sample: Sample

    @property
    def tokens(self) -> tuple[int, slice]:
        return self.row, slice(self.start, self.start + len(self.sample.input_ids))


@dataclass(frozen=True)
class MicroBatch:
    """The model's input on every rank of a TP x CP group and every pipeline stage."""

    input_ids: Tensor  # (B, S) int64
    position_ids: Tensor  # (3, B, S) int64
    attention_mask: Tensor | None  # (B, S) int64, 0 at padding; None without padding
    labels: Tensor  # (B, S) int64
    loss_mask: Tensor  # (B, S) float32, 0 at padding
    cu_seqlens: Tensor | None  # (samples + 1,) int32 when packed, tail padding included
    visual: VisualInputs | None
    spans: tuple[SampleSpan, ...]


@dataclass(frozen=True)
class Batch:
    """A global batch, of which the data-parallel ranks get consecutive equal parts."""

    name: str
    micro_batches: tuple[MicroBatch, ...]

    def numbers_of_rank(self, rank: int, size: int) -> range:
        """Return the numbers of the micro-batches of data-parallel rank `rank` of `size`.

        Raises:
            BadInput: the micro-batches cannot be divided equally.
        """
        count = len(self.micro_batches)
        if count % size:
            raise BadInput(
                f"The {count} micro-batches of a parity batch cannot be divided over DP {size}: "
                f"use a DP that divides {count}."
            )
        per_rank = count // size
        return range(rank * per_rank, (rank + 1) * per_rank)

    @property
    def uneven(self) -> bool:
        """Whether micro-batches differ in shape, so pipeline stages must be told each one's."""
        return len({m.input_ids.shape for m in self.micro_batches}) > 1

    @property
    def padded_left(self) -> bool:
        """Whether rows have padding before their tokens."""
        masks = [m.attention_mask for m in self.micro_batches if m.cu_seqlens is None]
        return any(bool((mask.diff() > 0).any()) for mask in masks if mask is not None)

    @property
    def tokens(self) -> int:
        """The number of tokens whose loss counts, which divides the loss."""
        return int(sum(m.loss_mask.sum() for m in self.micro_batches))


class Recipe(NamedTuple):
    """How samples make micro-batches, and the samples.

    Micro-batches are separated by ``;`` and their samples by ``|``. The words of a sample are a
    number of text tokens, the rows and columns of an image in merged features, or the frames, rows
    and columns of a video.
    """

    form: Form
    samples: str


RECIPES: dict[str, Recipe] = {
    "text": Recipe("even", "23; 19; 24; 21"),
    "image": Recipe("even", "5 image:2x3 4; 3 image:4x2 6; 7 image:2x4 2; 2 image:3x2 5"),
    "images": Recipe(
        "even",
        "3 image:2x3 image:4x1 4; 1 image:1x2 3 image:3x2 2 image:2x1 1; "
        "5 image:2x4 2; 2 image:1x3 4 image:2x2 3",
    ),
    "video": Recipe(
        "even",
        "4 video:3x2x2 3; 2 video:2x2x3 5; 6 video:2x3x1 1 video:1x1x2 2; 3 video:3x2x2 2",
    ),
    "mixed": Recipe(
        "even",
        "3 image:2x3 2 video:2x1x2 4; 4 video:2x2x1 image:1x3 3; "
        "1 video:1x3x2 2 image:2x1 image:1x2 2; 5 image:3x2 1 video:3x1x1 3",
    ),
    "padded": Recipe(
        "padded",
        "4 image:2x3 3 | 9; 13 | 2 video:2x2x1 3 image:1x3 1; "
        "6 image:3x2 9 | 1 image:1x2 2; 5 | 3 image:2x2 4",
    ),
    "padded-left": Recipe(
        "padded-left",
        "8 | 3 image:3x2 4; 2 image:2x3 1 | 5 video:2x1x2 6; "
        "11 image:2x2 2 | 7; 4 video:1x2x2 1 | 3 image:2x1 5",
    ),
    "packed": Recipe(
        "packed",
        "5 | 3 image:2x3 4 | 2 video:2x1x2 3; 4 image:1x3 video:2x2x1 2 | 13; "
        "9 | 6 | 7; 2 image:4x1 1 | 3 image:1x2 2 image:3x2 2",
    ),
    # With two or four data-parallel ranks, some of them get no image and no video at all.
    "imageless": Recipe("even", "4 image:3x2 3; 2 video:2x2x2 4; 14; 17"),
    "ragged": Recipe("ragged", "5 image:2x3 9; 11; 3 video:3x2x1 4 image:1x3 7; 2 image:2x2 3"),
}


def batches_of(spec: Spec) -> tuple[str, ...]:
    """Return the batches that a layer spec takes; ``te`` takes none padded on the left."""
    return tuple(n for n, r in RECIPES.items() if spec != "te" or r.form != "padded-left")


def build_batch(name: str, architecture: Architecture, *, multiple: int = 8) -> Batch:
    """Build the batch called `name`.

    Args:
        name: one of `RECIPES`.
        multiple: number that the layout requires lengths to be a multiple of: the length of every
            sample if it is split by itself (one per micro-batch, or packed), of every row if rows
            are padded. See :func:`mcore_qwen3vl.model.inputs.length_multiple`.

    Raises:
        BadInput: there is no batch called `name`.
    """
    if name not in RECIPES:
        raise BadInput(f"There is no batch called {name!r}; there are {', '.join(RECIPES)}.")
    recipe = RECIPES[name]
    maker = _Maker(architecture, random.Random(zlib.crc32(name.encode())))
    described = [[_pieces(s) for s in micro.split("|")] for micro in recipe.samples.split(";")]
    lengths = [[maker.length(pieces) for pieces in micro] for micro in described]
    if not recipe.form.startswith("padded"):
        lengths = [[_round_up(n, multiple) for n in micro] for micro in lengths]
    longest = _round_up(max(n for micro in lengths for n in micro), multiple)
    if recipe.form == "even":
        lengths = [[longest for _ in micro] for micro in lengths]
    samples = [
        [maker.sample(pieces, n) for pieces, n in zip(micro, of_micro, strict=True)]
        for micro, of_micro in zip(described, lengths, strict=True)
    ]
    totals = [sum(of_micro) for of_micro in lengths]
    widths = [max(totals) + multiple if recipe.form == "packed" else longest] * len(totals)
    pairs = zip(samples, totals if recipe.form == "ragged" else widths, strict=True)
    return Batch(name, tuple(_assemble(architecture, recipe.form, *pair) for pair in pairs))


def _pieces(sample: str) -> list[Piece]:
    pieces: list[Piece] = []
    for word in sample.split():
        kind, _, sizes = word.rpartition(":")
        frames, rows, columns = [1, 1, *map(int, sizes.split("x"))][-3:]
        pieces.append((kind, frames, rows, columns) if kind else columns)
    return pieces


def micro_batch(
    architecture: Architecture, samples: Sequence[Sample], *, multiple: int = 1
) -> MicroBatch:
    """Make a micro-batch of one sample per row, padded on the right to a multiple of `multiple`."""
    longest = max(len(sample.input_ids) for sample in samples)
    return _assemble(architecture, "padded", samples, _round_up(longest, multiple))


class _Maker:
    """A maker of random samples for one architecture."""

    def __init__(self, architecture: Architecture, rng: random.Random) -> None:
        self.a, self.rng = architecture, rng
        self.generator = torch.Generator().manual_seed(rng.randrange(2**31))
        self.special = {
            architecture.image_token_id,
            architecture.video_token_id,
            architecture.vision_start_token_id,
            architecture.vision_end_token_id,
        }

    def length(self, pieces: Sequence[Piece]) -> int:
        """Return the tokens of a sample before it is lengthened."""
        return sum(
            # A frame has a start and an end token; a frame of a video also has a timestamp.
            p if isinstance(p, int) else p[1] * (p[2] * p[3] + (4 if p[0] == "video" else 2))
            for p in pieces
        )

    def sample(self, pieces: Sequence[Piece], length: int) -> Sample:
        """Make a sample of `pieces`, lengthened to `length` with text."""
        a, merge = self.a, self.a.vision.spatial_merge_size
        tokens: list[int] = []
        grids: dict[str, list[tuple[int, int, int]]] = {"image": [], "video": []}
        for piece in [*pieces, length - self.length(pieces)]:
            if isinstance(piece, int):
                tokens += self.text(piece)
                continue
            kind, frames, rows, columns = piece
            grids[kind].append((frames, rows * merge, columns * merge))
            pad = a.image_token_id if kind == "image" else a.video_token_id
            for _ in range(frames):
                tokens += self.text(2 if kind == "video" else 0)
                tokens += [a.vision_start_token_id, *[pad] * (rows * columns)]
                tokens += [a.vision_end_token_id]
        input_ids = torch.tensor(tokens)
        placeholder = (input_ids == a.image_token_id) | (input_ids == a.video_token_id)
        counts = torch.ones(len(tokens))
        counts[:-1] = (~placeholder[1:]).float()  # no loss where a placeholder would be predicted
        counts[-1] = 0
        return Sample(input_ids, *self.pixels(grids["image"]), *self.pixels(grids["video"]), counts)

    def text(self, count: int) -> list[int]:
        tokens: list[int] = []
        while len(tokens) < count:
            token = self.rng.randrange(self.a.vocab_size)
            tokens += [] if token in self.special else [token]
        return tokens

    def pixels(self, grids: list[tuple[int, int, int]]) -> tuple[Tensor | None, Tensor | None]:
        if not grids:
            return None, None
        grid_thw = torch.tensor(grids)
        patches = int(grid_thw.prod(1).sum())
        return torch.randn(patches, self.a.vision.patch_dim, generator=self.generator), grid_thw


def _assemble(
    architecture: Architecture, form: Form, samples: Sequence[Sample], width: int
) -> MicroBatch:
    lengths = [len(s.input_ids) for s in samples]
    cu_seqlens = None
    if form == "packed":
        starts = [0, *accumulate(lengths)]
        spans = [SampleSpan(0, start, s) for start, s in zip(starts, samples, strict=False)]
        cu_seqlens = torch.tensor([*starts, width], dtype=torch.int32)
    else:
        left = form == "padded-left"
        spans = [
            SampleSpan(row, width - n if left else 0, s)
            for row, (n, s) in enumerate(zip(lengths, samples, strict=True))
        ]
    rows = 1 if form == "packed" else len(samples)
    valid = torch.zeros(rows, width, dtype=torch.int64)
    input_ids, labels = torch.zeros_like(valid), torch.zeros_like(valid)
    loss_mask = torch.zeros(rows, width)
    for span in spans:
        valid[span.tokens] = 1
        input_ids[span.tokens] = span.sample.input_ids
        labels[span.tokens] = span.sample.labels
        loss_mask[span.tokens] = span.sample.loss_mask
    attention_mask = None if valid.all() else valid
    joined = {name: _concatenate(samples, name) for name in MEDIA}
    grids = joined["image_grid_thw"], joined["video_grid_thw"]
    positions, _ = mrope_position_ids(architecture, input_ids, *grids, attention_mask, cu_seqlens)
    return MicroBatch(
        input_ids=input_ids,
        position_ids=positions,
        attention_mask=attention_mask,
        labels=labels,
        loss_mask=loss_mask,
        cu_seqlens=cu_seqlens,
        visual=visual_inputs(architecture, input_ids, **joined),
        spans=tuple(spans),
    )


MEDIA = ("pixel_values", "image_grid_thw", "pixel_values_videos", "video_grid_thw")


def media(sample: Sample) -> dict[str, Tensor]:
    """Return the pixels and grids that `sample` has, by the argument names of HF's forward."""
    return {name: value for name in MEDIA if (value := getattr(sample, name)) is not None}


def _concatenate(samples: Sequence[Sample], name: str) -> Tensor | None:
    parts = [value for s in samples if (value := getattr(s, name)) is not None]
    return torch.cat(parts) if parts else None


def _round_up(n: int, multiple: int) -> int:
    return -(-n // multiple) * multiple
