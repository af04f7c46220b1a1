"""``adapter_config.json``: PEFT's ``LoraConfig``, read and written without PEFT.

Fields that decide which factors there are and how they scale are attributes of `AdapterConfig`;
every other field is kept as it is. A field that asks for an unsupported feature is refused by name.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any

from mcore_qwen3vl.errors import BadInput
from mcore_qwen3vl.files import read_object
from mcore_qwen3vl.unused import Fields, Unused

FILE = "adapter_config.json"

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
"""Fields that must be absent or false, and the feature that each asks for."""

_OTHERS = Fields(
    FILE,
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
        content = read_object(path, FILE, f"A PEFT adapter is a directory with {FILE} in it")
        return cls.from_dict(content, str(path / FILE if path.is_dir() else path))

    @classmethod
    def from_dict(cls, content: Mapping[str, Any], where: str = FILE) -> AdapterConfig:
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

    def require_supported(self, where: str = FILE) -> None:
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
            rank_pattern={_router_pattern(key): rank for key, rank in ranks.items()},
            alpha_pattern={_router_pattern(key): alpha for key, alpha in alphas.items()},
        )

    def to_dict(self) -> dict[str, Any]:
        """Return the fields of the file, ready for JSON."""
        own = {name: _plain(getattr(self, name)) for name in _FIELDS}
        return {**REST, **self.raw, **own}

    def to_json(self) -> str:
        """Return the content of the file, formatted as PEFT does."""
        return json.dumps(self.to_dict(), indent=2, sort_keys=True)


def _plain(value: Any) -> Any:
    if isinstance(value, tuple):
        return list(value)
    return dict(value) if isinstance(value, Mapping) else value


def _number(value: Any, low: float, high: float) -> bool:
    return type(value) in (int, float) and low <= value <= high


def _rank(value: Any) -> bool:
    return type(value) is int and 1 <= value <= MOST


def _pattern(value: Any, good: Callable[[Any], bool]) -> bool:
    return value is None or (isinstance(value, dict) and all(map(good, value.values())))


def _layers(value: Any) -> bool:
    numbers = value if isinstance(value, list) else [value]
    return value is None or all(type(n) is int and n >= 0 for n in numbers)


def _names(value: Any) -> bool:
    listed = isinstance(value, list) and all(isinstance(name, str) and name for name in value)
    return value is None or listed


def _selection(value: Any) -> bool:
    return isinstance(value, str) or _names(value)


def _alpha(value: Any) -> bool:
    return _number(value, -1e6, 1e6)


_FIELDS: dict[str, Callable[[Any], bool]] = {
    "r": _rank,
    "lora_alpha": _alpha,
    "lora_dropout": lambda value: _number(value, 0, 1),
    "use_rslora": lambda value: isinstance(value, bool),
    "target_modules": _selection,
    "target_parameters": _names,
    "rank_pattern": lambda value: _pattern(value, _rank),
    "alpha_pattern": lambda value: _pattern(value, _alpha),
    "exclude_modules": _selection,
    "layers_to_transform": _layers,
    "layers_pattern": _selection,
    "modules_to_save": _names,
    "ensure_weight_tying": lambda value: isinstance(value, bool),
}
"""The fields that are attributes of `AdapterConfig`, with a check of each one's value in a file."""

assert [*_FIELDS, "raw"] == [each.name for each in fields(AdapterConfig)]


def _is_router(name: object) -> bool:
    return isinstance(name, str) and (name == "gate" or name.endswith(".gate"))


def _spelled_out(name: str) -> str:
    return "mlp.gate" if name == "gate" else name


def _router_pattern(key: str) -> str:
    return f"{_spelled_out(key)}.weight" if _is_router(key) else key
