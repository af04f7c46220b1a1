"""``verify parity`` of a published size with random weights: errors, memory and time.

Each layout is compared in a process of its own. The memory is the largest sum, over this process
and its ranks, of proportional set sizes (/proc/PID/smaps_rollup, twice a second). A page that
several processes share counts once. There are two such sums: of all pages, and of anonymous pages,
which the system cannot drop. Peaks of single processes are not added up.

    python benchmarks/parity.py 2b [--layouts single,tp2+sp,pp2,cp2] [--planted]
    python benchmarks/parity.py 8b --formula    # what it would take, without running anything
    python benchmarks/parity.py 2b --page FILE  # a page of Markdown too, for docs/measurements
"""

from __future__ import annotations

import argparse
import multiprocessing
import shutil
import sys
import time
from collections.abc import Iterator
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import psutil

from mcore_qwen3vl.errors import BadInput
from mcore_qwen3vl.layout import Layout
from mcore_qwen3vl.published_configs import PUBLISHED
from mcore_qwen3vl.runtime.lifetime import scratch_folder
from mcore_qwen3vl.safe_path import protect_children
from mcore_qwen3vl.tiny import write_random_weights
from mcore_qwen3vl.verification.figures import write_figures

GB = 1e9
LIMIT = 7200.0  # seconds
PARTS = ("logits", "loss", "gradients", "parameters")


def compare_and_send(
    pipe: Connection, path: Path, layout: str, planted: bool, **options: Any
) -> None:
    """Compare a checkpoint, and send the worst error of each part and the failures."""
    from mcore_qwen3vl.console import quiet_libraries
    from mcore_qwen3vl.runtime import cpu

    quiet_libraries()
    cpu.install()
    from mcore_qwen3vl.verification.parity.comparison import verify_parity

    if planted:
        plant_wrong_norm()
    try:
        say = partial(print, file=sys.stderr)
        report = verify_parity(path, Layout.parse(layout), timeout=LIMIT, say=say, **options)
    except BadInput as refused:
        pipe.send((str(refused), []))
        return
    errors: dict[str, float] = {}
    for finding in report.findings:
        errors[finding.part] = max(errors.get(finding.part, 0.0), finding.relative_error)
    pipe.send((errors, [str(failure) for failure in report.failures]))


def plant_wrong_norm() -> None:
    """Let our model load one weight of one norm wrongly, by 1e-3."""
    from mcore_qwen3vl.verification.parity import on_rank

    load = on_rank.load_weights

    def load_wrongly(chunks: Any, place: Any) -> None:
        load(chunks, place)
        for chunk in chunks:
            weights = dict(chunk.named_parameters())
            name = f"decoder.layers.{len(chunk.decoder.layers) // 2}.input_layernorm.weight"
            weights[name].data[0] += 1e-3

    on_rank.load_weights = load_wrongly  # type: ignore[assignment]


def proportional_sizes(process: psutil.Process) -> tuple[int, int]:
    """Return the bytes of all pages, and of anonymous pages, of a process and its children."""
    total = anonymous = 0
    for each in [process, *process.children(recursive=True)]:
        try:
            lines = Path(f"/proc/{each.pid}/smaps_rollup").read_text().splitlines()[1:]
        except OSError:  # it has ended
            continue
        sizes = {name: int(size) * 1024 for name, size, *_ in map(str.split, lines)}
        total += sizes.get("Pss:", 0)
        anonymous += sizes.get("Pss_Anon:", 0)
    return total, anonymous


def measure_layout(path: Path, layout: str, **options: Any) -> str:
    """Return a layout's row of the table."""
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe(duplex=False)
    process = context.Process(target=compare_and_send, args=(theirs, path, layout), kwargs=options)
    started = time.monotonic()
    process.start()
    theirs.close()  # the child has its own; only then does the pipe end with the child
    watched = psutil.Process(process.pid)
    peak = (0, 0)
    while process.is_alive():
        total, anonymous = proportional_sizes(watched)
        peak = max(peak[0], total), max(peak[1], anonymous)
        process.join(0.5)
    minutes = (time.monotonic() - started) / 60
    if not ours.poll():
        return f"| {layout} | did not finish (exit code {process.exitcode}) |"
    errors, failures = ours.recv()
    if isinstance(errors, str):
        return f"| {layout} | refused: {errors} |"
    for failure in failures[:20]:
        print(f"    {failure}", file=sys.stderr)
    cells = [f"{errors[part] * 1e6:.1f}" if part in errors else "" for part in PARTS]
    sizes = " of which ".join(f"{size / GB:.1f}" for size in peak)
    verdict = f"{len(failures)} failures" if failures else "equal"
    return f"| {layout} | {' | '.join(cells)} | {sizes} | {minutes:.1f} | {verdict} |"


def formula_row(path: Path, layout: str, batches: list[str], gradients: bool, dtype: Any) -> str:
    """Return a layout's row of what ``verify parity`` calculates, in memory and in files."""
    from mcore_qwen3vl.verification.parity.case import AdamW, ParityCase
    from mcore_qwen3vl.verification.parity.comparison import memory_and_disk_of
    from mcore_qwen3vl.verification.parity.reference import ReferenceCheckpoint

    cells = []
    for in_files in (False, True):
        step = AdamW() if gradients and dtype == "fp32" else None
        case = ParityCase(
            Layout.parse(layout),
            dtype=dtype,
            gradients=gradients,
            adamw=step,
            weights_in_files=in_files,
        )
        needs = memory_and_disk_of(ReferenceCheckpoint(path), case, batches)
        cells += [f"{needs.memory / GB:.1f}", f"{needs.disk / GB:.1f}"]
    return f"| {layout} | {' | '.join(cells)} |"


def rows(options: argparse.Namespace, folder: Path) -> Iterator[str]:
    """Yield the table, a row for each layout; with --formula, the calculated one."""
    layouts, batches = options.layouts.split(","), options.batches.split(",")
    gradients = not options.no_gradients
    config = PUBLISHED / f"{options.size}.json"
    if options.formula:
        shutil.copyfile(config, folder / "config.json")
        yield "| layout | GB of memory | of files | weights in files: GB of memory | of files |"
        yield "|---|---:|---:|---:|---:|"
        for layout in layouts:
            yield formula_row(folder, layout, batches, gradients, options.dtype)
        return
    started = time.monotonic()
    path = write_random_weights(config, folder / options.size, layers=options.layers)
    print(f"written in {time.monotonic() - started:.0f} s", file=sys.stderr)
    yield "| layout | logits | loss | gradients | step | GB, anonymous | minutes | |"
    yield "|---|---:|---:|---:|---:|---:|---:|---|"
    how = {"batches": batches, "gradients": gradients, "dtype": options.dtype}
    for layout in layouts:
        yield measure_layout(path, layout, planted=options.planted, **how)


def main() -> None:
    """Print the table."""
    protect_children()
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("size", choices=sorted(file.stem for file in PUBLISHED.glob("*.json")))
    parser.add_argument("--layouts", default="single,tp2+sp,pp2,cp2")
    parser.add_argument("--batches", default="mixed", help="kinds of batches, with commas")
    parser.add_argument("--layers", type=int, help="decoder layers, if not all of them")
    parser.add_argument("--dtype", choices=["fp32", "bf16"], default="fp32")
    for flag, text in (
        ("--no-gradients", "compare the forward pass alone"),
        ("--planted", "change one weight of a norm by 1e-3"),
        ("--formula", "calculate, and run nothing"),
    ):
        parser.add_argument(flag, action="store_true", help=text)
    parser.add_argument("--page", type=Path, help="write the figures as a page of Markdown")
    options = parser.parse_args()
    lines = []
    with scratch_folder("mcore-qwen3vl-published-") as folder:
        for line in rows(options, folder):
            print(line, flush=True)
            lines.append(line)
    if options.page:
        title = f"A whole {options.size} of random weights beside Hugging Face's model"
        command = f"python benchmarks/parity.py {' '.join(sys.argv[1:])}"
        write_figures(options.page, title, command, "\n".join(lines))


if __name__ == "__main__":
    main()
