"""Classifiers train as one process on the whole batch, in every layout; their scores are HF's."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PeftModel
from torch import Tensor
from transformers import AutoProcessor

from mcore_qwen3vl.config import read_config_file
from mcore_qwen3vl.converters.adapters.adapter import convert_adapter
from mcore_qwen3vl.converters.adapters.merge import merge
from mcore_qwen3vl.errors import BadInput
from mcore_qwen3vl.generation.generate import GenerationRequest as Asked
from mcore_qwen3vl.generation.generate import generate_on_all_ranks as generate
from mcore_qwen3vl.labels import Labels
from mcore_qwen3vl.scoring.score import ScoreRequest, score
from mcore_qwen3vl.tiny.records import write_image_qa
from mcore_qwen3vl.training.arguments.parser import validate
from mcore_qwen3vl.verification.curves import Job, train
from tests.losses.retrieval import image_and_text
from tests.losses.whole_batch import (
    LAYOUTS,
    PACKED,
    class_of,
    first_records,
    headed_adapter,
    headed_model,
    inputs_of,
    loaded,
    scored,
    trained_adapter,
    trained_twice,
)
from tests.training.one_step import TOLERANCE, Plain, check_step, step_job
from tests.turns import slow, slow_except

TASK = ("--task", "classify")
MULTI = "multi_label_classification"
NAMES = ("amber", "blue", "cyan")
NUMBERED = ("LABEL_0", "LABEL_1", "LABEL_2")


def write_classified(folder: Path, label: Callable[[int], Any], samples: int = 16) -> Path:
    """Write questions with labels, in all forms of a record; some have an answer too."""
    file = write_image_qa(folder, samples)
    lines = []
    for i, line in enumerate(file.read_text().splitlines()):
        question, answer = json.loads(line)["messages"]
        image, text = image_and_text(question["content"])
        if i % 3 == 0:
            record: dict[str, Any] = {"messages": [question]}
        elif i % 3 == 1:
            record = {"messages": [question, answer]}
        else:
            record = {"text": text, **({"image": image} if image else {})}
        lines.append(json.dumps({**record, "label": label(i)}))
    file.write_text("\n".join(lines) + "\n")
    return file


@pytest.fixture(scope="module")
def numbers(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_classified(tmp_path_factory.mktemp("numbers"), lambda i: i * i % 7 % 3)


@pytest.fixture(scope="module")
def several(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_classified(
        tmp_path_factory.mktemp("several"), lambda i: [n for n in range(3) if (i + n) % (n + 2)]
    )


@pytest.fixture(scope="module")
def named(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_classified(tmp_path_factory.mktemp("named"), lambda i: NAMES[i * i % 7 % 3])


def logits_of(model: Any, processor: Any, record: dict[str, Any], folder: Path) -> Tensor:
    """Return the logits (labels,) of transformers' class."""
    messages = record.get("messages")
    if messages is None:
        image = [{"type": "image", "image": record["image"]}] if "image" in record else []
        content = [*image, {"type": "text", "text": record["text"]}]
        messages = [{"role": "user", "content": content}]
    prompt = messages[-1]["role"] != "assistant"
    return model(**inputs_of(processor, messages, folder, prompt=prompt)).logits[0]


def plain_step(job: Job, **config: Any) -> Plain:
    """Compute HF's own loss, one record at a time."""
    processor = AutoProcessor.from_pretrained(job.checkpoint)
    model, trained = headed_model(job, **config)
    several = model.config.problem_type == MULTI
    model.config.problem_type = MULTI if several else "single_label_classification"
    losses = []
    for record in first_records(job, lambda record: 1):
        logits = logits_of(model, processor, record, job.data.parent)[None]
        right = torch.zeros(1, 3) if several else torch.tensor([record["label"]])
        if several:
            right[0, record["label"]] = 1
        losses.append(model.loss_function(right, logits, model.config))
    return Plain.of(torch.stack(losses).mean(), trained)


@pytest.mark.parametrize(
    ("kind", "layout", "flags"), slow_except(LAYOUTS, ("dense", "cp2", PACKED))
)
def test_loss_and_every_gradient_are_those_of_one_process(
    kind: str,
    layout: str,
    flags: tuple[str, ...],
    headed: Callable[..., Path],
    numbers: Path,
    tmp_path: Path,
) -> None:
    job = step_job(headed(kind, num_labels=3), numbers, layout, *TASK, *flags)
    check_step(job, plain_step(job), "classification loss", tmp_path)


@pytest.mark.parametrize("layout", ["single", *slow("dp2", "tp2xcp2+sp")])
def test_several_labels_may_be_right(
    layout: str, headed: Callable[..., Path], several: Path, tmp_path: Path
) -> None:
    """The checkpoint's config has the problem type; no flag is needed."""
    checkpoint = headed("dense", num_labels=3, problem_type=MULTI)
    job = step_job(checkpoint, several, layout, *TASK, *PACKED)
    check_step(job, plain_step(job), "classification loss", tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "layout"), [("dense", "cp2"), ("moe", "ep2xdp2")])
def test_an_adapter_trains_with_its_head_and_scores(
    checkpoint: Path, layout: str, numbers: Path, tmp_path: Path
) -> None:
    """The fast test of an adapter with a head is that of a reward model."""
    adapter = headed_adapter(tmp_path / "adapter", checkpoint, 3)
    job = step_job(checkpoint, numbers, layout, *TASK, *PACKED, lora=adapter)
    plain = plain_step(job, num_labels=3)
    exported = trained_adapter(job, plain, "classification loss", tmp_path)
    base = class_of(checkpoint).from_pretrained(checkpoint, dtype=torch.float32, num_labels=3)
    expected = logits_of_all(PeftModel.from_pretrained(base, exported), checkpoint, numbers)
    compare_scores(checkpoint, "tp2+sp", numbers, tmp_path, expected, NUMBERED, lora=exported)


def test_what_is_made_of_an_adapter_names_its_labels(
    dense: Path, numbers: Path, tmp_path: Path
) -> None:
    """The base is a language model."""
    adapter = headed_adapter(tmp_path / "adapter", dense, 3)
    base = class_of(dense).from_pretrained(dense, dtype=torch.float32, num_labels=3)
    expected = logits_of_all(PeftModel.from_pretrained(base, adapter), dense, numbers)
    merge(dense, adapter, tmp_path / "merged")
    merged = class_of(dense).from_pretrained(tmp_path / "merged", dtype=torch.float32)
    torch.testing.assert_close(
        logits_of_all(merged, tmp_path / "merged", numbers), expected, rtol=0, atol=TOLERANCE
    )
    convert_adapter(adapter, tmp_path / "converted", dense, roles="canonical")
    for config in (read_config_file(tmp_path / name) for name in ("merged", "converted")):
        assert Labels.of_config(config) == Labels(NUMBERED, "single_label_classification")


@pytest.mark.slow
def test_a_language_model_becomes_a_classifier_with_the_datas_labels(
    dense: Path, named: Path, tmp_path: Path
) -> None:
    """The run goes on, transformers' own class loads the export, and `score` agrees with it."""
    job = step_job(dense, named, "pp2", *TASK, *PACKED)
    save, exported = trained_twice(job, "classification loss", tmp_path)
    model = loaded(exported)
    assert model.config.id2label == dict(enumerate(NAMES))
    assert model.config.problem_type == "single_label_classification"
    expected = logits_of_all(model, exported, named)
    for checkpoint, layout in ((exported, "single"), (save, "cp2")):
        compare_scores(checkpoint, layout, named, tmp_path, expected, NAMES)
    with pytest.raises(BadInput, match=r"trained with the labels .*amber.*go on with the same"):
        validate([*job.argv, "--num-labels", "3", "--load", str(save)], 2)


@pytest.mark.slow
def test_several_labels_are_exported_and_scored(dense: Path, several: Path, tmp_path: Path) -> None:
    export = tmp_path / "export"
    job = step_job(dense, several, "single", *TASK, *PACKED, "--problem-type", MULTI)
    train(job, tmp_path / "run", "--save-hf", str(export))
    exported = export / "iter_0000001"
    model = class_of(exported).from_pretrained(exported, dtype=torch.float32)
    assert model.config.problem_type == MULTI
    expected = logits_of_all(model, exported, several)
    compare_scores(exported, "single", several, tmp_path, expected, NUMBERED, several=True)


def logits_of_all(model: Any, checkpoint: Path, data: Path) -> Tensor:
    """Return the logits (records, labels), with the processor of `checkpoint`."""
    processor = AutoProcessor.from_pretrained(checkpoint)
    records = [json.loads(line) for line in data.read_text().splitlines()]
    with torch.no_grad():
        return torch.stack([logits_of(model, processor, one, data.parent) for one in records])


def compare_scores(
    checkpoint: Path,
    layout: str,
    data: Path,
    folder: Path,
    logits: Tensor,
    names: Sequence[str],
    *,
    lora: Path | None = None,
    several: bool = False,
) -> None:
    """Compare the labels and probabilities that `score` writes with those of `logits`."""
    out = folder / f"{layout}.jsonl"
    found = scored(checkpoint, data, out, layout, "classify", lora=lora)
    assert found.scored == 16
    expected = logits.sigmoid() if several else logits.softmax(-1)
    right = [
        [name for name, value in zip(names, row, strict=True) if value > 0]
        if several
        else [names[row.index(max(row))]]
        for row in logits.tolist()
    ]
    entries = [json.loads(line) for line in out.read_text().splitlines()]
    assert [one["label"] for one in entries] == (right if several else [row[0] for row in right])
    assert found.labels == Counter(name for row in right for name in row)
    for entry, row in zip(entries, expected.tolist(), strict=True):
        assert list(entry["probabilities"]) == list(names)
        assert list(entry["probabilities"].values()) == pytest.approx(row, abs=TOLERANCE)


@pytest.mark.parametrize(
    ("label", "message"),
    [
        (lambda i: 0, "needs two labels or more; there is 1"),
        (lambda i: None, "No record of .* has a label"),
        (lambda i: 10**9 * i, r"A label is 3000000000.*pass --num-labels"),
        (lambda i: "a" if i else 1, r"Some labels are numbers \(1\), others names \(a\)"),
    ],
)
def test_labels_that_make_no_classifier_are_refused(
    label: Any, message: str, dense: Path, tmp_path: Path
) -> None:
    data = write_classified(tmp_path, label, 4)
    with pytest.raises(BadInput, match=message):
        validate(step_job(dense, data, "single", *TASK).argv, 1)


def test_an_adapter_to_begin_from_names_the_labels(
    dense: Path, numbers: Path, tmp_path: Path
) -> None:
    """Its head has a row for each of them, in their order; those of the data are not looked at."""
    adapter = headed_adapter(tmp_path / "adapter", dense, 5)
    settings = validate(step_job(dense, numbers, "single", *TASK, lora=adapter).argv, 1).settings
    assert settings.labels == Labels.numbered(5, "single_label_classification")


def test_labels_that_are_not_the_checkpoints_are_refused(
    dense: Path, headed: Callable[..., Path], numbers: Path, tmp_path: Path
) -> None:
    three = headed("dense", num_labels=3)
    with pytest.raises(BadInput, match=r"--num-labels 4: config.json of .* names 3 labels"):
        validate(step_job(three, numbers, "single", *TASK, "--num-labels", "4").argv, 1)
    with pytest.raises(BadInput, match="names no labels"):
        score(ScoreRequest(dense, numbers, tmp_path / "out.jsonl", task="classify"), on_cpu=True)


@pytest.mark.parametrize(("labels", "task"), [(1, "reward"), (3, "classify")])
def test_commands_that_would_ignore_an_adapters_head_name_the_one_that_uses_it(
    labels: int, task: Any, dense: Path, numbers: Path, tmp_path: Path
) -> None:
    adapter = headed_adapter(tmp_path / "adapter", dense, labels)
    refusal = f"whose head only `score --task {task}` uses: `score .* --task {task}`"
    for other in ("log-probabilities", "embedding", "reranker", "reward", "classify"):
        if other != task:
            with pytest.raises(BadInput, match=refusal):
                score(ScoreRequest(dense, numbers, lora=adapter, task=other), on_cpu=True)
    prompt = [{"role": "user", "content": "What is this?"}]
    with pytest.raises(BadInput, match=refusal):
        generate(Asked(dense, [prompt], lora=adapter), on_cpu=True)
