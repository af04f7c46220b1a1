"""A model with its distributed optimizer on the ranks of a layout, saved without a run."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from megatron.core import dist_checkpointing, parallel_state
from megatron.core.dist_checkpointing.strategies import filesystem_async
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
from mcore_qwen3vl.converters.torch_pickle import guard_reads
from mcore_qwen3vl.layout import Layout
from mcore_qwen3vl.model.freeze import Freezing
from mcore_qwen3vl.model.lora import adapter_freezing, attach, trained_names
from mcore_qwen3vl.model.qwen3vl import build_chunks
from mcore_qwen3vl.runtime.launch import initialize
from mcore_qwen3vl.tiny import tiny_config
from mcore_qwen3vl.training.hooks import results_queue, wrap
from mcore_qwen3vl.training.optimizer_state import LOAD, SAVE, keep_own_parts, make_resumable

FORMAT = {
    "distrib_optim_sharding_type": "fully_reshardable",
    "distrib_optim_fully_reshardable_mem_efficient": True,
    "chained_optim_avoid_prefix": True,
}
MOMENTS = {"exp_avg": -1.0, "exp_avg_sq": 0.5}  # multiples of the weight, exact in float32


@dataclass(frozen=True)
class Model:
    """The model to build, and which parameters train."""

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
    """This rank's chunks, wrapped by Megatron and bare, and their optimizer."""

    wrapped: list[Any]
    chunks: list[Any]
    optimizer: Any

    @classmethod
    def build(cls, layout: Layout, model: Model, bucket: int | None) -> Trained:
        initialize(layout)
        architecture = Architecture.from_hf(tiny_config(**model.config))
        chunks = build_chunks(architecture, layout)
        choice = adapter_freezing() if model.lora else Freezing(model.frozen, ())
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
        """Yield the weights that this rank owns, each flat, with their moments."""
        for part in self.parts:
            for group in part.optimizer.param_groups:
                yield from ((weight, part.optimizer.state[weight]) for weight in group["params"])

    @torch.no_grad()
    def fill(self) -> None:
        """Set random weights, also in the model, and moments computed from them."""
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
        """Save the model without its optimizer, as mcore does."""
        self._save(self.described(), folder)

    def write(self, folder: Path) -> None:
        state = self.optimizer.sharded_state_dict(self.described(), metadata=FORMAT)
        self._save({"optimizer": state}, folder)

    def _save(self, state: dict[str, Any], folder: Path) -> None:
        folder.mkdir(exist_ok=True)
        wrap(filesystem_async, "get_write_results_queue", results_queue)  # as in a run
        group = parallel_state.get_data_parallel_group(with_context_parallel=True)
        strategy = FullyParallelSaveStrategyWrapper(TorchDistSaveShardedStrategy(), group)
        dist_checkpointing.save(state, str(folder), strategy)

    def read(self, folder: Path) -> None:
        self._load(folder, TorchDistLoadShardedStrategy())

    def read_shared(self, folder: Path) -> None:
        """Read in the way of ``--ckpt-fully-parallel-load``."""
        group = parallel_state.get_data_parallel_group(with_context_parallel=True)
        self._load(folder, FullyParallelLoadStrategyWrapper(TorchDistLoadShardedStrategy(), group))

    def _load(self, folder: Path, strategy: Any) -> None:
        self.spoil()
        for part in self.parts:
            part.optimizer.register_load_state_dict_post_hook(make_anew)
        wanted = self.optimizer.sharded_state_dict(
            self.described(), is_loading=True, metadata=FORMAT
        )
        guard_reads()
        loaded = dist_checkpointing.load({"optimizer": wanted}, str(folder), strategy)
        self.optimizer.load_state_dict(loaded["optimizer"])

    @contextmanager
    def gathering(self) -> Iterator[None]:
        """Use Megatron's own methods inside the context."""
        ours = [{name: vars(part).pop(name) for name in (SAVE, LOAD)} for part in self.parts]
        yield
        for part, methods in zip(self.parts, ours, strict=True):
            vars(part).update(methods)


def make_anew(adam: torch.optim.Optimizer) -> None:
    """Replace the moments by new tensors, as TE's Adam does when it loads, filled with NaN here."""
    for state in adam.state.values():
        state |= {name: torch.full_like(state[name], torch.nan) for name in MOMENTS}


def adapted(chunk: Any) -> list[str]:
    """Return the names of all projections; their factors are cut along either axis or in pieces."""
    text = "model.language_model.layers.{}."
    names = [f"self_attn.{x}_proj.weight" for x in "qkvo"]
    names += ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]
    layers = [layer.layer_number - 1 for layer in chunk.decoder.layers]
    return [text.format(number) + name for number in layers for name in names]


def stored(folder: Path) -> dict[str, Tensor]:
    """Read every tensor with torch alone."""
    reader = dcp.FileSystemReader(folder)
    tensors = {
        key: torch.empty(entry.size, dtype=entry.properties.dtype)
        for key, entry in reader.read_metadata().state_dict_metadata.items()
        if isinstance(entry, dcp.TensorStorageMetadata)
    }
    dcp.load(tensors, storage_reader=reader, no_dist=True)
    return tensors
