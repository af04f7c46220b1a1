"""VERL's Megatron engine with this model inside, in a form that VERL can call.

Three steps of building are ours: the config, the model, and making the optimizer resumable. So is
the bridge between Megatron's weights and Hugging Face's. The rest is VERL's: loss, schedule,
log-probabilities, checkpoints, offloading and router replay. VERL passes padded rows and no
position ids, which :class:`PolicyModel` and :class:`ValueModel` turn into what the model takes.
"""

from __future__ import annotations

import logging
import shutil
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from megatron.core import tensor_parallel
from megatron.core.dist_checkpointing.strategies import filesystem_async
from megatron.core.distributed.fsdp import mcore_fsdp_adapter
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.tensor_parallel.mappings import gather_from_sequence_parallel_region
from megatron.core.transformer.transformer_config import TransformerConfig
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
from mcore_qwen3vl.converters.identify import PathKind, identify
from mcore_qwen3vl.converters.live import load_factors, load_weights, unwrap
from mcore_qwen3vl.converters.storage.dtypes import dtype_name
from mcore_qwen3vl.converters.torch_pickle import guard_reads
from mcore_qwen3vl.data.encoding.batch import mrope_position_ids
from mcore_qwen3vl.errors import BadInput
from mcore_qwen3vl.labels import ONE_SCORE
from mcore_qwen3vl.layout import Layout
from mcore_qwen3vl.model.freeze import Freezing
from mcore_qwen3vl.model.head import Head, ScoreHead
from mcore_qwen3vl.model.inputs import visual_inputs
from mcore_qwen3vl.model.log_probs import token_log_probs
from mcore_qwen3vl.model.lora import adapter_freezing, load_saved, whole_tensors
from mcore_qwen3vl.model.lora_modules import without_factors
from mcore_qwen3vl.model.qwen3vl import Qwen3VLModel, TaskModel
from mcore_qwen3vl.model.transformer_config import transformer_config
from mcore_qwen3vl.runtime import cpu
from mcore_qwen3vl.training.hooks import results_queue, wrap
from mcore_qwen3vl.training.logs.summary import rounded_weights
from mcore_qwen3vl.training.lora import LoraRun
from mcore_qwen3vl.training.optimizer_state import keep_own_parts, make_resumable
from mcore_qwen3vl.verl.options import OWN, Configs, ModelOptions, as_plain_dict, check, lora_run

log = logging.getLogger(__name__)

ARCHITECTURES = {family.model_class for family in MODEL_TYPES.values() if family.has_vision}
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
        self._name_rounded_weights()

    def _name_rounded_weights(self) -> None:
        """Log on the first rank which weights this run rounds: VERL's default is bfloat16."""
        held = dtype_name(PrecisionType.to_dtype(self.engine_config.dtype))
        path = Path(self.model_config.local_path)
        trains_adapter = as_plain_dict(self.model_config.lora or {}).get("rank")
        if dist.get_rank() != 0 or held == "float32" or trains_adapter:
            return
        if said := rounded_weights(path, held, path):
            log.warning("rounded: %s", said)

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
        if place.kind is PathKind.ADAPTER:
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


@dataclass
class Likelihood:
    """The output that VERL's fused forward reads: (1, T / cp) float32 values of each position."""

    log_probs: Tensor  # of the labels
    entropy: Tensor | None  # None: it was not asked for


class PolicyModel(Qwen3VLModel):
    """A model for VERL's ``gptmodel_forward_model_engine`` and the fused variant of it."""

    wants_entropy = True
    """Whether the next fused forward pass returns entropies; VERL's own call does not say."""

    def forward(  # type: ignore[override]
        self,
        input_ids: Tensor,
        attention_mask: Tensor,
        position_ids: Tensor | None = None,
        packed_seq_params: PackedSeqParams | None = None,
        *,
        pixel_values: Tensor | None = None,
        image_grid_thw: Tensor | None = None,
        pixel_values_videos: Tensor | None = None,
        video_grid_thw: Tensor | None = None,
        labels: Tensor | None = None,
        output_processor: Any = None,
        output_processor_context: Any = None,
        **kwargs: Any,
    ) -> Any:
        """Run one micro-batch of B samples of at most S tokens, the same on every rank.

        Args:
            input_ids: (B, S), padded on the right.
            attention_mask: (B, S) bool, True for tokens.
            position_ids: ignored; three-axis ids are computed from `input_ids` and the grids.
            packed_seq_params: the bounds of each sample, with its padding, in a pack of T tokens;
                None: no packing.
            pixel_values, image_grid_thw: pixels and grids of all images, in the order of the
                samples.
            pixel_values_videos, video_grid_thw: pixels and grids of all videos.
            labels: (1, T / cp), this CP rank's next tokens; used with `output_processor`.
            output_processor: VERL's fused kernel, whose presence asks for log-probabilities instead
                of logits. The chunked head computes them, and the kernel is not called.
            output_processor_context: an object with the `temperature`.

        Returns:
            Hidden states before the last stage; on the last, logits (1, T / cp, V / tp), or
            (B, S / cp, V / tp) without packing, or a :class:`Likelihood`.

        Raises:
            BadInput: pixels, grids and placeholders do not fit together.
        """
        device = input_ids.device
        ids, valid = input_ids.cpu(), attention_mask.cpu()
        bounds = None
        if packed_seq_params is not None:
            bounds = packed_seq_params.cu_seqlens_q_padded.cpu()
            ids, valid = pack(ids, valid, bounds)
        images = None if image_grid_thw is None else image_grid_thw.cpu()
        videos = None if video_grid_thw is None else video_grid_thw.cpu()
        positions, _ = mrope_position_ids(self.architecture, ids, images, videos, valid, bounds)
        visual = visual_inputs(
            self.architecture, ids, pixel_values, images, pixel_values_videos, videos
        )
        if output_processor is not None:
            kwargs |= {
                "output_processor": self._likelihood_processor(labels),
                "output_processor_context": output_processor_context,
            }
        return super().forward(
            ids.to(device),
            positions.to(device),
            valid.to(device),
            visual=visual and visual.to(device),
            packed_seq_params=packed_seq_params,
            **kwargs,
        )

    def _likelihood_processor(self, labels: Tensor | None) -> Any:
        """Return the ``output_processor`` that computes a :class:`Likelihood` on the last stage."""
        if not self.losses_in_chunks:
            raise BadInput(
                "use_fused_kernels computes log-probabilities in chunks of logits, which "
                "head_chunk=0 and defer_embedding_wgrad_compute turn off: drop those, or set "
                "use_fused_kernels=False."
            )

        def process(
            *, hidden_states: Tensor, output_layer: Head, output_weight: Any, context: Any, **_: Any
        ) -> Likelihood:
            assert labels is not None  # VERL passes them to all stages
            reduce = partial(
                token_log_probs,
                targets=labels,
                temperature=context.temperature,
                entropy=self.wants_entropy,
            )
            return Likelihood(*output_layer(hidden_states, output_weight, reduce=reduce))

        return process


class ValueModel(PolicyModel, TaskModel):
    """A critic, which returns one value a token instead of logits."""

    head_labels = ONE_SCORE

    def build_head(self, like: Tensor) -> nn.Module:
        return ValueHead(self.config, self.seed, group=self.pg_collection.tp, like=like)


class ValueHead(ScoreHead):
    """A head with one label for the states of all tokens. Source: Megatron-Bridge's, VERL's own."""

    def __init__(self, config: TransformerConfig, seed: int, *, group: Any, like: Tensor) -> None:
        super().__init__(config, 1, seed, like=like)
        self._group, self._sequence_parallel = group, config.sequence_parallel
        self.weight.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]

    def forward(  # type: ignore[override]
        self, input_: Tensor, weight: None = None, runtime_gather_output: bool | None = None
    ) -> tuple[Tensor, None]:
        """Map (s_local, B, H) to values (s, B, 1) float32; the second output, a bias, is None."""
        values = nn.functional.linear(input_, self.weight).float()
        if self._sequence_parallel:
            values = gather_from_sequence_parallel_region(
                values, tensor_parallel_output_grad=False, group=self._group
            )
        return values, None


def pack(ids: Tensor, valid: Tensor, bounds: Tensor) -> tuple[Tensor, Tensor]:
    """Pack padded rows (B, S) into one: ids (1, T), 0 at padding, and a mask, True for tokens.

    Args:
        valid: (B, S) bool, True for tokens, which come first in their row.
        bounds: (B + 1,) starts of the samples in the pack, then the pack's length T.
    """
    packed = ids.new_zeros(1, int(bounds[-1]))
    tokens = torch.zeros_like(packed, dtype=torch.bool)
    for row, length, start in zip(ids, valid.sum(1).tolist(), bounds.tolist(), strict=False):
        packed[0, start : start + length] = row[:length]
        tokens[0, start : start + length] = True
    return packed, tokens


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
