"""Pretraining runs on real WebDatasets, indexed on first use, with validation."""

from __future__ import annotations

import io
import json
import tarfile
from collections.abc import Iterable
from pathlib import Path

import pytest
from PIL import Image

from mcore_qwen3vl.layout import Layout
from mcore_qwen3vl.tiny import write_tiny_checkpoint
from mcore_qwen3vl.verification.curves import DISTRIBUTED, Job, train
from mcore_qwen3vl.verification.parity.comparison import verify_parity
from tests.training.log import validation_losses

COLOURS = ((220, 30, 30), (30, 180, 60), (40, 60, 220), (230, 220, 40))


def picture(index: int, kind: str) -> bytes:
    """Return a real PNG or JPEG; its size and colour depend on `index`."""
    stream = io.BytesIO()
    size = 32 + 8 * (index % 3), 24 + 16 * (index % 2)
    Image.new("RGB", size, COLOURS[index % len(COLOURS)]).save(stream, kind)
    return stream.getvalue()


def write_tar(path: Path, samples: Iterable[dict[str, bytes]]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with tarfile.open(path, "w") as tar:
        for key, parts in enumerate(samples):
            for suffix, content in parts.items():
                info = tarfile.TarInfo(f"{path.stem}-{key:03d}.{suffix}")
                info.size = len(content)
                tar.addfile(info, io.BytesIO(content))


def caption(index: int) -> dict[str, bytes]:
    return {"jpg": picture(index, "JPEG"), "txt": f"caption number {index}".encode()}


def interleaved(index: int) -> dict[str, bytes]:
    record = {
        "texts": [f"page {index} shows ", None, " and then ", None, " at the end"],
        "images": [None, "0.png", None, "1.png", None],
    }
    images = {f"{i}.png": picture(index + i, "PNG") for i in range(2)}
    return {"json": json.dumps(record).encode(), **images}


@pytest.fixture
def corpus(tmp_path: Path) -> Path:
    """Write tars without an index: two of captions, two of documents, one to validate on."""
    folder = tmp_path / "corpus"
    for shard in range(2):
        write_tar(folder / "captions" / f"{shard}.tar", map(caption, range(10)))
        write_tar(folder / "pages" / f"{shard}.tar", map(interleaved, range(10)))
    write_tar(folder / "held-out" / "0.tar", map(interleaved, range(20, 28)))
    return folder


def blend(folder: Path) -> Path:
    """Write an energon metadataset over the folders, with validation data."""
    file = folder / "blend.yaml"
    file.write_text(
        "__module__: megatron.energon\n__class__: MetadatasetV2\nsplits:\n"
        "  train:\n    blend:\n"
        "      - {path: captions, weight: 1}\n      - {path: pages, weight: 3}\n"
        "  val:\n    path: held-out\n    split_part: train\n"
    )
    return file


EVALUATION = ("--eval-iters", "1", "--eval-interval", "2")


def test_a_blend_of_unindexed_tars_packed(dense: Path, corpus: Path, tmp_path: Path) -> None:
    yaml = blend(corpus)
    job = Job(
        dense, yaml, Layout.parse("dp2"), steps=4, batch=2, seq_length=256, packing=True,
        flags=("--valid-data-path", str(yaml), *EVALUATION, "--packing-buffer", "6"),
    )  # fmt: skip
    log = train(job, tmp_path / "run")
    assert len(log) == job.steps
    assert log[-1]["lm loss"] < log[0]["lm loss"]
    assert sum(entry["packing efficiency"] for entry in log) / len(log) > 0.6
    assert all(entry["trained tokens/s"] < entry["tokens/s"] for entry in log)  # not images' ones
    assert all(entry["skipped samples"] == 0 for entry in log)
    losses = validation_losses(tmp_path / "run")
    assert len(losses) == 2
    assert losses[1] < losses[0]


@pytest.mark.slow
def test_weighted_folders_padded(dense: Path, corpus: Path, tmp_path: Path) -> None:
    words = ["0.001", str(corpus / "captions"), "0.999", str(corpus / "pages")]
    job = Job(dense, corpus, steps=3, batch=4, seq_length=256)
    log = train(
        job, tmp_path / "run", "--data-path", *words, "--micro-batch-size", "2",
        "--valid-data-path", str(corpus / "held-out"), *EVALUATION,
    )  # fmt: skip
    assert len(log) == job.steps
    for entry in log:  # four documents of two images; captions are too rare to appear
        tokens = entry["packing efficiency"] * 4 * job.seq_length
        assert round(entry["images/s"] / entry["tokens/s"] * tokens, 3) == 8
    assert len(validation_losses(tmp_path / "run")) == 2  # at the interval and at the end


@pytest.mark.slow
@pytest.mark.parametrize(
    ("moe", "layout", "other"), [(False, "cp2", "tp2"), (True, "tp2+sp", "ep2xdp2")]
)
def test_a_hybrid_model_trains_and_leaves_what_hugging_face_loads(
    moe: bool, layout: str, other: str, corpus: Path, tmp_path: Path
) -> None:
    model = write_tiny_checkpoint(tmp_path / "model", family="qwen3.5", moe=moe)
    data, run, export = corpus / "captions", tmp_path / "run", tmp_path / "export"
    job = Job(model, data, Layout.parse(layout), steps=4, batch=2, seq_length=256, packing=True)
    log = train(job, tmp_path / "log", "--save", str(run), "--save-hf", str(export), *DISTRIBUTED)
    assert log[-1]["lm loss"] < log[0]["lm loss"]
    report = verify_parity(
        export / "iter_0000004", Layout.parse(other), ["mixed", "packed"], checkpoint=run
    )
    report.require()
