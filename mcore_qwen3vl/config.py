"""Reading a ``config.json``: the only place that reads Hugging Face config fields.

Both forms are read: transformers 4.57 (the published checkpoints: ``rope_scaling`` and
``rope_theta``, ``num_experts``) and transformers 5 (``rope_parameters``, ``num_local_experts``).
This module imports neither torch nor megatron, so that conversion and inspection start fast.
"""

from __future__ import annotations

import re
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Literal

from mcore_qwen3vl.errors import BadInput
from mcore_qwen3vl.json_and_yaml import read_object

ExpertLayout = Literal["published", "v5"]
"""How fused experts lie on disk: ``published`` is gate_up [E, H, 2I] and down [E, I, H]
(transformers 4.57), ``v5`` is gate_up [E, 2I, H] and down [E, H, I] (transformers 5)."""

TOKEN_IDS = ("image_token_id", "video_token_id", "vision_start_token_id", "vision_end_token_id")

DTYPES = ("bfloat16", "float16", "float32", "float64")

ALIASES = {"num_attention_heads": "num_heads", "num_hidden_layers": "depth"}
"""Other names that transformers takes in ``vision_config``."""

VISION_ACTIVATION = "gelu_pytorch_tanh"
VISION_ROPE_THETA = 10000.0


@dataclass(frozen=True)
class Family:
    """What a ``model_type`` says of a model, beyond the fields of its config.

    Attributes:
        name: how the names of its classes in transformers begin.
        head_dim, rotated, mrope_section, deepstack: defaults of transformers for the size of a head
            (None: the part of the hidden size), for its rotated part, for the frequencies of each
            axis, and for the layers of the tower that give features to several decoder layers.
        hybrid: whether the language model is Qwen3.5's: gated delta nets in most layers, and an
            output gate in the others; norm weights as differences from one; a shared expert beside
            the routed ones, which have one layout; and no DeepStack.
        has_vision: whether there is a vision tower. Without one, the config of the language model
            is the whole config.
    """

    name: str
    moe: bool = False
    hybrid: bool = False
    has_vision: bool = True
    head_dim: int | None = 128
    rotated: float = 1.0
    mrope_section: tuple[int, ...] = (24, 20, 20)
    deepstack: tuple[int, ...] = (8, 16, 24)

    @property
    def model_class(self) -> str:
        """The name of the class in transformers that predicts tokens."""
        return f"{self.name}For{'ConditionalGeneration' if self.has_vision else 'CausalLM'}"

    @property
    def config_class(self) -> str:
        """The name of its config's class in transformers."""
        return f"{self.name}{'' if self.has_vision else 'Text'}Config"


_QWEN3_5 = Family(
    "Qwen3_5", hybrid=True, head_dim=256, rotated=0.25, mrope_section=(11, 11, 10), deepstack=()
)
_QWEN3_5_MOE = replace(_QWEN3_5, name="Qwen3_5Moe", moe=True)

MODEL_TYPES = {
    "qwen3_vl": Family("Qwen3VL"),
    "qwen3_vl_moe": Family("Qwen3VLMoe", moe=True, head_dim=None),
    "cosmos3_omni": Family("Qwen3VL"),  # its reasoner is read, a dense Qwen3-VL
    "qwen3_5": _QWEN3_5,
    "qwen3_5_moe": _QWEN3_5_MOE,
    "qwen3_5_text": replace(_QWEN3_5, has_vision=False),
    "qwen3_5_moe_text": replace(_QWEN3_5_MOE, has_vision=False),
}
"""The models that are read. Qwen3.6 and Qwen3.8 have the types of Qwen3.5."""

LAYER_TYPES = {"full_attention": False, "linear_attention": True}
"""Whether a decoder layer of an HF ``layer_types`` is a gated delta net."""

ROPE_NUMBERS = {
    "linear": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor"),
    "yarn": ("factor",),
}
"""The scaled types of rope, and the numbers that each needs. Their frequencies are the model's: in
other types they depend on the length of the sequence."""
ROPE_OPTIONS = {
    "linear": (),
    "llama3": ("original_max_position_embeddings",),
    "yarn": (
        *("original_max_position_embeddings", "attention_factor", "beta_fast", "beta_slow"),
        *("mscale", "mscale_all_dim", "truncate"),
    ),
}
"""Further fields of a scaled rope, for which transformers has defaults. All but ``truncate``, which
is true or false, are numbers."""

_NOT_OF_WEIGHTS = frozenset(
    (
        *("dtype", "expert_layout", "initializer_range", "router_aux_loss_coef"),
        *("tie_word_embeddings", "vocab_size", "max_position_embeddings", "mtp_num_hidden_layers"),
    )
)
"""What may differ between a model and the config beside its weights: nothing else computed from
them changes, or the tensors show it."""


@dataclass(frozen=True)
class VisionArchitecture:
    """The vision tower's shape; fields are named as in HF ``Qwen3VLVisionConfig``."""

    depth: int
    hidden_size: int
    intermediate_size: int
    num_heads: int
    in_channels: int
    patch_size: int
    spatial_merge_size: int
    temporal_patch_size: int
    out_hidden_size: int
    num_position_embeddings: int
    deepstack_visual_indexes: tuple[int, ...]

    @property
    def patch_dim(self) -> int:
        """The number of values in one flattened patch: channels x frames x height x width."""
        return self.in_channels * self.temporal_patch_size * self.patch_size**2


NO_VISION = VisionArchitecture(0, 0, 0, 1, 0, 1, 1, 1, 0, 0, ())
"""The tower of a model without one: it has no tensor and takes no patch."""


@dataclass(frozen=True)
class DeltaNetArchitecture:
    """The shape of all gated delta nets of a model; fields are HF's without ``linear_``."""

    conv_kernel_dim: int
    key_head_dim: int
    value_head_dim: int
    num_key_heads: int
    num_value_heads: int

    @property
    def key_dim(self) -> int:
        """The number of rows of all keys together, and of all queries."""
        return self.num_key_heads * self.key_head_dim

    @property
    def value_dim(self) -> int:
        """The number of rows of all values together, and of their gates."""
        return self.num_value_heads * self.value_head_dim


@dataclass(frozen=True)
class Architecture:
    """The shape of one model; fields are named as in HF ``Qwen3VL[Moe]Config`` and ``Qwen3_5...``.

    Attributes:
        family: how the names of its classes in transformers begin, as in :class:`Family`.
        delta_net_layers: whether a decoder layer is a gated delta net; otherwise it is attention.
        attn_output_gate: whether attention multiplies its output by a gate, which the query
            projection computes: the rows of each head are its query, then its gate.
        zero_centered_norms: whether norm weights of the language model are differences from one;
            those inside gated delta nets never are.
        shared_expert_intermediate_size: size of a MoE layer's expert for every token, whose output
            has a gate; 0: none.
        mtp_num_hidden_layers: MTP layers, if the files have them; the
            model itself runs without.
    """

    family: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    partial_rotary_factor: float  # the part of each head that is rotated
    rms_norm_eps: float
    rope_theta: float
    rope_scaling: tuple[tuple[str, Any], ...]  # HF's rope_type and its numbers; empty: plain rope
    mrope_section: tuple[int, int, int]
    max_position_embeddings: int
    initializer_range: float
    tie_word_embeddings: bool
    dtype: str
    image_token_id: int
    video_token_id: int
    vision_start_token_id: int
    vision_end_token_id: int
    vision: VisionArchitecture
    delta_net: DeltaNetArchitecture | None  # None: all layers are attention
    delta_net_layers: tuple[bool, ...]
    attn_output_gate: bool
    zero_centered_norms: bool
    mtp_num_hidden_layers: int
    num_experts: int  # 0: dense
    num_experts_per_tok: int
    moe_intermediate_size: int
    shared_expert_intermediate_size: int
    router_aux_loss_coef: float
    moe_layers: tuple[bool, ...]  # one flag a layer, all False when dense
    expert_layout: ExpertLayout | None  # as declared; None: dense, or nothing declared

    @property
    def is_moe(self) -> bool:
        return self.num_experts > 0

    @property
    def kind(self) -> str:
        """The model's family, and whether it is dense or MoE, for messages."""
        return f"{self.brand} {'MoE' if self.is_moe else 'dense'}"

    @property
    def has_vision(self) -> bool:
        """Whether there is a vision tower; without one the model is a language model alone."""
        return self.vision != NO_VISION

    @property
    def brand(self) -> str:
        """The models' name, for messages; Qwen3.5's stands for Qwen3.6 and 3.8 too."""
        return "Qwen3-VL" if self.delta_net is None else "Qwen3.5"

    @property
    def mixed_layers(self) -> bool:
        """Whether some decoder layers are MoE and some are dense."""
        return any(self.moe_layers) and not all(self.moe_layers)

    @property
    def stacks_layers(self) -> bool:
        """Whether Megatron stacks the tensors of all layers, which it does if they are alike."""
        return not self.mixed_layers and self.delta_net is None

    @property
    def rotary_dim(self) -> int:
        """The number of values of a head, its first ones, that rotary positions turn."""
        return int(self.head_dim * self.partial_rotary_factor)

    def layout_of_experts(self, wanted: ExpertLayout | None = None) -> ExpertLayout | None:
        """Return the layout of fused experts where `wanted` is asked for; None: as declared.

        Those of a hybrid model have one layout, whatever is asked for.
        """
        return self.expert_layout if self.delta_net is not None else wanted or self.expert_layout

    @classmethod
    def from_hf(cls, source: str | Path | dict[str, Any]) -> Architecture:
        """Read a ``config.json``, the directory that holds one, or its parsed content.

        Raises:
            BadInput: the file is missing, is not JSON, is none of `MODEL_TYPES`, lacks a field,
                declares two expert layouts at once, or asks for what the model does not have.
        """
        config = source if isinstance(source, dict) else read_config_file(Path(source))
        return _read_architecture(config)

    def require_settings_of(self, folder: Path) -> None:
        """Raise BadInput if weights in `folder`, which fit this model, compute otherwise by config.

        Tensors show neither the rotary base nor other settings of the ``config.json`` beside them.
        """
        here, there = asdict(self), asdict(Architecture.from_hf(folder))
        for fields in (here, there):
            fields |= {f"vision_config.{name}": v for name, v in fields.pop("vision").items()}
        differing = [
            f"{name} is {there[name]!r:.120} there and {here[name]!r:.120} here"
            for name in here
            if name not in _NOT_OF_WEIGHTS and here[name] != there[name]
        ]
        if differing:
            raise BadInput(
                f"The config.json in {folder} describes another model than the one that its "
                f"weights are to fill: {'; '.join(differing)}. Give --hf-model {folder}, or change "
                "the setting in both."
            )


MOST_LABELS = 1_000_000
"""Most labels of a config: transformers makes a name for each as soon as it reads it."""


def read_config_file(path: Path) -> dict[str, Any]:
    """Return the parsed ``config.json`` at `path` (the file itself or its directory)."""
    where = "A Hugging Face checkpoint directory holds a config.json"
    config = read_object(path, "config.json", where)
    for section in (config, config.get("text_config"), config.get("vision_config")):
        labels = section.get("num_labels") if isinstance(section, dict) else None
        if labels is not None and not (type(labels) is int and 0 <= labels <= MOST_LABELS):
            raise BadInput(
                f"{path}: num_labels in config.json is {labels!r:.40}, and transformers makes a "
                f"name for each: give a number up to {MOST_LABELS:,}, or leave it out."
            )
    return config


def family_of(config: dict[str, Any]) -> Family:
    """Return the family of a ``config.json``; raise BadInput if it is none of `MODEL_TYPES`."""
    model_type = config.get("model_type")
    if not isinstance(model_type, str) or model_type not in MODEL_TYPES:
        what = "" if "vision_config" in config else ", a model without vision"
        raise BadInput(
            f"config.json has model_type {model_type!r:.40}{what}; this tool handles "
            f"{', '.join(MODEL_TYPES)} only. Name a whole checkpoint of one of them."
        )
    return MODEL_TYPES[model_type]


def states_vision(folder: Path) -> bool:
    """Return whether the model in `folder` has a vision tower; without a config that tells, True.

    Raises:
        BadInput: the config cannot be read.
    """
    if not (folder / "config.json").is_file():
        return True
    family = MODEL_TYPES.get(str(read_config_file(folder).get("model_type")))
    return family is None or family.has_vision


def text_section(config: dict[str, Any]) -> dict[str, Any]:
    """Return the part of a ``config.json`` that describes the language model."""
    return _require_section(config, "text_config") if family_of(config).has_vision else config


def _read_architecture(config: dict[str, Any]) -> Architecture:
    family, text = family_of(config), text_section(config)
    if text.get("attention_bias"):
        raise BadInput("text_config.attention_bias is true; none of these models has one.")
    _require_accepted(text, "text_config", "hidden_act", "silu")
    layers = _read_size(text, "num_hidden_layers")
    delta_net_layers = _delta_net_layers(text, layers, family)
    rotated = _rotated_part(text, family)
    rope = _checked_rope(text)
    heads, kv_heads, head_dim = _head_counts_and_size(text, family)
    rotary_dim = int(head_dim * rotated)
    axes = _read_integers(rope, "mrope_section", default=family.mrope_section)
    if len(axes) != 3 or sum(axes) * 2 != rotary_dim or min(axes) < 0:
        part = "" if rotated == 1 else f", of which {rotary_dim} are rotated,"
        raise BadInput(
            f"mrope_section is {list(axes)}: three numbers that add up to half of head_dim "
            f"{head_dim}{part} are needed."
        )
    vocab_size, hidden_size = _read_size(text, "vocab_size"), _read_size(text, "hidden_size")
    vision, tokens = NO_VISION, dict.fromkeys(TOKEN_IDS, -1)
    if family.has_vision:
        vision = _vision_architecture(_require_section(config, "vision_config"), family)
        tokens = {name: _read_integer(config, name) for name in TOKEN_IDS}
        if vision.out_hidden_size != hidden_size:
            raise BadInput(
                f"config.json: out_hidden_size of vision_config is {vision.out_hidden_size}, and "
                f"hidden_size of text_config is {hidden_size}: the two must be equal."
            )
    for name, token in tokens.items():
        if token >= vocab_size:
            raise BadInput(
                f"config.json: {name} is {token}, and the vocab_size {vocab_size} of text_config "
                "leaves no row for it."
            )
    moe = family.moe
    experts = _expert_count(text) if moe else 0
    expert_size = _read_size(text, "moe_intermediate_size") if moe else 0
    return Architecture(
        family=family.name,
        vocab_size=vocab_size,
        hidden_size=hidden_size,
        # A hybrid MoE model has no dense layer; Megatron asks for a size all the same.
        intermediate_size=expert_size
        if family.hybrid and moe
        else _read_size(text, "intermediate_size"),
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        head_dim=head_dim,
        partial_rotary_factor=rotated,
        rms_norm_eps=_read_positive(text, "rms_norm_eps", 1e-6),
        rope_theta=_read_positive(rope, "rope_theta"),
        rope_scaling=_rope_scaling(rope),
        mrope_section=(axes[0], axes[1], axes[2]),
        max_position_embeddings=_read_size(text, "max_position_embeddings"),
        initializer_range=_read_number(text, "initializer_range", 0.02, least=0),
        tie_word_embeddings=ties_embeddings(config),
        dtype=_weights_dtype(config, text),
        **tokens,
        vision=vision,
        delta_net=_delta_net_architecture(text) if family.hybrid else None,
        delta_net_layers=delta_net_layers,
        attn_output_gate=family.hybrid,
        zero_centered_norms=family.hybrid,
        mtp_num_hidden_layers=_mtp_layer_count(text) if family.hybrid else 0,
        num_experts=experts,
        num_experts_per_tok=_read_size(text, "num_experts_per_tok", most=experts) if moe else 0,
        moe_intermediate_size=expert_size,
        shared_expert_intermediate_size=(
            _read_size(text, "shared_expert_intermediate_size") if moe and family.hybrid else 0
        ),
        router_aux_loss_coef=_read_number(text, "router_aux_loss_coef", 0.001, least=0)
        if moe
        else 0.0,
        moe_layers=_moe_layers(text, layers, family) if moe else (False,) * layers,
        expert_layout=declared_expert_layout(config) if moe else None,
    )


def _delta_net_layers(text: dict[str, Any], layers: int, family: Family) -> tuple[bool, ...]:
    """Return which layers are gated delta nets, as HF ``Qwen3_5TextConfig`` decides it.

    ``layer_types`` says it; without that, all but every `full_attention_interval`-th layer are.
    """
    types = text.get("layer_types") or []
    known = list(LAYER_TYPES) if family.hybrid else ["full_attention"]
    if not isinstance(types, list) or any(kind not in known for kind in types):
        raise BadInput(
            f"text_config.layer_types is {types!r:.80}; expected a list of {' and '.join(known)}."
        )
    if not family.hybrid:
        return (False,) * layers
    interval = _read_size({"full_attention_interval": 4, **text}, "full_attention_interval")
    regular = tuple((layer + 1) % interval != 0 for layer in range(layers))
    if not types:
        return regular
    if len(types) != layers:
        raise BadInput(
            f"text_config.layer_types names {len(types)} layers, and num_hidden_layers is {layers}."
        )
    named = tuple(LAYER_TYPES[kind] for kind in types)
    if "full_attention_interval" in text and named != regular:
        raise BadInput(
            f"text_config contradicts itself: layer_types is {types!r:.80}, which is not what "
            f"full_attention_interval {interval} says. Leave one of them."
        )
    return named


def _delta_net_architecture(text: dict[str, Any]) -> DeltaNetArchitecture:
    if text.get("attn_output_gate", True) is not True:
        raise BadInput(
            f"text_config.attn_output_gate is {text['attn_output_gate']!r:.40}; in Qwen3.5 every "
            "attention has an output gate."
        )
    _require_accepted(text, "text_config", "output_gate_type", "swish", "silu")
    names = DeltaNetArchitecture.__dataclass_fields__
    net = DeltaNetArchitecture(**{name: _read_size(text, f"linear_{name}") for name in names})
    if net.num_value_heads % net.num_key_heads:
        raise BadInput(
            f"config.json: linear_num_value_heads {net.num_value_heads} is not a multiple of "
            f"linear_num_key_heads {net.num_key_heads}."
        )
    return net


def _mtp_layer_count(text: dict[str, Any]) -> int:
    if text.get("mtp_use_dedicated_embeddings"):
        raise BadInput(
            "text_config.mtp_use_dedicated_embeddings is true; MTP layers with an embedding of "
            "their own are not supported."
        )
    if text.get("mtp_num_hidden_layers") is None:
        return 0
    return _read_integer(text, "mtp_num_hidden_layers", most=1)


def _weights_dtype(config: dict[str, Any], text: dict[str, Any]) -> str:
    """Return the dtype of the weights, torch's name; the top level counts."""
    for where, section in (("", config), ("text_config.", text)):
        _require_same(section, "dtype", "torch_dtype", where)
    named = (level.get(name) for level in (config, text) for name in ("dtype", "torch_dtype"))
    dtype = next((name for name in named if name is not None), "bfloat16")
    if dtype not in DTYPES:
        raise BadInput(f"config.json: dtype is {dtype!r:.40}; expected {', '.join(DTYPES)}.")
    return str(dtype)


def _vision_architecture(vision: dict[str, Any], family: Family) -> VisionArchitecture:
    for alias, name in ALIASES.items():
        _require_same(vision, name, alias, "vision_config.")
    numbers = {
        name: _read_size(vision, name)
        for name in VisionArchitecture.__dataclass_fields__
        if name != "deepstack_visual_indexes"
    }
    if numbers["hidden_size"] % (4 * numbers["num_heads"]):
        raise BadInput(
            f"vision_config.hidden_size {numbers['hidden_size']} cannot be divided into num_heads "
            f"{numbers['num_heads']} heads whose size is a multiple of 4, as their rotary "
            "positions in two directions need."
        )
    _require_accepted(vision, "vision_config", "hidden_act", VISION_ACTIVATION)
    rope = _require_section(vision, "rope_parameters") if vision.get("rope_parameters") else {}
    _require_accepted(rope, "vision_config.rope_parameters", "rope_theta", VISION_ROPE_THETA)
    _require_accepted(rope, "vision_config.rope_parameters", "rope_type", "axial", "default")
    indexes = _read_integers(vision, "deepstack_visual_indexes", default=family.deepstack)
    if indexes and not family.deepstack:
        raise BadInput(
            f"vision_config.deepstack_visual_indexes is {list(indexes)}; Qwen3.5 has no DeepStack."
        )
    if any(not 0 <= i < numbers["depth"] for i in indexes) or len(set(indexes)) < len(indexes):
        raise BadInput(
            f"vision_config.deepstack_visual_indexes is {list(indexes)}, "
            f"but must name distinct layers below the depth {numbers['depth']}."
        )
    return VisionArchitecture(**numbers, deepstack_visual_indexes=indexes)


def ties_embeddings(config: dict[str, Any]) -> bool:
    """Return whether the head and the embedding are one tensor.

    transformers 5 sometimes writes ``text_config.tie_word_embeddings: true`` beside a top-level
    false; its loader follows the top level. The text's flag counts where the top level has none.
    """
    text = config.get("text_config")
    text = text if isinstance(text, dict) else {}
    ties = config.get("tie_word_embeddings", text.get("tie_word_embeddings", False))
    if not isinstance(ties, bool | None):
        raise BadInput(f"config.json: tie_word_embeddings is {ties!r:.40}; expected true or false.")
    return bool(ties)


def declared_expert_layout(config: dict[str, Any]) -> ExpertLayout | None:
    """Return the fused-expert layout that a MoE config declares, or None if it declares none.

    Three fields show it: ``transformers_version`` and, in ``text_config``, ``rope_parameters``
    (5) against ``rope_scaling``/``rope_theta`` (4.57) and ``num_local_experts`` (5) against
    ``num_experts`` (4.57). A hybrid model has no layout but transformers 5's.

    Raises:
        BadInput: the fields contradict each other.
    """
    if family_of(config).hybrid:
        return "v5"
    text = _require_section(config, "text_config")
    said: dict[str, ExpertLayout] = {}
    version = config.get("transformers_version") or text.get("transformers_version")
    if major := re.match(r"\d{1,4}\b", str(version), re.ASCII):
        said[f"transformers_version {version!s:.40}"] = "v5" if int(major[0]) >= 5 else "published"
    if "rope_parameters" in text:
        said["text_config.rope_parameters"] = "v5"
    elif "rope_scaling" in text or "rope_theta" in text:
        said["text_config.rope_scaling/rope_theta"] = "published"
    if "num_local_experts" in text:
        said["text_config.num_local_experts"] = "v5"
    elif "num_experts" in text:
        said["text_config.num_experts"] = "published"
    layouts = set(said.values())
    if len(layouts) > 1:
        listing = "; ".join(f"{field} says {layout}" for field, layout in said.items())
        raise BadInput(
            f"config.json contradicts itself about the layout of the fused experts: {listing}. "
            "Experts read in the wrong layout are scrambled, so nothing was guessed: restore the "
            "config.json that was saved together with these weights."
        )
    return layouts.pop() if layouts else None


def _expert_count(text: dict[str, Any]) -> int:
    names = ("num_experts", "num_local_experts")
    counts = {_read_size(text, name) for name in names if name in text}
    if len(counts) != 1:
        raise BadInput(
            "text_config must give one expert count in num_experts or num_local_experts; "
            f"found {sorted(counts) or 'none'}."
        )
    return counts.pop()


def _moe_layers(text: dict[str, Any], layers: int, family: Family) -> tuple[bool, ...]:
    """Return which layers are MoE, as HF ``Qwen3VLMoeTextDecoderLayer`` decides it.

    Every `decoder_sparse_step`-th layer is, unless ``mlp_only_layers`` lists it. In a hybrid model,
    all are.
    """
    dense = _read_integers(text, "mlp_only_layers", default=())
    if family.hybrid and (dense or text.get("decoder_sparse_step", 1) != 1):
        raise BadInput(
            "text_config names dense layers (mlp_only_layers, decoder_sparse_step); every layer of "
            "a Qwen3.5 MoE model has experts."
        )
    if any(not 0 <= i < layers for i in dense):
        raise BadInput(
            f"text_config.mlp_only_layers is {list(dense)}, but must name layers below "
            f"num_hidden_layers {layers}."
        )
    step = _read_size({"decoder_sparse_step": 1, **text}, "decoder_sparse_step")
    return tuple(i not in dense and (i + 1) % step == 0 for i in range(layers))


def rope_of(text: dict[str, Any]) -> dict[str, Any]:
    """Return a text's rope as transformers 5 writes it; raise BadInput if it contradicts itself."""
    names = [name for name in ("rope_parameters", "rope_scaling") if text.get(name)]
    theta = text.get("rope_theta")
    ropes = [{"rope_theta": theta, **_require_section(text, name)} for name in names]
    rope = ropes[0] if ropes else {"rope_theta": theta}
    if len(ropes) > 1 and _without_synonyms(rope) != _without_synonyms(ropes[1]):
        raise BadInput(
            f"text_config gives two ropes that differ, rope_parameters {ropes[0]!r:.300} and "
            f"rope_scaling {ropes[1]!r:.300}: transformers 5 would use the second alone. Leave one "
            "of them, with all of its fields."
        )
    if theta is not None and rope["rope_theta"] not in (None, theta):
        two = {"rope_theta": theta, f"{names[0]}.rope_theta": rope["rope_theta"]}
        raise _contradiction("text_config", two)
    kinds = {_rope_type_of_today(rope[name]) for name in ("rope_type", "type") if rope.get(name)}
    if len(kinds) > 1:
        two = {name: rope[name] for name in ("rope_type", "type")}
        raise _contradiction(f"text_config.{names[0]}", two)
    return rope


def _without_synonyms(rope: dict[str, Any]) -> dict[str, Any]:
    """Return a rope without what is said twice or left open."""
    kind = _rope_type_of_today(rope.get("rope_type") or rope.get("type") or "default")
    return {k: v for k, v in rope.items() if v is not None and k != "type"} | {"rope_type": kind}


def _rope_type_of_today(kind: Any) -> str:
    # Checkpoints that were saved before 4.57 called the same thing "mrope".
    return "default" if kind == "mrope" else str(kind)


def _rotated_part(text: dict[str, Any], family: Family) -> float:
    """Return the part of each head that rotary positions turn."""
    name = "partial_rotary_factor"
    places = {f"rope_parameters.{name}": rope_of(text), name: text}
    named = {
        where: _read_positive(at, name) for where, at in places.items() if at.get(name) is not None
    }
    if len(set(named.values())) > 1:
        raise _contradiction("text_config", named)
    factor = next(iter(named.values()), family.rotated)
    if factor > 1 or (factor != 1 and not family.hybrid):
        wanted = "1 at most is needed" if family.hybrid else "Qwen3-VL rotates whole heads"
        raise BadInput(f"{name} is {factor!r:.40}; {wanted}.")
    return factor


def _checked_rope(text: dict[str, Any]) -> dict[str, Any]:
    """Return the rope as :func:`rope_of` does; raise BadInput if these models cannot have it."""
    rope = rope_of(text)
    if rope["rope_theta"] is None:
        raise BadInput(
            "config.json gives no rotary base: neither text_config.rope_parameters.rope_theta "
            "nor text_config.rope_theta."
        )
    if rope.get("mrope_interleaved") is False:
        raise BadInput("mrope_interleaved is false; the models interleave the three axes.")
    return rope


def _rope_scaling(rope: dict[str, Any]) -> tuple[tuple[str, Any], ...]:
    """Return the type of a scaled rope with its numbers; empty for a plain one."""
    kind = _without_synonyms(rope)["rope_type"]
    if kind == "default":
        return ()
    if kind not in ROPE_NUMBERS:
        raise BadInput(
            f"rope_type {kind!r:.40} is not supported; use default, {', '.join(ROPE_NUMBERS)}."
        )
    options = [name for name in ROPE_OPTIONS[kind] if rope.get(name) is not None]
    truncate = {name: bool(rope[name]) for name in options if name == "truncate"}
    named = [name for name in (*ROPE_NUMBERS[kind], *options) if name not in truncate]
    numbers = {name: _read_positive(rope, name) for name in named}
    return tuple({"rope_type": kind, **numbers, **truncate}.items())


def _require_section(config: dict[str, Any], name: str) -> dict[str, Any]:
    """Return a section of a ``config.json``; raise BadInput if it is none."""
    section = config.get(name)
    if not isinstance(section, dict):
        raise BadInput(
            f"config.json has no {name} object; it is not the config of a Qwen3-VL or Qwen3.5."
        )
    return section


LIMITS = dict.fromkeys(
    ("num_hidden_layers", "depth", "num_experts", "num_local_experts", "num_key_value_heads"), 2**12
)
"""The largest values of counts that multiply tensors: a damaged file must not ask for billions."""

LARGEST = 2**31 - 1
"""The largest value of every other whole number in a config."""


def _head_counts_and_size(text: dict[str, Any], family: Family) -> tuple[int, int, int]:
    """Return the number of query heads, of key/value heads, and the size of one head.

    Where these are left out, transformers has defaults: all the heads for null, and the size of a
    head of the family.
    """
    heads = _read_size(text, "num_attention_heads")
    kv_heads = heads
    if "num_key_value_heads" not in text or text["num_key_value_heads"] is not None:
        kv_heads = _read_size(text, "num_key_value_heads")
    if heads % kv_heads:
        raise BadInput(
            f"config.json: num_attention_heads {heads} is not a multiple of num_key_value_heads "
            f"{kv_heads}."
        )
    if family.head_dim is not None or text.get("head_dim") is not None:
        # The family's size, unless the text has its own.
        return heads, kv_heads, _read_size({"head_dim": family.head_dim, **text}, "head_dim")
    if (hidden := _read_size(text, "hidden_size")) % heads:
        raise BadInput(
            f"config.json: hidden_size {hidden} is not a multiple of num_attention_heads {heads}, "
            "and there is no head_dim."
        )
    return heads, kv_heads, hidden // heads


def _require_accepted(section: dict[str, Any], where: str, name: str, *accepted: Any) -> None:
    """Raise BadInput if a field is given, with another value than those that are accepted."""
    if name in section and section[name] not in accepted:
        raise BadInput(f"{where}.{name} is {section[name]!r:.40}; expected {accepted[0]!r}.")


def _require_same(section: dict[str, Any], name: str, other: str, where: str) -> None:
    """Raise BadInput if two names of one field have different values."""
    values = [section[key] for key in (name, other) if section.get(key) is not None]
    if len(values) > 1 and values[0] != values[1]:
        of_other = f"{where}{other}, another name of it,"
        raise _contradiction("config.json", {f"{where}{name}": values[0], of_other: values[1]})


def _contradiction(where: str, two: dict[str, Any]) -> BadInput:
    """Return the refusal of two fields, by their names, that mean one thing and differ."""
    said = ", and ".join(f"{name} is {value!r:.40}" for name, value in two.items())
    return BadInput(f"{where} contradicts itself: {said}. Leave one of them.")


def _read_size(section: dict[str, Any], name: str, *, most: int = LARGEST) -> int:
    """Return a number of things, 1 or more."""
    return _read_integer(section, name, least=1, most=most)


def _read_integer(
    section: dict[str, Any], name: str, *, least: int = 0, most: int = LARGEST
) -> int:
    value = section.get(name)
    most = min(most, LIMITS.get(name, LARGEST))
    # True is an instance of int, so the type itself is compared.
    if type(value) is not int or not least <= value <= most:
        raise BadInput(
            f"config.json: {name} is {value!r:.40}; a whole number from {least} to {most} is "
            "needed."
        )
    return value


def _read_integers(section: dict[str, Any], name: str, default: tuple[int, ...]) -> tuple[int, ...]:
    values = section.get(name)
    if values is None:
        return default
    if not isinstance(values, list | tuple) or any(type(n) is not int for n in values):
        raise BadInput(f"config.json: {name} is {values!r:.40}; whole numbers are needed.")
    return tuple(values)


def _read_number(
    section: dict[str, Any], name: str, default: float | None = None, *, least: float = -1e300
) -> float:
    value = section.get(name, default)
    if isinstance(value, bool) or not isinstance(value, int | float) or not abs(value) < 1e300:
        raise BadInput(f"config.json: {name} is {value!r:.40}; a number is needed.")
    if value < least:
        raise BadInput(f"config.json: {name} is {value}; at least {least} is needed.")
    return float(value)


def _read_positive(section: dict[str, Any], name: str, default: float | None = None) -> float:
    number = _read_number(section, name, default)
    if number <= 0:
        raise BadInput(f"config.json: {name} is {number}; it must be above 0.")
    return number
