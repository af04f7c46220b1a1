"""The records of a step whose loss or gradients are no number are named."""

from __future__ import annotations

import pytest
import torch

from mcore_qwen3vl.training.forward_step import StepRecords

NAN = torch.tensor(float("nan"))


def _records(*losses: torch.Tensor | None) -> StepRecords:
    records = StepRecords()
    for line, loss in enumerate(losses, start=1):
        records.add((f"a.jsonl:{line}",))  # as the forward pass, before a loss is known
        records.add((f"a.jsonl:{line}",), loss)
    return records


@pytest.mark.parametrize(
    ("losses", "said"),
    [
        ((torch.tensor(1.0), NAN), "the loss is NaN or infinite, on a.jsonl:2. No checkpoint"),
        ((torch.tensor(1.0),), "the gradients are NaN or infinite, on a.jsonl:1. No checkpoint"),
        ((None, None), "the gradients are NaN or infinite, on a.jsonl:1, a.jsonl:2. No checkpoint"),
        ((), "on records that this rank does not know. No checkpoint"),
        ((NAN,) * 9, "a.jsonl:8 and 1 more. No checkpoint"),
    ],
)
def test_the_micro_batches_whose_loss_is_no_number_or_all(
    losses: tuple[torch.Tensor | None, ...], said: str
) -> None:
    assert said in str(_records(*losses).explain(7))


def test_a_step_is_asked_for_while_it_runs_and_a_step_later() -> None:
    records = _records(NAN)
    assert "In step 3 the loss is NaN or infinite, on a.jsonl:1" in str(records.explain(3))
    records.finish(3)
    records.add(("b.jsonl:1",), torch.tensor(1.0))
    records.finish(4)
    said = str(records.explain(3))
    assert "on a.jsonl:1. " in said
    assert "run the same command with --iterations-to-skip 3." in said
    records.finish(5)
    assert "a.jsonl:1" not in str(records.explain(3))  # no longer kept
