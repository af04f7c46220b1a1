"""The requirement of test modules that need Transformer Engine's Python."""

from __future__ import annotations

from importlib.util import find_spec

import pytest

REASON = "Transformer Engine is not installed: `make test-te` makes an environment that has it"


def require() -> None:
    """Skip the calling module without Transformer Engine; otherwise set that up on the CPU.

    The module calls this before it imports anything of Transformer Engine's.
    """
    if find_spec("transformer_engine") is None:
        pytest.skip(REASON, allow_module_level=True)
    from tests.model.te import device

    device.install()
