"""A program that runs vLLM on the CPU over prompts with images and videos.

    python engine.py JOB RESULT

JOB is a JSON file with ``model``, ``options`` of ``vllm.LLM``, ``adapters`` (directories by name;
null: none) and ``prompts`` (by name, a conversation and the answer to score). RESULT gets, for each
adapter and prompt, the prompt's tokens, the greedy ones after it and, if ``score`` is true, tokens
and log-probabilities of conversation and answer. For an adapter that vLLM refuses, it gets the
error.
"""

from __future__ import annotations

import json
import sys
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
            result[name] = {
                prompt: answer(engine, asked, adapter)
                | (score(engine, asked, adapter) if job["score"] else {})
                for prompt, asked in job["prompts"].items()
            }
        except ValueError as error:
            result[name] = str(error)
    Path(result_file).write_text(json.dumps(result), "utf-8")


def answer(engine: Any, prompt: dict[str, Any], adapter: Any) -> dict[str, Any]:
    """Return the tokens of the prompt and the greedy ones after it."""
    from vllm import SamplingParams

    greedy = SamplingParams(temperature=0, max_tokens=NEW_TOKENS)
    (output,) = engine.chat(prompt["conversation"], greedy, lora_request=adapter, use_tqdm=False)
    return {
        "prompt": list(output.prompt_token_ids),
        "answer": list(output.outputs[0].token_ids),
    }


def score(engine: Any, prompt: dict[str, Any], adapter: Any) -> dict[str, Any]:
    """Return tokens and log-probabilities of conversation and answer."""
    from vllm import SamplingParams

    scoring = SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=0)
    whole = [*prompt["conversation"], {"role": "assistant", "content": prompt["answer"]}]
    (output,) = engine.chat(
        whole, scoring, lora_request=adapter, use_tqdm=False, add_generation_prompt=False
    )
    tokens = output.prompt_token_ids
    # The first token has no log-probability, because nothing comes before it.
    pairs = zip(tokens[1:], output.prompt_logprobs[1:], strict=True)
    return {
        "token_ids": list(tokens),
        "log_probs": [float(found[token].logprob) for token, found in pairs],
    }


if __name__ == "__main__":
    main(*sys.argv[1:])
