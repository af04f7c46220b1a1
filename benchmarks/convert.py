"""Conversion against a plain copy of the same bytes, in the same run and with the same durability.

Makes checkpoints of real sizes with random weights. Then, round by round, it copies the files and
converts them in both directions. Each step ends with everything on disk (fsync), and starts with
its files out of the page cache and other files in it, as on a machine that has been up for a while.
(In a virtual machine the host takes free memory back, and the first process to use it again waits
for it, up to a second per gigabyte.) Reports the ratio to the copy, GB/s, CPU time and peak memory.
Memory is the proportional set size of all processes without mapped files, which are page cache. It
is measured in separate runs, because measuring it slows a process with mapped files.

    python benchmarks/convert.py [--models 2B 30B-A3B:6] [--rounds 3] [--workers N] [--scratch DIR]
                                 [--json FILE]
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import resource
import shutil
import statistics
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint  # as all imports, not timed; `hf_to_mcore` imports it last
from rich.table import Table

from mcore_qwen3vl import console
from mcore_qwen3vl.config import Architecture
from mcore_qwen3vl.converters.convert import hf_to_mcore, mcore_to_hf
from mcore_qwen3vl.converters.hf import shards
from mcore_qwen3vl.converters.mapping.table import hf_shapes, table
from mcore_qwen3vl.published_configs import PUBLISHED

ORDERS = (0, 1, 2, 3, 4), (1, 0, 4, 3, 2)
COPIES = {
    "HF to mcore": "copy of HF", "mcore to HF": "copy of mcore", "trained to HF": "copy of mcore",
}  # fmt: skip
"""The step that each conversion is compared with."""


def write_checkpoint(config: dict[str, Any], path: Path) -> Path:
    """Write a bf16 checkpoint with random values, in pieces."""
    path.mkdir(parents=True)
    (path / "config.json").write_text(json.dumps(config, indent=2))
    shapes = hf_shapes(table(Architecture.from_hf(config)))
    tensors = {n: shards.TensorSpec(torch.bfloat16, s) for n, s in shapes.items()}
    files = shards.plan_shards(tensors, shards.parse_size("5GB"))
    noise = memoryview((torch.randn(2**23) * 0.02).bfloat16().view(torch.uint8).numpy())
    for shard in files:
        with (path / shard.file).open("wb") as out:
            out.write(shard.header)
            left = shard.data_bytes
            while left:
                # pieces of an odd length, so that no two tensors are alike
                left -= out.write(noise[: min(left, len(noise) - 2 * 4999)])
    if len(files) > 1:
        (path / "model.safetensors.index.json").write_bytes(shards.index_json(files))
    return path


def export_as_trained(mcore: Path, target: Path, **options: Any) -> None:
    """Convert without the manifest, as a checkpoint from training: the zips' CRC-32 is checked."""
    manifest = mcore / "manifest.json"
    aside = manifest.rename(mcore.with_name(manifest.name))
    mcore_to_hf(mcore, target, **options)
    aside.rename(manifest)


def copy_durably(source: Path, target: Path) -> None:
    """Copy files in the fastest way that the standard library has, then fsync."""
    for file in (file for file in source.rglob("*") if file.is_file()):
        copied = target / file.relative_to(source)
        copied.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(file, copied)
        with copied.open("rb+") as handle:
            os.fsync(handle.fileno())


def drop_from_page_cache(path: Path) -> None:
    """Drop the files below `path` from the page cache."""
    for file in (file for file in path.rglob("*") if file.is_file()):
        with file.open("rb") as handle:
            os.fsync(handle.fileno())
            os.posix_fadvise(handle.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def fill_page_cache(filler: Path) -> None:
    """Read a new sparse file, which takes no disk space, with as many bytes as memory is free."""
    filler.unlink(missing_ok=True)
    lines = Path("/proc/meminfo").read_text().splitlines()
    free = next(int(line.split()[1]) * 1024 for line in lines if line.startswith("MemFree"))
    buffer = bytearray(16 * 2**20)
    with filler.open("w+b", buffering=0) as file:
        file.truncate(free)
        while file.readinto(buffer):
            pass


def measure_as_child(pipe: Any, function: Callable[..., object], args: tuple[Any, ...]) -> None:
    """Call `function` in this process; send its memory before, then seconds and CPU seconds."""
    torch.set_num_threads(1)
    pipe.send(memory_of(os.getpid()))
    pipe.recv()
    before, start = resource.getrusage(resource.RUSAGE_SELF), time.perf_counter()
    function(*args)
    wall, after = time.perf_counter() - start, resource.getrusage(resource.RUSAGE_SELF)
    cpu = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    pipe.send((wall, cpu))


def memory_of(pid: int) -> tuple[int, int]:
    """Return the proportional set size without mapped files and the resident size, in bytes."""
    sizes = {}
    try:
        for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()[1:]:
            name, value, *_ = line.split()
            sizes[name] = int(value) * 1024
    except (OSError, ValueError):
        return 0, 0
    return sizes.get("Pss_Anon:", 0) + sizes.get("Pss_Shmem:", 0), sizes.get("Rss:", 0)


def measure(
    function: Callable[..., object], *args: Any, look_at_memory: bool = False
) -> dict[str, float]:
    """Return seconds and CPU seconds, or peak memory and what the imports took of it."""
    context = multiprocessing.get_context("fork")
    ours, theirs = context.Pipe()
    process = context.Process(target=measure_as_child, args=(theirs, function, args))
    process.start()
    idle = ours.recv()
    peak, running = idle, threading.Event()

    def sample_memory() -> None:
        nonlocal peak
        while not running.wait(0.02):
            now = memory_of(process.pid or 0)
            peak = max(peak[0], now[0]), max(peak[1], now[1])

    sampler = threading.Thread(target=sample_memory)
    if look_at_memory:
        sampler.start()
    ours.send("go")  # the child waits for it, so that the sampler has begun
    wall, cpu = ours.recv()
    running.set()
    if look_at_memory:
        sampler.join()
    process.join()
    if not look_at_memory:
        return {"seconds": wall, "cpu_seconds": cpu}
    return {"peak_gb": peak[0] / 1e9, "idle_gb": idle[0] / 1e9, "peak_rss_gb": peak[1] / 1e9}


def run_round(
    source: Path, scratch: Path, workers: int | None, number: int, *, look_at_memory: bool = False
) -> dict[str, dict[str, float]]:
    """Run each step once: the copy first in even rounds, the conversion first in odd ones."""
    mcore, back, copied = scratch / "mcore", scratch / "back", scratch / "copy"
    exported = scratch / "exported"
    options = {"workers": workers}
    results = {}
    steps = [
        ("copy of HF", copy_durably, source, copied),
        ("HF to mcore", lambda a, b: hf_to_mcore(a, b, **options), source, mcore),
        ("copy of mcore", copy_durably, mcore, copied),
        ("mcore to HF", lambda a, b: mcore_to_hf(a, b, **options), mcore, back),
        ("trained to HF", lambda a, b: export_as_trained(a, b, **options), mcore, exported),
    ]
    for name, function, origin, target in (steps[i] for i in ORDERS[number % 2]):
        drop_from_page_cache(origin)
        os.sync()
        fill_page_cache(scratch / "filler")
        results[name] = measure(function, origin, target, look_at_memory=look_at_memory)
        drop_from_page_cache(target)
        shutil.rmtree(copied, ignore_errors=True)
    for path in (mcore, back, exported):
        shutil.rmtree(path)
    return results


def compare(source: Path, scratch: Path, workers: int | None, rounds: int) -> dict[str, Any]:
    """Return medians of each step, by its name, and its ratios to a copy of the same files.

    Ratios are taken within a round, so that a busy machine slows both sides.
    """
    measured = [run_round(source, scratch, workers, number) for number in range(rounds)]
    memory = run_round(source, scratch, workers, 0, look_at_memory=True)
    nbytes = sum(file.stat().st_size for file in source.glob("*.safetensors"))
    summary: dict[str, Any] = {"bytes": nbytes}
    for name in measured[0]:
        seconds = statistics.median(figures[name]["seconds"] for figures in measured)
        summary[name] = {
            "seconds": seconds,
            "gb_per_s": nbytes / 1e9 / seconds,
            "cpu_seconds": statistics.median(figures[name]["cpu_seconds"] for figures in measured),
            "all_seconds": [round(figures[name]["seconds"], 2) for figures in measured],
            **memory[name],
        }
        copied = COPIES.get(name)
        for key, ratio in (("seconds", "ratio"), ("cpu_seconds", "cpu_ratio")) if copied else ():
            ratios = [figures[name][key] / figures[copied][key] for figures in measured]
            summary[name][ratio] = statistics.median(ratios)
            summary[name][f"all_{ratio}s"] = [round(value, 2) for value in ratios]
    return summary


def result_table(results: dict[str, Any]) -> Table:
    """Return a table with a row for each step of each model."""
    columns = ("", "GB", "s", "GB/s", "ratio", "CPU s", "ratio", "peak GB", "RSS GB")
    keys = ("seconds", "gb_per_s", "ratio", "cpu_seconds", "cpu_ratio", "peak_gb", "peak_rss_gb")
    rows = [
        (f"{model} {step}", f"{result['bytes'] / 1e9:.2f}",
         *(f"{figures[key]:.2f}" if key in figures else "" for key in keys))
        for model, result in results.items()
        for step, figures in result.items() if step != "bytes"
    ]  # fmt: skip
    return console.table("", columns[0], *(f">{name}" for name in columns[1:]), rows=rows)


def main() -> None:
    """Measure each model of the command line, print a table and write the figures."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--models", nargs="+", default=["2B"], help="NAME or NAME:LAYERS")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--workers", type=int, default=None)
    parser.add_argument("--scratch", type=Path, default=Path(tempfile.gettempdir()))
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    results = {}
    for model in args.models:
        with tempfile.TemporaryDirectory(dir=args.scratch) as folder:
            name, _, layers = model.partition(":")
            file = f"{name.lower().replace('-', '_')}.json"
            config = json.loads((PUBLISHED / file).read_text(encoding="utf-8"))
            if layers:
                config["text_config"]["num_hidden_layers"] = int(layers)
            source = write_checkpoint(config, Path(folder) / "source")
            results[model] = compare(source, Path(folder), args.workers, args.rounds)
        console.output.print(result_table(results))
    if args.json:
        args.json.write_text(json.dumps(results, indent=2) + "\n")


if __name__ == "__main__":
    main()
