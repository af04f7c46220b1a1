"""How the next token is chosen, and which tokens end an answer: HF's ``generation_config.json``."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any, NamedTuple

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

from mcore_qwen3vl.config import read_config_file, text_section
from mcore_qwen3vl.converters.hf.config_file import dumps
from mcore_qwen3vl.converters.identify import identify
from mcore_qwen3vl.data.processor import load_processor
from mcore_qwen3vl.errors import BadInput
from mcore_qwen3vl.json_and_yaml import read_object


def load_generation_config(path: str | Path) -> GenerationConfig:
    """Load the generation config of a checkpoint of either kind; raise BadInput for a broken one.

    Without a file it has what ``config.json`` says of it, as in transformers: the tokens that end
    an answer.
    """
    folder = identify(path).config()
    if not (folder / "generation_config.json").is_file():
        if not (folder / "config.json").is_file():
            return GenerationConfig()
        text = text_section(read_config_file(folder))
        return GenerationConfig(eos_token_id=text.get("eos_token_id"))
    try:
        return GenerationConfig.from_pretrained(folder)
    except (OSError, ValueError) as error:
        raise BadInput(f"{folder / 'generation_config.json'} cannot be read: {error}") from error


class TurnEnd(NamedTuple):
    """The token with which the chat template ends a turn of the assistant."""

    token: str
    id: int


def unlisted_turn_end(folder: Path) -> TurnEnd | None:
    """Return the token that ends a turn if it ends no answer of the checkpoint; None if it does.

    A base model's answers end with ``<|endoftext|>``. It is trained on its chat template, whose
    answers end with another token. None too for a template whose turns do not end with a token.
    BadInput is raised if the processor or the generation config cannot be read.
    """
    processor = load_processor(folder)
    answer = "zQ0Qz"  # text that no template has, to find what follows it
    turns = [{"role": "user", "content": "?"}, {"role": "assistant", "content": answer}]
    try:
        text = processor.apply_chat_template(turns, tokenize=False)
    except Exception:  # of Jinja or Python: the template wants other messages
        return None
    tail = text.rpartition(answer)[2].strip()
    ids = processor.tokenizer.get_added_vocab()
    stop = stop_tokens(load_generation_config(folder), processor.tokenizer)
    return None if ids.get(tail) in (None, *stop) else TurnEnd(tail, ids[tail])


def config_with_turn_end(folder: Path) -> dict[str, bytes]:
    """Return ``generation_config.json`` with the token that ends a turn, by name; empty if it has.

    It raises what :func:`unlisted_turn_end` does.
    """
    end, file = unlisted_turn_end(folder), folder / "generation_config.json"
    if end is None or not file.is_file():
        return {}
    content = read_object(file, file.name, "")
    ids = first_given(content.get("eos_token_id"), [])
    ids = ids if isinstance(ids, list) else [ids]
    return {file.name: dumps({**content, "eos_token_id": [*ids, end.id]})}


class Sampler:
    """A chooser of tokens, set by the checkpoint's generation config and by overrides.

    Temperature 0 is greedy; without a temperature the config's ``do_sample`` decides; top-p 1 and
    top-k 0 are off. The order of the processors and the draws are those of HF ``GenerationMixin``,
    so the same seed gives HF's tokens (on one device type, with equal logits).

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
        # The comparison is false for NaN too.
        if temperature is not None and not 0 <= temperature < math.inf:
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
        try:
            if (penalty := config.repetition_penalty or 1.0) != 1.0:
                self.processors.append(RepetitionPenaltyLogitsProcessor(penalty))
            if not self.greedy:
                # Hugging Face's class refuses an int, such as 2.
                value = float(temperature) if temperature is not None else config.temperature
                if (divisor := first_given(value, 1.0)) != 1.0:
                    self.processors.append(TemperatureLogitsWarper(divisor))
                if count := first_given(top_k, config.top_k, 50):
                    self.processors.append(TopKLogitsWarper(count))
                if (share := first_given(top_p, config.top_p, 1.0)) != 1.0:
                    self.processors.append(TopPLogitsWarper(share))
        except (ValueError, TypeError) as error:
            raise BadInput(f"generation_config.json cannot be used: {error}.") from None
        self.generator = torch.Generator(device)
        if seed is None:
            self.generator.seed()
        else:
            self.generator.manual_seed(seed)

    def choose(self, input_ids: Tensor, logits: Tensor) -> Tensor:
        """Choose the next token of each sequence, (B,) int64.

        `input_ids` are the prompts and what followed, padding included, (B, S); `logits` are those
        of the last position, (B, V).
        """
        scores = self.processors(input_ids, logits.float())
        if self.greedy:
            return scores.argmax(-1)
        probabilities = scores.softmax(-1)
        return torch.multinomial(probabilities, 1, generator=self.generator).squeeze(1)


def stop_tokens(config: GenerationConfig, tokenizer: Any) -> set[int]:
    """Return the ids that end an answer: the config's, or else the tokenizer's."""
    ids = first_given(config.eos_token_id, tokenizer.eos_token_id, [])
    ids = ids if isinstance(ids, list) else [ids]
    if any(type(token) is not int for token in ids):
        raise BadInput(f"eos_token_id of generation_config.json is {ids!r:.80}: ids are needed.")
    return set(ids)


def first_given(*values: Any) -> Any:
    """Return the first value that is not None."""
    return next(value for value in values if value is not None)
