"""The model with the signature that VERL calls, which passes padded rows and no position ids."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.tensor_parallel.mappings import gather_from_sequence_parallel_region
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor, nn

from mcore_qwen3vl.data.encoding.batch import mrope_position_ids
from mcore_qwen3vl.errors import BadInput
from mcore_qwen3vl.labels import ONE_SCORE
from mcore_qwen3vl.model.head import Head, ScoreHead, token_log_probs
from mcore_qwen3vl.model.inputs import visual_inputs
from mcore_qwen3vl.model.qwen3vl import Qwen3VLModel, TaskModel


@dataclass
class Likelihood:
    """The output that VERL's fused forward reads: (1, T / cp) float32 values of each position."""

    log_probs: Tensor  # of the labels
    entropy: Tensor | None  # None: it was not asked for


class PolicyModel(Qwen3VLModel):
    """A model for VERL's ``gptmodel_forward_model_engine`` and the fused variant of it."""

    wants_entropy = True
    """Whether the next fused forward pass returns entropies; VERL's own call does not say."""

    def forward(  # type: ignore[override]
        self,
        input_ids: Tensor,
        attention_mask: Tensor,
        position_ids: Tensor | None = None,
        packed_seq_params: PackedSeqParams | None = None,
        *,
        pixel_values: Tensor | None = None,
        image_grid_thw: Tensor | None = None,
        pixel_values_videos: Tensor | None = None,
        video_grid_thw: Tensor | None = None,
        labels: Tensor | None = None,
        output_processor: Any = None,
        output_processor_context: Any = None,
        **kwargs: Any,
    ) -> Any:
        """Run one micro-batch of B samples of at most S tokens, the same on every rank.

        Args:
            input_ids: (B, S), padded on the right.
            attention_mask: (B, S) bool, True for tokens.
            position_ids: ignored; three-axis ids are computed from `input_ids` and the grids.
            packed_seq_params: the bounds of each sample, with its padding, in a pack of T tokens;
                None: no packing.
            pixel_values, image_grid_thw: pixels and grids of all images, in the order of the
                samples.
            pixel_values_videos, video_grid_thw: pixels and grids of all videos.
            labels: (1, T / cp), this CP rank's next tokens; used with `output_processor`.
            output_processor: VERL's fused kernel, whose presence asks for log-probabilities instead
                of logits. The chunked head computes them, and the kernel is not called.
            output_processor_context: an object with the `temperature`.

        Returns:
            Hidden states before the last stage; on the last, logits (1, T / cp, V / tp), or
            (B, S / cp, V / tp) without packing, or a :class:`Likelihood`.

        Raises:
            BadInput: pixels, grids and placeholders do not fit together.
        """
        device = input_ids.device
        ids, valid = input_ids.cpu(), attention_mask.cpu()
        bounds = None
        if packed_seq_params is not None:
            bounds = packed_seq_params.cu_seqlens_q_padded.cpu()
            ids, valid = pack(ids, valid, bounds)
        images = None if image_grid_thw is None else image_grid_thw.cpu()
        videos = None if video_grid_thw is None else video_grid_thw.cpu()
        positions, _ = mrope_position_ids(self.architecture, ids, images, videos, valid, bounds)
        visual = visual_inputs(
            self.architecture, ids, pixel_values, images, pixel_values_videos, videos
        )
        if output_processor is not None:
            kwargs |= {
                "output_processor": self._likelihood_processor(labels),
                "output_processor_context": output_processor_context,
            }
        return super().forward(
            ids.to(device),
            positions.to(device),
            valid.to(device),
            visual=visual and visual.to(device),
            packed_seq_params=packed_seq_params,
            **kwargs,
        )

    def _likelihood_processor(self, labels: Tensor | None) -> Any:
        """Return the ``output_processor`` that computes a :class:`Likelihood` on the last stage."""
        if not self.losses_in_chunks:
            raise BadInput(
                "use_fused_kernels computes log-probabilities in chunks of logits, which "
                "head_chunk=0 and defer_embedding_wgrad_compute turn off: drop those, or set "
                "use_fused_kernels=False."
            )

        def process(
            *, hidden_states: Tensor, output_layer: Head, output_weight: Any, context: Any, **_: Any
        ) -> Likelihood:
            assert labels is not None  # VERL passes them to all stages
            reduce = partial(
                token_log_probs,
                targets=labels,
                temperature=context.temperature,
                entropy=self.wants_entropy,
            )
            return Likelihood(*output_layer(hidden_states, output_weight, reduce=reduce))

        return process


class ValueModel(PolicyModel, TaskModel):
    """A critic, which returns one value a token instead of logits."""

    head_labels = ONE_SCORE

    def build_head(self, like: Tensor) -> nn.Module:
        return ValueHead(self.config, self.seed, group=self.pg_collection.tp, like=like)


class ValueHead(ScoreHead):
    """A head with one label for the states of all tokens. Source: Megatron-Bridge's, VERL's own."""

    def __init__(self, config: TransformerConfig, seed: int, *, group: Any, like: Tensor) -> None:
        super().__init__(config, 1, seed, like=like)
        self._group, self._sequence_parallel = group, config.sequence_parallel
        self.weight.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]

    def forward(  # type: ignore[override]
        self, input_: Tensor, weight: None = None, runtime_gather_output: bool | None = None
    ) -> tuple[Tensor, None]:
        """Map (s_local, B, H) to values (s, B, 1) float32; the second output, a bias, is None."""
        values = nn.functional.linear(input_, self.weight).float()
        if self._sequence_parallel:
            values = gather_from_sequence_parallel_region(
                values, tensor_parallel_output_grad=False, group=self._group
            )
        return values, None


def pack(ids: Tensor, valid: Tensor, bounds: Tensor) -> tuple[Tensor, Tensor]:
    """Pack padded rows (B, S) into one: ids (1, T), 0 at padding, and a mask, True for tokens.

    Args:
        valid: (B, S) bool, True for tokens, which come first in their row.
        bounds: (B + 1,) starts of the samples in the pack, then the pack's length T.
    """
    packed = ids.new_zeros(1, int(bounds[-1]))
    tokens = torch.zeros_like(packed, dtype=torch.bool)
    for row, length, start in zip(ids, valid.sum(1).tolist(), bounds.tolist(), strict=False):
        packed[0, start : start + length] = row[:length]
        tokens[0, start : start + length] = True
    return packed, tokens
