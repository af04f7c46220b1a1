"""``python -m PACKAGE [OPTIONS] SCRIPT|-m MODULE [ARGUMENT...]``, with this package's name."""

from __future__ import annotations

import argparse
import json
import runpy
import sys
import traceback
from collections.abc import Sequence
from pathlib import Path

from .device import Report, Settings, Unavailable, start_again
from .workbench import leave_at_once


def make_parser() -> argparse.ArgumentParser:
    """Return the parser of the flags before PROGRAM; those after it are the program's own."""
    parser = argparse.ArgumentParser(
        prog=f"python -m {__package__}",
        description="Run a program as one rank on a simulated GPU.",
        allow_abbrev=False,
    )
    for flag, kind, default, text in (
        ("--world-size", int, 1, "ranks of the whole run"),
        ("--rank", int, 0, "rank of this process"),
        ("--memory-gib", float, 80.0, "memory of the device"),
        ("--capability", int, 90, "compute capability x 10"),
    ):
        parser.add_argument(flag, type=kind, default=default, help=text)
    for flag, text in (
        ("--late-events", "report an upper bound of the memory that several streams hold"),
        ("--peak", "print what held the memory at its peak"),
        ("--launches", "print which lines launch which kernels; slow"),
    ):
        parser.add_argument(flag, action="store_true", help=text)
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all measurements to FILE")
    parser.add_argument("-m", dest="module", action="store_true", help="run PROGRAM as a module")
    parser.add_argument("program")
    parser.add_argument("arguments", nargs=argparse.REMAINDER)
    return parser


def main(argv: Sequence[str]) -> int:
    """Run the program and return its exit code."""
    options = make_parser().parse_args(argv)
    start_again(
        Settings(options.memory_gib, capability=options.capability, late_events=options.late_events)
    )
    from .rank import (
        History,
        count_compiled,
        line_of,
        one_rank,
        record_allocations,
    )

    count_compiled()
    with one_rank(options.rank, options.world_size) as rank:
        if options.peak:
            record_allocations()
        if options.launches:
            rank.device.watch_launches()
        code = _run_program(options.program, options.arguments, options.module)
        rank.end_interval("end")
        if options.peak:
            bytes_by_line = History(line_of).peak().sizes
            rank.report.facts["bytes at the peak, by line"] = bytes_by_line
    print(format_report(rank.report), file=sys.stderr)
    if options.json:
        options.json.write_text(json.dumps(rank.report.to_json(), indent=1), "utf-8")
    return code


def _run_program(program: str, arguments: list[str], is_module: bool) -> int:
    sys.argv = [program, *arguments]
    try:
        if is_module:
            runpy.run_module(program, run_name="__main__", alter_sys=True)
        else:
            sys.path.insert(0, str(Path(program).parent))
            runpy.run_path(program, run_name="__main__")
    except SystemExit as left:
        return left.code if isinstance(left.code, int) else int(bool(left.code))
    except Exception:
        traceback.print_exc()
        return 1
    return 0


def format_report(report: Report) -> str:
    """Return the stages as text, with the details of the last interval before ``end``."""
    lines = [f"{'interval':24} {'s':>7} {'allocated':>10} {'peak':>7} {'reserved':>8} GB"]
    lines[0] += f"{'launches':>9} {'host syncs':>11}"
    lines += [
        f"{s.name:24} {s.seconds:7.1f} {s.allocated / 1e9:10.2f} {s.peak / 1e9:7.2f} "
        f"{s.reserved / 1e9:8.2f}    {s.counters['launches']:9} {s.counters['host_syncs']:11}"
        for s in report.intervals
    ]
    for interval in report.intervals[-2:-1]:
        lines += ["", f"host syncs in {interval.name}:"]
        lines += [f"{s.count:6} {s.phase}: {s.kind} at {s.place}" for s in interval.host_syncs]
        lines += ["", f"handed to process groups in {interval.name}:"]
        lines += [
            f"{t.size / 1e6:10.2f} MB in {t.calls:5} calls of {t.operation} by {t.group}"
            for t in interval.traffic
        ]
        if interval.launches:
            lines += ["", f"launches in {interval.name}:"]
        lines += [f"{n.count:6} {n.phase}: {n.kernel} at {n.place}" for n in interval.launches]
    lines.append("")
    for name, value in report.facts.items():
        inner = value if isinstance(value, dict) else {}
        lines.append(f"{name}:" if isinstance(value, dict) else f"{name}: {value}")
        lines += [f"  {key}: {number}" for key, number in inner.items()]
    return "\n".join(lines)


if __name__ == "__main__":
    try:
        exit_code = main(sys.argv[1:])
    except Unavailable as error:
        print(f"error: {error}", file=sys.stderr)
        exit_code = 2
    leave_at_once(exit_code)  # what libraries clean up at exit need not be simulated
