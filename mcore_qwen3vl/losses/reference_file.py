"""A reference's log-probabilities of pairs, ``NAME.scores.jsonl`` beside each ``NAME.jsonl``.

``mcore-qwen3vl score`` writes it; docs/preference.md describes it.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from mcore_qwen3vl.data.records.parse import SIDES
from mcore_qwen3vl.data.records.reading import BadSample
from mcore_qwen3vl.data.scores import (
    facts_file_of,
    file_digest,
    other_tokens_error,
    require_facts,
    scores_file_of,
    token_digest,
    trained_digest,
)
from mcore_qwen3vl.data.sidecar import OpenSidecar, Sidecar
from mcore_qwen3vl.errors import BadInput
from mcore_qwen3vl.json_and_yaml import parse_json
from mcore_qwen3vl.losses.answers import UNCUT_ANSWER


@dataclass(frozen=True)
class ReferenceFile(Sidecar):
    """The sidecar with a reference's log-probabilities of chosen and rejected answers."""

    uncut = UNCUT_ANSWER

    def file_of(self, data: Path) -> Path:
        return scores_file_of(data)

    def open(self, paths: Sequence[Path], tokenizer: Any, vocab_size: int) -> list[References]:
        return [References(path) for path in paths]

    def make_up(
        self, data: Path, records: Sequence[Sequence[Any]], tokenizer: Any, vocab_size: int
    ) -> None:
        """Write the scores of a reference for which all tokens are equally likely."""
        lines = []
        for plans in records:
            entry = {
                side: {
                    "log_prob": -math.log(vocab_size) * plan.trained_tokens,
                    "digest": token_digest(plan.input_ids),
                    "trained": trained_digest(plan.loss_weights),
                }
                for side, plan in zip(SIDES, plans, strict=True)
            }
            lines.append(json.dumps(entry))
        scores = self.file_of(data)
        scores.write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
        settings = {"data": file_digest(data), "temperature": 1.0}
        facts_file_of(scores).write_text(json.dumps({"settings": settings}), encoding="utf-8")


class References(OpenSidecar):
    """The reference's log-probabilities of the pairs in one JSONL file."""

    def __init__(self, data: Path) -> None:
        """Read the scores beside a data set.

        Raises:
            BadInput: there are none, or they were made from other data, with a temperature other
                than 1, or from records that are not pairs.
        """
        self._data, self._scores = data, scores_file_of(data)
        command = f"mcore-qwen3vl score REFERENCE {data} --out {self._scores}"
        require_facts(self._scores, data, command, other_remedy=" or --reference adapter")
        log_probs: list[list[float]] = []
        digests: list[list[str]] = []
        trained: list[list[str]] = []
        self._errors: dict[int, str] = {}  # the reason, by the index of each record without scores
        with self._scores.open(encoding="utf-8") as lines:
            for index, line in enumerate(lines):
                try:
                    entry = dict(parse_json(line))
                except (ValueError, TypeError) as error:
                    raise BadInput(
                        f"{self._scores}:{index + 1} cannot be read ({error}): score the data "
                        "again."
                    ) from error
                if "error" in entry:
                    self._errors[index] = entry["error"]
                    entry = {side: {"log_prob": np.nan, "digest": ""} for side in SIDES}
                if not entry.keys() >= set(SIDES):
                    raise BadInput(
                        f"{self._scores}:{index + 1} is not a preference record: DPO needs data "
                        "with chosen and rejected."
                    )
                sides = [entry[side] for side in SIDES]
                log_probs.append([side["log_prob"] for side in sides])
                digests.append([side["digest"] for side in sides])
                trained.append([side.get("trained", "") for side in sides])
        # Arrays of (records, 2): chosen, rejected.
        self._log_probs = np.array(log_probs, np.float64).reshape(-1, 2)
        self._digests = np.array(digests, "U16").reshape(-1, 2)
        self._trained = np.array(trained, "U16").reshape(-1, 2)  # "" in files of earlier versions

    def require(self, number: int, plans: Sequence[Any]) -> None:
        self.look_up(number, plans)

    def look_up(self, number: int, plans: Sequence[Any]) -> tuple[float, float]:
        """Return the log-probabilities of a record's chosen and rejected answer.

        Raises:
            BadSample: the record has none.
            BadInput: the answers do not have the tokens that were scored, or train others.
        """
        if number in self._errors:
            raise BadSample(f"it has no reference in {self._scores}: {self._errors[number]}")
        if [token_digest(plan.input_ids) for plan in plans] != self._digests[number].tolist():
            raise other_tokens_error(self._data, number, self._scores)
        for plan, digest in zip(plans, self._trained[number].tolist(), strict=True):
            if digest not in ("", trained_digest(plan.loss_weights)):
                raise other_tokens_error(self._data, number, self._scores)
        chosen, rejected = self._log_probs[number].tolist()
        return chosen, rejected
