"""VERL's Megatron engine with this model inside.

Three steps of building are ours: the config, the model, and making the optimizer resumable. So is
the bridge between Megatron's weights and Hugging Face's. The rest is VERL's: loss, schedule,
log-probabilities, checkpoints, offloading and router replay.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from pathlib import Path
from typing import Any, NoReturn

import torch.distributed as dist
from megatron.core import tensor_parallel
from megatron.core.dist_checkpointing.strategies import filesystem_async
from megatron.core.distributed.fsdp import mcore_fsdp_adapter
from torch import Tensor, nn
from verl.utils import tensordict_utils
from verl.utils.megatron_utils import get_model, mapping_string_to_attn_backend, unwrap_model
from verl.utils.torch_dtypes import PrecisionType
from verl.workers.engine import (
    EngineRegistry,
    MegatronEngineWithLMHead,
    MegatronEngineWithValueHead,
)

from mcore_qwen3vl.config import MODEL_TYPES, Architecture
from mcore_qwen3vl.converters.adapters.adapter import read_adapter
from mcore_qwen3vl.converters.export import export_hf, export_merged, run_together, save_hf
from mcore_qwen3vl.converters.live import load_factors, load_weights, unwrap
from mcore_qwen3vl.converters.place import Kind, identify
from mcore_qwen3vl.converters.torch_dist import guard_reads
from mcore_qwen3vl.errors import BadInput
from mcore_qwen3vl.labels import ONE_SCORE
from mcore_qwen3vl.layout import Layout
from mcore_qwen3vl.model.freeze import Freezing
from mcore_qwen3vl.model.lora import adapter_freezing, load_saved, whole_tensors
from mcore_qwen3vl.model.lora_modules import without_factors
from mcore_qwen3vl.model.transformer_config import transformer_config
from mcore_qwen3vl.runtime import cpu
from mcore_qwen3vl.training.hooks import results_queue, wrap
from mcore_qwen3vl.training.lora import LoraRun
from mcore_qwen3vl.training.optimizer import keep_own_parts, make_resumable
from mcore_qwen3vl.verl.model import PolicyModel, ValueModel
from mcore_qwen3vl.verl.options import OWN, Configs, ModelOptions, as_plain_dict, check, lora_run

ARCHITECTURES = {
    f"{family.name}ForConditionalGeneration" for family in MODEL_TYPES.values() if family.has_vision
}
"""The models that this engine trains, by the ``architectures`` of their config."""


def register() -> None:
    """Register both engines instead of VERL's own, for NVIDIA's and AMD's devices."""
    _give_verl_a_class()
    devices: list[dict[str, Any]] = [{"device": "cuda", "vendor": ["nvidia", "amd"]}]
    if cpu.is_installed():
        devices.append({"device": "cpu"})
    for device in devices:
        EngineRegistry.register("language_model", "megatron", **device)(Qwen3VLEngine)
        EngineRegistry.register("value_model", "megatron", **device)(Qwen3VLValueEngine)


def _give_verl_a_class() -> None:
    """Let VERL ask whether a model is wrapped by Megatron's FSDP, which this engine refuses.

    VERL passes ``FullyShardedDataParallel`` to `isinstance`, and Megatron-Core 0.20 has made a
    function of it. VERL has read the name before this package is imported, and reads it again.
    """
    name = "FullyShardedDataParallel"
    wrapper = getattr(mcore_fsdp_adapter, f"{name}V1", getattr(mcore_fsdp_adapter, name))
    setattr(mcore_fsdp_adapter, name, wrapper)
    (classes, *others) = unwrap_model.__defaults__
    classes = tuple(c if isinstance(c, type) else wrapper for c in classes)
    unwrap_model.__defaults__ = (classes, *others)


class Qwen3VLEngine(MegatronEngineWithLMHead):
    """The engine of a policy or a reference; models that are not of `ARCHITECTURES` get VERL's own.

    If options are not supported, BadInput names each of them.
    """

    theirs: type[Any] = MegatronEngineWithLMHead

    def __new__(cls, model_config: Any, *args: Any, **kwargs: Any) -> Any:
        if model_config.architectures[0] not in ARCHITECTURES:
            return cls.theirs(model_config, *args, **kwargs)
        return super().__new__(cls)

    def __init__(
        self,
        model_config: Any,
        engine_config: Any,
        optimizer_config: Any = None,
        checkpoint_config: Any = None,
    ) -> None:
        check(Configs(model_config, engine_config, optimizer_config, checkpoint_config))
        self.options = ModelOptions.from_config(engine_config.override_mcore_model_config)
        self.architecture = Architecture.from_hf(model_config.local_path)
        self.layout = _layout_of_config(engine_config, self.architecture)
        self.layout.validate(self.architecture, training=not engine_config.forward_only)
        super().__init__(model_config, engine_config, optimizer_config, checkpoint_config)

    def _build_tf_config(self) -> None:
        guard_reads()  # VERL loads checkpoints with Megatron's own reader
        wrap(filesystem_async, "get_write_results_queue", results_queue)
        config = self.engine_config
        self.is_value_model = self.model_config.model_type == "value_model"
        self.share_embeddings_and_output_weights = (
            self.architecture.tie_word_embeddings and not self.is_value_model
        )
        self.param_dtype = self.dtype = PrecisionType.to_dtype(config.dtype)
        self.vanilla_bridge, self.provider, self.peft_cls = True, None, None
        lora, source = as_plain_dict(self.model_config.lora or {}), self.model_config.local_path
        self.lora = lora_run(lora, self.architecture, source, config.seed)
        self.bridge = Bridge(source, self.lora)
        self.tf_config = transformer_config(
            self.architecture,
            spec=self.options.spec,
            **{
                "params_dtype": self.param_dtype,
                **self.layout.config_overrides(),
                "variable_seq_lengths": True,  # each micro-batch has its own length
                "moe_enable_routing_replay": self.enable_routing_replay,
                **mapping_string_to_attn_backend(as_plain_dict(config.override_transformer_config)),
            },
        )

    def _build_megatron_module(self) -> Any:
        # VERL seeds the model-parallel random states only if it sees a device.
        tensor_parallel.model_parallel_cuda_manual_seed(self.engine_config.seed)
        if self.lora is None:
            freezing = Freezing(self.options.freeze, self.options.trainable)
        elif self.options.freeze or self.options.trainable:
            raise BadInput(
                f"megatron.{OWN} freezes parts of the model, and model.lora freezes all of it: "
                "leave one of them out."
            )
        else:
            freezing = adapter_freezing()
        modules = get_model(
            lambda **stage: self._build_chunk(freezing, **stage),
            wrap_with_ddp=not self.engine_config.forward_only,
            use_distributed_optimizer=self.engine_config.use_distributed_optimizer,
            transformer_config=self.tf_config,
            override_ddp_config=self._resolve_override_ddp_config(),
        )
        freezing.check()
        return modules

    def _build_chunk(
        self,
        freezing: Freezing,
        pre_process: bool = True,
        post_process: bool = True,
        vp_stage: int | None = None,
        **_: Any,
    ) -> PolicyModel:
        """Build one pipeline chunk, load its weights, and freeze what does not train."""
        value_model = ValueModel.with_labels(ONE_SCORE, self.engine_config.seed)
        model: PolicyModel = (value_model if self.is_value_model else PolicyModel)(
            self.tf_config,
            self.architecture,
            spec=self.options.spec,
            recompute_vision=self.options.recompute_vision,
            head_chunk=self.options.head_chunk,
            pre_process=pre_process,
            post_process=post_process,
            vp_stage=vp_stage,
        )
        self.bridge.load_weights([model], self.model_config.local_path)
        if self.lora is not None:
            self.lora.adapt(model, freezing)
        freezing.apply(model)
        return model

    def _build_optimizer(self) -> Any:
        optimizer = super()._build_optimizer()
        if make_resumable(optimizer):
            contents = getattr(self.checkpoint_config, "save_contents", None)
            if contents is None or "optimizer" in contents:
                _require_reshardable(self.engine_config)
        keep_own_parts(optimizer)
        self.bridge.optimizer = optimizer
        return optimizer

    def forward_step(self, batch_iter: Iterator[Any], model: Any, *args: Any, **kwargs: Any) -> Any:
        """Run VERL's step; first tell the model whether entropies are wanted: VERL does not."""
        batch = next(batch_iter)
        unwrap_model(model).wants_entropy = tensordict_utils.get_non_tensor_data(
            batch, key="calculate_entropy", default=False
        )
        return super().forward_step(iter([batch]), model, *args, **kwargs)

    def disable_adapter(self) -> AbstractContextManager[None]:
        """Switch the adapter off: the base model is the reference (VERL's ``no_lora_adapter``).

        It raises BadInput if there is no adapter.
        """
        adapters = [chunk.adapter for chunk in unwrap(self.module)]
        if None in adapters:
            raise BadInput(
                "The reference is configured as the base model of an adapter, but there is no "
                "adapter: set model.lora.rank."
            )
        return without_factors(adapters)

    def get_per_tensor_param_shard(self, **kwargs: Any) -> NoReturn:
        raise BadInput(
            "rollout.checkpoint_engine.backend delta_sharded needs Megatron-Bridge's description "
            "of every parameter: use naive, nccl or another backend that takes whole tensors."
        )


class Qwen3VLValueEngine(Qwen3VLEngine):
    """The engine of a critic: a :class:`Qwen3VLEngine` whose head has one value."""

    theirs = MegatronEngineWithValueHead
    forward_step = MegatronEngineWithValueHead.forward_step
    prepare_model_outputs = MegatronEngineWithValueHead.prepare_model_outputs


class Bridge:
    """The three methods by which VERL loads, exports and saves the weights of a policy or a critic.

    If the model has an adapter, the trained weights are saved, and merged weights are exported.
    With the weights are saved the config, tokenizer and processor of `source`, the Hugging Face
    checkpoint that VERL's ``model.path`` names.
    """

    def __init__(self, source: str | Path, lora: LoraRun | None = None) -> None:
        self._source, self._lora = Path(source), lora
        self.optimizer: Any = None

    def load_weights(self, models: Sequence[nn.Module], path: str | Path, **_: Any) -> None:
        """Fill the chunks of this rank, and the optimizer's float32 copies if there are any.

        The source is a checkpoint of either kind, or an adapter that :meth:`save_weights` wrote. A
        critic that starts from a language model keeps its own head.
        """
        place = identify(path)
        if place.kind is Kind.ADAPTER:
            adapter = read_adapter(path, self._source)
            load_factors(models, adapter.factors)
            load_saved(unwrap(models), whole_tensors(adapter))
        else:
            load_weights(models, place, spare_value_head=True)
        if self.optimizer is not None:  # VERL does not reload; the next step would undo the loading
            self.optimizer.reload_model_params()

    def export_weights(self, models: Sequence[nn.Module]) -> Iterator[tuple[str, Tensor]]:
        """Yield names and tensors for a rollout, as :func:`export_hf`; every rank exhausts it."""
        # Experts are always in the layout that vLLM reads.
        if self._lora is None:
            return export_hf(models, expert_layout="published")
        return export_merged(models, self._lora.targets, expert_layout="published")

    def save_weights(self, models: Sequence[nn.Module], path: str | Path) -> None:
        """Write a Hugging Face checkpoint or an adapter into `path`, where VERL has written files.

        They are replaced, the config too: VERL writes the config in the form of the installed
        transformers, which may declare the other expert layout.
        """
        beside = Path(f"{path}.weights")
        if self._lora is None:
            save_hf(models, beside, hf_config=self._source, force=True)
        else:
            self._lora.export(models, beside)

        def move() -> None:  # the first rank's work; the others wait, and fail with it
            if dist.get_rank() == 0:
                Path(path).mkdir(parents=True, exist_ok=True)
                for file in beside.iterdir():
                    file.replace(Path(path) / file.name)
                shutil.rmtree(beside)

        run_together(move, path)


def _layout_of_config(config: Any, architecture: Architecture) -> Layout:
    """Return the layout of VERL's parallel sizes; DP follows from the number of ranks."""
    overrides = config.override_transformer_config
    return replace(
        Layout.from_flags(config, dist.get_world_size(), moe=architecture.is_moe),
        first=overrides.get("num_layers_in_first_pipeline_stage"),
        last=overrides.get("num_layers_in_last_pipeline_stage"),
    )


def _require_reshardable(config: Any) -> None:
    """Raise BadInput if Megatron would save the state of torch's Adam in a form that it cannot."""
    if config.use_distributed_optimizer and not config.dist_ckpt_optim_fully_reshardable:
        raise BadInput(
            "The optimizer is torch's Adam (neither Transformer Engine's nor Apex's is installed), "
            "whose state Megatron saves only as fully reshardable: set "
            "megatron.dist_ckpt_optim_fully_reshardable=True, or leave optimizer out of "
            "checkpoint.save_contents."
        )
