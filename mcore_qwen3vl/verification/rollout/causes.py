"""Which cause explains the difference between a server and the trained model, by tests on numbers.

The causes are looked for in the order of :data:`CAUSES`, as each hides those after it. Prompts that
are not equal are compared no further. Then the log-probabilities of the answers are compared:

1. Under each meaning that they may have. If another one than the trained model's fits far better,
   that is a cause, and the rest is compared under it.
2. With the rounding of a dtype, which is measured: the same tokens scored in half precision and in
   float32. Two runs in half precision that are each so far from float32 differ by at most twice
   that; in float32 the difference is smaller by the ratio of the dtypes' epsilons. A server that
   rounds otherwise than expected is told from other weights by where it is off: at the tokens at
   which our own half precision is.
3. Prompts of text alone with those that have images or videos. What differs in text is due to the
   weights of the language model. If text agrees, the tower or its pixels differ: a picture of one
   grey, which decoding and resizing leave as it is, tells which.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from mcore_qwen3vl.verification.measurement import EPSILON
from mcore_qwen3vl.verification.rollout.on_rank import Meaning
from mcore_qwen3vl.verification.rollout.prompts import Kind

PROMPT = "prompt tokens"
PIXELS = "pixels and grids"
MEANING = "meaning of log-probabilities"
ROUNDING = "rounding"
LANGUAGE = "weights of the language model"
TOWER = "weights of the vision tower"
CAUSES = (PROMPT, PIXELS, MEANING, ROUNDING, LANGUAGE, TOWER)

_AT_MOST = 2.0
"""Two runs that are each off by E may be 2 E apart."""
_LARGEST = 3.0
"""The largest difference of a token, over the largest one measured on other tokens."""
_AT_LEAST = 1 / 32
"""A difference below this part of the half-precision rounding cannot come from fp16, TF32 or bf16
in a whole model: their epsilons are within a factor of 16."""
_FLOAT32 = 16 * EPSILON
"""Of the largest logit: sixteen roundings, where kernels with other orders of addition differ."""
_HALF_OVER_FLOAT32 = 2.0**16
"""The ratio of the epsilons of bf16 and float32; of fp16, whose is smaller, this asks for more."""
_ALIKE = 0.25
"""The least correlation of two runs' roundings in half precision: weights, and what each layer
writes, round alike. Of n tokens, those of other causes have one of about 1 / sqrt(n)."""
_KEPT = 0.9
"""The part of the tokens that a mask must keep: a server's answers have no masked tokens."""
_BETTER = 4.0
"""Another meaning must fit so many times better than the expected one."""


@dataclass(frozen=True)
class Cause:
    """One cause, of :data:`CAUSES`, and why it is named."""

    name: str
    why: str


@dataclass(frozen=True)
class Compared:
    """The log-probabilities of one answer of n tokens.

    Attributes:
        server: (n,) the server's.
        exact: (meanings, n) the trained model's in float32, the expected meaning first.
        rounded: the same in half precision.
        largest: largest absolute logit.
    """

    place: str
    kind: Kind
    server: np.ndarray
    exact: np.ndarray
    rounded: np.ndarray
    largest: float

    def off(self, meaning: int = 0) -> np.ndarray:
        """Return how far the server's are from the trained model's, (n,); infinite if one is."""
        return distance(self.server, self.exact[meaning])

    def rounding(self, meaning: int = 0) -> np.ndarray:
        """Return how far half precision is from float32, (n,)."""
        return distance(self.rounded[meaning], self.exact[meaning])


def distance(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """Return |a - b|; 0 where both are minus infinity."""
    with np.errstate(invalid="ignore"):
        return np.where(a == b, 0.0, np.abs(a - b))


@dataclass(frozen=True)
class Limits:
    """The largest differences that rounding explains, of log-probabilities.

    Attributes:
        fine: of a token, if both compute in float32.
        mean: root mean square over tokens, if one computes in half precision.
        half: of a token, likewise.
    """

    fine: float
    mean: float
    half: float

    @classmethod
    def of(cls, answers: Sequence[Compared], meaning: int) -> Limits:
        errors = finite(np.concatenate([one.rounding(meaning) for one in answers]))
        mean = _AT_MOST * root_mean_square(errors)
        largest = _LARGEST * float(errors.max(initial=0.0))
        scale = max(one.largest for one in answers)
        fine = max(_FLOAT32 * scale, 2 * largest / _HALF_OVER_FLOAT32)
        return cls(fine, mean, largest)

    @property
    def allowed_mean(self) -> float:
        """The largest root mean square of differences in half precision."""
        return max(self.mean, self.fine)

    def allowed(self, half: bool) -> float:
        """Return the largest difference of a token in half precision, or in float32."""
        return max(self.half, self.fine) if half else self.fine

    def hold(self, errors: np.ndarray, *, half: bool) -> bool:
        """Return whether rounding explains these differences."""
        if half and root_mean_square(errors) > self.allowed_mean:
            return False
        return float(errors.max(initial=0.0)) <= self.allowed(half)


def finite(values: np.ndarray) -> np.ndarray:
    """Return the values that are finite: a mask may leave a token out in one dtype alone."""
    return values[np.isfinite(values)]


def root_mean_square(values: np.ndarray) -> float:
    return math.sqrt(float(np.square(values).mean())) if len(values) else 0.0


KINDS: tuple[Kind, ...] = ("text", "grey", "image", "video")


def explain(answers: Sequence[Compared], meanings: Sequence[Meaning], *, half: bool) -> list[Cause]:
    """Look for the causes of differences between answers with equal prompts.

    Args:
        meanings: those of `exact`; the first is the expected one.
        half: whether the server is expected to compute in half precision.
    """
    return list(_Tests(answers, meanings, half).causes())


@dataclass(frozen=True)
class _Tests:
    """The tests on numbers, for the arguments of :func:`explain`."""

    answers: Sequence[Compared]
    meanings: Sequence[Meaning]
    half: bool

    def causes(self) -> Iterator[Cause]:
        texts = self._of("text")
        meaning = self._meaning_of(texts or list(self.answers))
        if meaning:
            some = texts or list(self.answers)
            yield Cause(
                MEANING,
                f"the server's are {self.meanings[meaning]}; the trained model's, "
                f"{self.meanings[0]}, are up to {self._largest(some, 0):.3g} away, and "
                f"{self._largest(some, meaning):.3g} under that meaning",
            )
        limits = Limits.of(self.answers, meaning)
        failing = self._failing(meaning, limits, half=self.half)
        # Of the expected dtype, or of half precision if the server rounds as that does.
        half, judged = self.half, texts or self.answers
        if failing and (not texts or "text" in failing) and self._rounds(judged, meaning, limits):
            yield Cause(ROUNDING, self._of_rounding(judged, meaning, limits))
            half = True
            failing = self._failing(meaning, limits, half=half)
        if "text" in failing or (failing and not texts):
            yield Cause(LANGUAGE, self._of_language(judged, meaning, limits, half=half))
        elif failing:
            yield self._of_media(failing, meaning, limits, half=half)

    def _failing(self, meaning: int, limits: Limits, *, half: bool) -> list[Kind]:
        """Return the kinds of prompts whose differences rounding does not explain."""
        return [
            kind
            for kind in KINDS
            if not limits.hold(self._errors(self._of(kind), meaning), half=half)
        ]

    def _rounds(self, answers: Sequence[Compared], meaning: int, limits: Limits) -> bool:
        """Return whether differences are as large as half precision makes them, and where."""
        errors = self._errors(answers, meaning)
        large = float(errors.max(initial=0.0)) >= _AT_LEAST * limits.half
        return large and limits.hold(errors, half=True) and _likeness(answers, meaning) >= _ALIKE

    def _of(self, kind: Kind) -> list[Compared]:
        return [one for one in self.answers if one.kind == kind]

    def _errors(self, answers: Sequence[Compared], meaning: int) -> np.ndarray:
        """Return how far the server's are away, (n,).

        Under a mask, rounding decides whether the last token that it keeps is kept.
        """
        off = np.concatenate([np.zeros(0), *(one.off(meaning) for one in answers)])
        return finite(off) if self.meanings[meaning].has_mask else off

    def _largest(self, answers: Sequence[Compared], meaning: int) -> float:
        return float(self._errors(answers, meaning).max(initial=0.0))

    def _meaning_of(self, answers: Sequence[Compared]) -> int:
        """Return the number of the meaning that the server's log-probabilities have."""
        errors = self._errors(answers, 0)
        if Limits.of(self.answers, 0).hold(errors, half=self.half):
            return 0
        fits = []
        for number in range(len(self.meanings)):
            off = self._errors(answers, number)
            whole = len(off) >= _KEPT * len(errors)
            fits.append(root_mean_square(off) if whole else math.inf)
        best = int(np.argmin(fits))
        return best if fits[best] * _BETTER < root_mean_square(errors) else 0

    def _of_rounding(self, answers: Sequence[Compared], meaning: int, limits: Limits) -> str:
        return (
            f"the server's are up to {self._largest(answers, meaning):.3g} away, as far as half "
            f"precision moves them (at most {limits.half:.3g}) and at the same tokens, where "
            f"float32 moves them by {limits.fine:.1g}: it computes in half precision"
        )

    def _of_language(
        self, answers: Sequence[Compared], meaning: int, limits: Limits, *, half: bool
    ) -> str:
        alone = "prompts of text alone differ"
        if not self._of("text"):
            alone = "answers differ (none to text alone was compared, so it may be the tower)"
        return (
            f"{alone} by up to {self._largest(answers, meaning):.3g}, and rounding explains "
            f"{limits.allowed(half):.1g}. The server has other weights, such as those of an "
            "earlier step, or computes with them otherwise: quantised weights or cache, another "
            "attention. `verify tensors` compares two checkpoints"
        )

    def _of_media(
        self, failing: Sequence[Kind], meaning: int, limits: Limits, *, half: bool
    ) -> Cause:
        largest = max(self._largest(self._of(kind), meaning) for kind in failing)
        kinds = " and ".join(f"{kind}s" for kind in failing if kind in ("image", "video"))
        said = (
            f"prompts with {kinds or 'images'} differ by up to {largest:.3g}, where rounding "
            f"explains {limits.allowed(half):.1g}, and text alone agrees"
        )
        if "grey" in failing:
            return Cause(
                TOWER,
                f"{said}; so does a picture of one grey, which resizing leaves as it is. Or the "
                "server normalises pixels otherwise: compare image_mean and image_std",
            )
        told = "a picture of one grey agrees" if self._of("grey") else "no grey one was compared"
        return Cause(
            PIXELS,
            f"{said}; {told}, so the server sees other pixels: it decodes, resizes or orders them "
            "otherwise, or its client does before it sends them",
        )


def _likeness(answers: Sequence[Compared], meaning: int) -> float:
    """Return the correlation of the server's distances with our own rounding, over tokens."""
    pairs = np.concatenate(
        [np.stack([one.server, one.rounded[meaning]]) - one.exact[meaning] for one in answers], 1
    )
    pairs = pairs[:, np.isfinite(pairs).all(0)]
    if pairs.shape[1] < 2 or not pairs.std(1).all():
        return 0.0
    return float(np.corrcoef(pairs)[0, 1])


_FRAMES = re.compile(
    r"((?:<[\d.]+ seconds>)?<\|vision_start\|>(?:<\|video_pad\|>)+<\|vision_end\|>)+"
)
_SHOWN = 12
"""Tokens around the first difference that are shown."""


@dataclass(frozen=True)
class Vocabulary:
    """What the comparison of prompts needs to know of a processor.

    Attributes:
        rows: tokens that the model has embeddings of.
        placeholders: the kind of media by the id of its token.
        token_pixels: pixels of an image that one token stands for.
    """

    tokenizer: Any
    rows: int
    placeholders: Mapping[int, Kind]
    token_pixels: int

    def text(self, ids: Sequence[int]) -> str:
        """Return the text of tokens; an id that the tokenizer lacks shows as a number."""
        known = len(self.tokenizer)
        parts = (self.tokenizer.decode([i]) if i < known else f"<id {i}>" for i in ids)
        if all(i < known for i in ids):
            return str(self.tokenizer.decode(list(ids)))
        return "".join(parts)

    def runs(self, ids: Sequence[int]) -> tuple[list[int], list[tuple[Kind, int]]]:
        """Return the ids with each run of placeholders as one, and kind and length of each run."""
        short: list[int] = []
        runs: list[tuple[Kind, int]] = []
        for i in ids:
            kind = self.placeholders.get(i)
            if kind and short and short[-1] == i:
                runs[-1] = kind, runs[-1][1] + 1
                continue
            short.append(i)
            if kind:
                runs.append((kind, 1))
        return short, runs


def explain_prompt(
    ours: Sequence[int],
    theirs: Sequence[int],
    vocabulary: Vocabulary,
    their_text: Callable[[], str | None],
) -> Cause | None:
    """Say what makes the tokens of a prompt differ; None if they are equal.

    Args:
        their_text: returns the prompt by the server's tokenizer; None: not known.
    """
    if list(ours) == list(theirs):
        return None
    (short, runs), (other, others) = vocabulary.runs(ours), vocabulary.runs(theirs)
    if short == other:
        return Cause(PIXELS, "; ".join(_counts(runs, others, vocabulary.token_pixels)))
    texts = vocabulary.text(ours), vocabulary.text(theirs)
    if _FRAMES.sub("<video>", texts[0]) == _FRAMES.sub("<video>", texts[1]):
        return Cause(PIXELS, "; ".join(_frames(*texts)))
    return Cause(PROMPT, _first_difference(ours, theirs, vocabulary, their_text()))


def _counts(
    runs: Sequence[tuple[Kind, int]], others: Sequence[tuple[Kind, int]], token_pixels: int
) -> Iterator[str]:
    """Say which images and frames have other numbers of tokens."""
    seen: dict[Kind, int] = {}
    for (kind, mine), (_, their) in zip(runs, others, strict=True):
        seen[kind] = seen.get(kind, 0) + 1
        if mine != their:
            what = "image" if kind == "image" else "pair of video frames"
            yield (
                f"{what} {seen[kind]} has {mine} tokens here and {their} at the server, whose "
                f"processor must have resized it to {their * token_pixels:,} pixels, and not to "
                f"{mine * token_pixels:,}: compare min_pixels and max_pixels"
            )


def _frames(ours: str, theirs: str) -> Iterator[str]:
    """Say which videos have other frames."""
    pairs = zip(_FRAMES.finditer(ours), _FRAMES.finditer(theirs), strict=True)
    for number, (mine, their) in enumerate(pairs, 1):
        if mine[0] != their[0]:
            yield (
                f"video {number} is {_frames_text(mine[0])} here and {_frames_text(their[0])} at "
                "the server: compare fps, num_frames and max_pixels"
            )


def _frames_text(text: str) -> str:
    times = re.findall(r"<([\d.]+) seconds>", text)
    tokens = text.count("<|video_pad|>")
    pairs = text.count("<|vision_start|>")
    at = f" from {times[0]} to {times[-1]} s" if times else ""
    return f"{pairs} pairs of frames{at} with {tokens} tokens in all"


def _first_difference(
    ours: Sequence[int], theirs: Sequence[int], vocabulary: Vocabulary, their_text: str | None
) -> str:
    """Name the first position that differs, with both tokens, and what the difference looks like.

    A missing end, a missing beginning, and an additional beginning are told from other differences.
    """
    text = vocabulary.text
    pairs = zip(ours, theirs, strict=False)
    place = next(
        (i for i, (a, b) in enumerate(pairs) if a != b), min(len(ours), len(theirs))
    )  # fmt: skip
    mine, their = (_token_at(ids, place, vocabulary) for ids in (ours, theirs))
    said = f"token {place} is {mine} here and {their} at the server"
    mine_list, their_list = list(ours), list(theirs)
    cut = len(ours) - len(theirs)
    if cut > 0 and mine_list[cut:] == their_list:
        return f"{said}: it cuts prompts to their last {len(theirs)} tokens, of {len(ours)}"
    if cut > 0 and mine_list[: len(theirs)] == their_list:
        return f"{said}: it cuts prompts to their first {len(theirs)} tokens, of {len(ours)}"
    if cut < 0 and their_list[-cut:] == mine_list:
        why = "such as a system prompt of its chat template"
        if cut == -1:
            why = "which its tokenizer adds (add_special_tokens, add_bos_token)"
        return f"{said}: it begins prompts with {text(theirs[:-cut])!r}, {why}"
    if their_text is not None and their_text == text(ours):
        return (
            f"{said}, for the same text: it has another tokenizer. Compare tokenizer.json and "
            "the added tokens of both"
        )
    begin = max(0, place - _SHOWN // 3)
    around = [text(ids[begin : place + _SHOWN]) for ids in (ours, theirs)]
    said += f" ({around[0]!r} here, {around[1]!r} there)"
    if their_text is None:
        return (
            f"{said}: the chat template, its arguments, the system prompt or the tokenizer differs"
        )
    return f"{said}: the chat template, its arguments or the system prompt differs"


def _token_at(ids: Sequence[int], place: int, vocabulary: Vocabulary) -> str:
    if place >= len(ids):
        return "missing"
    return f"{ids[place]} ({vocabulary.text([ids[place]])!r})"
