"""A failing rank prints one line; its traceback goes to its log."""

from __future__ import annotations

import os
import signal
import sys
import traceback
from collections.abc import Mapping
from typing import Any

from mcore_qwen3vl.console import visible
from mcore_qwen3vl.runtime.lifetime import death
from mcore_qwen3vl.training.arguments.command_line import CommandLine
from mcore_qwen3vl.training.folders import log_of
from mcore_qwen3vl.training.logs.quiet import LogFile


def report_crash(error: Exception, command: CommandLine, *, aloud: bool = True) -> None:
    """Write a rank's traceback to its log, and print the error and where the log is.

    Without ``--save`` there is no log, so the traceback is printed, except of a loss that is no
    number, whose message says all there is.

    Args:
        aloud: whether to print; not if another rank has done so.
    """
    rank = int(os.environ.get("RANK", "0"))
    place = log_of(command, rank)
    explained = isinstance(error, FloatingPointError)
    if place is None and not explained:
        if aloud:
            traceback.print_exception(error)
        return
    where = ""
    if place is not None:
        log = LogFile(place)
        log.write("".join(traceback.format_exception(error)))
        log.close()
        where = f" The traceback is in {place}."
    if not aloud:
        return
    kind = "" if explained else f"{type(error).__name__}: "
    first = next(iter(str(error).strip().splitlines()), "")
    print(
        f"error: rank {rank}: {kind}{visible(first).rstrip('.')}.{where}",
        file=sys.stderr,
        flush=True,
    )


def death_of_a_rank(failures: Mapping[int, Any]) -> str:
    """Describe a run's failure: the rank that was killed, if any, or else the first that ended."""
    killed = {
        rank: failure
        for rank, failure in failures.items()
        if failure.exitcode < 0 and -failure.exitcode != signal.SIGTERM  # torchrun's signal
    }
    rank, failure = min((killed or failures).items(), key=lambda one: one[1].timestamp)
    said = f"rank {rank} {death(failure.exitcode)}"
    return f"{said}; the others cannot go on without it" if rank in killed else said
