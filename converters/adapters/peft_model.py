"""The effect of an adapter config, found by applying PEFT to a model on the meta device.

PEFT itself (`peft.get_peft_model`) decides which modules a name, a regular expression or
``all-linear`` matches, their ranks and scaling, and the keys of the file. It is applied to Hugging
Face's model, which on the meta device takes no memory. Only this module imports PEFT.
"""

from __future__ import annotations

import copy
import re
import warnings
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from mcore_qwen3vl.config import Architecture, read_config_file
from mcore_qwen3vl.converters.adapters.config import AdapterConfig
from mcore_qwen3vl.converters.storage.boxes import Shape
from mcore_qwen3vl.errors import BadInput
from mcore_qwen3vl.labels import ONE_SCORE, Labels

PREFIX = "base_model.model."
"""Prefix that PEFT adds to every name."""

HFConfig = str | Path | Mapping[str, Any]
"""A ``config.json``, the directory that holds one, or its parsed content."""

ADAPTED = re.compile(
    r"lm_head\.weight"
    r"|model\.language_model\.layers\.\d+\.(self_attn\.[qkvo]_proj\.weight"
    r"|mlp\.((gate|up|down)_proj\.weight|experts\.(gate_up|down)_proj|gate\.weight))"
    r"|model\.visual\.(blocks\.\d+\.(attn\.(qkv|proj)|mlp\.linear_fc[12])"
    r"|(merger|deepstack_merger_list\.\d+)\.linear_fc[12])\.weight"
)
"""The parameters that LoRA is supported on."""


@dataclass(frozen=True)
class Slot:
    """PEFT's description of the two factors of one parameter.

    Attributes:
        module: name of the model's module, without PEFT's wrappers.
        a_key, b_key: keys of A and B in the file.
        r: rank; for fused experts, the rank of each expert.
        scaling: s in ΔW = s · B · A.
        a_shape: (r, in), or (E*r, in) for fused experts, with the rows of an expert adjacent.
        b_shape: (out, r), or (out, r*E) for fused experts, with the columns of an expert E apart.
        base: shape of the parameter.
    """

    module: str
    a_key: str
    b_key: str
    r: int
    scaling: float
    a_shape: Shape
    b_shape: Shape
    base: Shape

    @property
    def experts(self) -> int:
        """Number of experts in the factors; 1 for a linear layer."""
        return self.a_shape[0] // self.r


@dataclass(frozen=True)
class Applied:
    """The result of applying a config to a model with PEFT.

    Attributes:
        slots: descriptions of the factors, by HF parameter, in the model's order.
        saved: shapes of the parameters that are stored whole, by HF parameter.
        matched: names of the modules that match ``target_modules`` by PEFT's own rule.
        spelled_out: ``target_modules`` as PEFT would store them, sorted, with ``all-linear``
            replaced by the names that it matches. None if they are a regular expression or absent.
    """

    slots: dict[str, Slot]
    saved: dict[str, Shape]
    modules: tuple[str, ...]
    parameters: tuple[str, ...]
    matched: tuple[str, ...]
    spelled_out: tuple[str, ...] | None


def apply(config: AdapterConfig, hf_config: HFConfig, *, linear_router: bool = False) -> Applied:
    """Apply the adapter's config to the model with PEFT, on the meta device.

    Args:
        hf_config: config of the model; without names of labels, a classifier has one label.
        linear_router: whether to accept a router that is named as in transformers 4.57, which
            existing files may have but PEFT refuses (see
            `AdapterConfig.with_router_as_parameter`).

    Raises:
        BadInput: PEFT is not installed or refuses the config; the config adapts something that is
            not supported here; or the model's config is not Qwen3-VL's.
    """
    try:
        import peft
    except ImportError:
        raise BadInput(
            "adapters need PEFT, which is not installed: pip install 'mcore-qwen3vl[lora]'."
        ) from None
    parsed = config_content(hf_config)
    if linear_router and Architecture.from_hf(parsed).is_moe:
        config = config.with_router_as_parameter()
    model = meta_model(parsed)
    if config.has_score:
        labels = len(labels_of(parsed))
        size = parsed["text_config"]["hidden_size"]
        model.score = torch.nn.Linear(size, labels, bias=False, device="meta")
    modules = tuple(name for name, _ in model.named_modules() if name)
    parameters = tuple(name for name, _ in model.named_parameters(remove_duplicate=False))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # what PEFT warns of is checked here, as an error
        try:
            lora = peft.LoraConfig(**_arguments(config, peft))
            wrapped = peft.get_peft_model(model, lora, low_cpu_mem_usage=True)
            stored = peft.get_peft_model_state_dict(wrapped, save_embedding_layers=False)
            matched = tuple(
                name
                for name in modules
                if wrapped.base_model._check_target_module_exists(lora, name)
            )
        except Exception as error:  # PEFT's checks raise exceptions of many classes
            text = " ".join(str(error).split())
            raise BadInput(
                f"PEFT does not apply this adapter's config to the model: {text:.600}{_hint(text)}"
            ) from None
    order = {name: at for at, name in enumerate(parameters)}
    slots = dict(sorted(_slots(wrapped), key=lambda named: order[named[0]]))
    keys = {key for slot in slots.values() for key in (slot.a_key, slot.b_key)}
    saved = {
        key.removeprefix(PREFIX): tuple(tensor.shape)
        for key, tensor in stored.items()
        if key not in keys
    }
    named = lora.target_modules
    spelled_out = None if named is None or isinstance(named, str) else tuple(sorted(named))
    return Applied(slots, saved, modules, parameters, matched, spelled_out)


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
    import transformers

    name = f"Qwen3VL{'Moe' if Architecture.from_hf(config).is_moe else ''}"
    unquantised = {key: value for key, value in config.items() if key != "quantization_config"}
    hf_config = getattr(transformers, f"{name}Config").from_dict(unquantised)
    with torch.device("meta"):
        return getattr(transformers, f"{name}ForConditionalGeneration")(hf_config)


def _arguments(config: AdapterConfig, peft: Any) -> dict[str, Any]:
    """Return the arguments of ``LoraConfig`` that decide what is adapted, if this PEFT has them."""
    content = config.to_dict()
    decided = {name: content[name] for name in content if name not in config.raw}
    decided |= {"base_model_name_or_path": None, "inference_mode": True, "init_lora_weights": True}
    decided["lora_dropout"] = 0.0  # dropout changes no factor; `AdapterConfig` checks its limits
    known = peft.LoraConfig.__dataclass_fields__
    return {name: value for name, value in decided.items() if name in known}


def lora_layers(wrapped: Any) -> Iterator[tuple[str, str, Any]]:
    """Yield path, Hugging Face parameter and layer of each of the LoRA layers in PEFT's model."""
    from peft.tuners.lora.layer import LoraLayer

    for path, layer in wrapped.named_modules():
        if isinstance(layer, LoraLayer):
            module = path.removeprefix(PREFIX).replace(".base_layer", "")
            yield path, f"{module}.{getattr(layer, 'parameter_name', 'weight')}", layer


def _slots(wrapped: Any) -> Iterator[tuple[str, Slot]]:
    for path, name, layer in lora_layers(wrapped):
        if not ADAPTED.fullmatch(name):
            raise BadInput(_unsupported(name))
        parameter = hasattr(layer, "parameter_name")  # PEFT's ParamWrapper
        base = layer.get_param() if parameter else layer.get_base_layer().weight
        slot = Slot(
            path.removeprefix(PREFIX).replace(".base_layer", ""),
            f"{path}.lora_A.weight",
            f"{path}.lora_B.weight",
            layer.r["default"],
            layer.scaling["default"],
            tuple(layer.lora_A["default"].weight.shape),
            tuple(layer.lora_B["default"].weight.shape),
            tuple(base.shape),
        )
        yield name, slot


def _unsupported(name: str) -> str:
    text = f"LoRA on {name} is not supported. "
    if name.endswith("patch_embed.proj.weight"):
        return text + "It is a convolution, which the target `proj` matches too: use `attn.proj`."
    if "embed" in name:
        return text + "To train an embedding, name its module in modules_to_save."
    return text + "Remove it from the targets."


def _hint(text: str) -> str:
    if "Qwen3VLMoeTextTopKRouter" in text or "'gate'" in text:
        return " The router is a parameter here: name mlp.gate.weight in target_parameters."
    if "Experts" in text:
        return (
            " Fused experts are parameters: name mlp.experts.gate_up_proj and "
            "mlp.experts.down_proj in target_parameters."
        )
    return ""
