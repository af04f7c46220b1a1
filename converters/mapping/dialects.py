"""Dialects of Megatron checkpoints: how other projects name the same tensors, and pack them.

The table speaks of this project's keys. What others write is a row here. All of them keep
Megatron's own keys for the language model, after a prefix; they differ in the vision tower, which
the table keeps as Hugging Face has it. Each row was compared with checkpoints that the maker's own
converter wrote (``tests/converters/peers``). Whether layers are stacked or have keys of their own
is no matter of the dialect (`megatron_checkpoint.stacked`). Models with gated delta nets differ
besides in values or in the order of rows (`Hybrid`).
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
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
class Hybrid:
    """How one maker stores what Qwen3.5 has and Qwen3-VL has not.

    Attributes:
        centred: whether the weight w of the norm of a gated delta net's output is stored as w - 1.
        by_head: whether the rows of attention's query, key and value are those of the first KV
            head, with each query before its gate, then those of the second; and a gated delta
            net's input projection and convolution are one tensor each, by key head. Otherwise the
            rows are in Megatron's order, and the parts are tensors of their own, as in the table.
    """

    centred: bool = False
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
        hybrid: how models with gated delta nets are stored; None if that is not known.
        unwritten: why checkpoints are not written in it; empty if they are.
    """

    key: str
    maker: str
    tracker: str | int
    vision: str
    sign: str
    modules: tuple[Module, ...] = ()
    stateful: tuple[str, ...] = ()
    hybrid: Hybrid | None = None
    unwritten: str = ""

    def rows(self, rows: Sequence[Row], a: Architecture) -> Iterator[Row]:
        """Yield how the dialect stores what `rows`, rows of the table, store."""
        rearranged = {parts[0].key: whole for whole, parts in self.rearranged(rows, a)}
        held = {row.key for _, parts in self.rearranged(rows, a) for row in parts[1:]}
        for row in rows:
            if row.key.startswith(_VISION):
                yield self.vision_row(row, a.vision)
            elif row.key not in held:
                yield rearranged.get(row.key) or replace(row, key=LANGUAGE + row.key)

    def rearranged(self, rows: Iterable[Row], a: Architecture) -> Iterator[tuple[Row, list[Row]]]:
        """Yield the language model's rows that have other rows than the table's, and the latter."""
        if self.hybrid is None or not self.hybrid.by_head or a.delta_net is None:
            return
        parts: dict[str, list[Row]] = {}
        for row in rows:
            if found := re.match(r"(.*\.(?:in_proj|conv1d)\.weight)\.\w+$", row.key):
                parts.setdefault(found[1], []).append(row)
            elif row.key.endswith(".linear_qkv.weight"):
                parts[row.key] = [row]
        for key, held in parts.items():
            heads = a.num_key_value_heads if len(held) == 1 else a.delta_net.num_key_heads
            sources = tuple(source for row in held for source in row.sources)
            how = transforms.by_head(heads, *(s.piece_shape[0] // heads for s in sources))
            shape = (how.rows, *held[0].shape[1:])
            whole = replace(held[0], key=LANGUAGE + key, global_shape=shape, sources=sources)
            yield replace(whole, rearrangement=how), held

    def centred_keys(self, rows: Iterable[Row]) -> set[str]:
        """Return the keys of those of the table's `rows` whose weights w are stored as w - 1."""
        if self.hybrid is None or not self.hybrid.centred:
            return set()
        return {row.key for row in rows if row.key.endswith(".out_norm.weight")}

    def require_architecture(self, a: Architecture) -> None:
        """Raise BadInput for a model with gated delta nets, if it is not known how they are stored.

        A norm's weight w may be stored as w - 1, in a tensor of the same shape.
        """
        if a.delta_net is not None and self.hybrid is None:
            raise BadInput(
                f"Qwen3.5 is not read in the keys of {self.maker}: it is not known how its gated "
                "delta nets are stored there. Convert to Hugging Face with that project's own tool."
            )

    def extra_state_keys(self, a: Architecture, *, mtp: bool) -> list[str]:
        """Return the keys of the ``_extra_state`` objects that the maker's strict loading wants."""
        modules: dict[str, None] = {}  # a weight and a bias have one module
        for row in (self.vision_row(row, a.vision) for row in vision_rows(a.vision)):
            place = list(zip(row.offset, row.global_shape, strict=False)) or [(0, 1)]
            if row.key.startswith(tuple(self.vision + start for start in self.stateful)):
                modules[f"{row.key.rpartition('.')[0]}._extra_state/{shard(place)}"] = None
        return [*(LANGUAGE + key for key in extra_state_keys(a, mtp=mtp)), *modules]

    def vision_row(self, row: Row, v: VisionArchitecture) -> Row:
        """Return how the dialect stores what `row`, a row of the vision tower, stores."""
        name = row.key.removeprefix(_VISION)
        for module in self.modules:
            found = re.match(re.escape(module.ours).replace(r"\{\}", r"(\d+)"), name)
            if found is None:
                continue
            start = self.vision + module.theirs.format(*found.groups())
            row = replace(row, key=start + name[found.end() :])
            if module.by_head:
                how = transforms.fused_qkv(v.num_heads, v.hidden_size // v.num_heads)
                row = replace(row, rearrangement=how)
            if not found.groups() or "{}" in module.theirs:
                return row
            blocks = module.ours.startswith("blocks.")
            count = v.depth if blocks else len(v.deepstack_visual_indexes)
            shape, offset = (count, *row.global_shape), (int(found[1]),)
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
    hybrid=Hybrid(centred=True),
)
MS_SWIFT = Dialect(
    "ms-swift",
    "ms-swift (mcore-bridge)",
    tracker=1,
    vision="visual.visual.",
    sign="visual.visual.",
    hybrid=Hybrid(by_head=True),
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


def named(key: str) -> Dialect:
    """Return the dialect of this name; raise BadInput if there is none, or it is not written."""
    found = next((dialect for dialect in DIALECTS if dialect.key == key), None)
    if found is None or found.unwritten:
        known = " and ".join(dialect.key for dialect in DIALECTS if not dialect.unwritten)
        why = "is not known" if found is None else f"is only read, since {found.unwritten}"
        raise BadInput(f"dialect {key!r} {why}: {known} can be written.")
    return found


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

    found = next((dialect for dialect in DIALECTS if starts(dialect.sign)), None)
    if found is None:
        known = " and of ".join(dialect.maker for dialect in DIALECTS)
        raise BadInput(
            f"{folder} has the keys of an unknown project, which are not understood here; those of "
            f"{known} are. Convert it to Hugging Face with its own tool."
        )
    return found
