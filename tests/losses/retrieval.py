"""Retrieval data, and a plain loop over Hugging Face's model, one text at a time."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from mcore_qwen3vl.losses.embedding import Contrastive
from mcore_qwen3vl.tiny.records import write_image_qa
from mcore_qwen3vl.verification.curves import Job
from tests.losses.whole_batch import first_records, inputs_of
from tests.training.one_step import Plain, plain_model


def write_retrieval(folder: Path, samples: int) -> Path:
    """Write questions and answers as queries and documents, in all forms of a record.

    They have one positive and up to two hard negatives. Some documents have the next question's
    image.
    """
    file = write_image_qa(folder, samples)
    turns = [json.loads(line)["messages"] for line in file.read_text().splitlines()]
    lines = []
    for i, (question, answer) in enumerate(turns):
        image, text = image_and_text(question["content"])
        other, _ = image_and_text(turns[(i + 1) % samples][0]["content"])
        wrong = [turns[(i + k) % samples][1]["content"] for k in (3, 5)]
        if i % 3 == 0:
            record: dict[str, Any] = {"query": [question], "positive": answer["content"]}
            record |= {"negative": wrong[0]} if i % 2 else {}
        elif i % 3 == 1:
            record = {"query": {"text": text, "image": image}, "negatives": wrong}
            record["positive"] = {"text": answer["content"], "image": other}
        else:
            record = {
                "messages": [{"role": "user", "content": "<image>" * bool(image) + text}],
                "images": [image] if image else [],
                "positive_messages": [[{"role": "user", "content": answer["content"]}]],
                "negative_messages": [
                    [{"role": "user", "content": "<image>" * bool(other) + wrong[0]}],
                    [{"role": "user", "content": wrong[1]}],
                ],
                "negative_images": [[other] if other else [], []],
            }
        lines.append(json.dumps(record))
    file.write_text("\n".join(lines) + "\n")
    return file


def image_and_text(content: Any) -> tuple[str | None, str]:
    if isinstance(content, str):
        return None, content
    return content[0]["image"], content[1]["text"]


def texts_of(record: dict[str, Any]) -> list[list[dict[str, Any]]]:
    """Return the messages of the texts of a record that :func:`write_retrieval` wrote."""
    if "messages" in record:
        held = [record["messages"], *record["positive_messages"], *record["negative_messages"]]
        images = [record["images"], [], *record["negative_images"]]
    else:
        negatives = record.get("negatives", [record["negative"]] if "negative" in record else [])
        held = [record["query"], record["positive"], *negatives]
        images = [[] for _ in held]
    return [_message(text, own) for text, own in zip(held, images, strict=True)]


def _message(text: Any, images: list[str]) -> list[dict[str, Any]]:
    if isinstance(text, list) and isinstance(text[0]["content"], list):
        return text
    if isinstance(text, dict):
        images, text = [text["image"]] if text["image"] else [], text["text"]
    if isinstance(text, list):
        text = text[0]["content"].removeprefix("<image>")
    parts = [{"type": "image", "image": image} for image in images]
    return [{"role": "user", "content": [*parts, {"type": "text", "text": text}]}]


def embedding(model: Any, processor: Any, messages: list[dict[str, Any]], folder: Path) -> Tensor:
    """Return the hidden state (H,) at the last token of the prompt, after the final norm."""
    inputs = inputs_of(processor, messages, folder)
    return model(**inputs).last_hidden_state[0, -1]


def write_scored(folder: Path, samples: int) -> Path:
    """Write queries and positives with scores, some of them equal, in all forms of a record."""
    file = write_retrieval(folder, samples)
    lines = []
    for i, line in enumerate(file.read_text().splitlines()):
        record = json.loads(line)
        kept = {key: value for key, value in record.items() if not key.startswith("negative")}
        kept |= {"negative_messages": [], "negative_images": []} if "messages" in record else {}
        lines.append(json.dumps({**kept, ("score", "label")[i % 2]: i * 5 % 7 / 7}))
    file.write_text("\n".join(lines) + "\n")
    return file


def score_of(record: dict[str, Any]) -> float:
    return float(record["score"] if "score" in record else record["label"])


def formula(
    groups: list[list[Tensor]], contrastive: Contrastive, scores: list[float] | None = None
) -> Tensor:
    """Return the mean loss of the queries, from cosines of one pair of texts at a time."""
    if scores is not None:
        return _of_pairs(groups, contrastive, scores)
    documents = [text for group in groups for text in group[1:]]
    total = torch.zeros([])
    for dimension in contrastive.dimensions or (len(documents[0]),):
        for query, positive, *_ in groups:
            cosines = torch.stack([_cosine(query, d, dimension) for d in documents])
            right = _cosine(query, positive, dimension) / contrastive.temperature
            total = total + (cosines / contrastive.temperature).exp().sum().log() - right
    return total / len(groups)


def _of_pairs(groups: list[list[Tensor]], contrastive: Contrastive, scores: list[float]) -> Tensor:
    total = torch.zeros([])
    for dimension in contrastive.dimensions or (len(groups[0][0]),):
        found = [(_cosine(*group, dimension), s) for group, s in zip(groups, scores, strict=True)]
        if contrastive.kind == "cosine":
            total = total + torch.stack([(c - s) ** 2 for c, s in found]).mean()
        else:
            gaps = [(low - high) for high, s in found for low, less in found if s > less]
            total = total + (1 + (torch.stack(gaps) / contrastive.temperature).exp().sum()).log()
    return total


def _cosine(a: Tensor, b: Tensor, dimension: int) -> Tensor:
    a, b = a[:dimension], b[:dimension]
    return (a @ b) / (a.norm() * b.norm())


def plain_step(job: Job, contrastive: Contrastive) -> Plain:
    """Run the first step on one process, with all texts of the global batch in one loss."""
    from transformers import AutoProcessor

    processor = AutoProcessor.from_pretrained(job.checkpoint)
    model, named = plain_model(job, headless=True)
    records = first_records(job, lambda record: len(texts_of(record)))
    groups = [
        [embedding(model, processor, text, job.data.parent) for text in texts_of(record)]
        for record in records
    ]
    scores = list(map(score_of, records)) if contrastive.takes_scores else None
    return Plain.of(formula(groups, contrastive, scores), named)
