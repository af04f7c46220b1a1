"""The optimizer's state in the ranks' own parts: what Megatron gathers, and either reads both."""

from __future__ import annotations

import shutil
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from math import prod
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from megatron.core import dist_checkpointing, parallel_state
from megatron.core.dist_checkpointing.mapping import ShardedTensor, ShardedTensorFactory
from megatron.core.dist_checkpointing.strategies.fully_parallel import (
    FullyParallelLoadStrategyWrapper,
    FullyParallelSaveStrategyWrapper,
)
from megatron.core.dist_checkpointing.strategies.torch import (
    TorchDistLoadShardedStrategy,
    TorchDistSaveShardedStrategy,
)
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from megatron.core.transformer.module import Float16Module
from torch import Tensor

from mcore_qwen3vl.config import Architecture
from mcore_qwen3vl.converters.mcore.paths import TRACKER
from mcore_qwen3vl.converters.torch_dist import metadata
from mcore_qwen3vl.errors import BadInput
from mcore_qwen3vl.layout import Layout
from mcore_qwen3vl.model.build import build_chunks
from mcore_qwen3vl.model.freeze import Freezing
from mcore_qwen3vl.model.lora.attach import attach
from mcore_qwen3vl.model.lora.trainable import freezing, trained_names
from mcore_qwen3vl.runtime.launch import run_layout
from mcore_qwen3vl.runtime.parallel import initialize
from mcore_qwen3vl.tiny import tiny_config
from mcore_qwen3vl.training.checkpoints import optimizer as own_parts
from mcore_qwen3vl.training.checkpoints.optimizer import LOAD, SAVE, USED, keep_own_parts
from mcore_qwen3vl.training.step.optimizer import make_resumable
from mcore_qwen3vl.verify.curves.curve import curve_of, numbers_of, worst_difference
from mcore_qwen3vl.verify.curves.job import DISTRIBUTED, Job, train
from mcore_qwen3vl.verify.curves.tables import OTHER_LAYOUT, whole_and_half

FORMAT = {
    "distrib_optim_sharding_type": "fully_reshardable",
    "distrib_optim_fully_reshardable_mem_efficient": True,
    "chained_optim_avoid_prefix": True,
}
BUCKET = (
    20_011  # values of a gradient bucket: each is divided over the ranks, so there are many cuts
)
MOMENTS = {"exp_avg": -1.0, "exp_avg_sq": 0.5}  # in multiples of the weight, exact in float32


@dataclass(frozen=True)
class Model:
    """What is built, and which of it trains."""

    config: dict[str, Any] = field(default_factory=dict)
    frozen: tuple[str, ...] = ()
    lora: bool = False


DENSE, MOE = Model(), Model({"moe": True})
LORA = replace(MOE, lora=True)
BF16 = Model({"dtype": "bfloat16"})
TIED = Model({"tie": True})
PARTLY = replace(DENSE, frozen=("vision", "embedding"))


@dataclass
class Trained:
    """This rank's chunks, as Megatron wraps them and bare, and their optimizer."""

    wrapped: list[Any]
    chunks: list[Any]
    optimizer: Any

    @classmethod
    def build(cls, layout: Layout, model: Model, bucket: int | None) -> Trained:
        initialize(layout)
        architecture = Architecture.from_hf(tiny_config(**model.config))
        chunks = build_chunks(architecture, layout)
        choice = freezing() if model.lora else Freezing(model.frozen, ())
        for chunk in chunks:
            if model.lora:
                attach(chunk, {name: SimpleNamespace(r=4, scaling=0.5) for name in adapted(chunk)})
            choice.apply(chunk)
        bf16 = architecture.dtype == "bfloat16"
        ddp = DistributedDataParallelConfig(
            use_distributed_optimizer=True, overlap_grad_reduce=bucket is not None,
            bucket_size=bucket, grad_reduce_in_fp32=bf16,
        )  # fmt: skip
        config = OptimizerConfig(
            optimizer="adam", lr=0.1, use_distributed_optimizer=True, bf16=bf16,
            params_dtype=torch.bfloat16 if bf16 else torch.float32,
        )  # fmt: skip
        inner = [Float16Module(chunk.config, chunk) if bf16 else chunk for chunk in chunks]
        wrapped = [DistributedDataParallel(module.config, ddp, module) for module in inner]
        optimizer = get_megatron_optimizer(config, wrapped)
        make_resumable(optimizer)
        keep_own_parts(optimizer)
        return cls(wrapped, chunks, optimizer)

    @property
    def parts(self) -> list[DistributedOptimizer]:
        return getattr(self.optimizer, "chained_optimizers", [self.optimizer])

    def states(self) -> Iterator[tuple[Tensor, dict[str, Tensor]]]:
        """The weights that this rank owns, each flat, and their moments."""
        for part in self.parts:
            for group in part.optimizer.param_groups:
                yield from ((weight, part.optimizer.state[weight]) for weight in group["params"])

    @torch.no_grad()
    def fill(self) -> None:
        """Random weights, in the model too, and moments that they determine."""
        torch.manual_seed(dist.get_rank())
        for weight, state in self.states():
            weight.copy_(torch.randn_like(weight).bfloat16())
            for name, factor in MOMENTS.items():
                state[name].copy_(factor * weight)
        for part in self.parts:
            part._copy_main_params_to_model_params()
        for module in self.wrapped:
            module.start_param_sync(force_sync=True)

    @torch.no_grad()
    def spoil(self) -> None:
        for weight, state in self.states():
            for tensor in (weight, *(state[name] for name in MOMENTS)):
                tensor.fill_(torch.nan)

    def described(self) -> dict[str, Any]:
        states = {}
        for number, chunk in enumerate(self.chunks):
            names = trained_names(chunk)
            found = chunk.sharded_state_dict(metadata=FORMAT)
            states[f"model{number}"] = {k: v for k, v in found.items() if k in names}
        return states

    def weights(self, folder: Path) -> None:
        """Save the model alone, as mcore does."""
        self._save(self.described(), folder)

    def write(self, folder: Path) -> None:
        state = self.optimizer.sharded_state_dict(self.described(), metadata=FORMAT)
        self._save({"optimizer": state}, folder)

    def _save(self, state: dict[str, Any], folder: Path) -> None:
        folder.mkdir(exist_ok=True)
        group = parallel_state.get_data_parallel_group(with_context_parallel=True)
        strategy = FullyParallelSaveStrategyWrapper(TorchDistSaveShardedStrategy(), group)
        dist_checkpointing.save(state, str(folder), strategy)

    def read(self, folder: Path) -> None:
        self._load(folder, TorchDistLoadShardedStrategy())

    def read_shared(self, folder: Path) -> None:
        """As ``--ckpt-fully-parallel-load`` does."""
        group = parallel_state.get_data_parallel_group(with_context_parallel=True)
        self._load(folder, FullyParallelLoadStrategyWrapper(TorchDistLoadShardedStrategy(), group))

    def _load(self, folder: Path, strategy: Any) -> None:
        self.spoil()
        for part in self.parts:
            part.optimizer.register_load_state_dict_post_hook(make_anew)
        wanted = self.optimizer.sharded_state_dict(
            self.described(), is_loading=True, metadata=FORMAT
        )
        loaded = dist_checkpointing.load({"optimizer": wanted}, str(folder), strategy)
        self.optimizer.load_state_dict(loaded["optimizer"])

    @contextmanager
    def gathering(self) -> Iterator[None]:
        """Inside, Megatron's own way."""
        ours = [{name: vars(part).pop(name) for name in (SAVE, LOAD)} for part in self.parts]
        yield
        for part, methods in zip(self.parts, ours, strict=True):
            vars(part).update(methods)


def make_anew(adam: torch.optim.Optimizer) -> None:
    """New tensors for the moments, as Transformer Engine's Adam makes them, here without values."""
    for state in adam.state.values():
        state |= {name: torch.full_like(state[name], torch.nan) for name in MOMENTS}


def adapted(chunk: Any) -> list[str]:
    """Every projection, whose factors are cut along either axis and in pieces."""
    text = "model.language_model.layers.{}."
    names = [f"self_attn.{x}_proj.weight" for x in "qkvo"]
    names += ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]
    layers = [layer.layer_number - 1 for layer in chunk.decoder.layers]
    return [text.format(number) + name for number in layers for name in names]


Action = tuple[str, str, bool]
"""What is done, with which folder, and whether in the ranks' own parts or gathered."""


def act(
    layout: Layout, model: Model, bucket: int | None, actions: Sequence[Action], folder: Path
) -> None:
    trained = Trained.build(layout, model, bucket)
    trained.fill()
    for what, name, own in actions:
        with nullcontext() if own else trained.gathering():
            getattr(trained, what)(folder / name)


def stored(folder: Path) -> dict[str, Tensor]:
    """Every tensor, read by torch alone."""
    reader = dcp.FileSystemReader(folder)
    tensors = {
        key: torch.empty(entry.size, dtype=entry.properties.dtype)
        for key, entry in reader.read_metadata().state_dict_metadata.items()
        if isinstance(entry, dcp.TensorStorageMetadata)
    }
    dcp.load(tensors, storage_reader=reader, no_dist=True)
    return tensors


def assert_state_of(weights: Path, found: Path) -> None:
    """`found` holds the state that :meth:`Trained.fill` gives to `weights`, and nothing else."""
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


@pytest.mark.parametrize(
    ("model", "layout", "other"),
    [
        pytest.param(DENSE, "dp3", "tp2+sp", id="ragged"),
        pytest.param(DENSE, "tp2xdp2+sp", "dp4", id="tp", marks=slow),
        pytest.param(DENSE, "pp2xvpp2xdp2", "tp2+sp", id="pp", marks=slow),
        pytest.param(DENSE, "cp2xdp2", "pp2", id="cp", marks=slow),
        pytest.param(TIED, "pp2xdp2", "tp2xdp2+sp", id="tied", marks=slow),
        pytest.param(PARTLY, "tp2xdp2", "dp3", id="frozen", marks=slow),
        pytest.param(BF16, "dp3", "tp2", id="bf16", marks=slow),
        pytest.param(MOE, "ep2xdp2", "ep4xdp4", id="ep", marks=slow),
        pytest.param(MOE, "tp2xep2xdp2+sp", "ep2xdp2", id="etp1", marks=slow),
        pytest.param(MOE, "tp2xep2xetp2xdp2+sp", "ep2xdp2", id="etp", marks=slow),
        pytest.param(LORA, "tp2xep2xdp2+sp", "ep2xdp2", id="lora", marks=slow),
    ],
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
    # Of one bucket: with more, what Megatron gathers is shifted by the padding between them.
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
    """How many values each rank wrote."""
    counts: Counter[str] = Counter()
    for tensor in metadata.read(folder).tensors.values():
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
        whole, save = whole_and_half(run, tmp_path)
    with nullcontext() if after else mock.patch.object(own_parts, "keep_own_parts"):
        rest = train(run, tmp_path / "rest", "--save", str(save), "--save-interval", "100")
    assert [entry["iteration"] for entry in rest] == [3, 4]
    assert numbers_of(rest) == numbers_of(whole[2:])


@slow
@pytest.mark.parametrize(
    "flags",
    [
        ("--ckpt-assume-constant-structure",),
        ("--async-save", "--async-strategy", "mcore"),
        ("--no-ckpt-fully-parallel-save", "--ckpt-fully-parallel-load"),
    ],
)
def test_every_checkpoint_of_a_run_is_its_own(
    flags: tuple[str, ...], moe: Path, data: Path, tmp_path: Path
) -> None:
    """Also where the plan of the first is kept, or it is written while training goes on."""
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
        # The vocabulary is padded otherwise too.
        (
            False,
            ("pp2xvpp2xdp2", "--num-workers", "1", "--make-vocab-size-divisible-by", "100"),
            ("tp2+sp", "--num-workers", "2", "--make-vocab-size-divisible-by", "60"),
        ),
        (False, ("tp2xdp2+sp", "--num-workers", "2"), ("dp4", "--num-workers", "1")),
        (True, ("ep2xdp2", "--num-workers", "2"), ("ep4xdp4", "--num-workers", "1")),
    ],
)
def test_another_layout_goes_on_closely_with_many_buckets(
    is_moe: bool, before: tuple[str, ...], after: tuple[str, ...], dense: Path, moe: Path,
    data: Path, tmp_path: Path,
) -> None:  # fmt: skip
    """Where what Megatron gathers is shifted; the same layout goes on bit for bit."""
    first, then = (
        Job(
            moe if is_moe else dense, data, Layout.parse(layout), steps=4,
            flags=(*DISTRIBUTED, "--ddp-bucket-size", str(BUCKET), *flags),
        )
        for layout, *flags in (before, after)
    )  # fmt: skip
    whole, save = whole_and_half(first, tmp_path)
    shutil.copytree(save, tmp_path / "copy")
    same = train(first, tmp_path / "same", "--save", str(save), "--save-interval", "100")
    assert numbers_of(same) == numbers_of(whole[2:])
    other = train(then, tmp_path / "other", "--save", str(tmp_path / "copy"))
    difference = worst_difference(curve_of(other), curve_of(whole[2:]))
    assert max(difference.loss, difference.grad_norm) <= OTHER_LAYOUT


@slow
def test_what_megatron_gathered_wrongly_is_refused(dense: Path, data: Path, tmp_path: Path) -> None:
    """By DP 3 the padding is at the end of almost every bucket."""
    flags = ("--bf16", *DISTRIBUTED, "--ddp-bucket-size", str(BUCKET))
    run = Job(dense, data, Layout.parse("dp3"), steps=4, batch=3, flags=flags)
    with mock.patch.object(own_parts, "keep_own_parts"):
        whole, save = whole_and_half(run, tmp_path / "gathered")
    with pytest.raises(BadInput, match=r"belongs to other weights: .* with --no-load-optim"):
        train(run, tmp_path / "stop", "--save", str(save))
    weights = train(run, tmp_path / "weights", "--save", str(save), "--no-load-optim")
    assert [entry["iteration"] for entry in weights] == [3, 4]
    again, save = whole_and_half(run, tmp_path / "own")
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
