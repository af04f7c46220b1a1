"""Files of scores, which ``mcore-qwen3vl score`` writes and training reads as its reference.

``NAME.scores.jsonl`` beside ``NAME.jsonl``, or ``NAME.parquet.scores.jsonl`` beside
``NAME.parquet``, has one line for each record, in order. It names the record by its ``line`` in a
JSONL file, from 1, or by ``record`` in another file, and by ``file`` if there are several. A
record's line is:


    {"line": 1, "log_prob": -7.1, "tokens": 3, "token_ids": [...], "token_log_probs": [...],
     "digest": "..."}

and, if entropies were asked for, ``entropy``, their mean, and ``token_entropies``. All values are
of the trained tokens, except ``digest``, which is of all tokens of the sequence. A preference
record has such an object under each of ``chosen`` and ``rejected``. A record that cannot be used
has ``error``. ``NAME.scores.json`` holds the summary, the settings and the digest of the data.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import xxhash

from mcore_qwen3vl.data.loading.index import ensure_index, line_of
from mcore_qwen3vl.data.records.flaws import BadSample
from mcore_qwen3vl.data.records.preference import SIDES
from mcore_qwen3vl.errors import BadInput
from mcore_qwen3vl.files import parse_json

_CHUNK = 1 << 22


def scores_of(data: Path, ending: str = "scores.jsonl") -> Path:
    """Return the default path of a data set's scores, or of another file beside it."""
    data = data if data.name else data.absolute()
    return data.with_name(f"{data.name.removesuffix('.jsonl')}.{ending}")


def teacher_of(data: Path) -> Path:
    """Return the default path of a teacher's likeliest tokens for a data set."""
    return scores_of(data, "topk.arrow")


def facts_of(scores: Path) -> Path:
    """Return the file that says which data and settings scores were made from."""
    return scores.with_suffix(".json")


def digest(input_ids: np.ndarray) -> str:
    """Hash the tokens of a sequence, (T,) int64; different tokens practically never collide."""
    return xxhash.xxh3_64_hexdigest(np.ascontiguousarray(input_ids, dtype="<i8").tobytes())


def file_digest(path: Path) -> str:
    """Hash a file's bytes."""
    found = xxhash.xxh3_64()
    with path.open("rb") as file:
        while chunk := file.read(_CHUNK):
            found.update(chunk)
    return found.hexdigest()


def vocabulary_of(tokenizer: Any, vocab_size: int) -> dict[str, Any]:
    """Return what identifies a vocabulary: a hash of its tokens with their ids, and its size."""
    tokens = json.dumps(sorted(tokenizer.get_vocab().items())).encode()
    return {"tokens": xxhash.xxh3_64_hexdigest(tokens), "size": vocab_size}


@dataclass(frozen=True)
class References:
    """The reference's log-probabilities of the pairs in one JSONL file.

    Args:
        log_probs: (records, 2) float64: chosen, rejected; NaN if a record has no scores.
        digests: (records, 2) text: digests of the tokens of the chosen and the rejected sequence.
        errors: the reason, for each record without scores, by its index.
    """

    data: Path
    scores: Path
    log_probs: np.ndarray
    digests: np.ndarray
    errors: dict[int, str]

    @classmethod
    def beside(cls, data: Path) -> References:
        """Read the scores beside a data set.

        Raises:
            BadInput: there are none, or they were made from other data, with a temperature other
                than 1, or from records that are not pairs.
        """
        scores = scores_of(data)
        how = f"mcore-qwen3vl score REFERENCE {data} --out {scores}"
        checked_facts(scores, data, how, instead=" or --reference adapter")
        return _read(data, scores)

    def of(self, index: int) -> tuple[float, float]:
        """Return the log-probabilities of a record's chosen and rejected answer."""
        if index in self.errors:
            raise BadSample(f"it has no reference in {self.scores}: {self.errors[index]}")
        chosen, rejected = self.log_probs[index].tolist()
        return chosen, rejected

    def check(self, index: int, chosen: np.ndarray, rejected: np.ndarray) -> None:
        """Raise BadInput unless the sequences, (T,) int64 each, have the scored tokens."""
        if [digest(chosen), digest(rejected)] != self.digests[index].tolist():
            raise other_tokens(self.data, index, self.scores)


def other_tokens(data: Path, index: int, scores: Path) -> BadInput:
    """Return the error of a record, by its number from 0, that has other tokens than scored."""
    line = line_of(ensure_index(data), index)
    return BadInput(
        f"{data}:{line} no longer has the tokens that it had when {scores} was made: the "
        "processor, the chat template or the budgets of images and videos differ. Score the data "
        "again with the settings of training."
    )


def checked_facts(
    scores: Path, data: Path, how: str, temperature: float = 1.0, *, instead: str = ""
) -> dict[str, Any]:
    """Return the settings that scores were made with.

    Args:
        how: the command that makes them, for messages.
        temperature: the temperature that they should have.
        instead: what else helps if the data set is no JSONL file.

    Raises:
        BadInput: there are no scores beside the data, the settings cannot be read, or the data or
            the temperature is another one.
    """
    if data.suffix != ".jsonl":
        raise BadInput(
            f"{data} is not a JSONL file, and scores are only read beside JSONL files: use JSONL "
            f"data{instead}."
        )
    if not scores.exists():
        raise BadInput(f"{scores} does not exist. Let the model score {data} with `{how}`.")
    file = facts_of(scores)
    try:
        facts: dict[str, Any] = parse_json(file.read_text(encoding="utf-8"))["settings"]
        made_of, found = facts["data"], facts["temperature"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise BadInput(
            f"{file}, which belongs to {scores}, cannot be read ({type(error).__name__}: {error}): "
            f"make both again with `{how}`."
        ) from error
    if found != temperature:
        raise BadInput(
            f"{scores} was made with temperature {found:g}, and {temperature:g} is needed: make it "
            f"again with `{how}`."
        )
    if made_of != file_digest(data):
        raise BadInput(
            f"{scores} was not made from the current content of {data}: make it again with `{how}`."
        )
    return facts


def _read(data: Path, scores: Path) -> References:
    log_probs: list[list[float]] = []
    digests: list[list[str]] = []
    errors: dict[int, str] = {}
    with scores.open(encoding="utf-8") as lines:
        for index, line in enumerate(lines):
            try:
                entry = dict(parse_json(line))
            except (ValueError, TypeError) as error:
                raise BadInput(
                    f"{scores}:{index + 1} cannot be read ({error}): score the data again."
                ) from error
            if "error" in entry:
                errors[index] = entry["error"]
                entry = {side: {"log_prob": np.nan, "digest": ""} for side in SIDES}
            if not entry.keys() >= set(SIDES):
                raise BadInput(
                    f"{scores}:{index + 1} is not a preference record: DPO needs data with chosen "
                    "and rejected."
                )
            sides = [entry[side] for side in SIDES]
            log_probs.append([side["log_prob"] for side in sides])
            digests.append([side["digest"] for side in sides])
    return References(
        data,
        scores,
        np.array(log_probs, np.float64).reshape(-1, 2),
        np.array(digests, "U16").reshape(-1, 2),
        errors,
    )
