"""Policy losses equal loops over sequences and tokens, written from the papers."""

from __future__ import annotations

import math
from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor

from mcore_qwen3vl.errors import BadInput
from mcore_qwen3vl.objectives.policy import Clipping, aggregate, divergence, policy_loss

LENGTHS = (5, 2, 7, 0)  # the last sequence has no token
WIDTH = 7
MODES = ("token-mean", "seq-mean-token-sum", "seq-mean-token-mean", "seq-mean-token-sum-norm")


def inputs() -> dict[str, Tensor]:
    """Draw ratios well beyond both bounds, and outside the mask values that would spoil all."""
    generator = torch.Generator().manual_seed(3)

    def drawn() -> Tensor:
        return torch.randn(4, WIDTH, generator=generator, dtype=torch.float64)

    mask = torch.arange(WIDTH)[None] < torch.tensor(LENGTHS)[:, None]
    made = {"log_probs": drawn() - 3, "advantages": drawn()}
    made["old"] = made["log_probs"] + 0.6 * drawn()
    made["reference"] = made["log_probs"] + 0.4 * drawn()
    for name, spoiled in zip(made, (-math.inf, math.nan, -math.inf, math.inf), strict=True):
        made[name] = made[name].where(mask, spoiled)
    return {**made, "mask": mask}


def fold(per_token: list[list[float]], mode: str) -> float:
    """Reduce lists of the tokens of each sequence to one number."""
    full = [tokens for tokens in per_token if tokens]
    if mode == "token-mean":
        everything = [value for tokens in full for value in tokens]
        return sum(everything) / len(everything)
    of_sequences = []
    for tokens in full:
        total = sum(tokens)
        if mode == "seq-mean-token-mean":
            total /= len(tokens)
        if mode == "seq-mean-token-sum-norm":
            total /= WIDTH
        of_sequences.append(total)
    return sum(of_sequences) / len(of_sequences)


def by_hand(
    values: dict[str, list[list[float]]],
    level: str,
    low: float,
    high: float,
    dual: float | None,
    mode: str,
    kl: tuple[str, float] | None,
) -> float:
    losses: list[list[float]] = []
    divergences: list[list[float]] = []
    for row, length in enumerate(LENGTHS):
        new, old, advantage, reference = (
            values[name][row] for name in ("log_probs", "old", "advantages", "reference")
        )
        losses.append([])
        divergences.append([])
        changes = [new[t] - old[t] for t in range(length)]
        for t in range(length):
            log_ratio = changes[t] if level == "token" else sum(changes) / length
            ratio = math.exp(log_ratio)
            clipped = min(max(ratio, 1 - low), 1 + high)
            objective = min(ratio * advantage[t], clipped * advantage[t])
            if dual is not None and advantage[t] < 0:
                objective = max(objective, dual * advantage[t])
            losses[-1].append(-objective)
            if kl:
                r = reference[t] - new[t]
                kinds = {"k1": -r, "k2": r * r / 2, "k3": math.exp(r) - r - 1}
                divergences[-1].append(kinds[kl[0]])
    return fold(losses, mode) + (kl[1] * fold(divergences, mode) if kl else 0.0)


def check(level: str, clipping: Clipping, mode: str, kl: tuple[str, float] | None) -> None:
    given = inputs()
    if level == "sequence":  # equation 7 of the paper has one advantage for each sequence
        given["advantages"] = given["advantages"][:, :1].expand(-1, WIDTH).nan_to_num(0.0)
    log_probs = given["log_probs"].clone().requires_grad_()
    options: dict[str, Any] = {"level": level, "clipping": clipping, "mode": mode}
    if kl:
        options |= {"reference": given["reference"], "kl_estimate": kl[0], "kl_coefficient": kl[1]}
    found = policy_loss(log_probs, given["old"], given["advantages"], given["mask"], **options).loss
    found.backward()
    assert log_probs.grad is not None
    values = {name: tensor.tolist() for name, tensor in given.items()}
    settings = (level, clipping.low, clipping.high, clipping.dual, mode, kl)
    assert float(found.detach()) == pytest.approx(by_hand(values, *settings), rel=1e-12)
    step = 1e-6
    for row, t in product(range(len(LENGTHS)), range(WIDTH)):
        if t >= LENGTHS[row]:
            assert log_probs.grad[row, t] == 0
            continue
        sides = []
        for sign in (1, -1):
            moved = [list(line) for line in values["log_probs"]]
            moved[row][t] += sign * step
            sides.append(by_hand({**values, "log_probs": moved}, *settings))
        slope = (sides[0] - sides[1]) / (2 * step)
        assert float(log_probs.grad[row, t]) == pytest.approx(slope, rel=1e-5, abs=1e-8)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("level", ["token", "sequence"])
@pytest.mark.parametrize(
    "clipping",
    [Clipping(), Clipping(0.1, 0.4), Clipping(0.2, 0.28, dual=1.5)],
    ids=["symmetric", "asymmetric", "dual"],
)
def test_value_and_gradients_are_those_of_a_loop(level: str, clipping: Clipping, mode: str) -> None:
    check(level, clipping, mode, None)


@pytest.mark.parametrize("estimate", ["k1", "k2", "k3"])
@pytest.mark.parametrize("mode", MODES)
def test_the_divergence_is_added(estimate: str, mode: str) -> None:
    check("token", Clipping(0.2, 0.28), mode, (estimate, 0.3))


def test_micro_batches_add_up_to_the_whole() -> None:
    given = inputs()
    tokens, sequences = float(sum(LENGTHS)), 3.0
    for mode in MODES:
        whole = aggregate(given["old"], given["mask"], mode)
        parts = [
            aggregate(
                given["old"][rows], given["mask"][rows], mode, tokens=tokens, sequences=sequences
            )
            for rows in (slice(0, 1), slice(1, 4))
        ]
        torch.testing.assert_close(sum(parts), whole)


def test_straight_through_estimates_have_the_gradient_of_k2() -> None:
    given = inputs()
    inside = given["mask"]
    log_probs, reference = given["log_probs"][inside], given["reference"][inside]
    for plus, plain in (("k1+", "k1"), ("low_var_kl+", "k3")):
        moved = log_probs.clone().requires_grad_()
        found = divergence(moved, reference, plus)
        torch.testing.assert_close(found.detach(), divergence(log_probs, reference, plain))
        found.sum().backward()
        assert moved.grad is not None
        torch.testing.assert_close(moved.grad, log_probs - reference)


def test_a_sequences_ratio_leaves_each_token_its_own_advantage() -> None:
    """Unclipped, token t has the gradient of -A[t] s log p[t]: GSPO-token, equation 14."""
    generator = torch.Generator().manual_seed(2)
    new, old = (torch.randn(1, 5, generator=generator, dtype=torch.float64) for _ in range(2))
    advantages = torch.tensor([[1.0, -2.0, 3.0, 0.5, -1.5]], dtype=torch.float64)
    new.requires_grad_()
    wide = Clipping(0.99, 99.0)
    mask = torch.ones(1, 5)
    policy_loss(new, old, advantages, mask, level="sequence", clipping=wide).loss.backward()
    ratio = math.exp(sum((new - old)[0].tolist()) / 5)
    torch.testing.assert_close(new.grad, -advantages * ratio / 5)


def test_shares_of_clipped_tokens() -> None:
    """The shares are those by hand for ratios e and 1/e, with advantages of both signs."""
    old = torch.tensor([[-1.0, -1.0, -1.0, -1.0]])
    new = torch.tensor([[0.0, 0.0, -2.0, -2.0]])
    advantages = torch.tensor([[1.0, -1.0, 1.0, -1.0]])
    mask = torch.ones(1, 4)
    found = policy_loss(new, old, advantages, mask, clipping=Clipping(0.2, 0.2, dual=2.0))
    assert float(found.clipped) == 0.5  # the first and the last
    assert float(found.dual_clipped) == 0.25  # the second
    assert float(found.old_kl) == 0.0


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: Clipping(1.2), "clipped to"),
        (lambda: Clipping(dual=1.0), "dual clip is 1"),
        (lambda: aggregate(torch.zeros(1, 1), torch.ones(1, 1), "mean"), "loss_agg_mode is 'mean'"),
        (lambda: divergence(torch.zeros(1), torch.zeros(1), "k4"), "estimate of KL is 'k4'"),
        (
            lambda: policy_loss(*[torch.zeros(1, 1)] * 3, torch.ones(1, 1), kl_coefficient=0.1),
            "one of them alone",
        ),
    ],
)
def test_unknown_names_and_contradictions_are_refused(call: Any, message: str) -> None:
    with pytest.raises(BadInput, match=message):
        call()
