"""Host memory that saving and loading a checkpoint takes with the distributed optimizer.

Ranks train a step on the CPU with gloo and save; a second run loads. A rank's peak during saving or
loading, beyond what it held before, is divided by the float32 state of its shard: weights and two
moments, 12 bytes per parameter, not divided over the data-parallel ranks. The first figures are
Megatron's, which gathers that state; the second are those of our training.

    python benchmarks/checkpoint_memory.py [--dp 2 4 8] [--width 1024]
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import torch.distributed as dist

from mcore_qwen3vl import console
from mcore_qwen3vl.layout import Layout
from mcore_qwen3vl.runtime import cpu
from mcore_qwen3vl.tiny.records import write_image_qa
from mcore_qwen3vl.tiny.tiny_checkpoint import write_tiny_checkpoint
from mcore_qwen3vl.verify.job import DISTRIBUTED, Job, train

PARTS = "mcore_qwen3vl.training.checkpoints.optimizer.keep_own_parts"
BYTES = 12  # per parameter: float32 weight and moments


def measured(original: Callable[..., Any], file: Path) -> Callable[..., Any]:
    """Wrap `original` to write its peak beyond what this process held before into `file`."""

    def call(*args: Any, **kwargs: Any) -> Any:
        Path("/proc/self/clear_refs").write_text("5")  # sets the peak to what is held now
        before = _status("VmRSS")
        result = original(*args, **kwargs)
        with file.open("a") as stream:
            stream.write(f"{dist.get_rank()} {_status('VmHWM') - before}\n")
        return result

    return call


def _status(name: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    (line,) = (line for line in lines if line.startswith(f"{name}:"))
    return int(line.split()[1]) * 1024


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--dp", type=int, nargs="+", default=[2, 4, 8])
    parser.add_argument("--width", type=int, default=1024)
    options = parser.parse_args()
    cpu.install(training=True)

    ranks = ("first rank", "the others")
    ways = [f"{way}: {rank}" for way in ("gathered", "in parts") for rank in ranks]
    columns = ("dp", "what", "GB of the state", *ways)
    table = console.table("Host memory beyond what was held", *columns)
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        model, count = checkpoint(folder / "model", options.width)
        data = write_image_qa(folder / "data", 16)
        for dp in options.dp:
            layout = Layout(dp=dp)
            job = Job(model, data, layout, steps=1, batch=dp, flags=DISTRIBUTED, seq_length=128)
            with mock.patch(PARTS):
                gathered = run(job, folder / f"dp{dp}-gathered")
            for what, peaks in run(job, folder / f"dp{dp}").items():
                shares = (*shown(gathered[what], count), *shown(peaks, count))
                table.add_row(str(dp), what, f"{BYTES * count / 1e9:.2f}", *shares)
    console.output.print(table)


def shown(peaks: list[int], count: int) -> tuple[str, str]:
    """Return the peaks of the first rank and of the others, divided by the whole state."""
    first, *others = (f"{peak / (BYTES * count):.2f}" for peak in peaks)
    return first, "-".join(sorted({min(others), max(others)}))


def checkpoint(path: Path, width: int) -> tuple[Path, int]:
    """Write a small model with a wide language model; return it and its parameter count."""
    from safetensors import safe_open

    write_tiny_checkpoint(path, text={"hidden_size": width, "intermediate_size": 3 * width})
    count = 0
    for file in path.glob("*.safetensors"):
        with safe_open(file, "pt") as tensors:
            count += sum(tensors.get_tensor(name).numel() for name in tensors.keys())  # noqa: SIM118
    return path, count


def run(job: Job, folder: Path) -> dict[str, list[int]]:
    """Return the ranks' peaks of saving and of loading again."""
    from megatron.training import training

    folder.mkdir()
    names = {"save": "save_checkpoint", "load": "load_checkpoint"}
    originals = {name: getattr(training, name) for name in names.values()}
    for what, name in names.items():
        setattr(training, name, measured(originals[name], folder / what))
    flags = ("--save", str(folder / "run"), "--save-interval", "1", "--load", str(folder / "run"))
    train(job, folder / "first", *flags)
    (folder / "load").unlink()  # there was nothing to load
    train(job, folder / "second", *flags)
    for name, original in originals.items():
        setattr(training, name, original)
    return {what: peaks_of(folder / what, job.layout.dp) for what in names}


def peaks_of(file: Path, ranks: int) -> list[int]:
    """Return the first peak that each rank wrote."""
    found: dict[int, int] = {}
    for line in file.read_text().splitlines():
        rank, peak = map(int, line.split())
        found.setdefault(rank, peak)
    return [found[rank] for rank in range(ranks)]


if __name__ == "__main__":
    main()
