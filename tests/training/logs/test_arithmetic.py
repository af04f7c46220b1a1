"""Parameters, FLOPs and memory: counted against real models and by hand."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from mcore_qwen3vl.config import Architecture
from mcore_qwen3vl.layout import Layout
from mcore_qwen3vl.runtime.launch import run_layout
from mcore_qwen3vl.runtime.parallel import initialize
from mcore_qwen3vl.shapes import SHAPES
from mcore_qwen3vl.training import memory, parameters
from mcore_qwen3vl.training.logs import flops


@pytest.mark.parametrize("size", ["2b", "4b", "8b", "32b", "30b_a3b", "235b_a22b"])
def test_parameters_are_those_of_the_hf_model(size: str) -> None:
    from transformers import AutoConfig, AutoModelForImageTextToText

    with torch.device("meta"):
        config = AutoConfig.from_pretrained(SHAPES / f"{size}.json")
        model = AutoModelForImageTextToText.from_config(config)
    a = Architecture.from_hf(SHAPES / f"{size}.json")
    assert parameters.total(a) == sum(p.numel() for p in model.parameters())
    assert parameters.vision(a) == sum(p.numel() for p in model.model.visual.parameters())


@pytest.mark.parametrize("is_moe", [False, True])
@pytest.mark.parametrize("layout", ["single", "tp2+sp", "pp2", "ep2xdp2"])
def test_memory_counts_the_parameters_that_ranks_hold(
    is_moe: bool, layout: str, dense: Path, moe: Path
) -> None:
    if not is_moe and layout.startswith("ep"):
        pytest.skip("a dense model has no experts")
    a = Architecture.from_hf(moe if is_moe else dense)
    chosen = Layout.parse(layout)
    fullest = max(run_layout(held_parameters, chosen.world_size, a, chosen))
    estimate = memory.estimate(a, chosen, memory.Workload(128))
    assert estimate.weights == memory.WEIGHT * fullest


def held_parameters(a: Architecture, layout: Layout) -> int:
    from megatron.core import parallel_state

    from mcore_qwen3vl.model.qwen3vl import Qwen3VLModel

    initialize(layout)
    model = Qwen3VLModel.from_hf_config(
        a,
        pre_process=parallel_state.is_pipeline_first_stage(),
        post_process=parallel_state.is_pipeline_last_stage(),
        **layout.config_overrides(),
    )
    return sum(p.numel() for p in model.parameters())


def test_states_are_divided_over_the_ranks_that_hold_the_same_weights() -> None:
    a = Architecture.from_hf(SHAPES / "30b_a3b.json")
    work = memory.Workload(8192)
    one = memory.estimate(a, Layout(ep=8, dp=8), work)
    more = memory.estimate(a, Layout(ep=8, dp=32), work)
    shared, experts = (
        sum(memory.layer_parameters(a, Layout(ep=8), True)[i] for _ in a.moe_layers) for i in (0, 1)
    )
    shared += 2 * parameters.embedding(a) + a.hidden_size + parameters.vision(a)
    assert one.weights == more.weights == 2 * (shared + experts)
    assert one.optimizer == pytest.approx(12 * (shared / 8 + experts))
    assert more.optimizer == pytest.approx(12 * (shared / 32 + experts / 4))


def test_recompute_and_parallelism_shrink_activations_as_they_should() -> None:
    a = Architecture.from_hf(SHAPES / "8b.json")
    text = memory.Workload(8192, visual_share=0.0)
    plain = memory.estimate(a, Layout(), text)
    halved = memory.estimate(a, Layout(tp=2, sp=True), text)
    assert halved.activations == pytest.approx(plain.activations / 2)
    assert halved.logits == plain.logits / 2
    assert memory.estimate(a, Layout(cp=2), text).activations == pytest.approx(
        plain.activations / 2
    )
    full = memory.estimate(a, Layout(), text, "full")
    inputs = 2 * a.hidden_size * 8192 * a.num_hidden_layers
    one_layer = plain.activations / a.num_hidden_layers
    assert full.activations == pytest.approx(inputs + one_layer)


@pytest.mark.parametrize(
    ("layout", "stage", "micro_batches"),
    [("single", 0, 1), ("pp4", 0, 4), ("pp4", 3, 1), ("pp4xvpp2", 0, 5.5), ("pp4xvpp2", 3, 2.5)],
)
def test_micro_batches_in_flight(layout: str, stage: int, micro_batches: float) -> None:
    assert memory.in_flight(Layout.parse(layout), stage) == micro_batches


def test_uneven_stages() -> None:
    a = Architecture.from_hf(SHAPES / "235b_a22b.json")
    stages = memory.stage_layers(a, Layout(pp=8, first=11, last=11))
    assert [len(stage) for stage in stages] == [11, *[12] * 6, 11]


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
    # Eager attention computes the full square, of which the causal half is counted; and HF's
    # rotary tables are matrix products too, small ones.
    language = of("Global") - of(vision)
    assert language * 3 == pytest.approx(flops.language(a, tokens, 2 * tokens**2), rel=0.01)
