"""A task for reinforcement learning that a tiny model learns: name the colour of a picture.

``python -m mcore_qwen3vl.tiny.colours DIR`` writes the data, and VERL calls :func:`compute_score`.
"""

from __future__ import annotations

import io
import json
import random
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from PIL import Image

from mcore_qwen3vl.tiny.records import COLOURS

TASK = {name[0]: COLOURS[name] for name in ("red", "green", "blue")}
"""Colours by their first letter, which is the answer: one token of the tiny tokenizer."""

# Two lengths: VERL 0.9.1 misreads the positions of a batch whose samples all have one length.
QUESTIONS = ("Colour?", "What colour?")
SIDE = 16  # pixels; four tokens of a tiny model
NOISE = 15


def compute_score(data_source: str, solution_str: str, ground_truth: str, **_: Any) -> float:
    """Return VERL's reward of an answer: 1.0 for the right letter alone, otherwise 0.0."""
    return float(solution_str.strip() == ground_truth)


def write_colour_task(folder: Path) -> None:
    """Write ``train.parquet`` and ``val.parquet`` for VERL, and ``warm_up/train.jsonl``.

    The answers of ``warm_up`` are random letters: supervised training on them teaches what an
    answer looks like, and nothing about colours.
    """
    import pyarrow
    from pyarrow import parquet

    generator = random.Random(0)
    folder.mkdir(parents=True)
    for split, count in (("train", 96), ("val", 24)):
        rows = [_row(*drawn) for drawn in _drawn(generator, count)]
        parquet.write_table(pyarrow.Table.from_pylist(rows), folder / f"{split}.parquet")
    warm_up = folder / "warm_up"
    warm_up.mkdir()
    lines = []
    for index, (_, picture, question) in enumerate(_drawn(generator, 512)):
        name = f"{index:03d}.png"
        (warm_up / name).write_bytes(picture)
        asked = [{"type": "image", "image": name}, {"type": "text", "text": question}]
        answer = generator.choice(list(TASK))
        turns = [{"role": "user", "content": asked}, {"role": "assistant", "content": answer}]
        lines.append(json.dumps({"messages": turns}) + "\n")
    (warm_up / "train.jsonl").write_text("".join(lines), "utf-8")


def _drawn(generator: random.Random, count: int) -> Iterator[tuple[str, bytes, str]]:
    """Yield answers, pictures in the PNG format and questions, each in turn."""
    letters = list(TASK)
    for index in range(count):
        letter = letters[index % len(letters)]
        colour = tuple(
            min(max(value + generator.randint(-NOISE, NOISE), 0), 255) for value in TASK[letter]
        )
        written = io.BytesIO()
        Image.new("RGB", (SIDE, SIDE), colour).save(written, "PNG")
        yield letter, written.getvalue(), QUESTIONS[index % len(QUESTIONS)]


def _row(letter: str, picture: bytes, question: str) -> dict[str, Any]:
    return {
        "data_source": "colours",
        "prompt": [{"role": "user", "content": f"<image>{question}"}],
        "images": [{"bytes": picture}],
        "reward_model": {"style": "rule", "ground_truth": letter},
    }


if __name__ == "__main__":
    write_colour_task(Path(sys.argv[1]))
