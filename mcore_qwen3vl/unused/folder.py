"""The fields that are used of each file of a model's folder, and what in it nothing uses."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from mcore_qwen3vl.config import (
    ALIASES,
    ROPE_NUMBERS,
    ROPE_OPTIONS,
    Architecture,
    family_of,
    read_config_file,
    text_section,
)
from mcore_qwen3vl.converters.hf.companions import unused_files
from mcore_qwen3vl.converters.hf.hf_checkpoint import unread_files
from mcore_qwen3vl.converters.hf.quantized import unused_of_quantization
from mcore_qwen3vl.converters.identify import PathKind, identify
from mcore_qwen3vl.data.processor import unused_of_processor
from mcore_qwen3vl.json_and_yaml import read_object_or_empty
from mcore_qwen3vl.unused.fields import Fields, Unused

_METADATA = (
    *("model_type", "architectures", "transformers_version", "_name_or_path", "name_or_path"),
    *("return_dict", "output_hidden_states", "output_attentions", "use_cache"),
    *("_attn_implementation", "attn_implementation", "_experts_implementation"),
    *("_attn_implementation_internal", "_experts_implementation_internal", "_commit_hash"),
)
"""Fields of any section that tell where it came from, or how transformers is to compute."""

_DEFAULTS: dict[str, tuple[Any, ...]] = {
    **dict.fromkeys(
        (
            *("chunk_size_feed_forward", "min_length", "no_repeat_ngram_size"),
            *("diversity_penalty", "encoder_no_repeat_ngram_size"),
        ),
        (0,),
    ),
    **dict.fromkeys(("num_beams", "num_beam_groups", "num_return_sequences", "temperature"), (1,)),
    **dict.fromkeys(("top_p", "typical_p", "repetition_penalty", "length_penalty"), (1,)),
    **dict.fromkeys(("is_encoder_decoder", "is_decoder", "add_cross_attention"), (False,)),
    **dict.fromkeys(("tie_encoder_decoder", "torchscript", "use_bfloat16"), (False,)),
    **dict.fromkeys(("tf_legacy_loss", "do_sample", "early_stopping", "output_scores"), (False,)),
    **dict.fromkeys(("return_dict_in_generate", "remove_invalid_values"), (False,)),
    "max_length": (20,),
    "top_k": (50,),
    "pruned_heads": ({},),
    "id2label": ({"0": "LABEL_0", "1": "LABEL_1"},),
    "label2id": ({"LABEL_0": 0, "LABEL_1": 1},),
}
"""Fields that transformers before 5 wrote into every section, with the values of no effect."""

_QUANTIZATION = ("quantization_config", "compression_config")
_CODE = {"auto_map": "a checkpoint's code is never run"}

CONFIG = Fields(
    "config.json",
    used=(
        *("text_config", "vision_config", "image_token_id", "video_token_id", "dtype"),
        *("vision_start_token_id", "vision_end_token_id", "tie_word_embeddings", "torch_dtype"),
        *("id2label", "label2id", "problem_type", *_QUANTIZATION),
    ),
    inert=(*_METADATA, "bos_token_id"),
    without_effect={
        **{k: v for k, v in _DEFAULTS.items() if k not in ("id2label", "label2id")},
        "language_model_only": (False,),
    },
    reasons={**_CODE, "num_labels": "id2label names the labels"},
)
"""The fields of the top level; ``label2id`` follows from ``id2label``."""

TEXT = Fields(
    "text_config of config.json",
    used=(
        *("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "head_dim"),
        *("num_attention_heads", "num_key_value_heads", "rms_norm_eps", "initializer_range"),
        *("max_position_embeddings", "rope_theta", "rope_scaling", "rope_parameters"),
        *("attention_bias", "hidden_act", "layer_types", "partial_rotary_factor"),
        *("tie_word_embeddings", "eos_token_id", *_QUANTIZATION),
    ),
    inert=(*_METADATA, "bos_token_id"),
    without_effect={
        **_DEFAULTS,
        "attention_dropout": (0,),
        "use_sliding_window": (False,),
        "max_window_layers": (0,),
        "pretraining_tp": (1,),
        "mlp_bias": (False,),
        "output_router_logits": (False,),
        "norm_topk_prob": (True,),
        # A dense model has no use for these.
        "decoder_sparse_step": (1,),
        "mlp_only_layers": ([],),
        "num_experts": (0,),
        "mamba_ssm_dtype": ("float32",),
    },
    reasons={
        **_CODE,
        "attention_dropout": "train --attention-dropout, with the te spec, has it",
        "output_router_logits": "train --moe-aux-loss-coeff adds that loss",
        "norm_topk_prob": "the weights of a token's experts always add up to 1",
        "mamba_ssm_dtype": "the states of gated delta nets are float32",
        "pad_token_id": "the row of that token is trained as every other",
        "sliding_window": "every layer attends to all earlier tokens",
        "use_sliding_window": "every layer attends to all earlier tokens",
    },
)
"""The fields of a dense language model."""

EXPERTS = (
    *("num_experts", "num_local_experts", "num_experts_per_tok", "moe_intermediate_size"),
    *("router_aux_loss_coef", "decoder_sparse_step", "mlp_only_layers"),
)
"""The fields that a MoE model uses besides."""

HYBRID = (
    *("full_attention_interval", "attn_output_gate", "output_gate_type", "linear_conv_kernel_dim"),
    *("linear_key_head_dim", "linear_value_head_dim", "linear_num_key_heads"),
    *("linear_num_value_heads", "shared_expert_intermediate_size", "mtp_num_hidden_layers"),
    "mtp_use_dedicated_embeddings",
)
"""The fields that a model with gated delta nets uses besides."""

VISION = Fields(
    "vision_config of config.json",
    used=(
        *("depth", "hidden_size", "intermediate_size", "num_heads", "in_channels", "patch_size"),
        *("spatial_merge_size", "temporal_patch_size", "out_hidden_size", "hidden_act"),
        *("num_position_embeddings", "deepstack_visual_indexes", "rope_parameters"),
        *(*ALIASES, *_QUANTIZATION),
    ),
    inert=_METADATA,
    without_effect={**_DEFAULTS, "tie_word_embeddings": (False, True), "attention_dropout": (0,)},
    reasons={**_CODE, "initializer_range": "that of text_config initialises both"},
)

_ROPE_FIELDS = (
    *("rope_type", "type", "rope_theta", "mrope_section", "mrope_interleaved"),
    "partial_rotary_factor",
)


GENERATION = Fields(
    "generation_config.json",
    used=(
        *("do_sample", "temperature", "top_k", "top_p", "repetition_penalty", "max_new_tokens"),
        *("eos_token_id", "pad_token_id"),
    ),
    inert=(
        *("bos_token_id", "transformers_version", "_from_model_config", "return_dict_in_generate"),
        *("output_attentions", "output_hidden_states", "output_scores", "output_logits"),
        *("use_cache", "max_cache_len", "compile_config", "disable_compile", "low_memory"),
        *("continuous_batching_config", "prefill_chunk_size", "renormalize_logits"),
        # These matter only beside a second model, and a model's folder holds no second one.
        *("is_assistant", "num_assistant_tokens", "num_assistant_tokens_schedule"),
        *("assistant_confidence_threshold", "max_matching_ngram_size", "assistant_lookbehind"),
        *("target_lookbehind", "assistant_ensemble_weight"),
    ),
    without_effect={
        **dict.fromkeys(("num_beams", "num_beam_groups", "num_return_sequences"), (1,)),
        **dict.fromkeys(("typical_p", "encoder_repetition_penalty", "length_penalty"), (1,)),
        **dict.fromkeys(("guidance_scale", "top_h"), (1,)),
        **dict.fromkeys(("min_length", "min_new_tokens", "no_repeat_ngram_size", "min_p"), (0,)),
        **dict.fromkeys(("epsilon_cutoff", "eta_cutoff", "diversity_penalty"), (0,)),
        **dict.fromkeys(("encoder_no_repeat_ngram_size", "penalty_alpha"), (0,)),
        **dict.fromkeys(("early_stopping", "remove_invalid_values", "token_healing"), (False,)),
        "use_mtp": (False,),
        "max_length": (20,),
        "cache_implementation": ("dynamic", "dynamic_full", "static", "offloaded"),
    },
    reasons={
        "max_length": "max_new_tokens and --max-new-tokens limit the answer",
        **dict.fromkeys(("num_beams", "num_beam_groups", "diversity_penalty"), "no beam search"),
        **dict.fromkeys(("length_penalty", "early_stopping", "constraints"), "no beam search"),
        **dict.fromkeys(("prompt_lookup_num_tokens", "assistant_early_exit"), "no speculation"),
        **dict.fromkeys(("speculation_type", "use_mtp"), "no speculation"),
    },
)
"""The fields of transformers' ``GenerationConfig``, as :class:`.sampling.Sampler` and
:func:`.generation.generate` use them."""

TEMPLATE = "chat_template.jinja"
_OF_PROCESSOR = ("processor_config.json", "chat_template.json")
"""The files whose chat template transformers' processors prefer to :data:`TEMPLATE`, in order."""

TOKENIZER = Fields(
    "tokenizer_config.json",
    used=(
        *("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token"),
        *("mask_token", "additional_special_tokens", "extra_special_tokens", "tokenizer_class"),
        *("model_specific_special_tokens", "added_tokens_decoder", "add_prefix_space"),
        *("clean_up_tokenization_spaces", "split_special_tokens", "chat_template"),
        *("clean_up_tokenization_spaces_for_bpe_even_though_it_will_corrupt_output",),
        *("chat_control_tokens", "image_token", "video_token"),
        *("vision_start_token", "vision_end_token"),
    ),
    inert=(
        *("processor_class", "backend", "is_local", "local_files_only", "name_or_path", "legacy"),
        *("use_fast", "files_loaded", "verbose", "model_input_names", "errors", "init_inputs"),
        *("transformers_version", "response_template", "response_schema", "fix_mistral_regex"),
        # Padding is ours, nothing is truncated, and transformers only warns of long texts.
        *("padding_side", "truncation_side", "model_max_length", "max_len", "pad_token_type_id"),
        *("padding", "max_length", "pad_to_multiple_of", "stride", "truncation_strategy"),
        *("tokenizer_file", "vocab_file", "merges_file", "special_tokens_map_file"),
    ),
    without_effect={"add_bos_token": (False,), "add_eos_token": (False,)},
    reasons={
        "auto_map": "a checkpoint's code is never run",
        **dict.fromkeys(("add_bos_token", "add_eos_token"), "tokenizer.json says what is added"),
    },
)
"""The fields that transformers makes a tokenizer from; our encoding of texts needs them."""


SENTENCES = Fields(
    "config_sentence_transformers.json",
    used=(),
    inert=("__version__", "model_type", "similarity_fn_name"),
    without_effect={"prompts": ({}, {"query": "", "document": ""})},
    reasons={
        "prompts": "an instruction is a system message of the text",
        "default_prompt_name": "an instruction is a system message of the text",
        "truncate_dim": "embeddings are written whole",
    },
)
"""The fields of an embedding model's own config, as sentence-transformers writes it."""


def unused_of(source: Path) -> list[Unused]:
    """Return what nothing uses of a model's folder, or of a ``config.json`` alone.

    Raises:
        BadInput: a file cannot be read, or this model cannot have the config.
    """
    folders = OWNERS if source.is_dir() else OWNERS[:2]
    return [unused for owner in folders for unused in owner(source)]


def unused_of_config(config: Mapping[str, Any]) -> list[Unused]:
    """Return the fields of a ``config.json`` that nothing uses, in its sections too.

    A field that repeats what the section says that counts is not among them. The fields of
    ``quantization_config`` have another owner. It raises what `Architecture.from_hf` does.
    """
    architecture = Architecture.from_hf(dict(config))
    family, text = family_of(dict(config)), text_section(dict(config))
    vision = config["vision_config"] if family.has_vision else {}
    rope = {name: text[name] for name in ("rope_parameters", "rope_scaling") if text.get(name)}
    kind = dict(architecture.rope_scaling).get("rope_type", "default")
    of_kind = () if kind == "default" else (*ROPE_NUMBERS[kind], *ROPE_OPTIONS[kind])
    more = (*(EXPERTS if family.moe else ()), *(HYBRID if family.hybrid else ()))
    text_fields = replace(TEXT, used=(*TEXT.used, *more))
    dtypes = dict.fromkeys(("dtype", "torch_dtype"), (architecture.dtype,))
    same_range = {"initializer_range": (architecture.initializer_range,)}
    copies = {name: (text[name],) for name in text_fields.used if name in text}
    shared = {name: (config[name],) for name in CONFIG.used if name in config}
    if family.has_vision:
        sections = [
            *_with_harmless_values(CONFIG, copies, "text_config counts").unused(config),
            *_with_harmless_values(
                text_fields, {**shared, **dtypes}, "the top level counts"
            ).unused(text),
        ]
    else:
        used = (*text_fields.used, *CONFIG.used)
        sections = replace(text_fields, where=CONFIG.where, used=used).unused(config)
    return [
        *sections,
        *(
            unused
            for name, section in rope.items()
            for unused in Fields(
                f"text_config.{name} of config.json", (*_ROPE_FIELDS, *of_kind)
            ).unused(section)
        ),
        *_with_harmless_values(
            VISION, {**shared, **dtypes, **same_range}, "the top level counts"
        ).unused(vision),
        *Fields("vision_config.rope_parameters of config.json", ("rope_type", "rope_theta")).unused(
            vision.get("rope_parameters") or {}
        ),
    ]


def _with_harmless_values(
    fields: Fields, values: Mapping[str, tuple[Any, ...]], why: str
) -> Fields:
    """Return `fields` with further values that are without effect, and why others are not used."""
    more = {name: (*fields.without_effect.get(name, ()), *values[name]) for name in values}
    return replace(
        fields,
        without_effect={**fields.without_effect, **more},
        reasons={**dict.fromkeys(values, why), **fields.reasons},
    )


def _unused_of_tokenizer(folder: Path) -> list[Unused]:
    """Return unused fields of ``tokenizer_config.json``, and chat templates that another hides."""
    template = folder / TEMPLATE
    # A processor takes the first of these, and a tokenizer alone the first of the last two.
    templates = {
        **{
            name: read_object_or_empty(folder / name).get("chat_template") for name in _OF_PROCESSOR
        },
        TEMPLATE: template.read_text("utf-8", "replace") if template.is_file() else None,
        TOKENIZER.where: read_object_or_empty(folder / TOKENIZER.where).get("chat_template"),
    }
    named = [name for name, text in templates.items() if text is not None]
    alone = next((name for name in (TEMPLATE, TOKENIZER.where) if name in named), None)
    return TOKENIZER.unused(read_object_or_empty(folder / TOKENIZER.where)) + [
        Unused(
            name,
            "chat_template",
            f"{named[0]} counts" + "; a tokenizer alone takes this one" * (name == alone),
        )
        for name in named[1:]
        if templates[name] != templates[named[0]]
    ]


OWNERS: tuple[Callable[[Path], list[Unused]], ...] = (
    lambda source: unused_of_config(read_config_file(source)),
    lambda source: unused_of_quantization(read_config_file(source)),
    _unused_of_tokenizer,
    lambda folder: GENERATION.unused(read_object_or_empty(folder / GENERATION.where)),
    lambda folder: SENTENCES.unused(read_object_or_empty(folder / SENTENCES.where)),
    unused_of_processor,
    unused_files,
    lambda folder: unread_files(folder) if identify(folder).kind is PathKind.HUGGINGFACE else [],
)
"""Each returns what it does not use of a model's folder; the first two take a config.json too."""
