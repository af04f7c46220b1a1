"""What each row of the contract says of a command that differs, through the command line's parser.

Two commands are parsed, and their records compared as where a run goes on; what such runs do is
tested in :mod:`.test_going_on`.
"""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path
from unittest.mock import Mock

import pytest

from mcore_qwen3vl.training.checkpoints.run_checkpoints import RunCheckpoints
from mcore_qwen3vl.training.contract.record import RunRecord, compare, validates_otherwise
from mcore_qwen3vl.training.contract.rules import Notice, Steering
from tests.training.contract.conftest import record

SAID, REFUSED = False, True
WSD = "--lr-decay-style WSD --lr-wsd-decay-style linear --lr-wsd-decay-iters"
GROWS = "--train-samples 9 --step-batch-size-schedule"
KTO = "--loss kto --lora-rank 2 --global-batch-size 4"
EXPERTS = "--global-batch-size 4 --moe-aux-loss-coeff 0.1 --moe-expert-capacity-factor 2"
TWO = "--micro-batch-size 2 --global-batch-size 4 --valid-data-path b.jsonl"

CASES = [
    # The row, the model, the flags of the checkpoint, those of the command, and what comes of it.
    ("data sets", "dense", "--data-path a.jsonl", "--data-path b.jsonl", REFUSED, "same size"),
    ("data sets", "dense", "--data-path a.jsonl", "--data-path c.jsonl", REFUSED, "c.jsonl"),
    ("data sets", "dense", "--data-path a.jsonl", "--data-path sorted.jsonl", REFUSED, "order"),
    ("mixture", "dense", "--data-path half.yaml", "--data-path most.yaml", REFUSED, "0.5 0.5"),
    ("mixture", "dense", "--data-path 1 a.jsonl 3 c.jsonl", "--data-path 3 a.jsonl 1 c.jsonl",
     REFUSED, "0.25 0.75"),
    ("mixture", "dense", "--data-path once.yaml", "--data-path twice.yaml", REFUSED, "epochs 1 2"),
    ("mixture", "dense", "--data-path one.yaml", "--data-path two.yaml", REFUSED, "samples 1 2"),
    ("reading of records", "dense", "", "--image-max-pixels 4096", SAID, "read so"),
    ("reading of records", "dense", "", "--train-on last", SAID, "--train-on last"),
    ("reading of records", "dense", "--packing", "--packing --overlong truncate", REFUSED, "pack"),
    ("order", "dense", "", "--seed 7", REFUSED, "--seed 1234, and this command --seed 7"),
    ("order", "dense", "", "--no-shuffle", REFUSED, "no --no-shuffle, and .* --no-shuffle"),
    ("packs", "dense", "--packing", "", REFUSED, "--packing"),
    ("packs", "dense", "--packing", "--packing --seq-length 64", REFUSED, "--seq-length 128"),
    ("packs", "dense", "--packing", "--packing --packing-buffer 7", REFUSED, "buffer 128"),
    ("packs", "dense", "--packing", "--packing --no-balance", REFUSED, "--balance"),
    ("packs", "dense", "--packing", "--packing --context-parallel-size 2", REFUSED, "no room"),
    ("row length", "dense", "", "--seq-length 64", SAID, "longer samples"),
    ("validation", "dense", "--valid-data-path a.jsonl", "--valid-data-path b.jsonl", SAID,
     "not compared"),
    ("validation", "dense", "--valid-data-path a.jsonl", "--valid-data-path a.jsonl --eval-iters 2",
     SAID, "first 2 samples in place of all"),
    ("length of the run", "dense", "", "--train-iters 9 --lr-decay-iters 3", SAID, "another step"),
    ("length of the run", "dense", "--num-epochs 2 --lr-decay-style constant",
     "--num-epochs 1 --lr-decay-style constant", REFUSED, "Give 2 or more"),
    ("length of the run", "dense", "--num-epochs 1 --lr-decay-style constant",
     "--num-epochs 2 --lr-decay-style constant", SAID, "--num-epochs 2 in place of"),
    ("batch", "dense", "--lr-decay-style constant", "--lr-decay-style constant "
     "--global-batch-size 4", REFUSED, "Leave it out .* --override"),
    ("batch", "dense", f"{GROWS} 0:1,256:2", f"{GROWS} 0:1,512:2", REFUSED,
     "0:1,256:2, and this command --step-batch-size-schedule 0:1,512:2. Leave"),
    ("skipped steps", "dense", "", "--iterations-to-skip 2", SAID, "skip 2"),
    ("optimizer", "dense", "", "--optimizer sgd", REFUSED, "--no-load-optim"),
    ("hyperparameters", "dense", "", "--adam-beta2 0.9", REFUSED, "0.999, and .* 0.9. Add --over"),
    ("hyperparameters", "dense", "--optimizer sgd", "--optimizer sgd --sgd-momentum 0.5", REFUSED,
     "momentum 0.9"),
    ("learning rate", "dense", "", "--lr 0.5", REFUSED, "--lr 1.0, and .* --lr 0.5. Add"),
    ("learning rate", "dense", "", "--vision-lr-mult 0.1", REFUSED, "mult 1.0, and"),
    ("learning rate", "dense", "", "--lr-warmup-iters 0 --lr-warmup-init 0.1", REFUSED, "init 0.1"),
    ("schedule", "dense", "", "--lr-warmup-iters 1", REFUSED, "warm-up of 1 steps, 1 samples"),
    ("schedule", "dense", "", "--train-iters 9", REFUSED, "3 steps, 3 samples, .* 9 steps"),
    ("schedule", "dense", "", "--lr-decay-style cosine", REFUSED, "style cosine"),
    ("schedule", "dense", f"{WSD} 1", f"{WSD} 2", REFUSED, "at the end of 1 steps"),
    ("schedule", "dense", f"{WSD} 1", f"{WSD} 1 --lr-wsd-decay-style cosine", REFUSED, "linear"),
    ("weight decay", "dense", "", "--weight-decay 0", REFUSED, "--weight-decay 0.0"),
    ("gradient clipping", "dense", "", "--clip-grad 0.5", SAID, "from the next step"),
    ("optimizer's state", "dense", "", "--use-distributed-optimizer", REFUSED, "stored otherwise"),
    ("optimizer's state", "dense", "", "--bf16", REFUSED, "16-bit weights"),
    ("what trains", "dense", "", "--freeze vision", SAID, "vision in place of no --fre"),
    ("loss", "dense", "", "--loss simpo", REFUSED, "another run"),
    ("settings of the loss", "dense", "--loss simpo", "--loss simpo --beta 3", SAID, "--beta 3"),
    ("MTP", "hybrid", "--mtp-num-layers 1", "", REFUSED, "add --mtp-num-layers 1"),
    ("MTP", "hybrid", "--mtp-num-layers 1",
     "--mtp-num-layers 1 --mtp-loss-scaling-factor 0.3", SAID, "factor 0.3"),
    ("routing of experts", "moe", "", "--moe-z-loss-coeff 0.5", SAID, "--moe-z-loss-coeff 0.5"),
    ("dropout", "dense", "", "--hidden-dropout 0.5", SAID, "--hidden-dropout 0.5"),
    ("precision", "dense", "--use-distributed-optimizer", "--use-distributed-optimizer --bf16",
     SAID, "rounded otherwise"),
    ("layout", "dense", "", "--tensor-model-parallel-size 2", SAID, "rounding"),
    ("layout", "dense", "--micro-batch-size 1 --global-batch-size 2",
     "--micro-batch-size 2 --global-batch-size 2", SAID, "size 1: results differ by their round"),
    ("layout", "dense", f"{KTO} --micro-batch-size 2", f"{KTO} --micro-batch-size 4", SAID,
     "exchanged answers of KTO's baseline are of other micro-batches"),
    ("validation", "dense", f"{KTO} {TWO} --eval-micro-batch-size 2",
     f"{KTO} {TWO} --eval-micro-batch-size 4", SAID,
     "micro-batches of 4 in place of micro-batches of 2"),
    ("layout", "moe", f"{EXPERTS} --micro-batch-size 2", f"{EXPERTS} --micro-batch-size 4", SAID,
     "balancing loss of experts and what experts drop are of other micro-batches"),
]  # fmt: skip


def findings(
    model: Path, data: Path, before: str, now: str, steering: Steering = None
) -> list[Notice]:
    saved = record(model, data, before)
    again = RunRecord(json.loads(json.dumps(saved.rows)))  # as a checkpoint keeps it
    return compare(again, record(model, data, now), steering=steering)


@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case[0]}: {case[3]}"[:60])
def test_a_change_is_said_or_refused_as_the_table_says(
    case: tuple[str, str, str, str, bool, str], folder: Path, request: pytest.FixtureRequest
) -> None:
    row, name, before, now, refused, words = case
    model = request.getfixturevalue(name)
    assert findings(model, folder, before, before) == []
    (found,) = (f for f in findings(model, folder, before, now) if f.row == row)
    assert found.refused is refused
    assert re.search(words, found.text), found.text


@pytest.mark.parametrize(
    ("flags", "ending"),
    [
        ("--loss dpo --reference file", "scores.jsonl"),
        ("--loss distill", "topk.arrow"),
    ],
)
@pytest.mark.parametrize("data", ["--data-path", "--valid-data-path"])
def test_scores_beside_the_data_count_by_their_content(
    flags: str, ending: str, data: str, dense: Path, folder: Path, tmp_path: Path
) -> None:
    """Another model that has scored the data is another reference, or another teacher."""
    set_of = tmp_path / "x.jsonl"
    shutil.copy(folder / "a.jsonl", set_of)
    flags = f"{flags} {data} {set_of}"
    scores = tmp_path / f"x.{ending}"
    records = []
    for content in ("one", "one", "two"):
        scores.write_text(content)
        records.append(record.__wrapped__(dense, folder, flags))
    assert compare(*records[:2]) == []
    (found,) = compare(*records[1:])
    assert found.row == ("files of the loss" if data == "--data-path" else "validation")
    assert not found.refused
    assert re.search(rf"x\.{ending} of content \w+ in place of x\.{ending}", found.text)
    assert validates_otherwise(*records[1:]) is (data == "--valid-data-path")


def test_what_is_the_same_in_other_words_is_the_same(dense: Path, folder: Path) -> None:
    for before, now in (
        ("--data-path 1 a.jsonl 3 c.jsonl", "--data-path 0.25 a.jsonl 0.75 c.jsonl"),
        ("--data-path half.yaml", "--data-path 2 a.jsonl 2 c.jsonl"),
        ("--train-iters 3", "--train-iters 3 --lr-decay-iters 3"),
        ("--packing", "--packing --balance"),
        ("", "--weight-decay 0.01"),
    ):
        assert findings(dense, folder, before, now) == []


@pytest.mark.parametrize("steering", ["command", "checkpoint"])
def test_two_flags_say_whose_rates_hold(steering: Steering, dense: Path, folder: Path) -> None:
    now = "--lr 0.5 --adam-beta1 0.5 --weight-decay 0 --lr-warmup-iters 1 --global-batch-size 2"
    found = findings(dense, folder, "", now, steering)
    assert not any(each.refused for each in found)
    rows = ["batch", "hyperparameters", "learning rate", "schedule", "weight decay"]
    assert [each.row for each in found] == rows
    from_here = [each.row for each in found if "from the next step on" in each.text]
    assert from_here == (rows if steering == "command" else ["batch"])


def test_the_length_does_not_matter_where_the_rate_is_constant(dense: Path, folder: Path) -> None:
    constant = "--lr-decay-style constant"
    found = findings(dense, folder, constant, f"{constant} --train-iters 9")
    assert [(each.row, each.refused) for each in found] == [("length of the run", False)]


def test_a_batch_that_grows_is_the_same_on_more_ranks(dense: Path, folder: Path) -> None:
    """Megatron sets --global-batch-size beside it, to one micro-batch a rank."""
    before = f"{GROWS} 0:2,256:4"
    assert findings(dense, folder, before, f"{before} --micro-batch-size 2")[0].row == "layout"
    rows = record(dense, folder, before).rows
    assert rows["batch"]["step_batch_size_schedule"] == "0:2,256:4"
    assert "global_batch_size" not in rows["batch"]


def test_padding_of_samples_in_packs_may_become_less(dense: Path, folder: Path) -> None:
    before = "--packing --context-parallel-size 2"
    assert not any(each.refused for each in findings(dense, folder, before, "--packing"))


def test_the_checkpoints_rates_are_those_that_megatron_builds_from(
    dense: Path, folder: Path
) -> None:
    rates = record(dense, folder, f"{WSD} 1 --adam-beta1 0.5").rates_and_schedule()
    assert rates["lr_decay_style"] == "WSD"
    assert (rates["lr_wsd_decay_style"], rates["lr_wsd_decay_iters"]) == ("linear", 1)
    assert (rates["lr"], rates["adam_beta1"], rates["weight_decay"]) == (1, 0.5, 0.01)
    assert "start_weight_decay" not in rates


def test_flags_about_all_data_sets_are_not_said_of_a_mixture_file(
    dense: Path, folder: Path
) -> None:
    (found,) = findings(dense, folder, "", "--train-on last")
    assert "mixture" not in found.text


def test_a_budget_is_named_by_its_flag_alone(dense: Path, folder: Path) -> None:
    (found,) = findings(dense, folder, "", "--image-max-pixels 4096")
    assert "--image-max-pixels 4096" in found.text
    assert "processor" not in found.text


def test_a_run_from_another_makers_checkpoint_is_recorded_when_it_begins() -> None:
    """Data that change until the first save would be recorded as those of the run."""
    run = Mock()
    run.settings.checkpoints.load = None
    checkpoints = RunCheckpoints.__new__(RunCheckpoints)
    checkpoints._run, checkpoints._settings, checkpoints._exports_to = run, run.settings, None
    assert checkpoints.load(Mock(), []) == (0, 0)
    run.contract.check.assert_called_once_with(None)
