"""The choice of the next token, with HF's logits processors."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import GenerationConfig
from transformers.generation.logits_process import (
    LogitsProcessorList,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from mcore_qwen3vl.converters.mcore.paths import config_folder
from mcore_qwen3vl.errors import BadInput


def load_generation_config(path: str | Path) -> GenerationConfig:
    """Load the generation config of an HF checkpoint, or of a converted one's ``hf`` folder.

    The config is empty if there is no file.

    Raises:
        BadInput: the file exists and cannot be read.
    """
    folder = config_folder(Path(path))
    if not (folder / "generation_config.json").is_file():
        return GenerationConfig()
    try:
        return GenerationConfig.from_pretrained(folder)
    except (OSError, ValueError) as error:
        raise BadInput(f"{folder / 'generation_config.json'} cannot be read: {error}") from error


class Sampler:
    """A chooser of tokens, set by the checkpoint's generation config and by overrides.

    Temperature 0 is greedy; without a temperature the config's ``do_sample`` decides. The order of
    the processors and the draws are those of HF ``GenerationMixin``, so the same seed gives HF's
    tokens (on one device type, with equal logits).

    Args:
        temperature, top_p, top_k: overrides of the config; top-p 1 and top-k 0 are off.

    Raises:
        BadInput: a value is out of range, or has no effect because decoding is greedy.
    """

    def __init__(
        self,
        config: GenerationConfig,
        *,
        temperature: float | None = None,
        top_p: float | None = None,
        top_k: int | None = None,
        seed: int | None = None,
        device: torch.device | str = "cpu",
    ) -> None:
        if temperature is not None and temperature < 0:
            raise BadInput(f"temperature is {temperature}: use 0 for greedy decoding, or more.")
        if top_p is not None and not 0 < top_p <= 1:
            raise BadInput(f"top_p is {top_p}: use a probability above 0 and at most 1.")
        if top_k is not None and top_k < 0:
            raise BadInput(f"top_k is {top_k}: use 0 for no limit, or a number of tokens.")
        self.greedy = not config.do_sample if temperature is None else temperature == 0
        if self.greedy and (top_p is not None or top_k is not None):
            raise BadInput(
                "top_p and top_k have no effect on greedy decoding: set a temperature above 0."
            )
        self.processors = LogitsProcessorList()
        if (penalty := config.repetition_penalty or 1.0) != 1.0:
            self.processors.append(RepetitionPenaltyLogitsProcessor(penalty))
        if not self.greedy:
            if (divisor := _first(temperature, config.temperature, 1.0)) != 1.0:
                self.processors.append(TemperatureLogitsWarper(divisor))
            if count := _first(top_k, config.top_k, 50):
                self.processors.append(TopKLogitsWarper(count))
            if (share := _first(top_p, config.top_p, 1.0)) < 1.0:
                self.processors.append(TopPLogitsWarper(share))
        self.generator = torch.Generator(device)
        if seed is None:
            self.generator.seed()
        else:
            self.generator.manual_seed(seed)

    def choose(self, input_ids: Tensor, logits: Tensor) -> Tensor:
        """Choose the next token of each sequence.

        Args:
            input_ids: (B, S) the prompt and the tokens generated so far, padding included.
            logits: (B, V) logits of the last position.

        Returns:
            (B,) int64.
        """
        scores = self.processors(input_ids, logits.float())
        if self.greedy:
            return scores.argmax(-1)
        probabilities = scores.softmax(-1)
        return torch.multinomial(probabilities, 1, generator=self.generator).squeeze(1)


def stop_tokens(config: GenerationConfig, tokenizer: Any) -> set[int]:
    """Return the ids that end an answer: the config's, or else the tokenizer's."""
    ids = _first(config.eos_token_id, tokenizer.eos_token_id, [])
    return {ids} if isinstance(ids, int) else set(ids)


def pad_token(config: GenerationConfig, tokenizer: Any) -> int:
    """Return the id that pads answers which end before the others."""
    return _first(config.pad_token_id, tokenizer.pad_token_id, 0)


def _first(*values: Any) -> Any:
    return next(value for value in values if value is not None)
