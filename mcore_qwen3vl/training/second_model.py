"""A second, frozen model: where it comes from, its shape, and its chunks.

The estimate of memory and rehearsals ask for source and shape, so this imports no torch until a
model is built.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

from mcore_qwen3vl.config import Architecture
from mcore_qwen3vl.converters.hf.hub import resolve
from mcore_qwen3vl.converters.place import identify
from mcore_qwen3vl.errors import BadInput
from mcore_qwen3vl.layout import Layout
from mcore_qwen3vl.megatron_config import architecture_arguments, recommended_arguments
from mcore_qwen3vl.training.arguments.command_line import OWN_SPLIT
from mcore_qwen3vl.training.arguments.losses import KTO, LOSSES, reference_of

_SAME_BATCHES = ("vocab_size", "image_token_id", "video_token_id")
_SAME_PATCHES = (
    *("in_channels", "patch_size", "temporal_patch_size", "spatial_merge_size"),
    "num_position_embeddings",
)


class Source(NamedTuple):
    """The flag that names the second model, and its checkpoint of either kind."""

    flag: str
    path: str


def source_of(args: argparse.Namespace) -> Source | None:
    """Return the source of the second model; None if the run has no such model."""
    if args.teacher:
        return Source("--teacher", args.teacher)
    if args.loss in (*LOSSES, KTO) and reference_of(args) == "model":
        # A rehearsal starts from no weights.
        return Source("--reference-model", args.reference_model or args.hf_model)
    return None


def architecture_of(args: argparse.Namespace, trained: Architecture) -> Architecture | None:
    """Return the second model's shape; None if the run has no such model.

    The weights that training starts from have the shape `trained`, so no config is read beside
    them.
    """
    if source_of(args) is None:
        return None
    folder = folder_of(args)
    return trained if folder is None else Architecture.from_hf(folder)


def folder_of(args: argparse.Namespace) -> Path | None:
    """Return the folder of the second model's own config; None if it has the trained model's."""
    source = source_of(args)
    if source is None or source.path in (args.load_hf, args.pretrained_checkpoint, args.hf_model):
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

    Raises:
        BadInput: the two models cannot read the same batches, or the layout does not divide the
            second one.
    """

    def __init__(
        self,
        args: argparse.Namespace,
        trained: Architecture,
        source: Source,
        architecture: Architecture,
    ) -> None:
        self._source, self._architecture = source, architecture
        if architecture is not trained:
            _check_inputs(args, trained, source, architecture)
            _check_layout(args, trained, source, architecture)
        self._args = _arguments(args, trained, architecture)
        self._chunks: list[Any] = []

    @classmethod
    def of(cls, args: argparse.Namespace, trained: Architecture) -> SecondModel | None:
        """Return the second model that the flags name, or None; the arguments are the class's."""
        source, architecture = source_of(args), architecture_of(args, trained)
        if source is None or architecture is None:
            return None
        return cls(args, trained, source, architecture)

    def build(self, model_provider: Callable[..., Any]) -> None:
        """Build this rank's chunks and fill them; all ranks call this once the groups exist.

        A second call changes nothing.

        `model_provider` is that of :mod:`mcore_qwen3vl.training.model`, which imports this module.
        """
        if self._chunks:
            return
        from megatron.core.utils import unwrap_model
        from megatron.training.training import get_model

        provider = model_provider(self._args, self._architecture)
        self._chunks = get_model(provider, wrap_with_ddp=False)
        start_from(unwrap_model(self._chunks), self._source.path)
        for chunk in self._chunks:
            chunk.eval().requires_grad_(False)

    @contextmanager
    def in_place(self, model: Any) -> Iterator[list[Any]]:
        """Give a forward pass this model's chunks in the place of `model`, without gradients."""
        import torch

        with torch.no_grad():
            yield self._chunks


def start_from(chunks: list[Any], source: str | Path) -> None:
    """Give chunks of this rank the weights of a checkpoint of either kind, or of a hub id.

    A value head that a Hugging Face checkpoint lacks stays as it is.
    """
    from mcore_qwen3vl.converters.live.load import load_weights  # imports torch

    load_weights(chunks, identify(source), spare_value_head=bool(chunks[0].head_labels))


def _arguments(
    args: argparse.Namespace, trained: Architecture, second: Architecture
) -> argparse.Namespace:
    """Return the arguments for building the second model, which nothing but its shape changes."""
    other = {
        # A dense model's arguments say nothing about a router.
        **(recommended_arguments(second) if second.is_moe and not trained.is_moe else {}),
        "moe_layer_freq": 1,
        "moe_ffn_hidden_size": None,
        "moe_grouped_gemm": any(second.moe_layers),
        **architecture_arguments(second),
        **({} if second.is_moe else {"expert_model_parallel_size": 1}),
        "load": None,
        "load_hf": None,
        "freeze": [],
        "trainable": [],
        "perform_initialization": False,  # every value is read
    }
    if second.num_hidden_layers != trained.num_hidden_layers:
        counts = (f"decoder_{end}_pipeline_num_layers" for end in ("first", "last"))
        other |= dict.fromkeys((*counts, "pipeline_model_parallel_layout", *OWN_SPLIT))
    return argparse.Namespace(**vars(args) | other)


def _check_layout(
    args: argparse.Namespace, trained: Architecture, source: Source, second: Architecture
) -> None:
    """Refuse a second model that cannot be divided over the ranks as the one that trains is."""
    layout = Layout.from_flags(args, args.world_size, moe=second.is_moe)
    layout = layout_for(layout, trained, second)
    if second.num_hidden_layers == trained.num_hidden_layers:  # divided as they are
        layout = replace(layout, pp=1, vpp=1, first=None, last=None, split=None)
    try:
        layout.validate(second, training=False)
    except BadInput as error:
        raise BadInput(f"{source.flag} {source.path}: {error}") from None


def _check_inputs(
    args: argparse.Namespace, trained: Architecture, source: Source, second: Architecture
) -> None:
    """Refuse a second model that needs other tokens, patches or positions in its batches."""
    from mcore_qwen3vl.data.processor import load_processor
    from mcore_qwen3vl.data.scores import vocabulary_of

    name = f"{source.flag} {source.path}"
    for ours, theirs, fields in (
        (trained, second, _SAME_BATCHES),
        (trained.vision, second.vision, _SAME_PATCHES),
    ):
        for field in fields:
            if getattr(ours, field) != getattr(theirs, field):
                raise BadInput(
                    f"{name} has {field} {getattr(theirs, field)}, and --hf-model has "
                    f"{getattr(ours, field)}: both read the same batches, so these must be equal."
                )
    own = identify(resolve(source.path, weights=False)).config()
    vocabularies = [
        vocabulary_of(load_processor(folder).tokenizer, trained.vocab_size)
        for folder in (own, args.hf_model)
    ]
    if vocabularies[0] != vocabularies[1]:
        raise BadInput(
            f"{name} has another vocabulary than --hf-model: it must have the tokenizer of the "
            "model that trains."
        )
