"""Reading a Qwen3-VL ``config.json``: the only place that reads Hugging Face config fields.

Both forms are read: transformers 4.57 (the published checkpoints: ``rope_scaling`` and
``rope_theta``, ``num_experts``) and transformers 5 (``rope_parameters``, ``num_local_experts``).
This module imports neither torch nor megatron, so that conversion and inspection start fast.
"""

from __future__ import annotations

import re
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

from mcore_qwen3vl.errors import BadInput
from mcore_qwen3vl.files import read_object

ExpertLayout = Literal["published", "v5"]
"""How fused experts lie on disk: ``published`` is gate_up [E, H, 2I] and down [E, I, H]
(transformers 4.57), ``v5`` is gate_up [E, 2I, H] and down [E, H, I] (transformers 5)."""

TOKEN_IDS = ("image_token_id", "video_token_id", "vision_start_token_id", "vision_end_token_id")

DTYPES = ("bfloat16", "float16", "float32", "float64")

ALIASES = {"num_attention_heads": "num_heads", "num_hidden_layers": "depth"}
"""Other names that transformers takes in ``vision_config``."""

VISION_ACTIVATION = "gelu_pytorch_tanh"
VISION_ROPE_THETA = 10000.0

MODEL_TYPES = {"qwen3_vl": False, "qwen3_vl_moe": True, "cosmos3_omni": False}
"""Whether a ``model_type`` is MoE. Of Cosmos3 the reasoner is read, a dense Qwen3-VL."""

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
        *("tie_word_embeddings", "vocab_size", "max_position_embeddings"),
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


@dataclass(frozen=True)
class Architecture:
    """The shape of one Qwen3-VL model; fields are named as in HF ``Qwen3VL[Moe]Config``."""

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
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
    num_experts: int  # 0: dense
    num_experts_per_tok: int
    moe_intermediate_size: int
    router_aux_loss_coef: float
    moe_layers: tuple[bool, ...]  # one flag a layer, all False when dense
    expert_layout: ExpertLayout | None  # as declared; None: dense, or nothing declared

    @property
    def is_moe(self) -> bool:
        return self.num_experts > 0

    @property
    def mixed_layers(self) -> bool:
        """Whether some decoder layers are MoE and some are dense."""
        return any(self.moe_layers) and not all(self.moe_layers)

    @classmethod
    def from_hf(cls, source: str | Path | dict[str, Any]) -> Architecture:
        """Read a ``config.json``, the directory that holds one, or its parsed content.

        Raises:
            BadInput: the file is missing, is not JSON, is not Qwen3-VL, lacks a field, declares
                two expert layouts at once, or asks for something this model does not have.
        """
        config = source if isinstance(source, dict) else read_config_file(Path(source))
        return _architecture(config)

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


def read_config_file(path: Path) -> dict[str, Any]:
    """Return the parsed ``config.json`` at `path` (the file itself or its directory)."""
    where = "A Hugging Face checkpoint directory holds a config.json"
    return read_object(path, "config.json", where)


def _architecture(config: dict[str, Any]) -> Architecture:
    model_type = config.get("model_type")
    if not isinstance(model_type, str) or model_type not in MODEL_TYPES:
        what = "" if "vision_config" in config else ", a model without vision"
        raise BadInput(
            f"config.json has model_type {model_type!r:.40}{what}; this tool handles "
            f"{', '.join(MODEL_TYPES)} only. Name a whole Qwen3-VL checkpoint."
        )
    moe = MODEL_TYPES[model_type]
    text = _section(config, "text_config")
    if text.get("attention_bias"):
        raise BadInput("text_config.attention_bias is true; no Qwen3-VL model has one.")
    if text.get("hidden_act", "silu") != "silu":
        raise BadInput(f"text_config.hidden_act is {text['hidden_act']!r:.40}; expected 'silu'.")
    types = text.get("layer_types") or []
    if not isinstance(types, list) or any(kind != "full_attention" for kind in types):
        raise BadInput(f"text_config.layer_types is {types!r:.80}; expected full_attention in all.")
    rope = _rope(text)
    layers = _size(text, "num_hidden_layers")
    heads, kv_heads, head_dim = _heads(text, moe)
    axes = _integers(rope, "mrope_section", default=(24, 20, 20))
    if len(axes) != 3 or sum(axes) * 2 != head_dim or min(axes) < 0:
        raise BadInput(
            f"mrope_section is {list(axes)}: three numbers that add up to half of head_dim "
            f"{head_dim} are needed."
        )
    vocab_size, hidden_size = _size(text, "vocab_size"), _size(text, "hidden_size")
    vision = _vision(_section(config, "vision_config"))
    if vision.out_hidden_size != hidden_size:
        raise BadInput(
            f"config.json: out_hidden_size of vision_config is {vision.out_hidden_size}, and "
            f"hidden_size of text_config is {hidden_size}: the two must be equal."
        )
    tokens = {name: _integer(config, name) for name in TOKEN_IDS}
    for name, token in tokens.items():
        if token >= vocab_size:
            raise BadInput(
                f"config.json: {name} is {token}, and the vocab_size {vocab_size} of text_config "
                "leaves no row for it."
            )
    experts = _expert_count(text) if moe else 0
    return Architecture(
        vocab_size=vocab_size,
        hidden_size=hidden_size,
        intermediate_size=_size(text, "intermediate_size"),
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        head_dim=head_dim,
        rms_norm_eps=_positive(text, "rms_norm_eps", 1e-6),
        rope_theta=_positive(rope, "rope_theta"),
        rope_scaling=_rope_scaling(rope),
        mrope_section=(axes[0], axes[1], axes[2]),
        max_position_embeddings=_size(text, "max_position_embeddings"),
        initializer_range=_number(text, "initializer_range", 0.02, least=0),
        tie_word_embeddings=ties_embeddings(config),
        dtype=_dtype(config, text),
        image_token_id=tokens["image_token_id"],
        video_token_id=tokens["video_token_id"],
        vision_start_token_id=tokens["vision_start_token_id"],
        vision_end_token_id=tokens["vision_end_token_id"],
        vision=vision,
        num_experts=experts,
        num_experts_per_tok=_size(text, "num_experts_per_tok", most=experts) if moe else 0,
        moe_intermediate_size=_size(text, "moe_intermediate_size") if moe else 0,
        router_aux_loss_coef=_number(text, "router_aux_loss_coef", 0.001, least=0) if moe else 0.0,
        moe_layers=_moe_layers(text, layers) if moe else (False,) * layers,
        expert_layout=declared_expert_layout(config) if moe else None,
    )


def _dtype(config: dict[str, Any], text: dict[str, Any]) -> str:
    """Return the dtype of the weights, torch's name; the top level counts."""
    for where, section in (("", config), ("text_config.", text)):
        _require_same(section, "dtype", "torch_dtype", where)
    named = (level.get(name) for level in (config, text) for name in ("dtype", "torch_dtype"))
    dtype = next((name for name in named if name is not None), "bfloat16")
    if dtype not in DTYPES:
        raise BadInput(f"config.json: dtype is {dtype!r:.40}; expected {', '.join(DTYPES)}.")
    return str(dtype)


def _vision(vision: dict[str, Any]) -> VisionArchitecture:
    for alias, name in ALIASES.items():
        _require_same(vision, name, alias, "vision_config.")
    numbers = {
        name: _size(vision, name)
        for name in VisionArchitecture.__dataclass_fields__
        if name != "deepstack_visual_indexes"
    }
    if numbers["hidden_size"] % (4 * numbers["num_heads"]):
        raise BadInput(
            f"vision_config.hidden_size {numbers['hidden_size']} cannot be divided into num_heads "
            f"{numbers['num_heads']} heads whose size is a multiple of 4, as their rotary "
            "positions in two directions need."
        )
    if vision.get("hidden_act", VISION_ACTIVATION) != VISION_ACTIVATION:
        raise BadInput(
            f"vision_config.hidden_act is {vision['hidden_act']!r:.40}; "
            f"expected {VISION_ACTIVATION!r}."
        )
    rope = _section(vision, "rope_parameters") if vision.get("rope_parameters") else {}
    theta = rope.get("rope_theta", VISION_ROPE_THETA)
    if theta != VISION_ROPE_THETA:
        raise BadInput(
            f"vision_config.rope_parameters.rope_theta is {theta!r:.40}; "
            f"expected {VISION_ROPE_THETA}."
        )
    if rope.get("rope_type", "axial") not in ("axial", "default"):
        raise BadInput(
            f"vision_config.rope_parameters.rope_type is {rope['rope_type']!r:.40}; expected "
            "'axial'."
        )
    indexes = _integers(vision, "deepstack_visual_indexes", default=(8, 16, 24))
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
    ``num_experts`` (4.57).

    Raises:
        BadInput: the fields contradict each other.
    """
    text = _section(config, "text_config")
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
    counts = {_size(text, name) for name in names if name in text}
    if len(counts) != 1:
        raise BadInput(
            "text_config must give one expert count in num_experts or num_local_experts; "
            f"found {sorted(counts) or 'none'}."
        )
    return counts.pop()


def _moe_layers(text: dict[str, Any], layers: int) -> tuple[bool, ...]:
    """Return which layers are MoE, as HF ``Qwen3VLMoeTextDecoderLayer`` decides it.

    Every `decoder_sparse_step`-th layer is, unless ``mlp_only_layers`` lists it.
    """
    dense = _integers(text, "mlp_only_layers", default=())
    if any(not 0 <= i < layers for i in dense):
        raise BadInput(
            f"text_config.mlp_only_layers is {list(dense)}, but must name layers below "
            f"num_hidden_layers {layers}."
        )
    step = _size({"decoder_sparse_step": 1, **text}, "decoder_sparse_step")
    return tuple(i not in dense and (i + 1) % step == 0 for i in range(layers))


def rope_of(text: dict[str, Any]) -> dict[str, Any]:
    """Return all that a ``text_config`` says of its rope, as transformers 5 writes it.

    Raises:
        BadInput: two of its fields contradict each other.
    """
    names = [name for name in ("rope_parameters", "rope_scaling") if text.get(name)]
    theta = text.get("rope_theta")
    ropes = [{"rope_theta": theta, **_section(text, name)} for name in names]
    rope = ropes[0] if ropes else {"rope_theta": theta}
    if len(ropes) > 1 and _plain(rope) != _plain(ropes[1]):
        raise BadInput(
            f"text_config gives two ropes that differ, rope_parameters {ropes[0]!r:.300} and "
            f"rope_scaling {ropes[1]!r:.300}: transformers 5 would use the second alone. Leave one "
            "of them, with all of its fields."
        )
    if theta is not None and rope["rope_theta"] not in (None, theta):
        raise BadInput(
            f"text_config contradicts itself: rope_theta is {theta!r:.40}, and "
            f"{names[0]}.rope_theta is {rope['rope_theta']!r:.40}. Leave one of them."
        )
    kinds = {_plain_kind(rope[name]) for name in ("rope_type", "type") if rope.get(name)}
    if len(kinds) > 1:
        raise BadInput(
            f"text_config.{names[0]} contradicts itself: rope_type is {rope['rope_type']!r:.40}, "
            f"and type is {rope['type']!r:.40}. Leave one of them."
        )
    return rope


def _plain(rope: dict[str, Any]) -> dict[str, Any]:
    """Return a rope without what is said twice or left open."""
    kind = _plain_kind(rope.get("rope_type") or rope.get("type") or "default")
    return {k: v for k, v in rope.items() if v is not None and k != "type"} | {"rope_type": kind}


def _plain_kind(kind: Any) -> str:
    # Checkpoints that were saved before 4.57 called the same thing "mrope".
    return "default" if kind == "mrope" else str(kind)


def _rope(text: dict[str, Any]) -> dict[str, Any]:
    rope = rope_of(text)
    for place in (text, rope):
        if place.get("partial_rotary_factor") not in (None, 1):
            raise BadInput(
                f"partial_rotary_factor is {place['partial_rotary_factor']!r:.40}; Qwen3-VL "
                "rotates whole heads."
            )
    if rope["rope_theta"] is None:
        raise BadInput(
            "config.json gives no rotary base: neither text_config.rope_parameters.rope_theta "
            "nor text_config.rope_theta."
        )
    if rope.get("mrope_interleaved") is False:
        raise BadInput("mrope_interleaved is false; Qwen3-VL interleaves the three axes.")
    return rope


def _rope_scaling(rope: dict[str, Any]) -> tuple[tuple[str, Any], ...]:
    kind = _plain(rope)["rope_type"]
    if kind == "default":
        return ()
    if kind not in ROPE_NUMBERS:
        raise BadInput(
            f"rope_type {kind!r:.40} is not supported; use default, {', '.join(ROPE_NUMBERS)}."
        )
    options = [name for name in ROPE_OPTIONS[kind] if rope.get(name) is not None]
    truncate = {name: bool(rope[name]) for name in options if name == "truncate"}
    named = [name for name in (*ROPE_NUMBERS[kind], *options) if name not in truncate]
    numbers = {name: _positive(rope, name) for name in named}
    return tuple({"rope_type": kind, **numbers, **truncate}.items())


def _section(config: dict[str, Any], name: str) -> dict[str, Any]:
    section = config.get(name)
    if not isinstance(section, dict):
        raise BadInput(f"config.json has no {name} object; it is not a Qwen3-VL config.")
    return section


LIMITS = dict.fromkeys(
    ("num_hidden_layers", "depth", "num_experts", "num_local_experts", "num_key_value_heads"), 2**12
)
"""The largest values of counts that multiply tensors: a damaged file must not ask for billions."""

LARGEST = 2**31 - 1
"""The largest value of every other whole number in a config."""


def _heads(text: dict[str, Any], moe: bool) -> tuple[int, int, int]:
    """Return the number of query heads, of key/value heads, and the size of one head.

    Where these are left out, transformers has defaults: all the heads for null, 128 for the size of
    a dense model's heads, and for that of a MoE model the part of the hidden size.
    """
    heads = _size(text, "num_attention_heads")
    kv_heads = heads
    if "num_key_value_heads" not in text or text["num_key_value_heads"] is not None:
        kv_heads = _size(text, "num_key_value_heads")
    if heads % kv_heads:
        raise BadInput(
            f"config.json: num_attention_heads {heads} is not a multiple of num_key_value_heads "
            f"{kv_heads}."
        )
    if not moe or text.get("head_dim") is not None:
        return heads, kv_heads, _size({"head_dim": 128, **text}, "head_dim")
    if (hidden := _size(text, "hidden_size")) % heads:
        raise BadInput(
            f"config.json: hidden_size {hidden} is not a multiple of num_attention_heads {heads}, "
            "and there is no head_dim."
        )
    return heads, kv_heads, hidden // heads


def _require_same(section: dict[str, Any], name: str, other: str, where: str) -> None:
    """Raise BadInput if two names of one field have different values."""
    values = [section[key] for key in (name, other) if section.get(key) is not None]
    if len(values) > 1 and values[0] != values[1]:
        raise BadInput(
            f"config.json contradicts itself: {where}{name} is {values[0]!r:.40}, and "
            f"{where}{other}, another name of it, is {values[1]!r:.40}. Leave one of them."
        )


def _size(section: dict[str, Any], name: str, *, most: int = LARGEST) -> int:
    """Return a number of things, of which there is at least one."""
    return _integer(section, name, least=1, most=most)


def _integer(section: dict[str, Any], name: str, *, least: int = 0, most: int = LARGEST) -> int:
    value = section.get(name)
    most = min(most, LIMITS.get(name, LARGEST))
    if type(value) is not int or not least <= value <= most:
        raise BadInput(
            f"config.json: {name} is {value!r:.40}; a whole number from {least} to {most} is "
            "needed."
        )
    return value


def _integers(section: dict[str, Any], name: str, default: tuple[int, ...]) -> tuple[int, ...]:
    values = section.get(name)
    if values is None:
        return default
    if not isinstance(values, list | tuple) or any(type(n) is not int for n in values):
        raise BadInput(f"config.json: {name} is {values!r:.40}; whole numbers are needed.")
    return tuple(values)


def _number(
    section: dict[str, Any], name: str, default: float | None = None, *, least: float = -1e300
) -> float:
    value = section.get(name, default)
    if isinstance(value, bool) or not isinstance(value, int | float) or not abs(value) < 1e300:
        raise BadInput(f"config.json: {name} is {value!r:.40}; a number is needed.")
    if value < least:
        raise BadInput(f"config.json: {name} is {value}; at least {least} is needed.")
    return float(value)


def _positive(section: dict[str, Any], name: str, default: float | None = None) -> float:
    number = _number(section, name, default)
    if number <= 0:
        raise BadInput(f"config.json: {name} is {number}; it must be above 0.")
    return number
