"""An audit of somebody's conversion: which tensors are right, and what was done to the others.

The settings that the checkpoint states are compared too (:mod:`mcore_qwen3vl.verify.settings`).
"""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import ClassVar

import torch
import xxhash
from torch import Tensor

from mcore_qwen3vl.config import Architecture
from mcore_qwen3vl.console import visible
from mcore_qwen3vl.converters.hf.hf_checkpoint import HuggingFaceCheckpoint
from mcore_qwen3vl.converters.place import Kind, identify
from mcore_qwen3vl.converters.storage.archive import as_bytes
from mcore_qwen3vl.converters.storage.dtypes import dtype_name
from mcore_qwen3vl.converters.storage.staging import Progress
from mcore_qwen3vl.errors import BadInput
from mcore_qwen3vl.verify.checkpoints import ONLY_A, ONLY_B, TENSORS, Side, compare_sides
from mcore_qwen3vl.verify.measurement import Finding
from mcore_qwen3vl.verify.mistakes import Verdict, mistake, permuted
from mcore_qwen3vl.verify.report import Report
from mcore_qwen3vl.verify.settings import SETTINGS, compare_settings

_FLAWS = {
    ONLY_A: ("further tensor", "is no tensor of the Hugging Face checkpoint"),
    ONLY_B: ("missing tensor", "is not in the examined checkpoint"),
}


@dataclass
class Audit(Report):
    """The result of an audit.

    Attributes:
        mistakes: what is wrong with each wrong tensor.
    """

    failures_shown: ClassVar[int] = 5  # the notes have all of them

    mistakes: dict[str, Verdict] = field(default_factory=dict)

    @property
    def verdict(self) -> str:
        count = sum(finding.part == TENSORS for finding in self.findings)
        settings = [finding.name for finding in self.failures if finding.part == SETTINGS]
        kinds = Counter(kind for kind, _ in self.mistakes.values())
        listed = ", ".join(f"{kind} ({n:,})" for kind, n in kinds.most_common())
        said = (
            f"{len(self.mistakes):,} of {count:,} tensors are wrong: {listed}"
            if self.mistakes
            else f"all {count:,} tensors are those of Hugging Face, bit for bit"
        )
        if settings:
            said += f"; {len(settings)} settings are another model's: {', '.join(settings)}"
        return f"The conversion is {'right' if self.ok else 'wrong'}: {said}."

    @property
    def notes(self) -> dict[str, str]:
        """What is wrong, by kind; tensors that differ in their layer alone have one line."""
        lines: dict[str, dict[str, list[str]]] = {}
        for name, (kind, sentence) in self.mistakes.items():
            alike = re.sub(r"\.\d+\.", ".*.", name)
            lines.setdefault(kind, {}).setdefault(alike, []).append(sentence)
        for finding in self.findings:
            if finding.part == SETTINGS and not finding.ok:
                lines.setdefault(SETTINGS, {})[finding.name] = [finding.flaw]
        return {
            kind: "\n".join(_line(*line) for line in alike.items()) for kind, alike in lines.items()
        }


def _line(name: str, sentences: list[str]) -> str:
    if len(sentences) == 1:
        return visible(f"{name} {sentences[0]}.")
    which = "each" if len(set(sentences)) == 1 else "the first"
    return visible(f"{name}, {len(sentences)} tensors: {which} {sentences[0]}.")


def audit(examined: str | Path, hf: str | Path, *, progress: Progress | None = None) -> Audit:
    """Compare a checkpoint with the Hugging Face checkpoint that it was made from.

    Every tensor of `hf` must be in `examined`, bit for bit after rounding to the dtype that
    `examined` has. Where one is not, known mistakes are made on the right tensor until one gives
    the examined tensor (:mod:`mcore_qwen3vl.verify.mistakes`). This takes memory for about four
    times the tensor; fused experts are examined one by one.

    Args:
        examined: a Megatron checkpoint by any known maker, or a Hugging Face checkpoint.
        hf: Hugging Face checkpoint directory, which is right.

    Returns:
        A report, whose environment says so if settings are there but cannot be read.

    Raises:
        BadInput: a checkpoint is damaged, or is of another kind.
    """
    examined, hf = Path(examined), Path(hf)
    identify(hf).require_huggingface(instead="name the one that the other checkpoint was made from")
    right = Side(hf, hf)
    left = Side(examined, hf if identify(examined).kind is Kind.MEGATRON else examined)
    result = Audit(f"{examined} and {hf}", _facts(left))
    for finding in compare_sides(left, right, progress, rounded=True):
        if finding.part == TENSORS and not finding.ok:
            kind, sentence = result.mistakes[finding.name] = _explain(finding, left, right)
            finding = replace(finding, flaw=f"{kind}: {sentence}")
        result.findings.append(finding)
    try:
        result.findings += compare_settings(examined, left.stored, right.architecture)
    except BadInput as error:  # such as objects of another project, which are not unpickled
        result.environment["settings"] = f"not compared: {error}"
    return result


def _facts(side: Side) -> dict[str, str]:
    """Return who wrote a checkpoint, and its dtypes."""
    names = (name for name, pieces in side.pieces.items() if pieces)
    dtypes = sorted({dtype_name(side.dtype_of(name)) for name in names})
    maker = {"written by": side.maker} if side.maker else {}
    return maker | {"stored as": ", ".join(dtypes)}


def _explain(finding: Finding, examined: Side, right: Side) -> Verdict:
    """Say what is wrong with the tensor of a finding that failed."""
    name = finding.name
    if finding.flaw:
        return _FLAWS.get(finding.flaw, ("another shape", "does not have Hugging Face's shape"))
    if right.pieces[name][0].source.index is None:
        weights = _Weights(examined, right)
        return mistake(weights, name, weights.weight(name))
    experts = [_Weights(examined, right, expert) for expert in range(len(right.pieces[name]))]
    found = torch.stack([_digest(weights.weight(name)) for weights in experts])
    expected = torch.stack([_digest(weights.stored(name)) for weights in experts])
    wrong = (found != expected).any(1).nonzero().flatten().tolist()
    if (order := permuted(name, found, expected)) is not None:
        return order
    weights = experts[wrong[0]]
    kind, sentence = mistake(weights, name, weights.weight(name))
    return kind, f"{sentence}; this is expert {wrong[0]}, and {len(wrong)} experts are wrong"


def _digest(tensor: Tensor) -> Tensor:
    """Return a checksum, (16,) bytes."""
    return torch.tensor(list(xxhash.xxh3_128(as_bytes(tensor.contiguous())).digest()))


@dataclass(frozen=True)
class _Weights:
    """The tensors of both checkpoints, as :class:`mcore_qwen3vl.verify.mistakes.Examined`.

    Of fused experts, (1, ...), it gives `expert`.
    """

    examined: Side
    right: Side
    expert: int | None = None

    @property
    def architecture(self) -> Architecture:
        return self.right.architecture

    @property
    def hf(self) -> HuggingFaceCheckpoint:
        assert isinstance(self.right.stored, HuggingFaceCheckpoint)
        return self.right.stored

    def stored(self, name: str) -> Tensor:
        """Return the right values, in the dtype of the examined ones."""
        return self.right.whole(name, self.expert).to(self.examined.dtype_of(name))

    def weight(self, name: str) -> Tensor:
        """Return the examined values, with experts laid out as the right ones."""
        values = self.examined.whole(name, self.expert)
        layouts = {side.architecture.expert_layout for side in (self.examined, self.right)}
        return values if self.expert is None or len(layouts) == 1 else values.transpose(1, 2)
