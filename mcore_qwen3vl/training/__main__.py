"""``torchrun … -m mcore_qwen3vl.training FLAGS``: one rank of a training run."""

import sys

from mcore_qwen3vl.errors import BadInput
from mcore_qwen3vl.training.run import main


def entry() -> None:
    """Train as the command line says; bad input is one line on stderr and exit code 2."""
    try:
        main(sys.argv[1:])
    except BadInput as error:
        print(f"error: {error}", file=sys.stderr, flush=True)
        sys.exit(error.exit_code)


if __name__ == "__main__":
    entry()
