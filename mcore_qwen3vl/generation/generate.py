"""Answers to conversations, of a model or a checkpoint: prefill, then decode with a KV cache.

It runs on any layout without CP and VPP.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Literal

import torch
import torch.distributed as dist
import torch.nn.functional as F
from megatron.core.inference.contexts import StaticInferenceContext
from megatron.core.inference.utils import InferenceMode
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.transformer.utils import set_model_to_sequence_parallel
from torch import Tensor
from transformers import GenerationConfig, TextStreamer

from mcore_qwen3vl.config import Architecture
from mcore_qwen3vl.data.encoding.rendering import Rendered
from mcore_qwen3vl.data.processor import load_processor
from mcore_qwen3vl.errors import BadInput
from mcore_qwen3vl.generation.prompts import Messages, Prompts, encode_prompts
from mcore_qwen3vl.generation.sampling import (
    Sampler,
    first_given,
    load_generation_config,
    stop_tokens,
)
from mcore_qwen3vl.inference import CheckedModel, ModelRequest, on_all_ranks
from mcore_qwen3vl.model.decoder.attention import TorchAttention
from mcore_qwen3vl.model.qwen3vl import Qwen3VLModel

Stream = Callable[[int, str], None]
"""A function that gets the number of a conversation and the text added to its answer."""

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
    conversations: Sequence[Messages | Rendered] | Prompts,
    *,
    max_new_tokens: int | None = None,
    temperature: float | None = None,
    top_p: float | None = None,
    top_k: int | None = None,
    seed: int | None = None,
    stream: Stream | None = None,
    chat_template_kwargs: Mapping[str, Any] | None = None,
    generation_config: GenerationConfig | None = None,
) -> list[Generation]:
    """Answer a batch of conversations; a collective of all ranks, with equal arguments on each.

    Every data-parallel replica answers all conversations, so that the ranks of an expert-parallel
    group take the same steps. One rank chooses the tokens and broadcasts them.

    Args:
        conversations: conversations of any lengths, padded on the left as
            :func:`.prompts.process_conversations` says, or what :func:`encode_prompts` made of
            them.
        max_new_tokens: default: the generation config's, or else :data:`MAX_NEW_TOKENS`.
        stream: function to call as answers grow, on every rank that passes one.
        chat_template_kwargs: arguments of the chat template, for conversations.
        generation_config: stop tokens and defaults of sampling, from
            :func:`load_generation_config`.

    Returns:
        The answers in the order of the conversations, on every rank.

    Raises:
        BadInput: the layout has VPP or CP, a value is out of range, media cannot be read, or a
            prompt is too long.
    """
    model = _require_single_chunk(models)
    prompts = conversations
    if not isinstance(prompts, Prompts):
        multiple = model.pg_collection.tp.size() if model.config.sequence_parallel else 1
        prompts = encode_prompts(
            model.architecture,
            processor,
            prompts,
            multiple_of=multiple,
            chat_template_kwargs=chat_template_kwargs,
        )
    config = generation_config or GenerationConfig()
    sampler = Sampler(
        config,
        temperature=temperature,
        top_p=top_p,
        top_k=top_k,
        seed=seed,
        device=next(model.parameters()).device,
    )
    limit = first_given(max_new_tokens, config.max_new_tokens, MAX_NEW_TOKENS)
    check_lengths(model.architecture, prompts, limit)
    tokenizer = processor.tokenizer
    streamers = []
    if stream is not None:
        streamers = [_Streamer(tokenizer, i, stream) for i in range(len(prompts.lengths))]
    stop = stop_tokens(config, tokenizer)
    answers = prefill_and_generate(
        model,
        prompts,
        sampler,
        max_new_tokens=limit,
        stop=stop,
        pad=first_given(config.pad_token_id, tokenizer.pad_token_id, 0),
        streamers=streamers,
    )
    return [
        Generation(
            tokenizer.decode(ids, skip_special_tokens=True),
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


def _require_single_chunk(models: Qwen3VLModel | Sequence[Qwen3VLModel]) -> Qwen3VLModel:
    """Return this rank's only chunk; raise BadInput for a layout with VPP or CP."""
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
class GenerationRequest(ModelRequest):
    """The conversations to answer, and the checkpoint.

    Attributes:
        conversations: conversations in the form of :func:`generate`.
        chat_template_kwargs: arguments of the chat template.
        options: keyword arguments of :func:`generate`; only the first rank uses `stream`.
        processor: the checkpoint's processor, if it has been loaded.
    """

    conversations: Sequence[Any]
    chat_template_kwargs: Mapping[str, Any] | None = None
    processor: Any = None
    options: dict[str, Any] = field(default_factory=dict)


def generate_on_all_ranks(request: GenerationRequest, *, on_cpu: bool = False) -> list[Generation]:
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
    processor = request.processor or load_processor(model.folder)
    multiple = layout.tp if layout.sp else 1
    prompts = encode_prompts(
        model.architecture,
        processor,
        request.conversations,
        multiple_of=multiple,
        chat_template_kwargs=request.chat_template_kwargs,
    )
    limit = first_given(options.get("max_new_tokens"), config.max_new_tokens, MAX_NEW_TOKENS)
    check_lengths(model.architecture, prompts, limit)
    sampling: Any = {name: options.get(name) for name in ("temperature", "top_p", "top_k")}
    # Neither result is used: both raise here, before ranks start, if a value cannot be used.
    Sampler(config, **sampling)
    stop_tokens(config, processor.tokenizer)
    job = partial(_generate_on_rank, model, processor, prompts, options)
    answers: list[Generation] = on_all_ranks(job, layout, on_cpu=on_cpu, purpose="generate")
    return answers


def _generate_on_rank(
    model: CheckedModel, processor: Any, prompts: Prompts, options: dict[str, Any]
) -> list[Generation]:
    """Load this rank's part of the model and answer, with ``torch.distributed`` initialised."""
    if dist.get_rank():
        options = {**options, "stream": None}
    return generate(model.load(), processor, prompts, **options)


def prefill_and_generate(
    model: Qwen3VLModel,
    prompts: Prompts,
    sampler: Sampler,
    *,
    max_new_tokens: int,
    stop: set[int],
    pad: int,
    streamers: Sequence[TextStreamer] = (),
) -> list[list[int]]:
    """Prefill, then decode one token a step until every answer has stopped.

    `stop` are the ids that end an answer, and `pad` follows an ended answer.

    Returns:
        The ids of each answer, up to and including the one that ends it.
    """
    answers: list[list[int]] = [[] for _ in prompts.lengths]
    stopped = [False for _ in answers]
    with inference(model):
        cache = CachedModel(model, prompts, max_new_tokens)
        source = _choosing_rank(model, cache.device)
        sequences = prompts.input_ids.to(cache.device)  # (B, S + generated)
        logits = cache.prefill()
        for step in range(max_new_tokens):
            tokens = _choose_and_broadcast(sampler, sequences, logits, source, cache.device)
            # An answer that has ended goes on as padding, until all have.
            tokens = tokens.where(~torch.tensor(stopped, device=cache.device), pad)
            sequences = torch.cat([sequences, tokens[:, None]], dim=1)
            for i, token in enumerate(tokens.tolist()):
                if stopped[i]:
                    continue
                answers[i].append(token)
                stopped[i] = token in stop
                if streamers:
                    streamers[i].put(torch.tensor([token]))
                    if stopped[i]:
                        streamers[i].end()
            if all(stopped) or step == max_new_tokens - 1:
                break
            logits = cache.decode(tokens)
    for streamer, ended in zip(streamers, stopped, strict=False):
        if not ended:
            streamer.end()
    return answers


def _choosing_rank(model: Qwen3VLModel, device: torch.device) -> int:
    """Return the first rank that holds the logits."""
    rank = dist.get_rank() if model.post_process else dist.get_world_size()
    lowest = torch.tensor(rank, device=device)
    dist.all_reduce(lowest, op=dist.ReduceOp.MIN)
    return int(lowest)


def _choose_and_broadcast(
    sampler: Sampler, sequences: Tensor, logits: Tensor | None, source: int, device: torch.device
) -> Tensor:
    """Return the next tokens, (B,) int64, which rank `source` chooses and broadcasts."""
    if dist.get_rank() == source:
        assert logits is not None
        tokens = sampler.choose(sequences, logits)
    else:
        tokens = torch.empty(len(sequences), dtype=torch.int64, device=device)
    dist.broadcast(tokens, source)
    return tokens


class CachedModel:
    """A model chunk and the cache of one batch of prompts.

    The cache is mcore's ``StaticInferenceContext``. For this rank's heads it holds each layer's
    rotated keys and its values, or the state of its gated delta net. Every rank of the layout must
    make the same calls. Only :meth:`prefill` uses images.
    """

    def __init__(self, model: Qwen3VLModel, prompts: Prompts, max_new_tokens: int) -> None:
        batch_size, length = prompts.input_ids.shape
        self.model = model
        self.device = next(model.parameters()).device
        self._context = StaticInferenceContext(batch_size, length + max_new_tokens)
        self._prompts = prompts
        self._mask = None
        if not prompts.attention_mask.all():  # allocated once: each decoding step passes a view
            mask = F.pad(prompts.attention_mask, (0, max_new_tokens), value=1)
            self._mask = mask.to(self.device)
        self._position = prompts.next_position.to(self.device)  # (B,) the next token's position

    def prefill(self) -> Tensor | None:
        """Run the prompts; return the next token's logits (B, V), on the last stage (else None)."""
        prompts = self._prompts
        visual = prompts.visual
        if visual is not None and self.model.pre_process:
            visual = visual.to(self.device)
        return self._run_micro_batch(
            prompts.input_ids.to(self.device), prompts.position_ids.to(self.device), visual=visual
        )

    def decode(self, tokens: Tensor) -> Tensor | None:
        """Run one more token (B,) of each sequence; return logits as :meth:`prefill` does."""
        self._context.enable_decode_mode()
        position_ids = self._position[:, None].expand(3, -1, 1)  # (3, B, 1)
        self._position = self._position + 1  # not in place: `position_ids` is a view of it
        with _without_sequence_parallel(self.model):  # one token cannot be divided over TP
            return self._run_micro_batch(tokens[:, None].to(self.device), position_ids)

    def _run_micro_batch(
        self, input_ids: Tensor, position_ids: Tensor, **inputs: Any
    ) -> Tensor | None:
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
            stack.enter_context(_using_torch_attention(model))
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
def _using_torch_attention(model: Qwen3VLModel) -> Iterator[None]:
    """Replace Transformer Engine's attention, which takes no left padding, with SDPA."""
    modules = [layer.self_attention for layer in model.decoder.layers]
    attentions = [module for module in modules if hasattr(module, "core_attention")]
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
