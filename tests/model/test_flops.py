"""The FLOP formulas give what torch counts."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from mcore_qwen3vl.config import Architecture
from mcore_qwen3vl.model import flops
from mcore_qwen3vl.tiny import tiny_config, write_tiny_checkpoint


@pytest.mark.parametrize("is_moe", [False, True])
def test_flops_are_those_that_torch_counts(is_moe: bool, dense: Path, moe: Path) -> None:
    from transformers import AutoModelForImageTextToText

    path = moe if is_moe else dense
    a, merge = Architecture.from_hf(path), 2
    grid = torch.tensor([[1, 6, 8], [1, 4, 4]])
    frames = grid.prod(1)
    patches, features = int(frames.sum()), int(frames.sum()) // merge**2
    tokens = 40
    ids = torch.arange(1, tokens + 1)[None]
    starts, counts = (5, 20), [int(n) // merge**2 for n in frames]
    for start, count in zip(starts, counts, strict=True):
        ids[0, start : start + count] = a.image_token_id
    assert features == sum(counts)
    model = AutoModelForImageTextToText.from_pretrained(
        path, dtype=torch.float32, attn_implementation="eager", experts_implementation="eager"
    )
    with torch.no_grad(), FlopCounterMode(display=False) as counter:
        model(
            input_ids=ids,
            pixel_values=torch.randn(patches, a.vision.patch_dim),
            image_grid_thw=grid,
            mm_token_type_ids=(ids == a.image_token_id).int(),
        )
    measured = counter.get_flop_counts()
    of = lambda name: sum(measured[name].values())  # noqa: E731
    vision = next(name for name in measured if name.endswith(".visual"))
    squares = float(frames.double().square().sum())
    assert of(vision) * 3 == pytest.approx(flops.vision(a, patches, squares), rel=0.01)
    # Eager attention computes the full square, so the formula is given twice the causal half.
    # HF's rotary tables are small matrix products, too.
    language = of("Global") - of(vision)
    assert language * 3 == pytest.approx(flops.language(a, tokens, 2 * tokens**2), rel=0.01)


@pytest.mark.parametrize("is_moe", [False, True])
def test_flops_of_a_hybrid_model(is_moe: bool, tmp_path: Path) -> None:
    """Hugging Face's delta rule takes whole chunks, so that its products are left out."""
    from transformers import AutoModelForImageTextToText

    path = write_tiny_checkpoint(tmp_path / "hf", family="qwen3.5", moe=is_moe)
    a, tokens = Architecture.from_hf(path), 40
    model = AutoModelForImageTextToText.from_pretrained(
        path, dtype=torch.float32, attn_implementation="eager", experts_implementation="eager"
    )
    with torch.no_grad(), FlopCounterMode(display=False) as counter:
        model(input_ids=torch.arange(1, tokens + 1)[None])
    by_operation = {str(name): n for name, n in counter.get_flop_counts()["Global"].items()}
    linears = sum(n for name, n in by_operation.items() if "bmm" not in name)
    rules = 2 * 3 * tokens * flops.delta_rule_operations(a)
    assert linears * 3 + rules == pytest.approx(flops.language(a, tokens, 0), rel=0.01)
    assert flops.language(a, tokens, 1) - flops.language(a, tokens, 0) == 2 * 3 * 4 * 64
    assert flops.delta_rule_operations(a) == 3 * 8 * 4 * 16 * 20


@pytest.mark.parametrize("is_moe", [False, True])
def test_mtp_costs_a_layer_and_the_head(is_moe: bool) -> None:
    a, tokens = Architecture.from_hf(tiny_config(family="qwen3.5", moe=is_moe)), 40
    h, heads = a.hidden_size, a.num_attention_heads * a.head_dim
    attention = h * (2 * heads + 2 * a.num_key_value_heads * a.head_dim) + heads * h
    mlp = 3 * h * (a.intermediate_size or 0)
    if is_moe:
        width = a.num_experts_per_tok * a.moe_intermediate_size + a.shared_expert_intermediate_size
        mlp = 3 * h * width + h * a.num_experts + h  # router, and the shared expert's gate
    weights = 2 * h * h + attention + mlp + a.vocab_size * h
    further = flops.language(a, tokens, 0, mtp=True) - flops.language(a, tokens, 0)
    assert further == pytest.approx(2 * 3 * tokens * weights, rel=0.005)  # but for the norms
    square = flops.language(a, 0, 1, mtp=True) - flops.language(a, 0, 1)
    assert square == 2 * 3 * heads


@pytest.mark.parametrize("trains", ["visual.blocks", "language_model", "merger"])
def test_what_is_frozen_costs_no_gradients(trains: str, dense: Path) -> None:
    from transformers import AutoModelForImageTextToText

    a = Architecture.from_hf(dense)
    model = AutoModelForImageTextToText.from_pretrained(
        dense, dtype=torch.float32, attn_implementation="eager"
    )
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(trains in name)
    ids = torch.full([1, 40], 7)
    ids[0, 5:17] = a.image_token_id
    with FlopCounterMode(display=False) as counter:
        logits = model(
            input_ids=ids,
            pixel_values=torch.randn(48, a.vision.patch_dim),
            image_grid_thw=torch.tensor([[1, 6, 8]]),
            mm_token_type_ids=(ids == a.image_token_id).int(),
        ).logits
        logits.sum().backward()
    words = ("blocks", "merger", "language")
    trained = flops.Trained(*(float(word in trains) for word in words))
    counted = flops.language(a, 40, 2 * 40**2, trained) + flops.vision(a, 48, 48**2, trained)
    assert counter.get_total_flops() == pytest.approx(counted, rel=0.06)
    assert counted < 0.94 * (flops.language(a, 40, 2 * 40**2) + flops.vision(a, 48, 48**2))
