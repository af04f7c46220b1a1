"""Generation of text from images, videos and prompts: prefill, then decode with a KV cache.

It answers conversations with a model or a checkpoint, on any layout without CP and VPP. Prompts are
a padded batch of them, made with the checkpoint's own processor. Tokens are chosen with HF's logits
processors.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from megatron.core.inference.contexts import StaticInferenceContext
from megatron.core.inference.utils import InferenceMode
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.transformer.utils import set_model_to_sequence_parallel
from PIL import Image, ImageOps
from torch import Tensor
from transformers import GenerationConfig, TextStreamer, image_utils
from transformers.generation.logits_process import (
    LogitsProcessorList,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)
from transformers.video_utils import VideoMetadata

from mcore_qwen3vl.config import Architecture, read_config_file, text_section
from mcore_qwen3vl.converters.hf.config_file import dumps
from mcore_qwen3vl.converters.identify import identify
from mcore_qwen3vl.data.encoding.batch import mrope_position_ids
from mcore_qwen3vl.data.encoding.planning import Rendered, Renderer
from mcore_qwen3vl.data.processor import (
    load_processor,
    require_fitting,
    takes_media,
    template_limit,
    template_variables,
)
from mcore_qwen3vl.data.records.media import TAG, Media, MediaFolder, load_image, to_rgb
from mcore_qwen3vl.data.records.parse import read_messages, read_observed
from mcore_qwen3vl.data.records.reading import BadSample, parse_template_kwargs
from mcore_qwen3vl.data.records.video import load_frames, probe_video, sample_frames
from mcore_qwen3vl.errors import BadInput
from mcore_qwen3vl.files import read_object
from mcore_qwen3vl.inference import CheckedModel, ModelRequest, on_all_ranks
from mcore_qwen3vl.model.decoder.attention import TorchAttention
from mcore_qwen3vl.model.inputs import VisualInputs, visual_inputs
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
        conversations: conversations of any lengths, which are padded on the left, see
            :func:`process_conversations`, or the result of :func:`encode_prompts` for them.
        max_new_tokens: default: the generation config's, or else :data:`MAX_NEW_TOKENS`.
        stream: function that is called as answers grow, on every rank that passes one.
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

    `stop` are the ids that end an answer, and `pad` follows an answer that has ended.

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

    A base model's answers end with ``<|endoftext|>``, and those of its chat template, which it is
    trained on, with another token. None too for a template whose turns do not end with a token.
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
        try:
            if (penalty := config.repetition_penalty or 1.0) != 1.0:
                self.processors.append(RepetitionPenaltyLogitsProcessor(penalty))
            if not self.greedy:
                if (divisor := first_given(temperature, config.temperature, 1.0)) != 1.0:
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


Messages = Sequence[Mapping[str, Any]]

_URL_SECONDS = 60.0
_HERE = MediaFolder(Path(), {})  # paths are relative to the working directory
_NO_SIZE = {"shortest_edge": 0, "longest_edge": 2**62}


@dataclass(frozen=True)
class Prompts:
    """B prompts, padded on the left to S tokens. All tensors are on the CPU."""

    input_ids: Tensor  # (B, S) int64
    attention_mask: Tensor  # (B, S) int64, 0 for padding
    position_ids: Tensor  # (3, B, S) int64
    next_position: Tensor  # (B,) int64: position, on all axes, of the first token to generate
    visual: VisualInputs | None

    @property
    def lengths(self) -> list[int]:
        """The number of tokens in each prompt, without padding."""
        return self.attention_mask.sum(1).tolist()


def user_turns(
    texts: Sequence[str], images: Sequence[Any] = (), videos: Sequence[Any] = ()
) -> list[Messages]:
    """Make a conversation of one user turn for each text.

    Without tags, all the images and videos come before every text. If texts have ``<image>`` and
    ``<video>`` tags, each tag takes the next image or video.

    Raises:
        BadInput: there are more or fewer tags than images or videos.
    """
    media = {"image": list(images), "video": list(videos)}
    tags = [tag for text in texts for tag in TAG.findall(text)]
    if not tags:
        first = [{"type": kind, kind: medium} for kind, many in media.items() for medium in many]
        contents = [[*first, {"type": "text", "text": text}] for text in texts]
    else:
        for kind, many in media.items():
            if len(many) != tags.count(kind):
                raise BadInput(
                    f"The prompts hold {tags.count(kind)} <{kind}> tags and {len(many)} {kind}s "
                    f"are given: name one {kind} for each tag, or leave all tags out to put "
                    "the media before the text."
                )
        left = {kind: iter(many) for kind, many in media.items()}
        contents = [list(_split_tags(text, left)) for text in texts]
    return [[{"role": "user", "content": content}] for content in contents]


def _split_tags(text: str, left: Mapping[str, Iterator[Any]]) -> Iterator[dict[str, Any]]:
    for number, piece in enumerate(TAG.split(text)):
        if number % 2:  # the pattern's group, a kind of medium, stands between pieces of text
            yield {"type": piece, piece: next(left[piece])}
        elif piece:
            yield {"type": "text", "text": piece}


def render_prompt(
    record: Any,
    processor: Any,
    folder: MediaFolder = _HERE,
    chat_template_kwargs: Mapping[str, Any] | None = None,
) -> Rendered:
    """Render the prompt that a record's messages are, in any form that ``messages`` of data have.

    Args:
        record: a record with ``messages``, and if wanted ``tools``, ``images``, ``videos`` and
            ``chat_template_kwargs``; or its messages alone.
        folder: where the paths of images and videos begin.
        chat_template_kwargs: arguments of the chat template that the record does not give itself.

    Returns:
        The text with the generation prompt, the media, and what is not used of the record.

    Raises:
        BadInput: the record is malformed or ends with a turn of the assistant, the chat template
            refuses it or does not read an argument, or an image is to have another size.
    """
    record = {"messages": record} if isinstance(record, list) else record
    if not isinstance(record, Mapping) or "messages" not in record:
        raise BadInput("A prompt is a list of messages, or an object with the key messages.")
    arguments = parse_template_kwargs(chat_template_kwargs)
    try:
        prompt = read_observed(
            record, "messages", lambda seen: read_messages(seen, folder, prompt=True)
        )
        arguments |= prompt.chat_template_kwargs
        _require_read_arguments(processor, arguments)
        if prompt.messages[-1]["role"] == "assistant":
            raise BadSample(
                "its last message is the assistant's, so there is nothing to answer: end it with "
                "a message of the user or of a tool"
            )
        if sized := next((m for m in prompt.media if m.options.size(_NO_SIZE)), None):
            raise BadSample(
                f"pixels are given for the {sized.kind} {sized.name}; a prompt's have the "
                "processor's own size: leave min_pixels, max_pixels and total_pixels out"
            )
        # Nothing is trained. What the template leaves out is named, as servers leave it out too.
        prompt = replace(prompt, weights=[0.0] * len(prompt.messages))
        renderer = Renderer(processor, allow_dropped=True)
        with template_limit():
            return renderer.render(prompt, arguments)
    except BadSample as error:
        raise BadInput(f"The prompt cannot be used: {str(error).removesuffix('.')}.") from error


def encode_prompts(
    architecture: Architecture,
    processor: Any,
    conversations: Sequence[Messages | Rendered],
    *,
    multiple_of: int = 1,
    chat_template_kwargs: Mapping[str, Any] | None = None,
) -> Prompts:
    """Render, tokenise, load images and videos, and compute positions."""
    require_fitting(processor, architecture)
    inputs = process_conversations(
        processor,
        conversations,
        multiple_of=multiple_of,
        chat_template_kwargs=chat_template_kwargs,
    )
    return prompts_from_inputs(architecture, inputs)


def process_conversations(
    processor: Any,
    conversations: Sequence[Messages | Rendered],
    *,
    multiple_of: int = 1,
    chat_template_kwargs: Mapping[str, Any] | None = None,
) -> Mapping[str, Tensor]:
    """Process conversations with the checkpoint's processor, padded on the left.

    Args:
        conversations: the messages of each prompt, in the form that HF's chat templates take, or
            what :func:`render_prompt` made of a record. In messages, an
            image is ``{"type": "image", "image": path, URL or PIL image}``; a video is ``{"type":
            "video", "video": path, or a pair of frames (F, H, W, 3) and ``VideoMetadata``}``.
        multiple_of: number that S is rounded up to a multiple of.
        chat_template_kwargs: arguments of the chat template, such as ``enable_thinking``, for
            messages.

    Returns:
        The processor's output: tensors by name, with B rows of S tokens.

    Raises:
        BadInput: there is no conversation or no chat template, the template fails or does not read
            an argument, media cannot be read, or there are more or fewer placeholders than media.
    """
    if not conversations:
        raise BadInput("There is no conversation to answer: pass at least one.")
    if not processor.chat_template:
        raise BadInput(
            "The processor has no chat template: copy chat_template.jinja from the checkpoint's "
            "repository beside its tokenizer."
        )
    arguments = parse_template_kwargs(chat_template_kwargs)
    _require_read_arguments(processor, arguments)
    texts = [
        one.text if isinstance(one, Rendered) else _render_messages(processor, one, arguments)
        for one in conversations
    ]
    references = {kind: list(_media_references(conversations, kind)) for kind in ("image", "video")}
    if any(references.values()) and not takes_media(processor):
        raise BadInput(
            "A prompt has images or videos, and the model is a language model alone, without a "
            "vision tower: ask it in text."
        )
    images = [_load_referenced_image(part) for part in references["image"]]
    videos = [_load_referenced_video(part, processor) for part in references["video"]]
    for kind, token, media in (
        ("image", processor.image_token, images),
        ("video", processor.video_token, videos),
    ):
        placeholders = sum(text.count(token) for text in texts)
        if placeholders != len(media):
            raise BadInput(
                f"The rendered prompts hold {placeholders} placeholders {token} for {len(media)} "
                f"{kind}s: give one {kind} for each, and do not write {token} in a prompt."
            )
    try:
        return processor(
            text=texts,
            images=images or None,
            videos=[frames for frames, _ in videos] or None,
            video_metadata=[metadata for _, metadata in videos] or None,
            do_sample_frames=False,  # frames are sampled while they are decoded
            padding=True,
            padding_side="left",
            pad_to_multiple_of=multiple_of,
            return_tensors="pt",
        )
    except ValueError as error:  # a size out of the processor's range, such as a one-frame video
        raise BadInput(f"The processor cannot take these images and videos: {error}") from error


def _require_read_arguments(processor: Any, arguments: Mapping[str, Any]) -> None:
    for name in arguments.keys() - template_variables(processor):
        raise BadInput(f"The chat template does not read {name}: leave it out.")


def _render_messages(processor: Any, messages: Messages, arguments: Mapping[str, Any]) -> str:
    """Render messages in the form of HF's chat templates, with the generation prompt."""
    try:
        with template_limit():
            text: str = processor.apply_chat_template(
                list(messages), add_generation_prompt=True, **arguments
            )
    except BadInput:  # the time is up
        raise
    except Exception as error:  # the template is a program of the checkpoint's
        raise BadInput(
            f"The chat template cannot render this prompt: {type(error).__name__}: {error!s:.500}. "
            "Compare it with the template of the model that the checkpoint was made from."
        ) from error
    if not text:
        raise BadInput(
            "The chat template renders nothing of this prompt. Compare it with the "
            "template of the model that the checkpoint was made from."
        )
    return text


def prompts_from_inputs(architecture: Architecture, inputs: Mapping[str, Tensor]) -> Prompts:
    """Make prompts from the output of an HF processor, padded on the left."""
    input_ids, attention_mask = inputs["input_ids"], inputs["attention_mask"]
    image_grid, video_grid = inputs.get("image_grid_thw"), inputs.get("video_grid_thw")
    position_ids, deltas = mrope_position_ids(
        architecture, input_ids, image_grid, video_grid, attention_mask
    )
    return Prompts(
        input_ids,
        attention_mask,
        position_ids,
        next_position=attention_mask.sum(1) + deltas.squeeze(1),
        visual=visual_inputs(
            architecture,
            input_ids,
            inputs.get("pixel_values"),
            image_grid,
            inputs.get("pixel_values_videos"),
            video_grid,
        ),
    )


def _media_references(conversations: Sequence[Messages | Rendered], kind: str) -> Iterator[Any]:
    """Yield the references of all images or videos in the conversations, in order."""
    for conversation in conversations:
        if isinstance(conversation, Rendered):
            yield from (media for media in conversation.media if media.kind == kind)
            continue
        for message in conversation:
            content = message["content"]
            for part in [] if isinstance(content, str) else content:
                if part.get("type") == kind:
                    reference = next((part[k] for k in (kind, "path", "url") if k in part), None)
                    if reference is None:
                        raise BadInput(f"A message has an {kind} part without {kind!r}: {part}.")
                    yield str(reference) if isinstance(reference, Path) else reference


def _load_referenced_image(reference: Any) -> Any:
    """Return a record's image, or that at a path or URL, or a PIL image, upright and in RGB."""
    try:
        if isinstance(reference, Media):
            return load_image(reference)
        if isinstance(reference, Image.Image):
            return to_rgb(ImageOps.exif_transpose(reference))
        if isinstance(reference, str) and reference.startswith(("http://", "https://")):
            return image_utils.load_image(reference, timeout=_URL_SECONDS)
        return load_image(_HERE.resolve("image", reference))
    # PIL and transformers' HTTP library raise many types, not all of them OSError.
    except Exception as error:
        raise BadInput(f"Image {_name_of(reference)} cannot be read: {error}") from error


def _load_referenced_video(reference: Any, processor: Any) -> tuple[np.ndarray, VideoMetadata]:
    """Load frames, which the processor samples by the video's own rate and length."""
    if isinstance(reference, tuple):
        frames, metadata = reference
        if metadata.frames_indices is None:  # then these are all frames
            metadata.frames_indices = list(range(len(frames)))
        return frames, metadata

    try:
        is_media = isinstance(reference, Media)
        media = reference if is_media else _HERE.resolve("video", reference)
        metadata = probe_video(media)
        metadata.frames_indices = sample_frames(media, metadata, processor.video_processor)
        return load_frames(media, metadata.frames_indices), metadata
    except (BadSample, ValueError) as error:
        raise BadInput(f"Video {_name_of(reference)} cannot be read: {error}") from error


def _name_of(reference: Any) -> str:
    return reference.name if isinstance(reference, Media) else f"{reference!r:.120}"
