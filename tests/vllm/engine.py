"""A program that runs vLLM on the CPU over prompts with images and videos.

    python engine.py JOB RESULT

JOB is a JSON file with ``model``, ``options`` of ``vllm.LLM``, ``adapters`` (directories by name;
null: none) and ``prompts`` (by name, a conversation and the answer to score). RESULT gets, for each
adapter and prompt, the prompt's tokens, the greedy ones after it with their log-probabilities and,
if ``score`` is true, tokens and log-probabilities of conversation and answer. Where vLLM decodes
speculatively, it gets the drafts too. For an adapter that vLLM refuses, it gets the error. Prompts
are asked one by one unless ``together`` is true.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

NEW_TOKENS = 16


def main(job_file: str, result_file: str) -> None:
    import vllm
    from vllm.lora.request import LoRARequest

    job = json.loads(Path(job_file).read_text("utf-8"))
    usual = {
        "dtype": "float32",
        "enforce_eager": True,
        "max_model_len": 1024,
        "max_num_batched_tokens": 1024,
        "max_num_seqs": 4,
        "allowed_local_media_path": "/",
        "limit_mm_per_prompt": {"image": 3, "video": 1},
    }
    engine = vllm.LLM(job["model"], **usual | job["options"])
    result: dict[str, Any] = {}
    for number, (name, path) in enumerate(job["adapters"].items(), 1):
        adapter = None if path is None else LoRARequest(name, number, path)
        try:
            if adapter is not None:  # a refusal in the midst of a request would leave it waiting
                engine.llm_engine.add_lora(adapter)
            # One by one: where its tower is adapted, vLLM 0.32 fails on the CPU when it is given
            # pictures and a video to encode together.
            names = list(job["prompts"])
            found: dict[str, Any] = {}
            for group in [names] if job["together"] else [[one] for one in names]:
                asked = [job["prompts"][one] for one in group]
                for one, given in zip(group, answer(engine, asked, adapter), strict=True):
                    found[one] = given
                if job["score"]:
                    for one, scored in zip(group, score(engine, asked, adapter), strict=True):
                        found[one] |= scored
            result[name] = found
        except ValueError as error:
            result[name] = str(error)
    Path(result_file).write_text(json.dumps(result), "utf-8")


def answer(engine: Any, prompts: list[dict[str, Any]], adapter: Any) -> list[dict[str, Any]]:
    """Return the tokens of each prompt, and the greedy ones after it.

    The drafts are those of all prompts: one list of tokens for each prompt and step.
    """
    from vllm import SamplingParams

    greedy = SamplingParams(temperature=0, max_tokens=NEW_TOKENS, logprobs=0)
    with drafts_of(engine) as drafts:
        outputs = engine.chat(
            [prompt["conversation"] for prompt in prompts],
            greedy,
            lora_request=adapter,
            use_tqdm=False,
        )
    return [
        {
            "prompt": list(output.prompt_token_ids),
            "answer": list(output.outputs[0].token_ids),
            "answer_log_probs": log_probs(output.outputs[0].token_ids, output.outputs[0].logprobs),
            "drafts": drafts,
        }
        for output in outputs
    ]


@contextmanager
def drafts_of(engine: Any) -> Iterator[list[list[int]]]:
    """Collect what the model's MTP layer drafts: after each step, some tokens a request."""
    executor, drafts = engine.llm_engine.model_executor, []
    take = executor.take_draft_token_ids

    def taken() -> Any:
        drafted = take()
        if drafted is not None:
            drafts.extend(drafted.draft_token_ids)
        return drafted

    executor.take_draft_token_ids = taken
    try:
        yield drafts
    finally:
        del executor.take_draft_token_ids


def score(engine: Any, prompts: list[dict[str, Any]], adapter: Any) -> list[dict[str, Any]]:
    """Return tokens and log-probabilities of each conversation with its answer."""
    from vllm import SamplingParams

    scoring = SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=0)
    outputs = engine.chat(
        [
            [*prompt["conversation"], {"role": "assistant", "content": prompt["answer"]}]
            for prompt in prompts
        ],
        scoring,
        lora_request=adapter,
        use_tqdm=False,
        add_generation_prompt=False,
    )
    return [
        {
            "token_ids": list(output.prompt_token_ids),
            # The first token has no log-probability, because nothing comes before it.
            "log_probs": log_probs(output.prompt_token_ids[1:], output.prompt_logprobs[1:]),
        }
        for output in outputs
    ]


def log_probs(tokens: Any, found: Any) -> list[float]:
    """Return the log-probability of each token."""
    return [float(one[token].logprob) for token, one in zip(tokens, found, strict=True)]


if __name__ == "__main__":
    main(*sys.argv[1:])
