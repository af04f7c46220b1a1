"""For each row of the contract: a run, the command that goes on with it, and what comes of that."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest

from tests.training.contract.going_on import HALF, STEPS, Going

SILENT, SAID, UNUSED, REFUSED = "nothing is said", "said", "named as not used", "refused"
PADDED, PACKED = False, True
Effect = Callable[[Going, Going], None]
"""Asserts what a resumed run did, given the unstopped run, and this one."""


@dataclass(frozen=True)
class Case:
    """A run that is stopped, changed and goes on.

    Attributes:
        row: of the contract.
        run: flags of the run that is stopped.
        then: those of the command that goes on, in their place.
        comes: what comes of it.
        words: of what is said or refused, as a regular expression.
        effect: what the run does then.
        model: the fixture.
        only: with or without packing; None: both.
        layout: of the resuming command, by the layout of the run; default: the same.
        stop: the step after which the run is stopped.
        record: values that the checkpoint's record has otherwise than this machine can compute.
    """

    row: str
    run: str
    then: str
    comes: str
    words: str = ""
    effect: Effect | None = None
    model: str = "dense"
    only: bool | None = None
    layout: dict[str, str] = field(default_factory=dict)
    stop: int = HALF
    record: dict[str, Any] = field(default_factory=dict)

    def __str__(self) -> str:
        return f"{self.row}: {self.run or 'as it is'}, then {self.then or 'as it is'}"[:90]


# Effects.


def same(whole: Going, rest: Going) -> None:
    """The run is the one that was not stopped: records, losses, rates and each bit of weights."""
    assert rest.steps == {n: step for n, step in whole.steps.items() if n in rest.steps}
    assert rest.steps


def same_records(whole: Going, rest: Going) -> None:
    """The records come as without a stop, so each comes once."""
    expected = {n: whole.steps[n].records for n in rest.steps}
    assert {n: step.records for n, step in rest.steps.items()} == expected
    assert max(rest.steps) == STEPS


def from_the_next_step(whole: Going, rest: Going) -> None:
    """The first loss is of the same weights; the step after it is another one."""
    same_records(whole, rest)
    first = min(rest.steps)
    assert rest.steps[first].loss == whole.steps[first].loss
    assert rest.steps[first].weights != whole.steps[first].weights


def computed_otherwise(whole: Going, rest: Going) -> None:
    """The same records have another loss, of the same weights."""
    same_records(whole, rest)
    first = min(rest.steps)
    assert rest.steps[first].loss != whole.steps[first].loss


def rounded_otherwise(limit: float) -> Effect:
    """Return the effect of another precision or layout: losses differ by their rounding."""

    def effect(whole: Going, rest: Going) -> None:
        same_records(whole, rest)
        for number, step in rest.steps.items():
            assert step.loss == pytest.approx(whole.steps[number].loss, rel=limit)

    return effect


def leaves_out_the_longest(whole: Going, rest: Going) -> None:
    """What is too long now is left out of its place, and the others stay where they were."""
    for number, step in rest.steps.items():
        assert set(step.records) <= set(whole.steps[number].records)
    assert sum(rest.records().values()) < sum(len(whole.steps[n].records) for n in rest.steps)


def larger_batch(whole: Going, rest: Going) -> None:
    """The next step has the records that two steps would have had."""
    first = min(rest.steps)
    both = (*whole.steps[first].records, *whole.steps[first + 1].records)
    assert rest.steps[first].records == tuple(sorted(both))


def longer(whole: Going, rest: Going) -> None:
    """The run goes on beyond the end that it had, and each record comes before one comes again."""
    assert [*rest.steps] == list(range(HALF + 1, STEPS + 3))
    begun = {n: step for n, step in whole.steps.items() if n <= HALF}
    often = (Going(begun, "").records() + rest.records()).values()
    assert max(often) <= min(often) + 1


def twice(whole: Going, rest: Going) -> None:
    """With the epoch before, each record has come twice."""
    assert whole.records() + rest.records() == Counter(dict.fromkeys(whole.records(), 2))
    assert len(whole.records()) == 7


def once_more_with_twice_as_many(whole: Going, rest: Going) -> None:
    """The epoch of seven ends as it would have, and the next one has fourteen."""
    begun = Going({1: whole.steps[1]}, "").records() + rest.records()
    lines = Counter(int(name.rsplit(":", 1)[1]) for name in begun.elements())
    assert lines == {**dict.fromkeys(range(1, 8), 2), **dict.fromkeys(range(8, 15), 1)}


def leaves_out_a_step(whole: Going, rest: Going) -> None:
    """The step takes its records and changes nothing."""
    same_records(whole, rest)
    assert rest.steps[HALF + 1].weights == whole.steps[HALF].weights
    assert rest.steps[HALF + 2].weights != whole.steps[HALF].weights


def freezes_vision(whole: Going, rest: Going) -> None:
    """The tower stays, and the rest trains."""
    same_records(whole, rest)
    before, after = whole.steps[HALF].weights, rest.steps[STEPS].weights
    assert after["vision"] == before["vision"]
    assert after["language"] != before["language"]


COMMAND, CHECKPOINT = "--override-opt-param-scheduler", "--use-checkpoint-opt-param-scheduler"


def steered(row: str, run: str, then: str, was: str, unused: str | None = None) -> list[Case]:
    """Return the cases of a row that two flags decide.

    `was` says the checkpoint's value, and `unused` what is named of `then` where that holds.
    """
    return [
        Case(row, run, then, REFUSED, f"the checkpoint has .*{was}"),
        Case(row, run, f"{then} {COMMAND}", SAID, f"{row}: .*in place of .*{was}", later),
        Case(row, run, f"{then} {CHECKPOINT}", UNUSED, unused or then, same),
    ]


def later(whole: Going, rest: Going) -> None:
    """The command's rates hold in one of the steps that follow."""
    same_records(whole, rest)
    first = min(rest.steps)
    assert rest.steps[first].loss == whole.steps[first].loss
    assert rest.steps[STEPS].weights != whole.steps[STEPS].weights


WSD = "--lr-decay-style WSD --lr-wsd-decay-style linear --lr-wsd-decay-iters"
PAIRS = "--data-path {pairs}"
LONGER = f"--train-iters {STEPS + 2} --lr-decay-style constant"

CASES = [
    Case("data sets", "", "", SILENT, effect=same),
    Case("data sets", "", "--data-path {moved}", SILENT, effect=same),
    Case("data sets", "", "--data-path {reversed}", REFUSED, "same size with other records"),
    Case("data sets", "", "--data-path {fewer}", REFUSED, "would name other records"),
    Case("data sets", "--data-path {fewer}", "--data-path {grown}", SAID,
         "records were appended. An epoch that has begun goes on without", same, only=PADDED),
    Case("data sets",
         "--data-path {seven} --num-epochs 1 --lr-decay-style constant --global-batch-size 4",
         "--data-path {images} --num-epochs 2 --lr-decay-style constant --global-batch-size 4",
         SAID, "records were appended", once_more_with_twice_as_many, stop=1),
    Case("data sets", "--data-path {tar}", "--data-path {tars}", REFUSED, "reads tars of its own"),
    Case("mixture", "--data-path 1 {images} 3 {seven}", "--data-path 3 {images} 1 {seven}",
         REFUSED, "0.25 0.75, and this command the shares 0.75 0.25"),
    Case("mixture", "--data-path 1 {images} 3 {seven}", "--data-path .25 {images} .75 {seven}",
         SILENT, effect=same),
    Case("reading of records", "", "--train-on last", SAID, "read so", same_records, only=PADDED),
    Case("reading of records", "", "--image-max-pixels 1024", SAID, "read so", computed_otherwise,
         only=PADDED),
    Case("reading of records", "", "--image-max-pixels 1024", REFUSED, "packed already",
         only=PACKED),
    Case("order", "", "--seed 7", REFUSED, "--seed 1234, and this command --seed 7"),
    Case("order", "", "--no-shuffle", REFUSED, "position in the data"),
    Case("order", "--data-path {tar} --shuffle-buffer 3", "--data-path {tar} --shuffle-buffer 4",
         REFUSED, "--shuffle-buffer 3"),
    Case("order", "--data-path {tar}", "--data-path {tar}", SILENT, effect=same),
    Case("packs", "", "--packing", REFUSED, "no --packing, and .* --packing", only=PADDED),
    Case("packs", "", "--seq-length 64", REFUSED, "--seq-length 128", only=PACKED),
    Case("packs", "", "--packing-buffer 7", REFUSED, "--packing-buffer 128", only=PACKED),
    Case("packs", "--packing-buffer 7", "", SILENT, effect=same, only=PACKED),
    Case("packs", "", "--context-parallel-size 2", REFUSED, "no room", only=PACKED,
         layout={"single": "cp2", "tp2xdp2": "tp2xcp2"}),
    Case("row length", "", "--seq-length 56", SAID, "longer samples", leaves_out_the_longest,
         only=PADDED),
    Case("validation", "--valid-data-path {seven}", "--valid-data-path {seven} --eval-iters 1",
         SAID, "the first 2 samples in place of all samples: .* not compared", same),
    Case("length of the run", "--lr-decay-style constant", LONGER, SAID, "another step", longer),
    Case("length of the run", "--num-epochs 2 --lr-decay-style constant --data-path {seven}",
         "--num-epochs 1 --lr-decay-style constant --data-path {seven}", REFUSED, "Give 2 or more"),
    Case("length of the run",
         "--num-epochs 1 --lr-decay-style constant --data-path {seven} --global-batch-size 4",
         "--num-epochs 2 --lr-decay-style constant --data-path {seven} --global-batch-size 4",
         SAID, "--num-epochs 2, .* in place of --num-epochs 1", twice, stop=9),
    Case("batch", "--lr-decay-style constant", "--lr-decay-style constant --global-batch-size 4",
         REFUSED, "--global-batch-size 2, and this command --global-batch-size 4"),
    Case("batch", "--lr-decay-style constant",
         f"--lr-decay-style constant --global-batch-size 4 {COMMAND}", SAID,
         "--global-batch-size 4 from the next step on", larger_batch),
    Case("skipped steps", "", f"--iterations-to-skip {HALF + 1}", SAID, "are skipped so",
         leaves_out_a_step),
    Case("optimizer", "", "--optimizer sgd", REFUSED, "its state is another one"),
    Case("optimizer", "", "--optimizer sgd --no-load-optim", SILENT, effect=from_the_next_step),
    Case("optimizer", "--optimizer sgd", "--optimizer sgd", SILENT, effect=same),
    *steered("hyperparameters", "", "--adam-beta1 0.5", "--adam-beta1 0.9"),
    *steered("learning rate", "", "--lr 0.0005", "--lr 0.001"),
    *steered("learning rate", "", "--vision-lr-mult 0.5", "--vision-lr-mult 1.0"),
    *steered("schedule", "", "--lr-decay-style cosine", "--lr-decay-style linear"),
    *steered("schedule", f"{WSD} 2", f"{WSD} 1", "at the end of 2 steps", "--lr-wsd-decay-iters 1"),
    *steered("weight decay", "", "--weight-decay 0.5", "--weight-decay 0.1"),
    Case("gradient clipping", "", "--clip-grad 0.01", SAID, "from the next step", later),
    Case("optimizer's state", "", "--use-distributed-optimizer", REFUSED, "stored otherwise"),
    Case("optimizer's state", "", "--use-distributed-optimizer --no-load-optim", SILENT,
         effect=from_the_next_step),
    Case("what trains", "", "--freeze vision", SAID, "what no longer trains", freezes_vision),
    Case("what trains", "--freeze vision", "", REFUSED, "which this command trains"),
    Case("adapter", "--lora-rank 2", "--lora-rank 4", REFUSED, "another adapter config"),
    Case("adapter", "--lora-rank 2", "--lora-rank 2", SILENT, effect=same),
    Case("loss", f"--loss simpo {PAIRS}", f"--loss orpo {PAIRS}", REFUSED, "another loss"),
    Case("settings of the loss", f"--loss simpo {PAIRS}", f"--loss simpo --beta 3 {PAIRS}", SAID,
         "--beta 3", computed_otherwise),
    Case("files of the loss", "", "", SAID, "none in place of x.scores.jsonl of content 12345678",
         same, record={"files of the loss": {"beside": [["x.scores.jsonl", "123456789"]]}}),
    Case("MTP", "--mtp-num-layers 1", "", REFUSED, "add --mtp-num-layers 1",
         model="hybrid"),
    Case("MTP", "--mtp-num-layers 1", "--mtp-num-layers 1 --mtp-loss-scaling-factor 0.5",
         SAID, "factor 0.5", from_the_next_step, model="hybrid"),
    Case("routing of experts", "", "--moe-z-loss-coeff 0.5", SAID, "--moe-z-loss-coeff 0.5",
         from_the_next_step, model="moe"),
    Case("dropout", "", "--hidden-dropout 0.5", SAID, "--hidden-dropout 0.5", computed_otherwise),
    Case("precision", "--use-distributed-optimizer", "--use-distributed-optimizer --bf16", SAID,
         "rounded otherwise", rounded_otherwise(0.02)),
    Case("layout", "", "", SAID, "results differ by their rounding", rounded_otherwise(1e-5),
         layout={"single": "tp2", "tp2xdp2": "single"}),
    Case("data workers", "", "--num-workers 1", SILENT, effect=same, only=PADDED),
    Case("data workers", "", "--num-workers 1", REFUSED, "--num-workers 0", only=PACKED),
    Case("layers' code", "", "", SAID, "--spec te: results differ by their rounding", same,
         record={"layers' code": {"spec": ["te"]}}),
    Case("model", "", "--hf-model {other}", REFUSED, "rope|another model"),
]  # fmt: skip
