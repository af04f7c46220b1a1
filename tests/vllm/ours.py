"""Results of our own commands for vLLM's prompts, and how far vLLM's are from them."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mcore_qwen3vl.config import Architecture
from mcore_qwen3vl.data import load_processor
from mcore_qwen3vl.generation.generate import Generation, generate_on_all_ranks
from mcore_qwen3vl.generation.generate import GenerationRequest as Asked
from mcore_qwen3vl.generation.prompts import encode_prompts
from mcore_qwen3vl.scoring.score import ScoreRequest, score
from tests.vllm.conftest import Prompts
from tests.vllm.engine import NEW_TOKENS

TOLERANCE = 16 * 2.0**-23
"""The largest error of a log-probability, relative to the answer's largest: sixteen roundings of
float32. It is a sum of logits of that size, which vLLM's kernels add in another order than ours."""


def tokens(checkpoint: Path, prompts: Prompts) -> dict[str, list[int]]:
    """Return the tokens of each prompt, those of images and videos included."""
    architecture, processor = Architecture.from_hf(checkpoint), load_processor(checkpoint)
    found = {}
    for name, prompt in prompts.items():
        encoded = encode_prompts(architecture, processor, [prompt.conversation])
        (found[name],) = encoded.input_ids.tolist()
    return found


def scored(checkpoint: Path, prompts: Prompts, folder: Path, **options: Any) -> dict[str, Any]:
    """Return what ``score`` writes for each prompt's answer."""
    data, out = folder / "data.jsonl", folder / "scores.jsonl"
    records = [
        {"messages": [*p.conversation, {"role": "assistant", "content": p.answer}]}
        for p in prompts.values()
    ]
    data.write_text("".join(f"{json.dumps(record)}\n" for record in records), "utf-8")
    score(ScoreRequest(checkpoint, data, out, force=True, **options), on_cpu=True)
    lines = [json.loads(line) for line in out.read_text("utf-8").splitlines()]
    return dict(zip(prompts, lines, strict=True))


def answered(checkpoint: Path, prompts: Prompts, **options: Any) -> dict[str, Generation]:
    """Return the greedy answers of ``generate``."""
    greedy = {"temperature": 0.0, "max_new_tokens": NEW_TOKENS}
    conversations = [prompt.conversation for prompt in prompts.values()]
    answers = generate_on_all_ranks(
        Asked(checkpoint, conversations, options=greedy, **options), on_cpu=True
    )
    return dict(zip(prompts, answers, strict=True))


def answered_tokens(checkpoint: Path, prompts: Prompts, **options: Any) -> dict[str, list[int]]:
    """Return the tokens of :func:`answered`."""
    own = answered(checkpoint, prompts, **options)
    return {name: one.token_ids for name, one in own.items()}


def answers_of(found: dict[str, Any]) -> dict[str, list[int]]:
    """Return the tokens that vLLM answered, by prompt."""
    return {name: one["answer"] for name, one in found.items()}


@dataclass(frozen=True)
class Difference:
    """The largest difference in an answer's log-probabilities, and the scale to divide it by."""

    absolute: float
    scale: float

    @property
    def relative(self) -> float:
        return self.absolute / self.scale


def differences(found: dict[str, Any], ours: dict[str, Any]) -> dict[str, Difference]:
    """Return the difference of each prompt; check that answers have the same tokens."""
    result = {}
    for name, expected in ours.items():
        count = expected["tokens"]
        # The template ends an answer with a line break, which is not trained on.
        assert found[name]["token_ids"][-count - 1 : -1] == expected["token_ids"]
        theirs = found[name]["log_probs"][-count - 1 : -1]
        own = expected["token_log_probs"]
        largest = max(abs(a - b) for a, b in zip(theirs, own, strict=True))
        result[name] = Difference(largest, max(map(abs, own)))
    return result
