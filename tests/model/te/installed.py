"""For test modules that need Transformer Engine's Python: skip them, or set it up on the CPU."""

from __future__ import annotations

from importlib.util import find_spec

import pytest

REASON = "Transformer Engine is not installed: `make test-te` makes an environment that has it"


def require() -> None:
    """Skip the calling module where there is no Transformer Engine, else put it on the CPU.

    Called when the module is imported, before it imports anything of Transformer Engine's.
    """
    if find_spec("transformer_engine") is None:
        pytest.skip(REASON, allow_module_level=True)
    from tests.model.te import device

    device.install()
