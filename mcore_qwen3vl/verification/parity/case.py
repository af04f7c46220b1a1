"""What a parity case is made of: inputs, a layout and all else that must not change the numbers.

Named global batches together hold every kind of input, built for any Qwen3-VL shape. Their content
is random from a seed. Most images and frames are not square, and text stands before and between
them, so that the three axes of the position ids differ. Adapters are named ones for the tiny
models, and random values for any config.
"""

from __future__ import annotations

import random
import zlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import accumulate
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from mcore_qwen3vl.config import Architecture
from mcore_qwen3vl.converters.adapters.adapter import Factors, write_adapter
from mcore_qwen3vl.converters.adapters.config import (
    ATTENTION,
    DELTA_NET,
    EXPERTS,
    MLP,
    ROUTER,
    AdapterConfig,
    HFConfig,
    apply_with_peft,
    preset_targets,
    resolve_targets,
)
from mcore_qwen3vl.converters.mapping.forms import LM_HEAD
from mcore_qwen3vl.converters.storage.boxes import Shape
from mcore_qwen3vl.data.encoding.batch import mrope_position_ids
from mcore_qwen3vl.errors import BadInput
from mcore_qwen3vl.layout import Layout
from mcore_qwen3vl.model.inputs import VisualInputs, length_multiple, visual_inputs

if TYPE_CHECKING:  # imports megatron, before which the CPU backend must be installed
    from mcore_qwen3vl.model.transformer_config import Spec

Dtype = Literal["fp32", "bf16", "fp64"]

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp64": torch.float64}


class _DoubleForFloat(TorchFunctionMode):
    """Gives float64 wherever code asks for float32, as norms, softmax and losses of models do."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.Tensor.float:  # which takes no dtype that could be exchanged
            return args[0].double()
        args = [torch.float64 if value is torch.float32 else value for value in args]
        asked = (kwargs or {}).items()
        kwargs = {k: torch.float64 if value is torch.float32 else value for k, value in asked}
        return func(*args, **kwargs)


@contextmanager
def computing_in(dtype: torch.dtype) -> Iterator[None]:
    """Within this context, compute all in float64 if that is `dtype`: weights alone do not do it.

    Models ask for float32 by name at many places, and float64 that went through one of them has
    its rounding.
    """
    if dtype != torch.float64:
        yield
        return
    usual = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        with _DoubleForFloat():
            yield
    finally:
        torch.set_default_dtype(usual)


@dataclass(frozen=True)
class AdamW:
    """The settings of one optimizer step, by the names of Megatron's ``OptimizerConfig``.

    Decay spares biases and one-dimensional weights, as Megatron's default does. The large `eps`
    keeps the step a smooth function of the gradient: with a usual one, a gradient that is zero up
    to rounding would move its parameter by the full learning rate in a random direction. With this
    one, a parameter's relative error after the step is at most twice that of its gradient (the
    derivative of ``lr * g / (|g| + eps)`` is at most ``lr / eps``). With 1e-4 it was up to 17 times
    as large for LoRA's factors.
    """

    lr: float = 1e-2
    weight_decay: float = 0.1
    adam_beta1: float = 0.9
    adam_beta2: float = 0.95
    adam_eps: float = 1e-3
    clip_grad: float = 0.5


@dataclass(frozen=True)
class RouterLosses:
    """Losses that training adds for each MoE layer, by the names of ``TransformerConfig``.

    Attributes:
        kind: the tokens that are balanced together: of a micro-batch (``aux_loss``), of a sample
            (``seq_aux_loss``) or of a global batch (``global_aux_loss``).
        aux: coefficient of the balancing loss, that of Hugging Face divided by top-k.
        z: coefficient of the mean squared log-sum-exp of the logits (Zoph et al., "ST-MoE", 2022).
    """

    kind: str
    aux: float
    z: float


@dataclass(frozen=True)
class ParityCase:
    """The settings under which a model runs.

    Attributes:
        device: device that the model runs on; see :func:`.run_layout`.
        gradients: run the backward pass and compare gradients.
        adamw: optimizer step to take after that, to compare parameters; None: take none.
        distributed_optimizer: shard optimizer states and gradients over DP.
        overlap: overlap gradient reduction (and parameter gathering, if distributed) with compute.
        overlap_experts: ``--overlap-moe-expert-parallel-comm``. Megatron's config refuses it in
            fp32, so it is set after the model is built.
        freeze: parts and patterns to freeze, see :class:`mcore_qwen3vl.model.freeze.Freezing`.
        config: further ``TransformerConfig`` fields, such as recompute.
        compile_pointwise: see :mod:`mcore_qwen3vl.model.pointwise`.
        weights_in_files: hold the weights of both models, on the CPU, in temporary files, so that
            they leave memory where it is short and are read again when they are used.
    """

    layout: Layout = field(default_factory=Layout)
    spec: Spec = "torch"
    dtype: Dtype = "fp32"
    device: Literal["cpu", "cuda"] = "cpu"
    gradients: bool = True
    adamw: AdamW | None = None
    distributed_optimizer: bool = False
    overlap: bool = False
    overlap_experts: bool = False
    freeze: tuple[str, ...] = ()
    config: Mapping[str, Any] = field(default_factory=dict)
    compile_pointwise: bool = False
    weights_in_files: bool = False

    @property
    def torch_dtype(self) -> torch.dtype:
        return DTYPES[self.dtype]

    @property
    def router_losses(self) -> RouterLosses | None:
        """The losses of routers that `config` adds to the loss; the reference adds them too."""
        aux, z = self.config.get("moe_aux_loss_coeff"), self.config.get("moe_z_loss_coeff")
        if not (aux or z):
            return None
        kind = self.config.get("moe_router_load_balancing_type", "aux_loss")
        return RouterLosses(kind, aux or 0.0, z or 0.0)

    @property
    def overlaps_gather(self) -> bool:
        """Whether new parameters are gathered during the forward pass that follows a step."""
        return self.overlap and self.distributed_optimizer

    @property
    def length_multiple(self) -> int:
        """The number that sequence lengths must be a multiple of."""
        return length_multiple(self.layout.cp, self.layout.tp, self.layout.sp)

    def validate(self, architecture: Architecture, batches: tuple[GlobalBatch, ...]) -> None:
        """Check before any process starts that the model and the batches can be run this way.

        Raises:
            BadInput: the model or a batch cannot be run this way.
        """
        self.layout.validate(architecture)
        for batch in batches:
            if self.spec == "te" and batch.padded_left:
                raise BadInput(
                    f"The te spec accepts padding on the right only, and the batch {batch.name} "
                    "is padded on the left: leave that batch out, or use the torch spec."
                )
            per_rank = len(batch.numbers_of_rank(0, self.layout.dp))
            if self.layout.vpp > 1 and per_rank % self.layout.pp:
                raise BadInput(
                    f"An interleaved pipeline needs a multiple of PP {self.layout.pp} micro-batches"
                    f" on each data-parallel rank; DP {self.layout.dp} leaves {per_rank}: lower DP."
                )

    def __str__(self) -> str:
        extras = [
            "distributed optimizer" if self.distributed_optimizer else "",
            "overlap" if self.overlap else "",
            "overlapped experts" if self.overlap_experts else "",
            f"freeze {' '.join(self.freeze)}" if self.freeze else "",
            *(f"{name}={value}" for name, value in self.config.items()),
        ]
        return ", ".join([str(self.layout), *filter(None, extras)])


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
class GlobalBatch:
    """A global batch; the data-parallel ranks get consecutive equal parts of it."""

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
        """The number of tokens whose loss counts; it divides the loss."""
        return int(sum(m.loss_mask.sum() for m in self.micro_batches))


class BatchRecipe(NamedTuple):
    """How samples make micro-batches, and the samples.

    Micro-batches are separated by ``;`` and their samples by ``|``. The words of a sample are a
    number of text tokens, the rows and columns of an image in merged features, or the frames, rows
    and columns of a video. A language model alone gets as many tokens of text for these.
    """

    form: Form
    samples: str


RECIPES: dict[str, BatchRecipe] = {
    "text": BatchRecipe("even", "23; 19; 24; 21"),
    "image": BatchRecipe("even", "5 image:2x3 4; 3 image:4x2 6; 7 image:2x4 2; 2 image:3x2 5"),
    "images": BatchRecipe(
        "even",
        "3 image:2x3 image:4x1 4; 1 image:1x2 3 image:3x2 2 image:2x1 1; "
        "5 image:2x4 2; 2 image:1x3 4 image:2x2 3",
    ),
    "video": BatchRecipe(
        "even",
        "4 video:3x2x2 3; 2 video:2x2x3 5; 6 video:2x3x1 1 video:1x1x2 2; 3 video:3x2x2 2",
    ),
    "mixed": BatchRecipe(
        "even",
        "3 image:2x3 2 video:2x1x2 4; 4 video:2x2x1 image:1x3 3; "
        "1 video:1x3x2 2 image:2x1 image:1x2 2; 5 image:3x2 1 video:3x1x1 3",
    ),
    "padded": BatchRecipe(
        "padded",
        "4 image:2x3 3 | 9; 13 | 2 video:2x2x1 3 image:1x3 1; "
        "6 image:3x2 9 | 1 image:1x2 2; 5 | 3 image:2x2 4",
    ),
    "padded-left": BatchRecipe(
        "padded-left",
        "8 | 3 image:3x2 4; 2 image:2x3 1 | 5 video:2x1x2 6; "
        "11 image:2x2 2 | 7; 4 video:1x2x2 1 | 3 image:2x1 5",
    ),
    "packed": BatchRecipe(
        "packed",
        "5 | 3 image:2x3 4 | 2 video:2x1x2 3; 4 image:1x3 video:2x2x1 2 | 13; "
        "9 | 6 | 7; 2 image:4x1 1 | 3 image:1x2 2 image:3x2 2",
    ),
    # With two or four data-parallel ranks, some of them get no image and no video at all.
    "imageless": BatchRecipe("even", "4 image:3x2 3; 2 video:2x2x2 4; 14; 17"),
    "ragged": BatchRecipe(
        "ragged", "5 image:2x3 9; 11; 3 video:3x2x1 4 image:1x3 7; 2 image:2x2 3"
    ),
}


def batch_names_of(spec: Spec) -> tuple[str, ...]:
    """Return the batches that a layer spec takes; ``te`` takes none padded on the left."""
    return tuple(n for n, r in RECIPES.items() if spec != "te" or r.form != "padded-left")


def build_batch(name: str, architecture: Architecture, *, multiple: int = 8) -> GlobalBatch:
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
    maker = _SampleMaker(architecture, random.Random(zlib.crc32(name.encode())))
    described = [
        [maker.readable(_parse_pieces(s)) for s in micro.split("|")]
        for micro in recipe.samples.split(";")
    ]
    lengths = [[maker.token_count(pieces) for pieces in micro] for micro in described]
    if not recipe.form.startswith("padded"):
        # Padded rows are rounded up as a whole instead, to `longest`.
        lengths = [[_round_up(n, multiple) for n in micro] for micro in lengths]
    longest = _round_up(max(n for micro in lengths for n in micro), multiple)
    if recipe.form == "even":
        lengths = [[longest for _ in micro] for micro in lengths]
    samples = [
        [maker.make_sample(pieces, n) for pieces, n in zip(micro, of_micro, strict=True)]
        for micro, of_micro in zip(described, lengths, strict=True)
    ]
    totals = [sum(of_micro) for of_micro in lengths]
    # A pack is wider than its samples, so that there is padding at its end.
    widths = [max(totals) + multiple if recipe.form == "packed" else longest] * len(totals)
    pairs = zip(samples, totals if recipe.form == "ragged" else widths, strict=True)
    return GlobalBatch(
        name, tuple(_assemble_micro_batch(architecture, recipe.form, *pair) for pair in pairs)
    )


def _parse_pieces(sample: str) -> list[Piece]:
    """Read the words of a sample, as :class:`BatchRecipe` describes them."""
    pieces: list[Piece] = []
    for word in sample.split():
        kind, _, sizes = word.rpartition(":")
        # An image has one frame; of text there is one size, its tokens, and it gets to `columns`.
        frames, rows, columns = [1, 1, *map(int, sizes.split("x"))][-3:]
        pieces.append((kind, frames, rows, columns) if kind else columns)
    return pieces


def pad_to_micro_batch(
    architecture: Architecture, samples: Sequence[Sample], *, multiple: int = 1
) -> MicroBatch:
    """Make a micro-batch of one sample per row, padded on the right to a multiple of `multiple`."""
    longest = max(len(sample.input_ids) for sample in samples)
    return _assemble_micro_batch(architecture, "padded", samples, _round_up(longest, multiple))


class _SampleMaker:
    """A maker of random samples for one architecture."""

    def __init__(self, architecture: Architecture, rng: random.Random) -> None:
        self.architecture, self.rng = architecture, rng
        self.generator = torch.Generator().manual_seed(rng.randrange(2**31))
        self.special = {
            architecture.image_token_id,
            architecture.video_token_id,
            architecture.vision_start_token_id,
            architecture.vision_end_token_id,
        }

    def readable(self, pieces: Sequence[Piece]) -> list[Piece]:
        """Return the pieces of a sample, text in place of all others if there is no tower."""
        if self.architecture.has_vision:
            return list(pieces)
        return [self.token_count([piece]) for piece in pieces]

    def token_count(self, pieces: Sequence[Piece]) -> int:
        """Return the tokens of a sample before it is lengthened."""
        return sum(
            # A frame has a start and an end token; a frame of a video also has a timestamp.
            p if isinstance(p, int) else p[1] * (p[2] * p[3] + (4 if p[0] == "video" else 2))
            for p in pieces
        )

    def make_sample(self, pieces: Sequence[Piece], length: int) -> Sample:
        """Make a sample of `pieces`, lengthened to `length` with text."""
        a, merge = self.architecture, self.architecture.vision.spatial_merge_size
        tokens: list[int] = []
        grids: dict[str, list[tuple[int, int, int]]] = {"image": [], "video": []}
        for piece in [*pieces, length - self.token_count(pieces)]:  # the last is text to fill up
            if isinstance(piece, int):
                tokens += self.random_text(piece)
                continue
            kind, frames, rows, columns = piece
            grids[kind].append((frames, rows * merge, columns * merge))
            pad = a.image_token_id if kind == "image" else a.video_token_id
            for _ in range(frames):
                tokens += self.random_text(2 if kind == "video" else 0)
                tokens += [a.vision_start_token_id, *[pad] * (rows * columns)]
                tokens += [a.vision_end_token_id]
        input_ids = torch.tensor(tokens)
        placeholder = (input_ids == a.image_token_id) | (input_ids == a.video_token_id)
        counts = torch.ones(len(tokens))
        counts[:-1] = (~placeholder[1:]).float()  # no loss where a placeholder would be predicted
        counts[-1] = 0
        return Sample(
            input_ids,
            *self.random_pixels(grids["image"]),
            *self.random_pixels(grids["video"]),
            counts,
        )

    def random_text(self, count: int) -> list[int]:
        tokens: list[int] = []
        while len(tokens) < count:
            token = self.rng.randrange(self.architecture.vocab_size)
            tokens += [] if token in self.special else [token]
        return tokens

    def random_pixels(
        self, grids: list[tuple[int, int, int]]
    ) -> tuple[Tensor | None, Tensor | None]:
        if not grids:
            return None, None
        grid_thw = torch.tensor(grids)
        patches = int(grid_thw.prod(1).sum())
        return torch.randn(
            patches, self.architecture.vision.patch_dim, generator=self.generator
        ), grid_thw


def _assemble_micro_batch(
    architecture: Architecture, form: Form, samples: Sequence[Sample], width: int
) -> MicroBatch:
    lengths = [len(s.input_ids) for s in samples]
    cu_seqlens = None
    if form == "packed":
        starts = [0, *accumulate(lengths)]
        # There is one more start than samples, which is the end.
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


def media_arguments(sample: Sample) -> dict[str, Tensor]:
    """Return the pixels and grids that `sample` has, by the argument names of HF's forward."""
    return {name: value for name in MEDIA if (value := getattr(sample, name)) is not None}


def _concatenate(samples: Sequence[Sample], name: str) -> Tensor | None:
    parts = [value for s in samples if (value := getattr(s, name)) is not None]
    return torch.cat(parts) if parts else None


def _round_up(n: int, multiple: int) -> int:
    return -(-n // multiple) * multiple


VISION = ("attn.qkv", "attn.proj", "linear_fc1", "linear_fc2")  # the last two: mergers too


def _lora_config(r: int, alpha: int, *modules: str, **more: Any) -> AdapterConfig:
    return AdapterConfig(r=r, lora_alpha=alpha, target_modules=modules or None, **more)


ADAPTERS: dict[str, AdapterConfig] = {
    "language": _lora_config(4, 10, *ATTENTION, *MLP),
    "mixed ranks": _lora_config(
        *(4, 10, *ATTENTION, *MLP),
        rank_pattern={"v_proj": 3, "up_proj": 5, r"layers\.2\.self_attn\.q_proj": 7},
        alpha_pattern={"up_proj": 6},
    ),
    "q and v": _lora_config(5, 7, "q_proj", "v_proj", use_rslora=True),
    "k and gate": _lora_config(3, 4, "k_proj", "gate_proj", layers_to_transform=(0, 3)),
    "everything": _lora_config(
        *(4, 6, *ATTENTION, *MLP, *VISION, "lm_head"),
        use_rslora=True,
        rank_pattern={"lm_head": 6, "attn.qkv": 3},
    ),
    "whole": _lora_config(4, 5, *ATTENTION, modules_to_save=("embed_tokens", "lm_head", "merger")),
    "whole tied": _lora_config(
        4, 5, *ATTENTION, modules_to_save=("embed_tokens",), ensure_weight_tying=True
    ),
    "whole vision": _lora_config(4, 5, "down_proj", modules_to_save=("visual",)),
    "experts": _lora_config(
        *(4, 10, *ATTENTION),
        target_parameters=EXPERTS,
        rank_pattern={"v_proj": 3, "experts.down_proj": 2},
    ),
    "gate and up of experts": _lora_config(3, 4, target_parameters=EXPERTS[:1]),
    "down of experts": _lora_config(3, 4, use_rslora=True, target_parameters=EXPERTS[1:]),
    "router": _lora_config(
        *(3, 4, "o_proj", "attn.qkv", "merger.linear_fc1", "lm_head"),
        target_parameters=(ROUTER, *EXPERTS),
    ),
    "whole router": _lora_config(3, 4, "o_proj", modules_to_save=("gate", "merger")),
    "experts and MLP": _lora_config(4, 6, *ATTENTION, *MLP, target_parameters=EXPERTS),
    "hybrid": _lora_config(
        *(4, 10, *ATTENTION, *DELTA_NET, *MLP), rank_pattern={"in_proj_qkv": 3, "in_proj_a": 2}
    ),
    "hybrid experts": _lora_config(3, 4, *ATTENTION, *DELTA_NET, *MLP, target_parameters=EXPERTS),
}
"""The matrix's adapters, with targets, ranks, scalings and whole tensors; all values are random."""


def preset_config(name: str, hf_dir: str | Path) -> AdapterConfig:
    """Return a config for a usual choice of targets, see ``adapters.config.preset_targets``."""
    modules, parameters = preset_targets(name, Architecture.from_hf(hf_dir))
    return AdapterConfig(r=8, lora_alpha=16, target_modules=modules, target_parameters=parameters)


def write_random_adapter(path: Path, config: AdapterConfig, hf_config: HFConfig) -> Path:
    """Write a PEFT adapter with random factors and random whole tensors, and return its path."""
    factors = {
        name: Factors(
            _random_tensor(f"{name}.a", spec.a_shape, 1.0),
            _random_tensor(f"{name}.b", spec.b_shape, 0.3),
            spec.r,
            spec.scaling,
        )
        for name, spec in resolve_targets(config, hf_config).items()
    }
    saved = {
        name: _random_tensor(name, shape, 1.0)
        for name, shape in apply_with_peft(config, hf_config).saved.items()
    }
    if config.ensure_weight_tying:
        saved.pop(LM_HEAD, None)  # the embedding's tensor stands for both
    write_adapter(path, config, factors, saved, hf_config)
    return path


def _random_tensor(name: str, shape: Shape, gain: float) -> Tensor:
    """Return a matrix of gain `gain`, or a vector (of a norm or bias) around one half."""
    generator = torch.Generator().manual_seed(zlib.crc32(name.encode()))
    noise = torch.randn(shape, generator=generator)
    return 0.5 + 0.2 * noise if len(shape) == 1 else gain * noise / noise[0].numel() ** 0.5
