"""The optimizer's state in ranks' own parts equals what Megatron gathers; both read either."""

from __future__ import annotations

import shutil
from collections import Counter
from collections.abc import Sequence
from contextlib import nullcontext
from math import prod
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import megatron.core
import pytest
import torch
import torch.distributed as dist
from megatron.core.dist_checkpointing.mapping import ShardedTensor, ShardedTensorFactory
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from packaging.version import Version
from torch import Tensor

from mcore_qwen3vl.converters import torch_dist
from mcore_qwen3vl.converters.identify import TRACKER
from mcore_qwen3vl.errors import BadInput
from mcore_qwen3vl.layout import Layout
from mcore_qwen3vl.runtime.launch import run_layout
from mcore_qwen3vl.training import optimizer_state as own_parts
from mcore_qwen3vl.training.optimizer_state import LOAD, SAVE, USED, keep_own_parts, regroup
from mcore_qwen3vl.verification.curves import (
    DISTRIBUTED,
    OTHER_LAYOUT,
    Job,
    curve_of,
    train,
    train_and_rewind,
    worst_difference,
)
from tests.training.checkpoints.trained import (
    BF16,
    DENSE,
    LORA,
    MOE,
    MOMENTS,
    PARTLY,
    TIED,
    Model,
    Trained,
    stored,
)
from tests.training.log import numbers_of

# Values in a gradient bucket. Each bucket is divided over the ranks, so that there are many cuts.
BUCKET = 20_011


Action = tuple[str, str, bool]
"""A method of `Trained`, its folder, and whether state is in the ranks' own parts or gathered."""


def act(
    layout: Layout, model: Model, bucket: int | None, actions: Sequence[Action], folder: Path
) -> None:
    trained = Trained.build(layout, model, bucket)
    trained.fill()
    for what, name, own in actions:
        with nullcontext() if own else trained.gathering():
            getattr(trained, what)(folder / name)


def assert_state_of(weights: Path, found: Path) -> None:
    """Check that `found` holds exactly the state that :meth:`Trained.fill` gives to `weights`."""
    expected = {}
    for key, weight in stored(weights).items():
        for name, factor in {"param": 1.0, **MOMENTS}.items():
            expected[f"optimizer.state.{name}.{key}"] = factor * weight.float()
    tensors = stored(found)
    assert tensors.keys() == expected.keys()
    wrong = [key for key in expected if not torch.equal(tensors[key], expected[key])]
    assert not wrong, f"{found.name}: {wrong}"


GATHER, OWN = False, True
slow = pytest.mark.slow


@slow
@pytest.mark.parametrize(
    ("model", "layout", "other"),
    [
        (DENSE, "dp3", "tp2+sp"),
        (DENSE, "tp2xdp2+sp", "dp4"),
        (DENSE, "pp2xvpp2xdp2", "tp2+sp"),
        (DENSE, "cp2xdp2", "pp2"),
        (TIED, "pp2xdp2", "tp2xdp2+sp"),
        (PARTLY, "tp2xdp2", "dp3"),
        (BF16, "dp3", "tp2"),
        (MOE, "ep2xdp2", "ep4xdp4"),
        (MOE, "tp2xep2xdp2+sp", "ep2xdp2"),
        (MOE, "tp2xep2xetp2xdp2+sp", "ep2xdp2"),
        (LORA, "tp2xep2xdp2+sp", "ep2xdp2"),
    ],
    ids=["ragged", "tp", "pp", "cp", "tied", "frozen", "bf16", "ep", "etp1", "etp", "lora"],
)
def test_own_parts_are_what_megatron_gathers(
    model: Model, layout: str, other: str, tmp_path: Path
) -> None:
    first, then = Layout.parse(layout), Layout.parse(other)
    actions: list[Action] = [
        ("weights", "weights", OWN), ("write", "gathered", GATHER), ("write", "own", OWN),
        ("read", "gathered", OWN), ("write", "gathered, own, gathered", GATHER),
        ("read", "own", GATHER), ("write", "own, gathered, own", OWN),
    ]  # fmt: skip
    # There is one bucket: with more, Megatron gathers state shifted by the padding between them.
    run_layout(act, first.world_size, first, model, None, actions, tmp_path)
    actions = [("read", "own", OWN), ("write", "elsewhere", OWN),
               ("read_shared", "gathered", OWN), ("write", "elsewhere too", OWN)]  # fmt: skip
    run_layout(act, then.world_size, then, model, BUCKET, actions, tmp_path)
    weights, *states = sorted(tmp_path.iterdir(), key=lambda folder: folder.name != "weights")
    assert len(states) == 6
    for state in states:
        assert_state_of(weights, state)
    parts = written(tmp_path / "own")
    assert max(parts.values()) < 1.02 * parts.total() / first.dp


def written(folder: Path) -> Counter[str]:
    """Count the values that each rank wrote."""
    counts: Counter[str] = Counter()
    for tensor in torch_dist.read_metadata(folder).tensors.values():
        for chunk in tensor.chunks:
            counts[chunk.data.file.split("_")[2]] += prod(chunk.sizes)
    return counts


@slow
@pytest.mark.parametrize(("before", "after"), [(GATHER, OWN), (OWN, GATHER)])
def test_a_run_goes_on_bit_for_bit_from_the_other_way(
    before: bool, after: bool, moe: Path, data: Path, tmp_path: Path
) -> None:
    run = Job(moe, data, Layout.parse("ep2xdp2"), steps=4, flags=DISTRIBUTED)
    with nullcontext() if before else mock.patch.object(own_parts, "keep_own_parts"):
        whole, save = train_and_rewind(run, tmp_path)
    with nullcontext() if after else mock.patch.object(own_parts, "keep_own_parts"):
        rest = train(run, tmp_path / "rest", "--save", str(save), "--save-interval", "100")
    assert [entry["iteration"] for entry in rest] == [3, 4]
    assert numbers_of(rest) == numbers_of(whole[2:])


@slow
@pytest.mark.parametrize(
    "flags",
    [
        ("--ckpt-assume-constant-structure",),
        ("--no-ckpt-fully-parallel-save", "--ckpt-fully-parallel-load"),
    ],
)
def test_every_checkpoint_of_a_run_is_its_own(
    flags: tuple[str, ...], moe: Path, data: Path, tmp_path: Path
) -> None:
    """So it is if the first save's plan is reused, or if training continues while it is written."""
    run = Job(moe, data, Layout.parse("ep2xdp2"), steps=4, flags=(*DISTRIBUTED, *flags))
    save = tmp_path / "save"
    whole = train(run, tmp_path / "whole", "--save", str(save), "--save-interval", "1")
    (save / TRACKER).write_text("2")
    rest = train(run, tmp_path / "rest", "--save", str(save), "--save-interval", "100")
    assert [entry["iteration"] for entry in rest] == [3, 4]
    assert numbers_of(rest) == numbers_of(whole[2:])


@slow
@pytest.mark.parametrize(
    ("is_moe", "before", "after"),
    [
        # The padding of the vocabulary changes, too.
        (
            False,
            ("pp2xvpp2xdp2", "--num-workers", "1", "--make-vocab-size-divisible-by", "100"),
            ("tp2+sp", "--num-workers", "2", "--make-vocab-size-divisible-by", "60"),
        ),
        (False, ("tp2xdp2+sp", "--num-workers", "2"), ("dp4", "--num-workers", "1")),
        (True, ("ep2xdp2", "--num-workers", "2"), ("ep4xdp4", "--num-workers", "1")),
        # With EP, experts have an optimizer of their own, unlike in a checkpoint without EP.
        (True, ("ep2xdp2", "--num-workers", "1"), ("tp2xetp2+sp", "--num-workers", "2")),
        (True, ("tp2xdp2+sp", "--num-workers", "2"), ("ep4xdp4", "--num-workers", "1")),
    ],
)
def test_another_layout_goes_on_closely_with_many_buckets(
    is_moe: bool, before: tuple[str, ...], after: tuple[str, ...], dense: Path, moe: Path,
    data: Path, tmp_path: Path,
) -> None:  # fmt: skip
    """Megatron's gathered state would be shifted; the same layout continues bit for bit."""
    first, then = (
        Job(
            moe if is_moe else dense, data, Layout.parse(layout), steps=4,
            flags=(*DISTRIBUTED, "--ddp-bucket-size", str(BUCKET), *flags),
        )
        for layout, *flags in (before, after)
    )  # fmt: skip
    whole, save = train_and_rewind(first, tmp_path)
    shutil.copytree(save, tmp_path / "copy")
    same = train(first, tmp_path / "same", "--save", str(save), "--save-interval", "100")
    assert numbers_of(same) == numbers_of(whole[2:])
    other = train(then, tmp_path / "other", "--save", str(tmp_path / "copy"))
    difference = worst_difference(curve_of(other), curve_of(whole[2:]))
    assert max(difference.loss, difference.grad_norm) <= OTHER_LAYOUT


@slow
def test_what_megatron_gathered_wrongly_is_refused(dense: Path, data: Path, tmp_path: Path) -> None:
    """With DP 3 almost every bucket ends in padding. Megatron 0.20 gathers it rightly."""
    flags = ("--bf16", *DISTRIBUTED, "--ddp-bucket-size", str(BUCKET))
    run = Job(dense, data, Layout.parse("dp3"), steps=4, batch=3, flags=flags)
    with mock.patch.object(own_parts, "keep_own_parts"):
        whole, save = train_and_rewind(run, tmp_path / "gathered")
    if Version(Version(megatron.core.__version__).base_version) >= Version("0.20"):
        rest = train(run, tmp_path / "rest of gathered", "--save", str(save))
        assert numbers_of(rest) == numbers_of(whole[2:])
        return
    with pytest.raises(
        BadInput, match=r"does not belong to the model's weights: .* with --no-load-optim"
    ):
        train(run, tmp_path / "stop", "--save", str(save))
    weights = train(run, tmp_path / "weights", "--save", str(save), "--no-load-optim")
    assert [entry["iteration"] for entry in weights] == [3, 4]
    again, save = train_and_rewind(run, tmp_path / "own")
    assert numbers_of(again) == numbers_of(whole)
    rest = train(run, tmp_path / "rest", "--save", str(save))
    assert numbers_of(rest) == numbers_of(whole[2:])


@pytest.mark.parametrize("name", USED)
def test_a_megatron_without_a_method_is_refused(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(DistributedOptimizer, name)
    with pytest.raises(BadInput, match=f"has no {name}, so the optimizer's state cannot"):
        keep_own_parts(unbuilt())


def test_state_that_is_no_float32_tensor_is_left_to_megatron(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(dist, "get_rank", lambda: 0)
    part = unbuilt(precision_aware=True)
    keep_own_parts(part)
    assert not {SAVE, LOAD} & vars(part).keys()
    assert "--use-precision-aware-optimizer: checkpoints gather" in caplog.text
    plain = unbuilt()
    keep_own_parts(plain)
    assert {SAVE, LOAD} <= vars(plain).keys()


def unbuilt(precision_aware: bool = False) -> DistributedOptimizer:
    part = object.__new__(DistributedOptimizer)
    part.is_stub_optimizer, part.optimizer = False, None
    part.config = SimpleNamespace(use_precision_aware_optimizer_no_fp8_or_ds_fp8=precision_aware)
    return part


def test_what_is_not_made_of_boxes_is_refused() -> None:
    parameter = torch.nn.Parameter(torch.zeros(3, 4))

    def transposed(key: str, tensor: Tensor, replica: Any, _: None) -> list[ShardedTensor]:
        return [ShardedTensor.from_rank_offsets(key, tensor.T, replica_id=replica)]

    entry = ShardedTensorFactory("some.weight", parameter, transposed, lambda x: x, (0, 0, 0))
    with pytest.raises(ValueError, match=r"some\.weight is not stored as boxes"):
        list(own_parts._boxes(entry, range(2, 7), 0))


def group(rate: float, expert: bool) -> dict[str, Any]:
    return {"lr": rate, "is_expert_parallel": expert}


def saved(*groups: dict[str, Any]) -> dict[str, Any]:
    return {"optimizer": {"param_groups": list(groups)}, "param_state_sharding_type": "some"}


def test_one_optimizers_state_serves_two_of_which_a_rank_may_own_nothing() -> None:
    state = {**saved(group(1.0, False), group(2.0, False)), 1: {"param_state": "asked"}}
    found = regroup(state, 2)
    assert list(found) == [0, 1]
    assert "param_state" not in found[0]
    assert found[1]["param_state"] == "asked"
    for one in found.values():
        assert one["param_state_sharding_type"] == "some"
        groups = one["optimizer"]["param_groups"]
        for rate in (1.0, 2.0):
            assert group(rate, True) in groups
            assert group(rate, False) in groups


def test_the_state_of_two_serves_one() -> None:
    parts = {0: saved(group(1.0, False)), 1: saved(group(2.0, True))}
    found = regroup({**parts, "param_state": "asked"}, 1)
    assert found["param_state"] == "asked"
    assert found["param_state_sharding_type"] == "some"
    groups = found["optimizer"]["param_groups"]
    # Megatron looks groups up by their options, and takes the last of equal ones.
    assert groups[-2:] == [group(1.0, False), group(2.0, True)]
    assert group(2.0, False) in groups


def test_the_same_number_stays_as_it_is() -> None:
    state = {0: saved(group(1.0, False)), 1: saved(group(2.0, True))}
    assert regroup(state, 2) is state
