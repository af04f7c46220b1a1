"""A teacher's likeliest tokens, ``NAME.topk.arrow`` beside each ``NAME.jsonl``.

``mcore-qwen3vl score --top-k`` writes it; docs/distillation.md describes it. The file is not
compressed, so it is read through a memory map.
"""

from __future__ import annotations

import base64
import json
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import batched
from pathlib import Path
from typing import Any, Self

import numpy as np
import torch
from torch import Tensor

from mcore_qwen3vl.data.processor import vocabulary_fingerprint
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
from mcore_qwen3vl.data.task_inputs import TaskInputs
from mcore_qwen3vl.errors import BadInput
from mcore_qwen3vl.losses.answers import UNCUT_ANSWER
from mcore_qwen3vl.machine import require_extra

TEACHER_TOP_K = 64
"""The usual number of a teacher's likeliest tokens that a student learns from."""

_ROWS = 64
"""Rows of a record batch, by which a row is found."""
_ENCODED = {"top_ids": "<i4", "top_log_probs": "<f4"}


def teacher_file_of(data: Path) -> Path:
    """Return the default path of a teacher's likeliest tokens for a data set."""
    return scores_file_of(data, "topk.arrow")


def check_top_k(flag: str, k: int, vocab_size: int) -> None:
    """Raise BadInput unless `k`, which `flag` gives, is from 1 to `vocab_size`."""
    if not 1 <= k <= vocab_size:
        raise BadInput(
            f"{flag} is {k}; it must be from 1 to the {vocab_size} tokens of the vocabulary."
        )


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
    seen = {"digest": pa.string(), "trained": pa.string()}
    seen |= {"log_prob": pa.float64(), "tokens": pa.int64()}
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

    @classmethod
    def of_records(cls, records: Sequence[Any], assemble: Callable[..., Any], config: Any) -> Self:
        """Join the tokens of the records, and add a row for positions that are not trained."""
        tops: list[Top] = [record.beside for record in records]
        ids, log_probs = tops[0].ids, tops[0].log_probs
        nothing = ids.new_zeros(1, ids.shape[1]), log_probs.new_full((1, log_probs.shape[1]), -1.0)
        return cls(
            torch.cat([*(top.ids for top in tops), nothing[0]]),
            torch.cat([*(top.log_probs for top in tops), nothing[1]]),
        )


@dataclass(frozen=True)
class TeacherFile(Sidecar):
    """The sidecar with a teacher's likeliest tokens."""

    temperature: float
    """The number that the teacher's logits were divided by."""

    uncut = UNCUT_ANSWER

    def file_of(self, data: Path) -> Path:
        return teacher_file_of(data)

    def open(self, paths: Sequence[Path], tokenizer: Any, vocab_size: int) -> list[Teacher]:
        vocabulary = vocabulary_fingerprint(tokenizer, vocab_size)
        return [Teacher(path, vocabulary, self.temperature) for path in paths]

    def flags(self) -> dict[str, Any]:
        return {"--distill-temperature": self.temperature}

    def make_up(
        self, data: Path, records: Sequence[Sequence[Any]], tokenizer: Any, vocab_size: int
    ) -> None:
        """Write a teacher for whom k tokens and all others together are equally likely."""
        k, lines = TEACHER_TOP_K, []
        for (plan,) in records:
            count = plan.trained_tokens
            ids = np.tile(np.arange(k), (count, 1))
            scores = np.full((count, k + 1), -math.log(k + 1))
            entry = {"digest": token_digest(plan.input_ids), "tokens": count}
            entry["trained"] = trained_digest(plan.loss_weights)
            lines.append(json.dumps(entry | encode_top(ids, scores)))
        partial = data.with_suffix(".partial")
        partial.write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
        write_teacher(partial, self.file_of(data))
        settings = {
            "data": file_digest(data),
            "temperature": self.temperature,
            "top_k": k,
            "checkpoint": {"path": "nobody"},
            "vocabulary": vocabulary_fingerprint(tokenizer, vocab_size),
        }
        facts_file_of(self.file_of(data)).write_text(
            json.dumps({"settings": settings}), encoding="utf-8"
        )


class Teacher(OpenSidecar):
    """The likeliest tokens of a teacher for the records of one JSONL file."""

    def __init__(self, data: Path, vocabulary: dict[str, Any], temperature: float) -> None:
        """Open the file beside a data set.

        Raises:
            BadInput: there is no such file, or it is cut off, or was made from other data, with
                another temperature, or by a teacher with another vocabulary.
        """
        self._data, self._file = data, teacher_file_of(data)
        command = f"mcore-qwen3vl score TEACHER {data} --top-k {TEACHER_TOP_K}"
        command += f" --temperature {temperature:g}" if temperature != 1 else ""
        facts = require_facts(self._file, data, command, temperature)
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
                f"`{command}`."
            ) from error

    def look_up(self, number: int, plans: Sequence[Any]) -> Top:
        """Return the teacher's tokens for the trained tokens of a record of one sequence.

        Raises:
            BadSample: the record has none.
            BadInput: the record does not have the tokens that the teacher saw, or trains others.
        """
        batch, place = divmod(number, _ROWS)
        row = self._rows.get_batch(batch).slice(place, 1)
        if error := row["error"][0].as_py():
            raise BadSample(f"it has no scores in {self._file}: {error}")
        plan = plans[0]  # scored with --top-k, a record of several has an error
        seen = row["digest"][0].as_py(), row["tokens"][0].as_py()
        if seen != (token_digest(plan.input_ids), plan.trained_tokens):
            raise other_tokens_error(self._data, number, self._file)
        # Files of earlier versions have no such column.
        trained = row["trained"][0].as_py() if "trained" in self._rows.schema.names else None
        if trained not in (None, trained_digest(plan.loss_weights)):
            raise other_tokens_error(self._data, number, self._file)
        values = (row[name][0].values.to_numpy() for name in _ENCODED)
        # A copy, since a tensor on the memory map could be written to.
        ids, log_probs = (torch.from_numpy(array.copy()) for array in values)
        return Top(ids.view(-1, self._k), log_probs.view(-1, self._k + 1))
