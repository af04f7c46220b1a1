"""The parameters that an adapter adapts: the usual targets, and PEFT's own answer for a config."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Literal, NamedTuple, get_args

from mcore_qwen3vl.config import Architecture
from mcore_qwen3vl.converters.adapters.config import AdapterConfig
from mcore_qwen3vl.errors import BadInput

if TYPE_CHECKING:
    from mcore_qwen3vl.converters.adapters.peft_model import Applied, HFConfig, Slot

Preset = Literal["language", "language-aligner", "all"]
"""``language``: attention and MLPs (or experts) of the decoder; ``language-aligner``: also the
mergers between vision and language; ``all``: also the blocks of the vision tower."""

# Every name is long enough to match the same modules under any PEFT: ``proj`` would match the patch
# embedding too, and ``linear_fc1`` both the blocks of the vision tower and its mergers.
ATTENTION = ("q_proj", "k_proj", "v_proj", "o_proj")
MLP = ("gate_proj", "up_proj", "down_proj")
EXPERTS = ("mlp.experts.gate_up_proj", "mlp.experts.down_proj")
ROUTER = "mlp.gate.weight"
MERGERS = ("merger.linear_fc1", "merger.linear_fc2")
VISION = ("attn.qkv", "attn.proj", "mlp.linear_fc1", "mlp.linear_fc2")


class Targets(NamedTuple):
    """``target_modules`` and ``target_parameters`` of a PEFT config."""

    modules: tuple[str, ...]
    parameters: tuple[str, ...] | None


def preset(name: str, architecture: Architecture) -> Targets:
    """Return PEFT's names for a preset.

    Parts that the model lacks are not named, since a target that matches nothing is an error.
    """
    if name not in get_args(Preset):
        raise BadInput(f"{name!r} is not one of {', '.join(get_args(Preset))}.")
    modules = [*ATTENTION]
    if not all(architecture.moe_layers):
        modules += MLP
    if name != "language":
        modules += MERGERS
        count = len(architecture.vision.deepstack_visual_indexes)
        modules += [
            f"deepstack_merger_list.{at}.{linear}"
            for at in range(count)
            for linear in ("linear_fc1", "linear_fc2")
        ]
    if name == "all":
        modules += VISION
    return Targets(tuple(modules), EXPERTS if architecture.is_moe else None)


def resolve_targets(config: AdapterConfig, hf_config: HFConfig) -> dict[str, Slot]:
    """Return the parameters that `config` adapts, by full Hugging Face name, in the model's order.

    Raises:
        BadInput: a name matches nothing, or something that PEFT would skip; LoRA on a match is not
            supported (embeddings, the patch embedding, norms); or PEFT refuses the config.
    """
    config.require_supported()
    # Imports torch, without which `train` answers a typo.
    from mcore_qwen3vl.converters.adapters.peft_model import apply

    applied = apply(config, hf_config)
    for problem in unused_names(config, applied):
        raise BadInput(problem)
    return applied.slots


def unused_names(config: AdapterConfig, applied: Applied) -> Iterator[str]:
    """Yield a sentence for each name in the config without effect; PEFT warns of some at most."""
    adapted = [slot.module for slot in applied.slots.values()]
    for module in applied.matched:
        if module not in adapted:
            yield (
                f"target_modules match {module}, which PEFT skips: it is not a linear layer. Fused "
                "experts and the router are named in target_parameters."
            )
    if isinstance(config.target_modules, tuple):
        yield from _unmatched("target_modules", config.target_modules, adapted, applied)
    parameters = list(applied.slots)
    yield from _unmatched("target_parameters", config.target_parameters or (), parameters, applied)
    for name, pattern in (("rank", config.rank_pattern), ("alpha", config.alpha_pattern)):
        for key in pattern or ():
            # Same rule as peft.utils.other.get_pattern_key; a parameter is matched by its own name.
            rule = re.compile(rf"(.*\.)?({key})$")
            if not any(rule.match(each) for each in (*adapted, *parameters)):
                yield (
                    f"{name}_pattern has the key {key!r}, which matches no adapted module or "
                    "parameter."
                )
    if isinstance(config.exclude_modules, tuple):
        for name in config.exclude_modules:
            if not _ends(name, applied.modules):
                yield f"exclude_modules names {name!r}, which is not a module of the model."
    layers = config.layers_to_transform
    for layer in (layers,) if isinstance(layers, int) else layers or ():
        if not any(re.search(rf"\.{layer}\.", module) for module in adapted):
            yield (
                f"layers_to_transform names layer {layer}, but no target matches a module in that "
                "layer."
            )
    for name in config.modules_to_save or ():
        # Same rule as peft.utils.other._set_trainable: any end of the name, without a dot.
        if not any(module.endswith(name) for module in applied.modules):
            yield f"modules_to_save names {name!r}, which is not a module of the model."


def _unmatched(
    field: str, names: Iterable[str], adapted: list[str], applied: Applied
) -> Iterator[str]:
    for name in names:
        if _ends(name, adapted):
            continue
        where = ""
        if field == "target_modules" and _ends(name, applied.parameters):
            where = " It is a parameter: name it in target_parameters."
        elif field == "target_parameters" and _ends(name, applied.modules):
            where = " It is a module: name it in target_modules, or add .weight."
        yield f"{field} names {name!r}, which matches nothing that PEFT can adapt.{where}"


def _ends(name: str, names: Iterable[str]) -> bool:
    """Return whether `name` is one of `names` or the end of one after a dot, as in PEFT's lists."""
    return any(each == name or each.endswith(f".{name}") for each in names)
