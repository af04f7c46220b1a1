"""``torchrun … -m mcore_qwen3vl.training FLAGS``: one rank of a training run."""

import atexit
import os
import sys
from pathlib import Path
from typing import NoReturn

from mcore_qwen3vl import machine
from mcore_qwen3vl.console import prepare_standard_streams, visible
from mcore_qwen3vl.errors import BadInput
from mcore_qwen3vl.files import refuse_undecodable
from mcore_qwen3vl.runtime.lifetime import end_with_parent
from mcore_qwen3vl.safe_path import protect_children
from mcore_qwen3vl.training.arguments.command_line import CommandLine
from mcore_qwen3vl.training.arguments.help import help_words
from mcore_qwen3vl.training.logs.terminal import report_crash


def entry() -> None:
    """Train as the command line says.

    Bad input prints one line on stderr and exits with code 2. The first rank to crash prints one
    line and exits with code 1; each rank's traceback is in its own log. A rank ends together with
    the torchrun that started it; otherwise a killed torchrun would leave it on its GPU.
    """
    protect_children()
    if "TORCHELASTIC_RUN_ID" in os.environ:
        end_with_parent(os.getppid())
    prepare_standard_streams()
    if os.environ.get("RANK", "0") == "0":
        machine.warn_of_versions()
    command = CommandLine(sys.argv[1:])
    try:
        refuse_undecodable(command.words)
        if "MASTER_ADDR" not in os.environ and help_words(sys.argv[1:]) is None:
            raise BadInput(
                "This program is one rank of a run. Start it with torchrun, or train on this "
                "machine with `mcore-qwen3vl train`, which takes the same flags."
            )
        # Takes seconds, during which torchrun may be killed.
        from mcore_qwen3vl.training.run import main

        # It returns 128 + N after signal N, and torchrun has forwarded that: the exit code is
        # torchrun's to say. To torchrun, a rank that does not end with 0 has failed.
        main(command)
    except BadInput as error:
        if _is_first_to_report():
            print(f"error: {visible(str(error))}", file=sys.stderr, flush=True)
        _end_process(error.exit_code)
    except Exception as error:
        report_crash(error, command, aloud=_is_first_to_report())
        _end_process(1)


def _end_process(exit_code: int) -> NoReturn:
    """End this process as ``sys.exit`` does, but for what the interpreter destroys at its end.

    Gloo's threads are among that. They abort the process if another rank has closed a connection
    to them, which ends for the same reason; the exit code would then say SIGABRT.
    """
    atexit._run_exitfuncs()  # ends data workers, and removes temporary files
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(exit_code)


def _is_first_to_report() -> bool:
    """Return whether no other rank of this node has reported an error; theirs would be alike.

    The first call makes the file by which the other ranks know.
    """
    file = os.environ.get("TORCHELASTIC_ERROR_FILE")  # ATTEMPT/LOCAL_RANK/error.json
    if file is None:
        return True
    try:
        (Path(file).parents[1] / "reported").touch(exist_ok=False)
    except FileExistsError:
        return False
    except OSError:  # better reported twice than not at all
        return True
    return True


if __name__ == "__main__":
    entry()
