"""Rehearse the launch scripts, and write memory and modelled time of a step to docs/rehearse.md.

The scripts' headers get their memory too.

    python benchmarks/launch_memory.py            # all: about a quarter of an hour on two cores
    python benchmarks/launch_memory.py sft_8b     # only its header and rows
    python benchmarks/launch_memory.py --spec te  # only rows; needs Transformer Engine

A slow test holds the headers to 2 %. Run this after an intended change of memory.
"""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from textwrap import wrap

from mcore_qwen3vl import console
from mcore_qwen3vl.rehearsal.command import Command, read_command
from mcore_qwen3vl.rehearsal.outcome import Rehearsal, RoleOutcome, memory_line
from mcore_qwen3vl.rehearsal.rehearse import Options, Rehearser
from mcore_qwen3vl.rehearsal.search import estimate_stages, trained_of
from mcore_qwen3vl.rehearsal.step_time import ATTENTION, GEMM, IDLE, MEMORY
from mcore_qwen3vl.runtime.gpus import GPUS

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "rehearse.md"
SIZES = ("2b", "4b", "8b", "32b", "30b_a3b", "235b_a22b")
SCRIPTS = [f"{task}_{size}" for size in SIZES for task in ("sft", "pretrain", "lora")]
SCRIPTS += ["dpo_8b"]
STEPS, ROLES = "| script | s a step | TFLOP/s | MFU |", "| script | role |"
WIDTH = 102


def main() -> int:
    """Rehearse the named scripts, or all."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("names", nargs="*", choices=[*SCRIPTS, []], metavar="SCRIPT")
    parser.add_argument("--spec", choices=("torch", "te"), default="torch")
    options = parser.parse_args()
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
            write_rows(ROLES, label, list(rows(label, command, rehearsal)))
    return 0


def write_header(script: Path, rehearsal: Rehearsal) -> None:
    """Write the comment about memory, and about the pipeline if there is one."""
    fullest = max(rehearsal.outcomes, key=lambda outcome: outcome.reserved)
    which = "" if len(rehearsal.outcomes) == 1 else f" ({fullest.role.name})"
    line = memory_line(rehearsal.outcomes)
    text = f"Memory of a GPU{which}, rehearsed with the torch spec: {line}."
    if rehearsal.pipeline is not None:
        text += (
            f" A rank waits {rehearsal.pipeline.bubble:.1%} of an iteration for others (modelled)."
        )
    comment = "\n".join(wrap(text, WIDTH, initial_indent="# ", subsequent_indent="# ")) + "\n"
    old = script.read_text()
    script.write_text(re.sub(r"^# Memory.*\n(?:# .*\n)*", lambda _: comment, old, flags=re.M))


def rows(name: str, command: Command, rehearsal: Rehearsal) -> Iterator[str]:
    """Yield a line of the table for each role."""
    a = command.line.architecture
    estimates = estimate_stages(command, a, trained_of(command, a))
    for outcome in rehearsal.outcomes:
        yield _row(name, outcome, estimates[outcome.role.stage].total)


def _row(name: str, outcome: RoleOutcome, estimate: float) -> str:
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
        f"{outcome.host_syncs:,}",
        f"{outcome.seconds:.0f}",
    )
    return f"| {' | '.join(cells)} |\n"


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


def write_rows(table: str, name: str, lines: list[str]) -> None:
    """Replace this script's rows in the page's first table with them below the line `table`."""
    before, header, after = PAGE.read_text().partition(table)
    old = re.compile(rf"(?:^\| {name} \|.*\n)+", re.MULTILINE)
    assert old.search(after), f"{PAGE} has no row of {name}"
    PAGE.write_text(before + header + old.sub(lambda _: "".join(lines), after, count=1))


if __name__ == "__main__":
    sys.exit(main())
