"""The first comparison out of tolerance, with everything that the experiments need."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from operator import attrgetter
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from mcore_qwen3vl.config import Architecture
from mcore_qwen3vl.converters.hf.hf_checkpoint import HuggingFaceCheckpoint
from mcore_qwen3vl.verify.measurement import measure
from mcore_qwen3vl.verify.parity.case import Case
from mcore_qwen3vl.verify.trace.probe_points import ACTIVATION_GRADIENTS, GRADIENTS

if TYPE_CHECKING:
    from mcore_qwen3vl.verify.trace.on_rank import RankTrace
    from mcore_qwen3vl.verify.trace.recording import Recording, TraceReference


@dataclass(frozen=True)
class Cause:
    """The reason why a probe point differs, as far as an experiment shows.

    Attributes:
        kind: a short name, such as ``rotary base``; ``unknown`` when no experiment fits.
        explanation: one sentence with the numbers that were found.
        evidence: the experiment and its outcome.
        confirmed: whether Hugging Face's module, with the cause assumed, computes mcore's values.
    """

    kind: str
    explanation: str
    evidence: str
    confirmed: bool = True


class Divergence:
    """The first comparison out of tolerance.

    Attributes:
        part, name: part and name of the comparison.
        point: its probe point; None for the gradient of a parameter, the logits and the loss.
        actual, expected: mcore's and Hugging Face's values, (rows, W); empty for logits and loss.
        rows: the probe point's rows that were compared.
        tolerance: the relative error that rounding explains.
        architecture, examined: the right config, and that of the examined checkpoint.
        case: how mcore's model ran.
        model, trained: Hugging Face's model in float64, and its parameters that have a gradient.
        recording: the values that this model computed.
        weights: mcore's weights at the point, by HF name and in HF's shape; their gradients if the
            comparison is of a parameter's gradient.
        adapter: the LoRA adapter of both models, if any.
    """

    def __init__(
        self,
        truth: TraceReference,
        config: Path,
        case: Case,
        exact: Recording,
        first: tuple[str, str],
        ranks: Sequence[RankTrace],
    ) -> None:
        self.part, self.name = first
        self.point = next((p for p in exact.points if p.name == self.name), None)
        self.tolerance = exact.tolerances.of(*first)
        self.architecture, self.examined = truth.architecture, Architecture.from_hf(config)
        self.case, self.adapter = case, truth.adapter
        reference = truth.model(torch.float64)
        self.model, self.trained = reference.network, reference.trained
        self.recording = exact
        self.hf = HuggingFaceCheckpoint(truth.path)
        self.published = self.architecture.expert_layout == "published"  # experts are (E, in, out)
        self.weights = self._joined_weights(ranks)
        self.actual, self.expected = map(_matrix, self._values(ranks))
        self.rows = torch.nonzero(~self.actual.isnan().all(1)).squeeze(1)
        self.actual, self.expected = self.actual[self.rows], self.expected[self.rows]

    def test(self, kind: str, explanation: str, candidate: Tensor) -> Cause | None:
        """Return the cause if `candidate` is what mcore computed, up to rounding.

        It is what Hugging Face's model computes with this mistake, (B, S, W) or (rows, W).
        """
        distance, before = self.distance(candidate), self.distance(self.expected)
        evidence = (
            f"With this mistake Hugging Face's values are {distance:.1e} from mcore's (rounding "
            f"allows {self.tolerance:.1e}); without it {before:.1e}."
        )
        return Cause(kind, explanation, evidence) if distance <= self.tolerance else None

    def distance(self, candidate: Tensor) -> float:
        """Return the relative error of mcore's values against `candidate`, see :meth:`test`."""
        return measure(self.actual, self.select(candidate)).relative

    def select(self, values: Tensor) -> Tensor:
        """Select the compared rows: (B, S, W) or (all rows, W) to (rows, W)."""
        values = _matrix(values)
        return values if len(values) == len(self.actual) else values[self.rows]

    def stored(self, name: str) -> Tensor:
        """Read a weight of the Hugging Face checkpoint or the adapter, as float32."""
        if self.adapter is not None:
            own = {**self.adapter.saved, **self.adapter.tensors()}
            if name in own:
                return own[name].float()
        return self.hf.read(name).float()

    def weight(self, name: str) -> Tensor | None:
        """Return mcore's values of a weight at the point, or None."""
        return self.weights.get(name)

    def config_note(self, name: str) -> str:
        """Say whether the examined checkpoint's config has the right value of an attribute."""
        examined, right = (attrgetter(name)(a) for a in (self.examined, self.architecture))
        if examined == right:
            return " Its config is right."
        shown = list(examined) if isinstance(examined, tuple) else examined
        return f" The examined checkpoint's config gives {name.rpartition('.')[2]} as {shown}."

    def _values(self, ranks: Sequence[RankTrace]) -> tuple[Tensor, Tensor]:
        """Return mcore's and Hugging Face's values; mcore's are NaN where no rank has any."""
        if self.part == GRADIENTS:
            name = self.name.partition("[")[0]
            actual = self.weights[name].double()
            expected = self.recording.expected.gradients[name].double()
            if self.published and expected.ndim == 3:
                expected = expected.transpose(1, 2)
            return torch.where(actual.isnan(), 0, actual), expected
        if self.point is None:
            return torch.empty(0, 0), torch.empty(0, 0)
        backward = self.part == ACTIVATION_GRADIENTS
        known = self.recording.gradients if backward else self.recording.values
        expected = _matrix(known[self.name])
        actual = torch.full_like(expected, torch.nan)
        for rank in ranks:
            for rows, columns, values in rank.pieces:
                actual[rows, columns] = values.to(actual.dtype)
        return actual, expected

    def _joined_weights(self, ranks: Sequence[RankTrace]) -> dict[str, Tensor]:
        factors = {} if self.adapter is None else self.adapter.tensors()
        weights: dict[str, Tensor] = {}
        for rank in ranks:
            for name, parts in rank.weights.items():
                shape = factors[name].shape if name in factors else self.hf.entries[name].shape
                whole = weights.setdefault(name, torch.full(shape, torch.nan))
                for box, values in parts:
                    whole[box] = values.float()
        return weights


def _matrix(values: Tensor) -> Tensor:
    return values.reshape(-1, values.shape[-1]) if values.numel() else values
