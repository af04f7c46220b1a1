"""Everything that a machine with GPUs can prove, in one command and one report, without a network.

    make gpu-check                     # or: python3 benchmarks/gpu_check.py --out DIR
    make gpu-check ARGS="--shape 4B"   # for the benchmark and the memory, another size
    make gpu-check ARGS="--only kernels"   # only parts whose name holds this regular expression

The parts are: versions; parity of both specs with Hugging Face, on one rank and on several; the
torch spec's attention kernels and experts in half precision, against float32; generation; the
training-step benchmark; twenty iterations of the training loop with the scripts' flags, to compare
losses of specs, layouts and FP8; the memory of a real run against its rehearsal. Each part is a
process with a time limit. If one fails, that is reported and the next one starts. What the machine
cannot run is reported as not applicable. ``report.md`` and ``report.json`` hold the results, and
each part has a log. The exit code is 1 if any part failed.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from statistics import median
from typing import Any

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

from mcore_qwen3vl.pretended.preload import preloaded  # noqa: E402
from mcore_qwen3vl.runtime.gpus import GPUS  # noqa: E402

# Kernels take the published head sizes of 128 and 72, rows of whole 16 bytes and, in FP8, blocks of
# 128. With other sizes a model is computed in other ways than those that train.
WIDE: dict[str, Any] = {
    "text": {
        "head_dim": 128,
        "hidden_size": 256,
        "intermediate_size": 512,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "rope_scaling": {
            "mrope_interleaved": True,
            "mrope_section": [24, 20, 20],
            "rope_type": "default",
        },
    },
    "vision": {"hidden_size": 144, "intermediate_size": 256, "num_heads": 2},
}
# Nor may an expert's matrix be square: Hugging Face transposes what it loads by the shape alone.
WIDE_MOE = {"moe_intermediate_size": 384, "num_experts": 8, "num_experts_per_tok": 2}
MODELS: dict[str, dict[str, Any]] = {
    "dense": {},
    "moe": {"moe": True},
    "wide": WIDE,
    "wide-moe": {**WIDE, "moe": True, "text": {**WIDE["text"], **WIDE_MOE}},
    # bf16 cannot judge tokens that rounding sends to other experts; with all experts it can.
    "wide-moe-all": {
        **WIDE, "moe": True, "text": {**WIDE["text"], **WIDE_MOE, "num_experts_per_tok": 8},
    },
}  # fmt: skip
"""The arguments of :func:`write_tiny_checkpoint` for each model."""
NOT_APPLICABLE = "not applicable"
TOTAL = 38 * 60  # seconds for all parts together
COMMAND = [sys.executable, "-c", "from mcore_qwen3vl.cli import main; main()"]
MEMORY_TOLERANCE = 0.05  # as a share of the rehearsed peak
HF_FLOAT32_GIB = 100
"""Hugging Face's step of 2B with float32 weights and moments takes 94 GB. A smaller GPU runs it
with bf16 ones, which computes less than ours does."""
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
    writes: Path | None = None
    """A folder for other parts. It runs before the first of them, whatever ``--only`` says."""
    environment: dict[str, str] = field(default_factory=dict)
    appends_to: Path | None = None
    """A file of its results, deleted before it runs. Other parts may read an earlier run's."""
    status: str = "not run"
    seconds: float = 0.0
    found: dict[str, Any] = field(default_factory=dict)


def main(argv: Sequence[str] | None = None) -> int:
    """Run all parts and return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--out", type=Path, default=Path("gpu-check"), help="the report's folder")
    parser.add_argument("--shape", default="2B", help="of benchmark and memory: tiny, 2B, 4B, …")
    parser.add_argument("--gpu", help="kind that the rehearsal is for; default: the machine's")
    parser.add_argument("--gpus", type=int, help="how many to use; default: all of the machine")
    parser.add_argument("--only", metavar="REGEX", help="run only parts whose name it is found in")
    parser.add_argument(
        "--patience", type=float, default=1, help="multiplies all time limits, for a slow machine"
    )
    options = parser.parse_args(argv)
    options.out.mkdir(parents=True, exist_ok=True)
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    os.environ.pop("PYTHONDONTWRITEBYTECODE", None)  # each process would compile every module
    os.environ["PYTHONPATH"] = f"{ROOT}:{os.environ.get('PYTHONPATH', '')}".rstrip(":")
    deadline = time.monotonic() + TOTAL * options.patience
    done: list[Part] = []
    writers: list[Part] = []
    for part in parts(options):
        if part.writes:
            writers.append(part)
            continue
        if options.only and not re.search(options.only, part.name):
            continue
        wanted = [w for w in writers if any(str(w.writes) in word for word in part.command)]
        for now in [*wanted, part]:
            now.limit *= options.patience
            if now.status != NOT_APPLICABLE:
                run(now, options.out, deadline)
            done.append(now)
            print(f"{now.status:14} {now.seconds:6.0f} s  {now.name}", flush=True)
            write(done, options.out)
        writers = [w for w in writers if w not in wanted]
    print(f"report: {options.out / 'report.md'}")
    return int(any(part.status not in ("ok", NOT_APPLICABLE) for part in done))


def parts(options: argparse.Namespace) -> Iterator[Part]:
    """Yield one part after the other; later ones depend on what the machine has."""
    yield Part("versions", [sys.executable, "-c", VERSIONS], 180, last_json)
    models = options.out / "models"
    if not (models / "data" / "train.jsonl").exists():
        code = "import sys; from benchmarks.gpu_check import tiny; tiny(sys.argv[1])"
        command = [sys.executable, "-c", code, str(models)]
        yield Part("write tiny models and data", command, 180, writes=models)
    machine = look()
    gpus = options.gpus or machine.gpus
    specs = ["torch", *(["te"] if find_spec("transformer_engine") else [])]
    alone = leave_out_transformer_engine(options.out) if "te" in specs else {}
    for part in parts_of(options, machine, gpus, specs):
        if "torch spec" in part.name or "torch" in part.command:
            part.environment |= alone
        yield part


def parts_of(
    options: argparse.Namespace, machine: Machine, gpus: int, specs: Sequence[str]
) -> Iterator[Part]:
    """Yield the parts that use the machine's GPUs, with these layer specs."""
    models = options.out / "models"
    # The torch spec runs in float32 too. Transformer Engine's packed attention needs half
    # precision, as does the torch spec's variable-length kernel.
    for spec, dtype in [("torch", "fp32"), *((spec, "bf16") for spec in specs)]:
        for name in ("dense", "moe") if dtype == "fp32" else ("wide", "wide-moe-all"):
            check = partial(parity, models / name, spec, dtype, options.patience)
            yield check(f"{name}, one GPU", [])
            used = even(max(gpus, 2))
            where = f"{used} GPUs" if gpus > 1 else "2 ranks on one GPU"
            yield check(f"{name}, {where}", layout(name, used))
            if spec == "torch":  # as training computes by default
                yield check(f"{name}, compiled", ["--compile-pointwise"])
    kernels = [sys.executable, str(ROOT / "benchmarks" / "attention.py")]
    yield Part("attention kernels, torch spec, bf16", kernels, 180, worst_kernels)
    yield Part("experts, torch spec, bf16", [*kernels, "--experts"], 120, last_json)
    for spec in specs:
        words = ["generate", str(models / "dense"), "--spec", spec, "--prompt", "What is it?"]
        flags = ["--max-new-tokens", "16", "--temperature", "0", "--json"]
        answer = options.out / f"answer-{spec}.json"
        read = partial(compare_tokens, answer, options.out / f"answer-{specs[0]}.json")
        yield Part(f"generate, {spec} spec", [*COMMAND, *words, *flags], 180, read)
    for side in [*specs, "hf"]:
        words = [str(ROOT / "benchmarks" / "train_step.py"), "--shape", options.shape]
        words += ["--seq-length", "256"] if options.shape == "tiny" else []
        if side == "hf" and machine.memory_gib < HF_FLOAT32_GIB:
            words += ["--hf-weights", "bf16"]
        yield Part(f"training step, {side}", [*python(), *words, "--sides", side], 300, benchmark)
    yield from training(options.out, specs, gpus, machine.capability)
    # The peak is in the first rank's log, and the pretended device has one rank.
    yield from memory(options, machine, 1 if preloaded() else gpus)


def python(ranks: int = 1, tp: int = 1) -> list[str]:
    """Return the Python for a program that starts its own process group.

    On the pretended device it is one of `ranks` ranks: the first of the last TP group, because it
    reads batches and writes the log.
    """
    place = ["--world-size", str(ranks), "--rank", str(ranks - tp)]
    return [sys.executable, *(["-m", "mcore_qwen3vl.pretended", *place] if preloaded() else [])]


def parity(
    model: Path, spec: str, dtype: str, patience: float, what: str, flags: Sequence[str]
) -> Part:
    """Return the part that compares a model with Hugging Face's on the host."""
    words = ["verify", "parity", str(model), "--device", "cuda", "--spec", spec, "--dtype", dtype]
    command = [*COMMAND, *words, *flags, "--timeout", f"{200 * patience:g}", "--json"]
    return Part(f"parity, {spec} spec, {dtype}, {what}", command, 240, worst_finding)


def even(gpus: int) -> int:
    """Return how many GPUs can share a parity batch's four micro-batches: 2, 4, 8 or 16."""
    return min(1 << gpus.bit_length() - 1, 16)


def layout(name: str, gpus: int) -> list[str]:
    """Return flags for 2, 4, 8 or 16 GPUs: TP 2, PP 2 from four on, EP 2 for MoE, DP the rest."""
    tp, pp = 2, 1 if gpus == 2 else 2
    ep = ["--ep", "2"] if "moe" in name else []
    return ["--tp", str(tp), "--sp", "--pp", str(pp), "--dp", str(gpus // (tp * pp)), *ep]


ITERATIONS = 20
LOSS_TOLERANCE = 0.02
"""Relative. On the CPU, float32 differs from bf16 by 0.15 % (MoE: 0.35 %), and products of values
rounded as in FP8 by 0.8 %. Products whose weights get no gradient make 25 %."""
FP8 = shlex.split("--fp8-format e4m3 --fp8-recipe blockwise")  # as FP8=1 for the scripts
HOPPER = 9  # major compute capability
TRAINING = shlex.split(
    "--bf16 --packing --seq-length 256 --micro-batch-size 1 --use-distributed-optimizer "
    "--overlap-grad-reduce --overlap-param-gather --adam-beta1 0.9 --adam-beta2 0.95 "
    "--weight-decay 0.1 --clip-grad 1.0 --lr-decay-style cosine --lr-warmup-fraction 0.03 "
    "--num-workers 2 --no-check-for-nan-in-loss-and-grad --lr 1e-3 --log-interval 1"
)
"""The launch scripts' flags, for a tiny model, whose loss falls by half in twenty iterations."""


@dataclass(frozen=True)
class Way:
    """One way to train a tiny model."""

    name: str
    model: str
    gpus: int
    """As many of the machine's as it can use; 0: there are too few."""
    flags: Sequence[str] = ()
    tp: int = 1
    like: str | None = None
    """The way that has the same batches, and so the same losses with the same spec."""

    def log(self, out: Path, spec: str) -> Path:
        """Return the file of its losses."""
        return out / f"losses-{re.sub('[^A-Za-z0-9]+', '-', self.name)}-{spec}.jsonl"


def training(out: Path, specs: Sequence[str], gpus: int, capability: int) -> Iterator[Part]:
    """Yield the parts that train tiny models as the scripts do, and compare their losses."""
    moe = ["--moe-z-loss-coeff", "1e-5"]
    experts = [*moe, "--expert-model-parallel-size", "2"]
    stages = ["--tensor-model-parallel-size", "2", "--sequence-parallel"]
    stages += ["--pipeline-model-parallel-size", "2"]
    pairs, fours = gpus - gpus % 2, gpus - gpus % 4
    dense = Way("dense", "wide", gpus)
    same = "MoE" if pairs == gpus else None  # EP changes no batch
    ways = (
        dense,
        Way("MoE", "wide-moe", gpus, moe),
        Way("dense, LoRA", "wide", gpus, ["--lora-rank", "8", "--lora-target", "language"]),
        Way("MoE, EP 2", "wide-moe", pairs, experts, like=same),
        Way("dense, TP 2, PP 2", "wide", fours, stages, tp=2),
    )
    for way in ways:
        if not way.gpus:
            needed = 2 * way.tp
            yield absent(f"training loop, {way.name}", f"it needs {needed} GPUs, not {gpus}")
            continue
        first = way.log(out, specs[0])
        for spec in specs:
            other = first if spec != specs[0] else None
            if way.like:
                other = replace(way, name=way.like).log(out, spec)
            yield loop(out, way, spec, other)
    why = ""
    if "te" not in specs:
        why = "Transformer Engine is not installed"
    elif capability < HOPPER:
        why = f"it needs compute capability {HOPPER}.0; this GPU has {capability}.x"
    if why:
        yield absent("training loop, dense, FP8", why)
    else:
        way = Way("dense, FP8", "wide", gpus, FP8)
        yield loop(out, way, "te", dense.log(out, "te"))


def absent(name: str, why: str) -> Part:
    """Return a part that this machine cannot run."""
    return Part(name, [], 0, status=NOT_APPLICABLE, found={"why": why})


def loop(out: Path, way: Way, spec: str, other: Path | None) -> Part:
    """Return the part that trains, and compares its losses with those in the file `other`."""
    log, models = way.log(out, spec), out / "models"
    files = ["--data-path", str(models / "data" / "train.jsonl"), "--log-json", str(log)]
    files += ["--hf-model", str(models / way.model), "--load-hf", str(models / way.model)]
    count = ["--train-iters", str(ITERATIONS), "--global-batch-size", str(2 * way.gpus)]
    command = [*trainer(way.gpus, way.tp), *TRAINING, *files, *count, "--spec", spec, *way.flags]
    read = partial(compare_losses, log, other)
    return Part(f"training loop, {spec} spec, {way.name}", command, 180, read, appends_to=log)


def trainer(gpus: int, tp: int = 1) -> list[str]:
    """Return the command that trains on all GPUs; on the pretended device, on its one rank."""
    if preloaded():
        return [*python(gpus, tp), "-m", "mcore_qwen3vl.rehearsal.rank.train"]
    return [*COMMAND, "train", "--processes", str(gpus)]


def compare_losses(log: Path, other: Path | None, printed: str) -> dict[str, Any]:
    """Read a run's losses, and compare them with those of another run, if any.

    Raises:
        Mismatch: a loss is missing or not finite, or differs by more than `LOSS_TOLERANCE`.
    """
    losses = _losses(log)
    found: dict[str, Any] = {"first loss": losses[0], "last loss": losses[-1]}
    if len(losses) != ITERATIONS or not all(map(math.isfinite, losses)):
        raise Mismatch(f"{len(losses)} losses of {ITERATIONS}, or one is no number", found)
    if other is None:
        return found
    expected = _losses(other) if other.exists() else []
    if len(expected) != ITERATIONS:
        raise Mismatch(f"{other.name} has no {ITERATIONS} losses to compare with", found)
    pairs = zip(losses, expected, strict=True)
    found["worst difference"] = max(abs(a - b) / max(abs(b), 1e-9) for a, b in pairs)
    found["from"] = other.stem
    if not found["worst difference"] <= LOSS_TOLERANCE:
        raise Mismatch(f"a loss differs by more than {LOSS_TOLERANCE:.0%}", found)
    return found


def _losses(log: Path) -> list[float]:
    return [json.loads(line)["lm loss"] for line in log.read_text().splitlines()]


def memory(options: argparse.Namespace, machine: Machine, gpus: int) -> Iterator[Part]:
    """Yield a few real iterations, and their rehearsal with the same flags and made-up data.

    The peak is compared. The modelled seconds of a step are only reported beside the measured ones.
    """
    folder = options.out / "memory"
    if not folder.exists():
        code = "import sys; from benchmarks.gpu_check import stand_in; stand_in(*sys.argv[1:])"
        command = [sys.executable, "-c", code, str(folder), options.shape]
        yield Part("write a model to measure", command, 120, writes=folder)
    length = 256 if options.shape == "tiny" else 8192
    flags = [
        *("--hf-model", str(folder / "model"), "--data-path", str(folder / "data" / "train.jsonl")),
        *f"--spec torch --packing --seq-length {length} --bf16 --use-distributed-optimizer".split(),
        *f"--global-batch-size {2 * gpus} --lr 1e-5 --train-iters 10 --log-interval 1".split(),
        *("--num-workers", "0"),
    ]
    # --verbose: the peak is in Megatron's own log.
    real = Part("memory, real", [*trainer(gpus), *flags, "--verbose"], 300, real_run)
    yield real
    kind = options.gpu or machine.kind
    if kind is None:
        why = f"the kind of {machine.name} is not known: give --gpu {', '.join(GPUS)}"
        yield absent("memory against its rehearsal", why)
        return
    rehearse = ["rehearse", "--gpus", str(gpus), "--gpu", kind, "--no-suggest", "--json"]

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
    if part.appends_to:
        part.appends_to.unlink(missing_ok=True)
    log = out / f"{re.sub(r'[^a-z0-9]+', '-', part.name.lower())}.log"
    started = time.monotonic()
    mark = f"GPU_CHECK_PART={os.getpid()}-{started}"
    name, _, value = mark.partition("=")
    # Not a pipe, which does not end while any process that was started holds it.
    with log.open("w") as errors, tempfile.TemporaryFile("w+") as output:
        try:
            process = subprocess.Popen(
                part.command,
                stdout=output,
                stderr=errors,
                env={**os.environ, **part.environment, name: value},
            )
            code = process.wait(limit)
            part.status = "ok" if code == 0 else f"exit {code}"
        except subprocess.TimeoutExpired:
            part.status = "timeout"
        finally:  # Ctrl-C ends this program, but not every process of the part
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


@dataclass(frozen=True)
class Machine:
    """The GPUs of this machine, which are all of one kind; without any, all numbers are 0."""

    gpus: int = 0
    capability: int = 0  # major
    memory_gib: float = 0.0  # of each
    name: str = "this machine's GPU"

    @property
    def kind(self) -> str | None:
        """The name of its kind in :data:`GPUS`, or None if that is not known."""
        alike = [gpu for gpu in GPUS.values() if gpu.model in self.name.lower()]
        return min(
            (gpu.name for gpu in alike),
            key=lambda name: abs(GPUS[name].memory_gib - self.memory_gib),
            default=None,
        )


def look() -> Machine:
    """Look at the GPUs, in a process of its own, so that this one never starts CUDA."""
    code = (
        "import json, torch.cuda as c\n"
        "if n := c.device_count():\n"
        "    p = c.get_device_properties(0)\n"
        "    print(json.dumps([n, p.major, p.total_memory / 2**30, p.name]))"
    )
    shown = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=False
    )
    line = re.search(r"^\[.*\]$", shown.stdout, re.MULTILINE)
    return Machine(*json.loads(line.group())) if line else Machine()


def leave_out_transformer_engine(out: Path) -> dict[str, str]:
    """Return the environment of a machine without Transformer Engine.

    From an installed one Megatron would take Adam and the norm of the gradients for the ``torch``
    spec too.
    """
    package = out / "without-te" / "transformer_engine"
    package.mkdir(parents=True, exist_ok=True)
    (package / "__init__.py").write_text("raise ModuleNotFoundError('left out by gpu_check')\n")
    return {"PYTHONPATH": f"{package.parent.resolve()}:{os.environ['PYTHONPATH']}"}


def last_json(printed: str) -> dict[str, Any]:
    """Return the JSON object in standard output, among lines of NCCL and other libraries."""
    start = re.search(r"^\{", printed, re.MULTILINE)
    if start is None:
        raise ValueError("no JSON object")
    found: dict[str, Any] = json.JSONDecoder().raw_decode(printed, start.start())[0]
    return found


def worst_finding(printed: str) -> dict[str, Any]:
    """Read a report of ``verify``: how much was compared, what failed, and the verdict."""
    report = last_json(printed)
    findings = report["findings"]
    failed = [f"{f['part']} {f['name']} ({f['context']})" for f in findings if not f["ok"]]
    names = {"failed first": ", ".join(failed[:3])} if failed else {}
    counts = {"compared": len(findings), "failed": len(failed), "verdict": report["verdict"]}
    return {**counts, **names}


def compare_tokens(answer: Path, other: Path, printed: str) -> dict[str, Any]:
    """Read the answer of ``generate``, keep its tokens, and compare them with another spec's.

    Raises:
        Mismatch: they differ; greedy tokens of a tiny random model are far apart.
    """
    found = last_json(printed)
    tokens = [reply["token_ids"] for reply in found["answers"]]
    answer.write_text(json.dumps(tokens))
    if other.exists() and json.loads(other.read_text()) != tokens:
        raise Mismatch(f"the tokens are not those of {other.name}", found)
    return found


def worst_kernels(printed: str) -> dict[str, Any]:
    """Return how many comparisons of attention there are, and which is the worst."""
    errors = last_json(printed)
    name = max(errors, key=errors.__getitem__)
    return {"compared": len(errors), "worst": errors[name], "in": name}


def benchmark(printed: str) -> dict[str, Any]:
    """Read one side's seconds per step, the figures derived from them, and its peak memory."""
    (result,) = last_json(printed)["results"].values()
    names = ("seconds", "tokens/s", "MFU", "peak memory GB", "note")
    return {name: result[name] for name in names if name in result}


def real_run(printed: str) -> dict[str, Any]:
    """Read the fullest rank's peak and an iteration's seconds from Megatron's log.

    The peak is that after the second iteration, when Adam's moments are there; the seconds are the
    median from the fourth iteration on, when everything is compiled.
    """
    peaks = re.findall(r"after 2 iterations\).*?max allocated: ([\d.]+)", printed)
    times = re.findall(r"elapsed time per iteration \(ms\): ([\d.]+)", printed)
    seconds = median(float(time) / 1e3 for time in times[3:] or times)
    return {"peak GB": max(map(float, peaks)) * 2**20 / 1e9, "seconds": seconds}


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


def tiny(folder: str) -> None:
    """Write the models of :data:`MODELS`, and records to train on."""
    from mcore_qwen3vl.tiny import write_tiny_checkpoint
    from mcore_qwen3vl.tiny.records import write_half_images

    out = Path(folder)
    shutil.rmtree(out, ignore_errors=True)  # what an interrupted run left
    for name, sizes in MODELS.items():
        write_tiny_checkpoint(out / name, **sizes)
    write_half_images(out / "data", tokens=128, image_side=6, token_pixels=8)


def write(done: Sequence[Part], out: Path) -> None:
    """Write the report so far, so that it is there even if the machine is taken away."""
    hidden = ("read", "writes", "appends_to", "environment")
    listing = [{k: v for k, v in asdict(part).items() if k not in hidden} for part in done]
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
    # Otherwise the part would keep the GPUs when a scheduler or `timeout` stops this program.
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
    sys.exit(main())
