"""Qwen's own vocabulary, from a file in tiktoken's form."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

from mcore_qwen3vl.errors import BadInput
from mcore_qwen3vl.tiny.processor import Vocabulary

SIZE = 151_936
"""``vocab_size`` of every published Qwen3-VL."""
_FEWER = 151_643  # tokens of the file; the special tokens come after them
_SPECIAL = (
    "<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|object_ref_start|>", "<|object_ref_end|>",
    "<|box_start|>", "<|box_end|>", "<|quad_start|>", "<|quad_end|>", "<|vision_start|>",
    "<|vision_end|>", "<|vision_pad|>", "<|image_pad|>", "<|video_pad|>",
)  # fmt: skip


def read_vocabulary(file: str | Path) -> Vocabulary:
    """Read Qwen's vocabulary, whose merges, tokens and special tokens have the published ids.

    Args:
        file: ``qwen.tiktoken``, which the package ``dashscope`` ships in ``dashscope/resources``:
            a line for each token, of its bytes in base64 and its rank.

    Raises:
        BadInput: the file is missing or is not that vocabulary, or ``tiktoken`` is not installed.
    """
    from transformers.convert_slow_tokenizer import TikTokenConverter

    if find_spec("tiktoken") is None:
        raise BadInput("A real vocabulary is read by tiktoken: uv pip install tiktoken.")
    remedy = "give qwen.tiktoken of the package dashscope"
    if not Path(file).is_file():
        raise BadInput(f"There is no file {file}: {remedy}.")
    try:
        tokens, merges = TikTokenConverter().extract_vocab_merges_from_model(str(file))
    except (ValueError, KeyError) as error:
        raise BadInput(f"{file} is no vocabulary in tiktoken's form ({error}): {remedy}.") from None
    if len(tokens) != _FEWER:
        raise BadInput(
            f"{file} has {len(tokens):,} tokens, and Qwen's vocabulary {_FEWER:,}: {remedy}."
        )
    return Vocabulary(SIZE, tokens, merges, {token: _FEWER + i for i, token in enumerate(_SPECIAL)})
