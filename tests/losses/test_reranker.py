"""Reranker training equals one process on the whole batch, in every layout; scores are HF's."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import AutoModelForImageTextToText, AutoProcessor

from mcore_qwen3vl.errors import BadInput
from mcore_qwen3vl.scoring.score import ScoreRequest, score
from mcore_qwen3vl.verification.curves import Job, train
from mcore_qwen3vl.verification.parity.case import ADAPTERS, write_random_adapter
from tests.losses.retrieval import texts_of, write_retrieval
from tests.losses.whole_batch import LAYOUTS, PACKED, first_records, inputs_of, scored
from tests.training.one_step import TOLERANCE, Plain, check_step, plain_model, step_job
from tests.turns import slow, slow_except

ANSWERS = ("y", "n")  # the tiny tokenizer has no longer words
TASK = ("--task", "reranker", "--answers", *ANSWERS)
LISTWISE = ("--reranker-loss", "listwise")
SYSTEM = (
    "Judge whether the Document meets the requirements based on the Query and the Instruct "
    'provided. Note that the answer can only be "yes" or "no".'
)
INSTRUCTION = "Given a search query, retrieve relevant candidates that answer the query."


def prompts_of(record: dict[str, Any]) -> list[list[dict[str, Any]]]:
    """Return the messages of Qwen3-VL-Reranker's prompt for each document."""
    query, *documents = (text[0]["content"] for text in texts_of(record))
    texts = ("<Instruct>: " + INSTRUCTION, "<Query>:", "\n<Document>:")
    instruct, asks, offers = ([{"type": "text", "text": text}] for text in texts)
    return [
        [
            {"role": "system", "content": SYSTEM},
            {"role": "user", "content": [*instruct, *asks, *query, *offers, *document]},
        ]
        for document in documents
    ]


def relevance(model: Any, processor: Any, prompt: list[dict[str, Any]], folder: Path) -> Tensor:
    """Return logit(yes) - logit(no) after the prompt, from all logits."""
    logits = model(**inputs_of(processor, prompt, folder)).logits[0, -1]
    yes, no = (processor.tokenizer.convert_tokens_to_ids(word) for word in ANSWERS)
    return logits[yes] - logits[no]


def plain_step(job: Job) -> Plain:
    processor = AutoProcessor.from_pretrained(job.checkpoint)
    model, named = plain_model(job)
    losses = []
    for record in first_records(job, lambda record: len(prompts_of(record))):
        scores = torch.stack(
            [relevance(model, processor, p, job.data.parent) for p in prompts_of(record)]
        )
        right = torch.zeros_like(scores)
        right[0] = 1
        if LISTWISE[0] in job.flags:
            losses.append(F.cross_entropy(scores, right))
        else:
            losses += F.binary_cross_entropy(scores.sigmoid(), right, reduction="none").unbind()
    return Plain.of(torch.stack(losses).mean(), named)


@pytest.mark.parametrize(
    ("kind", "layout", "flags"),
    [
        *slow_except(LAYOUTS, ("dense", "cp2", PACKED)),
        *slow(
            ("dense", "dp2", (*PACKED, *LISTWISE)),
            ("tied", "tp2xpp2+sp", (*PACKED, *LISTWISE)),
            ("dense", "cp2", LISTWISE),
        ),
    ],
)
def test_loss_and_every_gradient_are_those_of_one_process(
    checkpoint: Path, layout: str, flags: tuple[str, ...], retrieval: Path, tmp_path: Path
) -> None:
    job = step_job(checkpoint, retrieval, layout, *TASK, *flags, seq_length=512)
    check_step(job, plain_step(job), "reranker loss", tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "layout"), [("dense", "single"), ("dense", "dp2"), ("moe", "ep2xdp2")]
)
def test_an_adapter_trains(
    kind: str, checkpoint: Path, layout: str, retrieval: Path, tmp_path: Path
) -> None:
    targets = "experts" if kind == "moe" else "whole"
    adapter = write_random_adapter(tmp_path / "adapter", ADAPTERS[targets], checkpoint)
    job = step_job(checkpoint, retrieval, layout, *TASK, *PACKED, lora=adapter, seq_length=512)
    check_step(job, plain_step(job), "reranker loss", tmp_path)


@pytest.mark.slow
def test_a_reranker_is_trained_exported_and_scored(tied: Path, tmp_path: Path) -> None:
    """`score` gives what transformers' own class gives with the exported weights."""
    retrieval, export = write_retrieval(tmp_path / "data", 5), tmp_path / "export"
    train(
        step_job(tied, retrieval, "single", *TASK, *PACKED, seq_length=512),
        tmp_path / "run",
        *("--save", str(tmp_path / "save"), "--save-hf", str(export)),
    )
    exported = export / "iter_0000001"
    model = AutoModelForImageTextToText.from_pretrained(exported, dtype=torch.float32)
    processor = AutoProcessor.from_pretrained(exported)
    records = [json.loads(line) for line in retrieval.read_text().splitlines()]
    with torch.no_grad():
        expected = [
            [float(relevance(model, processor, p, retrieval.parent)) for p in prompts_of(record)]
            for record in records
        ]
    first = [row[0] > max(row[1:]) for row in expected if len(row) > 1]
    for checkpoint, layout in ((exported, "pp2"), (tmp_path / "save", "cp2")):
        out = tmp_path / f"{layout}.jsonl"
        found = scored(checkpoint, retrieval, out, layout, "reranker", answers=ANSWERS)
        assert found.documents == sum(map(len, expected))
        assert found.positive_first == sum(first) / len(first)
        for line, row in zip(out.read_text().splitlines(), expected, strict=True):
            entry = json.loads(line)
            names = ["positive", *(f"negative {i}" for i in range(len(row) - 1))]
            assert list(entry) == ["line", *names]
            for name, logit in zip(names, row, strict=True):
                assert entry[name]["logit"] == pytest.approx(logit, abs=TOLERANCE)
                chance = torch.tensor(logit).sigmoid().item()
                assert entry[name]["score"] == pytest.approx(chance, abs=TOLERANCE)


def test_an_answer_of_several_tokens_is_refused(
    tied: Path, retrieval: Path, tmp_path: Path
) -> None:
    request = ScoreRequest(tied, retrieval, tmp_path / "out.jsonl", task="reranker")
    with pytest.raises(BadInput, match=r"answer 'yes' is 2 tokens.*--answers"):
        score(request, on_cpu=True)
