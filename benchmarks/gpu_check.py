"""Everything that a machine with GPUs can prove, in one command and one report, without a network.

    make gpu-check                     # or: python3 benchmarks/gpu_check.py --out DIR
    make gpu-check ARGS="--shape 4B"   # for the benchmark and the memory, another size

The parts are: versions; parity of both specs with Hugging Face, on one GPU and on several; the
torch spec's attention kernels and experts in half precision, against float32; generation; the
training-step benchmark; twenty iterations of the training loop with the scripts' flags, to compare
the specs' losses; the memory of a real run against its rehearsal. Each part is a process with a
time limit. If one fails, that is reported and the next one starts. ``report.md`` and
``report.json`` hold the results, and each part has a log. The exit code is 1 if any part failed.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import re
import shlex
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

from mcore_qwen3vl.pretended.preload import preloaded  # noqa: E402

MODELS = ("dense", "moe", "moe-all")
TOTAL = 38 * 60  # seconds for all parts together
COMMAND = [sys.executable, "-c", "from mcore_qwen3vl.cli import main; main()"]
MEMORY_TOLERANCE = 0.05  # as a share of the rehearsed peak
VERSIONS = """
import json, importlib.metadata as meta, torch
assert torch.cuda.is_available(), "PyTorch finds no GPU"
names = ("torch", "megatron-core", "transformer-engine", "transformers", "mcore-qwen3vl")
def version(name):
    try: return meta.version(name)
    except meta.PackageNotFoundError: return None
devices = [torch.cuda.get_device_properties(i) for i in range(torch.cuda.device_count())]
import mcore_qwen3vl.training.run, mcore_qwen3vl.model.qwen3vl, mcore_qwen3vl.converters
print(json.dumps({**{name: version(name) for name in names}, "CUDA": torch.version.cuda,
    "cuDNN": torch.backends.cudnn.version(),
    "GPUs": [f"{d.name}, {d.total_memory / 2**30:.1f} GiB" for d in devices]}))
"""


@dataclass
class Part:
    """One process and its results."""

    name: str
    command: list[str]
    limit: float
    """Seconds."""
    read: Callable[[str], dict[str, Any]] = lambda printed: {}
    """Returns what the report shows, from standard output."""
    status: str = "not run"
    seconds: float = 0.0
    found: dict[str, Any] = field(default_factory=dict)


def main(argv: Sequence[str] | None = None) -> int:
    """Run all parts and return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--out", type=Path, default=Path("gpu-check"), help="the report's folder")
    parser.add_argument("--shape", default="2B", help="of benchmark and memory: tiny, 2B, 4B, …")
    parser.add_argument("--gpu", default="h200-141gb", help="kind that the rehearsal is for")
    parser.add_argument("--gpus", type=int, help="how many to use; default: all of the machine")
    options = parser.parse_args(argv)
    options.out.mkdir(parents=True, exist_ok=True)
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    os.environ["PYTHONPATH"] = f"{ROOT}:{os.environ.get('PYTHONPATH', '')}".rstrip(":")
    deadline = time.monotonic() + TOTAL
    done: list[Part] = []
    for part in parts(options):
        run(part, options.out, deadline)
        done.append(part)
        print(f"{part.status:9} {part.seconds:6.0f} s  {part.name}", flush=True)
        write(done, options.out)
    print(f"report: {options.out / 'report.md'}")
    return int(any(part.status != "ok" for part in done))


def parts(options: argparse.Namespace) -> Iterator[Part]:
    """Yield one part after the other; later ones depend on what the machine has."""
    yield Part("versions", [sys.executable, "-c", VERSIONS], 180, last_json)
    models = {name: options.out / f"tiny-{name}" for name in MODELS}
    for name, folder in models.items():
        if not folder.exists():
            code = "import sys; from benchmarks.gpu_check import tiny; tiny(*sys.argv[1:])"
            command = [sys.executable, "-c", code, name, str(folder)]
            yield Part(f"write a tiny {name} model", command, 120)
    gpus = options.gpus or count_gpus()
    specs = ["torch", *(["te"] if find_spec("transformer_engine") else [])]
    # The torch spec runs in float32 too. Transformer Engine's packed attention needs half
    # precision, as does the torch spec's variable-length kernel.
    for spec, dtype in [("torch", "fp32"), *((spec, "bf16") for spec in specs)]:
        # bf16 cannot judge tokens that rounding sends to other experts; with all experts it can.
        for name in ("dense", "moe" if dtype == "fp32" else "moe-all"):
            model = models[name]
            yield parity(f"{name}, one GPU", model, spec, dtype, [])
            if gpus > 1:
                used = even(gpus)
                yield parity(f"{name}, {used} GPUs", model, spec, dtype, layout(name, used))
    kernels = [sys.executable, str(ROOT / "benchmarks" / "attention.py")]
    yield Part("attention kernels, torch spec, bf16", kernels, 180, worst_kernels)
    yield Part("experts, torch spec, bf16", [*kernels, "--experts"], 120, last_json)
    for spec in specs:
        words = ["generate", str(models["dense"]), "--spec", spec, "--prompt", "What is it?"]
        flags = ["--max-new-tokens", "16", "--temperature", "0", "--json"]
        yield Part(f"generate, {spec} spec", [*COMMAND, *words, *flags], 180, last_json)
    for side in [*specs, "hf"]:
        words = [str(ROOT / "benchmarks" / "train_step.py"), "--shape", options.shape]
        short = ["--seq-length", "256"] if options.shape == "tiny" else []
        yield Part(
            f"training step, {side}", [*python(), *words, "--sides", side, *short], 300, benchmark
        )
    yield from training(options, models, specs, gpus)
    # The peak is in the first rank's log, and the pretended device has one rank.
    yield from memory(options, 1 if preloaded() else gpus)


def python(ranks: int = 1) -> list[str]:
    """Return the Python for a program that starts its own process group.

    On the pretended device it is the last of `ranks` ranks, which writes Megatron's log.
    """
    place = ["--world-size", str(ranks), "--rank", str(ranks - 1)]
    return [sys.executable, *(["-m", "mcore_qwen3vl.pretended", *place] if preloaded() else [])]


def parity(what: str, model: Path, spec: str, dtype: str, flags: Sequence[str]) -> Part:
    """Return the part that compares a model with Hugging Face's on the host."""
    words = ["verify", "parity", str(model), "--device", "cuda", "--spec", spec, "--dtype", dtype]
    command = [*COMMAND, *words, *flags, "--timeout", "200", "--json"]
    return Part(f"parity, {spec} spec, {dtype}, {what}", command, 240, worst_finding)


def even(gpus: int) -> int:
    """Return how many GPUs can share a parity batch's four micro-batches: 2, 4, 8 or 16."""
    return min(1 << gpus.bit_length() - 1, 16)


def layout(name: str, gpus: int) -> list[str]:
    """Return flags for 2, 4, 8 or 16 GPUs: TP 2, PP 2 from four on, EP 2 for MoE, DP the rest."""
    tp, pp = 2, 1 if gpus == 2 else 2
    ep = ["--ep", "2"] if name.startswith("moe") else []
    return ["--tp", str(tp), "--sp", "--pp", str(pp), "--dp", str(gpus // (tp * pp)), *ep]


ITERATIONS = 20
LOSS_TOLERANCE = 0.02  # relative difference of the specs' losses in bf16
TRAINING = shlex.split(
    "--bf16 --packing --seq-length 256 --micro-batch-size 1 --use-distributed-optimizer "
    "--overlap-grad-reduce --overlap-param-gather --adam-beta1 0.9 --adam-beta2 0.95 "
    "--weight-decay 0.1 --clip-grad 1.0 --lr-decay-style cosine --lr-warmup-fraction 0.03 "
    "--num-workers 2 --no-check-for-nan-in-loss-and-grad --lr 1e-4 --log-interval 1"
)
"""The launch scripts' flags, for a tiny model."""


def training(
    options: argparse.Namespace, models: dict[str, Path], specs: Sequence[str], gpus: int
) -> Iterator[Part]:
    """Yield the parts that train tiny models as the scripts do, and compare the specs' losses."""
    data = options.out / "tiny-data"
    if not data.exists():
        code = "import sys; from benchmarks.gpu_check import tiny_data; tiny_data(sys.argv[1])"
        yield Part("write data to train on", [sys.executable, "-c", code, str(data)], 120)
    adapter = ["--lora-rank", "8", "--lora-target", "language"]
    ways = {"dense": [], "moe": ["--moe-z-loss-coeff", "1e-5"]}
    for name, more in [*ways.items(), ("dense", adapter)]:
        what = f"{name}, LoRA" if more is adapter else name
        expected: list[float] = []
        for spec in specs:
            log = options.out / f"losses-{what.replace(', ', '-')}-{spec}.jsonl"
            log.unlink(missing_ok=True)
            files = ["--data-path", str(data / "train.jsonl"), "--log-json", str(log)]
            files += ["--hf-model", str(models[name]), "--load-hf", str(models[name])]
            count = ["--train-iters", str(ITERATIONS), "--global-batch-size", str(2 * gpus)]
            command = [*trainer(gpus), *TRAINING, *files, *count, "--spec", spec, *more]
            read = partial(compare_losses, log, expected)
            yield Part(f"training loop, {spec} spec, {what}", command, 180, read)


def trainer(gpus: int) -> list[str]:
    """Return the command that trains on all GPUs; on the pretended device, on its one rank."""
    if preloaded():
        return [*python(gpus), "-m", "mcore_qwen3vl.rehearsal.rank.train"]
    return [*COMMAND, "train", "--processes", str(gpus)]


def compare_losses(log: Path, expected: list[float], printed: str) -> dict[str, Any]:
    """Read a run's losses; keep them in `expected` if that is empty, or else compare with it.

    Raises:
        Mismatch: a loss is missing or not finite, or differs by more than `LOSS_TOLERANCE`.
    """
    losses = [json.loads(line)["lm loss"] for line in log.read_text().splitlines()]
    found: dict[str, Any] = {"first loss": losses[0], "last loss": losses[-1]}
    if len(losses) != ITERATIONS or not all(map(math.isfinite, losses)):
        raise Mismatch(f"{len(losses)} losses of {ITERATIONS}, or one is no number", found)
    if not expected:
        expected += losses
        return found
    pairs = zip(losses, expected, strict=True)
    found["worst difference"] = max(abs(a - b) / max(abs(b), 1e-9) for a, b in pairs)
    if found["worst difference"] > LOSS_TOLERANCE:
        raise Mismatch(f"the specs' losses differ by more than {LOSS_TOLERANCE:.0%}", found)
    return found


def memory(options: argparse.Namespace, gpus: int) -> Iterator[Part]:
    """Yield a few real iterations, and their rehearsal with the same flags and made-up data.

    The peak is compared. The modelled seconds of a step are only reported beside the measured ones.
    """
    folder = options.out / "memory"
    if not folder.exists():
        code = "import sys; from benchmarks.gpu_check import stand_in; stand_in(*sys.argv[1:])"
        command = [sys.executable, "-c", code, str(folder), options.shape]
        yield Part("write a model to measure", command, 120)
    length = 256 if options.shape == "tiny" else 8192
    flags = [
        *("--hf-model", str(folder / "model"), "--data-path", str(folder / "data" / "train.jsonl")),
        *f"--spec torch --packing --seq-length {length} --bf16 --use-distributed-optimizer".split(),
        *f"--global-batch-size {2 * gpus} --lr 1e-5 --train-iters 5 --log-interval 1".split(),
        *("--num-workers", "0"),
    ]
    # --verbose: the peak is in Megatron's own log.
    real = Part("memory, real", [*trainer(gpus), *flags, "--verbose"], 300, real_run)
    yield real
    rehearse = ["rehearse", "--gpus", str(gpus), "--gpu", options.gpu, "--no-suggest", "--json"]

    def compare(printed: str) -> dict[str, Any]:
        rehearsed = last_json(printed)
        peak, step = rehearsed["roles"][0]["peak"], rehearsed["step"]["seconds"]
        found = {"rehearsed GB": peak / 1e9, "modelled seconds": step}
        measured = real.found.get("peak GB")
        if measured is None:
            raise Mismatch("the real run printed no peak", found)
        found |= {"measured GB": measured, "measured / rehearsed": measured * 1e9 / peak}
        found["measured / modelled seconds"] = real.found["seconds"] / step
        if abs(measured * 1e9 - peak) > MEMORY_TOLERANCE * peak:
            raise Mismatch(f"they differ by more than {MEMORY_TOLERANCE:.0%}", found)
        return found

    yield Part("memory against its rehearsal", [*COMMAND, *rehearse, *flags], 300, compare)


class Mismatch(Exception):
    """A part ran, but its results do not hold; its arguments are the reason and the results."""


def run(part: Part, out: Path, deadline: float) -> None:
    """Run the process, within its own limit and the time left for all parts."""
    limit = min(part.limit, deadline - time.monotonic())
    if limit <= 0:
        part.status = "no time"
        return
    log = out / f"{re.sub(r'[^a-z0-9]+', '-', part.name.lower())}.log"
    started = time.monotonic()
    mark = f"GPU_CHECK_PART={os.getpid()}-{started}"
    name, _, value = mark.partition("=")
    # Not a pipe, which does not end while any process that was started holds it.
    with log.open("w") as errors, tempfile.TemporaryFile("w+") as output:
        process = subprocess.Popen(
            part.command, stdout=output, stderr=errors, env={**os.environ, name: value}
        )
        try:
            code = process.wait(limit)
            part.status = "ok" if code == 0 else f"exit {code}"
        except subprocess.TimeoutExpired:
            part.status = "timeout"
        kill_marked(mark)
        process.wait()
        output.seek(0)
        printed = output.read()
    part.seconds = time.monotonic() - started
    with log.open("a") as both:
        both.write(f"\n--- standard output ---\n{printed}")
    try:
        part.found = part.read(printed)
    except Mismatch as error:
        part.found = {**error.args[1], "why": error.args[0]}
        part.status = "differs" if part.status == "ok" else part.status
    except (ValueError, KeyError, IndexError, OSError) as error:
        part.found = {"why": f"its output cannot be read: {error!r}; see {log.name}"}
        part.status = "unread" if part.status == "ok" else part.status


def kill_marked(mark: str) -> None:
    """Kill the processes that have `mark`, ``NAME=VALUE``, in their environment.

    torchrun gives its workers sessions of their own, so they outlive it if it is killed.
    """
    for _ in range(100):  # one that waits inside the driver may never end
        found = 0
        for folder in Path("/proc").glob("[0-9]*"):
            with suppress(OSError):  # it has ended, or is not ours
                if mark.encode() in (folder / "environ").read_bytes().split(b"\0"):
                    os.kill(int(folder.name), signal.SIGKILL)
                    found += 1
        if not found:
            return
        time.sleep(0.1)  # killed ones must end, and others may just have been started


def count_gpus() -> int:
    """Count GPUs in a process of its own, so that this one never starts CUDA."""
    code = "import torch; print(torch.cuda.device_count())"
    shown = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=False
    )
    return int(shown.stdout.strip() or 0)


def last_json(printed: str) -> dict[str, Any]:
    """Return the JSON object in standard output, among lines of NCCL and other libraries."""
    start = re.search(r"^\{", printed, re.MULTILINE)
    if start is None:
        raise ValueError("no JSON object")
    found: dict[str, Any] = json.JSONDecoder().raw_decode(printed, start.start())[0]
    return found


def worst_finding(printed: str) -> dict[str, Any]:
    """Read a report of ``verify``: how much was compared, how much failed, and the verdict."""
    report = last_json(printed)
    findings = report["findings"]
    failed = [f for f in findings if not f["ok"]]
    return {"compared": len(findings), "failed": len(failed), "verdict": report["verdict"]}


def worst_kernels(printed: str) -> dict[str, Any]:
    """Return how many comparisons of attention there are, and which is the worst."""
    errors = last_json(printed)
    name = max(errors, key=errors.__getitem__)
    return {"compared": len(errors), "worst": errors[name], "in": name}


def benchmark(printed: str) -> dict[str, Any]:
    """Read one side's seconds per step, the figures derived from them, and its peak memory."""
    (result,) = last_json(printed)["results"].values()
    return {name: result[name] for name in ("seconds", "tokens/s", "MFU", "peak memory GB")}


def real_run(printed: str) -> dict[str, Any]:
    """Read the fullest rank's peak and the last iteration's seconds from Megatron's log.

    The peak is that after the second iteration, when Adam's moments are there.
    """
    peaks = re.findall(r"after 2 iterations\).*?max allocated: ([\d.]+)", printed)
    times = re.findall(r"elapsed time per iteration \(ms\): ([\d.]+)", printed)
    return {"peak GB": max(map(float, peaks)) * 2**20 / 1e9, "seconds": float(times[-1]) / 1e3}


def stand_in(folder: str, shape: str) -> None:
    """Write a model directory and data for the model called `shape`."""
    from mcore_qwen3vl.shapes import SHAPES
    from mcore_qwen3vl.tiny import tiny_config
    from mcore_qwen3vl.tiny.records import write_half_images
    from mcore_qwen3vl.tiny.tiny_checkpoint import write_stand_in

    out = Path(folder)
    out.mkdir(parents=True)
    config, pixels = SHAPES / f"{shape.lower().replace('-', '_')}.json", 32
    if shape == "tiny":
        config, pixels = out / "tiny.json", 8
        config.write_text(json.dumps(tiny_config()))
    write_stand_in(config, out / "model")
    tokens, side = (128, 6) if shape == "tiny" else (512, 16)
    write_half_images(out / "data", tokens=tokens, image_side=side, token_pixels=pixels)


def tiny(name: str, folder: str) -> None:
    """Write the tiny model that is called `name` in the parity matrix."""
    from mcore_qwen3vl.tiny import write_tiny_checkpoint
    from mcore_qwen3vl.verify.parity.matrix import MODELS

    write_tiny_checkpoint(folder, **MODELS[name])


def tiny_data(folder: str) -> None:
    """Write records for a tiny model to train on."""
    from mcore_qwen3vl.tiny.records import write_half_images

    write_half_images(Path(folder), tokens=128, image_side=6, token_pixels=8)


def write(done: Sequence[Part], out: Path) -> None:
    """Write the report so far, so that it is there even if the machine is taken away."""
    listing = [{k: v for k, v in asdict(part).items() if k != "read"} for part in done]
    (out / "report.json").write_text(json.dumps(listing, indent=1, default=str) + "\n")
    lines = ["# GPU check", "", "| part | result | s | found |", "|---|---|---:|---|"]
    for part in done:
        found = ", ".join(f"{name}: {_short(value)}" for name, value in part.found.items())
        lines.append(f"| {part.name} | {part.status} | {part.seconds:.0f} | {found} |")
    (out / "report.md").write_text("\n".join(lines) + "\n")


def _short(value: Any) -> str:
    text = f"{value:.4g}" if isinstance(value, float) else str(value)
    return text.replace("|", "/").replace("\n", " ")[:200]


if __name__ == "__main__":
    sys.exit(main())
