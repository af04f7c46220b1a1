"""DPO in Megatron's loop equals a plain loop, for each source of the reference and each layout."""

from __future__ import annotations

import math
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from mcore_qwen3vl.losses.pairs import numbers_of_rewards
from mcore_qwen3vl.losses.preference import Preference, PreferenceLoss, pair_losses
from mcore_qwen3vl.scoring.score import ScoreRequest, score
from mcore_qwen3vl.verification.curves import (
    DISTRIBUTED,
    OTHER_LAYOUT,
    TOLERANCE,
    Job,
    curve_of,
    train,
    train_and_rewind,
    worst_difference,
)
from tests.losses.flags import RANK_4, loss_of
from tests.losses.pairs import as_tar, plain_curve, plain_step, write_pairs
from tests.training.log import entries_of
from tests.training.one_step import check_step, random_adapter, step_job
from tests.turns import slow

BETA = 0.3
DPO = ("--loss", "dpo", "--dpo-beta", str(BETA))
BY_ADAPTER = ("--dpo-reference", "adapter")
BY_MODEL = ("--reference", "model")
SIXTEEN = 16


@pytest.fixture(scope="module")
def pairs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_pairs(tmp_path_factory.mktemp("pairs"), SIXTEEN)


def dpo_job(
    folder: Path, checkpoint: Path, pairs: Path, layout: str, *flags: str, steps: int = 3
) -> Job:
    """Return a job; its adapter, if any, is not zero, so that policy and base differ."""
    adapter = None if BY_MODEL[1] in flags else random_adapter(folder, checkpoint)
    return step_job(checkpoint, pairs, layout, *DPO, *flags, steps=steps, lora=adapter)


def check(job: Job, folder: Path, preference: Preference, limit: float = TOLERANCE) -> None:
    log = train(job, folder, timeout=300)
    theirs, margins = plain_curve(job, preference)
    difference = worst_difference(curve_of(log), theirs)
    worst = max(
        abs(entry["rewards margin"] - m) / max(abs(m), 1)
        for entry, m in zip(log, margins, strict=True)
    )
    print(f"observed: {job.layout} {theirs[0].loss:.4f} to {theirs[-1].loss:.4f}, {difference}")
    assert max(difference.loss, difference.grad_norm, worst) <= limit
    for entry in log:
        margin = entry["rewards chosen"] - entry["rewards rejected"]
        assert entry["rewards margin"] == pytest.approx(margin, abs=1e-5)
        assert 0 <= entry["rewards accuracy"] <= 1


@pytest.mark.parametrize(
    ("kind", "layout", "flags"),
    [
        ("dense", "cp2", ("--packing", *BY_ADAPTER)),
        *slow(
            ("dense", "single", BY_ADAPTER),
            ("dense", "pp2xvpp2", BY_ADAPTER),
            ("dense", "tp2+sp", ("--packing", *BY_ADAPTER)),
            ("dense", "pp2", ("--packing", *BY_ADAPTER)),
            ("dense", "cp2", BY_ADAPTER),
            ("dense", "dp2", (*DISTRIBUTED, *BY_ADAPTER)),
            ("moe", "ep2xdp2", (*DISTRIBUTED, "--packing", *BY_ADAPTER)),
            ("moe", "tp2xetp2+sp", BY_ADAPTER),
            ("hybrid", "cp2", ("--packing", *BY_ADAPTER)),
            ("hybrid", "tp2", BY_ADAPTER),
            ("dense", "tp2+sp", ("--packing", *BY_MODEL)),
            ("dense", "pp2xvpp2", BY_MODEL),
            ("dense", "pp2", ("--packing", *BY_MODEL)),
            ("dense", "cp2", ("--packing", *BY_MODEL)),
            ("dense", "dp2", (*DISTRIBUTED, *BY_MODEL)),
            ("moe", "ep2xdp2", (*DISTRIBUTED, "--packing", *BY_MODEL)),
            ("hybrid", "tp2+sp", ("--packing", *BY_MODEL)),
            ("hybrid_moe", "ep2xdp2", (*DISTRIBUTED, "--packing", *BY_MODEL)),
        ),
    ],
)
def test_loss_gradient_and_margins_are_those_of_a_plain_loop(
    checkpoint: Path, layout: str, flags: tuple[str, ...], pairs: Path, tmp_path: Path
) -> None:
    """LoRA, and full fine-tuning with a frozen reference, which the policy leaves in step 2.

    Fast are LoRA, the comparison with the reference of a file, and KTO's with another model.
    """
    job = dpo_job(tmp_path, checkpoint, pairs, layout, *flags)
    check(job, tmp_path / "run", Preference(beta=BETA))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("flags", "preference"),
    [
        # The formulas have tests of their own; these cases test the flags.
        (("--dpo-label-smoothing", "0.1"), Preference(beta=BETA, label_smoothing=0.1)),
        (("--dpo-loss", "hinge"), Preference("hinge", beta=BETA)),
        (("--dpo-loss", "ipo", "--rpo-alpha", "0.5"), Preference("ipo", BETA, rpo_alpha=0.5)),
    ],
)
def test_every_loss(
    flags: tuple[str, ...], preference: Preference, dense: Path, pairs: Path, tmp_path: Path
) -> None:
    job = dpo_job(tmp_path, dense, pairs, "single", "--packing", *BY_ADAPTER, *flags)
    check(job, tmp_path / "run", preference)


@pytest.mark.slow
@pytest.mark.parametrize("reference", [BY_ADAPTER, BY_MODEL], ids=lambda r: r[1])
def test_the_reference_by_file_is_the_one_in_memory_and_a_run_resumes(
    reference: tuple[str, str], dense: Path, pairs: Path, tmp_path: Path
) -> None:
    """A run that stopped halfway and resumed has the same losses, bit for bit."""
    data = shutil.copytree(pairs.parent, tmp_path / "data") / pairs.name
    score(ScoreRequest(dense, data), on_cpu=True)
    job = dpo_job(tmp_path, dense, data, "single", "--packing", *reference, steps=4)
    job = replace(job, batch=2)
    in_memory, save = train_and_rewind(job, tmp_path)
    rest = train(job, tmp_path / "rest", "--save", str(save), "--save-interval", "1000")
    assert worst_difference(curve_of(rest), curve_of(in_memory[2:])).loss == 0
    of_file = replace(job, flags=(*DPO, "--dpo-reference", "file"))
    by_file = train(of_file, tmp_path / "file")
    difference = worst_difference(curve_of(by_file), curve_of(in_memory))
    assert max(difference.loss, difference.grad_norm) <= OTHER_LAYOUT


@pytest.mark.slow
def test_a_webdataset_of_pairs_trains_and_validates_as_the_file(
    dense: Path, pairs: Path, tmp_path: Path
) -> None:
    """Without packing: a file's packs are made of a whole epoch, a tar's of a buffer."""
    job = dpo_job(tmp_path, dense, pairs, "single", *BY_ADAPTER, "--no-shuffle")

    def figures(data: Path) -> list[dict[str, float]]:
        evaluation = ("--valid-data-path", str(data), "--eval-iters", "2", "--eval-interval", "2")
        run = tmp_path / f"run-{data.name}"
        train(replace(job, data=data, flags=(*job.flags, *evaluation)), run)
        return [{n: v for n, v in one.items() if "/s" not in n} for one in entries_of(run)]

    found = figures(as_tar(pairs, tmp_path / "tar"))
    # They are not equal bit for bit: rounding depends on where in memory a tensor lies.
    assert found == [pytest.approx(entry, rel=OTHER_LAYOUT) for entry in figures(pairs)]
    validation = [entry for entry in found if "validation dpo loss" in entry]
    assert len(validation) == 2
    assert validation[0]["validation rewards margin"] != found[0]["rewards margin"] != 0


SIMPO = Preference("simpo", beta=2.0, gamma=1.0)
ORPO = Preference("orpo", beta=0.1, rpo_alpha=1.0)


@pytest.mark.parametrize(
    ("preference", "kind", "layout", "flags"),
    [
        (ORPO, "dense", "tp2+sp", ("--packing",)),
        (ORPO, "hybrid", "cp2", ("--packing",)),
        *slow(
            (SIMPO, "hybrid", "pp2", ()),
            (ORPO, "hybrid_moe", "tp2xep2+sp", ("--packing",)),
            (SIMPO, "dense", "cp2", ("--packing",)),
            (SIMPO, "dense", "dp2", ()),
            (ORPO, "moe", "ep2xdp2", ("--packing",)),
            (SIMPO, "dense", "single", ("--packing",)),
            (SIMPO, "dense", "tp2+sp", ("--packing",)),
            (SIMPO, "dense", "pp2", ("--packing",)),
            (SIMPO, "moe", "ep2xdp2", ("--packing",)),
            (ORPO, "dense", "single", ()),
            (ORPO, "dense", "dp2", ("--packing",)),
            (ORPO, "dense", "cp2", ("--packing",)),
            (ORPO, "dense", "pp2xvpp2", ()),
            (ORPO, "moe", "tp2xetp2+sp", ("--packing",)),
        ),
    ],
)
def test_losses_without_a_reference_are_those_of_one_process(
    preference: Preference,
    checkpoint: Path,
    layout: str,
    flags: tuple[str, ...],
    pairs: Path,
    tmp_path: Path,
) -> None:
    job = step_job(checkpoint, pairs, layout, "--loss", preference.loss, *flags)
    name = f"{preference.loss} loss"
    entry = check_step(job, plain_step(job, preference), name, tmp_path)
    assert ("nll loss" in entry) == (preference.loss == "orpo")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("flags", "preference"),
    [
        (
            ("--beta", "1.5", "--simpo-gamma", "0.4", "--rpo-alpha", "0.3"),
            Preference("simpo", beta=1.5, gamma=0.4, rpo_alpha=0.3),
        ),
        (("--beta", "0.7"), Preference("orpo", beta=0.7, rpo_alpha=1.0)),
    ],
)
def test_an_adapter_trains_without_a_reference(
    flags: tuple[str, ...], preference: Preference, dense: Path, pairs: Path, tmp_path: Path
) -> None:
    flags = ("--loss", preference.loss, "--packing", *flags)
    adapter = random_adapter(tmp_path, dense)
    job = step_job(dense, pairs, "dp2", *flags, lora=adapter)
    check_step(job, plain_step(job, preference), f"{preference.loss} loss", tmp_path)


def test_values_and_defaults(dense: Path) -> None:
    flags = ("--loss", "dpo", "--dpo-beta", "0.4", "--rpo-alpha", "2", *RANK_4)
    assert loss_of(dense, PreferenceLoss, *flags).pair_settings == Preference(
        beta=0.4, rpo_alpha=2.0
    )
    of_simpo, of_orpo = (PreferenceLoss(loss).pair_settings for loss in ("simpo", "orpo"))
    assert of_simpo == Preference("simpo", 2.0, gamma=1.0)
    assert of_orpo == Preference("orpo", 0.1, rpo_alpha=1.0)


POLICY = torch.tensor([[-11.0, -17.5], [-30.25, -21.0], [-4.0, -4.5]], dtype=torch.float64)


REFERENCE = torch.tensor([[-12.5, -16.0], [-28.0, -23.0], [-4.25, -4.0]], dtype=torch.float64)


LENGTHS = torch.tensor([[3.0, 7.0], [11.0, 5.0], [2.0, 13.0]], dtype=torch.float64)


CASES = [
    Preference(),
    Preference(beta=0.37),
    Preference(beta=0.7, label_smoothing=0.15),
    Preference("hinge", beta=0.6),
    Preference("ipo", beta=0.2),
    Preference(beta=0.3, rpo_alpha=1.7),
    Preference("ipo", beta=0.9, rpo_alpha=0.4),
    Preference("simpo", beta=2.5, gamma=0.55),
    Preference("simpo", beta=0.3, gamma=0.0, rpo_alpha=0.8),
    Preference("orpo", beta=0.35, rpo_alpha=1.0),
]


def by_hand(policy: list[float], pair: int, p: Preference) -> float:
    """Compute the loss of one pair with Python's floats."""
    (chosen, rejected), (r_chosen, r_rejected) = policy, REFERENCE[pair].tolist()
    n_chosen, n_rejected = LENGTHS[pair].tolist()

    def sigmoid(x: float) -> float:
        return 1 / (1 + math.exp(-x))

    if p.kind in ("simpo", "orpo"):
        means = chosen / n_chosen, rejected / n_rejected
        if p.kind == "simpo":
            loss = -math.log(sigmoid(p.beta * (means[0] - means[1]) - p.gamma))
        else:
            odds = [math.exp(mean) / (1 - math.exp(mean)) for mean in means]
            loss = -p.beta * math.log(sigmoid(math.log(odds[0] / odds[1])))
        return loss - p.rpo_alpha * means[0]
    gap = (chosen - r_chosen) - (rejected - r_rejected)
    if p.kind == "sigmoid":
        right, wrong = sigmoid(p.beta * gap), sigmoid(-p.beta * gap)
        loss = -(1 - p.label_smoothing) * math.log(right) - p.label_smoothing * math.log(wrong)
    elif p.kind == "hinge":
        loss = max(0.0, 1 - p.beta * gap)
    else:
        means = (chosen / n_chosen - r_chosen / n_chosen) - (
            rejected / n_rejected - r_rejected / n_rejected
        )
        loss = (means - 1 / (2 * p.beta)) ** 2
    return loss + p.rpo_alpha * (-chosen / n_chosen)


@pytest.mark.parametrize("preference", CASES, ids=str)
def test_losses_and_gradients_are_those_of_the_formula(preference: Preference) -> None:
    policy = POLICY.clone().requires_grad_()
    reference = REFERENCE if preference.has_reference else None
    losses, _ = pair_losses(policy, reference, LENGTHS, preference)
    losses.sum().backward()
    assert policy.grad is not None
    step = 1e-6
    for pair in range(len(POLICY)):
        values = POLICY[pair].tolist()
        assert float(losses[pair]) == pytest.approx(by_hand(values, pair, preference))
        for side in range(2):
            up, down = list(values), list(values)
            up[side] += step
            down[side] -= step
            slope = (by_hand(up, pair, preference) - by_hand(down, pair, preference)) / (2 * step)
            assert float(policy.grad[pair, side]) == pytest.approx(slope, rel=1e-6, abs=1e-8)


def test_rewards_margins_and_accuracies() -> None:
    _, rewards = pair_losses(POLICY, REFERENCE, LENGTHS, Preference(beta=0.5))
    numbers = {name: values.tolist() for name, values in numbers_of_rewards(rewards).items()}
    assert numbers == {
        "rewards chosen": [0.75, -1.125, 0.125],
        "rewards rejected": [-0.75, 1.0, -0.25],
        "rewards margin": [1.5, -2.125, 0.375],
        "rewards accuracy": [1.0, 0.0, 1.0],
    }


def test_rewards_without_a_reference_are_means_over_tokens() -> None:
    _, rewards = pair_losses(POLICY, None, LENGTHS, Preference("simpo", beta=1.5, gamma=1.0))
    assert rewards[:, 0].tolist() == pytest.approx([-5.5, -4.125, -3.0])
    assert rewards[:, 1].tolist() == pytest.approx([-3.75, -6.3, -0.519230769])
    assert numbers_of_rewards(rewards)["rewards accuracy"].tolist() == [0.0, 1.0, 0.0]


def test_answers_that_are_certain_have_finite_odds() -> None:
    """A probability that float32 rounds to 1 would make the gradient NaN for the whole model."""
    policy = torch.tensor([[0.0, -3.0], [-1e-9, 0.0], [-2.0, -1e-8]]).requires_grad_()
    preference = Preference("orpo", beta=0.1, rpo_alpha=1.0)
    losses, _ = pair_losses(policy, None, torch.ones(3, 2), preference)
    losses.sum().backward()
    assert policy.grad is not None
    assert losses.isfinite().all()
    assert policy.grad.isfinite().all()
