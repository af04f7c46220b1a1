"""Rehearse the launch scripts, and write memory and modelled time of a step to their page.

The scripts' headers get their memory too.

    python benchmarks/launch_memory.py            # all: about a quarter of an hour on two cores
    python benchmarks/launch_memory.py sft_8b     # only its header and rows
    python benchmarks/launch_memory.py --spec te  # only rows; needs Transformer Engine
    python benchmarks/launch_memory.py --published [NAME ...]  # also needs Transformer Engine

With --published, recipes whose memory others publish are rehearsed instead, and a table is printed.
A slow test holds the headers to 2 %. Run this after an intended change of memory.
"""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from textwrap import wrap

from mcore_qwen3vl import console
from mcore_qwen3vl.published_configs import PUBLISHED
from mcore_qwen3vl.rehearsal.command import Command, read_command
from mcore_qwen3vl.rehearsal.rehearse import Options, Rehearsal, Rehearser, memory_line
from mcore_qwen3vl.rehearsal.search import memory_of_stages, trained_counts
from mcore_qwen3vl.rehearsal.step_time import ATTENTION, GEMM, IDLE, MEMORY
from mcore_qwen3vl.runtime.gpus import GIB, GPUS

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "measurements" / "launch_scripts.md"
SIZES = (
    *("2b", "4b", "8b", "32b", "30b_a3b", "235b_a22b"),
    *("qwen3.5_9b", "qwen3.5_27b", "qwen3.5_35b_a3b"),
)
SCRIPTS = [f"{task}_{size}" for size in SIZES for task in ("sft", "pretrain", "lora")]
SCRIPTS += ["dpo_8b", "sft_qwen3.8_2.4t_a95b"]
STEPS, ROLES = "## Seconds of a step", "## Roles, {} spec"
WIDTH = 102

COMMON = (
    "--bf16 --use-distributed-optimizer --sequence-parallel --recompute-granularity full "
    "--recompute-method uniform --recompute-num-layers 1 --lr 1e-5 --train-iters 2"
)
FULL = "--packing --micro-batch-size 1 --freeze vision aligner"
LORA = (
    "--micro-batch-size 8 --seq-length 2048 --global-batch-size 16 --lora-rank 8 --lora-alpha 32 "
    "--lora-target language"
)
MOE = "--expert-tensor-parallel-size 1 --moe-grouped-gemm --moe-permute-fusion"


@dataclass(frozen=True)
class Recipe:
    """A recipe of ms-swift (Megatron-SWIFT) and the GiB of a GPU stated above its command.

    It trains through megatron-core and Transformer Engine. Recipes of text models are rehearsed
    with the Qwen3-VL of that size, whose language model has the same shape, and with a frozen
    tower. Our rehearsals differ in the head, which works in chunks, and in the data: they are made
    up, and half images.
    """

    source: str  # in github.com/modelscope/ms-swift
    gib: str
    shape: str
    gpus: int
    flags: str


RECIPES = {
    "8B": Recipe(
        "docs/source_en/Megatron-SWIFT/Mcore-Bridge.md (Qwen3-VL-8B)", "76", "8b", 2,
        f"{FULL} --seq-length 2048 --global-batch-size 4 --tensor-model-parallel-size 2",
    ),
    "32B": Recipe(
        "examples/megatron/dense/qwen3_32b.sh (Qwen3-32B)", "80, the GPU's", "32b", 8,
        f"{FULL} --seq-length 8192 --global-batch-size 16 --tensor-model-parallel-size 8",
    ),
    "30B-A3B": Recipe(
        "docs/source_en/Megatron-SWIFT/Mcore-Bridge.md (Qwen3-30B-A3B)", "76", "30b_a3b", 8,
        f"{FULL} {MOE} --seq-length 8192 --global-batch-size 4 --tensor-model-parallel-size 4 "
        "--pipeline-model-parallel-size 2 --decoder-first-pipeline-num-layers 25 "
        "--expert-model-parallel-size 4",
    ),
    "30B-A3B, 16 GPUs": Recipe(
        "examples/megatron/moe/qwen3_moe.sh (Qwen3-30B-A3B)", "60", "30b_a3b", 16,
        f"{FULL} {MOE} --seq-length 8192 --global-batch-size 16 "
        "--pipeline-model-parallel-size 2 --expert-model-parallel-size 8",
    ),
    "30B-A3B, LoRA": Recipe(
        "examples/megatron/lora/moe.sh (Qwen3-30B-A3B)", "62; 50 with a capacity factor of 2",
        "30b_a3b", 2, f"{LORA} {MOE} --expert-model-parallel-size 2",
    ),
    "235B-A22B, LoRA": Recipe(
        "examples/megatron/lora/qwen3_235b.sh (Qwen3-235B-A22B)", "80, the GPU's",
        "235b_a22b", 8,
        f"{LORA} {MOE} --tensor-model-parallel-size 4 --expert-model-parallel-size 8",
    ),
}  # fmt: skip


def main() -> int:
    """Rehearse the named scripts or recipes, or all."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("names", nargs="*", metavar="SCRIPT")
    parser.add_argument("--spec", choices=("torch", "te"), default="torch")
    parser.add_argument("--published", action="store_true", help="rehearse published recipes")
    options = parser.parse_args()
    known = RECIPES if options.published else SCRIPTS
    if unknown := sorted(set(options.names) - set(known)):
        parser.error(f"{', '.join(unknown)}: not in {', '.join(known)}")
    if options.published:
        compare_with_published(options.names or known)
        return 0
    with console.progress("rehearsing") as say, Rehearser(Options(GPUS["h100-80gb"]), say) as bench:
        for name in options.names or SCRIPTS:
            script = ROOT / "launch" / f"{name}.sh"
            command = read_command([str(script), "--spec", options.spec], None)
            rehearsal = bench.rehearse(command)
            if not rehearsal.fits:
                print(f"{name}: {rehearsal.verdict}", file=sys.stderr)
                return 1
            if options.spec == "torch":
                write_header(script, rehearsal)
                write_rows(STEPS, f"`{name}`", [step_row(name, rehearsal)])
            label = name if options.spec == "torch" else f"{name}, {options.spec}"
            write_rows(
                ROLES.format(options.spec), label, list(role_rows(label, command, rehearsal))
            )
    return 0


def compare_with_published(names: Iterable[str]) -> None:
    """Print a table of the recipes' memory, as published and as rehearsed here."""
    options = Options(GPUS["h200-141gb"])  # so that all of them fit
    columns = ("recipe", "source", "published", "rehearsed", "of it held")
    table = console.table("GiB of a GPU", *columns)
    with console.progress("rehearsing") as say, Rehearser(options, say) as bench:
        for name in names:
            recipe = RECIPES[name]
            model = ("--hf-model", str(PUBLISHED / f"{recipe.shape}.json"))
            command = read_command([*model, *f"{COMMON} {recipe.flags}".split()], recipe.gpus)
            rehearsal = bench.rehearse(command)
            fullest = rehearsal.fullest
            total = fullest.reserved / GIB + options.device(command).allowance_gib
            cells = f"{total:.1f}", f"{fullest.peak / GIB:.1f}"
            table.add_row(name, recipe.source, recipe.gib, *cells)
    console.output.print(table)


def write_header(script: Path, rehearsal: Rehearsal) -> None:
    """Write the comment about memory, and about the pipeline if there is one."""
    which = "" if len(rehearsal.outcomes) == 1 else f" ({rehearsal.fullest.role.name})"
    line = memory_line(rehearsal.outcomes)
    text = f"Memory of a GPU{which}, rehearsed with the torch spec: {line}."
    if (pipeline := rehearsal.pipeline) is not None:
        text += f" A rank waits {pipeline.bubble:.1%} of an iteration for others (modelled)."
    comment = "\n".join(wrap(text, WIDTH, initial_indent="# ", subsequent_indent="# ")) + "\n"
    old = script.read_text()
    script.write_text(re.sub(r"^# Memory.*\n(?:# .*\n)*", lambda _: comment, old, flags=re.M))


def role_rows(name: str, command: Command, rehearsal: Rehearsal) -> Iterator[str]:
    """Yield a line of the table for each role."""
    a = command.line.architecture
    estimates = memory_of_stages(command, a, trained_counts(command, a))
    for outcome in rehearsal.outcomes:
        estimate = estimates[outcome.role.stage].total
        iteration = outcome.iteration
        assert iteration is not None
        cells = (
            name,
            outcome.role.name.partition(", ")[0],
            f"{outcome.peak / 1e9:.1f}",
            f"{outcome.reserved / 1e9:.1f}",
            f"{outcome.spare / 1e9:.1f} ({outcome.spare / outcome.usable:.0%})",
            f"{estimate / 1e9:.1f} ({estimate / outcome.peak - 1:+.0%})",
            f"{iteration.counters['launches']:,}",
            f"{outcome.host_sync_count:,}",
            f"{outcome.seconds:.0f}",
        )
        yield f"| {' | '.join(cells)} |\n"


def step_row(name: str, rehearsal: Rehearsal) -> str:
    """Return a line of the table of modelled steps, with the parts of the first stage's time."""
    step = rehearsal.step
    assert step is not None
    parts = dict(step.roles[0].seconds)
    exchange = sum(parts.pop(part) for part in list(parts) if part.endswith("exchange"))
    known = [parts.pop(part, 0.0) for part in (GEMM, ATTENTION, MEMORY)]
    spent = [*known, exchange, parts.pop(IDLE, 0.0), sum(parts.values())]
    shares = [step.mfu, *(part / step.seconds for part in spent)]
    cells = [f"{share:.0%}".replace("%", " %") for share in shares]
    return f"| `{name}` | {step.seconds:.2f} | {step.tflops:.0f} | {' | '.join(cells)} |\n"


def write_rows(heading: str, name: str, lines: list[str]) -> None:
    """Replace this script's rows in the table below a heading of the page.

    A script without a row there gets its rows at the end of the table.
    """
    before, _, after = PAGE.read_text().partition(f"{heading}\n")
    # Tables of other sections have rows of the same name.
    section, next_heading, rest = after.partition("\n## ")
    old = re.compile(rf"(?:^\| {name} \|.*\n)+", re.MULTILINE)
    if not old.search(section):
        end = section.rindex("|\n") + 2
        section = section[:end] + f"| {name} |\n" + section[end:]
    section = old.sub(lambda _: "".join(lines), section, count=1)
    PAGE.write_text(f"{before}{heading}\n{section}{next_heading}{rest}")


if __name__ == "__main__":
    sys.exit(main())
