"""Who knows the fields of each file of a model's folder, and what in the folder nothing uses."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from mcore_qwen3vl.config import read_config_file, unused_of_config
from mcore_qwen3vl.converters.hf.companions import unused_files
from mcore_qwen3vl.converters.hf.quantized import unused_of_quantization
from mcore_qwen3vl.files import read_object
from mcore_qwen3vl.unused import Fields, Unused

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
        # These matter only beside a second model, which no folder of one holds.
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
"""The fields of transformers' ``GenerationConfig``, as :class:`.generation.decoding.Sampler` and
:func:`.generation.generate.generate` use them."""

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
"""The fields of which transformers makes a tokenizer, and which texts as we encode them need."""


def unused_of(source: Path) -> list[Unused]:
    """Return what nothing uses of a model's folder, or of a ``config.json`` alone.

    Raises:
        BadInput: a file cannot be read, or the config is none that this model can have.
    """
    folders = OWNERS if source.is_dir() else OWNERS[:2]
    return [unused for owner in folders for unused in owner(source)]


def _of_config(source: Path) -> list[Unused]:
    return unused_of_config(read_config_file(source))


def _of_quantization(source: Path) -> list[Unused]:
    return unused_of_quantization(read_config_file(source))


def _of_generation(folder: Path) -> list[Unused]:
    return GENERATION.unused(_content(folder / GENERATION.where))


def _of_tokenizer(folder: Path) -> list[Unused]:
    content = _content(folder / TOKENIZER.where)
    template = folder / "chat_template.jinja"
    unused = TOKENIZER.unused(content)
    if template.is_file() and content.get("chat_template") not in (None, template.read_text()):
        unused.append(Unused(TOKENIZER.where, "chat_template", f"{template.name} counts"))
    return unused


def _content(file: Path) -> dict[str, Any]:
    return read_object(file, file.name, "") if file.is_file() else {}


OWNERS: tuple[Callable[[Path], list[Unused]], ...] = (
    _of_config,
    _of_quantization,
    _of_tokenizer,
    _of_generation,
    unused_files,
)
"""Each returns what it does not use of a model's folder; the first two take a config.json too."""
