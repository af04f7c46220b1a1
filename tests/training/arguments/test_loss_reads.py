"""A check of data for a loss reads what its training does, by the loss's name and flags."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.metadata import EntryPoint
from pathlib import Path
from typing import Any

import pytest

from mcore_qwen3vl.data.records.reading import BadSample
from mcore_qwen3vl.data.sidecar import OpenSidecar, Sidecar
from mcore_qwen3vl.errors import BadInput
from mcore_qwen3vl.losses import registry
from mcore_qwen3vl.losses.loss import Loss
from mcore_qwen3vl.losses.preference import PreferenceRecords
from mcore_qwen3vl.losses.reference_file import ReferenceFile
from mcore_qwen3vl.losses.teacher_file import TeacherFile
from mcore_qwen3vl.rehearsal.command import write_made_up_sidecar
from mcore_qwen3vl.tiny.records import write_half_images
from mcore_qwen3vl.training.arguments import command_line
from mcore_qwen3vl.training.arguments.command_line import CommandLine
from mcore_qwen3vl.training.arguments.loss_reads import reads_of_loss
from tests.command import exit_code

SHAPE: dict[str, Any] = {"tokens": 200, "image_side": 4, "token_pixels": 8}


def check(data: Path, model: Path, *flags: object) -> int:
    common = ("--seq-length", 512, "--workers", 1)
    return exit_code("data", "check", data, "--hf-model", model, *common, *flags)


@pytest.fixture
def pairs(dense: Path, tmp_path: Path) -> Path:
    """Write four pairs, with the log-probabilities of a reference beside them."""
    file = write_half_images(tmp_path / "data", 4, **SHAPE, pairs=True)
    flags = ["--hf-model", str(dense), "--loss", "dpo", "--seq-length", "512"]
    write_made_up_sidecar(ReferenceFile(), file, dense, CommandLine(flags).settings)
    return file


def test_a_reference_is_checked_with_the_pairs(
    pairs: Path, dense: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert check(pairs, dense, "--loss", "dpo") == 0
    capsys.readouterr()
    scores = pairs.with_name("train.scores.jsonl")
    lines = scores.read_text().splitlines()
    lines[1] = json.dumps({"error": "it was too long"})
    lines[2] = lines[2].replace('"digest": "', '"digest": "0')
    scores.write_text("\n".join(lines) + "\n")
    assert check(pairs, dense) == 0  # nothing is read beside the data
    capsys.readouterr()
    assert check(pairs, dense, "--loss", "dpo", "--json") == 1
    bad = json.loads(capsys.readouterr().out)["bad"]
    assert [flaw["sample"] for flaw in bad] == [f"{pairs}:2", f"{pairs}:3"]
    assert "no reference in" in bad[0]["reason"]
    assert "it was too long" in bad[0]["reason"]
    assert "no longer has the tokens" in bad[1]["reason"]
    scores.unlink()
    assert check(pairs, dense, "--loss", "dpo") == 2
    assert "train.scores.jsonl does not exist" in capsys.readouterr().err
    assert check(pairs, dense, "--loss", "dpo --lora-rank 4") == 0  # the reference is the base


def test_records_of_another_form_are_bad_as_in_training(
    pairs: Path, dense: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pairs.open("a") as file:
        turns = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
        file.write(json.dumps({"messages": turns}) + "\n")
        file.write(json.dumps({"query": "a", "positive": "b"}) + "\n")
    assert check(pairs, dense) == 0  # each as its keys say
    for loss, usable in (("simpo", 4), ("distill --teacher DIR", 1), ("embedding", 1)):
        capsys.readouterr()
        assert check(pairs, dense, "--loss", loss, "--json") == 1
        found = json.loads(capsys.readouterr().out)["summary"]
        assert (found["usable"], found["bad"]) == (usable, 6 - usable), loss


def test_what_a_loss_trains_on_is_asked_of_each_record(
    dense: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "texts.jsonl"
    file.write_text(json.dumps({"query": "a", "positive": "b", "score": 0.5}) + "\n")
    assert check(file, dense, "--loss", "embedding --embedding-loss cosent") == 0
    capsys.readouterr()
    assert check(file, dense, "--loss", "embedding") == 1
    assert "add --embedding-loss cosine or cosent" in capsys.readouterr().out


def test_parts_for_another_loss_are_others(
    pairs: Path, dense: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    parts = ("--parts", tmp_path / "parts")
    assert check(pairs, dense, "--loss", "simpo", "--part", "0/1", *parts) == 0
    assert check(pairs, dense, "--loss", "simpo", "--merge", *parts) == 0
    capsys.readouterr()
    assert check(pairs, dense, "--loss", "embedding", "--merge", *parts) == 2
    assert "and this command differ in --loss" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("loss", "said"),
    [
        ("dop", "--loss dop is not known. There are cross_entropy"),
        ("dpo --lr 3", "unrecognized arguments: --lr 3"),
        ("dpo --loss kto", "unrecognized arguments: --loss kto"),
        ("dpo --distill-temperature 2", "--distill-temperature is set without --loss distill"),
        ("dpo --task embedding", "--loss dpo with --task embedding"),
        ("distill --distill-temperature 0", "distill_temperature is 0: it must be above 0"),
        ("dpo '", "cannot be divided into words"),
        (" ", "--loss names no loss"),
    ],
)
def test_what_is_refused(loss: str, said: str) -> None:
    with pytest.raises(BadInput, match=said):
        reads_of_loss(loss, ["--hf-model", "x"])


@pytest.mark.parametrize(
    ("loss", "sidecar"),
    [
        ("dpo", ReferenceFile()),
        ("dpo --lora-rank 4 --reference file", ReferenceFile()),
        ("dpo --lora-rank 4", None),
        ("dpo --lora-init DIR", ReferenceFile()),
        ("kto", None),
        ("distill", TeacherFile(1.0)),
        ("distill --distill-temperature 2", TeacherFile(2.0)),
        ("cross_entropy", None),
    ],
)
def test_which_file_is_read(loss: str, sidecar: Sidecar | None) -> None:
    assert reads_of_loss(loss, ["--hf-model", "x"])["sidecar"] == sidecar


class OnlyFirst(OpenSidecar):
    def look_up(self, number: int, plans: Sequence[Any]) -> int:
        if number:
            raise BadSample("it has no price")
        return 1


@dataclass(frozen=True)
class Prices(Sidecar):
    tax: float

    def file_of(self, data: Path) -> Path:
        return data.with_suffix(".prices")

    def open(self, paths: Sequence[Path], tokenizer: Any, vocab_size: int) -> list[OnlyFirst]:
        return [OnlyFirst() for _ in paths]


@dataclass(frozen=True)
class Dear(Loss):
    """A loss of another package, with a file beside the data."""

    tax: float | None = None
    """dear: what is added to each price"""

    names = ("dear",)
    group = "my package"
    records = PreferenceRecords()

    def sidecar(self, run: Any, lora: Any) -> Sidecar:
        return Prices(self.tax or 0.0)


def test_the_loss_of_another_package_says_what_is_read(
    pairs: Path, dense: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    caches = (registry.all_losses, registry._owners_of_flags, command_line._parser)
    entry = EntryPoint("theirs", f"{__name__}:Dear", registry.GROUP)
    monkeypatch.setattr(registry, "entry_points", lambda group: [entry])
    try:
        for cached in caches:
            cached.cache_clear()
        assert reads_of_loss("dear --tax 3", [])["sidecar"] == Prices(3.0)
        assert check(pairs, dense, "--loss", "dear --tax 3", "--json") == 1
    finally:
        monkeypatch.undo()
        for cached in caches:
            cached.cache_clear()
    bad = json.loads(capsys.readouterr().out)["bad"]
    assert [flaw["reason"] for flaw in bad] == ["it has no price"] * 3
