"""``torchrun … -m mcore_qwen3vl.training FLAGS``: one rank of a training run."""

import os
import sys
from pathlib import Path

from mcore_qwen3vl import versions
from mcore_qwen3vl.console import use_utf8, visible
from mcore_qwen3vl.errors import BadInput
from mcore_qwen3vl.runtime.lifetime import end_with_parent
from mcore_qwen3vl.training.crash import report_crash


def entry() -> None:
    """Train as the command line says; bad input is one line on stderr and exit code 2.

    So is the first crash, with exit code 1; each rank's own traceback is in its log. A rank ends
    with the torchrun that started it, which otherwise leaves it on its GPU when killed.
    """
    if "TORCHELASTIC_RUN_ID" in os.environ:
        end_with_parent(os.getppid())
    use_utf8()
    if os.environ.get("RANK", "0") == "0":
        versions.warn()
    try:
        _require_torchrun(sys.argv[1:])
        from mcore_qwen3vl.training.run import main  # takes seconds: torchrun may be killed in them

        main(sys.argv[1:])
    except BadInput as error:
        if _first_on_this_node():
            print(f"error: {visible(str(error))}", file=sys.stderr, flush=True)
        sys.exit(error.exit_code)
    except Exception as error:
        report_crash(error, sys.argv[1:], aloud=_first_on_this_node())
        sys.exit(1)


def _require_torchrun(flags: list[str]) -> None:
    """
    Raises:
        BadInput: nothing says which rank this is and where the others are.
    """
    if "MASTER_ADDR" not in os.environ and not {"-h", "--help"} & set(flags):
        raise BadInput(
            "This program is one rank of a run. Start it with torchrun, or train on this machine "
            "with `mcore-qwen3vl train`, which takes the same flags."
        )


def _first_on_this_node() -> bool:
    """Whether no other rank that torchrun started here has reported its error; they are alike."""
    file = os.environ.get("TORCHELASTIC_ERROR_FILE")  # ATTEMPT/LOCAL_RANK/error.json
    if file is None:
        return True
    try:
        (Path(file).parents[1] / "reported").touch(exist_ok=False)
    except FileExistsError:
        return False
    except OSError:  # say it twice rather than not at all
        return True
    return True


if __name__ == "__main__":
    entry()
