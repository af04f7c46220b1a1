"""Hugging Face's Qwen3.5 on the tokens that vLLM was given and has chosen."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from mcore_qwen3vl.hf_kernels import without_gpu_kernels
from tests.generation.cases import hugging_face_inputs
from tests.training.plain_mtp import PlainMTP
from tests.vllm.conftest import Prompt


@dataclass(frozen=True)
class Following:
    """Log-probabilities (n, vocabulary), in float32, of what comes after each of n tokens."""

    next: Tensor  # the token after it
    further: Tensor  # the one after that; (n - 1, vocabulary), since it needs to know the next one


class HuggingFace:
    """The model of a checkpoint in `dtype`."""

    def __init__(self, checkpoint: Path, dtype: torch.dtype) -> None:
        from transformers import AutoModelForImageTextToText, AutoProcessor

        with without_gpu_kernels():
            # The default way through the experts refuses this model's sizes in bf16.
            self.model: Any = AutoModelForImageTextToText.from_pretrained(
                checkpoint, dtype=dtype, experts_implementation="eager"
            ).eval()
        self.processor = AutoProcessor.from_pretrained(checkpoint)
        self.further = PlainMTP(checkpoint, self.model).to(dtype).eval()

    @torch.no_grad()
    def after(self, prompt: Prompt, tokens: list[int]) -> Following:
        """Return what comes after each of `tokens`, which begin with those of the user's turn."""
        # Where the template thinks by default, a requested answer begins otherwise than a given
        # one, so only the user's turn is the same in both.
        inputs = hugging_face_inputs(
            self.processor, prompt.conversation, add_generation_prompt=False
        )
        asked = inputs["input_ids"].shape[1]
        assert tokens[:asked] == inputs["input_ids"][0].tolist()
        for name in ("attention_mask", "mm_token_type_ids"):
            filled = inputs[name].new_full((1, len(tokens) - asked), int(name == "attention_mask"))
            inputs[name] = torch.cat((inputs[name], filled), 1)
        inputs["input_ids"] = torch.tensor([tokens])
        with self._seen() as seen:
            hidden = self.model.model(**inputs).last_hidden_state
        states = hidden[0], self.further(hidden, seen["inputs_embeds"], seen["angles"])
        return Following(*(self.model.lm_head(at).float().log_softmax(-1) for at in states))

    @contextmanager
    def _seen(self) -> Iterator[dict[str, Any]]:
        """Collect what the decoder is given, and its rotary angles."""
        seen: dict[str, Any] = {}
        text = self.model.model.language_model
        hooks = (
            text.register_forward_pre_hook(
                lambda _, a, named: seen.update(named), with_kwargs=True
            ),
            text.rotary_emb.register_forward_hook(lambda _, a, out: seen.update(angles=out)),
        )
        try:
            yield seen
        finally:
            for hook in hooks:
                hook.remove()
