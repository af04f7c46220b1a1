"""The files of a case's data: its records in every form that training reads, and their pictures."""

from __future__ import annotations

import io
import json
import random
import re
import tarfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

Form = Literal["jsonl", "json", "parquet", "dataset", "tars", "mixture", "weighted mixture"]
"""What the data are: a file, a folder of Hugging Face's datasets or of tars, or a mixture."""


def named(form: Form, media: str | None) -> str:
    """Return what ``--data-path`` names; with a folder of media, a mixture that names it, too."""
    if media is not None or form.endswith("mixture"):
        return "train.yaml"
    return f"train.{form}"


def names_of_records(form: Form, count: int) -> list[str]:
    """Return what training calls each of so many records: its file and its number there."""
    if form == "jsonl":
        return [f"train.jsonl:{number}" for number in range(1, count + 1)]
    if form == "tars":
        parts = [part for part, _ in _in_halves(count)]
        return [f"{part}.tar[{number}]" for number, part in enumerate(parts, 1)]
    if form.endswith("mixture"):
        return [f"train-{part}.jsonl:{number}" for part, number in _in_halves(count)]
    file = "data-00000-of-00001.arrow" if form == "dataset" else f"train.{form}"
    return [f"{file}[{number}]" for number in range(1, count + 1)]


def texts(form: Form, records: Sequence[str], media: str | None) -> dict[str, str]:
    """Return the text of each file, by its name; what is no text is made of the first by a writer.

    The folder of the media is named in a mixture.
    """
    if form.endswith("mixture"):
        shares = ("weight: 0.7", "weight: 0.3")
        if form == "mixture":
            shares = ("epochs: 1", "epochs: 1")
        entries = [
            f"  - path: train-{part}.jsonl\n    {share}\n" for part, share in enumerate(shares)
        ]
        files = {f"train-{part}.jsonl": _text(half) for part, half in enumerate(_halves(records))}
        return {**files, "train.yaml": "datasets:\n" + "".join(entries)}
    if form == "json":
        return {"train.json": "[\n" + ",\n".join(records) + "\n]\n"}
    files = {"train.jsonl": _text(records)}
    if media is not None:
        files["train.yaml"] = f"datasets:\n  - path: train.jsonl\n    media: {json.dumps(media)}\n"
    return files


def _halves(records: Sequence[str]) -> tuple[Sequence[str], Sequence[str]]:
    """Return the records of each of two files, neither without one if there are two."""
    middle = (len(records) + 1) // 2
    return records[:middle], records[middle:]


def _in_halves(count: int) -> list[tuple[int, int]]:
    """Return for each record its half, from 0, and its number there, from 1."""
    return [
        (part, number)
        for part, half in enumerate(_halves("." * count))
        for number in range(1, len(half) + 1)
    ]


def _text(lines: Sequence[str]) -> str:
    return "".join(f"{line}\n" for line in lines)


def write_parquet(lines: str, table: str) -> None:
    """Write the records of a JSONL file as a table: lists of texts as such, the rest as JSON."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    pq.write_table(pa.table(_columns(lines)), table)


def write_dataset(lines: str, folder: str) -> None:
    """Write the records of a JSONL file as ``datasets`` saves a data set, with a table's columns.

    A relative path of a picture starts at the folder, so its pictures are linked there.
    """
    from datasets import Dataset  # type: ignore[import-untyped]

    Dataset.from_dict(_columns(lines)).save_to_disk(folder)
    for picture in Path(lines).parent.glob("*.png"):
        (Path(folder) / picture.name).symlink_to(picture.resolve())


def write_tars(lines: str, folder: str) -> None:
    """Write the records of a JSONL file as two tars, in which a sample has its pictures beside it.

    A picture's name is its part's suffix, so the records are as they were.
    """
    Path(folder).mkdir()
    rows = Path(lines).read_text("utf-8").splitlines()
    key = 0  # no two tars may have a sample of the same key
    for part, half in enumerate(_halves(rows)):
        with tarfile.open(Path(folder) / f"{part}.tar", "w") as tar:
            for line in half:
                key += 1
                _add(tar, f"{key}.json", line.encode())
                for name in pictures([line]):
                    _add(tar, f"{key}.{name}", picture(name))


def _add(tar: tarfile.TarFile, name: str, content: bytes) -> None:
    member = tarfile.TarInfo(name)
    member.size = len(content)
    tar.addfile(member, io.BytesIO(content))


WRITERS: Mapping[Form, Callable[[str, str], None]] = {
    "parquet": write_parquet, "dataset": write_dataset, "tars": write_tars,
}  # fmt: skip
"""What makes data of a form from a JSONL file: of its path, and of the path to write."""


def _columns(lines: str) -> dict[str, list[Any]]:
    with open(lines, encoding="utf-8") as stream:
        rows = [json.loads(line) for line in stream]
    keys = list(dict.fromkeys(key for row in rows for key in row))
    return {key: _column([row.get(key) for row in rows]) for key in keys}


def _column(values: list[Any]) -> list[Any]:
    """Return values of one kind, and texts, as they are; others as JSON text."""
    some = [value for value in values if value is not None]
    texts = all(
        isinstance(value, list) and all(isinstance(one, str | None) for one in value)
        for value in some
    )
    kinds = {type(value) for value in some}
    if kinds == {int, float}:
        return [None if value is None else float(value) for value in values]
    if texts or (len(kinds) == 1 and kinds <= {str, bool, int, float}):
        return values
    return [
        value if value is None or isinstance(value, str) else json.dumps(value, ensure_ascii=False)
        for value in values
    ]


_PICTURE = re.compile(r"(\d+)x(\d+)-(\d+)\.png")


def pictures(records: Sequence[str]) -> list[str]:
    """Return the names of the pictures that records refer to."""
    found = (match[0] for line in records for match in _PICTURE.finditer(line))
    return list(dict.fromkeys(found))


def picture(name: str) -> bytes:
    """Return the PNG of a name such as ``24x16-3.png``: width, height, number of its colours.

    It has sixteen colours in blocks, so that its bytes are few and no two places are alike.
    """
    from PIL import Image

    match = _PICTURE.fullmatch(name)
    assert match is not None, name
    width, height, number = map(int, match.groups())
    colours = random.Random(number)
    image = Image.new("RGB", (4, 4))
    image.putdata([tuple(colours.randrange(256) for _ in range(3)) for _ in range(16)])
    written = io.BytesIO()
    image.resize((width, height), Image.Resampling.NEAREST).save(written, "PNG", optimize=True)
    return written.getvalue()
