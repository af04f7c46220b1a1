"""What scoring reads and writes: micro-batches of a data set's records, and the file of scores.

Records are read, planned and packed block by block. A run computes a whole block together and
appends its lines to the file, beside which it writes their summary. An interrupted run continues
with the block that it was in, so that every line is the same as in an uninterrupted run.
"""

from __future__ import annotations

import base64
import json
import math
import os
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from itertools import batched
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from mcore_qwen3vl.config import Architecture
from mcore_qwen3vl.data.config import DataConfig, Source
from mcore_qwen3vl.data.datasets import CrudeSamples
from mcore_qwen3vl.data.encoding.batch import Batch, Batcher
from mcore_qwen3vl.data.encoding.packing import best_fit
from mcore_qwen3vl.data.encoding.planning import Plan, spare_plan
from mcore_qwen3vl.data.encoding.preparation import Preparation
from mcore_qwen3vl.data.places import RecordPlace, place_of
from mcore_qwen3vl.data.processor import require_fitting
from mcore_qwen3vl.data.records.parse import SIDES
from mcore_qwen3vl.data.records.reading import BadSample, OverlongSample, reason_of
from mcore_qwen3vl.data.records.tasks import POSITIVE
from mcore_qwen3vl.data.scores import facts_file_of, token_digest, trained_digest
from mcore_qwen3vl.errors import BadInput
from mcore_qwen3vl.files import refuse_links, write_at_once
from mcore_qwen3vl.json_and_yaml import parse_json
from mcore_qwen3vl.losses.registry import detected_form
from mcore_qwen3vl.losses.teacher_file import write_teacher
from mcore_qwen3vl.model.inputs import PixelScale
from mcore_qwen3vl.unused.fields import Unused


@dataclass(frozen=True)
class Planned:
    """One sequence of a record, tokenised."""

    record: int
    name: str  # in its batch, see `_sequence_name`
    plan: Plan
    source: int  # number of its data set


@dataclass
class BlockResults:
    """The results for a block of records, from one rank or several."""

    scores: dict[str, dict[str, Any]] = field(default_factory=dict)
    """Log-probabilities and other results of each sequence, by its name."""
    errors: dict[int, str] = field(default_factory=dict)
    """The reasons why records cannot be scored, by the record's number."""
    digests: dict[int, dict[str, dict[str, str]]] = field(default_factory=dict)
    """By the record's number, digests of each of its sequences, by their sides, in order."""
    unused: dict[Unused, None] = field(default_factory=dict)
    """What is not used of the records, in order."""
    places: dict[int, RecordPlace] = field(default_factory=dict)
    """The records' places in their files, by the record's number."""

    def __or__(self, other: BlockResults) -> BlockResults:
        return BlockResults(
            *(getattr(self, f.name) | getattr(other, f.name) for f in fields(BlockResults))
        )

    def entry(self, record: int) -> dict[str, Any]:
        """Return what is written for a record, besides its place."""
        if record in self.errors:
            return {"error": self.errors[record]}
        sides = {
            side: self.scores[_sequence_name(record, side)] | digests
            for side, digests in self.digests[record].items()
        }
        return sides.get("") or sides


def _digests_of(plan: Plan) -> dict[str, str]:
    """Return digests of a sequence's tokens, and of which of them are trained, if any are."""
    digests = {"digest": token_digest(plan.input_ids)}
    if plan.trained_tokens:
        digests["trained"] = trained_digest(plan.loss_weights)
    return digests


def _sequence_name(record: int, side: str) -> str:
    """Return a sequence's name in its batch; `side` is its name among the record's, or empty."""
    return f"{record} {side}"


class Records:
    """A reader that encodes records as training does.

    Args:
        config: settings, with `packing` or one sequence a row; the budgets are set on `processor`.
        width_multiple: the number that the length of a batch must be a multiple of.
        alone: whether a record of several sequences is bad.
    """

    def __init__(
        self,
        samples: CrudeSamples,
        sources: Sequence[Source],
        architecture: Architecture,
        processor: Any,
        config: DataConfig,
        width_multiple: int,
        *,
        alone: bool = False,
    ) -> None:
        require_fitting(processor, architecture)
        self._samples = samples
        self._architecture, self._config = architecture, config
        self._multiple, self._alone = width_multiple, alone
        self._preparation = Preparation(processor, config, sources)
        self._form = config.records or detected_form("--loss")
        self._pad_id = processor.tokenizer.pad_token_id
        self._results = BlockResults()

    def take_results(self) -> BlockResults:
        """Return the results, except scores, for the records that were read since the last call."""
        results, self._results = self._results, BlockResults()
        return results

    def plan(self, records: Sequence[int]) -> list[list[Planned]]:
        """Choose which sequences of `records` share a micro-batch."""
        planned = [sequence for record in records for sequence in self._plan_record(record)]
        if not self._config.packing:
            return [[sequence] for sequence in planned]
        lengths = [self._config.padded(len(sequence.plan.input_ids)) for sequence in planned]
        packs = best_fit(lengths, self._config.seq_length)
        return [[planned[i] for i in pack] for pack in packs]

    def batches(self, micros: Sequence[Sequence[Planned]], count: int) -> Iterator[Batch]:
        """Yield the micro-batches with their pixels, then empty ones up to `count` in all."""
        for micro in [*micros, *[()] * (count - len(micros))]:
            yield self._make_batch(micro)

    def _plan_record(self, record: int) -> list[Planned]:
        """Tokenise the sequences of a record; return none if the record cannot be used.

        Its place is noted among the results, with its digests and what is not used of it, or else
        with the reason why it cannot be used.
        """
        crude = self._samples[record]
        self._results.places[record] = place_of(crude["__sources__"][0])
        try:
            raw = self._preparation.raw(crude)
            plans = self._preparation.plan_each(raw, self._form)
            if self._alone and len(plans) > 1:
                raise BadSample("--top-k is for records of one sequence; it has several.")
        except OverlongSample as error:
            self._results.errors[record] = f"{OVERLONG}{error}"
            return []
        except Exception as error:  # as in the loader, any exception makes the record bad
            self._results.errors[record] = reason_of(error)
            return []
        for plan in plans.values():
            self._results.unused |= dict.fromkeys(plan.unused)
        self._results.digests[record] = {side: _digests_of(plan) for side, plan in plans.items()}
        return [
            Planned(record, _sequence_name(record, side), plan, raw.source)
            for side, plan in plans.items()
        ]

    def _make_batch(self, micro: Sequence[Planned]) -> Batch:
        """Make a micro-batch of the sequences whose pixels can be decoded, as wide as they need."""
        named = {each.name: plan for each in micro if (plan := self._with_pixels(each))}
        # A rank may have no records left while others have.
        named = named or {"": spare_plan(self._pad_id)}
        return assemble(
            named,
            self._architecture,
            self._config,
            self._pad_id,
            self._preparation.scale,
            self._multiple,
        )

    def _with_pixels(self, sequence: Planned) -> Plan | None:
        """Return a sequence's plan with pixels; None, and note why, if they cannot be decoded."""
        try:
            pixels = self._preparation.load_pixels(sequence.plan, sequence.source)
        except Exception as error:
            self._results.errors[sequence.record] = reason_of(error)
            return None
        return replace(sequence.plan, pixels=pixels)


def assemble(
    named: Mapping[str, Plan],
    architecture: Architecture,
    config: DataConfig,
    pad_id: int,
    scale: PixelScale | None,
    multiple: int,
) -> Batch:
    """Make a micro-batch of sequences with pixels, by name, as wide as they need.

    Args:
        scale: of the pixels, see :class:`~mcore_qwen3vl.data.encoding.pixels.PixelLoader`.
        multiple: the number that the width must be a multiple of.
    """
    lengths = [config.padded(len(plan.input_ids)) for plan in named.values()]
    width = -(-sum(lengths) // multiple) * multiple
    batcher = Batcher(architecture, replace(config, seq_length=width), pad_id, scale)
    make = batcher.pack if config.packing else batcher.pad
    return make(list(named.values()), list(named))


class SequenceSource(Protocol):
    """What a scorer takes its sequences from, by their numbers."""

    def plan(self, records: Sequence[int]) -> list[list[Planned]]:
        """Return which sequences share a micro-batch."""

    def batches(self, micros: Sequence[Sequence[Planned]], count: int) -> Iterator[Batch]:
        """Yield the micro-batches with their pixels, then empty ones up to `count` in all."""

    def take_results(self) -> BlockResults:
        """Return what is known of the records that were planned since the last call."""


@dataclass
class Tally:
    """The summary of a file of scores; perplexities and entropy are over trained tokens."""

    records: int = 0
    scored: int = 0
    bad: int = 0
    overlong: int = 0
    tokens: int = 0
    log_prob: float = 0.0
    perplexity: float | None = None
    entropy: float | None = None
    pairs: int = 0
    chosen_perplexity: float | None = None
    rejected_perplexity: float | None = None
    chosen_preferred: float | None = None
    """Share of the pairs whose chosen answer has the higher log-probability, or reward."""
    embeddings: int = 0
    rewards: int = 0
    labels: dict[str, int] = field(default_factory=dict)
    """Number of records for which a classifier gives each label."""
    documents: int = 0
    positive_first: float | None = None
    """Share of the queries with a positive and negatives whose positive has the highest score."""

    def to_dict(self) -> dict[str, Any]:
        """Return all of it in JSON's types."""
        return asdict(self)


def values_in(entry: Mapping[str, Any], key: str) -> dict[str, Any]:
    """Return the values `key` in a line, by the names of its texts; one alone has no name."""
    return {
        name: part[key]
        for name, part in {"": entry, **entry}.items()
        if isinstance(part, Mapping) and key in part
    }


def write_parquet(lines: Path, out: Path) -> None:
    """Write one row for each text, in the order of the records; one with ``error`` for bad records.

    The columns are ``file``, ``line``, ``record``, ``text`` (the text's name in its record),
    ``embedding`` (float32 values, of length 1) and ``error``.
    """
    import pyarrow as pa
    import pyarrow.parquet as pq

    place = {"file": pa.string(), "line": pa.int64(), "record": pa.int64()}
    rest = {"text": pa.string(), "embedding": pa.list_(pa.float32()), "error": pa.string()}
    schema = pa.schema({**place, **rest})
    with pq.ParquetWriter(out, schema) as writer:
        for rows in batched(_embedding_rows(lines), 1024):
            writer.write_table(pa.Table.from_pylist(list(rows), schema))


def write_npy(lines: Path, out: Path) -> None:
    """Write an array (rows, H) float32 with the rows of `write_parquet`; NaN for bad records."""
    count = width = 0
    for row in _embedding_rows(lines):  # NumPy's file begins with the shape
        count, width = count + 1, max(width, len(row.get("embedding", ())))
    array = np.lib.format.open_memmap(out, "w+", np.dtype("<f4"), (count, width))
    for number, row in enumerate(_embedding_rows(lines)):
        array[number] = row.get("embedding", np.nan)
    array.flush()


def _embedding_rows(lines: Path) -> Iterator[dict[str, Any]]:
    """Yield a row for each embedding of a line of JSON; a line without any is one row."""
    with lines.open(encoding="utf-8") as file:
        for entry in map(json.loads, file):
            texts = values_in(entry, "embedding")
            if not texts:
                yield entry
            for name, encoded in texts.items():
                values = np.frombuffer(base64.b64decode(encoded), "<f4")
                yield {**entry, "text": name, "embedding": values}


_TABLES = {".parquet": write_parquet, ".npy": write_npy, ".arrow": write_teacher}
"""Writers of files that are made from the finished lines of JSON, by the file's suffix."""


class Output:
    """``OUT`` while it is written: ``OUT.partial``, and ``OUT.partial.json`` with the settings."""

    def __init__(self, path: Path, settings: dict[str, Any], block: int) -> None:
        self.path, self._settings, self._block = path, settings, block
        self._partial = path.with_name(f"{path.name}.partial")
        self._partial_facts = path.with_name(f"{path.name}.partial.json")

    def check(self, *, force: bool) -> None:
        """Raise BadInput if the output exists, was begun with other settings, or is damaged."""
        refuse_links(self._partial, self._partial_facts)
        if self.path.exists() and not force:
            raise BadInput(
                f"{self.path} exists: pass --force to replace it, or name another --out."
            )
        if force or not self._partial.exists():
            return
        try:
            begun = parse_json(self._partial_facts.read_text(encoding="utf-8"))["settings"]
        except (OSError, ValueError, LookupError, TypeError) as error:
            raise BadInput(
                f"{self._partial_facts} is missing or damaged, so the settings behind "
                f"{self._partial.name} are unknown. Pass --force to start again."
            ) from error
        wanted = json.loads(json.dumps(self._settings))
        if begun != wanted:
            differing = sorted(k for k in {*begun, *wanted} if begun.get(k) != wanted.get(k))
            raise BadInput(
                f"{self._partial} was begun with other settings ({', '.join(differing)}): finish "
                "it with the command that began it, or pass --force to begin anew."
            )

    def open(self, *, force: bool = False) -> int:
        """Start the file, or cut it to whole blocks to continue it; return the number of these."""
        if force:
            self._partial.unlink(missing_ok=True)
        if not self._partial.exists():
            write_at_once(self._partial_facts, json.dumps({"settings": self._settings}, indent=1))
            self._partial.touch()
        ends = [0]
        with self._partial.open("rb") as lines:
            for line in lines:
                if not _is_entry(line):  # cut or damaged: it and the rest are computed again
                    break
                ends.append(ends[-1] + len(line))
        blocks = (len(ends) - 1) // self._block
        os.truncate(self._partial, ends[blocks * self._block])
        return blocks

    def append(self, entries: Sequence[dict[str, Any]]) -> None:
        """Append a block and sync it to disk."""
        try:
            with self._partial.open("a", encoding="utf-8") as file:
                file.writelines(f"{json.dumps(entry)}\n" for entry in entries)
                file.flush()
                os.fsync(file.fileno())
        except OSError as error:
            raise BadInput(
                f"{self.path} cannot be written: {error.strerror}. What was scored is kept: make "
                "room and run the same command again, which continues."
            ) from error

    def tally(self) -> Tally:
        return tally(self._partial)

    def finish(self) -> Tally:
        """Write the summary, give the files their final names, and return the summary."""
        summary = tally(self._partial)
        facts = {"settings": self._settings, "summary": asdict(summary)}
        finished = self._partial
        if write := _TABLES.get(self.path.suffix):
            finished = self._partial.with_suffix(".table")
            write(self._partial, finished)
        # The scores come last: who finds them finds their facts. If this process is killed before,
        # the same command finishes what `OUT.partial` holds.
        self.path.unlink(missing_ok=True)
        write_at_once(facts_file_of(self.path), json.dumps(facts, indent=1) + "\n")
        os.replace(finished, self.path)
        self._partial.unlink(missing_ok=True)
        self._partial_facts.unlink(missing_ok=True)
        return summary


def _is_entry(line: bytes) -> bool:
    try:
        return line.endswith(b"\n") and isinstance(parse_json(line), dict)
    except ValueError:
        return False


OVERLONG = "over-long: "
"""The beginning of the error of a record that is longer than the sequence length."""


def tally(scores: Path) -> Tally:
    """Summarise a file of scores."""
    total = Tally()
    totals = dict.fromkeys(("", *SIDES), (0, 0.0))
    entropies = 0.0
    preferred = 0
    counted: Counter[str] = Counter()
    first: list[bool] = []  # of each query with negatives: whether the positive is
    with scores.open(encoding="utf-8") as lines:
        for entry in map(json.loads, lines):
            total.records += 1
            if "error" in entry:
                overlong = entry["error"].startswith(OVERLONG)
                total.overlong += overlong
                total.bad += not overlong
                continue
            total.scored += 1
            if "probabilities" in entry:
                label = entry["label"]
                counted.update(label if isinstance(label, list) else [label])
                continue
            total.embeddings += len(values_in(entry, "embedding"))
            if logits := values_in(entry, "logit"):
                total.documents += len(logits)
                positive = logits.pop(POSITIVE, None)
                if logits and positive is not None:
                    first.append(positive > max(logits.values()))
            rewards, log_probs = (values_in(entry, key) for key in ("reward", "log_prob"))
            total.rewards += len(rewards)
            compared = rewards or log_probs
            if SIDES[0] in compared:
                total.pairs += 1
                preferred += compared[SIDES[0]] > compared[SIDES[1]]
            for name, log_prob in log_probs.items():
                part = entry[name] if name else entry
                totals[name] = totals[name][0] + part["tokens"], totals[name][1] + log_prob
                entropies += part["tokens"] * part.get("entropy", math.nan)
    total.tokens = sum(tokens for tokens, _ in totals.values())
    total.log_prob = math.fsum(log_prob for _, log_prob in totals.values())
    total.perplexity = _perplexity(total.tokens, total.log_prob)
    total.chosen_perplexity, total.rejected_perplexity = (
        _perplexity(*totals[side]) for side in SIDES
    )
    if total.tokens and not math.isnan(entropies):
        total.entropy = entropies / total.tokens
    total.labels = dict(counted.most_common())
    if first:
        total.positive_first = sum(first) / len(first)
    if total.pairs:
        total.chosen_preferred = preferred / total.pairs
    return total


def _perplexity(tokens: int, log_prob: float) -> float | None:
    """Compute the perplexity; None if there are no tokens or a float cannot hold it."""
    if not tokens:
        return None
    try:
        return math.exp(-log_prob / tokens)
    except OverflowError:
        return None
