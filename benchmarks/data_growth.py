"""Time and memory of `data check` by the number of records: alone, with workers, and in parts.

    python benchmarks/data_growth.py [--text 100000 1000000] [--images 100000] [--members 10000]
    python benchmarks/data_growth.py --page FILE  # a page of Markdown too, for docs/measurements

The records are made first, in a folder that is removed at the end: conversations of about 80 words;
the same with a picture of 320 x 240 in a file of its own, a JPEG; and such pairs in one tar. Each
row is a command, or the commands of all parts, started as a user starts them, with a tiny model's
processor. Up to 100,000 records of text and the tar are also checked whole, and the reports are
compared.

Processor time is of all processes of a command; they have one thread each. Memory is what the
process that reports holds, and the largest of those that read, as the system counts it (resident,
sampled each fifth of a second); libraries take most of it.
"""

from __future__ import annotations

import argparse
import io
import json
import os
import random
import subprocess
import sys
import tarfile
import tempfile
import threading
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import psutil
from PIL import Image

from mcore_qwen3vl.errors import CheckFailed
from mcore_qwen3vl.tiny import write_tiny_checkpoint
from mcore_qwen3vl.verification.figures import write_figures

WORDS = ("house", "street", "which", "is", "not", "as", "old", "it", "looks", "from", "the")
PARTS, LARGEST_WHOLE = 4, 100_000
HEADER = (
    "| records | how | processor seconds | a record, ms | reports, GB | reads, GB |\n"
    "|---|---|---:|---:|---:|---:|"
)  # fmt: skip
_SAMPLED_SECONDS = 0.2


@dataclass
class Usage:
    """What commands took.

    Attributes:
        processor: seconds of processor time, of all processes.
        reporting: bytes of the first process of a command, at its peak.
        reading: bytes of the largest of its other processes.
    """

    processor: float = 0.0
    reporting: int = 0
    reading: int = 0

    def run(self, words: Sequence[str]) -> bytes:
        """Run a command of ``mcore-qwen3vl``, add what it took, and return its standard output.

        Raises:
            CheckFailed: its exit code is not 0.
        """
        before = os.times()
        command = [sys.executable, "-m", "mcore_qwen3vl", *words]
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)
        ended = threading.Event()
        sampler = threading.Thread(target=self._sample, args=(process.pid, ended))
        sampler.start()
        output, _ = process.communicate()
        ended.set()
        sampler.join()
        after = os.times()
        self.processor += after.children_user - before.children_user
        self.processor += after.children_system - before.children_system
        if process.returncode:
            raise CheckFailed(f"{' '.join(command)} ended with {process.returncode}: {output!r}")
        return output

    def _sample(self, pid: int, ended: threading.Event) -> None:
        while not ended.wait(_SAMPLED_SECONDS):
            with suppress(psutil.NoSuchProcess):
                first = psutil.Process(pid)
                self.reporting = max(self.reporting, first.memory_info().rss)
                for other in first.children(recursive=True):
                    with suppress(psutil.NoSuchProcess):
                        self.reading = max(self.reading, other.memory_info().rss)

    def row(self, records: str, count: int, how: str) -> str:
        reading = f"{self.reading / 1e9:.2f}" if self.reading else ""
        return (
            f"| {records} | {how} | {self.processor:,.0f} "
            f"| {1000 * self.processor / count:.2f} | {self.reporting / 1e9:.2f} | {reading} |"
        )


def conversation(rng: random.Random, picture: str | None) -> str:
    question, answer = (" ".join(rng.choices(WORDS, k=count)) for count in (20, 60))
    content: object = question
    if picture is not None:
        content = [{"type": "image", "image": picture}, {"type": "text", "text": question}]
    messages = [{"role": "user", "content": content}, {"role": "assistant", "content": answer}]
    return json.dumps({"messages": messages})


def jpeg(rng: np.random.Generator) -> bytes:
    """Return a picture of 320 x 240 that no other equals."""
    coarse = Image.fromarray(rng.integers(0, 256, (6, 8, 3), dtype=np.uint8))
    file = io.BytesIO()
    coarse.resize((320, 240), Image.Resampling.BILINEAR).save(file, "JPEG")
    return file.getvalue()


def write_text(folder: Path, count: int) -> Path:
    rng, file = random.Random(count), folder / f"text-{count}.jsonl"
    with file.open("w", encoding="utf-8") as stream:
        stream.writelines(f"{conversation(rng, None)}\n" for _ in range(count))
    return file


def write_images(folder: Path, count: int) -> Path:
    rng, pixels, file = random.Random(count), np.random.default_rng(0), folder / "images.jsonl"
    with file.open("w", encoding="utf-8") as stream:
        for number in range(count):
            picture = folder / "pictures" / f"{number // 1000:04d}" / f"{number:07d}.jpg"
            picture.parent.mkdir(parents=True, exist_ok=True)
            picture.write_bytes(jpeg(pixels))
            stream.write(f"{conversation(rng, str(picture.relative_to(folder)))}\n")
    return file


def write_tar(folder: Path, members: int) -> Path:
    """Write a folder with one tar: a picture and a record of each of half as many samples."""
    rng, pixels, shards = random.Random(members), np.random.default_rng(1), folder / "tars"
    shards.mkdir()
    with tarfile.open(shards / "shard-000000.tar", "w") as tar:
        for number in range(members // 2):
            record = conversation(rng, "jpg").encode()  # a part of the same sample, by its suffix
            for suffix, content in (("jpg", jpeg(pixels)), ("json", record)):
                member = tarfile.TarInfo(f"{number:07d}.{suffix}")
                member.size = len(content)
                tar.addfile(member, io.BytesIO(content))
    return shards


def measure(data: Path, records: str, count: int, model: Path, *, also_whole: bool) -> list[str]:
    """Check a data set in parts, or also whole; return the rows of the table.

    Raises:
        CheckFailed: a command failed, or two reports differ.
    """
    check = ["data", "check", str(data), "--hf-model", str(model), "--json"]
    in_parts = [*check, "--parts", str(data.with_name(f"{data.name}-parts"))]
    each = [[*in_parts, "--part", f"{part}/{PARTS}"] for part in range(PARTS)]
    commands = {
        f"{PARTS} parts, one after the other": each,
        "their merge": [[*in_parts, "--merge"]],
    }
    if also_whole:
        processes = os.cpu_count() or 1
        whole = {"one process": 1, f"{processes} processes": processes}
        commands |= {how: [[*check, "--workers", str(n)]] for how, n in whole.items()}
    rows, reports = [], {}
    for how, some in commands.items():
        usage = Usage()
        reports[how] = [usage.run(words) for words in some][-1]
        rows.append(usage.row(records, count, how))
        print(rows[-1], flush=True)
    if len({report for how, report in reports.items() if "parts" not in how}) > 1:
        raise CheckFailed(f"the reports of {data} differ")
    return rows


def main() -> None:
    """Measure what the command line names, and print a table."""
    formatter = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=formatter)
    parser.add_argument("--text", nargs="*", type=int, default=[100_000, 1_000_000])
    parser.add_argument("--images", nargs="*", type=int, default=[100_000])
    parser.add_argument("--members", nargs="*", type=int, default=[10_000])
    parser.add_argument("--folder", type=Path, help="where the data are made; default: /tmp")
    parser.add_argument("--page", type=Path, help="file for a page of Markdown")
    options = parser.parse_args()
    sizes = (
        [(count, write_text, "text", count) for count in options.text]
        + [(count, write_images, "an image each", count) for count in options.images]
        + [(count, write_tar, "an image each, in a tar", count // 2) for count in options.members]
    )
    lines = [HEADER]
    print(HEADER)
    with tempfile.TemporaryDirectory(dir=options.folder) as folder:
        model = Path(folder) / "model"
        write_tiny_checkpoint(model)
        for number, (size, write, kind, count) in enumerate(sizes):
            place = Path(folder) / str(number)
            place.mkdir()
            data = write(place, size)
            whole = write is not write_images and count <= LARGEST_WHOLE
            lines += measure(data, f"{count:,}, {kind}", count, model, also_whole=whole)
    if options.page:
        about = (__doc__ or "").split("\n\n", 2)[2]
        text = "\n".join([about, *lines])
        command = "python benchmarks/data_growth.py"
        write_figures(options.page, "Growth of data check", command, text)


if __name__ == "__main__":
    main()
