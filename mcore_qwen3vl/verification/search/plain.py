"""A training loop of transformers and torch alone, and a chat's tokens from its processor.

Nothing here is this package's: what it computes is what a run is compared with.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor


class NotPlain(Exception):
    """The plain loop does not know this kind of record, loss or flag."""


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
        turns = list(record["messages"])
    if "objects" in record:
        raise NotPlain("boxes")
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
                raise NotPlain("videos")
            else:
                name = part.get(kind) or waiting[kind].pop(0)
                placed.append({"type": kind, kind: str(folder / name)})
        found.append({"role": turn["role"], "content": placed, "weight": turn.get("weight", 1.0)})
    return found


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
        some = [{key: turn[key] for key in ("role", "content")} for turn in turns[:count]]
        return dict(
            processor.apply_chat_template(
                some, tokenize=True, return_dict=True, return_tensors="pt", **options
            )
        )

    inputs = tokens(len(turns))
    ids = inputs["input_ids"][0]
    weights = torch.zeros(len(ids))
    for index, turn in enumerate(turns):
        if turn["role"] == "assistant":
            start = tokens(index, add_generation_prompt=True)["input_ids"].shape[1]
            end = processor.tokenizer.convert_tokens_to_ids("<|im_end|>")
            stop = start + int((ids[start:] == end).nonzero()[0]) + 1
            weights[start:stop] = weight * float(turn["weight"])
    return Encoded(inputs, weights)


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
    inputs = dict(
        processor(text=[text + "<|endoftext|>"], images=opened or None, return_tensors="pt")
    )
    ids = inputs["input_ids"][0]
    names = ("<|vision_start|>", "<|image_pad|>", "<|vision_end|>")
    media = torch.tensor(processor.tokenizer.convert_tokens_to_ids(list(names)))
    return Encoded(inputs, torch.where(torch.isin(ids, media), 0.0, weight))


@dataclass(frozen=True)
class Recipe:
    """What a loop does with its samples."""

    loss: str = "cross_entropy"
    lr: float = 1e-3
    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8
    weight_decay: float = 0.01
    clip: float = 1.0
    frozen: tuple[str, ...] = ()
    multiples: Mapping[str, float] = field(default_factory=dict)
    """Multiples of the rate, by the beginning of a parameter's name."""


def train(
    model_folder: Path,
    steps: Sequence[Sequence[Mapping[str, Any]]],
    folder: Path,
    recipe: Recipe,
) -> list[dict[str, float]]:
    """Train on the records of each step; return loss, norm and rate of each.

    The loss of a step is a sum over its tokens, divided by a sum over its tokens.
    """
    from transformers import AutoModelForImageTextToText, AutoProcessor

    torch.set_num_threads(1)
    processor = AutoProcessor.from_pretrained(model_folder)
    model = AutoModelForImageTextToText.from_pretrained(model_folder, dtype=torch.float32)
    model.train()
    named = {
        name: one
        for name, one in model.named_parameters()
        if not name.startswith(recipe.frozen or ("\0",))
    }
    optimizer = torch.optim.AdamW(
        _groups(named, recipe), lr=recipe.lr, betas=recipe.betas, eps=recipe.eps
    )
    found = []
    for records in steps:
        samples = [encode(processor, record, folder) for record in records]
        whole = sum(_divisor(sample, recipe.loss) for sample in samples)
        optimizer.zero_grad()
        total = 0.0
        for sample in samples:
            loss = _sum_of(model, sample, recipe.loss) / whole
            loss.backward()
            total += loss.item()
        grads = [one for one in named.values() if one.grad is not None]
        norm = torch.nn.utils.clip_grad_norm_(grads, recipe.clip or math.inf)
        optimizer.step()
        found.append({"loss": total, "grad norm": float(norm), "learning rate": recipe.lr})
    return found


def _groups(named: Mapping[str, Tensor], recipe: Recipe) -> list[dict[str, Any]]:
    """Return a group for each parameter: no decay of vectors, and rates of its part."""
    groups = []
    for name, one in named.items():
        rate = next((m for start, m in recipe.multiples.items() if name.startswith(start)), 1.0)
        decay = 0.0 if one.ndim <= 1 or name.endswith("bias") else recipe.weight_decay
        groups.append({"params": [one], "lr": recipe.lr * rate, "weight_decay": decay})
    return groups


def _divisor(sample: Encoded, loss: str) -> float:
    if loss == "weighted_cross_entropy":
        return float(sample.weights.sum())
    return float((sample.weights > 0).sum())


def _sum_of(model: Any, sample: Encoded, loss: str) -> Tensor:
    """Return the sum of the losses of a sample's tokens."""
    logits = model(**sample.inputs).logits[0, :-1].float()
    losses = F.cross_entropy(logits, sample.inputs["input_ids"][0, 1:], reduction="none")
    weights = sample.weights[1:]
    return (losses * ((weights > 0) if loss == "cross_entropy" else weights)).sum()


def mean_loss(model_folder: Path, records: Sequence[Mapping[str, Any]], folder: Path) -> float:
    """Return the mean loss of the trained tokens of all records, under a model as it is loaded."""
    from transformers import AutoModelForImageTextToText, AutoProcessor

    torch.set_num_threads(1)
    processor = AutoProcessor.from_pretrained(model_folder)
    model = AutoModelForImageTextToText.from_pretrained(model_folder).eval()
    samples = [encode(processor, record, folder) for record in records]
    with torch.no_grad():
        total = sum(float(_sum_of(model, sample, "cross_entropy")) for sample in samples)
    return total / sum(_divisor(sample, "cross_entropy") for sample in samples)
