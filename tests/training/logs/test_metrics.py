"""The log's numbers are summed over ranks, given per second, and written to every log."""

from __future__ import annotations

import json
import math
import re
import threading
from collections import Counter
from functools import cache
from itertools import chain
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F

from mcore_qwen3vl.config import Architecture
from mcore_qwen3vl.errors import BadInput
from mcore_qwen3vl.layout import Layout
from mcore_qwen3vl.model import flops
from mcore_qwen3vl.runtime.launch import run_layout
from mcore_qwen3vl.tiny.records import write_image_qa
from mcore_qwen3vl.training.folders import log_file
from mcore_qwen3vl.training.logs import metrics
from mcore_qwen3vl.verification.curves import (
    TOLERANCE,
    Job,
    batch_names,
    encode_conversation,
    train,
)
from tests.test_files import full_disk
from tests.training.log import entries_of
from tests.training.toy import batch
from tests.turns import slow


def report(path: Path) -> dict[str, float]:
    """Report one micro-batch with an image on rank 0, and two of text on rank 1."""
    architecture = Architecture.from_hf(path)
    now = [0.0]
    recorder = metrics.Metrics(architecture, peak_tflops=1e-6, clock=lambda: now[0])
    rank = dist.get_rank()
    for _ in range(1 + rank):
        recorder.count(batch(architecture, image=rank == 0))
    with recorder.pause():
        now[0] += 3  # time that the report leaves out
    with recorder.leave_out():  # a step that trains nothing
        recorder.count(batch(architecture, image=True))
        now[0] += 5
    now[0] += 4
    return recorder.report(dist.group.WORLD)


def test_a_report_covers_all_ranks(dense: Path) -> None:
    first, second = run_layout(report, 2, dense)
    assert first == second
    a = Architecture.from_hf(dense)
    operations = flops.language(a, 39, 3 * (5**2 + 8**2)) + flops.vision(a, 16, 16**2)
    assert first == pytest.approx(
        {
            "tokens/s": 39 / 4,
            "trained tokens/s": 18 / 4,
            "images/s": 1 / 4,
            "patch imbalance": 2.0,
            "packing efficiency": 39 / 48,
            "skipped samples": 3 + 2,  # those of the step that is left out, too
            "over-long samples": 0,
            "TFLOP/s/device": operations / 4 / 2 / 1e12,
            "MFU": operations / 4 / 2 / 1e12 / 1e-6,
        }
    )


class Writer:
    """A stand-in for TensorBoard's writer and for W&B."""

    def __init__(self) -> None:
        self.seen: list[tuple] = []

    def add_scalar(self, *arguments: object) -> None:
        self.seen.append(arguments)

    def log(self, *arguments: object) -> None:
        self.seen.append(arguments)


@pytest.mark.parametrize(
    ("device", "peak"),
    [
        ("NVIDIA A100-SXM4-80GB", 312),
        ("NVIDIA H100 80GB HBM3", 989),
        ("NVIDIA H200", 989),
        ("NVIDIA B200", 2250),
        ("NVIDIA L4", None),
    ],
)
def test_the_peak_is_that_of_the_device(
    device: str, peak: float | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: device)
    assert metrics.device_peak_tflops() == peak


def test_a_report_is_written_where_flags_opened_a_log(tmp_path: Path) -> None:
    tensorboard, wandb = Writer(), Writer()
    metrics.write_report({"MFU": 0.5}, 7, tensorboard, wandb)
    metrics.write_report({"MFU": 0.5}, 7, None, None)
    assert tensorboard.seen == [("qwen3-vl/MFU", 0.5, 7)]
    assert wandb.seen == [({"qwen3-vl/MFU": 0.5}, 7)]
    metrics.append_json(str(tmp_path / "log"), {"MFU": 0.1 + 0.2})
    assert json.loads((tmp_path / "log").read_text()) == {"MFU": 0.1 + 0.2}
    assert metrics.log_line({"MFU": 0.5, "tokens/s": 12.0}) == " qwen3-vl | MFU: 0.5 | tokens/s: 12"


def test_what_is_no_number_is_null_in_the_log(tmp_path: Path) -> None:
    """Python's own reader of JSON takes NaN, and hardly any other does."""
    log = tmp_path / "log"
    metrics.append_json(str(log), {"loss": math.nan, "grad norm": math.inf, "lr": None, "MFU": 1.0})
    assert log.read_text() == '{"loss": null, "grad norm": null, "lr": null, "MFU": 1.0}\n'


def test_a_mean_over_steps_of_which_one_has_no_loss_is_none() -> None:
    losses = {"lm loss": torch.tensor(math.nan), "mtp_1 loss": torch.tensor(2.0)}
    for totals in ({}, {"lm loss": torch.tensor([5.0]), "mtp_1 loss": torch.tensor([1.0])}):
        before = dict(totals)
        assert metrics.known_losses(losses, totals) == {"mtp_1 loss": losses["mtp_1 loss"]}
        assert totals.pop("lm loss").isnan().tolist() == [True]
        before.pop("lm loss", None)
        assert totals == before  # Megatron adds the others
    assert metrics.known_losses({"lm loss": torch.tensor(1.5)}, {}) == {"lm loss": 1.5}


def test_a_step_whose_records_are_all_unusable_has_no_loss(dense: Path, tmp_path: Path) -> None:
    """A third of the steps is such a one, and so is the validation's only batch."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    turns = [[{"role": "user", "content": "What?"}, {"role": "assistant", "content": "That."}]]
    records = [{"messages": messages} for messages in (*turns * 2, turns[0][:1])]
    train_on, valid = tmp_path / "train.jsonl", tmp_path / "valid.jsonl"
    train_on.write_text("\n".join(map(json.dumps, records)))
    valid.write_text("\n".join(map(json.dumps, records[::-1])))
    flags = ("--no-shuffle", "--max-bad-fraction", "1", "--valid-data-path", str(valid))
    flags = (*flags, "--eval-iters", "1")
    job = Job(dense, train_on, steps=3, batch=1, flags=(*flags, "--early-stop-patience", "1"))
    events, save = tmp_path / "events", tmp_path / "save"
    train(job, tmp_path, "--tensorboard-dir", str(events), "--save", str(save))
    log = entries_of(tmp_path)
    assert [entry["lm loss"] is None for entry in log[:3]] == [False, False, True]
    assert log[2]["grad norm"] == 0
    skipped = {"validation skipped samples": 1}
    assert log[3] == {"iteration": 3, "validation lm loss": None, **skipped}
    written = EventAccumulator(str(events))
    written.Reload()
    assert [event.step for event in written.Scalars("lm loss")] == [1, 2]
    assert "lm loss validation" not in written.Tags()["scalars"]
    said = (tmp_path / "output.txt").read_text()
    assert "best validation loss" not in said
    assert re.search(r"step 3/3  grad norm 0  lr 0.001  skipped 1 ", said)
    megatrons = log_file(save, 0).read_text()
    assert "nan |" not in megatrons
    assert json.loads((save / "validation.json").read_text())["losses"] == [[3, None]]


def test_a_full_disk_leaves_out_whole_lines(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    log = tmp_path / "log"
    metrics.append_json(str(log), {"iteration": 1})
    with full_disk(log.stat().st_size + 5):
        for step in (2, 3):
            metrics.append_json(str(log), {"iteration": step})
    metrics.append_json(str(log), {"iteration": 4})
    lines = [json.loads(line)["iteration"] for line in log.read_text().splitlines()]
    assert lines == [1, 4]
    said = [record.getMessage() for record in caplog.records]
    assert said == [
        f"The line of step {n} is not in {log}: No space left on device." for n in (2, 3)
    ]


def test_a_full_disk_of_tensorboard_is_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from torch.utils.tensorboard import SummaryWriter

    shown: list[threading.ExceptHookArgs] = []
    monkeypatch.setattr(threading, "excepthook", shown.append)

    def fill() -> None:
        writer = SummaryWriter(tmp_path)
        for step in range(10_000):
            writer.add_scalar("loss", 1.0, step)
            writer.flush()

    said = rf"files in {tmp_path} cannot be written: File too large\. Make room"
    explained = metrics.explain_tensorboard_errors(str(tmp_path))
    with full_disk(1000), pytest.raises(BadInput, match=said), explained:
        fill()
    assert shown == []
    with pytest.raises(OSError, match="mine"), metrics.explain_tensorboard_errors(str(tmp_path)):
        raise OSError("mine")


def test_tensorboard_holds_what_the_log_says(dense: Path, data: Path, tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    job = Job(dense, data, Layout.parse("dp2"), steps=2, batch=2, seq_length=256, packing=True)
    log = train(job, tmp_path, "--tensorboard-dir", str(tmp_path / "events"), "--peak-tflops", "1")
    events = EventAccumulator(str(tmp_path / "events"))
    events.Reload()
    ours = {name for name in log[0] if name not in ("iteration", "lm loss", "grad norm")}
    ours.remove("learning rate")
    assert {
        "tokens/s", "images/s", "patch imbalance", "packing efficiency", "skipped samples", "MFU",
        "grad norm vision", "grad norm aligner", "grad norm language",
    } <= ours  # fmt: skip
    for name in ours:
        written = [(event.step, event.value) for event in events.Scalars(f"qwen3-vl/{name}")]
        assert written == [(e["iteration"], pytest.approx(e[name], rel=1e-6)) for e in log], name
    losses = [event.value for event in events.Scalars("lm loss")]
    assert losses == pytest.approx([entry["lm loss"] for entry in log], rel=1e-6)


@pytest.mark.parametrize("flags", [(), ("--fp16", "--initial-loss-scale", "1024")])
def test_the_parts_norms_make_the_whole_norm(
    flags: tuple[str, ...], dense: Path, data: Path, tmp_path: Path
) -> None:
    """fp16's loss scale is in the gradients when the parts are measured."""
    job = Job(dense, data, Layout.parse("dp2"), steps=2, batch=2, seq_length=256, packing=True)
    for entry in train(job, tmp_path, *flags):
        parts = [entry[f"grad norm {part}"] for part in ("vision", "aligner", "language")]
        assert min(parts) > 0
        assert math.hypot(*parts) == pytest.approx(entry["grad norm"], rel=1e-4)


NAMES = {"first/train.jsonl": "first/train.jsonl", "second/train.jsonl": "sums"}
"""The name in the log of each data set: by default its path."""

TWO_ROWS = ("--micro-batch-size", "2", "--global-batch-size", "8")


@pytest.fixture(scope="module")
def mixture(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write a data set of images and one of sums, which have other lengths and other losses."""
    folder = tmp_path_factory.mktemp("mixture")
    write_image_qa(folder / "first", 12, text_only_every=None)
    write_image_qa(folder / "second", 12, text_only_every=1, seed=1)
    file = folder / "mixture.yaml"
    file.write_text(
        "datasets:\n  - {path: first/train.jsonl}\n  - {path: second/train.jsonl, name: sums}\n"
    )
    return file


class Plain:
    """Losses of single samples by plain Hugging Face, without training."""

    def __init__(self, checkpoint: Path, folder: Path) -> None:
        from transformers import AutoModelForImageTextToText, AutoProcessor

        self._processor = AutoProcessor.from_pretrained(checkpoint)
        self._model = AutoModelForImageTextToText.from_pretrained(checkpoint, dtype=torch.float32)
        self._folder = folder
        self.of = cache(self._of)

    @torch.no_grad()
    def _of(self, name: str) -> tuple[str, float, int]:
        """Return the data set of a sample, the sum of its losses, and its trained tokens."""
        file, line = name.rsplit(":", 1)
        path = next(self._folder / path for path in NAMES if file.endswith(path))
        record = json.loads(path.read_text().splitlines()[int(line) - 1])
        inputs, labels = encode_conversation(self._processor, record["messages"], path.parent)
        logits = self._model(**inputs).logits[0, :-1]
        loss = F.cross_entropy(logits, labels[1:], reduction="sum").item()
        return str(path.relative_to(self._folder)), loss, int((labels != -100).sum())

    def means(self, steps: list[list[str]]) -> dict[str, float]:
        """Return the mean loss of each data set over the samples of some steps."""
        total, tokens = Counter[str](), Counter[str]()
        for name in (name for step in steps for name in step):
            data_set, loss, count = self.of(name)
            total[NAMES[data_set]] += loss  # type: ignore[assignment]
            tokens[NAMES[data_set]] += count
        return {f"lm loss {name}": total[name] / tokens[name] for name in total}


def of_data_sets(entry: dict[str, Any], prefix: str = "") -> dict[str, float]:
    begin = f"{prefix}lm loss "
    return {name.removeprefix(prefix): x for name, x in entry.items() if name.startswith(begin)}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("layout", "flags"),
    [
        ("cp2", ("--packing",)),
        ("single", TWO_ROWS),
        ("dp2", ("--packing", "--no-balance")),
        ("tp2+sp", ("--packing",)),
        ("pp2xvpp2", ("--packing",)),
        ("cp2xdp2", ()),
    ],
)
def test_each_data_sets_loss_is_that_of_plain_hugging_face(
    layout: str, flags: tuple[str, ...], dense: Path, mixture: Path, tmp_path: Path
) -> None:
    """Over all micro-batches of all steps since the last entry, in training and validation."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    still = ("--lr", "0", "--weight-decay", "0", "--log-interval", "2")
    valid = ("--valid-data-path", str(mixture), "--eval-iters", "2", "--eval-interval", "4")
    logs = ("--tensorboard-dir", str(tmp_path / "events"))
    job = Job(
        dense, mixture, Layout.parse(layout), steps=4, batch=2, seq_length=256,
        flags=(*still, *flags),
    )  # fmt: skip
    train(job, tmp_path, *valid, *logs, timeout=300)
    log = entries_of(tmp_path)
    found = {entry["iteration"]: of_data_sets(entry) for entry in log if "lm loss" in entry}
    (validation, *_) = (entry for entry in log if "validation lm loss" in entry)
    plain = Plain(dense, mixture.parent)
    order = [list(chain.from_iterable(step)) for step in batch_names(job, mixture, 4)]
    for end in (2, 4):
        assert found[end] == pytest.approx(plain.means(order[end - 2 : end]), rel=TOLERANCE)
    assert len(found[2] | found[4]) == 2  # two steps of few samples may draw from one data set
    validated = batch_names(job, mixture, 2, split="val")
    expected = plain.means([list(chain.from_iterable(step)) for step in validated])
    assert of_data_sets(validation, "validation ") == pytest.approx(expected, rel=TOLERANCE)
    events = EventAccumulator(str(tmp_path / "events"))
    events.Reload()
    for name, value in found[4].items():
        assert events.Scalars(f"qwen3-vl/{name}")[-1].value == pytest.approx(value, rel=1e-6)
        assert events.Scalars(f"{name} validation")[0].step == 4


@pytest.mark.parametrize("layout", ["pp2xdp2", *slow("tp2xcp2+sp")])
def test_a_validation_names_the_number_of_records_that_it_left_out(
    layout: str, dense: Path, tmp_path: Path
) -> None:
    """Otherwise the mean of a part would stand there as that of all."""
    data = write_image_qa(tmp_path / "data", 5)
    records = [json.loads(line) for line in data.read_text().splitlines()]
    for record in records[1:4]:
        record["messages"][-1]["content"] = "a long answer " * 30
    del records[4]["messages"][-1]["content"]
    valid = data.with_name("valid.jsonl")
    valid.write_text("".join(json.dumps(record) + "\n" for record in records))
    flags = ("--valid-data-path", str(valid), "--eval-interval", "1", "--max-bad-fraction", "1")
    job = Job(dense, data, Layout.parse(layout), steps=2, batch=2, flags=flags)
    train(job, tmp_path, "--eval-micro-batch-size", "1")
    first, second = (e for e in entries_of(tmp_path) if "validation lm loss" in e)
    assert first["validation over-long samples"] == second["validation over-long samples"] == 3
    assert first["validation skipped samples"] == second["validation skipped samples"] == 1
    said = (tmp_path / "output.txt").read_text()
    assert "without 1 skipped samples  without 3 over-long samples" in said
