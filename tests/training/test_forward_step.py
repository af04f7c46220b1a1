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
from mcore_qwen3vl.layout import Layout
from mcore_qwen3vl.model.decoder.attention import TorchAttention
from mcore_qwen3vl.model.qwen3vl import build_chunks
from mcore_qwen3vl.runtime.launch import initialize, run_layout
from mcore_qwen3vl.training import forward_step
from mcore_qwen3vl.training.forward_step import StepRecords, forward
from mcore_qwen3vl.verification.parity.case import MicroBatch, build_batch


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
