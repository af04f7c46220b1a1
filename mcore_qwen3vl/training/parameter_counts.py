"""Numbers of parameters: what a rank of a pipeline stage holds, and what a LoRA run trains."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping
from math import prod
from pathlib import Path

from mcore_qwen3vl.config import Architecture
from mcore_qwen3vl.converters.adapters.config import Slot, apply_with_peft, resolve_targets
from mcore_qwen3vl.converters.mapping import parameters
from mcore_qwen3vl.converters.mapping.forms import INPUT_EMBEDDING, LM_HEAD
from mcore_qwen3vl.converters.mapping.parameters import Group
from mcore_qwen3vl.converters.storage.boxes import Shape
from mcore_qwen3vl.layout import Layout
from mcore_qwen3vl.training.arguments.settings import Settings

TrainedCounts = Counter[Group]
"""Number of parameters that a LoRA run trains, in each group."""


def trained_of(settings: Settings, a: Architecture, model: Path) -> TrainedCounts | None:
    """Count the parameters that a LoRA run trains; None for a run without LoRA."""
    if not settings.lora.trains_adapter:
        return None
    config = settings.lora.adapter_config(a, settings.loss.scored_by)
    targets, saved = resolve_targets(config, model), apply_with_peft(config, model).saved
    return trained_parameters(targets, saved, tied=a.tie_word_embeddings)


def stage_layers(a: Architecture, layout: Layout) -> list[list[int]]:
    """Return the decoder layers of each pipeline rank, all its VPP chunks together."""
    virtual_stages = layout.virtual_stages(a.num_hidden_layers)
    return [
        [n for layers in virtual_stages[rank :: layout.pp] for n in layers]
        for rank in range(layout.pp)
    ]


def rank_parameters(
    a: Architecture, layout: Layout, stage: int, counts: TrainedCounts | None = None
) -> tuple[float, float]:
    """Count the parameters, of `counts` or of the model, that a rank of a stage holds.

    It returns the number outside the experts, and the number in them.
    """
    layers = stage_layers(a, layout)[stage]
    shared = experts = 0.0
    for group, count in (parameters.count(a) if counts is None else counts).items():
        if group.layer not in layers and not _is_on_stage_outside_layers(group, a, layout, stage):
            continue
        if group.kind == "experts":
            experts += count / (layout.ep * layout.etp)
        else:
            shared += count / (layout.tp if group.divided else 1)
    return shared, experts


def _is_on_stage_outside_layers(group: Group, a: Architecture, layout: Layout, stage: int) -> bool:
    """Return whether the group is outside the decoder layers and on this pipeline stage."""
    first, last = stage == 0, stage == layout.pp - 1
    if group.layer is not None:
        return False
    if group.kind == "vision":
        return first
    if group.kind == "embedding":  # a tied head on another stage is a copy of it
        return first or (last and a.tie_word_embeddings)
    return last  # the final norm and the output layer


def trained_parameters(
    targets: Mapping[str, Slot], saved: Mapping[str, Shape], *, tied: bool
) -> Counter[Group]:
    """Count the trained values, in LoRA factors and in modules trained whole.

    The groups are those of ``mapping.parameters.count``. Factors are counted as if TP did not
    divide them, which is slightly too many. A head that is `tied` to the embedding counts once.
    """
    counts: Counter[Group] = Counter()
    for name, slot in targets.items():
        counts[_group_of_tensor(name)] += prod(slot.a_shape) + prod(slot.b_shape)
    for name, shape in saved.items():
        if not (tied and name == LM_HEAD and INPUT_EMBEDDING in saved):
            counts[_group_of_tensor(name)] += prod(shape)
    return counts


def _group_of_tensor(name: str) -> Group:
    """Return the group of a Hugging Face tensor, by its name."""
    if name.startswith("model.visual."):
        return Group("vision", None, False)
    if name.startswith(("lm_head.", "score.")):
        return Group("output layer", None, False)
    layer = re.match(r"model\.language_model\.layers\.(\d+)\.", name)
    if layer is None:
        return Group("embedding" if "embed_tokens" in name else "norms", None, False)
    experts = ".mlp.experts." in name
    return Group("experts" if experts else "mlp", int(layer[1]), experts)
