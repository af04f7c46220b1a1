"""A model with a key/value cache: one forward pass for the prompts, then one for each token."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.inference.contexts import StaticInferenceContext
from megatron.core.inference.utils import InferenceMode
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.transformer.utils import set_model_to_sequence_parallel
from torch import Tensor

from mcore_qwen3vl.generation.prompts import Prompts
from mcore_qwen3vl.model.decoder.attention import TorchAttention
from mcore_qwen3vl.model.qwen3vl import Qwen3VLModel


class CachedModel:
    """A model chunk and the cache of one batch of prompts.

    The cache is mcore's ``StaticInferenceContext``: each layer's rotated keys and its values, for
    this rank's heads. Every rank of the layout must make the same calls. Only :meth:`prefill` uses
    images.
    """

    def __init__(self, model: Qwen3VLModel, prompts: Prompts, max_new_tokens: int) -> None:
        batch_size, length = prompts.input_ids.shape
        self.model = model
        self.device = next(model.parameters()).device
        self._context = StaticInferenceContext(batch_size, length + max_new_tokens)
        self._prompts = prompts
        padded = bool((prompts.attention_mask == 0).any())
        # Allocated once: each decoding step passes a view of it.
        self._mask = (
            F.pad(prompts.attention_mask, (0, max_new_tokens), value=1).to(self.device)
            if padded
            else None
        )
        self._position = prompts.next_position.to(self.device)  # (B,) the next token's position

    def prefill(self) -> Tensor | None:
        """Run the prompts; return the next token's logits (B, V), on the last stage (else None)."""
        prompts = self._prompts
        visual = prompts.visual
        if visual is not None and self.model.pre_process:
            visual = visual.to(self.device)
        return self._forward(
            prompts.input_ids.to(self.device), prompts.position_ids.to(self.device), visual=visual
        )

    def decode(self, tokens: Tensor) -> Tensor | None:
        """Run one more token (B,) of each sequence; return logits as :meth:`prefill` does."""
        self._context.enable_decode_mode()
        position_ids = self._position[:, None].expand(3, -1, 1)  # (3, B, 1)
        self._position = self._position + 1
        with _without_sequence_parallel(self.model):  # one token cannot be divided over TP
            return self._forward(tokens[:, None].to(self.device), position_ids)

    def _forward(self, input_ids: Tensor, position_ids: Tensor, **inputs: Any) -> Tensor | None:
        """Run one micro-batch through Megatron's own schedule, which handles any pipeline split."""
        batch_size, length = input_ids.shape
        seen = self._context.sequence_len_offset + length

        def forward_step(_: Any, model: Qwen3VLModel) -> tuple[Tensor, None]:
            logits = model(
                input_ids,
                position_ids,
                None if self._mask is None else self._mask[:, :seen],
                inference_context=self._context,
                runtime_gather_output=True,
                **inputs,
            )
            return logits, None

        outputs = get_forward_backward_func()(
            forward_step_func=forward_step,
            data_iterator=None,
            model=self.model,
            num_microbatches=1,
            seq_length=length,
            micro_batch_size=batch_size,
            forward_only=True,
        )
        self._context.increment_sequence_len_offset(length)
        # Only the last position is needed. Under SP mcore keeps the last one of each rank's part.
        return outputs[0][:, -1] if outputs else None


@contextmanager
def inference(model: Qwen3VLModel) -> Iterator[None]:
    """Put the model in evaluation and mcore's inference mode, without gradients, for the block."""
    training = model.training
    model.eval()
    with ExitStack() as stack:
        stack.callback(model.train, training)
        stack.enter_context(torch.no_grad())
        stack.enter_context(InferenceMode.active())
        if model.spec == "te":
            stack.enter_context(_torch_attention(model))
        yield


@contextmanager
def _without_sequence_parallel(model: Qwen3VLModel) -> Iterator[None]:
    if not model.config.sequence_parallel:
        yield
        return
    set_model_to_sequence_parallel(model, False)
    try:
        yield
    finally:
        set_model_to_sequence_parallel(model, True)


@contextmanager
def _torch_attention(model: Qwen3VLModel) -> Iterator[None]:
    """Replace Transformer Engine's attention, which takes no left padding, with SDPA."""
    attentions = [layer.self_attention for layer in model.decoder.layers]
    kept = [attention.core_attention for attention in attentions]
    for attention in attentions:
        attention.core_attention = TorchAttention(
            model.config,
            softmax_scale=model.config.softmax_scale,
            pg_collection=model.pg_collection,
        )
    try:
        yield
    finally:
        for attention, core in zip(attentions, kept, strict=True):
            attention.core_attention = core
