"""Everything that a machine with GPUs can prove, in one command and one report, without a network.

    make gpu-check                          # or: python3 benchmarks/gpu_check.py --out DIR
    make gpu-check ARGS="--minutes 8"       # the worthiest parts that fit into 8 minutes
    make gpu-check ARGS="--only kernels"    # only parts whose name holds this regular expression
    make gpu-check ARGS="--shape 4B"        # measure this size alone

Each part is a process with a time limit. Checks run first and side by side: parity of both specs
with Hugging Face, kernels against float32, generation, twenty iterations of the training loop, and
the rehearsals of what is measured. Then each measurement has the machine to itself: the rates that
the model of time assumes, training steps of both specs and of Hugging Face with a profile, and the
training loop with published sizes, alone and with a profile. If one part fails, that is reported
and the others go on. What the machine cannot run is not applicable. ``report.md`` and
``report.json`` are written anew whenever a part starts or ends. The exit code is 1 if any part
failed.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import re
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
from typing import Any

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

from benchmarks.gpu_models import FP8, MOE, PROFILES, RUNS, STEPS, Size  # noqa: E402
from benchmarks.gpu_results import (  # noqa: E402
    ITERATIONS,
    Mismatch,
    compare_losses,
    compare_tokens,
    find_json,
    read_benchmark,
    read_log,
    read_profile,
    read_rehearsal,
    read_verify_report,
    read_worst_kernel,
)
from mcore_qwen3vl.errors import BadInput  # noqa: E402
from mcore_qwen3vl.files import atomic_write  # noqa: E402
from mcore_qwen3vl.runtime.flash_attention import why_unavailable  # noqa: E402
from mcore_qwen3vl.runtime.gpus import GPUS, find_gpu  # noqa: E402
from mcore_qwen3vl.safe_path import protect_children  # noqa: E402
from mcore_qwen3vl.simulated_gpu.device import is_preloaded  # noqa: E402

NOT_APPLICABLE, LEFT_OUT, WAITING, RUNNING = "not applicable", "left out", "waiting", "running"
WORTH = (
    "^versions$",
    "^parity, (torch spec, fp32|te spec, bf16), .*, one GPU$",
    "kernels|^experts",
    "^training loop, .*, (dense|Qwen3\\.5)$",
    "^rates$",
    "^training step, 2B",
    "^(loop profile|training run), 2B, torch$",
    "^(loop profile|training run), 2B, te$",
    "^training loop, .*, (MoE|dense, FP8|dense, LoRA|Qwen3\\.5, MTP)$",
    "^parity, .*, one GPU$",
    "^generate",
    "^training step, 30B",
    "^training run, (30B|2B, FP8|Qwen3\\.5)|^loop profile",
    "^training step, Qwen3\\.5",
    "^parity, .*compiled$",
    "^parity, .*GPU",
    "^training loop",
)
"""Regular expressions of parts' names, the worthiest first; what none of them finds comes last."""
MARGIN = 60  # seconds for a part to start, beside three times what it is expected to take
GIB_OF_A_CHECK = 8  # context, NCCL's buffers, a tiny model, and what Triton tunes kernels with
COMMAND = [sys.executable, "-c", "from mcore_qwen3vl.cli import main; main()"]
MEMORY_TOLERANCE = 0.05  # as a share of the rehearsed peak
HF_FLOAT32_GIB = 100
"""Hugging Face's step of 2B with float32 weights and moments takes 94 GB. A smaller GPU runs it
with bf16 ones, which computes less than ours does."""
VERSIONS = """
import json, importlib.metadata as meta, torch
assert torch.cuda.is_available(), "PyTorch finds no GPU"
names = ("torch", "triton", "megatron-core", "transformer-engine", "transformers", "fla-core",
    "mcore-qwen3vl")
def version(name):
    try: return meta.version(name)
    except meta.PackageNotFoundError: return None
devices = [torch.cuda.get_device_properties(i) for i in range(torch.cuda.device_count())]
te_cudnn = cudnn = None
try:  # first, since it may load another one than PyTorch's, which then refuses to say its version
    from transformer_engine.pytorch.utils import get_cudnn_version
    te_cudnn = get_cudnn_version()
except ImportError: pass
try: cudnn = torch.backends.cudnn.version()
except RuntimeError as error: cudnn = str(error)[:99]
import mcore_qwen3vl.training.run, mcore_qwen3vl.model.qwen3vl, mcore_qwen3vl.converters
print(json.dumps({**{name: version(name) for name in names}, "CUDA": torch.version.cuda,
    "cuDNN of PyTorch": cudnn, "cuDNN of Transformer Engine": te_cudnn,
    "GPUs": [f"{d.name}, {d.total_memory / 2**30:.1f} GiB" for d in devices]}))
"""


@dataclass(eq=False)
class Part:
    """One process and its results.

    A part that `measures` has the machine to itself. A part that `serves` runs if another needs it,
    and only then, whatever ``--only`` says.
    """

    name: str
    command: list[str]
    expected: float  # seconds on one H100 with 16 cores, where checks ran beside others
    read: Callable[[str], dict[str, Any]] = lambda printed: {}  # results from standard output
    after: Sequence[Part] = ()  # parts whose results it uses
    serves: bool = False
    measures: bool = False
    environment: dict[str, str] = field(default_factory=dict)
    appends_to: Path | None = None  # deleted before it runs; others may read an earlier run's
    status: str = WAITING
    seconds: float = 0.0
    results: dict[str, Any] = field(default_factory=dict)
    process: subprocess.Popen[bytes] | None = None
    mark: str = ""  # NAME=VALUE, in the environment of all its processes
    started: float = 0.0
    end: float = 0.0  # when it is stopped


def main(argv: Sequence[str] | None = None) -> int:
    """Run the parts and return the exit code."""
    began = time.monotonic()
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--out", type=Path, default=Path("gpu-check"), help="the report's folder")
    for flag, kind, default, text in (
        ("--minutes", float, None, "end after this many minutes; run the worthiest parts"),
        ("--shape", str, None, "measure this size alone: tiny, 2B, 4B, …"),
        ("--gpu", str, None, "kind that the rehearsal is for; default: the machine's"),
        ("--gpus", int, None, "how many to use; default: all of the machine"),
        ("--only", str, None, "run only parts in whose name this regular expression is found"),
        ("--jobs", int, None, "checks side by side; default: as cores and GPU allow"),
        ("--patience", float, 1, "multiplies all times, for a slow machine"),
    ):
        parser.add_argument(flag, type=kind, default=default, help=text)
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
    protect_children()
    end = math.inf if options.minutes is None else began + 60 * options.minutes - 5  # for the end
    stream = iter(all_parts(options))
    first = next(stream)  # alone: it shows whether there is a GPU
    conductor = Conductor(options.out, options.patience, end)
    if not options.only or re.search(options.only, first.name):
        conductor.run_parts([first], 1)
    everything = [first, *stream]
    jobs = options.jobs or 1
    seconds = (end - time.monotonic()) / options.patience
    conductor.run_parts(choose_parts(everything, options.only, seconds, jobs), jobs)
    conductor.write(finished=True)
    print(f"report: {options.out / 'report.md'}")
    fine = ("ok", NOT_APPLICABLE, LEFT_OUT)
    return int(any(part.status not in fine for part in conductor.parts))


def choose_parts(
    everything: Sequence[Part], only: str | None, seconds: float, jobs: int
) -> list[Part]:
    """Return the parts to run in the order of their worth, each after those that it needs.

    Those whose name `only` is not found in are dropped. Those that would not end within `seconds`
    get the status `LEFT_OUT`.
    """
    asked = [p for p in everything if not p.serves and (not only or re.search(only, p.name))]
    chosen: list[Part] = []
    for part in sorted(asked, key=place_by_worth):
        part.after = [p for p in part.after if p.serves or p in asked]
        group = [p for p in dict.fromkeys([*prerequisites(part), part]) if p not in chosen]
        takes = expect_seconds([*chosen, *group], jobs)
        missing = any(p.status == LEFT_OUT for p in part.after)
        if part.status == WAITING and (missing or takes > seconds):
            more = takes - expect_seconds(chosen, jobs)
            part.status = LEFT_OUT
            part.results = {"why": f"it would take {more:.0f} s more, with what it needs"}
            group = [part]
        chosen += group
    return chosen


def place_by_worth(part: Part) -> int:
    """Return the place of a part in the order of worth: 0 is the first."""
    places = (i for i, pattern in enumerate(WORTH) if re.search(pattern, part.name))
    return next(places, len(WORTH))


def prerequisites(part: Part) -> Iterator[Part]:
    """Yield all parts that must run before this one, the first ones first."""
    for before in part.after:
        yield from prerequisites(before)
        yield before


def expect_seconds(chosen: Sequence[Part], jobs: int) -> float:
    """Return the seconds that the parts would take: checks side by side, then measurements."""
    free, ends, alone = [0.0] * jobs, dict.fromkeys(chosen, 0.0), 0.0
    for part in chosen:
        if part.status != WAITING:  # it will not run, or is over
            continue
        if part.measures:
            alone += part.expected
        else:
            begins = max([heappop(free), *(ends.get(p, 0.0) for p in part.after)])
            ends[part] = begins + part.expected
            heappush(free, ends[part])
    return max(free) + alone


def all_parts(options: argparse.Namespace) -> Iterator[Part]:
    """Yield one part after the other; later ones depend on what the machine has.

    It sets `options.jobs` if that is None.
    """
    yield Part("versions", [sys.executable, "-c", VERSIONS], 8, find_json)
    writers: dict[str, Part] = {}
    measured = [options.shape] if options.shape else sorted({size.folder_name for size in RUNS})
    for folder, function, names, seconds in (
        (options.out / "models", "write_tiny_models", [], 12),
        (options.out / "stand-ins", "write_stand_ins", measured, 20),
    ):
        files = [folder / name / "data" / "train.jsonl" for name in names or ["."]]
        if not all(file.exists() for file in files):
            code = f"import sys; from benchmarks.gpu_models import {function} as write; "
            command = [sys.executable, "-c", f"{code}write(*sys.argv[1:])", str(folder), *names]
            writers[str(folder)] = Part(f"write {folder.name}", command, seconds, serves=True)
    yield from writers.values()
    machine = look_at_gpus()
    room = int(min(len(os.sched_getaffinity(0)), machine.memory_gib // GIB_OF_A_CHECK))
    options.jobs = options.jobs or max(room, 1)
    gpus = options.gpus or machine.gpus
    specs = ["torch", *(["te"] if find_spec("transformer_engine") else [])]
    alone = environment_without_transformer_engine(options.out) if "te" in specs else {}
    for part in (
        *check_parts(options.out, specs, gpus, options.patience),
        *training_parts(options.out, specs, gpus, machine.capability),
        *measurement_parts(options, machine, gpus, specs),
    ):
        text = " ".join(part.command)
        part.after = [*(w for folder, w in writers.items() if folder in text), *part.after]
        if re.search(r"\btorch\b", part.name):
            part.environment |= alone
        yield part


def check_parts(out: Path, specs: Sequence[str], gpus: int, patience: float) -> Iterator[Part]:
    """Yield the parts that compare models with Hugging Face's, kernels, and generated tokens."""
    models, used = out / "models", shareable_gpus(max(gpus, 2))
    where = f"{used} GPUs" if gpus > 1 else "2 ranks on one GPU"
    # The torch spec runs in float32 too. Transformer Engine's packed attention needs half
    # precision, as does the torch spec's variable-length kernel.
    for spec, dtype in [("torch", "fp32"), *((spec, "bf16") for spec in specs)]:
        words = f"--device cuda --spec {spec} --dtype {dtype} --json".split()
        wide = ("wide", "wide-moe-all", "wide-hybrid", "wide-hybrid-moe-all")
        for name in ("dense", "moe", "hybrid", "hybrid-moe") if dtype == "fp32" else wide:
            for what, flags in (
                ("one GPU", []),
                (where, layout_flags(name, used)),
                *([("compiled", ["--compile-pointwise"])] if spec == "torch" else []),  # default
            ):
                command = [*COMMAND, "verify", "parity", str(models / name), *words, *flags]
                title = f"parity, {spec} spec, {dtype}, {name}, {what}"
                missing = why_no_kernels(name) if dtype == "bf16" else ""
                # Triton tries configurations of the delta nets' kernels first.
                seconds = 75 if dtype == "bf16" and "hybrid" in name else 38
                # Below the part's own limit, so that stacks of hanging ranks are still written.
                command += ["--timeout", f"{seconds * 3 * patience:g}"]
                part = Part(title, command, seconds, read_verify_report)
                yield not_applicable_part(title, missing) if missing else part
    examples = str(ROOT / "benchmarks" / "python_examples.py")
    command = [sys.executable, examples, str(out / "python-examples"), *python_command()]
    yield Part("python examples", command, 120, find_json)
    kernels = [sys.executable, str(ROOT / "benchmarks" / "kernels.py")]
    yield Part("attention kernels, torch spec, bf16", kernels, 12, read_worst_kernel)
    title, missing = "attention kernels, FlashAttention 3, bf16", why_unavailable()
    command = [*kernels, "--flash-attention-3"]
    yield (
        not_applicable_part(title, missing)
        if missing
        else Part(title, command, 12, read_worst_kernel)
    )
    yield Part("experts, torch spec, bf16", [*kernels, "--experts"], 8, find_json)
    title, missing = "delta net kernels, bf16", why_no_kernels("hybrid")
    command = [*kernels, "--delta-net"]
    yield (
        not_applicable_part(title, missing)
        if missing
        else Part(title, command, 60, read_worst_kernel)
    )
    for name, model in (("", "dense"), (", Qwen3.5", "wide-hybrid")):
        if missing := why_no_kernels(model):
            yield not_applicable_part(f"generate{name}", missing)
            continue
        answers: list[Part] = []
        for spec in specs:
            words = ["generate", str(models / model), "--spec", spec, "--prompt", "What is it?"]
            words += ["--max-new-tokens", "16", "--temperature", "0", "--json"]
            files = (out / f"answer-{model}-{which}.json" for which in (spec, specs[0]))
            title, read = f"generate, {spec} spec{name}", partial(compare_tokens, *files)
            answers.append(Part(title, [*COMMAND, *words], 22, read, answers[:1]))
        yield from answers


def shareable_gpus(gpus: int) -> int:
    """Return how many GPUs can share a parity batch's four micro-batches: 2, 4, 8 or 16."""
    return min(1 << gpus.bit_length() - 1, 16)


def layout_flags(name: str, gpus: int) -> list[str]:
    """Return flags for 2, 4, 8 or 16 GPUs: TP 2, PP 2 from four on, EP 2 for MoE, DP the rest."""
    tp, pp = 2, 1 if gpus == 2 else 2
    ep = ["--ep", "2"] if "moe" in name else []
    return ["--tp", str(tp), "--sp", "--pp", str(pp), "--dp", str(gpus // (tp * pp)), *ep]


MTP = "--mtp-num-layers 1"
HOPPER = 9  # major compute capability
TRAINING = (
    "--bf16 --packing --seq-length 256 --micro-batch-size 1 --use-distributed-optimizer "
    "--overlap-grad-reduce --overlap-param-gather --adam-beta1 0.9 --adam-beta2 0.95 "
    "--weight-decay 0.1 --clip-grad 1.0 --lr-decay-style cosine --lr-warmup-fraction 0.03 "
    "--num-workers 2 --no-check-for-nan-in-loss-and-grad --lr 1e-3 --log-interval 1 "
    f"--train-iters {ITERATIONS}"
)
"""The launch scripts' flags, for a tiny model, whose loss falls by half in twenty iterations."""


def training_parts(out: Path, specs: Sequence[str], gpus: int, capability: int) -> Iterator[Part]:
    """Yield the parts that train tiny models as the scripts do, and compare their losses.

    A loop is compared with that of the first spec, unless another one of its own spec has the same
    batches, and so the same losses.
    """
    pairs, fours = gpus - gpus % 2, gpus - gpus % 4
    stages = "--tensor-model-parallel-size 2 --sequence-parallel --pipeline-model-parallel-size 2"
    loops: dict[tuple[str, str], Part] = {}
    for name, model, used, flags, same in (
        ("dense", "wide", gpus, "", None),
        ("MoE", "wide-moe", gpus, MOE, None),
        ("dense, LoRA", "wide", gpus, "--lora-rank 8 --lora-target language", None),
        ("Qwen3.5", "wide-hybrid", gpus, "", None),
        ("Qwen3.5, MTP", "wide-hybrid", gpus, MTP, None),
        # EP changes no batch, unless a GPU is left over.
        ("MoE, EP 2", "wide-moe", pairs, f"{MOE} --expert-model-parallel-size 2",
         "MoE" if pairs == gpus else None),
        ("dense, TP 2, PP 2", "wide", fours, stages, None),
        ("dense, FP8", "wide", gpus, FP8, "dense"),
    ):  # fmt: skip
        tp = 2 if flags == stages else 1
        missing = why_no_fp8(specs, capability) if flags == FP8 else why_no_kernels(model)
        if missing or not used:
            yield not_applicable_part(
                f"training loop, {name}", missing or f"it needs {2 * tp} GPUs, not {gpus}"
            )
            continue
        for spec in ["te"] if flags == FP8 else specs:
            # The first spec's loop is not yet listed when it is itself the one that is made.
            other = loops[same, spec] if same else loops.get((name, specs[0]))
            log = out / f"losses-{re.sub('[^A-Za-z0-9]+', '-', name)}-{spec}.jsonl"
            command = [
                *(*trainer_command(used, tp), *TRAINING.split(), *flags.split(), "--spec", spec),
                *("--hf-model", str(out / "models" / model)),
                *("--load-hf", str(out / "models" / model)),
                *("--data-path", str(out / "models" / "data" / "train.jsonl")),
                *("--global-batch-size", str(2 * used), "--log-json", str(log)),
            ]
            loops[name, spec] = Part(
                f"training loop, {spec} spec, {name}",
                command,
                40,
                partial(compare_losses, log, other and other.appends_to),
                [other] if other else [],
                appends_to=log,
            )
            yield loops[name, spec]


def why_no_fp8(specs: Sequence[str], capability: int) -> str:
    """Return why the machine cannot train in FP8; empty: it can."""
    if "te" not in specs:
        return "Transformer Engine is not installed"
    too_old = f"it needs compute capability {HOPPER}.0; this GPU has {capability}.x"
    return too_old if capability < HOPPER else ""


def why_no_kernels(model: str) -> str:
    """Return why the machine cannot train a model in half precision; an empty string if it can."""
    needs_them = re.search(r"hybrid|Qwen3\.5", model) and not is_preloaded()  # which has a stub
    missing = needs_them and not find_spec("fla")
    return "flash-linear-attention is not installed" if missing else ""


def not_applicable_part(name: str, why: str) -> Part:
    """Return a part that this machine cannot run."""
    return Part(name, [], 0, status=NOT_APPLICABLE, results={"why": why})


def python_command(ranks: int = 1, tp: int = 1) -> list[str]:
    """Return the Python for a program that starts its own process group.

    On the simulated GPU it is one of `ranks` ranks: the first of the last TP group, because it
    reads batches and writes the log.
    """
    place = ["--world-size", str(ranks), "--rank", str(ranks - tp)]
    return [
        sys.executable,
        *(["-m", "mcore_qwen3vl.simulated_gpu", *place] if is_preloaded() else []),
    ]


def trainer_command(gpus: int, tp: int = 1) -> list[str]:
    """Return the command that trains on all GPUs; on the simulated GPU, on its one rank."""
    if is_preloaded():
        return [*python_command(gpus, tp), "-m", "mcore_qwen3vl.rehearsal.rank"]
    return [*COMMAND, "train", "--processes", str(gpus)]


def measurement_parts(
    options: argparse.Namespace, machine: Machine, gpus: int, specs: Sequence[str]
) -> Iterator[Part]:
    """Yield what is measured, each after its simulation if it has one."""
    kind = options.gpu or machine.kind
    if kind is None:
        why = f"the kind of {machine.name} is not known: give --gpu {', '.join(GPUS)}"
        yield not_applicable_part("rates, and the simulation of what is measured", why)
    else:
        words = [str(ROOT / "benchmarks" / "kernels.py"), "--gpu", machine.kind or kind]
        words += ["--rates", str(options.out / "constants.json")]
        yield Part("rates", [sys.executable, *words], 20, find_json, measures=True)
    only = [Size(options.shape, options.shape)] if options.shape else []
    for what, size, side in (
        *(("training step", *both) for both in product(only or STEPS, ("torch", "te", "hf"))),
        *(("training run", *both) for both in product(only or RUNS, ("torch", "te"))),
        *(("loop profile", *both) for both in product(only or PROFILES, ("torch", "te"))),
    ):
        name = f"{what}, {size.name}, {side}"
        if size.flags == FP8 and side != "te":
            continue
        why = (
            why_no_fp8(specs, machine.capability)
            if size.flags == FP8
            else why_no_kernels(size.name)
        )
        if side == "te" and side not in specs:
            why = "Transformer Engine is not installed"
        elif side == "hf" and "Qwen3.5" in size.name:
            why = "Hugging Face loads the kernels of delta nets from its hub, over a network"
        elif not why and 0 < machine.memory_gib < size.gib:
            why = f"it takes {size.gib:.0f} GiB; the GPU has {machine.memory_gib:.0f}"
        if why:
            yield not_applicable_part(name, why)
            continue
        if what == "training step":
            words = step_words(size, side, machine.memory_gib)
            profile = ["--profile", str(options.out / f"{file_name(name)}.profile.txt")]
            command, seconds, read = [*python_command(), *words, *profile], 35, read_benchmark
            prediction = Part(f"{name}, simulated", [], 40, read_benchmark, serves=True)
            if kind:
                gpu = f"--memory-gib {GPUS[kind].memory_gib} --capability {GPUS[kind].capability}"
                once = f"--warmup 2 --steps 1 --model-time-on {kind}"
                simulated = [sys.executable, "-m", "mcore_qwen3vl.simulated_gpu", *gpu.split()]
                prediction.command = [*simulated, *words, *once.split()]
        elif what == "loop profile":
            flags = training_run_flags(size, side, options.out / "stand-ins", 1)
            program = str(ROOT / "benchmarks" / "loop_profile.py")
            trace = str(options.out / f"{file_name(name)}.trace.json.gz")
            command = [*python_command(), program, trace, *flags, *data_workers()]
            yield Part(name, command, 75, read_profile, measures=True)
            continue
        else:
            # The peak is in the first rank's log, and the simulated GPU has one rank.
            ranks = 1 if is_preloaded() else gpus
            flags = training_run_flags(size, side, options.out / "stand-ins", ranks)
            # --verbose: the peak is in Megatron's own log.
            command = [*trainer_command(ranks), *flags, *data_workers(), "--verbose"]
            seconds, read = 65, read_log
            words = f"rehearse --gpus {ranks} --gpu {kind} --no-suggest --json".split()
            rehearse = [*COMMAND, *words, *flags, "--num-workers", "0"]
            prediction = Part(f"{name}, rehearsed", rehearse, 60, read_rehearsal, serves=True)
        before = [prediction] if kind else []
        yield from before
        compare = partial(compare_with_prediction, read, before)
        yield Part(name, command, seconds, compare, before, measures=True)


def data_workers() -> list[str]:
    """Return the flag for as many data workers as can hand batches over."""
    # They do so in shared memory, which a container may have little of.
    roomy = shutil.disk_usage("/dev/shm").total > 8e9 and not is_preloaded()
    return ["--num-workers", "4" if roomy else "0"]


def step_words(size: Size, side: str, memory_gib: float) -> list[str]:
    """Return the words after ``python`` for a training step."""
    words = [str(ROOT / "benchmarks" / "train_step.py"), "--shape", size.shape, "--sides", side]
    words += ["--layers", str(size.layers)] if size.layers else []
    words += ["--seq-length", "256"] if size.shape == "tiny" else []
    return words + (
        ["--hf-weights", "bf16"] if side == "hf" and memory_gib < HF_FLOAT32_GIB else []
    )


def training_run_flags(size: Size, spec: str, folder: Path, gpus: int) -> list[str]:
    """Return the flags for ten iterations of the training loop."""
    model, length = folder / size.folder_name, 256 if size.shape == "tiny" else 8192
    return [
        *("--hf-model", str(model / "model"), "--data-path", str(model / "data" / "train.jsonl")),
        *f"--spec {spec} --packing --bf16 --seq-length {length} --train-iters 10".split(),
        *f"--micro-batch-size 1 --global-batch-size {2 * gpus} --lr 1e-5 --log-interval 1".split(),
        *("--use-distributed-optimizer", "--overlap-grad-reduce", "--overlap-param-gather"),
        *size.flags.split(),
    ]


def compare_with_prediction(
    read: Callable[[str], dict[str, Any]], simulated: Sequence[Part], printed: str
) -> dict[str, Any]:
    """Return what was measured beside what was simulated, and the quotients of both.

    Raises:
        Mismatch: the peaks differ by more than `MEMORY_TOLERANCE`. A time may.
    """
    results = read(printed)
    for part in simulated:
        if "peak GB" not in part.results:
            return results | {"simulated": f"{part.status}: see {part.name}"}
        peak, seconds = part.results["peak GB"], part.results["modelled seconds"]
        results |= {"rehearsed GB": peak, "measured / rehearsed": results["peak GB"] / peak,
                    "modelled seconds": seconds,
                    "measured / modelled seconds": results["seconds"] / seconds}  # fmt: skip
        if abs(results["peak GB"] - peak) > MEMORY_TOLERANCE * peak:
            raise Mismatch(f"the peaks differ by more than {MEMORY_TOLERANCE:.0%}", results)
    return results


class Conductor:
    """Runs parts and writes the report."""

    def __init__(self, out: Path, patience: float = 1.0, end: float = math.inf) -> None:
        """`end` is the time, by :func:`time.monotonic`, at which what still runs is stopped."""
        self.parts: list[Part] = []  # of the report
        self._out, self._patience, self._end = out, patience, end
        self._running: list[Part] = []
        self._started = time.strftime("%Y-%m-%d %H:%M:%S")

    def run_parts(self, parts: Sequence[Part], jobs: int) -> None:
        """Run checks, up to `jobs` side by side, then measurements one by one, each in order."""
        self.parts += [part for part in parts if part not in self.parts]
        waiting = [part for part in parts if part.status == WAITING]
        waiting.sort(key=lambda part: part.measures)
        for part in parts:
            if part.status in (NOT_APPLICABLE, LEFT_OUT):
                print_part(part)
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
                        part.results = {"why": f"{max(self._end - now, 0):.0f} s were left"}
                        print_part(part)
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
        """Return whether what it needs is over, nothing running disturbs it, and a job is free."""
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
        # No pipes: a pipe does not end while any started process holds it.
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
        # The poll was before the kill: None means that this program ended it.
        stopped = "no time" if part.end == self._end else "timeout"
        part.status, verdict = stopped if code is None else f"exit {code}", "ok"
        output = (self._out / file_name(part.name)).with_suffix(".out")
        try:
            part.results = part.read(output.read_text(errors="replace"))
        except Mismatch as error:
            part.results, verdict = {**error.args[1], "why": error.args[0]}, "differs"
        except (ArithmeticError, LookupError, OSError, TypeError, ValueError) as error:
            part.results, verdict = {"why": f"its output cannot be read: {error!r}"}, "unread"
            part.results["why"] += f"; see {output.stem}.log"
        if code == 0:
            part.status = verdict
        self._running.remove(part)
        print_part(part)
        self.write()

    def write(self, *, finished: bool = False) -> None:
        """Replace both reports, so that they are whole whenever this program is killed."""
        listing = [
            {"name": p.name, "status": p.status, "seconds": p.seconds, "expected": p.expected,
             "found": p.results, "command": p.command}
            for p in self.parts
        ]  # fmt: skip
        over = sum(part.status not in (WAITING, RUNNING) for part in self.parts)
        state = f"Started {self._started}, written {time.strftime('%H:%M:%S')}: {over} parts of "
        state += f"{len(self.parts)} are over. "
        if not finished:
            state += "**Not finished**: if the program runs no more, it was cut off."
        lines = ["# GPU check", "", state, "", "| part | result | s | found |"]
        lines.append("|---|---|---:|---|")
        for part in self.parts:
            results = ", ".join(
                f"{name}: {_short_text(value)}" for name, value in part.results.items()
            )
            lines.append(f"| {part.name} | {part.status} | {part.seconds:.0f} | {results} |")
        report = json.dumps(listing, indent=1, default=str)
        for name, text in (("report.json", report), ("report.md", "\n".join(lines))):
            with atomic_write(self._out / name) as partial_file:
                partial_file.write_text(f"{text}\n")


def print_part(part: Part) -> None:
    """Print a line about a part that is over."""
    why = f" ({part.results['why']})" if "why" in part.results else ""
    print(f"{part.status:14} {part.seconds:6.0f} s  {part.name}{why}", flush=True)


def file_name(part: str) -> str:
    """Return the name of a part's files, without what follows the dot."""
    return re.sub(r"[^a-z0-9]+", "-", part.lower())


def kill_marked(mark: str) -> None:
    """Kill the processes that have `mark`, ``NAME=VALUE``, in their environment.

    torchrun gives its workers sessions of their own, so they outlive it if it is killed.
    """
    for _ in range(100):  # one that waits inside the driver may never end
        killed = 0
        for folder in Path("/proc").glob("[0-9]*"):
            with suppress(OSError):  # it has ended, or is not ours
                if mark.encode() in (folder / "environ").read_bytes().split(b"\0"):
                    os.kill(int(folder.name), signal.SIGKILL)
                    killed += 1
        if not killed:
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


def look_at_gpus() -> Machine:
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


def environment_without_transformer_engine(out: Path) -> dict[str, str]:
    """Return the environment of a machine without Transformer Engine.

    From an installed one Megatron would take Adam and the norm of the gradients for the ``torch``
    spec too.
    """
    package = out / "without-te" / "transformer_engine"
    package.mkdir(parents=True, exist_ok=True)
    (package / "__init__.py").write_text("raise ModuleNotFoundError('left out by gpu_check')\n")
    return {"PYTHONPATH": f"{package.parent.resolve()}:{os.environ['PYTHONPATH']}"}


def _short_text(value: Any) -> str:
    text = f"{value:.4g}" if isinstance(value, float) else str(value)
    return text.replace("|", "/").replace("\n", " ")[:200]


if __name__ == "__main__":
    # Otherwise the part would keep the GPUs when a scheduler or `timeout` stops this program.
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
    sys.exit(main())
