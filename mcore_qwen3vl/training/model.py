"""The model provider, which builds a pipeline chunk from Megatron's flags and the HF config."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import Any

from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.training.argument_utils import core_transformer_config_from_args
from megatron.training.checkpointing import checkpoint_exists

from mcore_qwen3vl.config import Architecture
from mcore_qwen3vl.errors import BadInput
from mcore_qwen3vl.model import pointwise
from mcore_qwen3vl.model.flops import Trained
from mcore_qwen3vl.model.freeze import Freezing
from mcore_qwen3vl.model.lora import adapter_freezing
from mcore_qwen3vl.model.qwen3vl import Qwen3VLModel, TaskModel
from mcore_qwen3vl.training.arguments.settings import Settings
from mcore_qwen3vl.training.checkpoints.other_maker import OtherMaker
from mcore_qwen3vl.training.lora import LoraRun
from mcore_qwen3vl.training.second_model import start_from


@dataclass
class _Fields(TransformerConfig):
    """The flags' values, before the config derives one field from another."""

    def __post_init__(self) -> None: ...


def fields_from_flags(args: argparse.Namespace) -> dict[str, Any]:
    """Return the ``TransformerConfig`` fields that Megatron's arguments set."""
    flag_values = core_transformer_config_from_args(args, _Fields)
    return {field.name: getattr(flag_values, field.name) for field in fields(TransformerConfig)}


def model_provider(
    settings: Settings,
    architecture: Architecture,
    args: argparse.Namespace,
    lora: LoraRun | None = None,
    on_trained: Callable[[Trained], None] = lambda trained: None,
    other: OtherMaker | None = None,
    every_stage_is_here: bool = True,
    **config_overrides: Any,
) -> Callable[..., Qwen3VLModel]:
    """Return the model provider for ``megatron.training.pretrain``.

    Args:
        args: Megatron's arguments; they make the ``TransformerConfig``.
        lora: the LoRA run, if an adapter trains instead of the model's own weights.
        on_trained: called with how much trains, once the last chunk of a rank is built.
        other: the checkpoint of another maker to start from, if any.
        every_stage_is_here: see :meth:`.Freezing.check`.
        config_overrides: ``TransformerConfig`` fields that no flag sets.

    Returns:
        A function that builds one pipeline chunk, reads into it ``--load-hf``, `other` or the base
        of a LoRA run, and freezes what the flags say.
    """
    training, load_hf = settings.training, settings.model.load_hf
    loop, compute = settings.loop, settings.compute
    fields_of_all = {**fields_from_flags(args), **config_overrides}
    fields_of_all["mtp_num_layers"] = loop.mtp_num_layers
    if settings.rows_differ:
        # Otherwise stages would transfer --seq-length tokens of --micro-batch-size rows, whatever
        # the batch's shape.
        fields_of_all["variable_seq_lengths"] = True
    elif loop.eval_iters:
        # Validations are not packed. Megatron's schedules ask for variable lengths when they begin
        # (`Run._evaluate`), but HybridEP when the model is built.
        fields_of_all["moe_hybridep_pad_uneven_dispatch_inputs"] = True
    if training.compile_pointwise:
        pointwise.compile_pointwise()
    labels = settings.labels
    kind = Qwen3VLModel if labels is None else TaskModel.with_labels(labels, loop.seed)
    freezing = adapter_freezing() if lora else Freezing(training.freeze, training.trainable)

    def build_chunk(
        pre_process: bool = True,
        post_process: bool = True,
        vp_stage: int | None = None,
        config: TransformerConfig | None = None,
        pg_collection: Any = None,
    ) -> Qwen3VLModel:
        model = kind.from_hf_config(
            architecture,
            spec=compute.layer_spec,
            pre_process=pre_process,
            post_process=post_process,
            vp_stage=vp_stage,
            pg_collection=pg_collection,
            vocab_size=compute.padded_vocab_size,
            recompute_vision=training.recompute_vision,
            keep_activations=bool(training.keep_activations),
            head_chunk=training.head_chunk,
            **fields_of_all,
        )
        if lora:
            lora.base.load(model)
            lora.adapt(model, freezing)
        elif other:
            start_from([model], other.folder)
        elif load_hf and not is_resuming(settings.checkpoints.load):
            start_from([model], load_hf)
        freezing.apply(model)
        stages = settings.parallel.virtual_pipeline_model_parallel_size or 1
        if vp_stage in (None, stages - 1):  # the last chunk of this rank
            on_trained(freezing.check(every_stage_is_here=every_stage_is_here))
            saves = settings.checkpoints.save and not settings.checkpoints.no_save_optim
            if lora is None and freezing.divided and saves:
                # Megatron does not save a tensor of all layers that has gaps.
                raise BadInput(
                    f"{freezing.divided} trains in some layers and not in others, and Megatron "
                    "stores the optimizer's state of all layers as one tensor: freeze alike in all "
                    "layers, or add --no-save-optim, with which a resumed run needs "
                    "--no-load-optim too."
                )
        return model

    return build_chunk


def is_resuming(load: str | None) -> bool:
    """Return whether ``--load`` holds a checkpoint, which takes precedence over ``--load-hf``."""
    return load is not None and checkpoint_exists(load)
