"""``python -m mcore_qwen3vl.verification.search``."""

import sys

from mcore_qwen3vl.errors import BadInput, Unfinished
from mcore_qwen3vl.verification.search.search import main

if __name__ == "__main__":
    try:
        sys.exit(main())
    except (BadInput, Unfinished) as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(error.exit_code)
