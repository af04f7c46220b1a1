"""What files of scores have in common: their paths beside the data, and the facts of their making.

``mcore-qwen3vl score`` writes them, and training reads some. Beside each is a ``.json`` file with
the summary, the settings and the digest of the data.
"""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

import numpy as np
import xxhash

from mcore_qwen3vl.data.indexes import ensure_index, line_of
from mcore_qwen3vl.errors import BadInput
from mcore_qwen3vl.json_and_yaml import parse_json


def scores_file_of(data: Path, ending: str = "scores.jsonl") -> Path:
    """Return the default path of a data set's scores, or of another file beside it."""
    data = data if data.name else data.absolute()
    return data.with_name(f"{data.name.removesuffix('.jsonl')}.{ending}")


def facts_file_of(scores: Path) -> Path:
    """Return the file that says which data and settings scores were made from."""
    return scores.with_suffix(".json")


def token_digest(input_ids: np.ndarray) -> str:
    """Hash the tokens of a sequence, (T,) int64; different tokens practically never collide."""
    return xxhash.xxh3_64_hexdigest(np.ascontiguousarray(input_ids, dtype="<i8").tobytes())


def trained_digest(loss_weights: np.ndarray) -> str:
    """Hash which tokens of a sequence are trained, by the weights (T,) of predicting each."""
    return token_digest(np.flatnonzero(loss_weights[1:] > 0))  # the first one is never predicted


def file_digest(path: Path) -> str:
    """Hash a file's bytes."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, xxhash.xxh3_64).hexdigest()


def require_facts(
    scores: Path, data: Path, command: str, temperature: float = 1.0, *, other_remedy: str = ""
) -> dict[str, Any]:
    """Return the settings that scores were made with.

    Args:
        command: the one that makes them, for messages.
        temperature: the temperature that they should have.
        other_remedy: what else helps if the data set is no JSONL file.

    Raises:
        BadInput: there are no scores beside the data, the settings cannot be read, or the data or
            the temperature is another one.
    """
    if data.suffix != ".jsonl":
        raise BadInput(
            f"{data} is not a JSONL file, and scores are only read beside JSONL files: use JSONL "
            f"data{other_remedy}."
        )
    if not scores.exists():
        raise BadInput(f"{scores} does not exist. Let the model score {data} with `{command}`.")
    file = facts_file_of(scores)
    try:
        facts: dict[str, Any] = parse_json(file.read_text(encoding="utf-8"))["settings"]
        made_of, made_at = facts["data"], facts["temperature"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise BadInput(
            f"{file}, which belongs to {scores}, cannot be read ({type(error).__name__}: {error}): "
            f"make both again with `{command}`."
        ) from error
    if made_at != temperature:
        raise BadInput(
            f"{scores} was made with temperature {made_at:g}, and {temperature:g} is needed: make "
            f"it again with `{command}`."
        )
    if made_of != file_digest(data):
        raise BadInput(
            f"{scores} was not made from the current content of {data}: make it again with "
            f"`{command}`."
        )
    return facts


def other_tokens_error(data: Path, index: int, scores: Path) -> BadInput:
    """Make the error of a record whose tokens, or trained tokens, differ from the scored ones."""
    line = line_of(ensure_index(data), index)
    return BadInput(
        f"{data}:{line} no longer has the tokens that it had when {scores} was made, or trains "
        "others of them: the processor, the chat template, --train-on or the budgets of images and "
        "videos differ. Score the data again with the settings of training."
    )
