"""The losses of answers and their gradients equal those of TRL's trainers: `make test-trl`.

TRL is no dependency, not even of tests, because it brings a training stack of its own. Without it
this module is skipped; ``test_losses.py`` has the same formulas written out.
"""

from __future__ import annotations

from collections import defaultdict
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from mcore_qwen3vl.losses.distillation import Distillation, divergences
from mcore_qwen3vl.losses.kto import Kto, labelled_losses
from mcore_qwen3vl.losses.preference import Preference, pair_losses
from mcore_qwen3vl.losses.reward import reward_losses
from mcore_qwen3vl.model.top_tokens import FLOOR

trl = pytest.importorskip("trl")

PAIRS, LENGTH, TOLERANCE = 5, 17, 2e-5

CASES = [
    (Preference(beta=0.23), ["sigmoid"], [1.0]),
    (Preference("hinge", beta=0.4), ["hinge"], [1.0]),
    (Preference("ipo", beta=0.3), ["ipo"], [1.0]),
    (Preference(beta=0.1, rpo_alpha=0.7), ["sigmoid", "sft"], [1.0, 0.7]),
    (Preference("ipo", beta=0.5, rpo_alpha=1.3), ["ipo", "sft"], [1.0, 1.3]),
]


def check(found: Tensor, right: Tensor, ours: Tensor, theirs: Tensor) -> None:
    """Compare the losses, and their gradients, which are not all zero."""
    torch.testing.assert_close(found, right, rtol=TOLERANCE, atol=TOLERANCE)
    assert theirs.grad is not None
    assert theirs.grad.abs().max() > 0
    torch.testing.assert_close(ours.grad, theirs.grad, rtol=TOLERANCE, atol=TOLERANCE)


def trainer(beta: float, losses: list[str], weights: list[float]) -> Any:
    """Make a stand-in with what TRL's loss reads from its trainer."""
    accelerator = SimpleNamespace(
        gather=lambda value: value,
        device=torch.device("cpu"),
        gather_for_metrics=lambda value: value,
    )
    return SimpleNamespace(
        model=SimpleNamespace(training=True),
        accelerator=accelerator,
        aux_loss_enabled=False,
        ld_alpha=None,
        precompute_ref_logps=True,
        f_divergence_type="reverse_kl",
        beta=beta,
        loss_types=losses,
        loss_weights=weights,
        use_weighting=False,
        _metrics=defaultdict(lambda: defaultdict(list)),
        _total_train_tokens=0,
        _tp_size=1,
    )


def of_trl(log_probs: Tensor, mask: Tensor, reference: Tensor, preference: Any) -> Tensor:
    """Return TRL's loss of one pair; its loss of chosen answers is a mean over a batch's tokens.

    Args:
        log_probs: log-probabilities of each token, (2, S - 1): chosen, rejected.
        mask: mask of the answers, (2, S).
        reference: the reference's log-probabilities of both answers, (2,).
    """
    settings, losses, weights = preference
    outputs = SimpleNamespace(
        log_probs=log_probs * mask[:, 1:],
        entropy=torch.zeros_like(log_probs),
        mean_logits=torch.zeros_like(log_probs),
        is_top1=torch.zeros_like(log_probs, dtype=torch.bool),
    )
    inputs = {
        "input_ids": torch.zeros(2, LENGTH, dtype=torch.int64),
        "attention_mask": torch.ones(2, LENGTH, dtype=torch.int64),
        "completion_mask": mask.long(),
        "ref_chosen_logps": reference[:1],
        "ref_rejected_logps": reference[1:],
    }
    return trl.DPOTrainer._compute_loss(
        trainer(settings.beta, losses, weights), lambda **_: outputs, inputs, False
    )


@pytest.mark.parametrize("preference", CASES, ids=lambda case: str(case[0]))
def test_losses_and_gradients_are_trls(preference: Any) -> None:
    generator = torch.Generator().manual_seed(1)
    tokens = -3 * torch.rand(PAIRS, 2, LENGTH - 1, generator=generator)
    reference = tokens.sum(-1) / 2 + torch.randn(PAIRS, 2, generator=generator)
    starts = torch.randint(2, 9, (PAIRS, 2, 1), generator=generator)
    ends = torch.randint(10, LENGTH, (PAIRS, 2, 1), generator=generator)
    place = torch.arange(LENGTH)
    mask = (place >= starts) & (place < ends)  # (P, 2, S)

    theirs = tokens.clone().requires_grad_()
    right = torch.stack(
        [of_trl(theirs[i], mask[i], reference[i], preference) for i in range(PAIRS)]
    )
    right.sum().backward()

    ours = tokens.clone().requires_grad_()
    trained = mask[..., 1:]
    found, _ = pair_losses(
        torch.where(trained, ours, 0.0).sum(-1), reference, trained.sum(-1), preference[0]
    )
    found.sum().backward()
    check(found, right, ours, theirs)


def simpo_of_trl(preference: Preference) -> Any:
    from trl.experimental.cpo import CPOTrainer

    settings = {
        "alpha": 0.0,
        "beta": preference.beta,
        "simpo_gamma": preference.gamma,
        "loss_type": "simpo",
        "label_smoothing": 0.0,
        "cpo_alpha": preference.rpo_alpha,
    }
    return bound(CPOTrainer, settings, "cpo_loss")


def orpo_of_trl(preference: Preference) -> Any:
    from trl.experimental.orpo import ORPOTrainer

    return bound(ORPOTrainer, {"beta": preference.beta}, "odds_ratio_loss")


def bound(trainer: Any, settings: dict[str, Any], loss: str) -> Any:
    """Make a stand-in with what TRL's step over pairs reads from its trainer."""
    found = SimpleNamespace(
        accelerator=SimpleNamespace(
            device=torch.device("cpu"), gather_for_metrics=lambda value: value
        ),
        aux_loss_enabled=False,
        is_encoder_decoder=False,
        pad_token_id=0,
        padding_value=0,
        concatenated_inputs=lambda batch, **_: batch,
        get_batch_logps=trainer.get_batch_logps,
        **settings,
    )
    for name in (loss, "concatenated_forward"):
        setattr(found, name, partial(getattr(trainer, name), found))
    return partial(trainer.get_batch_loss_metrics, found)


@pytest.mark.parametrize(
    ("of_trl", "preference"),
    [
        (simpo_of_trl, Preference("simpo", beta=2.0, gamma=1.0)),
        (simpo_of_trl, Preference("simpo", beta=0.7, gamma=0.3, rpo_alpha=0.6)),
        (orpo_of_trl, Preference("orpo", beta=0.1, rpo_alpha=1.0)),
        (orpo_of_trl, Preference("orpo", beta=1.3, rpo_alpha=1.0)),
    ],
    ids=str,
)
def test_losses_without_a_reference_are_trls(of_trl: Any, preference: Preference) -> None:
    """TRL's ORPO also trains the prompt, which is a single token here, and so predicts nothing."""
    generator = torch.Generator().manual_seed(2)
    logits = 2 * torch.randn(PAIRS, 2, LENGTH, 11, generator=generator)
    tokens = torch.randint(1, 11, (PAIRS, 2, LENGTH), generator=generator)
    lengths = torch.randint(3, LENGTH, (PAIRS, 2), generator=generator)
    present = torch.arange(LENGTH) < lengths[..., None]
    labels = tokens.where(present, -100)
    labels[..., 0] = -100

    theirs = logits.clone().requires_grad_()
    step = of_trl(preference)
    right = torch.zeros([])
    for i in range(PAIRS):
        batch = {
            "concatenated_input_ids": tokens[i],
            "concatenated_attention_mask": present[i].long(),
            "concatenated_labels": labels[i],
            "chosen_labels": labels[i, :1],
        }
        right = right + step(lambda *_, i=i, **__: SimpleNamespace(logits=theirs[i]), batch)[0]
    right.backward()

    ours = logits.clone().requires_grad_()
    trained = labels[..., 1:] >= 0
    log_probs = ours[..., :-1, :].log_softmax(-1).gather(-1, tokens[..., 1:, None])[..., 0]
    sums = log_probs.where(trained, 0.0).sum(-1)
    found = pair_losses(sums, None, trained.sum(-1), preference)[0].sum()
    found.backward()
    check(found, right, ours, theirs)


def kto_of_trl(kto: Kto) -> Any:
    settings = vars(trainer(kto.beta, [], [])) | {
        "calculate_KL": True,
        "loss_type": "kto",
        "desirable_weight": kto.desirable_weight,
        "undesirable_weight": kto.undesirable_weight,
    }
    found = SimpleNamespace(**settings)
    found._compute_kl_logps = partial(trl.KTOTrainer._compute_kl_logps, found)
    return partial(trl.KTOTrainer._compute_loss, found)


@pytest.mark.parametrize("kto", [Kto(), Kto(0.4, 0.6, 1.9)], ids=str)
@pytest.mark.parametrize("drift", [0.5, -0.5])  # the second makes the baseline 0
def test_losses_of_labelled_answers_are_trls(kto: Kto, drift: float) -> None:
    generator = torch.Generator().manual_seed(3)
    tokens, exchanged = -3 * torch.rand(2, PAIRS, LENGTH - 1, generator=generator)
    reference, of_exchanged = (
        one.sum(-1) + torch.randn(PAIRS, generator=generator) for one in (tokens, exchanged)
    )
    of_exchanged = of_exchanged - drift * LENGTH
    labels = torch.tensor([True, False, False, True, False])

    def model(input_ids: Tensor, **_: Any) -> Any:
        log_probs = exchanged if input_ids.any() else theirs
        others = dict.fromkeys(("entropy", "mean_logits"), torch.zeros_like(log_probs))
        return SimpleNamespace(log_probs=log_probs, **others)

    theirs = tokens.clone().requires_grad_()
    whole = torch.ones(PAIRS, LENGTH, dtype=torch.int64)
    batch = {
        "input_ids": torch.zeros_like(whole),
        "KL_input_ids": whole,
        **dict.fromkeys(("attention_mask", "completion_mask"), whole),
        **dict.fromkeys(("KL_attention_mask", "KL_completion_mask"), whole),
        "label": labels,
        "ref_logps": reference,
        "ref_KL_logps": of_exchanged,
    }
    right = kto_of_trl(kto)(model, batch, False)
    right.backward()

    ours = tokens.clone().requires_grad_()
    baseline = (exchanged.sum(-1) - of_exchanged).mean()
    assert (baseline > 0) == (drift > 0)
    found = labelled_losses(ours.sum(-1), reference, labels, baseline, kto)[0].mean()
    found.backward()
    check(found, right, ours, theirs)


@pytest.mark.parametrize(
    ("settings", "beta"),
    [
        (Distillation("forward"), 0.0),
        (Distillation("reverse"), 1.0),
        (Distillation("jsd", beta=0.5), 0.5),
        (Distillation("jsd", beta=0.1, temperature=1.7), 0.1),
    ],
    ids=str,
)
def test_divergences_are_those_of_trls_gkd(settings: Distillation, beta: float) -> None:
    """All tokens of the vocabulary are given, so nothing is left over; TRL has no T squared."""
    from trl.experimental.gkd import GKDTrainer

    generator = torch.Generator().manual_seed(6)
    student, teacher = 2 * torch.randn(2, PAIRS, LENGTH, 11, generator=generator)

    theirs = student.clone().requires_grad_()
    right = GKDTrainer.generalized_jsd_loss(
        theirs, teacher, beta=beta, temperature=settings.temperature, reduction="sum"
    )
    right.backward()

    ours = student.clone().requires_grad_()
    nothing = torch.full((PAIRS, LENGTH, 1), FLOOR)
    both = (
        torch.cat([(one / settings.temperature).log_softmax(-1), nothing], -1)
        for one in (ours, teacher)
    )
    found = divergences(*both, settings).sum()
    found.backward()
    check(found, right, ours, theirs)


def test_the_loss_of_rewards_and_its_gradient_are_trls() -> None:
    generator = torch.Generator().manual_seed(1)
    rewards = 3 * torch.randn(PAIRS, 2, generator=generator)
    margins = torch.rand(PAIRS, generator=generator)

    theirs = rewards.clone().requires_grad_()
    outputs = SimpleNamespace(logits=theirs.T.reshape(-1, 1))  # all chosen, then all rejected
    stand_in = trainer(0.0, [], [])
    stand_in.args = SimpleNamespace(center_rewards_coefficient=None)
    inputs = {"margin": margins, "attention_mask": torch.ones(2 * PAIRS, 3, dtype=torch.int64)}
    right = trl.RewardTrainer.compute_loss(stand_in, lambda **_: outputs, inputs)
    right.backward()

    ours = rewards.clone().requires_grad_()
    found = reward_losses(ours, margins).mean()
    found.backward()
    check(found, right, ours, theirs)
