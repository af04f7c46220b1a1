"""Small data sets with real PNGs, made locally for demos, tests and simulated runs.

``python -m mcore_qwen3vl.tiny.records DIR`` writes the task for reinforcement learning.
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

COLOURS = {
    "red": (220, 30, 30),
    "green": (30, 180, 60),
    "blue": (40, 60, 220),
    "yellow": (230, 220, 40),
    "white": (245, 245, 245),
    "black": (15, 15, 15),
    "orange": (240, 140, 20),
    "purple": (140, 40, 170),
}
SIDES = (16, 24, 32, 40)

TASK = {name[0]: COLOURS[name] for name in ("red", "green", "blue")}
"""Colours by their first letter, which is the answer of the task for reinforcement learning: one
token of the tiny tokenizer."""

# Two lengths: VERL 0.9.1 misreads the positions of a batch whose samples all have one length.
QUESTIONS = ("Colour?", "What colour?")


def write_image_qa(
    folder: Path, samples: int, *, text_only_every: int | None = 4, seed: int = 0
) -> Path:
    """Write ``train.jsonl`` and its images.

    Each image shows two colours with some noise; the question asks for one of them. No two samples
    are alike, and their lengths differ. One sample in `text_only_every` has no image, if not None.
    """
    folder.mkdir(parents=True, exist_ok=True)
    generator = random.Random(seed)
    lines = []
    for index in range(samples):
        if text_only_every and index % text_only_every == text_only_every - 1:
            messages = _sum_question(generator)
        else:
            messages = _write_colour_question(folder, index, generator)
        lines.append(json.dumps({"messages": messages}))
    return _write_records(lines, folder)


def _sum_question(generator: random.Random) -> list[dict[str, Any]]:
    a, b = generator.randrange(100), generator.randrange(10_000)
    return [
        {"role": "user", "content": f"What is {a} plus {b}?"},
        {"role": "assistant", "content": f"It is {a + b}."},
    ]


def _write_colour_question(
    folder: Path, index: int, generator: random.Random
) -> list[dict[str, Any]]:
    """Write the image of a question, and return the messages about it."""
    left, right = generator.sample(sorted(COLOURS), 2)
    width, height = generator.choice(SIDES), generator.choice(SIDES)
    image = Image.new("RGB", (width, height), COLOURS[left])
    image.paste(COLOURS[right], (width // 2, 0, width, height))
    for _ in range(width):
        spot = generator.randrange(width), generator.randrange(height)
        image.putpixel(spot, tuple(generator.randrange(256) for _ in range(3)))
    name = f"{index:04d}.png"
    image.save(folder / name)
    side, answer = generator.choice([("left", left), ("right", right)])
    question = [{"type": "image", "image": name}, {"type": "text", "text": f"Which is {side}?"}]
    return [
        {"role": "user", "content": question},
        {"role": "assistant", "content": f"{answer}, number {generator.randrange(1000)}."},
    ]


def write_half_images(
    folder: Path,
    samples: int = 512,
    *,
    tokens: int = 512,
    images: int = 1,
    image_side: int = 16,
    token_pixels: int = 32,
    pairs: bool = False,
    labelled: bool = False,
) -> Path:
    """Write conversations whose tokens are half of images and half of text, by default.

    They are for runs whose results do not matter, such as those on the simulated GPU.

    A sample has about that many `tokens`, `image_side` of them along the side of an image. Each of
    the two sequences of preference records, `pairs`, is such a sample. Every second answer of
    `labelled` records is wanted.
    """
    folder.mkdir(parents=True)
    letters, lines = random.Random(0), []
    # The template and the question add 39 tokens, and two tokens bracket each image.
    answer_length = tokens - images * (image_side**2 + 2) - 39
    pixels = image_side * token_pixels
    pictures = min(samples, 64)  # each is in several samples, since writing one takes long
    for i in range(pictures):
        Image.new("RGB", (pixels, pixels), (i % 256, 90, 160)).save(folder / f"{i}.png")
    for i in range(samples):
        answers = [
            "".join(letters.choice("abcdefghijklmnop ") for _ in range(answer_length))
            for _ in range(2 if pairs else 1)
        ]
        question = [{"type": "image", "image": f"{i % pictures}.png"}] * images
        question.append({"type": "text", "text": "What is it?"})
        asked = {"role": "user", "content": question}
        record: dict[str, Any] = {"messages": [asked]}
        if pairs:
            record["chosen"], record["rejected"] = answers
        else:
            record["messages"].append({"role": "assistant", "content": answers[0]})
        if labelled:
            record["label"] = i % 2 == 0
        lines.append(json.dumps(record))
    return _write_records(lines, folder)


def _write_records(lines: list[str], folder: Path) -> Path:
    """Write ``train.jsonl``, and return its path for ``--data-path``."""
    file = folder / "train.jsonl"
    file.write_text("\n".join(lines) + "\n", "utf-8")
    return file


def compute_score(data_source: str, solution_str: str, ground_truth: str, **_: Any) -> float:
    """Return VERL's reward of an answer: 1.0 for the right letter alone, otherwise 0.0."""
    return float(solution_str.strip() == ground_truth)


def write_colour_task(folder: Path) -> None:
    """Write ``train.parquet`` and ``val.parquet`` for VERL, and ``warm_up/train.jsonl``.

    The task is to name the colour of a picture, which a tiny model learns. The answers of
    ``warm_up`` are random letters: supervised training on them teaches what an
    answer looks like, and nothing about colours.
    """
    import pyarrow
    from pyarrow import parquet

    generator = random.Random(0)
    folder.mkdir(parents=True)
    for split, count in (("train", 96), ("val", 24)):
        rows = [
            {
                "data_source": "colours",
                "prompt": [{"role": "user", "content": f"<image>{question}"}],
                "images": [{"bytes": picture}],
                "reward_model": {"style": "rule", "ground_truth": letter},
            }
            for letter, picture, question in _draw_pictures(generator, count)
        ]
        parquet.write_table(pyarrow.Table.from_pylist(rows), folder / f"{split}.parquet")
    warm_up = folder / "warm_up"
    warm_up.mkdir()
    lines = []
    for index, (_, picture, question) in enumerate(_draw_pictures(generator, 512)):
        name = f"{index:03d}.png"
        (warm_up / name).write_bytes(picture)
        asked = [{"type": "image", "image": name}, {"type": "text", "text": question}]
        answer = generator.choice(list(TASK))
        turns = [{"role": "user", "content": asked}, {"role": "assistant", "content": answer}]
        lines.append(json.dumps({"messages": turns}))
    _write_records(lines, warm_up)


def _draw_pictures(generator: random.Random, count: int) -> Iterator[tuple[str, bytes, str]]:
    """Yield answers, pictures in the PNG format and questions, each in turn."""
    letters = list(TASK)
    for index in range(count):
        letter = letters[index % len(letters)]
        colour = tuple(
            min(max(value + generator.randint(-15, 15), 0), 255) for value in TASK[letter]
        )
        written = io.BytesIO()
        Image.new("RGB", (SIDES[0], SIDES[0]), colour).save(written, "PNG")
        yield letter, written.getvalue(), QUESTIONS[index % len(QUESTIONS)]


if __name__ == "__main__":
    write_colour_task(Path(sys.argv[1]))
