"""What an ``adapter_config.json`` says, and the parameters that it adapts.

The file is PEFT's ``LoraConfig``, read and written without PEFT. Fields that decide which factors
there are and how they scale are attributes of `AdapterConfig`; every other field is kept as it is.
A field that asks for an unsupported feature is refused by name.

PEFT itself (`peft.get_peft_model`) decides which modules a name, a regular expression or
``all-linear`` matches, their ranks and scaling, and the keys of the file. It is applied to Hugging
Face's model, which on the meta device takes no memory. Only this module imports PEFT.
"""

from __future__ import annotations

import copy
import json
import re
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any, Literal, NamedTuple, get_args

from mcore_qwen3vl.config import Architecture, family_of, read_config_file, text_section
from mcore_qwen3vl.converters.identify import ADAPTER_CONFIG
from mcore_qwen3vl.converters.mapping import forms
from mcore_qwen3vl.converters.storage.boxes import Shape
from mcore_qwen3vl.errors import BadInput
from mcore_qwen3vl.hf_kernels import without_gpu_kernels
from mcore_qwen3vl.json_and_yaml import read_object
from mcore_qwen3vl.labels import ONE_SCORE, Labels
from mcore_qwen3vl.time_limit import time_limit
from mcore_qwen3vl.unused.fields import Fields, Unused

REST = {
    "peft_type": "LORA",
    "task_type": None,
    "base_model_name_or_path": None,
    "bias": "none",
    "fan_in_fan_out": False,
    "inference_mode": True,
    "init_lora_weights": True,
}
"""Other fields of a config that was not read from a file; PEFT has defaults for the rest."""

UNSUPPORTED = {
    "use_dora": "DoRA",
    "lora_bias": "a bias in lora_B",
    "use_qalora": "QALoRA",
    "layer_replication": "layer replication",
    "trainable_token_indices": "trainable tokens",
    "megatron_config": "PEFT's own Megatron layers",
    "alora_invocation_tokens": "activated LoRA",
    "use_bdlora": "block-diagonal LoRA",
    "arrow_config": "Arrow routing",
    "kasa_config": "KaSA",
    "velora_config": "VeLoRA",
    "monteclora_config": "MonteCLoRA",
}
"""Fields that must be absent or false, each with the feature it asks for."""

_OTHERS = Fields(
    ADAPTER_CONFIG,
    used=("peft_type", "bias", "init_lora_weights", "base_model_name_or_path", *UNSUPPORTED),
    inert=(
        *("task_type", "auto_mapping", "peft_version", "revision", "inference_mode"),
        *("runtime_config", "megatron_core", "qalora_group_size"),
        # How the factors began, once they are trained.
        *("loftq_config", "eva_config", "corda_config", "lora_ga_config"),
    ),
    without_effect={"fan_in_fan_out": (False,)},
    reasons={"fan_in_fan_out": "no adapted weight is stored transposed"},
)
"""The fields of ``LoraConfig`` that are no attributes of `AdapterConfig`."""

INITS = (True, False, "gaussian", "orthogonal", "eva")
"""Values of ``init_lora_weights`` that leave the base weights alone; PiSSA and others do not."""

SCORE = "score"
"""The module of a classifier's head, which PEFT trains whole."""

MOST = 2**20
"""Largest accepted rank."""

Names = tuple[str, ...]


@dataclass(frozen=True)
class AdapterConfig:
    """A LoRA configuration; fields and defaults are those of PEFT's ``LoraConfig``.

    Attributes:
        r: rank; for fused experts, the rank of each expert.
        target_modules: names of modules or ends of names, or a regular expression, or
            ``all-linear``.
        target_parameters: names of parameters or ends of names, for fused experts and the router.
        rank_pattern, alpha_pattern: other ranks and alphas for names that match a key.
        raw: every other field of the file, unchanged.
    """

    r: int = 8
    lora_alpha: float = 8
    lora_dropout: float = 0.0
    use_rslora: bool = False
    target_modules: str | Names | None = None
    target_parameters: Names | None = None
    rank_pattern: Mapping[str, int] = field(default_factory=dict)
    alpha_pattern: Mapping[str, float] = field(default_factory=dict)
    exclude_modules: str | Names | None = None
    layers_to_transform: int | tuple[int, ...] | None = None
    layers_pattern: str | Names | None = None
    modules_to_save: Names | None = None
    ensure_weight_tying: bool = False
    raw: Mapping[str, Any] = field(default_factory=dict)

    @classmethod
    def from_file(cls, path: str | Path) -> AdapterConfig:
        """Read an ``adapter_config.json``, or the directory that holds one.

        Raises:
            BadInput: the file cannot be read, a field has an invalid value, or the config asks
                for something that is not supported.
        """
        path = Path(path)
        content = read_object(
            path, ADAPTER_CONFIG, f"A PEFT adapter is a directory with {ADAPTER_CONFIG} in it"
        )
        return cls.from_dict(content, str(path / ADAPTER_CONFIG if path.is_dir() else path))

    @classmethod
    def from_dict(cls, content: Mapping[str, Any], where: str = ADAPTER_CONFIG) -> AdapterConfig:
        """Check the parsed content of an ``adapter_config.json``; see `from_file`."""
        if (kind := content.get("peft_type")) != "LORA":
            raise BadInput(f"{where} has peft_type {kind!r:.40}; only LORA adapters are handled.")
        known = {name: content[name] for name in _FIELDS if name in content}
        for name, value in known.items():
            if not _FIELDS[name](value):
                raise BadInput(f"{where}: {name} is {value!r:.80}, which PEFT never writes there.")
        raw = {name: value for name, value in content.items() if name not in _FIELDS}
        frozen: dict[str, Any] = {
            n: tuple(v) if isinstance(v, list) else v for n, v in known.items()
        }
        config = cls(**frozen, raw=raw)
        config.require_supported(where)
        return config

    def require_supported(self, where: str = ADAPTER_CONFIG) -> None:
        """Raise BadInput if the config asks for something that is not supported."""
        for name, what in UNSUPPORTED.items():
            if self.raw.get(name) not in (None, False):
                raise BadInput(f"{where} asks for {what} ({name}), which is not supported.")
        if self.raw.get("bias", "none") != "none":
            raise BadInput(
                f"{where} trains biases (bias: {self.raw['bias']!r:.20}): not supported."
            )
        if (init := self.raw.get("init_lora_weights", True)) not in INITS:
            raise BadInput(
                f"{where} has init_lora_weights {init!r:.40}, which changes the base weights too: "
                "not supported. PEFT turns such an adapter into a plain one: save it with "
                "path_initial_model_for_weight_conversion."
            )
        if self.lora_dropout and self.target_parameters:
            raise BadInput(
                f"{where} has lora_dropout {self.lora_dropout:g} and target_parameters; PEFT has "
                "no dropout for parameters such as fused experts. Set lora_dropout to 0."
            )

    @property
    def unused(self) -> list[Unused]:
        """The fields of the file that nothing uses; those without effect are not among them."""
        return _OTHERS.unused(self.raw)

    @property
    def has_score(self) -> bool:
        """Whether the adapter has the head of a classifier or a reward model."""
        return SCORE in (self.modules_to_save or ())

    # The router is a linear layer in transformers 4.57 and a parameter in transformers 5. Adapters
    # made with 4.57 name it in `target_modules` (`all-linear` includes it), which PEFT refuses with
    # transformers 5. Keys and shapes of its factors are the same in both.

    @property
    def names_a_linear_router(self) -> bool:
        """Whether the config of a MoE model's adapter names the router in ``target_modules``."""
        return isinstance(self.target_modules, tuple) and any(map(_is_router, self.target_modules))

    def with_router_as_parameter(self) -> AdapterConfig:
        """Return the config for transformers 5, or itself if it needs no change.

        A config that selects layers or excludes modules is returned unchanged, since PEFT does
        neither for parameters.
        """
        selects = self.exclude_modules or self.layers_to_transform is not None
        if not self.names_a_linear_router or selects:
            return self
        modules = self.target_modules or ()
        routers = {f"{_spelled_out(name)}.weight" for name in modules if _is_router(name)}
        ranks, alphas = self.rank_pattern or {}, self.alpha_pattern or {}
        return replace(
            self,
            target_modules=tuple(name for name in modules if not _is_router(name)),
            target_parameters=(*(self.target_parameters or ()), *sorted(routers)),
            rank_pattern={_as_parameter_pattern(key): rank for key, rank in ranks.items()},
            alpha_pattern={_as_parameter_pattern(key): alpha for key, alpha in alphas.items()},
        )

    def to_dict(self) -> dict[str, Any]:
        """Return the fields of the file, ready for JSON."""
        known = {name: _as_json(getattr(self, name)) for name in _FIELDS}
        return {**REST, **self.raw, **known}

    def to_json(self) -> str:
        """Return the content of the file, formatted as PEFT does."""
        return json.dumps(self.to_dict(), indent=2, sort_keys=True)


def _as_json(value: Any) -> Any:
    """Return a field's value with JSON's lists and objects in place of tuples and mappings."""
    if isinstance(value, tuple):
        return list(value)
    return dict(value) if isinstance(value, Mapping) else value


def _is_number_within(value: Any, low: float, high: float) -> bool:
    return type(value) in (int, float) and low <= value <= high


def _is_rank(value: Any) -> bool:
    return type(value) is int and 1 <= value <= MOST


def _is_pattern(value: Any, good: Callable[[Any], bool]) -> bool:
    return value is None or (isinstance(value, dict) and all(map(good, value.values())))


def _are_layers(value: Any) -> bool:
    numbers = value if isinstance(value, list) else [value]
    return value is None or all(type(n) is int and n >= 0 for n in numbers)


def _are_names(value: Any) -> bool:
    listed = isinstance(value, list) and all(isinstance(name, str) and name for name in value)
    return value is None or listed


def _is_selection(value: Any) -> bool:
    return isinstance(value, str) or _are_names(value)


def _is_alpha(value: Any) -> bool:
    return _is_number_within(value, -1e6, 1e6)


_FIELDS: dict[str, Callable[[Any], bool]] = {
    "r": _is_rank,
    "lora_alpha": _is_alpha,
    "lora_dropout": lambda value: _is_number_within(value, 0, 1),
    "use_rslora": lambda value: isinstance(value, bool),
    "target_modules": _is_selection,
    "target_parameters": _are_names,
    "rank_pattern": lambda value: _is_pattern(value, _is_rank),
    "alpha_pattern": lambda value: _is_pattern(value, _is_alpha),
    "exclude_modules": _is_selection,
    "layers_to_transform": _are_layers,
    "layers_pattern": _is_selection,
    "modules_to_save": _are_names,
    "ensure_weight_tying": lambda value: isinstance(value, bool),
}
"""The fields that are attributes of `AdapterConfig`, with a check of each one's value in a file.

PEFT's ``LoraConfig`` checks no types, and drops the fields that it does not know.
"""

assert [*_FIELDS, "raw"] == [each.name for each in fields(AdapterConfig)]


def _is_router(name: object) -> bool:
    return isinstance(name, str) and (name == "gate" or name.endswith(".gate"))


def _spelled_out(name: str) -> str:
    return "mlp.gate" if name == "gate" else name


def _as_parameter_pattern(key: str) -> str:
    return f"{_spelled_out(key)}.weight" if _is_router(key) else key


Preset = Literal["language", "language-aligner", "all"]
"""``language``: attention and MLPs (or experts) of the decoder; ``language-aligner``: also the
mergers between vision and language; ``all``: also the blocks of the vision tower."""

# Every name is long enough to match the same modules under any PEFT: ``proj`` would match the patch
# embedding too, and ``linear_fc1`` both the blocks of the vision tower and its mergers.
ATTENTION = ("q_proj", "k_proj", "v_proj", "o_proj")
DELTA_NET = ("in_proj_qkv", "in_proj_z", "in_proj_b", "in_proj_a", "out_proj")
MLP = ("gate_proj", "up_proj", "down_proj")
EXPERTS = ("mlp.experts.gate_up_proj", "mlp.experts.down_proj")
ROUTER = "mlp.gate.weight"
MERGERS = ("merger.linear_fc1", "merger.linear_fc2")
VISION = ("attn.qkv", "attn.proj", "mlp.linear_fc1", "mlp.linear_fc2")


class Targets(NamedTuple):
    """``target_modules`` and ``target_parameters`` of a PEFT config."""

    modules: tuple[str, ...]
    parameters: tuple[str, ...] | None


def preset_targets(name: str, architecture: Architecture) -> Targets:
    """Return PEFT's names for a preset.

    The names leave out parts that the model lacks, since a target without a match is an error.
    """
    if name not in get_args(Preset):
        raise BadInput(f"{name!r} is not one of {', '.join(get_args(Preset))}.")
    modules = [*ATTENTION, *(DELTA_NET if any(architecture.delta_net_layers) else ())]
    if architecture.shared_expert_intermediate_size or not all(architecture.moe_layers):
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


PREFIX = "base_model.model."
"""Prefix that PEFT adds to every name."""

HFConfig = str | Path | Mapping[str, Any]
"""A ``config.json``, the directory that holds one, or its parsed content."""

ADAPTED = re.compile(
    r"lm_head\.weight"
    r"|model\.language_model\.layers\.\d+\.(self_attn\.[qkvo]_proj\.weight"
    r"|linear_attn\.(in_proj_(qkv|z|b|a)|out_proj)\.weight"
    r"|mlp\.((shared_expert\.)?(gate|up|down)_proj\.weight|experts\.(gate_up|down)_proj|gate\.weight))"
    r"|model\.visual\.(blocks\.\d+\.(attn\.(qkv|proj)|mlp\.linear_fc[12])"
    r"|(merger|deepstack_merger_list\.\d+)\.linear_fc[12])\.weight"
)
"""The parameters that LoRA is supported on."""


@dataclass(frozen=True)
class Slot:
    """PEFT's description of the two factors of one parameter.

    Attributes:
        a_key, b_key: keys of A and B in the file.
        r: rank; for fused experts, the rank of each expert.
        scaling: s in ΔW = s · B · A.
        a_shape, b_shape: shapes of A and B in the canonical roles (see `adapter`).
        base: shape of the parameter.
    """

    a_key: str
    b_key: str
    r: int
    scaling: float
    a_shape: Shape
    b_shape: Shape
    base: Shape


@dataclass(frozen=True)
class Applied:
    """The result of applying a config to a model with PEFT.

    Attributes:
        names: how PEFT and transformers call the model's parameters. In `slots` and `saved` they
            are called as the mapping calls them, and elsewhere as PEFT does.
        slots: descriptions of the factors, by HF parameter, in the model's order.
        saved: shapes of the parameters that are stored whole, by HF parameter.
        matched: names of the modules that match ``target_modules`` by PEFT's own rule.
        spelled_out: ``target_modules`` as PEFT would store them, sorted, with ``all-linear``
            replaced by the names that it matches. None if they are a regular expression or absent.
    """

    names: forms.Names
    slots: dict[str, Slot]
    saved: dict[str, Shape]
    modules: tuple[str, ...]
    parameters: tuple[str, ...]
    matched: tuple[str, ...]
    spelled_out: tuple[str, ...] | None

    def saved_keys(self) -> dict[str, str]:
        """Return the parameters that are stored whole, by their keys in the file."""
        return {self.key_of(name): name for name in self.saved}

    def key_of(self, name: str) -> str:
        """Return the key in the file of the parameter `name`, stored whole."""
        return f"{PREFIX}{self.names.stored_name(name)}"


def apply_with_peft(
    config: AdapterConfig, hf_config: HFConfig, *, linear_router: bool = False
) -> Applied:
    """Apply the adapter's config to the model with PEFT, on the meta device.

    Args:
        hf_config: config of the model; without names of labels, a classifier has one label.
        linear_router: whether to accept a router named as in transformers 4.57. Existing files may
            have this name, but PEFT refuses it (see `AdapterConfig.with_router_as_parameter`).

    Raises:
        BadInput: PEFT is not installed or refuses the config; the config adapts something that is
            not supported here; or the model's config is not Qwen3-VL's.
    """
    try:
        import peft
    except ImportError as error:
        missing = "which is not installed: pip install 'mcore-qwen3vl[lora]'"
        raise BadInput(
            f"adapters need PEFT, {missing if error.name == 'peft' else f'which fails: {error}'}."
        ) from None
    import torch  # not above: without torch, `train` answers a typo at once

    parsed = config_content(hf_config)
    if linear_router and Architecture.from_hf(parsed).is_moe:
        config = config.with_router_as_parameter()
    model = meta_model(parsed)
    if config.has_score:
        labels = len(labels_of(parsed))
        size = text_section(parsed)["hidden_size"]
        model.score = torch.nn.Linear(size, labels, bias=False, device="meta")
    modules = tuple(name for name, _ in model.named_modules() if name)
    parameters = tuple(name for name, _ in model.named_parameters(remove_duplicate=False))
    with warnings.catch_warnings(), time_limit(_PEFT_SECONDS, _slow_patterns, of_processor=True):
        warnings.simplefilter("ignore")  # what PEFT warns of is checked here, as an error
        try:
            lora = peft.LoraConfig(**_lora_config_arguments(config, peft))
            wrapped = peft.get_peft_model(model, lora, low_cpu_mem_usage=True)
            stored = peft.get_peft_model_state_dict(wrapped, save_embedding_layers=False)
            matched = tuple(
                name
                for name in modules
                if wrapped.base_model._check_target_module_exists(lora, name)
            )
        except BadInput:  # the time is up, or a parameter is not supported
            raise
        except Exception as error:  # PEFT's checks raise exceptions of many classes
            text = " ".join(str(error).split())
            raise BadInput(
                f"PEFT does not apply this adapter's config to the model: {text:.600}"
                f"{_target_parameters_hint(text)}"
            ) from None
    names = forms.names_in_transformers(has_vision=family_of(parsed).has_vision)
    order = {names.current_name(name): at for at, name in enumerate(parameters)}
    slots = dict(sorted(_slots(wrapped, names), key=lambda named: order[named[0]]))
    keys = {key for slot in slots.values() for key in (slot.a_key, slot.b_key)}
    saved = {
        names.current_name(key.removeprefix(PREFIX)): tuple(tensor.shape)
        for key, tensor in stored.items()
        if key not in keys
    }
    named = lora.target_modules
    spelled_out = None if named is None or isinstance(named, str) else tuple(sorted(named))
    return Applied(names, slots, saved, modules, parameters, matched, spelled_out)


_PEFT_SECONDS = 30.0
"""Processor time for PEFT to apply a config; the largest models take a few seconds."""


def _slow_patterns() -> BadInput:
    return BadInput(
        f"PEFT is still applying this adapter's config to the model after {_PEFT_SECONDS:g} s of "
        "processor time, so a pattern in it may never end: write target_modules, exclude_modules, "
        "rank_pattern and alpha_pattern as plain names of modules."
    )


def labels_of(config: Mapping[str, Any]) -> Labels:
    """Return the labels that a ``config.json`` gives an adapter's head, or else one score."""
    return Labels.of_config(config) or ONE_SCORE


def config_content(hf_config: HFConfig) -> dict[str, Any]:
    """Return a copy of the parsed ``config.json``, after checking that it is Qwen3-VL's."""
    parsed = hf_config if isinstance(hf_config, Mapping) else read_config_file(Path(hf_config))
    Architecture.from_hf(dict(parsed))
    return copy.deepcopy(dict(parsed))  # transformers modifies the config that it is given


def meta_model(config: dict[str, Any]) -> Any:
    """Build Hugging Face's model of a ``config.json`` on the meta device."""
    import torch
    import transformers

    family = family_of(config)
    unquantised = {key: value for key, value in config.items() if key != "quantization_config"}
    hf_config = getattr(transformers, family.config_class).from_dict(unquantised)
    with torch.device("meta"), without_gpu_kernels():
        return getattr(transformers, family.model_class)(hf_config)


def _lora_config_arguments(config: AdapterConfig, peft: Any) -> dict[str, Any]:
    """Return the arguments of ``LoraConfig`` that decide what is adapted, if this PEFT has them."""
    content = config.to_dict()
    decided = {name: content[name] for name in content if name not in config.raw}
    decided |= {"base_model_name_or_path": None, "inference_mode": True, "init_lora_weights": True}
    decided["lora_dropout"] = 0.0  # dropout changes no factor; `AdapterConfig` checks its limits
    known = peft.LoraConfig.__dataclass_fields__
    return {name: value for name, value in decided.items() if name in known}


def lora_layers(wrapped: Any, names: forms.Names) -> Iterator[tuple[str, str, Any]]:
    """Yield path, Hugging Face parameter and layer of each of the LoRA layers in PEFT's model.

    `names` tells the mapping's names of parameters from the model's.
    """
    from peft.tuners.lora.layer import LoraLayer

    for path, layer in wrapped.named_modules():
        if isinstance(layer, LoraLayer):
            module = path.removeprefix(PREFIX).replace(".base_layer", "")
            name = f"{module}.{getattr(layer, 'parameter_name', 'weight')}"
            yield path, names.current_name(name), layer


def _slots(wrapped: Any, names: forms.Names) -> Iterator[tuple[str, Slot]]:
    """Yield name and slot of each adapted parameter; raise BadInput for one not supported."""
    for path, name, layer in lora_layers(wrapped, names):
        if not ADAPTED.fullmatch(name):
            raise _unsupported_error(name)
        parameter = hasattr(layer, "parameter_name")  # PEFT's ParamWrapper
        base = layer.get_param() if parameter else layer.get_base_layer().weight
        slot = Slot(
            f"{path}.lora_A.weight",
            f"{path}.lora_B.weight",
            layer.r["default"],
            layer.scaling["default"],
            tuple(layer.lora_A["default"].weight.shape),
            tuple(layer.lora_B["default"].weight.shape),
            tuple(base.shape),
        )
        yield name, slot


def _unsupported_error(name: str) -> BadInput:
    remedy = "Remove it from the targets."
    if name.endswith("patch_embed.proj.weight"):
        remedy = "It is a convolution, which the target `proj` matches too: use `attn.proj`."
    elif "embed" in name:
        remedy = "To train an embedding, name its module in modules_to_save."
    return BadInput(f"LoRA on {name} is not supported. {remedy}")


def _target_parameters_hint(text: str) -> str:
    """Return what to name in ``target_parameters`` if PEFT's message `text` asks for it, or ""."""
    if "TopKRouter" in text or "'gate'" in text:
        return " The router is a parameter here: name mlp.gate.weight in target_parameters."
    if "Experts" in text:
        return (
            " Fused experts are parameters: name mlp.experts.gate_up_proj and "
            "mlp.experts.down_proj in target_parameters."
        )
    return ""


def resolve_targets(config: AdapterConfig, hf_config: HFConfig) -> dict[str, Slot]:
    """Return the parameters that `config` adapts, by full Hugging Face name, in the model's order.

    Raises:
        BadInput: a name matches nothing, or something that PEFT would skip; LoRA on a match is not
            supported (embeddings, the patch embedding, norms); or PEFT refuses the config.
    """
    config.require_supported()
    applied = apply_with_peft(config, hf_config)
    for problem in unused_name_notes(config, applied):
        raise BadInput(problem)
    return applied.slots


def unused_name_notes(config: AdapterConfig, applied: Applied) -> Iterator[str]:
    """Yield a sentence for each name in the config without effect; PEFT warns of some at most."""
    parameters = [applied.names.stored_name(name) for name in applied.slots]
    adapted = [name.rpartition(".")[0] for name in parameters]
    for module in applied.matched:
        if module not in adapted:
            yield (
                f"target_modules match {module}, which PEFT skips: it is not a linear layer. Fused "
                "experts and the router are named in target_parameters."
            )
    if isinstance(config.target_modules, tuple):
        yield from _unmatched_name_notes("target_modules", config.target_modules, adapted, applied)
    yield from _unmatched_name_notes(
        "target_parameters", config.target_parameters or (), parameters, applied
    )
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
            if not _is_end_of_any(name, applied.modules):
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


def _unmatched_name_notes(
    field: str, names: Iterable[str], adapted: list[str], applied: Applied
) -> Iterator[str]:
    """Yield a sentence for each of `names` that ends no adapted name, with what it is instead."""
    for name in names:
        if _is_end_of_any(name, adapted):
            continue
        where = ""
        if field == "target_modules" and _is_end_of_any(name, applied.parameters):
            where = " It is a parameter: name it in target_parameters."
        elif field == "target_parameters" and _is_end_of_any(name, applied.modules):
            where = " It is a module: name it in target_modules, or add .weight."
        yield f"{field} names {name!r}, which matches nothing that PEFT can adapt.{where}"


def _is_end_of_any(name: str, names: Iterable[str]) -> bool:
    """Return whether `name` is one of `names` or the end of one after a dot, as in PEFT's lists."""
    return any(each == name or each.endswith(f".{name}") for each in names)
