"""Dialects of Megatron checkpoints: how other projects name the same tensors, and pack them.

The table speaks of this project's keys. What others write is a row here. All of them keep
Megatron's own keys for the language model, after a prefix; they differ in the vision tower, which
the table keeps as Hugging Face has it. Each row was compared with checkpoints that the maker's own
converter wrote (``tests/converters/peers``). Whether layers are stacked or have keys of their own
is no matter of the dialect (`megatron_checkpoint.stack_layers`).
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path

from mcore_qwen3vl.config import Architecture, VisionArchitecture
from mcore_qwen3vl.converters.mapping import transforms
from mcore_qwen3vl.converters.mapping.table import (
    EMBEDDING,
    Row,
    extra_state_keys,
    shard,
    vision_rows,
)
from mcore_qwen3vl.errors import BadInput

LANGUAGE = "language_model."
"""Prefix of the language model's keys in every dialect."""

_VISION = "visual."


@dataclass(frozen=True)
class Module:
    """One kind of module of the vision tower.

    Attributes:
        ours: how its keys start in the table, after ``visual.``; ``{}`` is a number, and the
            modules so numbered are stacked on the first axis of the dialect's tensors.
        theirs: how they start in the dialect, after its prefix of the vision tower; with ``{}``,
            the number is a part of the key there, and nothing is stacked.
        by_head: whether the rows of a fused query, key and value are in Megatron's order: the
            query, key and value of the first head, then those of the second, and so on.
    """

    ours: str
    theirs: str
    by_head: bool = False


@dataclass(frozen=True)
class Dialect:
    """The keys that one maker's checkpoints have.

    Attributes:
        key: its name on the command line.
        maker: the projects that write it, for messages.
        tracker: what the tracker says of converted weights: ``release``, or the iteration that the
            maker's own converter writes, if its loader knows no ``release``.
        vision: prefix of the vision tower's keys.
        sign: start of keys that no other dialect has.
        modules: the modules whose keys differ by more than the prefix; the first that fits counts.
        stateful: starts of the modules of the vision tower that have an ``_extra_state``, which are
            Transformer Engine's.
        unwritten: why checkpoints are not written in it; empty if they are.
    """

    key: str
    maker: str
    tracker: str | int
    vision: str
    sign: str
    modules: tuple[Module, ...] = ()
    stateful: tuple[str, ...] = ()
    unwritten: str = ""

    def row(self, row: Row, v: VisionArchitecture) -> Row:
        """Return how the dialect stores what `row`, a row of the table, stores."""
        if row.key.startswith(_VISION):
            return self.vision_row(row, v)
        return replace(row, key=LANGUAGE + row.key)

    def extra_state_keys(self, a: Architecture) -> list[str]:
        """Return the keys of the ``_extra_state`` objects that the maker's strict loading wants."""
        modules: dict[str, None] = {}  # a weight and a bias have one module
        for row in (self.vision_row(row, a.vision) for row in vision_rows(a.vision)):
            place = list(zip(row.offset, row.global_shape, strict=False)) or [(0, 1)]
            if row.key.startswith(tuple(self.vision + start for start in self.stateful)):
                modules[f"{row.key.rpartition('.')[0]}._extra_state/{shard(place)}"] = None
        return [*(LANGUAGE + key for key in extra_state_keys(a)), *modules]

    def vision_row(self, row: Row, v: VisionArchitecture) -> Row:
        """Return how the dialect stores what `row`, a row of the vision tower, stores."""
        name = row.key.removeprefix(_VISION)
        for module in self.modules:
            match = re.match(re.escape(module.ours).replace(r"\{\}", r"(\d+)"), name)
            if match is None:
                continue
            start = self.vision + module.theirs.format(*match.groups())
            row = replace(row, key=start + name[match.end() :])
            if module.by_head:
                how = transforms.fused_qkv(v.num_heads, v.hidden_size // v.num_heads)
                row = replace(row, rearrangement=how)
            if not match.groups() or "{}" in module.theirs:
                return row
            blocks = module.ours.startswith("blocks.")
            count = v.depth if blocks else len(v.deepstack_visual_indexes)
            shape, offset = (count, *row.global_shape), (int(match[1]),)
            return replace(row, global_shape=shape, offset=offset)
        return replace(row, key=self.vision + name)


_MEGATRONS_BLOCKS = (
    Module("blocks.{}.norm1.", "decoder.layers.self_attention.linear_qkv.layer_norm_"),
    Module("blocks.{}.norm2.", "decoder.layers.mlp.linear_fc1.layer_norm_"),
    Module("blocks.{}.attn.qkv.", "decoder.layers.self_attention.linear_qkv.", by_head=True),
    Module("blocks.{}.attn.proj.", "decoder.layers.self_attention.linear_proj."),
    Module("blocks.{}.mlp.", "decoder.layers.mlp."),
)
"""The blocks of a vision tower that is made of Megatron's transformer layers."""

MEGATRON_BRIDGE = Dialect(
    "megatron-bridge",
    "NVIDIA Megatron-Bridge, or VERL with it",
    tracker="release",
    vision="vision_model.",
    sign="vision_model.merger.",
    modules=(
        *_MEGATRONS_BLOCKS,
        Module("deepstack_merger_list.{}.norm.", "decoder.deepstack_merger_list.patch_norm."),
        Module("deepstack_merger_list.{}.", "decoder.deepstack_merger_list."),
        Module("merger.norm.", "merger.patch_norm."),
    ),
    stateful=("decoder.", "merger."),
)
MS_SWIFT = Dialect(
    "ms-swift",
    "ms-swift (mcore-bridge)",
    tracker=1,
    vision="visual.visual.",
    sign="visual.visual.",
)
PAI_MEGATRON_PATCH = Dialect(
    "pai-megatron-patch",
    "Pai-Megatron-Patch",
    tracker="release",
    vision="vision_model.",
    sign="vision_model.projection.",
    modules=(
        *_MEGATRONS_BLOCKS,
        Module("deepstack_merger_list.{}.norm.", "decoder.deepstack_norm_list.{}."),
        Module("deepstack_merger_list.{}.", "decoder.deepstack_merger_list.{}.encoder."),
        Module("merger.norm.", "decoder.final_layernorm."),
        Module("merger.", "projection.encoder."),
    ),
    unwritten="its MoE recipes look for each layer under a key of its own",
)
DIALECTS = (MEGATRON_BRIDGE, MS_SWIFT, PAI_MEGATRON_PATCH)


def require_known_norms(maker: str, a: Architecture) -> None:
    """Raise BadInput for models whose norms others store as w - 1, which is not exact in bf16."""
    if a.delta_net is not None:
        raise BadInput(
            f"Qwen3.5 is neither written nor read in the keys of {maker}: its norms of gated delta "
            "nets are stored as w - 1 there, so that no conversion would be bitwise. Convert to "
            "Hugging Face with that project's own tool."
        )


def dialect_named(key: str) -> Dialect:
    """Return the dialect of this name; raise BadInput if there is none, or it is not written."""
    dialect = next((dialect for dialect in DIALECTS if dialect.key == key), None)
    if dialect is None or dialect.unwritten:
        known = " and ".join(dialect.key for dialect in DIALECTS if not dialect.unwritten)
        why = "is not known" if dialect is None else f"is only read, since {dialect.unwritten}"
        raise BadInput(f"dialect {key!r} {why}: {known} can be written.")
    return dialect


def maker_of(folder: Path, keys: Iterable[str]) -> Dialect | None:
    """Tell the dialect of the checkpoint in `folder` from its keys; None for the table's own keys.

    In a legacy checkpoint, a folder's name may precede a key.

    Raises:
        BadInput: the keys are another maker's.
    """
    names = {key.rpartition("/")[2] for key in keys}
    if LANGUAGE + EMBEDDING not in names:
        return None

    def starts(sign: str) -> bool:
        return any(name.startswith(sign) for name in names)

    dialect = next((dialect for dialect in DIALECTS if starts(dialect.sign)), None)
    if dialect is None:
        known = " and of ".join(dialect.maker for dialect in DIALECTS)
        raise BadInput(
            f"{folder} has the keys of an unknown project, which are not understood here; those of "
            f"{known} are. Convert it to Hugging Face with its own tool."
        )
    return dialect
