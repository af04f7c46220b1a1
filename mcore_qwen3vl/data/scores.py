"""Files of scores, which ``mcore-qwen3vl score`` writes and training reads.

docs/preference.md describes ``NAME.scores.jsonl``, and docs/distillation.md a teacher's likeliest
tokens, ``NAME.topk.arrow``. That file is not compressed, so it is read through a memory map. Beside
each is a ``.json`` file with the summary, the settings and the digest of the data.
"""

from __future__ import annotations

import base64
import hashlib
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import batched
from pathlib import Path
from typing import Any

import numpy as np
import torch
import xxhash
from torch import Tensor

from mcore_qwen3vl.data.config import Source
from mcore_qwen3vl.data.indexes import ensure_index, line_of
from mcore_qwen3vl.data.records.parse import SIDES
from mcore_qwen3vl.data.records.reading import BadSample
from mcore_qwen3vl.data.task_inputs import TaskInputs
from mcore_qwen3vl.errors import BadInput
from mcore_qwen3vl.files import parse_json
from mcore_qwen3vl.machine import require_extra

TEACHER_TOP_K = 64
"""The usual number of a teacher's likeliest tokens that a student learns from."""

_ROWS = 64
"""Rows of a record batch, by which a row is found."""
_ENCODED = {"top_ids": "<i4", "top_log_probs": "<f4"}


def scores_file_of(data: Path, ending: str = "scores.jsonl") -> Path:
    """Return the default path of a data set's scores, or of another file beside it."""
    data = data if data.name else data.absolute()
    return data.with_name(f"{data.name.removesuffix('.jsonl')}.{ending}")


def teacher_file_of(data: Path) -> Path:
    """Return the default path of a teacher's likeliest tokens for a data set."""
    return scores_file_of(data, "topk.arrow")


def facts_file_of(scores: Path) -> Path:
    """Return the file that says which data and settings scores were made from."""
    return scores.with_suffix(".json")


def token_digest(input_ids: np.ndarray) -> str:
    """Hash the tokens of a sequence, (T,) int64; different tokens practically never collide."""
    return xxhash.xxh3_64_hexdigest(np.ascontiguousarray(input_ids, dtype="<i8").tobytes())


def file_digest(path: Path) -> str:
    """Hash a file's bytes."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, xxhash.xxh3_64).hexdigest()


def vocabulary_fingerprint(tokenizer: Any, vocab_size: int) -> dict[str, Any]:
    """Return what identifies a vocabulary: a hash of its tokens with their ids, and its size."""
    tokens = json.dumps(sorted(tokenizer.get_vocab().items())).encode()
    return {"tokens": xxhash.xxh3_64_hexdigest(tokens), "size": vocab_size}


class References:
    """The reference's log-probabilities of the pairs in one JSONL file."""

    def __init__(self, data: Path) -> None:
        """Read the scores beside a data set.

        Raises:
            BadInput: there are none, or they were made from other data, with a temperature other
                than 1, or from records that are not pairs.
        """
        self._data, self._scores = data, scores_file_of(data)
        how = f"mcore-qwen3vl score REFERENCE {data} --out {self._scores}"
        require_facts(self._scores, data, how, instead=" or --reference adapter")
        log_probs: list[list[float]] = []
        digests: list[list[str]] = []
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
        # Arrays of (records, 2): chosen, rejected.
        self._log_probs = np.array(log_probs, np.float64).reshape(-1, 2)
        self._digests = np.array(digests, "U16").reshape(-1, 2)

    def log_probs_of(self, index: int, sides: Sequence[np.ndarray]) -> tuple[float, float]:
        """Return the log-probabilities of a record's chosen and rejected answer.

        `sides` are the tokens of both sequences, (T,) int64 each.

        Raises:
            BadSample: the record has none.
            BadInput: the answers do not have the tokens that were scored.
        """
        if index in self._errors:
            raise BadSample(f"it has no reference in {self._scores}: {self._errors[index]}")
        if [token_digest(tokens) for tokens in sides] != self._digests[index].tolist():
            raise _other_tokens_error(self._data, index, self._scores)
        chosen, rejected = self._log_probs[index].tolist()
        return chosen, rejected


def _other_tokens_error(data: Path, index: int, scores: Path) -> BadInput:
    line = line_of(ensure_index(data), index)
    return BadInput(
        f"{data}:{line} no longer has the tokens that it had when {scores} was made: the "
        "processor, the chat template or the budgets of images and videos differ. Score the data "
        "again with the settings of training."
    )


def require_facts(
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
    file = facts_file_of(scores)
    try:
        facts: dict[str, Any] = parse_json(file.read_text(encoding="utf-8"))["settings"]
        made_of, made_at = facts["data"], facts["temperature"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise BadInput(
            f"{file}, which belongs to {scores}, cannot be read ({type(error).__name__}: {error}): "
            f"make both again with `{how}`."
        ) from error
    if made_at != temperature:
        raise BadInput(
            f"{scores} was made with temperature {made_at:g}, and {temperature:g} is needed: make "
            f"it again with `{how}`."
        )
    if made_of != file_digest(data):
        raise BadInput(
            f"{scores} was not made from the current content of {data}: make it again with `{how}`."
        )
    return facts


def encode_top(ids: np.ndarray, log_probs: np.ndarray) -> dict[str, str]:
    """Return ids (n, k) and log-probabilities (n, k + 1) as values of a line of JSON."""
    values = zip(_ENCODED.items(), (ids, log_probs), strict=True)
    return {
        name: base64.b64encode(array.astype(dtype).tobytes()).decode()
        for (name, dtype), array in values
    }


def write_teacher(lines: Path, out: Path) -> None:
    """Write the file of a teacher."""
    import pyarrow as pa

    place = {"file": pa.string(), "line": pa.int64(), "record": pa.int64()}
    seen = {"digest": pa.string(), "log_prob": pa.float64(), "tokens": pa.int64()}
    top = {"top_ids": pa.large_list(pa.int32()), "top_log_probs": pa.large_list(pa.float32())}
    schema = pa.schema({**place, "error": pa.string(), **seen, **top})
    with pa.OSFile(str(out), "wb") as file, pa.ipc.new_file(file, schema) as writer:
        for rows in batched(_teacher_rows(lines), _ROWS):
            writer.write_batch(pa.RecordBatch.from_pylist(list(rows), schema))


def _teacher_rows(lines: Path) -> Iterator[dict[str, Any]]:
    """Yield the lines of JSON with the arrays that `encode_top` encoded."""
    with lines.open(encoding="utf-8") as file:
        for entry in map(json.loads, file):
            for name, dtype in _ENCODED.items():
                if name in entry:
                    entry[name] = np.frombuffer(base64.b64decode(entry[name]), dtype)
            yield entry


@dataclass(frozen=True)
class Top(TaskInputs):
    """The likeliest tokens of a teacher at n positions, as tensors.

    A live teacher's have (B, s) instead of n: this rank's positions in every row.
    """

    ids: Tensor  # (n, k) int32
    log_probs: Tensor  # (n, k + 1) float32: the last one is that of all other tokens together


def join_tops(parts: Sequence[Top]) -> Top:
    """Join the tokens of several samples, and add a row for positions that are not trained."""
    ids, log_probs = parts[0].ids, parts[0].log_probs
    nothing = ids.new_zeros(1, ids.shape[1]), log_probs.new_full((1, log_probs.shape[1]), -1.0)
    return Top(
        torch.cat([*(part.ids for part in parts), nothing[0]]),
        torch.cat([*(part.log_probs for part in parts), nothing[1]]),
    )


def teachers_of(
    sources: Sequence[Source], temperature: float | None, tokenizer: Any, vocab_size: int
) -> list[Teacher]:
    """Open the files beside the data sets; return none without a `temperature`."""
    if temperature is None:
        return []
    vocabulary = vocabulary_fingerprint(tokenizer, vocab_size)
    return [Teacher(source.path, vocabulary, temperature) for source in sources]


class Teacher:
    """The likeliest tokens of a teacher for the records of one JSONL file."""

    def __init__(self, data: Path, vocabulary: dict[str, Any], temperature: float) -> None:
        """Open the file beside a data set.

        Raises:
            BadInput: there is no such file, or it is cut off, or was made from other data, with
                another temperature, or by a teacher with another vocabulary.
        """
        self._data, self._file = data, teacher_file_of(data)
        how = f"mcore-qwen3vl score TEACHER {data} --top-k {TEACHER_TOP_K}"
        how += f" --temperature {temperature:g}" if temperature != 1 else ""
        facts = require_facts(self._file, data, how, temperature)
        if facts.get("vocabulary") != vocabulary:
            raise BadInput(
                f"{self._file} was made by {facts['checkpoint']['path']}, whose vocabulary is not "
                "that of --hf-model: a teacher needs the student's tokenizer and vocab_size."
            )
        self._k: int = facts["top_k"]
        require_extra("pyarrow", "--loss distill")
        import pyarrow as pa

        try:
            self._rows = pa.ipc.open_file(pa.memory_map(str(self._file)))
        except (OSError, pa.ArrowInvalid) as error:
            raise BadInput(
                f"{self._file} cannot be read and may be cut off ({error}): make it again with "
                f"`{how}`."
            ) from error

    def top_of(self, index: int, input_ids: np.ndarray, trained_tokens: int) -> Top:
        """Return the teacher's tokens for the trained tokens of a record of (T,) int64 tokens.

        Raises:
            BadSample: the record has none.
            BadInput: the record does not have the tokens that the teacher saw.
        """
        batch, place = divmod(index, _ROWS)
        row = self._rows.get_batch(batch).slice(place, 1)
        if error := row["error"][0].as_py():
            raise BadSample(f"it has no scores in {self._file}: {error}")
        seen = row["digest"][0].as_py(), row["tokens"][0].as_py()
        if seen != (token_digest(input_ids), trained_tokens):
            raise _other_tokens_error(self._data, index, self._file)
        values = (row[name][0].values.to_numpy() for name in _ENCODED)
        # A copy, since a tensor on the memory map could be written to.
        ids, log_probs = (torch.from_numpy(array.copy()) for array in values)
        return Top(ids.view(-1, self._k), log_probs.view(-1, self._k + 1))


def check_top_k(flag: str, k: int, vocab_size: int) -> None:
    """Raise BadInput unless `k`, which `flag` gives, is from 1 to `vocab_size`."""
    if not 1 <= k <= vocab_size:
        raise BadInput(
            f"{flag} is {k}; it must be from 1 to the {vocab_size} tokens of the vocabulary."
        )
