"""Tiny checkpoints in the forms that are published, made by transformers' own classes."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import transformers
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import (
    Qwen3_5ForCausalLM,
    Qwen3_5ForConditionalGeneration,
    Qwen3_5MoeForCausalLM,
    Qwen3_5MoeForConditionalGeneration,
    Qwen3VLForConditionalGeneration,
    Qwen3VLModel,
    Qwen3VLMoeModel,
)
from transformers.modeling_layers import (
    GenericForSequenceClassification,
    GenericForTokenClassification,
)
from transformers.models.qwen3_vl.modeling_qwen3_vl import Qwen3VLPreTrainedModel
from transformers.models.qwen3_vl_moe.modeling_qwen3_vl_moe import Qwen3VLMoePreTrainedModel

from tests.converters.checkpoints import edit_config, one_by_one

Tensors = dict[str, Tensor]

BEFORE_THE_MOVE = {
    "^visual": "model.visual",
    r"^model(?!\.(language_model|visual))": "model.language_model",
}
"""``_checkpoint_conversion_mapping`` that transformers 4.52 has in its classes of Qwen2-VL."""


class Qwen3VLForEmbedding(Qwen3VLPreTrainedModel):
    """What the published Qwen3-VL-Embedding is: the base model under ``model.``."""

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.model = Qwen3VLModel(config)
        self.post_init()


class Qwen3VLForSequenceClassification(GenericForSequenceClassification, Qwen3VLPreTrainedModel):
    pass


class Qwen3VLMoeForSequenceClassification(
    GenericForSequenceClassification, Qwen3VLMoePreTrainedModel
):
    pass


class Qwen3VLForTokenClassification(GenericForTokenClassification, Qwen3VLPreTrainedModel):
    pass


def saved_as(model_class: Any, **config: Any) -> Callable[[Path, Path], None]:
    """Load the weights into a class and let it save them; a new head is filled at random."""

    def make(source: Path, target: Path) -> None:
        model = model_class.from_pretrained(source, **config)
        if (score := getattr(model, "score", None)) is not None and score.bias is not None:
            score.bias.data.normal_()
        model.save_pretrained(target)

    return make


def rewritten(change: Callable[[Tensors], Tensors], **config: Any) -> Callable[[Path, Path], None]:
    """Change the tensors and the config of a copy; see `edit_config`."""

    def make(source: Path, target: Path) -> None:
        shutil.copytree(source, target)
        tensors = change(load_file(target / "model.safetensors"))
        save_file(tensors, target / "model.safetensors", metadata={"format": "pt"})
        edit_config(target, **config)

    return make


def before_the_move(tensors: Tensors) -> Tensors:
    return {
        name.replace("model.language_model.", "model.").replace("model.visual.", "visual."): tensor
        for name, tensor in tensors.items()
    }


def as_cosmos(tensors: Tensors, attention: dict[str, str]) -> Tensors:
    """Rename as in Cosmos3's checkpoints: neither prefix, and `attention`'s names."""
    renamed = {}
    for name, tensor in tensors.items():
        for current, other in attention.items():
            name = name.replace(f".self_attn.{current}.", f".self_attn.{other}.")
        renamed[name.removeprefix("model.language_model.").removeprefix("model.visual.")] = tensor
    return renamed


def cosmos(record: str, **attention: str) -> FormCase:
    return FormCase(
        "dense-v5",
        rewritten(lambda tensors: as_cosmos(tensors, attention), model_type="cosmos3_omni"),
        {"names": record},
        "Cosmos3",
        getattr(transformers, "Cosmos3OmniForConditionalGeneration", None),  # newer than 5.10
    )


def with_copied_head(tensors: Tensors) -> Tensors:
    return tensors | {"lm_head.weight": tensors["model.language_model.embed_tokens.weight"].clone()}


def language_model_alone(source: Path, target: Path) -> None:
    """Write what a text-only release has: no tower, its section as config, and ``model.`` alone."""
    shutil.copytree(source, target)
    config = json.loads((source / "config.json").read_text())
    text = config["text_config"] | {"tie_word_embeddings": config["tie_word_embeddings"]}
    text["architectures"] = [
        config["architectures"][0].replace("ForConditionalGeneration", "ForCausalLM")
    ]
    (target / "config.json").write_text(json.dumps(text))
    tensors = {
        name.replace("model.language_model.", "model."): tensor
        for name, tensor in load_file(source / "model.safetensors").items()
        if "visual" not in name
    }
    save_file(tensors, target / "model.safetensors", metadata={"format": "pt"})


@dataclass(frozen=True)
class FormCase:
    """One published form.

    Attributes:
        source: case of `CASES` with the model in transformers' own form.
        make: ``make(source, target)`` writes it.
        record: what differs of the record from that of transformers' own form.
        says: in the notes of a conversion; None: it has no note.
        load: transformers' class to load it, and the arguments of the class; None: whatever it is,
            the class initialises a head for it.
    """

    source: str
    make: Callable[[Path, Path], None]
    record: dict[str, Any]
    says: str | None
    load: Any
    arguments: dict[str, Any] = field(default_factory=dict)


FORMS = {
    "embedding": FormCase(
        "dense-v5",
        saved_as(Qwen3VLForEmbedding),
        {"head": "none"},
        "headless model.*tie_word_embeddings",
        Qwen3VLForEmbedding,
    ),
    "base": FormCase(
        "dense-v5",
        saved_as(Qwen3VLModel),
        {"head": "none", "names": "base"},
        "headless model.* Qwen3VLModel",
        Qwen3VLModel,
    ),
    "base, sharded": FormCase(
        "dense-v5",
        lambda source, target: Qwen3VLModel.from_pretrained(source).save_pretrained(
            target, max_shard_size="300KB"
        ),
        {"head": "none", "names": "base"},
        "headless model",
        Qwen3VLModel,
    ),
    "base, tied": FormCase(
        "dense-tied", saved_as(Qwen3VLModel), {"names": "base"}, "Qwen3VLModel", Qwen3VLModel
    ),
    "base, MoE": FormCase(
        "moe-v5",
        saved_as(Qwen3VLMoeModel),
        {"head": "none", "names": "base"},
        "headless model",
        Qwen3VLMoeModel,
    ),
    "before the move": FormCase(
        "dense-v5",
        rewritten(before_the_move),
        {"names": "old"},
        "older transformers",
        Qwen3VLForConditionalGeneration,
        {"key_mapping": BEFORE_THE_MOVE},
    ),
    "before the move, published MoE": FormCase(
        "moe", rewritten(before_the_move), {"names": "old"}, "older transformers", None
    ),
    "head stored though tied": FormCase(
        "dense-tied",
        rewritten(with_copied_head),
        {"head": "tied copy"},
        "stored too",
        Qwen3VLForConditionalGeneration,
    ),
    "tied by the text's flag alone": FormCase(
        "dense-tied",
        rewritten(dict, tie_word_embeddings=None, text_config__tie_word_embeddings=True),
        {},
        None,
        None,  # transformers reads the top level only
    ),
    "sequence classifier": FormCase(
        "dense-v5",
        saved_as(Qwen3VLForSequenceClassification, num_labels=3),
        {"head": "score", "labels": 3},
        "score.weight",
        Qwen3VLForSequenceClassification,
    ),
    "reward model, MoE": FormCase(
        "moe-v5",
        saved_as(Qwen3VLMoeForSequenceClassification, num_labels=1),
        {"head": "score", "labels": 1},
        "score.weight",
        Qwen3VLMoeForSequenceClassification,
    ),
    "token classifier": FormCase(
        "dense-v5",
        saved_as(Qwen3VLForTokenClassification, num_labels=2),
        {"head": "score", "labels": 2, "bias": True},
        "score.weight",
        Qwen3VLForTokenClassification,
    ),
    "YaRN": FormCase("yarn-v5", rewritten(dict), {}, None, Qwen3VLForConditionalGeneration),
    "YaRN as published": FormCase(
        "yarn", rewritten(dict), {}, None, Qwen3VLForConditionalGeneration
    ),
    "Cosmos3": cosmos("cosmos3"),
    "Cosmos3, newer names": cosmos(
        "cosmos3, newer",
        q_proj="to_q",
        k_proj="to_k",
        v_proj="to_v",
        o_proj="to_out",
        q_norm="norm_q",
        k_norm="norm_k",
    ),
    "Qwen3.5": FormCase("hybrid", rewritten(dict), {}, None, Qwen3_5ForConditionalGeneration),
    "Qwen3.5, tied": FormCase(
        "hybrid-tied", rewritten(dict), {}, None, Qwen3_5ForConditionalGeneration
    ),
    "Qwen3.5 MoE": FormCase(
        "hybrid-moe", rewritten(dict), {}, None, Qwen3_5MoeForConditionalGeneration
    ),
    "Qwen3.5 MoE as transformers saves it": FormCase(
        "hybrid-moe-v5",
        rewritten(dict),
        {"split_experts": ["model.language_model."]},
        "lacks the MTP layer",
        Qwen3_5MoeForConditionalGeneration,
    ),
    "Qwen3.5 MoE, experts one by one": FormCase(
        "hybrid-moe",
        rewritten(one_by_one),
        {"split_experts": ["model.language_model.", "mtp."]},
        None,
        Qwen3_5MoeForConditionalGeneration,
    ),
    "Qwen3.5 MoE, experts of mtp one by one": FormCase(
        "hybrid-moe",
        rewritten(lambda tensors: one_by_one(tensors, "mtp.")),
        {"split_experts": ["mtp."]},
        None,
        Qwen3_5MoeForConditionalGeneration,
    ),
    "Qwen3.5's language model": FormCase(
        "hybrid", language_model_alone, {"names": "text"}, None, Qwen3_5ForCausalLM
    ),
    "Qwen3.5's language model, MoE": FormCase(
        "hybrid-moe", language_model_alone, {"names": "text"}, None, Qwen3_5MoeForCausalLM
    ),
    "another architecture": FormCase(
        "dense-v5",
        rewritten(dict, architectures=["MyAgentForConditionalGeneration"]),
        {},
        None,
        Qwen3VLForConditionalGeneration,
    ),
}


def record_of(folder: Path) -> dict[str, Any]:
    """The record of a form in an ``hf`` folder, read without our code."""
    file = folder / "checkpoint_form.json"
    return json.loads(file.read_text()) if file.exists() else {}
