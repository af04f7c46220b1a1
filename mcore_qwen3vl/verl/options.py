"""VERL's configuration: the options that this model reads, and the options refused by name.

VERL's ``model.lora`` is translated to an adapter of this package.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, get_args

from omegaconf import OmegaConf

from mcore_qwen3vl.config import Architecture
from mcore_qwen3vl.converters.adapters.config import ATTENTION, DELTA_NET, EXPERTS, MLP, ROUTER
from mcore_qwen3vl.errors import BadInput
from mcore_qwen3vl.model.transformer_config import Spec
from mcore_qwen3vl.runtime import cpu
from mcore_qwen3vl.settings.lora import LoraSettings
from mcore_qwen3vl.training.lora import LoraRun

OWN = "override_mcore_model_config"
"""VERL's dictionary for a model's own options."""

ROUTERS = r"decoder\.layers\.\d+\.mlp\.router\."


@dataclass(frozen=True)
class ModelOptions:
    """The options of this model, from ``megatron.override_mcore_model_config``.

    Those to freeze and train are values of training's ``--freeze`` and ``--trainable``; the others
    are those of :class:`mcore_qwen3vl.model.qwen3vl.Qwen3VLModel`.
    """

    spec: Spec  # default: te, or torch on the CPU
    freeze: tuple[str, ...] = ()
    trainable: tuple[str, ...] = ()
    recompute_vision: bool | None = None
    head_chunk: int | None = None

    @classmethod
    def from_config(cls, settings: Mapping[str, Any]) -> ModelOptions:
        """Read the options, and VERL's own ``moe_config.freeze_moe_router``.

        It raises BadInput if a key or the spec is not known.
        """
        options = as_plain_dict(settings)
        moe = as_plain_dict(options.pop("moe_config", None) or {})
        frozen = _as_tuple(options.pop("freeze", ()))
        if moe.pop("freeze_moe_router", False):
            frozen = (*frozen, ROUTERS)
        unknown = options.keys() - cls.__dataclass_fields__.keys()
        unknown |= {f"moe_config.{name}" for name in moe}
        if unknown:
            raise BadInput(
                f"megatron.{OWN} holds {', '.join(sorted(unknown))}, which this model does not "
                f"know. Its options are {', '.join(cls.__dataclass_fields__)} and "
                "moe_config.freeze_moe_router."
            )
        spec: Any = options.pop("spec", None) or ("torch" if cpu.is_installed() else "te")
        if spec not in get_args(Spec):
            raise BadInput(f"megatron.{OWN}.spec is {spec!r}; use torch or te.")
        trainable = _as_tuple(options.pop("trainable", ()))
        return cls(spec, freeze=frozen, trainable=trainable, **options)


def as_plain_dict(settings: Any) -> dict[str, Any]:
    """Copy VERL's dictionary, without OmegaConf's containers."""
    made = OmegaConf.to_container(settings) if OmegaConf.is_config(settings) else dict(settings)
    return {str(key): value for key, value in made.items()}


def _as_tuple(value: Any) -> tuple[str, ...]:
    """Return an option that may be one pattern, several, or None as a tuple."""
    return (value,) if isinstance(value, str) else tuple(value or ())


@dataclass(frozen=True)
class Configs:
    """The configs that VERL passes to an engine."""

    model: Any
    engine: Any
    optimizer: Any
    checkpoint: Any

    def find(self, path: str) -> Any:
        """Return the value of an option such as ``engine.qat.enable``; None: there is none."""
        config: Any = self
        for name in path.split("."):
            is_mapping = isinstance(config, Mapping)
            config = config.get(name) if is_mapping else getattr(config, name, None)
        return config


@dataclass(frozen=True)
class Refusal:
    """An option that is not supported."""

    path: str  # its place in `Configs`
    remedy: str
    wrong: Callable[[Any, Configs], Any] = lambda value, _: value  # whether its value is refused

    @property
    def option(self) -> str:
        """Its name in VERL's configuration, below ``actor``, ``ref`` or ``critic``."""
        first, _, rest = self.path.partition(".")
        theirs = {"engine": "megatron", "optimizer": "optim"}
        return f"{theirs.get(first, first)}.{rest}"


_FSDP = "it is an option of other engines, which VERL's Megatron engine would ignore: drop it."
_VALIDATED = "it was never run with this model: drop it."

REFUSALS = (
    Refusal("engine.qat.enable", "quantization-aware training needs Megatron-Bridge: drop it."),
    Refusal("engine.use_megatron_fsdp", "use use_distributed_optimizer."),
    Refusal("engine.dynamic_context_parallel", "VERL has it for text models only: drop it."),
    Refusal(
        "engine.use_dist_checkpointing",
        "VERL cannot load model and optimizer back from it: checkpoints hold the weights as "
        "Hugging Face has them, and load under any layout. Drop it.",
    ),
    Refusal("engine.vanilla_mbridge", "no mbridge is used here: drop it."),
    Refusal("engine.dtype", "use bfloat16.", lambda v, _: v not in ("bfloat16", "float32")),
    Refusal("model.mtp.enable", "this engine trains no MTP layers: drop it."),
    Refusal("model.lora_rank", "with Megatron the adapter's rank is model.lora.rank."),
    Refusal("model.lora_adapter_path", "with Megatron it is model.lora.adapter_path."),
    Refusal("model.use_liger", _FSDP),
    Refusal("model.tiled_mlp.enabled", _FSDP),
    Refusal("model.enable_activation_offload", _FSDP),
    Refusal(
        "model.override_config",
        "the model's shape is that of model.path alone: leave only attn_implementation.",
        lambda v, _: set(v or ()) - {"attn_implementation"},
    ),
    Refusal(
        "model.hf_config_path",
        "the config beside the weights is read: drop it.",
        lambda v, configs: v not in (None, configs.find("model.path")),
    ),
    Refusal("optimizer.optimizer", "use adam.", lambda v, _: v and v != "adam"),
    Refusal("checkpoint.async_save", _VALIDATED),
    Refusal("checkpoint.mbridge_config", "no mbridge is used here: drop it."),
)
"""The refusals that every configuration is checked for; for LoRA's see :func:`lora_run`."""


def check(configs: Configs) -> None:
    """Raise BadInput with each unsupported option and what to do, if there are any."""
    asked = (r for r in REFUSALS if r.wrong(configs.find(r.path), configs))
    _refuse_any([f"{refusal.option}: {refusal.remedy}" for refusal in asked])


def _refuse_any(wrong: list[str]) -> None:
    """Raise BadInput if there are sentences about options that are not supported."""
    if wrong:
        raise BadInput(
            "VERL's configuration asks for options that this engine does not support. "
            + " ".join(wrong)
        )


LORA_LINEARS = ("linear_qkv", "linear_proj", "linear_fc1", "linear_fc2")
"""VERL's default ``target_modules``, in Megatron's names: all linears but those of delta nets."""

LORA_TAKEN = ("type", "rank", "alpha", "dropout", "target_modules", "merge", "adapter_path")

LORA_DEFAULTS: dict[str, Any] = {
    "exclude_modules": [],
    "dropout_position": "pre",
    "lora_A_init_method": "xavier",
    "lora_B_init_method": "zero",
    "a2a_experimental": False,
    "dtype": None,
    "freeze_vision_model": True,
    "freeze_vision_projection": True,
    "freeze_language_model": True,
    "fully_sharded_loras": False,
}
"""Megatron-Bridge's other options in VERL's configuration, which must keep these values."""


def lora_run(
    settings: Mapping[str, Any], architecture: Architecture, source: str | Path, seed: int
) -> LoraRun | None:
    """Return the adapter that ``model.lora`` asks for; None if it has no rank and no path.

    `source` is the base checkpoint. The initial factors are the same under every layout.

    Raises:
        BadInput: options are not supported, and the message names each; or training would refuse
            the same values of ``--lora-*``.
    """
    start = settings.get("adapter_path")
    if not settings.get("rank") and not start:
        return None
    wrong = [
        f"model.lora.{name}: an option of Megatron-Bridge, which is not used here; leave it at "
        f"{LORA_DEFAULTS.get(name)!r}."
        for name, value in settings.items()
        if name not in LORA_TAKEN and value != LORA_DEFAULTS.get(name)
    ]
    if settings.get("type", "lora") != "lora":
        wrong.append("model.lora.type: use lora.")
    if not settings.get("merge"):
        wrong.append(
            "model.lora.merge: the rollout cannot take an adapter without its base; set it to "
            "True, which sends merged weights and does not change the weights that train."
        )
    _refuse_any(wrong)
    lora = LoraSettings(lora_init=start)
    if not start:
        names = settings.get("target_modules", LORA_LINEARS)
        lora = LoraSettings(
            lora_rank=settings["rank"],
            lora_target=tuple(_targets_for_peft(names, architecture)),
            lora_alpha=settings.get("alpha", 32),
            lora_dropout=settings.get("dropout", 0.0),
        )
    base = str(source)
    return LoraRun(lora, architecture, base, base=base, scored_by=None, seed=seed)


def _targets_for_peft(names: Sequence[str], architecture: Architecture) -> list[str]:
    """Translate Megatron's names to PEFT's; other names, such as PEFT's own, stay as they are."""
    shared = architecture.shared_expert_intermediate_size
    dense, moe = shared or not all(architecture.moe_layers), any(architecture.moe_layers)
    query, key, value, output = ATTENTION
    gate, up, down = MLP
    meant = {
        "linear_qkv": [query, key, value],
        "linear_proj": [output],
        "in_proj": [*DELTA_NET[:-1]] if any(architecture.delta_net_layers) else ["in_proj"],
        "linear_fc1": [*([gate, up] if dense else []), *([EXPERTS[0]] if moe else [])],
        "linear_fc2": [*([down] if dense else []), *([EXPERTS[1]] if moe else [])],
        "router": [ROUTER],
    }
    return [peft for name in names for peft in meant.get(name, [name])]
