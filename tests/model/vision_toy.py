"""A model just large enough for every way in which visual features meet parallel ranks.

Its decoder layers are Megatron's own column- and row-parallel linears, so hidden states are
replicated under TP and divided under SP and CP, as in the real model. The reference is plain
PyTorch on Hugging Face's tower, and shares no code with it.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from functools import partial
from unittest import mock

import torch
import torch.nn.functional as F
from megatron.core import parallel_state
from megatron.core.tensor_parallel import ColumnParallelLinear, RowParallelLinear
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor, nn
from transformers.models.qwen3_vl.configuration_qwen3_vl import Qwen3VLVisionConfig
from transformers.models.qwen3_vl.modeling_qwen3_vl import Qwen3VLVisionModel

from mcore_qwen3vl.config import Architecture
from mcore_qwen3vl.layout import Layout
from mcore_qwen3vl.model.fusion import DeepStack, fuse, plan_fusion
from mcore_qwen3vl.model.inputs import VisualInputs, visual_inputs
from mcore_qwen3vl.model.sequence import local_positions
from mcore_qwen3vl.model.vision.tower import VisionTower
from mcore_qwen3vl.tiny.tiny_checkpoint import tiny_config

ARCHITECTURE = Architecture.from_hf(tiny_config())
LAYERS, HIDDEN, FFN, SEQ = 4, ARCHITECTURE.hidden_size, 56, 64
# Double precision leaves room between rounding (2e-8 here) and any wrong wiring.
DTYPE = torch.float64


@contextmanager
def exact_rotary(tower: type[nn.Module] = Qwen3VLVisionModel) -> Iterator[None]:
    """Make HF's tower rotate without rounding to float32, by HF's function for the text model."""
    modeling = sys.modules[tower.__module__]
    exact = partial(modeling.apply_rotary_pos_emb, unsqueeze_dim=-2)
    with mock.patch.object(modeling, "apply_rotary_pos_emb_vision", exact):
        yield


@dataclass
class Batch:
    """One micro-batch; grids are (n, 3), in the order of their placeholders."""

    input_ids: Tensor  # (B, SEQ)
    pixel_values: Tensor | None = None
    image_grid_thw: Tensor | None = None
    pixel_values_videos: Tensor | None = None
    video_grid_thw: Tensor | None = None

    def visual(self) -> VisualInputs | None:
        return visual_inputs(ARCHITECTURE, **vars(self))

    @property
    def text_embeddings(self) -> Tensor:
        """Fixed random vectors (B, SEQ, HIDDEN), which serve as an embedding table."""
        return _random(self.input_ids.shape[0], SEQ, HIDDEN, seed=3)


def batch(*samples: list[tuple[str, int, int, int]]) -> Batch:
    """Make a micro-batch; each sample is a list of (image | video, frames, rows, columns)."""
    token = {"image": ARCHITECTURE.image_token_id, "video": ARCHITECTURE.video_token_id}
    ids = torch.ones(len(samples), SEQ, dtype=torch.int64)
    grids: dict[str, list[list[int]]] = {"image": [], "video": []}
    for row, segments in enumerate(samples):
        at = 2 + row  # placeholders start elsewhere in every sample
        for kind, frames, height, width in segments:
            grids[kind].append([frames, height, width])
            for _ in range(frames):
                ids[row, at : at + height * width // 4] = token[kind]
                at += height * width // 4 + 1
        assert at <= SEQ, "the sample is too long"
    out = Batch(ids)
    if grids["image"]:
        out.image_grid_thw = torch.tensor(grids["image"])
        out.pixel_values = _pixels(out.image_grid_thw, seed=1)
    if grids["video"]:
        out.video_grid_thw = torch.tensor(grids["video"])
        out.pixel_values_videos = _pixels(out.video_grid_thw, seed=2)
    return out


def _pixels(grid: Tensor, seed: int) -> Tensor:
    return _random(int(grid.prod(1).sum()), ARCHITECTURE.vision.patch_dim, seed=seed)


def _random(*shape: int, seed: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=DTYPE)


def loss_of(hidden: Tensor, positions: Tensor) -> Tensor:
    """Sum (s, B, HIDDEN) at `positions` over tokens, with a weight for each number."""
    weights = _random(SEQ, hidden.shape[1], HIDDEN, seed=4)[positions]
    return (torch.tanh(hidden) * weights).sum()


def vision_weights() -> dict[str, Tensor]:
    """Return tensors by HF's names, all random, norms and biases too."""
    tower = Qwen3VLVisionModel(Qwen3VLVisionConfig(**asdict(ARCHITECTURE.vision)))
    return {
        name: _random(*tensor.shape, seed=100 + i) * 0.3
        for i, (name, tensor) in enumerate(tower.state_dict().items())
    }


def linear_weights() -> list[tuple[Tensor, Tensor]]:
    """Return the two weights of each layer: (FFN, HIDDEN) and (HIDDEN, FFN)."""
    return [
        (_random(FFN, HIDDEN, seed=10 + i) * 0.2, _random(HIDDEN, FFN, seed=20 + i) * 0.2)
        for i in range(LAYERS)
    ]


class Toy(MegatronModule):
    """Vision tower, fusion, and `LAYERS` tensor-parallel layers with DeepStack."""

    def __init__(self, layout: Layout, **tower_options: bool) -> None:
        config = TransformerConfig(
            num_layers=LAYERS,
            hidden_size=HIDDEN,
            ffn_hidden_size=FFN,
            num_attention_heads=8,
            use_cpu_initialization=True,
            params_dtype=DTYPE,
            gradient_accumulation_fusion=False,
            **{
                name: value
                for name, value in layout.config_overrides().items()
                if name.startswith(("tensor", "context", "sequence"))
            },
        )
        super().__init__(config)
        group = parallel_state.get_tensor_and_context_parallel_group()
        self.visual = VisionTower(ARCHITECTURE, config, group=group, **tower_options)
        self.visual.load_state_dict(vision_weights())
        options = {"config": config, "bias": False, "skip_bias_add": False}
        options["init_method"] = nn.init.normal_
        self.up = nn.ModuleList(
            ColumnParallelLinear(HIDDEN, FFN, gather_output=False, **options) for _ in range(LAYERS)
        )
        self.down = nn.ModuleList(
            RowParallelLinear(FFN, HIDDEN, input_is_parallel=True, **options) for _ in range(LAYERS)
        )
        tp = parallel_state.get_tensor_model_parallel_rank()
        with torch.no_grad():
            for up, down, (a, b) in zip(self.up, self.down, linear_weights(), strict=True):
                up.weight.copy_(a.chunk(layout.tp, 0)[tp])
                down.weight.copy_(b.chunk(layout.tp, 1)[tp])
        self.positions = local_positions(
            SEQ,
            cp_size=layout.cp,
            cp_rank=parallel_state.get_context_parallel_rank(),
            tp_size=layout.tp,
            tp_rank=tp,
            sequence_parallel=layout.sp,
        )

    def forward(self, batch: Batch) -> Tensor:
        """Return the part of the loss that comes from this rank's tokens."""
        visual = batch.visual()
        features, deepstack_features = self.visual(visual)
        plan = plan_fusion(
            None if visual is None else visual.token_index,
            self.positions,
            seq_len=SEQ,
            batch_size=len(batch.input_ids),
        )
        deepstack = DeepStack.from_features(deepstack_features, plan)
        hidden = batch.text_embeddings.transpose(0, 1)[self.positions]  # (s_local, B, HIDDEN)
        hidden = fuse(hidden, features, plan)
        for i, (up, down) in enumerate(zip(self.up, self.down, strict=True)):
            hidden = hidden + down(F.silu(up(hidden)[0]))[0]
            hidden = deepstack.add_to(i, hidden)
        return loss_of(hidden, self.positions)


class Reference(nn.Module):
    """The same model on one rank, with Hugging Face's tower and boolean masks."""

    def __init__(self) -> None:
        super().__init__()
        self.visual = Qwen3VLVisionModel(Qwen3VLVisionConfig(**asdict(ARCHITECTURE.vision)))
        self.visual.to(DTYPE).load_state_dict(vision_weights())

    def encode(self, batch: Batch) -> list[tuple[Tensor, list[Tensor]]]:
        """Return (mask (B, SEQ), [features, *DeepStack layers]) for images and for videos."""
        kinds = [
            (ARCHITECTURE.image_token_id, batch.pixel_values, batch.image_grid_thw),
            (ARCHITECTURE.video_token_id, batch.pixel_values_videos, batch.video_grid_thw),
        ]
        encoded = []
        for token, pixels, grid in kinds:
            if pixels is not None:
                with exact_rotary():
                    out = self.visual(pixels, grid)
                layers = [out.pooler_output, *out.deepstack_features]
                encoded.append((batch.input_ids == token, layers))
        return encoded

    def forward(self, batch: Batch) -> Tensor:
        encoded = self.encode(batch)
        hidden = batch.text_embeddings  # (B, SEQ, HIDDEN)
        for mask, layers in encoded:
            hidden = hidden.masked_scatter(mask[..., None], layers[0])
        for i, (a, b) in enumerate(linear_weights()):
            hidden = hidden + F.linear(F.silu(F.linear(hidden, a)), b)
            for mask, layers in encoded:
                if i + 1 < len(layers):
                    added = torch.zeros_like(hidden).masked_scatter(mask[..., None], layers[i + 1])
                    hidden = hidden + added
        return loss_of(hidden.transpose(0, 1), torch.arange(SEQ))


def reference_gradients(*batches: Batch) -> dict[str, Tensor]:
    """Return the tower's gradients of the sum of the losses."""
    model = Reference()
    for one in batches:
        loss = model(one)
        if loss.requires_grad:
            loss.backward()
    return {
        name: torch.zeros_like(p) if p.grad is None else p.grad
        for name, p in model.visual.named_parameters()
    }


def relative_errors(ours: dict[str, Tensor], expected: dict[str, Tensor]) -> dict[str, float]:
    """Return each tensor's largest difference, relative to the largest value expected in it."""
    assert ours.keys() == expected.keys()
    return {
        name: ((ours[name] - want).abs().max() / want.abs().max()).item()
        for name, want in expected.items()
    }
