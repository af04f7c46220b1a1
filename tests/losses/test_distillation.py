"""Distillation in Megatron's loop equals a plain loop on the whole batch, in every layout."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from mcore_qwen3vl.converters.identify import identify
from mcore_qwen3vl.converters.torch_dist import read_metadata
from mcore_qwen3vl.losses.distillation import Distillation, DistillationLoss
from mcore_qwen3vl.losses.teacher_file import TeacherFile
from mcore_qwen3vl.scoring.score import ScoreRequest, score
from mcore_qwen3vl.tiny import write_tiny_checkpoint
from mcore_qwen3vl.tiny.records import write_image_qa
from mcore_qwen3vl.training.data_provider import data_config
from mcore_qwen3vl.verification.curves import (
    Job,
    curve_of,
    encode_conversation,
    sample_order,
    train,
    train_and_rewind,
    worst_difference,
)
from tests.losses.flags import BY_JSD, DISTILL, loss_of, parsed
from tests.training.log import entries_of
from tests.training.one_step import Plain, check_step, plain_model, random_adapter, step_job
from tests.turns import slow_except

K = 7
PACKED = ("--packing",)
TWO_ROWS = ("--micro-batch-size", "2", "--global-batch-size", "8")
FORWARD = Distillation(temperature=1.5, alpha=0.3)
REVERSE = Distillation("reverse")
JSD = Distillation("jsd", beta=0.2, temperature=0.8)


def flags_of(settings: Distillation) -> list[str]:
    """Return the flags of a training run with these settings."""
    values = vars(settings) if settings.divergence == "jsd" else vars(settings) | {"beta": None}
    flags = [(f"--distill-{n}", str(v)) for n, v in values.items() if v is not None]
    return ["--loss", "distill", *(word for flag in flags for word in flag)]


def live_flags(teacher: Path) -> tuple[str, ...]:
    return "--teacher", str(teacher), "--teacher-top-k", str(K)


@pytest.fixture(scope="module")
def records(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_image_qa(tmp_path_factory.mktemp("records"), 16)


def scored(records: Path, teacher: Path, folder: Path, temperature: float, k: int = K) -> Path:
    """Return a copy of the data with the teacher's tokens beside it."""
    data = shutil.copytree(records.parent, folder / "data") / records.name
    assert score(ScoreRequest(teacher, data, top_k=k, temperature=temperature), on_cpu=True)
    return data


def coarse(logits: Tensor, ids: Tensor) -> Tensor:
    """Return the log-probabilities (n, k + 1) of `ids` and of the rest, in float64."""
    chosen = logits.double().softmax(-1).gather(1, ids)
    return torch.cat([chosen, 1 - chosen.sum(-1, keepdim=True)], 1).log()


def divergence(student: Tensor, teacher: Tensor, settings: Distillation) -> Tensor:
    """Return the sum over tokens by torch's function, whose second argument is the first of KL."""

    def kl(p: Tensor, q: Tensor) -> Tensor:
        return F.kl_div(q, p, reduction="sum", log_target=True)

    if settings.divergence == "forward":
        return kl(teacher, student)
    if settings.divergence == "reverse":
        return kl(student, teacher)
    beta = settings.beta
    mixture = (beta * teacher.exp() + (1 - beta) * student.exp()).log()
    return beta * kl(teacher, mixture) + (1 - beta) * kl(student, mixture)


def plain_step(job: Job, teacher: Path, settings: Distillation) -> tuple[Plain, dict[str, float]]:
    """Run the first step of a plain loop, one sample at a time; return the log's numbers, too."""
    from transformers import AutoModelForImageTextToText, AutoProcessor

    processor = AutoProcessor.from_pretrained(job.checkpoint)
    other = AutoModelForImageTextToText.from_pretrained(teacher, dtype=torch.float32)
    student, named = plain_model(job)
    records = [json.loads(line)["messages"] for line in job.data.read_text().splitlines()]
    tokens, apart, own = 0, torch.zeros([]), torch.zeros([])
    for line in sample_order(job)[0]:
        inputs, labels = encode_conversation(processor, records[line], job.data.parent)
        trained = labels[1:] != -100
        logits = student(**inputs).logits[0, :-1][trained]
        with torch.no_grad():
            theirs = other(**inputs).logits[0, :-1][trained] / settings.temperature
        ids = theirs.topk(K).indices
        ours = coarse(logits / settings.temperature, ids)
        apart = apart + divergence(ours, coarse(theirs, ids), settings)
        own = own + F.cross_entropy(logits, labels[1:][trained], reduction="sum")
        tokens += int(trained.sum())
    loss = settings.alpha * own + (1 - settings.alpha) * settings.temperature**2 * apart
    numbers = {"divergence": float(apart) / tokens, "lm loss": float(own) / tokens}
    return Plain.of(loss / tokens, named), numbers


@pytest.fixture(scope="module")
def large(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A teacher of other depth and width than the students, with other DeepStack layers."""
    return write_tiny_checkpoint(
        tmp_path_factory.mktemp("large"),
        seed=5,
        text={"num_hidden_layers": 8, "hidden_size": 80, "intermediate_size": 136},
        vision={"depth": 6, "deepstack_visual_indexes": [2, 5], "hidden_size": 48},
    )


@pytest.fixture(scope="module")
def large_hybrid(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Qwen3.5 of other depth and width than the students, and of more shared experts."""
    text = {"num_hidden_layers": 8, "hidden_size": 80}
    path = tmp_path_factory.mktemp("large")
    return write_tiny_checkpoint(path, family="qwen3.5", moe=True, seed=7, text=text)


@pytest.fixture(scope="module")
def large_moe(tmp_path_factory: pytest.TempPathFactory) -> Path:
    text = {"num_hidden_layers": 8, "hidden_size": 80, "num_experts": 8}
    return write_tiny_checkpoint(tmp_path_factory.mktemp("large"), moe=True, seed=6, text=text)


BY_FILE = [
    ("dense", "moe", "cp2", REVERSE, PACKED),
    ("dense", "moe", "pp2", JSD, TWO_ROWS),
    ("dense", "moe", "single", FORWARD, PACKED),
    ("dense", "moe", "tp2+sp", FORWARD, PACKED),
    ("dense", "moe", "dp2", REVERSE, TWO_ROWS),
    ("dense", "moe", "dp2", FORWARD, (*PACKED, "--no-balance", "--head-chunk", "50")),
    ("dense", "moe", "tp2", JSD, ()),
    ("dense", "moe", "tp2xpp2", REVERSE, PACKED),
    ("dense", "moe", "pp2xvpp2", FORWARD, PACKED),
    ("dense", "moe", "cp2xdp2", JSD, PACKED),
    ("dense", "moe", "tp2xcp2+sp", FORWARD, TWO_ROWS),
    ("moe", "dense", "ep2xdp2", JSD, PACKED),
    ("moe", "dense", "tp2xetp2+sp", REVERSE, ()),
    ("hybrid", "large_hybrid", "tp2+sp", FORWARD, PACKED),
]
LIVE = [
    ("dense", "large", "tp2+sp", FORWARD, PACKED),
    ("dense", "large", "pp2xvpp2", JSD, TWO_ROWS),
    ("hybrid", "large_hybrid", "pp2", REVERSE, PACKED),
    ("dense", "large", "cp2xdp2", REVERSE, PACKED),
    ("moe", "large_moe", "ep2xdp2", FORWARD, PACKED),
    ("dense", "large", "single", REVERSE, TWO_ROWS),
    ("dense", "large", "pp2+first1+last3", FORWARD, PACKED),
    ("dense", "large", "tp2xpp2", JSD, PACKED),
    ("dense", "large", "tp2xcp2+sp", JSD, ()),
    ("dense", "large_moe", "tp2", FORWARD, PACKED),
    ("moe", "dense", "ep2xdp2", REVERSE, PACKED),
    ("moe", "large_moe", "tp2xetp2+sp", JSD, ()),
    ("dense", "large_hybrid", "tp2+sp", FORWARD, PACKED),
    ("hybrid", "large", "cp2", JSD, PACKED),
    ("hybrid_moe", "dense", "ep2xdp2", FORWARD, PACKED),
]
ROWS = [*(("by file", *row) for row in BY_FILE), *(("live", *row) for row in LIVE)]


@pytest.mark.parametrize(
    ("way", "student", "teacher", "layout", "settings", "flags"),
    slow_except(ROWS, ROWS[0], ROWS[len(BY_FILE)]),
)
def test_loss_and_every_gradient_are_those_of_one_process(
    way: str,
    student: str,
    teacher: str,
    layout: str,
    settings: Distillation,
    flags: tuple[str, ...],
    records: Path,
    tmp_path: Path,
    request: pytest.FixtureRequest,
) -> None:
    checkpoint, other = (request.getfixturevalue(name) for name in (student, teacher))
    flags, data = (*flags_of(settings), *flags), records
    if way == "live":
        flags = (*flags, *live_flags(other))
    else:
        data = scored(records, other, tmp_path, settings.temperature)
    job = step_job(checkpoint, data, layout, *flags)
    expected, numbers = plain_step(job, other, settings)
    entry = check_step(job, expected, "distill loss", tmp_path)
    assert {name: entry[name] for name in numbers} == pytest.approx(numbers, rel=2e-5)


def test_an_adapter_learns_from_a_teacher(
    dense: Path, moe: Path, records: Path, tmp_path: Path
) -> None:
    data = scored(records, moe, tmp_path, 1.0)
    adapter = random_adapter(tmp_path, dense)
    job = step_job(dense, data, "single", *flags_of(REVERSE), *PACKED, lora=adapter)
    check_step(job, plain_step(job, moe, REVERSE)[0], "distill loss", tmp_path)


@pytest.mark.slow
def test_a_live_teacher_is_the_one_of_the_file_and_a_run_resumes(
    dense: Path, large: Path, records: Path, tmp_path: Path
) -> None:
    """A run that stopped halfway and resumed has the same numbers, bit for bit."""
    data = scored(records, large, tmp_path, FORWARD.temperature)
    evaluation = ("--valid-data-path", str(data), "--eval-iters", "1", "--eval-interval", "2")
    by_file = step_job(
        dense, data, "single", *flags_of(FORWARD), *evaluation, *PACKED, steps=4, batch=2
    )
    live = replace(by_file, flags=(*by_file.flags, *live_flags(large)))
    whole, save = train_and_rewind(live, tmp_path)
    rest = train(live, tmp_path / "rest", "--save", str(save), "--save-interval", "1000")
    assert worst_difference(curve_of(rest), curve_of(whole[2:])).loss == 0
    other = tmp_path / "other"
    assert train(by_file, tmp_path / "file", "--save", str(other))
    entries, expected = (entries_of(tmp_path / run) for run in ("whole", "file"))
    assert [entry["iteration"] for entry in expected] == [1, 2, 2, 3, 4, 4]
    for entry, one in zip(entries, expected, strict=True):
        names = {"distill loss", "validation distill loss", "grad norm"} & one.keys()
        assert {n: entry[n] for n in names} == pytest.approx({n: one[n] for n in names}, rel=1e-6)
    index, theirs = (read_metadata(identify(folder).folder).tensors for folder in (save, other))
    assert {name: one.shape for name, one in index.items()} == {
        name: one.shape for name, one in theirs.items()
    }


def test_a_validation_without_training_has_its_teacher(
    dense: Path, large: Path, records: Path, tmp_path: Path
) -> None:
    """It is not packed, so that pipeline stages of the teacher too exchange rows of any length."""
    evaluation = ("--valid-data-path", str(records), "--eval-iters", "1", "--skip-train")
    flags = (*flags_of(FORWARD), *live_flags(large), *evaluation)
    losses = []
    for layout in ("single", "pp2"):
        job = step_job(dense, records, layout, *flags, *PACKED, steps=2)
        assert train(job, tmp_path / layout) == []
        (entry,) = entries_of(tmp_path / layout)
        assert entry["iteration"] == 0
        losses.append(entry["validation distill loss"])
    assert losses[0] > 0.1
    assert losses[1] == pytest.approx(losses[0], rel=2e-5)


def test_values_and_defaults_of_a_distillation(dense: Path) -> None:
    found = parsed(dense, *DISTILL, *BY_JSD, "--distill-beta", "0.1", "--distill-temperature", "2")
    assert isinstance(found.loss, DistillationLoss)
    assert found.loss.settings == Distillation("jsd", 0.1, 2.0)
    assert data_config(found).sidecar == TeacherFile(2.0)
    assert loss_of(dense, DistillationLoss, *DISTILL).settings == Distillation(
        "forward", 0.5, 1.0, 0.0
    )
    assert data_config(parsed(dense)).sidecar is None


def test_a_live_teacher_needs_no_file_and_sees_what_is_cut_off(dense: Path) -> None:
    found = parsed(dense, *DISTILL, "--teacher", "X", "--overlong", "truncate")
    assert isinstance(found.loss, DistillationLoss)
    assert found.loss.teacher_top_k == 64
    assert data_config(found).sidecar is None
