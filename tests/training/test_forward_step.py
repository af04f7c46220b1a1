"""What a training step's forward does: losses found, summed and blamed, and padding masked."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from mcore_qwen3vl.config import Architecture
from mcore_qwen3vl.data.encoding.batch import Batch, Counts
from mcore_qwen3vl.errors import BadInput
from mcore_qwen3vl.layout import Layout
from mcore_qwen3vl.model.decoder.attention import TorchAttention
from mcore_qwen3vl.model.qwen3vl import build_chunks
from mcore_qwen3vl.runtime.launch import initialize, run_layout
from mcore_qwen3vl.training import forward_step
from mcore_qwen3vl.training.forward_step import StepRecords, forward
from mcore_qwen3vl.verification.parity.case import MicroBatch, build_batch

LOSSES = torch.tensor([[2.0, 3.0, 5.0], [7.0, float("inf"), 11.0]])
WEIGHTS = torch.tensor([[1.0, 0.0, 0.5], [2.0, 0.0, 0.0]])


@pytest.mark.parametrize(
    ("loss", "total", "normaliser"),
    [
        (forward_step.cross_entropy, 2 + 5 + 7, 3),  # trained tokens count alike
        (forward_step.weighted_cross_entropy, 2 + 0.5 * 5 + 2 * 7, 3.5),
        (forward_step.scaled_cross_entropy, 2 + 0.5 * 5 + 2 * 7, 3),  # the number of tokens
    ],
)
def test_what_a_loss_sums_and_what_divides_it(loss: Any, total: float, normaliser: float) -> None:
    assert [value.item() for value in loss(LOSSES, WEIGHTS)] == [total, normaliser]


def test_infinite_losses_at_padding_leave_no_gradient() -> None:
    given = LOSSES.clone().requires_grad_()
    forward_step.weighted_cross_entropy(given, WEIGHTS)[0].backward()
    assert torch.equal(given.grad, WEIGHTS)


def test_a_module_function_is_found() -> None:
    path = "mcore_qwen3vl.training.forward_step:cross_entropy"
    assert forward_step.find_loss(path) is forward_step.cross_entropy


@pytest.mark.parametrize(
    ("found", "told"),
    [
        (torch.ones([]), "a tensor of shape ()"),
        ((torch.ones(2), torch.ones([])), "a tensor of shape (2,), a tensor of shape ()"),
        ((torch.ones([]), 3), "a value of type int"),
        (None, "a value of type NoneType"),
    ],
)
def test_what_is_no_pair_of_scalars_is_refused(found: Any, told: str) -> None:
    def mine(losses: Any, weights: Any) -> Any:
        return found

    batch: Any = SimpleNamespace(loss_weights=torch.ones(1, 4))
    with pytest.raises(BadInput, match=r"mine returned .*a pair of scalar tensors") as refused:
        forward_step.token_objective(mine)(batch, torch.arange(4), torch.ones(1, 4))
    assert told in str(refused.value)


def test_an_entry_point_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    from importlib.metadata import EntryPoint

    entry = EntryPoint(
        "mine", "mcore_qwen3vl.training.forward_step:weighted_cross_entropy", forward_step.GROUP
    )
    monkeypatch.setattr(forward_step, "entry_points", lambda group: [entry])
    assert forward_step.find_loss("mine") is forward_step.weighted_cross_entropy


@pytest.mark.parametrize("name", ["focal", "no.such.module:loss", "math:no_such_loss"])
def test_an_unknown_loss_is_refused(name: str) -> None:
    with pytest.raises(BadInput, match=name):
        forward_step.find_loss(name)


def test_the_losses_that_exist_are_listed() -> None:
    with pytest.raises(BadInput, match=r"There are cross_entropy, .*dpo, .*kto"):
        forward_step.find_loss("dop")


@pytest.mark.parametrize(
    ("data_sets", "groups"),
    [
        (("a", "b", "a"), (1, 2)),  # sequences are units: documents of a reranker
        (("a", "a", "b", "b", "b", "a", "a"), (2, 3, 2)),  # records are: queries and pairs
    ],
)
def test_units_count_for_their_data_set(
    data_sets: tuple[str, ...], groups: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(forward_step.parallel_state, "get_context_parallel_world_size", lambda: 2)
    each = torch.tensor([1.0, 2.0, 5.0], requires_grad=True)
    batch: Any = SimpleNamespace(data_sets=data_sets, groups=groups)
    found = forward_step.reduce_units(each.sum(), batch, {"loss": each, "other": -each})
    assert float(found.normaliser) == 1.5
    parts = {name: (float(a), float(b)) for name, (a, b) in found.data_sets.items()}
    assert parts == {"a": (3.0, 1.0), "b": (1.0, 0.5)}


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


def batch_of(micro: MicroBatch) -> Batch:
    assert micro.attention_mask is not None
    return Batch(
        micro.input_ids,
        micro.labels,
        micro.loss_mask,
        micro.position_ids,
        micro.attention_mask == 0,
        None,
        None,
        micro.visual,
        Counts(),
        (),
    )


def _losses(model: Path) -> tuple[Tensor, Tensor, list[Any], list[Tensor]]:
    """Return losses of training's forward and of one with a mask, and the masks of both kinds."""
    initialize(Layout())
    architecture = Architecture.from_hf(model)
    (chunk,) = build_chunks(architecture, Layout(), params_dtype=torch.float32)
    micro = build_batch("padded", architecture).micro_batches[0]
    masks: list[Any] = []
    padding: list[Tensor] = []
    for module in chunk.decoder.modules():
        if isinstance(module, TorchAttention):
            module.register_forward_pre_hook(lambda m, inputs: masks.append(inputs[3]))
        if hasattr(module, "routing"):
            module.register_forward_pre_hook(
                lambda m, inputs, named: padding.append(named.get("padding_mask", inputs[-1])),
                with_kwargs=True,
            )
    losses, _ = forward(batch_of(micro), chunk)
    seen = [*masks]
    masked = chunk(
        micro.input_ids,
        micro.position_ids,
        micro.attention_mask,
        labels=micro.labels,
        visual=micro.visual,
    )
    valid = micro.attention_mask == 1
    return losses.detach()[valid], masked.detach()[valid], seen, padding


def test_padding_that_follows_is_masked_for_the_router_alone(moe: Path) -> None:
    """A mask would take S x S memory in attention, and its kernel would not treat it as causal."""
    ((losses, expected, masks, padding),) = run_layout(_losses, 1, moe)
    torch.testing.assert_close(losses, expected)
    assert len(masks) == 4
    assert masks == [None] * 4
    assert len(padding) == 8
    assert all(mask.any() for mask in padding)
