"""The tower's features and gradients on TP, SP, CP and DP ranks equal HF's on one rank."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from megatron.core import parallel_state
from megatron.core.distributed import (
    DistributedDataParallel,
    DistributedDataParallelConfig,
    finalize_model_grads,
)
from torch import Tensor

from mcore_qwen3vl.layout import Layout
from mcore_qwen3vl.runtime.launch import run_layout
from mcore_qwen3vl.runtime.parallel import initialize
from tests.model.vision_toy import (
    Batch,
    Reference,
    Toy,
    batch,
    reference_gradients,
    relative_errors,
)
from tests.turns import slow_except

# For double precision; the remaining error comes from HF, which rotates in float32.
TOLERANCE = 1e-7
LAYOUTS = ["tp2", "tp2+sp", "cp2", "tp2xcp2", "tp2xcp2+sp"]
BATCHES = {
    "images": batch([("image", 1, 4, 6), ("image", 1, 6, 8), ("image", 1, 2, 4)]),
    "one image": batch([("image", 1, 4, 6)]),
    "video": batch([("video", 3, 4, 6)]),
    "mixed, two samples": batch(
        [("image", 1, 4, 2), ("video", 2, 4, 4), ("image", 1, 2, 6)],
        [("video", 1, 6, 2), ("image", 1, 8, 4)],
    ),
    "one sample of two without": batch([], [("image", 1, 6, 4)]),
}


def gradients(
    layout: Layout,
    of_rank: list[Batch],
    freeze: Callable[[str], bool] = lambda name: False,
    overlap: bool = False,
    **tower_options: bool,
) -> dict[str, Tensor]:
    """Return the tower's gradients after DDP and ``finalize_model_grads``; runs on every rank.

    Megatron averages over DP, and its schedules multiply the loss by CP, as does this function.
    """
    model = Toy(layout, **tower_options)
    for name, parameter in model.visual.named_parameters():
        parameter.requires_grad_(not freeze(name))
    ddp = DistributedDataParallel(
        model.config,
        # With small buckets, several are in flight where they overlap.
        DistributedDataParallelConfig(overlap_grad_reduce=overlap, bucket_size=4000),
        model,
    )
    # DDP learns in the first step which gradients to wait for, and overlaps from the second on.
    learn = [BATCHES["images"]] if overlap else []
    for one in [*learn, of_rank[parallel_state.get_data_parallel_rank()]]:
        ddp.zero_grad_buffer()
        (ddp(one) * layout.cp).backward()
        finalize_model_grads([ddp])
    return {
        name: p.main_grad.clone() for name, p in model.visual.named_parameters() if p.requires_grad
    }


def run(layout: str, *args: object, **options: object) -> list[dict[str, Tensor]]:
    parsed = Layout.parse(layout)

    def on_rank() -> dict[str, Tensor]:
        initialize(parsed)
        return gradients(parsed, *args, **options)

    return run_layout(on_rank, parsed.world_size, timeout=120)


def assert_equal_gradients(ours: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    errors = relative_errors(ours, expected)
    worst = max(errors, key=errors.__getitem__)
    assert errors[worst] <= TOLERANCE, f"{worst}: {errors[worst]:.1e}"


@pytest.fixture(scope="module")
def expected() -> dict[str, tuple[list[Tensor], dict[str, Tensor]]]:
    """Return for each batch: features with DeepStack layers, and the tower's gradients."""
    reference, found = Reference(), {}
    for name, one in BATCHES.items():
        with torch.no_grad():
            encoded = [layers for _, layers in reference.encode(one)]
        features = [torch.cat(layer) for layer in zip(*encoded, strict=True)]
        found[name] = features, reference_gradients(one)
    return found


# Without work sharing every rank encodes everything, so CP adds nothing that TP does not.
CASES = [*((layout, True) for layout in LAYOUTS), ("tp2", False), ("tp2xcp2+sp", False)]


@pytest.mark.parametrize(("layout", "work_sharing"), slow_except(CASES, ("tp2xcp2+sp", True)))
def test_features_and_gradients(layout, work_sharing, expected):
    parsed = Layout.parse(layout)

    def on_rank():
        initialize(parsed)
        tower = Toy(parsed, work_sharing=work_sharing).visual
        with torch.no_grad():
            features = {name: tower(one.visual()) for name, one in BATCHES.items()}
        return features, {
            name: gradients(parsed, [one], work_sharing=work_sharing)
            for name, one in BATCHES.items()
        }

    for features, grads in run_layout(on_rank, parsed.world_size, timeout=120):
        for name, (wanted, wanted_gradients) in expected.items():
            for got, want in zip([features[name][0], *features[name][1]], wanted, strict=True):
                assert got.shape == want.shape
                assert (got - want).abs().max() <= TOLERANCE * want.abs().max(), name
            assert_equal_gradients(grads[name], wanted_gradients)


@pytest.mark.parametrize("overlap", slow_except([False, True], True), ids=["", "overlap"])
@pytest.mark.parametrize("layout", slow_except(["dp2", "tp2xdp2+sp"], "dp2"))
def test_a_data_parallel_rank_without_images(layout, overlap):
    """A rank without images neither hangs the reduction nor changes the gradients."""
    with_image, text = BATCHES["mixed, two samples"], batch([], [])
    expected = {name: g / 2 for name, g in reference_gradients(with_image, text).items()}
    for ours in run(layout, [with_image, text], overlap=overlap):
        assert_equal_gradients(ours, expected)


@pytest.mark.parametrize("layout", slow_except(["tp2+sp", "cp2"], "cp2"))
def test_text_only_gradients_are_present_and_exactly_zero(layout):
    for ours in run(layout, [batch([])], overlap=True):
        assert len(ours) == len(dict(Reference().visual.named_parameters()))
        assert not any(gradient.any() for gradient in ours.values())


@pytest.mark.slow
@pytest.mark.parametrize("layout", ["tp2xcp2+sp"])
def test_recompute_equals_none(layout):
    one = BATCHES["mixed, two samples"]
    for ours in run(layout, [one], recompute=True):
        assert_equal_gradients(ours, reference_gradients(one))


FREEZABLE = ["blocks", "merger", "patch_embed", "deepstack_merger_list.1"]


@pytest.mark.parametrize("frozen", slow_except(FREEZABLE, "merger"))
def test_freezing_leaves_the_other_gradients_unchanged(frozen):
    one = BATCHES["mixed, two samples"]
    expected = {
        name: gradient
        for name, gradient in reference_gradients(one).items()
        if not name.startswith(frozen)
    }
    for ours in run("tp2xcp2+sp", [one], freeze=lambda name: name.startswith(frozen)):
        assert_equal_gradients(ours, expected)


@pytest.mark.slow
def test_a_frozen_tower_has_no_gradients():
    for ours in run("tp2xcp2+sp", [BATCHES["images"]], freeze=lambda name: True):
        assert ours == {}
