"""A working tokenizer, image and video processor and chat template, made locally.

The tokenizer is a byte-level BPE like Qwen's, with a handful of merges and Qwen's special tokens.
:mod:`~mcore_qwen3vl.tiny.real_vocabulary` reads Qwen's own.
"""

from __future__ import annotations

from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path
from typing import Any

from tokenizers.pre_tokenizers import ByteLevel

_MERGES = (
    "Ġ t", "h e", "i n", "Ġ a", "r e", "o n", "Ġ s", "e r", "Ġt he", "a t", "i s", "e n", "o r",
    "Ġ w", "Ġ c", "i t", "o u", "e s", "a n", "Ġ i", "Ġ o", "Ġ b", "in g", "Ġ m", "e d", "a l",
)  # fmt: skip
_SPECIAL = (
    "<|im_end|>", "<|endoftext|>", "<|im_start|>", "<|vision_start|>", "<|vision_end|>",
    "<|image_pad|>", "<|video_pad|>", "<|object_ref_start|>", "<|object_ref_end|>",
    "<|box_start|>", "<|box_end|>",
)  # fmt: skip
_BYTES = sorted(ByteLevel.alphabet())


@dataclass(frozen=True)
class Vocabulary:
    """The tokens of a byte-level BPE tokenizer.

    Attributes:
        size: rows of the embedding, which are more than the tokens, as in published models.
        tokens: the id of each token that is not special, in the byte-level alphabet.
        merges: pairs of tokens, those merged first in front.
        special: the id of each special token.
    """

    size: int
    tokens: dict[str, int]
    merges: list[tuple[str, str]]
    special: dict[str, int]

    def tokenizer(self) -> Any:
        """Make a ``Qwen2Tokenizer``."""
        from transformers import AddedToken, Qwen2Tokenizer

        tokenizer = Qwen2Tokenizer(
            vocab=self.tokens | self.special,
            merges=self.merges,
            eos_token="<|im_end|>",
            pad_token="<|endoftext|>",
            model_max_length=4096,
        )
        tokenizer.add_tokens(
            [AddedToken(token, normalized=False, special=True) for token in self.special],
            special_tokens=True,
        )
        got = {token: tokenizer.convert_tokens_to_ids(token) for token in self.special}
        if got != self.special:
            raise RuntimeError(f"special tokens landed at {got}, expected {self.special}")
        return tokenizer


def _tiny_vocabulary() -> Vocabulary:
    """Make a vocabulary of the 256 bytes, a few merges and Qwen's special tokens."""
    merges = [(left, right) for left, right in (merge.split(" ") for merge in _MERGES)]
    tokens = {token: i for i, token in enumerate([*_BYTES, *map("".join, merges)])}
    special = {token: len(tokens) + i for i, token in enumerate(_SPECIAL)}
    return Vocabulary(352, tokens, merges, special)


TINY = _tiny_vocabulary()


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
