"""Training on this machine: ``mcore-qwen3vl train`` acts as torchrun for one node."""

from __future__ import annotations

import argparse
import logging
import os
import signal
import socket
from collections.abc import Mapping, Sequence
from typing import Any

from mcore_qwen3vl import console
from mcore_qwen3vl.errors import BadInput
from mcore_qwen3vl.runtime.lifetime import how_it_ended, scratch_folder
from mcore_qwen3vl.training.arguments.checks import check_early, require_gpu
from mcore_qwen3vl.training.arguments.command_line import CommandLine
from mcore_qwen3vl.training.arguments.help import COMMON, PROGRAM, print_help
from mcore_qwen3vl.training.arguments.settings import add_arguments

SHUTDOWN_SECONDS = 600
"""Time for a step and a checkpoint after SIGTERM; after torchrun's 30 s a rank would be killed."""

FORWARDED_SIGNALS = "SIGTERM,SIGINT,SIGHUP,SIGQUIT,SIGUSR1,SIGUSR2,SIGXCPU"
"""What torchrun forwards to its ranks: its own default, and what schedulers send at a time limit.

It forwards the signal of ``--exit-signal`` too; any other ends torchrun, and the ranks with it.
``launch/common.sh`` has the same list. torchrun reads ``PET_SIGNALS_TO_HANDLE`` in every supported
version.
"""


def show_help(words: Sequence[str]) -> None:
    """Print the common flags and ours, or with `words` all flags about these words."""
    if words:
        from mcore_qwen3vl.training.run import main

        main(CommandLine(["--help", *words]))
    parser = argparse.ArgumentParser(
        prog=PROGRAM,
        description="Train on this machine with Megatron's loop, one rank a GPU (--cpu: one).",
        epilog="Megatron's flags work too: --help WORD shows the flags about a word; "
        "launch/train.py --help lists them all.",
        add_help=False,
    )
    common = parser.add_argument_group("common (Megatron)")
    for usage, text in COMMON.items():
        flag, _, metavar = usage.partition(" ")
        value: Any = {"metavar": metavar} if metavar else {"action": "store_true"}
        common.add_argument(flag, help=text, **value)
    print_help(add_arguments(parser))


def train_locally(flags: Sequence[str], processes: int | None = None) -> int:
    """Train on this machine as torchrun would, without its long report about a failed rank.

    Without a number of `processes`, there is one for each GPU, or one on the CPU. BadInput says why
    no run can start.

    Returns:
        The exit code: 0 done, 1 a rank crashed, 2 bad input, 128 + N stopped by signal N.
    """
    command = CommandLine(flags)
    check_early(command)
    os.environ.setdefault("OMP_NUM_THREADS", "1")  # as torchrun sets it, without its warning
    devices = 1 if command.cpu else require_gpu()
    ranks = processes or devices
    command.layout(ranks)
    return _run_here(command) if ranks == 1 else _run_torchrun(command, ranks)


def _run_here(command: CommandLine) -> int:
    """Run a single rank in this process, which saves importing torch a second time."""
    from mcore_qwen3vl.training.logs.terminal import report_crash
    from mcore_qwen3vl.training.run import main

    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]  # the system has chosen one that nobody uses
    address = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    os.environ |= {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", **address}
    try:
        return main(command)
    except BadInput:  # whoever called prints it
        raise
    except Exception as error:
        report_crash(error, command)
        return 1


def _run_torchrun(command: CommandLine, ranks: int) -> int:
    """Run `ranks` processes, and return the exit code of the run."""
    from torch.distributed import run as torchrun
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

    os.environ.setdefault("TORCH_ELASTIC_SHUTDOWN_TIMEOUT", str(SHUTDOWN_SECONDS))
    os.environ["PET_SIGNALS_TO_HANDLE"] = forwarded_signals(command.words)
    logging.getLogger("torch.distributed.elastic").setLevel(logging.CRITICAL)
    arguments = ["--standalone", "--nproc-per-node", str(ranks)]
    program = ["-m", "mcore_qwen3vl.training", *command.words]
    try:
        with scratch_folder("mcore-qwen3vl-torchrun-") as folder:
            torchrun.run(torchrun.parse_args([*arguments, "--log-dir", str(folder), *program]))
    except ChildFailedError as failed:
        codes = {failure.exitcode for failure in failed.failures.values()}
        if BadInput.exit_code in codes:
            return BadInput.exit_code  # a rank has said why
        console.messages.print(f"error: {describe_failure(failed.failures)}", soft_wrap=True)
        return 1
    except SignalException as stopped:
        return 128 + int(stopped.sigval)
    return 0


def forwarded_signals(words: Sequence[str]) -> str:
    """Return the names of the signals that torchrun is to forward, separated by commas.

    They are those of ``PET_SIGNALS_TO_HANDLE`` in the environment, by default
    :data:`FORWARDED_SIGNALS`, with the signal that ``--exit-signal`` names in `words`.
    """
    names = os.environ.get("PET_SIGNALS_TO_HANDLE", FORWARDED_SIGNALS).split(",")
    flags = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    flags.add_argument("--exit-signal", default=signal.SIGTERM.name)
    return ",".join(dict.fromkeys([*names, flags.parse_known_args(words)[0].exit_signal]))


def describe_failure(failures: Mapping[int, Any]) -> str:
    """Describe a run's failure: the killed rank, if any, or else the first rank that ended."""
    killed = {
        rank: failure
        for rank, failure in failures.items()
        if failure.exitcode < 0 and -failure.exitcode != signal.SIGTERM  # torchrun's signal
    }
    rank, failure = min((killed or failures).items(), key=lambda item: item[1].timestamp)
    said = f"rank {rank} {how_it_ended(failure.exitcode)}"
    return f"{said}; the others cannot go on without it" if rank in killed else said
