"""Everything that a machine with GPUs can prove, in one command and one report, without a network.

    make gpu-check                          # or: python3 benchmarks/gpu_check.py --out DIR
    make gpu-check ARGS="--minutes 8"       # the worthiest parts that fit into 8 minutes
    make gpu-check ARGS="--only kernels"    # only parts whose name holds this regular expression
    make gpu-check ARGS="--shape 4B"        # measure this size alone

Each part is a process with a time limit. Checks run first and side by side: parity of both specs
with Hugging Face, kernels against float32, generation, twenty iterations of the training loop, and
the rehearsals of what is measured. Then each measurement has the machine to itself: the rates that
the model of time assumes, training steps of both specs and of Hugging Face with a profile, and the
training loop with published sizes. If one part fails, that is reported and the others go on. What
the machine cannot run is not applicable. ``report.md`` and ``report.json`` are written anew
whenever a part starts or ends. The exit code is 1 if any part failed.
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
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from heapq import heappop, heappush
from importlib.util import find_spec
from itertools import product
from pathlib import Path
from statistics import median
from typing import Any

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

from mcore_qwen3vl.errors import BadInput  # noqa: E402
from mcore_qwen3vl.files import atomic_write  # noqa: E402
from mcore_qwen3vl.pretended.preload import preloaded  # noqa: E402
from mcore_qwen3vl.runtime.gpus import GPUS, find_gpu  # noqa: E402

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
NOT_APPLICABLE, LEFT_OUT, WAITING, RUNNING = "not applicable", "left out", "waiting", "running"
WORTH = (
    "^versions$",
    "^parity, (torch spec, fp32|te spec, bf16), .*, one GPU$",
    "kernels|^experts",
    "^training loop, .*, dense$",
    "^rates$",
    "^training step, 2B",
    "^training run, 2B, (torch|te)$",
    "^training loop, .*, (MoE|dense, FP8|dense, LoRA)$",
    "^parity, .*, one GPU$",
    "^generate",
    "^training step, 30B",
    "^training run, (30B|2B, FP8)",
    "^parity, .*compiled$",
    "^parity, .*GPU",
    "^training loop",
)
"""Regular expressions of parts' names, the worthiest first; what none of them finds comes last."""
MARGIN = 60  # seconds for a part to start, beside three times what it is expected to take
GIB_OF_A_CHECK = 4  # context, NCCL's buffers, and a tiny model
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


@dataclass(eq=False)
class Part:
    """One process and its results."""

    name: str
    command: list[str]
    expected: float
    """Seconds on one H100 with 16 cores: as measured there, of a check beside others."""
    read: Callable[[str], dict[str, Any]] = lambda printed: {}
    """Returns what the report shows, from standard output."""
    after: Sequence[Part] = ()
    """Parts whose results it uses."""
    serves: bool = False
    """It runs if a part needs it, and only then, whatever ``--only`` says."""
    measures: bool = False
    """It has the machine to itself."""
    environment: dict[str, str] = field(default_factory=dict)
    appends_to: Path | None = None
    """A file of its results, deleted before it runs. Other parts may read an earlier run's."""
    status: str = WAITING
    seconds: float = 0.0
    found: dict[str, Any] = field(default_factory=dict)
    process: subprocess.Popen[bytes] | None = None
    mark: str = ""
    """``NAME=VALUE``, in the environment of all its processes."""
    started: float = 0.0
    end: float = 0.0
    """The time at which it is stopped."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run the parts and return the exit code."""
    began = time.monotonic()
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--out", type=Path, default=Path("gpu-check"), help="the report's folder")
    parser.add_argument(
        "--minutes", type=float, metavar="N", help="end after N minutes; run the worthiest parts"
    )
    parser.add_argument("--shape", help="measure this size alone: tiny, 2B, 4B, …")
    parser.add_argument("--gpu", help="kind that the rehearsal is for; default: the machine's")
    parser.add_argument("--gpus", type=int, help="how many to use; default: all of the machine")
    parser.add_argument("--only", metavar="REGEX", help="run only parts whose name it is found in")
    parser.add_argument(
        "--jobs", type=int, metavar="N", help="checks side by side; default: as cores and GPU allow"
    )
    parser.add_argument(
        "--patience", type=float, default=1, help="multiplies all times, for a slow machine"
    )
    options = parser.parse_args(argv)
    try:
        options.gpu = options.gpu and find_gpu(options.gpu).name
    except BadInput as error:
        parser.error(str(error))
    options.out.mkdir(parents=True, exist_ok=True)
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    os.environ.pop("PYTHONDONTWRITEBYTECODE", None)  # each process would compile every module
    os.environ["PYTHONPATH"] = f"{ROOT}:{os.environ.get('PYTHONPATH', '')}".rstrip(":")
    end = math.inf if options.minutes is None else began + 60 * options.minutes - 5  # for the end
    stream = iter(parts(options))
    first = next(stream)  # alone: it shows whether there is a GPU
    conductor = Conductor(options.out, options.patience, end)
    if not options.only or re.search(options.only, first.name):
        conductor.run([first], 1)
    everything = [first, *stream]
    jobs = options.jobs or 1
    seconds = (end - time.monotonic()) / options.patience
    conductor.run(choose(everything, options.only, seconds, jobs), jobs)
    conductor.write(finished=True)
    print(f"report: {options.out / 'report.md'}")
    fine = ("ok", NOT_APPLICABLE, LEFT_OUT)
    return int(any(part.status not in fine for part in conductor.parts))


def choose(everything: Sequence[Part], only: str | None, seconds: float, jobs: int) -> list[Part]:
    """Return the parts to run in the order of their worth, each after those that it needs.

    Those whose name `only` is not found in are dropped. Those that would not end within `seconds`
    get the status `LEFT_OUT`.
    """
    asked = [p for p in everything if not p.serves and (not only or re.search(only, p.name))]
    chosen: list[Part] = []
    for part in sorted(asked, key=worth):
        part.after = [p for p in part.after if p.serves or p in asked]
        group = [p for p in dict.fromkeys([*needs(part), part]) if p not in chosen]
        takes = expected([*chosen, *group], jobs)
        missing = any(p.status == LEFT_OUT for p in part.after)
        if part.status == WAITING and (missing or takes > seconds):
            more = takes - expected(chosen, jobs)
            part.status = LEFT_OUT
            part.found = {"why": f"it would take {more:.0f} s more, with what it needs"}
            chosen.append(part)
        else:
            chosen += group
    return chosen


def worth(part: Part) -> int:
    """Return the place of a part in the order of worth: 0 is the first."""
    places = (i for i, pattern in enumerate(WORTH) if re.search(pattern, part.name))
    return next(places, len(WORTH))


def needs(part: Part) -> Iterator[Part]:
    """Yield all parts that must run before this one, the first ones first."""
    for before in part.after:
        yield from needs(before)
        yield before


def expected(chosen: Sequence[Part], jobs: int) -> float:
    """Return the seconds that the parts would take: checks side by side, then measurements."""
    todo = [part for part in chosen if part.status == WAITING]
    free, ends = [0.0] * jobs, dict.fromkeys(chosen, 0.0)
    for part in todo:
        if not part.measures:
            begins = max([heappop(free), *(ends.get(p, 0.0) for p in part.after)])
            ends[part] = begins + part.expected
            heappush(free, ends[part])
    return max(free) + sum(part.expected for part in todo if part.measures)


def parts(options: argparse.Namespace) -> Iterator[Part]:
    """Yield one part after the other; later ones depend on what the machine has.

    It sets `options.jobs` if that is None.
    """
    yield Part("versions", [sys.executable, "-c", VERSIONS], 8, last_json)
    writers: dict[str, Part] = {}
    measured = [options.shape] if options.shape else sorted({size.stand_in for size in RUNS})
    for folder, function, names, seconds in (
        (options.out / "models", "tiny", [], 12),
        (options.out / "stand-ins", "stand_ins", measured, 20),
    ):
        files = [folder / name / "data" / "train.jsonl" for name in names or ["."]]
        if not all(file.exists() for file in files):
            code = f"import sys; from benchmarks.gpu_check import {function} as write; "
            command = [sys.executable, "-c", f"{code}write(*sys.argv[1:])", str(folder), *names]
            writers[str(folder)] = Part(f"write {folder.name}", command, seconds, serves=True)
    yield from writers.values()
    machine = look()
    room = int(min(len(os.sched_getaffinity(0)), machine.memory_gib // GIB_OF_A_CHECK))
    options.jobs = options.jobs or max(room, 1)
    specs = ["torch", *(["te"] if find_spec("transformer_engine") else [])]
    alone = leave_out_transformer_engine(options.out) if "te" in specs else {}
    for part in parts_of(options, machine, options.gpus or machine.gpus, specs):
        text = " ".join(part.command)
        part.after = [*(w for folder, w in writers.items() if folder in text), *part.after]
        if re.search(r"\btorch\b", part.name):
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
    yield Part("attention kernels, torch spec, bf16", kernels, 12, worst_kernels)
    yield Part("experts, torch spec, bf16", [*kernels, "--experts"], 8, last_json)
    answers: list[Part] = []
    for spec in specs:
        words = ["generate", str(models / "dense"), "--spec", spec, "--prompt", "What is it?"]
        flags = ["--max-new-tokens", "16", "--temperature", "0", "--json"]
        answer = options.out / f"answer-{spec}.json"
        read = partial(compare_tokens, answer, options.out / f"answer-{specs[0]}.json")
        command = [*COMMAND, *words, *flags]
        answers.append(Part(f"generate, {spec} spec", command, 22, read, answers[:1]))
    yield from answers
    yield from training(options.out, specs, gpus, machine.capability)
    yield from measurements(options, machine, gpus, specs)


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
    # Below the part's own limit, so that the stacks of hanging ranks are still written.
    command = [*COMMAND, *words, *flags, "--timeout", f"{110 * patience:g}", "--json"]
    return Part(f"parity, {spec} spec, {dtype}, {what}", command, 38, worst_finding)


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
    same = "MoE" if pairs == gpus else None  # EP changes no batch
    ways = (
        Way("dense", "wide", gpus),
        Way("MoE", "wide-moe", gpus, moe),
        Way("dense, LoRA", "wide", gpus, ["--lora-rank", "8", "--lora-target", "language"]),
        Way("MoE, EP 2", "wide-moe", pairs, experts, like=same),
        Way("dense, TP 2, PP 2", "wide", fours, stages, tp=2),
    )
    loops: dict[tuple[str, str], Part] = {}
    for way in ways:
        if not way.gpus:
            needed = 2 * way.tp
            yield absent(f"training loop, {way.name}", f"it needs {needed} GPUs, not {gpus}")
            continue
        for spec in specs:
            other = (way.name, specs[0]) if spec != specs[0] else None
            if way.like:
                other = (way.like, spec)
            loops[way.name, spec] = loop(out, way, spec, loops[other] if other else None)
            yield loops[way.name, spec]
    if why := no_fp8(specs, capability):
        yield absent("training loop, dense, FP8", why)
    else:
        yield loop(out, Way("dense, FP8", "wide", gpus, FP8), "te", loops["dense", "te"])


def no_fp8(specs: Sequence[str], capability: int) -> str:
    """Return why the machine cannot train in FP8; empty: it can."""
    if "te" not in specs:
        return "Transformer Engine is not installed"
    if capability < HOPPER:
        return f"it needs compute capability {HOPPER}.0; this GPU has {capability}.x"
    return ""


def absent(name: str, why: str) -> Part:
    """Return a part that this machine cannot run."""
    return Part(name, [], 0, status=NOT_APPLICABLE, found={"why": why})


def loop(out: Path, way: Way, spec: str, other: Part | None) -> Part:
    """Return the part that trains, and compares its losses with those of another part."""
    log, models = way.log(out, spec), out / "models"
    files = ["--data-path", str(models / "data" / "train.jsonl"), "--log-json", str(log)]
    files += ["--hf-model", str(models / way.model), "--load-hf", str(models / way.model)]
    count = ["--train-iters", str(ITERATIONS), "--global-batch-size", str(2 * way.gpus)]
    command = [*trainer(way.gpus, way.tp), *TRAINING, *files, *count, "--spec", spec, *way.flags]
    read = partial(compare_losses, log, other.appends_to if other else None)
    after = [other] if other else []
    return Part(f"training loop, {spec} spec, {way.name}", command, 40, read, after, appends_to=log)


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


@dataclass(frozen=True)
class Size:
    """A model to measure."""

    name: str
    shape: str
    layers: int | None = None  # of each tower in a step, of the decoder in a run
    gib: float = 0.0  # what it takes of a GPU
    flags: Sequence[str] = ()

    @property
    def stand_in(self) -> str:
        """The name of its folder, from which :func:`stand_ins` takes shape and layers."""
        return f"{self.shape}_{self.layers}" if self.layers else self.shape


STEPS = (
    Size("2B", "2B", None, 60),
    Size("30B-A3B with 4 layers", "30B-A3B", 4, 70),
    Size("8B with 8 layers", "8B", 8, 67),
)
RUNS = (
    Size("2B", "2B", None, 62),
    Size("2B, FP8", "2B", None, 66, FP8),
    Size("30B-A3B with 3 layers", "30B-A3B", 3, 76, ["--moe-z-loss-coeff", "1e-5"]),
    Size("8B, LoRA", "8B", None, 47, ["--lora-rank", "16", "--lora-target", "language"]),
)


def measurements(
    options: argparse.Namespace, machine: Machine, gpus: int, specs: Sequence[str]
) -> Iterator[Part]:
    """Yield what is measured, each after its simulation: rates, training steps, training runs."""
    kind = options.gpu or machine.kind
    if kind is None:
        why = f"the kind of {machine.name} is not known: give --gpu {', '.join(GPUS)}"
        yield absent("rates, and the simulation of what is measured", why)
    else:
        code = "import sys; from benchmarks.gpu_check import rates; sys.exit(rates(*sys.argv[1:]))"
        file = str(options.out / "constants.json")
        words = [sys.executable, "-c", code, file, machine.kind or kind]
        yield Part("rates", words, 20, last_json, measures=True)
    only = [Size(options.shape, options.shape)] if options.shape else []
    for size, side in product(only or STEPS, ("torch", "te", "hf")):
        name = f"training step, {size.name}, {side}"
        if why := lacking(size, side, machine, specs):
            yield absent(name, why)
        else:
            yield from step(name, size, side, options.out, machine, kind)
    # The peak is in the first rank's log, and the pretended device has one rank.
    ranks = 1 if preloaded() else gpus
    for size, spec in product(only or RUNS, ("torch", "te")):
        name = f"training run, {size.name}, {spec}"
        if size.flags is FP8 and spec != "te":
            continue
        if why := lacking(size, spec, machine, specs):
            yield absent(name, why)
        else:
            yield from training_run(name, size, spec, options.out / "stand-ins", ranks, kind)


def lacking(size: Size, spec: str, machine: Machine, specs: Sequence[str]) -> str:
    """Return what the machine lacks for a measurement; empty: nothing."""
    if size.flags is FP8 and (why := no_fp8(specs, machine.capability)):
        return why
    if spec == "te" and spec not in specs:
        return "Transformer Engine is not installed"
    small = 0 < machine.memory_gib < size.gib
    return f"it takes {size.gib:.0f} GiB; the GPU has {machine.memory_gib:.0f}" if small else ""


def step(
    name: str,
    size: Size,
    side: str,
    out: Path,
    machine: Machine,
    kind: str | None,
) -> Iterator[Part]:
    """Yield a training step with its profile, after the same step on the simulated GPU."""
    words = [str(ROOT / "benchmarks" / "train_step.py"), "--shape", size.shape, "--sides", side]
    words += ["--layers", str(size.layers)] if size.layers else []
    words += ["--seq-length", "256"] if size.shape == "tiny" else []
    if side == "hf" and machine.memory_gib < HF_FLOAT32_GIB:
        words += ["--hf-weights", "bf16"]
    after = []
    if kind:
        once = ["--warmup", "2", "--steps", "1", "--model-time-on", kind]
        memory = ["--memory-gib", str(GPUS[kind].memory_gib)]
        memory += ["--capability", str(GPUS[kind].capability)]
        command = [sys.executable, "-m", "mcore_qwen3vl.pretended", *memory, *words, *once]
        after = [Part(f"{name}, simulated", command, 40, benchmark, serves=True)]
        yield after[0]
    profile = ["--profile", str(out / f"{file_name(name)}.profile.txt")]
    read = partial(beside, benchmark, after)
    yield Part(name, [*python(), *words, *profile], 35, read, after, measures=True)


def training_run(
    name: str, size: Size, spec: str, folder: Path, gpus: int, kind: str | None
) -> Iterator[Part]:
    """Yield ten iterations of the training loop, after their rehearsal with the same flags."""
    model, length = folder / size.stand_in, 256 if size.shape == "tiny" else 8192
    # Workers hand batches over in shared memory, which a container may have little of.
    roomy = shutil.disk_usage("/dev/shm").total > 8e9 and not preloaded()
    flags = [
        *("--hf-model", str(model / "model"), "--data-path", str(model / "data" / "train.jsonl")),
        *f"--spec {spec} --packing --bf16 --seq-length {length} --train-iters 10".split(),
        *f"--micro-batch-size 1 --global-batch-size {2 * gpus} --lr 1e-5 --log-interval 1".split(),
        *("--use-distributed-optimizer", "--overlap-grad-reduce", "--overlap-param-gather"),
        *size.flags,
    ]
    after = []
    if kind:
        words = ["rehearse", "--gpus", str(gpus), "--gpu", kind, "--no-suggest", "--json"]
        command = [*COMMAND, *words, *flags, "--num-workers", "0"]
        after = [Part(f"{name}, rehearsed", command, 60, rehearsed, serves=True)]
        yield after[0]
    # --verbose: the peak is in Megatron's own log.
    command = [*trainer(gpus), *flags, "--num-workers", "4" if roomy else "0", "--verbose"]
    yield Part(name, command, 65, partial(beside, real_run, after), after, measures=True)


def beside(
    read: Callable[[str], dict[str, Any]], simulated: Sequence[Part], printed: str
) -> dict[str, Any]:
    """Return what was measured beside what was simulated, and the quotients of both.

    Raises:
        Mismatch: the peaks differ by more than `MEMORY_TOLERANCE`. A time may.
    """
    found = read(printed)
    for part in simulated:
        if "peak GB" not in part.found:
            return found | {"simulated": f"{part.status}: see {part.name}"}
        peak, seconds = part.found["peak GB"], part.found["modelled seconds"]
        found |= {"rehearsed GB": peak, "measured / rehearsed": found["peak GB"] / peak}
        found |= {"modelled seconds": seconds}
        found |= {"measured / modelled seconds": found["seconds"] / seconds}
        if abs(found["peak GB"] - peak) > MEMORY_TOLERANCE * peak:
            raise Mismatch(f"the peaks differ by more than {MEMORY_TOLERANCE:.0%}", found)
    return found


def rehearsed(printed: str) -> dict[str, Any]:
    """Read the first role's peak and the step's seconds from a rehearsal."""
    report = last_json(printed)
    step = report["step"]["seconds"]
    return {"peak GB": report["roles"][0]["peak"] / 1e9, "modelled seconds": step}


class Mismatch(Exception):
    """A part ran, but its results do not hold; its arguments are the reason and the results."""


class Conductor:
    """Runs parts and writes the report."""

    def __init__(self, out: Path, patience: float = 1.0, end: float = math.inf) -> None:
        """`end` is the time, by :func:`time.monotonic`, at which what still runs is stopped."""
        self.parts: list[Part] = []  # of the report
        self._out, self._patience, self._end = out, patience, end
        self._running: list[Part] = []
        self._started = time.strftime("%Y-%m-%d %H:%M:%S")

    def run(self, parts: Sequence[Part], jobs: int) -> None:
        """Run checks, up to `jobs` side by side, then measurements one by one, each in order."""
        self.parts += [part for part in parts if part not in self.parts]
        waiting = [part for part in parts if part.status == WAITING]
        waiting.sort(key=lambda part: part.measures)
        for part in parts:
            if part.status in (NOT_APPLICABLE, LEFT_OUT):
                say(part)
        self.write()
        try:
            while waiting or self._running:
                now = time.monotonic()
                for part in list(self._running):
                    assert part.process is not None
                    if part.process.poll() is not None or now > part.end:
                        self._finish(part, part.process)
                for part in list(waiting):
                    missing = any(before.status == LEFT_OUT for before in part.after)
                    if missing or now + part.expected * self._patience > self._end:
                        part.status = LEFT_OUT
                        part.found = {"why": f"{max(self._end - now, 0):.0f} s were left"}
                        say(part)
                    elif self._may_start(part, waiting, jobs):
                        self._start(part, now)
                    else:
                        continue
                    waiting.remove(part)
                    self.write()
                time.sleep(0.05)
        finally:  # Ctrl-C and SIGTERM end this program, but not every process of a part
            for part in self._running:
                kill_marked(part.mark)
                part.status = "cut off"
            if self._running:
                self.write()

    def _may_start(self, part: Part, waiting: Sequence[Part], jobs: int) -> bool:
        if any(before in waiting or before in self._running for before in part.after):
            return False
        if part.measures:
            return not self._running
        return len(self._running) < jobs and not any(p.measures for p in self._running)

    def _start(self, part: Part, now: float) -> None:
        if part.appends_to:
            part.appends_to.unlink(missing_ok=True)
        part.mark = f"GPU_CHECK_PART={os.getpid()}-{now}-{len(self._running)}"
        environment = {**os.environ, **part.environment, **dict([part.mark.split("=")])}
        name = self._out / file_name(part.name)
        # No pipes, which do not end while any process that was started holds them.
        with name.with_suffix(".log").open("wb") as log, name.with_suffix(".out").open("wb") as out:
            part.process = subprocess.Popen(part.command, stdout=out, stderr=log, env=environment)
        if part.measures and (smi := shutil.which("nvidia-smi")):
            words = ["--query-gpu=clocks.sm,power.draw,memory.used", "--format=csv", "-l", "2"]
            with name.with_suffix(".csv").open("wb") as table:
                subprocess.Popen([smi, *words], stdout=table, stderr=table, env=environment)
        part.started, part.status = now, RUNNING
        part.end = min(now + self._patience * (MARGIN + 3 * part.expected), self._end)
        self._running.append(part)

    def _finish(self, part: Part, process: subprocess.Popen[bytes]) -> None:
        code = process.poll()
        part.seconds = time.monotonic() - part.started
        kill_marked(part.mark)
        with suppress(subprocess.TimeoutExpired):  # it is stuck inside the driver
            process.wait(5)
        if code is None:
            part.status = "no time" if part.end == self._end else "timeout"
        else:
            part.status = "ok" if code == 0 else f"exit {code}"
        output = (self._out / file_name(part.name)).with_suffix(".out")
        try:
            part.found = part.read(output.read_text(errors="replace"))
        except Mismatch as error:
            part.found = {**error.args[1], "why": error.args[0]}
            part.status = "differs" if part.status == "ok" else part.status
        except (ArithmeticError, LookupError, OSError, TypeError, ValueError) as error:
            part.found = {"why": f"its output cannot be read: {error!r}; see {output.stem}.log"}
            part.status = "unread" if part.status == "ok" else part.status
        self._running.remove(part)
        say(part)
        self.write()

    def write(self, *, finished: bool = False) -> None:
        """Replace both reports, so that they are whole whenever this program is killed."""
        names = ("name", "status", "seconds", "expected", "found", "command")
        listing = [{name: getattr(part, name) for name in names} for part in self.parts]
        over = sum(part.status not in (WAITING, RUNNING) for part in self.parts)
        state = f"Started {self._started}, written {time.strftime('%H:%M:%S')}: {over} parts of "
        state += f"{len(self.parts)} are over. "
        if not finished:
            state += "**Not finished**: if the program runs no more, it was cut off."
        lines = ["# GPU check", "", state, "", "| part | result | s | found |"]
        lines.append("|---|---|---:|---|")
        for part in self.parts:
            found = ", ".join(f"{name}: {_short(value)}" for name, value in part.found.items())
            lines.append(f"| {part.name} | {part.status} | {part.seconds:.0f} | {found} |")
        for name, text in (
            ("report.json", json.dumps(listing, indent=1, default=str)),
            ("report.md", "\n".join(lines)),
        ):
            with atomic_write(self._out / name) as partial_file:
                partial_file.write_text(f"{text}\n")


def say(part: Part) -> None:
    """Print a line about a part that is over."""
    why = f" ({part.found['why']})" if "why" in part.found else ""
    print(f"{part.status:14} {part.seconds:6.0f} s  {part.name}{why}", flush=True)


def file_name(part: str) -> str:
    """Return the name of a part's files, without what follows the dot."""
    return re.sub(r"[^a-z0-9]+", "-", part.lower())


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
    names = (
        "seconds", "tokens/s", "MFU", "reserved GB", "kernel ms", "launches", "note",
        "modelled seconds", "profile",
    )  # fmt: skip
    shown = {name: result[name] for name in names if result.get(name) is not None}
    return {"peak GB": result["peak memory GB"], **shown}


def real_run(printed: str) -> dict[str, Any]:
    """Read the fullest rank's peak and reserve and an iteration's seconds from Megatron's log.

    The peak is that after the second iteration, when Adam's moments are there; the seconds are the
    median from the fourth iteration on, when everything is compiled.
    """
    pattern = r"after 2 iterations\).*?max allocated: ([\d.]+).*?max reserved: ([\d.]+)"
    mib = zip(*re.findall(pattern, printed), strict=True)
    peak, reserved = (max(map(float, ranks)) * 2**20 / 1e9 for ranks in mib)
    times = re.findall(r"elapsed time per iteration \(ms\): ([\d.]+)", printed)
    seconds = median(float(time) / 1e3 for time in times[3:] or times)
    return {"peak GB": peak, "seconds": seconds, "reserved GB": reserved}


RATE_LIMIT = 0.02
"""Of errors in bf16, as a share of float32's norm. On the H100 they were 0.003."""


def rates(file: str, kind: str, device: str = "cuda") -> int:
    """Measure what the model of time takes for constants of a GPU and its host.

    The file is what ``rehearse --constants`` reads. Exit code 1: a result is not that of float32,
    or a constant is none that can be; then there is no file.
    """
    import torch
    import torch.nn.functional as F

    from benchmarks.train_step import timed
    from mcore_qwen3vl.rehearsal.step_time import Constants

    gpu, small = GPUS[kind], device == "cpu" or preloaded()
    errors: dict[str, float] = {}
    shown: dict[str, float] = {}

    def leaf(*shape: int) -> torch.Tensor:
        return torch.randn(shape, device=device, dtype=torch.bfloat16).requires_grad_()

    def seconds(work: Callable[[], Any], repeats: int = 10) -> float:
        """Return the median time of `work`, and of the wait for it."""
        return median([timed(work, device)[0] for _ in range(3 + repeats)][3:])

    def tflops(name: str, flops: float, function: Callable[..., Any], *inputs: Any) -> float:
        """Return the rate of `function` with all gradients, after a comparison with float32."""
        gradient = torch.randn_like(function(*inputs))

        def both(*values: Any) -> list[torch.Tensor]:
            output = function(*values)
            gradients = torch.autograd.grad(output, values, gradient.to(output.dtype))
            return [output.detach(), *gradients]

        wide = both(*(value.detach().float().requires_grad_() for value in inputs))
        pairs = zip(both(*inputs), wide, strict=True)
        errors[name] = max(float((a - b).norm() / b.norm()) for a, b in pairs)
        shown[f"{name}, TFLOP/s"] = flops / seconds(lambda: both(*inputs)) / 1e12
        return shown[f"{name}, TFLOP/s"] / gpu.tflops

    def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return F.scaled_dot_product_attention(q, k, v, is_causal=True)

    torch.manual_seed(0)
    tokens = 256 if small else 8192
    shares = []
    for k, n in ((128, 256),) if small else ((2048, 12288), (6144, 2048), (4096, 24576)):
        name = f"product of {tokens} x {k} x {n}"
        shares.append(tflops(name, 6 * tokens * k * n, F.linear, leaf(tokens, k), leaf(n, k)))
    slowness = {}  # by the mean number of a query's keys
    for length in (tokens // 16, tokens):
        inputs = (leaf(tokens // length, 16, length, 128) for _ in range(3))
        flops = 3.5 * 4 * 16 * 128 * tokens * length / 2
        slowness[length / 2] = 1 / tflops(f"attention over {length}", flops, attend, *inputs)
    (few, slow), (many, fast) = slowness.items()
    per_key = max((slow - fast) / (1 / few - 1 / many), 0.0)  # 1 / rate = 1 / a + per_key / keys
    best = max(fast - per_key / many, 1e-9)
    a, b = (leaf(1 << 20 if small else 1 << 29).detach() for _ in range(2))
    halves = a.view(-1, 2, 64)
    plain = 2 * a.nbytes / seconds(lambda: b.copy_(a)) / 1e12
    strided = 1.5 * a.nbytes / seconds(lambda: halves[:, 0] + halves[:, 1]) / 1e12
    shown |= {"copy, TB/s": plain, "sum of halves of rows, TB/s": strided}
    x, weight, gradient = leaf(16, 64), leaf(64, 64), leaf(16, 64).detach()
    one = torch.zeros(1, device=device)

    def launches() -> None:
        for _ in range(100):
            torch.autograd.grad(F.linear(x, weight), [x, weight], gradient)

    constants = {
        "gemm": sum(shares) / len(shares),
        "attention": 1 / best,
        "attention_keys": max(per_key / best, 1.0),
        "memory": 2 / (1 / plain + 1 / strided) / gpu.memory_tb_per_s,
        "launch_us": seconds(launches) / 300 * 1e6,
        "wait_us": seconds(lambda: one.add_(1).item(), 100) * 1e6,
    }
    print(json.dumps({"worst error": max(errors.values()), **shown, **constants}), flush=True)
    wrong = [name for name, error in errors.items() if not error <= RATE_LIMIT]
    written = Path(file)
    written.write_text(json.dumps(constants, indent=1) + "\n")
    try:
        Constants.read(written)
    except BadInput as error:
        wrong.append(str(error))
    if wrong:
        written.unlink()
        print(f"not as it must be: {'; '.join(wrong)}", file=sys.stderr)
    return int(bool(wrong))


def stand_ins(folder: str, *names: str) -> None:
    """Write a model directory and data for each name: a shape, or a shape and its layers."""
    from mcore_qwen3vl.shapes import SHAPES
    from mcore_qwen3vl.tiny import tiny_config
    from mcore_qwen3vl.tiny.records import write_half_images
    from mcore_qwen3vl.tiny.tiny_checkpoint import write_stand_in

    for name in names:
        out = Path(folder, name)
        shutil.rmtree(out, ignore_errors=True)  # what an interrupted run left
        out.mkdir(parents=True)
        shape, _, layers = name.partition("_")
        config, pixels = SHAPES / f"{shape.lower().replace('-', '_')}.json", 32
        if shape == "tiny":
            config, pixels = out / "tiny.json", 8
            config.write_text(json.dumps(tiny_config()))
        write_stand_in(config, out / "model", layers=int(layers) if layers else None)
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


def _short(value: Any) -> str:
    text = f"{value:.4g}" if isinstance(value, float) else str(value)
    return text.replace("|", "/").replace("\n", " ")[:200]


if __name__ == "__main__":
    # Otherwise the part would keep the GPUs when a scheduler or `timeout` stops this program.
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
    sys.exit(main())
