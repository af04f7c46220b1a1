"""Data throughput per worker for each kind of file, against Hugging Face's processor alone.

    python benchmarks/formats.py [--hf-model DIR] [--samples 200] [--output formats.json]

The same samples, photos with questions, are read as JSONL, as a JSON array in LLaVA's format, as
Parquet with the images in it, as a Hugging Face dataset from ``save_to_disk`` and as a WebDataset.
Samples and measures are those of ``benchmarks/data.py``: CPU time of one process on one thread, in
turns. ``ours`` is what one data worker does, up to packed batches whose pixels are bytes;
``ours_normalised`` includes normalising the pixels as the processor does.
"""

from __future__ import annotations

import io
import json
import tarfile
import tempfile
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
from data import arguments, measure_against, report, tiny_model, write_samples
from datasets import Dataset, Features, List, Value
from datasets import Image as ImageFeature

SPEAKERS = {"user": "human", "assistant": "gpt"}


def write_all(folder: Path, samples: int) -> dict[str, Path]:
    """Write every kind of file, and return their paths by name."""
    jsonl = write_samples(folder, samples, "image")
    records = [json.loads(line) for line in jsonl.read_text(encoding="utf-8").splitlines()]
    kinds = {"jsonl": jsonl, "llava_json": folder / "llava.json", "parquet": folder / "a.parquet"}
    llava = [
        {
            "image": record["images"][0],
            "conversations": [
                {"from": SPEAKERS[turn["role"]], "value": turn["content"]}
                for turn in record["messages"]
            ],
        }
        for record in records
    ]
    kinds["llava_json"].write_text(json.dumps(llava, indent=2), encoding="utf-8")
    whole = [
        {**record, "images": [(folder / name).read_bytes() for name in record["images"]]}
        for record in records
    ]
    pq.write_table(pa.Table.from_pylist(whole), kinds["parquet"], row_group_size=100)
    turns = List({"role": Value("string"), "content": Value("string")})
    columns = {
        "messages": [record["messages"] for record in records],
        "images": [[str(folder / name) for name in record["images"]] for record in records],
    }
    features = Features({"messages": turns, "images": List(ImageFeature())})
    kinds["save_to_disk"] = folder / "saved"
    Dataset.from_dict(columns, features=features).save_to_disk(kinds["save_to_disk"])
    kinds["webdataset"] = folder / "tars"
    kinds["webdataset"].mkdir()
    with tarfile.open(kinds["webdataset"] / "0.tar", "w") as tar:
        for index, record in enumerate(whole):
            named = json.dumps({**record, "images": ["jpg"]}).encode()
            for suffix, content in (("json", named), ("jpg", record["images"][0])):
                info = tarfile.TarInfo(f"{index:06}.{suffix}")
                info.size = len(content)
                tar.addfile(info, io.BytesIO(content))
    return kinds


def main() -> None:
    args = arguments(__doc__)
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        model = args.hf_model or tiny_model(folder / "model")
        kinds = write_all(folder, args.samples)
        results: dict[str, Any] = {
            name: measure_against(
                model, kinds["jsonl"], path, args.samples, args.rounds, args.seq_length
            )
            for name, path in kinds.items()
        }
    report(results, args)


if __name__ == "__main__":
    main()
