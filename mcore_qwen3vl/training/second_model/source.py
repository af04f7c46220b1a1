"""Where the second model of a run comes from, and the shape that it has."""

from __future__ import annotations

import argparse
from dataclasses import replace
from typing import NamedTuple

from mcore_qwen3vl.config import Architecture
from mcore_qwen3vl.converters.hf.hub import resolve
from mcore_qwen3vl.converters.mcore.paths import config_folder
from mcore_qwen3vl.layout import Layout
from mcore_qwen3vl.training.preference.flags import KTO, LOSSES, reference_of


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

    Args:
        trained: the shape of the model that trains. The weights that training starts from have it,
            so no config is read beside them.

    Raises:
        BadInput: the second model's config cannot be read.
    """
    source = source_of(args)
    if source is None:
        return None
    if source.path in (args.load_hf, args.pretrained_checkpoint, args.hf_model):
        return trained
    return Architecture.from_hf(config_folder(resolve(source.path, weights=False)))


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
