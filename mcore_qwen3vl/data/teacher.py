"""A teacher's likeliest tokens, which ``score --top-k`` writes and distillation reads.

``NAME.topk.arrow`` beside ``NAME.jsonl`` is an Arrow IPC file with one row for each record, in
order. A row has the number of the record's trained tokens, n, and for each of them, one after the
other, the ids of the teacher's k likeliest tokens (int32, n x k values) and k + 1 log-probabilities
(float32, n x (k + 1) values): theirs, and that of all other tokens together. It is not compressed,
so it is read through a memory map. A record that cannot be used has ``error``. ``NAME.topk.json``
holds the summary, the teacher, the settings, and the digests of the data and the vocabulary.
"""

from __future__ import annotations

import base64
import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import batched
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from mcore_qwen3vl.data.encoding.planning import Plan
from mcore_qwen3vl.data.loading.sources import Source
from mcore_qwen3vl.data.records.flaws import BadSample
from mcore_qwen3vl.data.scores import checked_facts, digest, other_tokens, teacher_of, vocabulary_of
from mcore_qwen3vl.errors import BadInput
from mcore_qwen3vl.machine import require_extra
from mcore_qwen3vl.objectives.settings import TEACHER_TOP_K

_ROWS = 64
"""Rows of a record batch, by which a row is found."""
_ENCODED = {"top_ids": "<i4", "top_log_probs": "<f4"}


def encoded_top(ids: np.ndarray, log_probs: np.ndarray) -> dict[str, str]:
    """Return ids (n, k) and log-probabilities (n, k + 1) as values of a line of JSON."""
    values = zip(_ENCODED.items(), (ids, log_probs), strict=True)
    return {
        name: base64.b64encode(one.astype(dtype).tobytes()).decode()
        for (name, dtype), one in values
    }


def write_teacher(lines: Path, out: Path) -> None:
    """Write the file of a teacher."""
    import pyarrow as pa

    place = {"file": pa.string(), "line": pa.int64(), "record": pa.int64()}
    seen = {"digest": pa.string(), "log_prob": pa.float64(), "tokens": pa.int64()}
    top = {"top_ids": pa.large_list(pa.int32()), "top_log_probs": pa.large_list(pa.float32())}
    schema = pa.schema({**place, "error": pa.string(), **seen, **top})
    with pa.OSFile(str(out), "wb") as file, pa.ipc.new_file(file, schema) as writer:
        for rows in batched(_rows(lines), _ROWS):
            writer.write_batch(pa.RecordBatch.from_pylist(list(rows), schema))


def _rows(lines: Path) -> Iterator[dict[str, Any]]:
    with lines.open(encoding="utf-8") as file:
        for entry in map(json.loads, file):
            for name, dtype in _ENCODED.items():
                if name in entry:
                    entry[name] = np.frombuffer(base64.b64decode(entry[name]), dtype)
            yield entry


@dataclass(frozen=True)
class Top:
    """The likeliest tokens of a teacher at n positions, as tensors.

    A live teacher's have (B, s) instead of n: this rank's positions in every row.

    Attributes:
        ids: (n, k) int32.
        log_probs: (n, k + 1) float32: the last one is that of all other tokens together.
    """

    ids: Tensor
    log_probs: Tensor

    def mapped(self, function: Callable[[Tensor], Tensor]) -> Top:
        """Return the tokens with each tensor replaced by what `function` makes of it."""
        return Top(function(self.ids), function(self.log_probs))


def joined(parts: Sequence[Top]) -> Top:
    """Join the tokens of several samples, and add a row for positions that are not trained."""
    ids, log_probs = parts[0].ids, parts[0].log_probs
    nothing = ids.new_zeros(1, ids.shape[1]), log_probs.new_full((1, log_probs.shape[1]), -1.0)
    return Top(
        torch.cat([*(one.ids for one in parts), nothing[0]]),
        torch.cat([*(one.log_probs for one in parts), nothing[1]]),
    )


def teachers_of(
    sources: Sequence[Source], temperature: float | None, *, tokenizer: Any, vocab_size: int
) -> list[Teacher]:
    """Open the files beside the data sets; return none without a `temperature`."""
    if temperature is None:
        return []
    vocabulary = vocabulary_of(tokenizer, vocab_size)
    return [Teacher(source.path, vocabulary, temperature) for source in sources]


class Teacher:
    """The likeliest tokens of a teacher for the records of one JSONL file."""

    def __init__(self, data: Path, vocabulary: dict[str, Any], temperature: float) -> None:
        """Open the file beside a data set.

        Raises:
            BadInput: there is no such file, or it is cut off, or was made from other data, with
                another temperature, or by a teacher with another vocabulary.
        """
        self._data, self._file = data, teacher_of(data)
        how = f"mcore-qwen3vl score TEACHER {data} --top-k {TEACHER_TOP_K}"
        how += f" --temperature {temperature:g}" if temperature != 1 else ""
        facts = checked_facts(self._file, data, how, temperature)
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

    def of(self, index: int) -> Top:
        """Return the teacher's tokens for the trained tokens of a record."""
        row = self._row(index)
        if error := row["error"][0].as_py():
            raise BadSample(f"it has no scores in {self._file}: {error}")
        # A copy, since a tensor on the memory map could be written to.
        ids, log_probs = (
            torch.from_numpy(row[name][0].values.to_numpy().copy()) for name in _ENCODED
        )
        return Top(ids.view(-1, self._k), log_probs.view(-1, self._k + 1))

    def check(self, index: int, plan: Plan) -> None:
        """Raise BadInput unless a record has the tokens that the teacher saw."""
        row = self._row(index)
        seen = row["digest"][0].as_py(), row["tokens"][0].as_py()
        if seen != (digest(plan.input_ids), int((plan.loss_weights[1:] > 0).sum())):
            raise other_tokens(self._data, index, self._file)

    def _row(self, index: int) -> Any:
        number, row = divmod(index, _ROWS)
        return self._rows.get_batch(number).slice(row, 1)
