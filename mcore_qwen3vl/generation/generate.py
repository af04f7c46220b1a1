"""Answers to conversations, from a model or a checkpoint on any layout without CP and VPP."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Literal

import torch.distributed as dist
from transformers import GenerationConfig, TextStreamer

from mcore_qwen3vl.config import Architecture
from mcore_qwen3vl.data.processor import load_processor
from mcore_qwen3vl.errors import BadInput
from mcore_qwen3vl.generation.decoding import (
    Sampler,
    decode,
    first_of,
    load_generation_config,
    pad_token,
    stop_tokens,
)
from mcore_qwen3vl.generation.prompts import Messages, Prompts, encode_prompts
from mcore_qwen3vl.inference import CheckedModel, ModelRequest, on_all_ranks
from mcore_qwen3vl.model.qwen3vl import Qwen3VLModel

Stream = Callable[[int, str], None]
"""A function that gets the number of a conversation and the text that was added to its answer."""

MAX_NEW_TOKENS = 128


@dataclass(frozen=True)
class Generation:
    """One answer."""

    text: str  # without special tokens
    token_ids: list[int]  # up to and including the stop token
    prompt_tokens: int
    finish_reason: Literal["stop", "length"]


def generate(
    models: Qwen3VLModel | Sequence[Qwen3VLModel],
    processor: Any,
    conversations: Sequence[Messages] | Prompts,
    *,
    max_new_tokens: int | None = None,
    temperature: float | None = None,
    top_p: float | None = None,
    top_k: int | None = None,
    seed: int | None = None,
    stream: Stream | None = None,
    generation_config: GenerationConfig | None = None,
) -> list[Generation]:
    """Answer a batch of conversations; a collective of all ranks, with equal arguments on each.

    Every data-parallel replica answers all conversations, so that the ranks of an expert-parallel
    group take the same steps. One rank chooses the tokens and broadcasts them.

    Args:
        conversations: conversations of any lengths, which are padded on the left, or the result of
            :func:`mcore_qwen3vl.generation.prompts.encode_prompts` for them.
        max_new_tokens: default: the generation config's, or else :data:`MAX_NEW_TOKENS`.
        stream: function that is called as answers grow, on every rank that passes one.
        generation_config: stop tokens and defaults of sampling, from
            :func:`mcore_qwen3vl.generation.load_generation_config`.

    Returns:
        The answers in the order of the conversations, on every rank.

    Raises:
        BadInput: the layout has VPP or CP, a value is out of range, media cannot be read, or a
            prompt is too long.
    """
    model = _only_chunk(models)
    prompts = conversations
    if not isinstance(prompts, Prompts):
        multiple = model.pg_collection.tp.size() if model.config.sequence_parallel else 1
        prompts = encode_prompts(model.architecture, processor, prompts, multiple_of=multiple)
    config = generation_config or GenerationConfig()
    sampler = Sampler(
        config,
        temperature=temperature,
        top_p=top_p,
        top_k=top_k,
        seed=seed,
        device=next(model.parameters()).device,
    )
    limit = first_of(max_new_tokens, config.max_new_tokens, MAX_NEW_TOKENS)
    check_lengths(model.architecture, prompts, limit)
    streamers = [_Streamer(processor.tokenizer, i, stream) for i in range(len(prompts.lengths))]
    stop = stop_tokens(config, processor.tokenizer)
    answers = decode(
        model,
        prompts,
        sampler,
        max_new_tokens=limit,
        stop=stop,
        pad=pad_token(config, processor.tokenizer),
        streamers=streamers if stream else [],
    )
    return [
        Generation(
            processor.tokenizer.decode(ids, skip_special_tokens=True),
            ids,
            length,
            "stop" if ids[-1] in stop else "length",
        )
        for ids, length in zip(answers, prompts.lengths, strict=True)
    ]


class _Streamer(TextStreamer):
    """HF's incremental detokeniser, which passes on whole words, for one of several answers."""

    def __init__(self, tokenizer: Any, number: int, stream: Stream | None) -> None:
        super().__init__(tokenizer, skip_special_tokens=True)
        self._number, self._stream = number, stream

    def on_finalized_text(self, text: str, stream_end: bool = False) -> None:
        if text and self._stream is not None:
            self._stream(self._number, text)


def _only_chunk(models: Qwen3VLModel | Sequence[Qwen3VLModel]) -> Qwen3VLModel:
    chunks = list(models) if isinstance(models, Sequence) else [models]
    if len(chunks) != 1:
        raise BadInput(
            f"This rank holds {len(chunks)} virtual pipeline chunks; generation takes one prompt "
            "batch through the pipeline at a time and gains nothing from them: load with VPP 1."
        )
    if chunks[0].pg_collection.cp.size() > 1:
        raise BadInput("Generation does not divide sequences over CP: load with CP 1.")
    return chunks[0]


def check_lengths(architecture: Architecture, prompts: Prompts, max_new_tokens: int) -> None:
    """Raise BadInput unless prompts and answers fit the model's positions."""
    if type(max_new_tokens) is not int or max_new_tokens < 1:
        raise BadInput(f"max_new_tokens is {max_new_tokens!r:.40}: ask for at least one.")
    limit, longest = architecture.max_position_embeddings, max(prompts.lengths)
    if longest + max_new_tokens > limit:
        raise BadInput(
            f"The longest prompt has {longest} tokens; with {max_new_tokens} new ones it exceeds "
            f"the model's {limit} positions. Lower max_new_tokens or shrink the images."
        )


@dataclass(frozen=True)
class Request(ModelRequest):
    """The conversations to answer, and the checkpoint.

    Attributes:
        conversations: conversations in the form of :func:`generate`.
        options: keyword arguments of :func:`generate`; only the first rank uses `stream`.
    """

    conversations: Sequence[Any]
    options: dict[str, Any] = field(default_factory=dict)


def run(request: Request, *, on_cpu: bool = False) -> list[Generation]:
    """Generate on all ranks: torchrun's if torchrun started us, otherwise ranks started here.

    Prompts are read and checked before a process starts or a weight is loaded.

    Raises:
        BadInput: the causes in :func:`generate`, no GPU, or a layout that does not fit the model.
    """
    layout, model = request.layout, CheckedModel(request, "generate")
    if layout.vpp > 1 or layout.cp > 1:
        raise BadInput(f"Generation does not use VPP and CP: drop them from {layout}.")
    options = {"generation_config": load_generation_config(model.folder), **request.options}
    config = options["generation_config"]
    processor = load_processor(model.folder)
    multiple = layout.tp if layout.sp else 1
    prompts = encode_prompts(
        model.architecture, processor, request.conversations, multiple_of=multiple
    )
    limit = first_of(options.get("max_new_tokens"), config.max_new_tokens, MAX_NEW_TOKENS)
    check_lengths(model.architecture, prompts, limit)
    sampling: Any = {name: options.get(name) for name in ("temperature", "top_p", "top_k")}
    Sampler(config, **sampling)  # both raise if a value cannot be used
    stop_tokens(config, processor.tokenizer)
    job = partial(_on_rank, model, processor, prompts, options)
    answers: list[Generation] = on_all_ranks(job, layout, on_cpu=on_cpu, purpose="generate")
    return answers


def _on_rank(
    model: CheckedModel, processor: Any, prompts: Prompts, options: dict[str, Any]
) -> list[Generation]:
    """Load this rank's part of the model and answer, with ``torch.distributed`` initialised."""
    if dist.get_rank():
        options = {**options, "stream": None}
    return generate(model.load(), processor, prompts, **options)
