"""A working tokenizer, image and video processor and chat template, made locally.

The tokenizer is a byte-level BPE like Qwen's, with a handful of merges and Qwen's special tokens.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from importlib.resources import files
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from tokenizers.pre_tokenizers import ByteLevel

from mcore_qwen3vl.errors import BadInput

_MERGES = (
    "Ġ t", "h e", "i n", "Ġ a", "r e", "o n", "Ġ s", "e r", "Ġt he", "a t", "i s", "e n", "o r",
    "Ġ w", "Ġ c", "i t", "o u", "e s", "a n", "Ġ i", "Ġ o", "Ġ b", "in g", "Ġ m", "e d", "a l",
)  # fmt: skip
_SPECIAL = (
    "<|im_end|>", "<|endoftext|>", "<|im_start|>", "<|vision_start|>", "<|vision_end|>",
    "<|image_pad|>", "<|video_pad|>", "<|object_ref_start|>", "<|object_ref_end|>",
    "<|box_start|>", "<|box_end|>",
)  # fmt: skip
_QWEN_SIZE = 151_936  # vocab_size of every published Qwen3-VL
_QWEN_TOKENS = 151_643  # tokens of the file; the special tokens come after them
_QWEN_SPECIAL = (
    "<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|object_ref_start|>", "<|object_ref_end|>",
    "<|box_start|>", "<|box_end|>", "<|quad_start|>", "<|quad_end|>", "<|vision_start|>",
    "<|vision_end|>", "<|vision_pad|>", "<|image_pad|>", "<|video_pad|>",
)  # fmt: skip
_QWEN_ADDED = (
    "<tool_call>", "</tool_call>", "<|fim_prefix|>", "<|fim_middle|>", "<|fim_suffix|>",
    "<|fim_pad|>", "<|repo_name|>", "<|file_sep|>", "<tool_response>", "</tool_response>",
    "<think>", "</think>",
)  # fmt: skip
"""Tokens that Qwen added after the special ones. Decoding keeps them."""


@dataclass(frozen=True)
class Vocabulary:
    """The tokens of a byte-level BPE tokenizer, with their ids."""

    size: int  # rows of the embedding, which are more than the tokens, as in published models
    tokens: dict[str, int]  # those that are not special, in the byte-level alphabet
    merges: list[tuple[str, str]]  # pairs of tokens, those merged first in front
    special: dict[str, int]
    added: dict[str, int] = field(default_factory=dict)
    """Tokens that are never split, but that are text of an answer."""

    def tokenizer(self) -> Any:
        """Make a ``Qwen2Tokenizer``."""
        from transformers import AddedToken, Qwen2Tokenizer

        tokenizer = Qwen2Tokenizer(
            vocab=self.tokens | self.special | self.added,
            merges=self.merges,
            eos_token="<|im_end|>",
            pad_token="<|endoftext|>",
            model_max_length=4096,
        )
        tokenizer.add_tokens(
            [AddedToken(token, normalized=False, special=True) for token in self.special],
            special_tokens=True,
        )
        tokenizer.add_tokens([AddedToken(token, normalized=False) for token in self.added])
        wanted = self.special | self.added
        got = {token: tokenizer.convert_tokens_to_ids(token) for token in wanted}
        if got != wanted:
            raise RuntimeError(f"added tokens landed at {got}, expected {wanted}")
        return tokenizer


def _tiny_vocabulary() -> Vocabulary:
    """Make a vocabulary of the 256 bytes, a few merges and Qwen's special tokens."""
    merges = [(left, right) for left, right in (merge.split(" ") for merge in _MERGES)]
    tokens = {
        token: i for i, token in enumerate([*sorted(ByteLevel.alphabet()), *map("".join, merges)])
    }
    special = {token: len(tokens) + i for i, token in enumerate(_SPECIAL)}
    return Vocabulary(352, tokens, merges, special)


TINY = _tiny_vocabulary()


def read_vocabulary(file: str | Path) -> Vocabulary:
    """Read Qwen's vocabulary, whose merges, tokens and added tokens have the published ids.

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
    if len(tokens) != _QWEN_TOKENS:
        raise BadInput(
            f"{file} has {len(tokens):,} tokens, and Qwen's vocabulary {_QWEN_TOKENS:,}: {remedy}."
        )
    return Vocabulary(
        _QWEN_SIZE,
        tokens,
        merges,
        {token: _QWEN_TOKENS + i for i, token in enumerate(_QWEN_SPECIAL)},
        {token: _QWEN_TOKENS + len(_QWEN_SPECIAL) + i for i, token in enumerate(_QWEN_ADDED)},
    )


def write_processor(
    path: Path, vision_config: dict[str, Any], vocabulary: Vocabulary = TINY
) -> None:
    """Save a ``Qwen3VLProcessor`` to `path`, with the patch sizes of `vision_config`.

    Pixel limits scale with the patch size: an image becomes 4 to 64 merged tokens, a video
    frame 4 to 16.
    """
    from transformers import Qwen2VLImageProcessor, Qwen3VLProcessor, Qwen3VLVideoProcessor

    merge = vision_config["spatial_merge_size"]
    patch = vision_config["patch_size"]
    frames = vision_config["temporal_patch_size"]
    token_pixels = (merge * patch) ** 2
    common = {
        "patch_size": patch,
        "merge_size": merge,
        "temporal_patch_size": frames,
        "image_mean": [0.5, 0.5, 0.5],
        "image_std": [0.5, 0.5, 0.5],
    }
    image_size = {"shortest_edge": 4 * token_pixels, "longest_edge": 64 * token_pixels}
    video_size = {"shortest_edge": 4 * token_pixels, "longest_edge": 16 * 8 * token_pixels}
    processor = Qwen3VLProcessor(
        image_processor=Qwen2VLImageProcessor(size=image_size, **common),
        tokenizer=vocabulary.tokenizer(),
        video_processor=Qwen3VLVideoProcessor(size=video_size, min_frames=2, fps=2, **common),
        chat_template=chat_template(),
    )
    processor.save_pretrained(path)


def chat_template() -> str:
    """Return the chat template: ChatML turns, with a bracketed placeholder token for media."""
    return files(__package__).joinpath("chat_template.jinja").read_text(encoding="utf-8")
