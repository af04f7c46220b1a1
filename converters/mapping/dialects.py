"""Dialects of Megatron checkpoints: how other projects name the same tensors, and pack them.

The table speaks of this project's keys. What others write is a row here. All of them keep
Megatron's own keys for the language model, after a prefix; they differ in the vision tower, which
the table keeps as Hugging Face has it. Each row was compared with checkpoints that the maker's own
converter wrote (``tests/converters/peers``). Whether layers are stacked or have keys of their own
is no matter of the dialect (`other_keys.stack_layers`). Models with gated delta nets
differ besides in values or in the order of rows (`DeltaNetForm`).

Megatron's own keys are those of its ``GPTModel``. Its ``HybridModel`` numbers attention and MLP as
two layers, and calls the final norm otherwise. `hybrid_key` and `keys_of_pairs` go from one to the
other; any maker's checkpoint may have either.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from mcore_qwen3vl.config import Architecture, VisionArchitecture
from mcore_qwen3vl.converters.mapping.rearrangement import by_head, fused_qkv
from mcore_qwen3vl.converters.mapping.table import (
    EMBEDDING,
    LAYERS,
    Row,
    extra_state_keys,
    shard_suffix,
    unstacked,
    vision_rows,
)
from mcore_qwen3vl.errors import BadInput

LANGUAGE = "language_model."
"""Prefix of the language model's keys in every dialect but that of ``HybridModel`` itself."""
HYBRID_NORM = "decoder.final_norm.weight"
"""The key of the final norm in a ``HybridModel``, by which it is recognised."""

_VISION = "visual."
_GPT_NORM = "decoder.final_layernorm."
_FUSED_NORMS = {
    "input_layernorm.weight": "self_attention.linear_qkv.layer_norm_weight",
    "pre_mlp_layernorm.weight": "mlp.linear_fc1.layer_norm_weight",
}
"""Where a norm is a module of its own, and its name in a linear layer that has it inside.

An MoE layer always has the former of the second kind."""


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
class DeltaNetForm:
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
        stateful: starts of the modules of the vision tower with an ``_extra_state``; they are
            Transformer Engine's.
        delta_nets: how models with gated delta nets are stored; None if that is not known.
        unwritten: why checkpoints are not written in it; empty if they are.
        language: prefix of the language model's keys.
        hybrid_model: whether checkpoints are written with the keys of a ``HybridModel``.
    """

    key: str
    maker: str
    tracker: str | int
    vision: str
    sign: str
    modules: tuple[Module, ...] = ()
    stateful: tuple[str, ...] = ()
    delta_nets: DeltaNetForm | None = None
    unwritten: str = ""
    language: str = LANGUAGE
    hybrid_model: bool = False

    def stored_rows(self, rows: Sequence[Row], architecture: Architecture) -> Iterator[Row]:
        """Yield how the dialect stores what `rows`, rows of the table, store.

        A row that joins several stands in the place of the first of them.
        """
        rearranged, in_others = {}, set()
        for fused, parts in self.rearranged_rows(rows, architecture):
            rearranged[parts[0].key] = fused
            in_others |= {row.key for row in parts[1:]}
        for row in rows:
            if row.key.startswith(_VISION):
                yield self.stored_vision_row(row, architecture.vision)
            elif row.key in rearranged:
                yield rearranged[row.key]
            elif row.key not in in_others:
                if self.hybrid_model:
                    row = unstacked(row)
                    row = replace(row, key=hybrid_key(row.key))
                yield replace(row, key=self.language + row.key)

    def arguments(self, architecture: Architecture) -> dict[str, Any]:
        """Return the arguments of Megatron's that the maker's loader compares with a run's."""
        common = {"tensor_model_parallel_size": 1, "pipeline_model_parallel_size": 1}
        common |= {"no_save_optim": True, "no_save_rng": True}  # it looks for no optimizer state
        if not self.hybrid_model:
            return common
        pattern = "".join("*E" if moe else "*-" for moe in architecture.moe_layers)
        return common | {
            "hybrid_layer_pattern": pattern,
            "num_layers": len(pattern),
            "hidden_size": architecture.hidden_size,
            "num_attention_heads": architecture.num_attention_heads,
        }

    def rearranged_rows(
        self, rows: Iterable[Row], architecture: Architecture
    ) -> Iterator[tuple[Row, list[Row]]]:
        """Yield the language model's rows that have other rows than the table's, and the latter."""
        if self.delta_nets is None or not self.delta_nets.by_head or architecture.delta_net is None:
            return
        parts: dict[str, list[Row]] = {}
        for row in rows:
            if part := re.match(r"(.*\.(?:in_proj|conv1d)\.weight)\.\w+$", row.key):
                parts.setdefault(part[1], []).append(row)
            elif row.key.endswith(".linear_qkv.weight"):
                parts[row.key] = [row]
        for key, fused_rows in parts.items():
            heads = (
                architecture.num_key_value_heads
                if len(fused_rows) == 1
                else architecture.delta_net.num_key_heads
            )
            sources = tuple(source for row in fused_rows for source in row.sources)
            how = by_head(heads, *(s.piece_shape[0] // heads for s in sources))
            shape = (how.rows, *fused_rows[0].shape[1:])
            fused = replace(fused_rows[0], key=self.language + key, global_shape=shape)
            yield replace(fused, sources=sources, rearrangement=how), fused_rows

    def centred_keys(self, rows: Iterable[Row]) -> set[str]:
        """Return the keys of the table's `rows` whose weights w are stored as w - 1."""
        if self.delta_nets is None or not self.delta_nets.centred:
            return set()
        return {row.key for row in rows if row.key.endswith(".out_norm.weight")}

    def require_architecture(self, architecture: Architecture) -> None:
        """Raise BadInput for a model with gated delta nets, if it is not known how they are stored.

        A norm's weight w may be stored as w - 1, in a tensor of the same shape.
        """
        if architecture.delta_net is not None and self.delta_nets is None:
            raise BadInput(
                f"Qwen3.5 is neither read nor written in the keys of {self.maker}: how its gated "
                "delta nets are stored there is not known here. Use that project's own tool."
            )

    def extra_state_keys(self, architecture: Architecture, *, mtp: bool) -> list[str]:
        """Return the keys of the ``_extra_state`` objects that the maker's strict loading wants."""
        if self.hybrid_model:
            keys = map(hybrid_key, extra_state_keys(architecture, stacked=False))
            return [*keys, "output_layer._extra_state/shard_0_1"]
        modules: dict[str, None] = {}  # a weight and a bias have one module
        for row in (
            self.stored_vision_row(row, architecture.vision)
            for row in vision_rows(architecture.vision)
        ):
            place = list(zip(row.offset, row.global_shape, strict=False)) or [(0, 1)]
            if row.key.startswith(tuple(self.vision + start for start in self.stateful)):
                modules[f"{row.key.rpartition('.')[0]}._extra_state/{shard_suffix(place)}"] = None
        return [*(self.language + key for key in extra_state_keys(architecture, mtp=mtp)), *modules]

    def stored_vision_row(self, row: Row, v: VisionArchitecture) -> Row:
        """Return how the dialect stores what `row`, a row of the vision tower, stores."""
        name = row.key.removeprefix(_VISION)
        for module in self.modules:
            match = re.match(re.escape(module.ours).replace(r"\{\}", r"(\d+)"), name)
            if match is None:
                continue
            start = self.vision + module.theirs.format(*match.groups())
            row = replace(row, key=start + name[match.end() :])
            if module.by_head:
                how = fused_qkv(v.num_heads, v.hidden_size // v.num_heads)
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
    delta_nets=DeltaNetForm(centred=True),
)
MS_SWIFT = Dialect(
    "ms-swift",
    "ms-swift (mcore-bridge)",
    tracker=1,
    vision="visual.visual.",
    sign="visual.visual.",
    delta_nets=DeltaNetForm(by_head=True),
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
HYBRID = Dialect(
    "hybrid",
    "a HybridModel of Megatron-Core",
    tracker="release",
    vision=_VISION,
    sign=HYBRID_NORM,
    language="",
    hybrid_model=True,
)
DIALECTS = (MEGATRON_BRIDGE, MS_SWIFT, PAI_MEGATRON_PATCH, HYBRID)


def hybrid_key(key: str) -> str:
    """Return the key in a ``HybridModel`` of what a ``GPTModel`` has under `key`.

    Each of a GPT model's layers has keys of its own here, and makes two of the hybrid's: attention
    with its norm, and the MLP or MoE with its norm. Source: ``convert_gpt_to_hybrid`` of
    Megatron-LM's ``tools/checkpoint/gpt_hybrid_conversion.py``.
    """
    layer = re.match(rf"{re.escape(LAYERS)}(\d+)\.(.+)", key)
    if layer is None:
        return key.replace(_GPT_NORM, HYBRID_NORM.removesuffix("weight"))
    number = 2 * int(layer[1]) + (not layer[2].startswith("self_attention."))
    return f"{LAYERS}{number}.{layer[2]}"


def keys_of_pairs(folder: Path, keys: Iterable[str], prefix: str) -> dict[str, str]:
    """Return the keys of the ``HybridModel`` in `folder` by those that a ``GPTModel`` would have.

    The i-th layer with attention, and the i-th with an MLP or MoE, are layer i. These are two
    layers of the hybrid, or one that is a group in its pattern, as in ``[*E]``.

    Args:
        prefix: of the language model's keys.

    Raises:
        BadInput: attention and MLP do not take turns, a layer is neither, or two keys are one.
    """
    keys = list(keys)
    pattern = re.compile(rf"{re.escape(prefix + LAYERS)}(0|[1-9]\d{{0,3}})\.(.+)")
    layers = {key: (int(m[1]), m[2]) for key in keys if (m := pattern.match(key))}
    attention, mlps = (
        sorted({number for number, name in layers.values() if _is_attention(name) is half})
        for half in (True, False)
    )
    # The two may be one layer, a group such as [*E], but the next pair begins after it.
    pairs = zip(attention, mlps, strict=False)
    later = zip(mlps, attention[1:], strict=False)
    turns = all(a <= mlp for a, mlp in pairs) and all(mlp < a for mlp, a in later)
    if len(attention) != len(mlps) or not turns:
        raise BadInput(
            f"{folder} is of a HybridModel with attention in the layers {attention} and an MLP in "
            f"{mlps}. In this model they take turns, and attention begins: it is another model, or "
            "layers are missing."
        )
    dense = {number for number, name in layers.values() if name == "mlp.linear_fc1.weight"}
    named: dict[str, str] = {}
    for key in keys:
        ours = key
        if key == prefix + HYBRID_NORM:
            ours = f"{prefix}{_GPT_NORM}weight"
        elif key in layers:
            number, name = layers[key]
            if (half := _is_attention(name)) is None:
                raise BadInput(
                    f"{folder} holds the tensor {key}, of a layer that is neither attention nor an "
                    "MLP. It is another model."
                )
            if half or number in dense:
                name = _FUSED_NORMS.get(name, name)
            layer = (attention if half else mlps).index(number)
            ours = f"{prefix}{LAYERS}{layer}.{name}"
        if ours in named:
            raise BadInput(f"{folder} holds one tensor under two keys, {named[ours]} and {key}.")
        named[ours] = key
    return named


def _is_attention(name: str) -> bool | None:
    """Return whether a layer's tensor belongs to attention, or else to the MLP; None: neither."""
    if name.startswith(("self_attention.", "input_layernorm.")):
        return True
    return False if name.startswith(("mlp.", "pre_mlp_layernorm.")) else None


def dialect_named(key: str) -> Dialect:
    """Return the dialect of this name; raise BadInput if there is none, or it is not written."""
    dialect = next((dialect for dialect in DIALECTS if dialect.key == key), None)
    if dialect is None or dialect.unwritten:
        *others, last = (dialect.key for dialect in DIALECTS if not dialect.unwritten)
        known = f"{', '.join(others)} and {last}"
        why = "is not known" if dialect is None else f"is only read, since {dialect.unwritten}"
        raise BadInput(f"dialect {key!r} {why}: {known} can be written.")
    return dialect


def dialect_of(folder: Path, keys: Iterable[str]) -> Dialect | None:
    """Tell the dialect of the checkpoint in `folder` from its keys; None for the table's own keys.

    In a legacy checkpoint, a folder's name may precede a key.

    Raises:
        BadInput: the keys are another maker's.
    """
    names = {key.rpartition("/")[2] for key in keys}
    if LANGUAGE + EMBEDDING not in names:
        return HYBRID if HYBRID_NORM in names else None
    for dialect in DIALECTS:
        if any(name.startswith(dialect.sign) for name in names):
            return dialect
    known = " and of ".join(dialect.maker for dialect in DIALECTS)
    raise BadInput(
        f"{folder} has the keys of an unknown project, which are not understood here; those of "
        f"{known} are. Convert it to Hugging Face with its own tool."
    )
