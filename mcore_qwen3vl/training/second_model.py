"""A second, frozen model: where it comes from, its shape, and its chunks.

The estimate of memory and rehearsals ask for source and shape, so this imports no torch until a
model is built.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from operator import attrgetter
from pathlib import Path
from typing import Any

from mcore_qwen3vl.config import Architecture
from mcore_qwen3vl.converters.identify import identify, resolve
from mcore_qwen3vl.errors import BadInput
from mcore_qwen3vl.layout import Layout
from mcore_qwen3vl.losses.loss import FrozenModel
from mcore_qwen3vl.megatron_config import architecture_arguments, recommended_arguments
from mcore_qwen3vl.settings.run import OWN_SPLIT, ParallelSettings
from mcore_qwen3vl.training.arguments.settings import Settings

_READ_FROM_BATCHES = (
    *("vocab_size", "image_token_id", "video_token_id"),
    *("vision.in_channels", "vision.patch_size", "vision.temporal_patch_size"),
    *("vision.spatial_merge_size", "vision.num_position_embeddings"),
)


def source_of(settings: Settings) -> FrozenModel | None:
    """Return the source of the second model; None if the run has no such model."""
    return settings.loss.frozen_model(settings, settings.lora)


def architecture_of(settings: Settings, trained: Architecture) -> Architecture | None:
    """Return the second model's shape; None if the run has no such model."""
    if source_of(settings) is None:
        return None
    folder = folder_of(settings)
    # What training starts from has the shape `trained`: no config is read beside it.
    return trained if folder is None else Architecture.from_hf(folder)


def folder_of(settings: Settings) -> Path | None:
    """Return the folder of the second model's own config; None if it has the trained model's."""
    model, base = settings.model, settings.checkpoints.pretrained_checkpoint
    source = source_of(settings)
    if source is None or source.path in (model.load_hf, base, model.hf_model):
        return None
    return identify(resolve(source.path, weights=False)).config()


def layout_for(layout: Layout, trained: Architecture, second: Architecture) -> Layout:
    """Return the layout of the second model on the ranks of `layout`.

    A dense model has no experts to divide. A split of the pipeline that counts the trained model's
    layers cannot hold for another number of them: each stage then has an equal share.
    """
    if not second.is_moe:
        layout = replace(layout, ep=1, etp=1)
    if second.num_hidden_layers != trained.num_hidden_layers:
        layout = replace(layout, first=None, last=None, split=None)
    return layout


class SecondModel:
    """A frozen model beside the one that trains: on the same ranks, and never saved.

    It raises BadInput if the two cannot read the same batches, or the layout does not divide it.
    """

    def __init__(
        self,
        settings: Settings,
        trained: Architecture,
        source: FrozenModel,
        architecture: Architecture,
    ) -> None:
        self._source, self._architecture = source, architecture
        if architecture is not trained:
            _require_same_inputs(settings, trained, source, architecture)
            _check_layout(settings.parallel, trained, source, architecture)
        self._trained = trained
        # It starts from its own weights, all of them frozen.
        self._settings = replace(
            settings,
            model=replace(settings.model, load_hf=None),
            checkpoints=replace(settings.checkpoints, load=None),
            training=replace(settings.training, freeze=(), trainable=()),
        )
        self.chunks: list[Any] = []
        """After :meth:`build`: this rank's pipeline chunks."""

    @classmethod
    def from_settings(cls, settings: Settings, trained: Architecture) -> SecondModel | None:
        """Return the second model that the flags name, or None; the arguments are the class's."""
        source, second = source_of(settings), architecture_of(settings, trained)
        return cls(settings, trained, source, second) if source and second else None

    def build(
        self,
        model_provider: Callable[..., Any],
        args: argparse.Namespace,
        *,
        reads_weights: bool = True,
    ) -> None:
        """Build this rank's chunks and fill them; all ranks call this once the groups exist.

        A second call changes nothing.

        Args:
            model_provider: the provider of :mod:`mcore_qwen3vl.training.model`. That module imports
                this one, and so cannot be imported here.
            args: Megatron's namespace of the run.
            reads_weights: False: keep the weights as they are initialised.
        """
        if self.chunks:
            return
        from megatron.core.utils import unwrap_model
        from megatron.training.training import get_model

        second_args = _arguments_of_second(args, self._trained, self._architecture)
        provider = model_provider(self._settings, self._architecture, second_args)
        self.chunks = get_model(provider, wrap_with_ddp=False)
        if reads_weights:
            start_from(unwrap_model(self.chunks), self._source.path)
        for chunk in self.chunks:
            chunk.eval().requires_grad_(False)

    @contextmanager
    def in_place_of(self, model: Any) -> Iterator[list[Any]]:
        """Give a forward pass this model's chunks in the place of `model`, without gradients."""
        import torch

        with torch.no_grad():
            yield self.chunks


def start_from(chunks: list[Any], source: str | Path) -> None:
    """Give chunks of this rank the weights of a checkpoint of either kind, or of a hub id.

    A value head that a Hugging Face checkpoint lacks stays as it is.
    """
    from mcore_qwen3vl.converters.live import load_weights  # imports torch

    load_weights(chunks, identify(source), spare_value_head=bool(chunks[0].head_labels))


def _arguments_of_second(
    args: argparse.Namespace, trained: Architecture, second: Architecture
) -> argparse.Namespace:
    """Return Megatron's arguments for building the second model, which has another shape."""
    other = {
        # A dense model's arguments say nothing about a router.
        **(recommended_arguments(second) if second.is_moe and not trained.is_moe else {}),
        # Megatron's defaults of what the trained model may have set; then the second model's.
        "experimental_attention_variant": None,
        "linear_attention_freq": None,
        "attention_output_gate": False,
        "moe_shared_expert_gate": False,
        "moe_layer_freq": 1,
        "moe_ffn_hidden_size": None,
        "moe_grouped_gemm": any(second.moe_layers),
        **architecture_arguments(second),
        **({} if second.is_moe else {"expert_model_parallel_size": 1}),
        "perform_initialization": False,  # every value is read
    }
    if second.num_hidden_layers != trained.num_hidden_layers:
        counts = (f"decoder_{end}_pipeline_num_layers" for end in ("first", "last"))
        other |= dict.fromkeys((*counts, "pipeline_model_parallel_layout", *OWN_SPLIT))
    return argparse.Namespace(**vars(args) | other)


def _check_layout(
    parallel: ParallelSettings, trained: Architecture, source: FrozenModel, second: Architecture
) -> None:
    """Refuse a second model that cannot be divided over the ranks as the trained model is."""
    layout = Layout.from_flags(parallel, parallel.world_size, moe=second.is_moe)
    layout = layout_for(layout, trained, second)
    if second.num_hidden_layers == trained.num_hidden_layers:
        # It has the stages of the trained model, which are checked already.
        layout = replace(layout, pp=1, vpp=1, first=None, last=None, split=None)
    try:
        layout.validate(second, training=False)
    except BadInput as error:
        raise BadInput(f"{source.flag} {source.path}: {error}") from None


def _require_same_inputs(
    settings: Settings, trained: Architecture, source: FrozenModel, second: Architecture
) -> None:
    """Refuse a second model that needs other tokens, patches or positions in its batches."""
    from mcore_qwen3vl.data.processor import load_processor, vocabulary_fingerprint

    name = f"{source.flag} {source.path}"
    for path in _READ_FROM_BATCHES:
        ours, theirs = (attrgetter(path)(architecture) for architecture in (trained, second))
        if ours != theirs:
            raise BadInput(
                f"{name} has {path.rpartition('.')[2]} {theirs}, and --hf-model has {ours}: both "
                "read the same batches, so these must be equal."
            )
    second_folder = identify(resolve(source.path, weights=False)).config()
    theirs, ours = (
        vocabulary_fingerprint(load_processor(folder).tokenizer, trained.vocab_size)
        for folder in (second_folder, settings.model.folder)
    )
    if theirs != ours:
        raise BadInput(
            f"{name} has another vocabulary than --hf-model: it must have the tokenizer of the "
            "model that trains."
        )
