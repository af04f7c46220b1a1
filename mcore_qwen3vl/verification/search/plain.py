"""A training loop of transformers and torch alone, and a chat's tokens from its processor.

Nothing here is this package's: what it computes is what a run is compared with.
"""

from __future__ import annotations

import copy
import json
import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor
from transformers.video_utils import VideoMetadata


class NotPlain(Exception):
    """The plain loop does not know this kind of record, loss or flag."""


def load_model(folder: Path, **options: Any) -> Any:
    """Load a model with transformers: a language model alone has another class."""
    from transformers import AutoModelForCausalLM, AutoModelForImageTextToText

    alone = not _has_vision(folder)
    auto: Any = AutoModelForCausalLM if alone else AutoModelForImageTextToText
    return auto.from_pretrained(folder, **options)


@dataclass(frozen=True)
class ImageBudget:
    """The fewest and the most pixels of an image, and the most tokens; None: the processor's."""

    min_pixels: int | None = None
    max_pixels: int | None = None
    max_tokens: int | None = None

    def apply(self, images: Any) -> None:
        """Set the budget on an image processor of transformers."""
        of_tokens = (
            self.max_tokens and self.max_tokens * (images.patch_size * images.merge_size) ** 2
        )
        most = min((one for one in (self.max_pixels, of_tokens) if one), default=None)
        for edge, pixels in (("shortest_edge", self.min_pixels), ("longest_edge", most)):
            if pixels is not None:
                images.size[edge] = pixels


def load_processor(folder: Path, budget: ImageBudget | None = None) -> Any:
    """Load a processor; of a language model alone it is a tokenizer."""
    from transformers import AutoProcessor, AutoTokenizer

    if not _has_vision(folder):
        return AutoTokenizer.from_pretrained(folder)
    processor: Any = AutoProcessor.from_pretrained(folder)
    (budget or ImageBudget()).apply(processor.image_processor)
    return processor


def _has_vision(folder: Path) -> bool:
    return "vision_config" in json.loads((folder / "config.json").read_text("utf-8"))


def tokenizer_of(processor: Any) -> Any:
    return getattr(processor, "tokenizer", processor)


@dataclass
class Encoded:
    """A sequence: the model's inputs, and the weight of each token's own loss (S,)."""

    inputs: dict[str, Tensor]
    weights: Tensor


def with_media(record: Mapping[str, Any], folder: Path) -> list[dict[str, Any]]:
    """Return the messages of a record, with paths of media in the places of their tags."""
    if "conversations" in record:
        roles = {"human": "user", "gpt": "assistant"}
        turns = [
            {"role": roles[turn["from"]], "content": turn["value"]}
            for turn in record["conversations"]
        ]
    else:
        turns = _with_boxes(record)
    images = record.get("images") or ([record["image"]] if "image" in record else [])
    waiting = {"image": list(images), "video": list(record.get("videos") or [])}
    found = []
    for turn in turns:
        content = turn["content"]
        parts = content if isinstance(content, list) else _split(content)
        placed: list[dict[str, Any]] = []
        for part in parts:
            kind = part["type"]
            if kind == "text":
                placed.append(part)
            elif kind == "video":
                listed = waiting[kind].pop(0)
                frames = [str(folder / name) for name in listed["frames"]]
                placed.append({"type": kind, kind: frames, "fps": listed["fps"]})
            else:
                name = part.get(kind) or waiting[kind].pop(0)
                placed.append({"type": kind, kind: str(folder / name)})
        found.append({**turn, "content": placed, "weight": turn.get("weight", 1.0)})
    return found


def _with_boxes(record: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return the messages of a record, with its names and boxes in the places of their tags."""
    objects = record.get("objects", {"bbox_type": "norm1"})
    if objects["bbox_type"] != "norm1":
        raise NotPlain(objects["bbox_type"])
    boxes = [[round(1000 * number) for number in box] for box in objects.get("bbox", ())]
    waiting = {
        "<ref-object>": list(objects.get("ref", ())),
        "<bbox>": [str(box) for box in boxes],
    }
    turns = [dict(turn) for turn in record["messages"]]
    for turn in turns if "objects" in record else ():
        for tag, words in waiting.items():
            while tag in turn["content"]:
                turn["content"] = turn["content"].replace(tag, words.pop(0), 1)
    return turns


def _split(text: str) -> list[dict[str, Any]]:
    """Return the parts of a text with tags."""
    for kind in ("image", "video"):
        before, tag, rest = text.partition(f"<{kind}>")
        if tag:
            middle = [{"type": "text", "text": before}] if before else []
            return [*middle, {"type": kind}, *(_split(rest) if rest else [])]
    return [{"type": "text", "text": text}]


def encode(processor: Any, record: Mapping[str, Any], folder: Path) -> Encoded:
    """Encode a conversation or a document; all of a document's text is trained."""
    weight = float(record.get("weight", 1.0))
    if not {"messages", "conversations"} & record.keys():
        return _encode_document(processor, record, folder, weight)
    turns = with_media(record, folder)

    def tokens(count: int, **options: Any) -> dict[str, Tensor]:
        some = [{k: v for k, v in turn.items() if k != "weight"} for turn in turns[:count]]
        text = processor.apply_chat_template(
            some, tools=record.get("tools"), tokenize=False, **options
        )
        return dict(processor(text=[text], return_tensors="pt", **_media_of(some)))

    inputs = tokens(len(turns))
    ids = inputs["input_ids"][0]
    weights = torch.zeros(len(ids))
    for index, turn in enumerate(turns):
        if turn["role"] == "assistant":
            start = tokens(index, add_generation_prompt=True)["input_ids"].shape[1]
            end = tokenizer_of(processor).convert_tokens_to_ids("<|im_end|>")
            stop = start + int((ids[start:] == end).nonzero()[0]) + 1
            weights[start:stop] = weight * float(turn["weight"])
    return Encoded(inputs, weights)


def _media_of(turns: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return the images and videos of some messages as the processor takes them."""
    from PIL import Image

    def open_image(name: str) -> Any:
        return Image.open(name).convert("RGB")

    parts = [part for turn in turns for part in turn["content"]]
    images = [open_image(part["image"]) for part in parts if part["type"] == "image"]
    videos, metadata = [], []
    for part in parts:
        if part["type"] == "video":
            frames = [torch.from_numpy(np.array(open_image(name))) for name in part["video"]]
            places = list(range(len(frames)))
            described = {"total_num_frames": len(frames), "fps": part["fps"]}
            videos.append(torch.stack(frames).permute(0, 3, 1, 2))
            metadata.append(VideoMetadata(**described, frames_indices=places))
    media: dict[str, Any] = {"images": images} if images else {}
    if videos:
        media |= {"videos": videos, "video_metadata": metadata, "do_sample_frames": False}
    return media


def _encode_document(
    processor: Any, record: Mapping[str, Any], folder: Path, weight: float
) -> Encoded:
    images: list[str] = []
    text = ""
    if "texts" in record:
        for words, image in zip(record["texts"], record["images"], strict=True):
            text += words or "<|vision_start|><|image_pad|><|vision_end|>"
            images += [image] if image else []
    else:
        images = [record["image"]] if "image" in record else []
        text = "<|vision_start|><|image_pad|><|vision_end|>" * len(images)
        text += record.get("caption") or record.get("text") or ""
    from PIL import Image

    opened = [Image.open(folder / name).convert("RGB") for name in images]
    media_of = {"images": opened} if opened else {}
    inputs = dict(processor(text=[text + "<|endoftext|>"], return_tensors="pt", **media_of))
    ids = inputs["input_ids"][0]
    names = ("<|vision_start|>", "<|image_pad|>", "<|vision_end|>")
    media = torch.tensor(tokenizer_of(processor).convert_tokens_to_ids(list(names)))
    return Encoded(inputs, torch.where(torch.isin(ids, media), 0.0, weight))


PARTS = ("vision", "aligner", "language")
"""The parts of a model, see :func:`part_of`."""


@dataclass(frozen=True)
class Recipe:
    """What a loop does with its samples.

    Attributes:
        loss: a loss of tokens, of pairs or of labelled answers, ``distill``, or a task.
        style, warmup, steps, min_lr: the schedule: its decay, the steps in which the rate rises
            from 0, and the step at which it has fallen to `min_lr`.
        trained: whether a parameter trains, by the part it is in.
        multiples: multiples of the rate, by part.
        beta, gamma: of a loss of pairs or of labelled answers.
        exchanging: how many records after one another exchange their answers; of ``kto``.
        longest: the most tokens of a sequence with another's answer.
        wanted, unwanted: weights of the losses of answers with these labels.
        answers: the words, one token each, of a relevant and of another document.
        teacher: the model that ``distill`` learns from.
        adapter: a PEFT adapter, which alone trains.
        balancing, z_loss: coefficients of the routers' losses.
        balances_samples: whether each sample is balanced by itself, and not each micro-batch.
        budget: of images.
    """

    loss: str = "cross_entropy"
    lr: float = 1e-3
    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8
    weight_decay: float = 0.01
    clip: float = 1.0
    style: str = "constant"
    warmup: int = 0
    steps: int = 1
    min_lr: float = 0.0
    trained: tuple[str, ...] = PARTS
    multiples: Mapping[str, float] = field(default_factory=dict)
    beta: float = 0.1
    gamma: float = 0.0
    exchanging: int = 1
    longest: int = 256
    wanted: float = 1.0
    unwanted: float = 1.0
    answers: tuple[str, str] = ("yes", "no")
    teacher: Path | None = None
    adapter: Path | None = None
    balancing: float = 0.0
    z_loss: float = 0.0
    balances_samples: bool = False
    budget: ImageBudget = ImageBudget()

    def rate(self, done: int) -> float:
        """Return the rate after so many steps."""
        if done < self.warmup:
            return self.lr * done / self.warmup
        if self.style == "constant" or done == self.warmup:
            return self.lr
        if done > self.steps:
            return self.min_lr
        share = (done - self.warmup) / (self.steps - self.warmup)
        fall = (1 + math.cos(math.pi * share)) / 2 if self.style == "cosine" else 1 - share
        return self.min_lr + fall * (self.lr - self.min_lr)


def part_of(name: str) -> str:
    """Return the part of the model that a parameter of transformers' or PEFT's model is in."""
    if not name.removeprefix("base_model.model.").startswith("model.visual."):
        return "language"
    return "aligner" if "merger" in name else "vision"


@dataclass(frozen=True)
class Drawn:
    """A record of a step, and the number of its micro-batch there."""

    record: Mapping[str, Any]
    micro_batch: int


def train(
    model_folder: Path,
    steps: Sequence[Sequence[Drawn]],
    folder: Path,
    recipe: Recipe,
) -> list[dict[str, float]]:
    """Train on the records of each step; return the loss, the norm and the rate of each.

    The loss of a step is a sum over its tokens or records, divided once.
    """
    torch.set_num_threads(1)
    processor = load_processor(model_folder, recipe.budget)
    model = load_model(model_folder, dtype=torch.float32)
    if recipe.adapter is not None:
        model = adapted(model, recipe.adapter, is_trainable=True)
    model.train()
    reference = copy.deepcopy(model).eval() if recipe.loss in ("dpo", "kto") else None
    if recipe.teacher is not None:
        reference = load_model(recipe.teacher, dtype=torch.float32).eval()
    named = {
        n: one
        for n, one in model.named_parameters()
        if part_of(n) in recipe.trained and (recipe.adapter is None or "lora_" in n)
    }
    groups = _groups(named, recipe)
    optimizer = torch.optim.AdamW(groups, lr=recipe.lr, betas=recipe.betas, eps=recipe.eps)
    words = tokenizer_of(processor).convert_tokens_to_ids(list(recipe.answers))
    found = []
    for one in named.values():
        one.grad = torch.zeros_like(one)  # a step without a picture steps the tower, too
    for done, drawn in enumerate(steps):
        samples = [encode_all(processor, one.record, folder, recipe.loss) for one in drawn]
        optimizer.zero_grad(set_to_none=False)
        total = 0.0
        for loss in _losses_of_step(model, reference, drawn, samples, recipe, words):
            loss.backward()
            total += loss.item()
        norm = torch.nn.utils.clip_grad_norm_(named.values(), recipe.clip or math.inf)
        for group in optimizer.param_groups:
            group["lr"] = recipe.rate(done) * group["multiple"]
        optimizer.step()
        # Megatron logs the rate of the step that follows, as Hugging Face's trainer does.
        rate = recipe.rate(done + 1)
        found.append({"loss": total, "grad norm": float(norm), "learning rate": rate})
    return found


def _losses_of_step(
    model: Any,
    reference: Any,
    drawn: Sequence[Drawn],
    samples: Sequence[Sequence[Encoded]],
    recipe: Recipe,
    words: Sequence[int],
) -> Iterator[Tensor]:
    """Yield the parts of a step's loss, computed one at a time."""
    if recipe.loss == "embedding":
        yield _contrastive_loss(model, samples)
        return
    if recipe.loss == "kto":
        labels = [bool(one.record["label"]) for one in drawn]
        yield from _labelled_losses(model, reference, [one for (one,) in samples], labels, recipe)
        return
    if recipe.loss == "reranker":
        yield from _ranking_losses(model, samples, words)
        return
    whole = sum(_divisor(some, recipe.loss) for some in samples)
    numbers = [one.micro_batch for one in drawn]
    for number in sorted(set(numbers)):
        micro = [some for one, some in zip(numbers, samples, strict=True) if one == number]
        with _router_logits(model) as routed:
            losses = [_sum_of(model, reference, some, recipe) for some in micro]
        of_routers = torch.zeros(())
        for logits in routed.values():
            of_routers = of_routers + _router_loss(model, logits, recipe)
        # They have gradients, and are no part of the loss that is logged.
        yield (torch.stack(losses).sum() + of_routers - of_routers.detach()) / whole


@contextmanager
def _router_logits(model: Any) -> Iterator[dict[str, list[Tensor]]]:
    """Collect the logits (S, E) of each router for each sequence that the model gets inside."""
    found: dict[str, list[Tensor]] = {}

    def listen(name: str, router: Any) -> Any:
        def note(_: Any, __: Any, output: Any) -> None:
            found.setdefault(name, []).append(output[0])

        return router.register_forward_hook(note)

    named = model.named_modules()
    hooks = [listen(name, one) for name, one in named if type(one).__name__.endswith("TopKRouter")]
    try:
        yield found
    finally:
        for hook in hooks:
            hook.remove()


def _router_loss(model: Any, logits: Sequence[Tensor], recipe: Recipe) -> Tensor:
    """Return the losses of a layer's router over sequences, weighted by their tokens.

    The balancing loss is that of the Switch Transformer (Fedus et al., 2021): the experts' number
    times the mean over experts of their share of choices times their mean probability. The z-loss
    is the mean of the squared logsumexp (Zoph et al., 2022).
    """
    groups = logits if recipe.balances_samples else [torch.cat(list(logits))]
    taken = model.config.get_text_config().num_experts_per_tok
    total = torch.zeros(())
    for some in groups:
        experts = some.shape[-1]
        chosen = F.one_hot(some.topk(taken).indices, experts).sum(1).float().mean(0) / taken
        balance = experts * (chosen * some.softmax(-1).mean(0)).sum()
        z_loss = some.logsumexp(-1).square().mean()
        total = total + len(some) * (recipe.balancing * balance + recipe.z_loss * z_loss)
    return total


def router_coefficient(model_folder: Path) -> float:
    """Return the coefficient of the balancing loss in a model's config."""
    from transformers import AutoConfig

    return float(AutoConfig.from_pretrained(model_folder).get_text_config().router_aux_loss_coef)


def _contrastive_loss(model: Any, samples: Sequence[Sequence[Encoded]]) -> Tensor:
    """Return sentence-transformers' ``MultipleNegativesRankingLoss`` of queries and documents."""
    body = model.base_model.model.model if hasattr(model, "peft_config") else model.model
    embedded = [
        [F.normalize(body(**one.inputs).last_hidden_state[0, -1], dim=0) for one in some]
        for some in samples
    ]
    documents = torch.stack([document for _, *some in embedded for document in some])
    firsts = [sum(len(some) - 1 for some in embedded[:index]) for index in range(len(embedded))]
    cosines = torch.stack([query for query, *_ in embedded]) @ documents.T
    return F.cross_entropy(20.0 * cosines, torch.tensor(firsts))


def _ranking_losses(
    model: Any, samples: Sequence[Sequence[Encoded]], words: Sequence[int]
) -> Iterator[Tensor]:
    """Yield the binary cross entropy of each document, over their number; the first is relevant."""
    whole = sum(map(len, samples))
    for some in samples:
        for place, sample in enumerate(some):
            logits = model(**sample.inputs).logits[0, -1].float()
            relevance = logits[words[0]] - logits[words[1]]
            label = torch.tensor(float(place == 0))
            yield F.binary_cross_entropy_with_logits(relevance, label) / whole


def _labelled_losses(
    model: Any,
    reference: Any,
    samples: Sequence[Encoded],
    labels: Sequence[bool],
    recipe: Recipe,
) -> Iterator[Tensor]:
    """Yield the loss of each labelled answer, as TRL's ``KTOTrainer`` has it, over their number.

    The baseline is the mean change of answers to other prompts: each prompt is followed by the
    answer of the record before it among those that exchange theirs.
    """

    def change(sample: Encoded) -> Tensor:
        trained = sample.weights[1:] > 0
        with torch.no_grad():
            before = (_losses(reference, sample) * trained).sum()
        return before - (_losses(model, sample) * trained).sum()

    with torch.no_grad():
        changes = []
        for first in range(0, len(samples), recipe.exchanging):
            some = samples[first : first + recipe.exchanging]
            if len(some) > 1:
                neighbours = zip(some, [some[-1], *some[:-1]], strict=True)
                changes += [change(_exchanged(*two, recipe.longest)) for two in neighbours]
        baseline = torch.stack(changes).mean().clamp(min=0) if changes else 0.0
    for sample, label in zip(samples, labels, strict=True):
        sign, weight = (1, recipe.wanted) if label else (-1, recipe.unwanted)
        gain = recipe.beta * sign * (change(sample) - baseline)
        yield weight * (1 - torch.sigmoid(gain)) / len(samples)


def _exchanged(sample: Encoded, other: Encoded, longest: int) -> Encoded:
    """Return the prompt of a sample with the answer of another."""
    end, start = (int(one.weights.nonzero()[0]) for one in (sample, other))
    per_token = ("input_ids", "attention_mask", "mm_token_type_ids")
    inputs = {
        name: torch.cat([value[:, :end], other.inputs[name][:, start:]], 1)[:, :longest]
        if name in per_token
        else value
        for name, value in sample.inputs.items()
    }
    return Encoded(inputs, torch.cat([sample.weights[:end], other.weights[start:]])[:longest])


_JUDGE = (
    "Judge whether the Document meets the requirements based on the Query and the Instruct "
    'provided. Note that the answer can only be "yes" or "no".'
)
_INSTRUCTION = "Given a search query, retrieve relevant candidates that answer the query."


def encode_all(processor: Any, record: Mapping[str, Any], folder: Path, loss: str) -> list[Encoded]:
    """Encode a record: a query and its documents, or two answers, the chosen one first."""
    if loss == "reranker":
        query = record["query"]
        documents = [record["positive"], *record.get("negatives", [])]
        return [_encode_judgement(processor, query, one, folder) for one in documents]
    if "query" in record:
        texts = [record["query"], record["positive"], *record.get("negatives", [])]
        return [_encode_prompt(processor, text, folder) for text in texts]
    if "chosen" not in record:
        return [encode(processor, record, folder)]
    asked = record.get("messages") or [{"role": "user", "content": record["prompt"]}]
    return [
        encode(
            processor,
            {
                "messages": [*asked, {"role": "assistant", "content": record[side]}],
                "images": record.get("images", []),
            },
            folder,
        )
        for side in ("chosen", "rejected")
    ]


def _encode_prompt(processor: Any, text: str | Mapping[str, str], folder: Path) -> Encoded:
    """Encode a text with an image before it, or either alone, as a prompt."""
    return _encode_turns(processor, [{"role": "user", "content": _parts_of(text, folder)}])


def _parts_of(text: str | Mapping[str, str], folder: Path) -> list[dict[str, str]]:
    given = {"text": text} if isinstance(text, str) else text
    return [
        {"type": kind, kind: str(folder / given[kind]) if kind == "image" else given[kind]}
        for kind in ("image", "text")
        if kind in given
    ]


def _encode_judgement(processor: Any, query: Any, document: Any, folder: Path) -> Encoded:
    """Encode a query and a document as Qwen3-VL-Reranker's prompt."""

    def text(words: str) -> dict[str, str]:
        return {"type": "text", "text": words}

    asked = [
        text(f"<Instruct>: {_INSTRUCTION}"), text("<Query>:"), *_parts_of(query, folder),
        text("\n<Document>:"), *_parts_of(document, folder),
    ]  # fmt: skip
    turns = [{"role": "system", "content": [text(_JUDGE)]}, {"role": "user", "content": asked}]
    return _encode_turns(processor, turns)


def _encode_turns(processor: Any, turns: Sequence[Mapping[str, Any]]) -> Encoded:
    inputs = processor.apply_chat_template(
        list(turns), tokenize=True, return_dict=True, return_tensors="pt",
        add_generation_prompt=True,
    )  # fmt: skip
    return Encoded(dict(inputs), torch.zeros(inputs["input_ids"].shape[1]))


def _groups(named: Mapping[str, Tensor], recipe: Recipe) -> list[dict[str, Any]]:
    """Return a group for each parameter: no decay of vectors, and a multiple of the rate."""
    groups = []
    for name, one in named.items():
        decay = 0.0 if one.ndim <= 1 or name.endswith("bias") else recipe.weight_decay
        multiple = recipe.multiples.get(part_of(name), 1.0)
        groups.append({"params": [one], "multiple": multiple, "weight_decay": decay})
    return groups


def _divisor(some: Sequence[Encoded], loss: str) -> float:
    if len(some) == 2:
        return 1.0
    if loss == "weighted_cross_entropy":
        return float(some[0].weights[1:].sum())
    return float((some[0].weights[1:] > 0).sum())


def _sum_of(model: Any, reference: Any, some: Sequence[Encoded], recipe: Recipe) -> Tensor:
    """Return the sum of the losses of a record's tokens, or the loss of a pair."""
    if len(some) == 2:
        return _loss_of_pair(model, reference, some, recipe)
    (sample,) = some
    if recipe.loss == "distill":
        losses = _divergences(model, reference, sample)
    else:
        losses = _losses(model, sample)
    weights = sample.weights[1:]
    by_mask = recipe.loss in ("cross_entropy", "distill")
    return (losses * ((weights > 0) if by_mask else weights)).sum()


def _losses(model: Any, sample: Encoded) -> Tensor:
    """Return the loss of each token but the first."""
    logits = model(**sample.inputs).logits[0, :-1].float()
    return F.cross_entropy(logits, sample.inputs["input_ids"][0, 1:], reduction="none")


_LIKELIEST = 64
"""Of a teacher's tokens, those that a student learns from by default."""


def _divergences(model: Any, teacher: Any, sample: Encoded) -> Tensor:
    """Return KL(teacher || student) before each token but the first.

    Both are distributions over the teacher's likeliest tokens and all others together.
    """
    with torch.no_grad():
        theirs = teacher(**sample.inputs).logits[0, :-1].float().softmax(-1)
    mine = model(**sample.inputs).logits[0, :-1].float().softmax(-1)
    likeliest, ids = theirs.topk(min(_LIKELIEST, theirs.shape[-1]))
    others = torch.ones_like(theirs).scatter(-1, ids, 0.0)
    p = torch.cat([likeliest, (theirs * others).sum(-1, keepdim=True)], -1)
    q = torch.cat([mine.gather(-1, ids), (mine * others).sum(-1, keepdim=True)], -1)
    return (p * (p.log() - q.log())).sum(-1)


def _loss_of_pair(model: Any, reference: Any, pair: Sequence[Encoded], recipe: Recipe) -> Tensor:
    """Return TRL's loss of a pair: sigmoid of DPO, SimPO's or ORPO's."""
    scores = []
    for sample in pair:
        trained = sample.weights[1:] > 0
        score = -(_losses(model, sample) * trained).sum()
        if recipe.loss == "dpo":
            with torch.no_grad():
                before = (_losses(reference, sample) * trained).sum()
            score = score + before
        elif recipe.loss in ("simpo", "orpo"):
            score = score / trained.sum()
        else:
            raise NotPlain(recipe.loss)
        scores.append(score)
    if recipe.loss == "orpo":
        chosen, rejected = (one - torch.log1p(-one.exp()) for one in scores)
        return -recipe.beta * F.logsigmoid(chosen - rejected) - scores[0]
    return -F.logsigmoid(recipe.beta * (scores[0] - scores[1]) - recipe.gamma)


def load_tensors(model_folder: Path) -> dict[str, Tensor]:
    """Load the tensors of all files of a model."""
    from safetensors.torch import load_file

    files = model_folder.glob("*.safetensors")
    return dict(item for file in files for item in load_file(file).items())


def moved_parts(model_folder: Path, other_folder: Path, left_out: str | None = None) -> list[str]:
    """Return the parts of a model whose values differ from another's, in float32.

    Tensors whose names begin with `left_out` are not compared.
    """
    mine, other = load_tensors(model_folder), load_tensors(other_folder)
    found = (
        part_of(name)
        for name in mine.keys() & other.keys()
        if not (left_out and name.startswith(left_out))
        and not mine[name].float().equal(other[name].float())
    )
    return sorted(set(found))


def adapted(model: Any, adapter: Path, **options: Any) -> Any:
    """Put a PEFT adapter on a model."""
    from peft import PeftModel

    return PeftModel.from_pretrained(model, adapter, **options)


def _load_adapted(model_folder: Path, adapter: Path | None) -> Any:
    """Load a model as it is, with an adapter if there is one, to compute without gradients."""
    torch.set_num_threads(1)
    model = load_model(model_folder)
    return (model if adapter is None else adapted(model, adapter)).eval()


def mean_loss(
    model_folder: Path,
    records: Sequence[Mapping[str, Any]],
    folder: Path,
    adapter: Path | None = None,
    budget: ImageBudget | None = None,
) -> float:
    """Return the mean loss of the trained tokens of all records, under a model as it is loaded."""
    samples, totals = _scored(model_folder, records, folder, adapter, budget)
    return -sum(map(sum, totals)) / sum(_divisor(sample, "cross_entropy") for sample in samples)


def log_probabilities(
    model_folder: Path,
    records: Sequence[Mapping[str, Any]],
    folder: Path,
    adapter: Path | None = None,
) -> list[list[float]]:
    """Return the log-probability of each record's trained tokens; of a pair, of either answer."""
    return _scored(model_folder, records, folder, adapter)[1]


def _scored(
    model_folder: Path,
    records: Sequence[Mapping[str, Any]],
    folder: Path,
    adapter: Path | None,
    budget: ImageBudget | None = None,
) -> tuple[list[list[Encoded]], list[list[float]]]:
    """Return the sequences of each record, and the log-probabilities of their trained tokens."""
    processor, model = load_processor(model_folder, budget), _load_adapted(model_folder, adapter)
    samples = [encode_all(processor, record, folder, "cross_entropy") for record in records]
    with torch.no_grad():
        return samples, [
            [-float(_sum_of(model, None, [one], Recipe())) for one in sample] for sample in samples
        ]


def answer(
    model_folder: Path,
    prompt: str,
    count: int,
    adapter: Path | None = None,
    image: Path | None = None,
) -> list[int]:
    """Return the tokens of the likeliest answer, of at most so many, to an image and a prompt."""
    processor, model = load_processor(model_folder), _load_adapted(model_folder, adapter)
    seen = [{"type": "image", "path": str(image)}] if image else []
    turn = {"role": "user", "content": [*seen, {"type": "text", "text": prompt}]}
    inputs = processor.apply_chat_template(
        [turn], tokenize=True, return_dict=True, return_tensors="pt", add_generation_prompt=True
    )
    with torch.no_grad():
        found = model.generate(**inputs, max_new_tokens=count, do_sample=False)
    new: list[int] = found[0, inputs["input_ids"].shape[1] :].tolist()
    return new


def unlike_merged(model_folder: Path, adapter: Path, merged: Path) -> list[str]:
    """Return the tensors of a merged model that differ from PEFT's."""
    expected = _load_adapted(model_folder, adapter).merge_and_unload().state_dict()
    found = load_model(merged).state_dict()
    names = expected.keys() & found.keys()
    wrong = [name for name in names if not torch.allclose(expected[name], found[name], 1e-4, 1e-6)]
    return sorted([*wrong, *(expected.keys() ^ found.keys())])
