"""Megatron's flex dispatcher with the reference of DeepEP in place of the package."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from importlib.util import find_spec, module_from_spec
from pathlib import Path
from unittest import mock

STAND_IN = Path(__file__).parent / "stand_in"
_NAMES = (
    *("fused_dispatch", "fused_combine", "set_deepep_num_sms"),
    *("hybrid_ep_dispatch", "hybrid_ep_combine"),
)


@contextmanager
def installed() -> Iterator[None]:
    """Make ``deep_ep`` importable here and in forks, and give it to Megatron's dispatchers.

    Megatron looks for the package when it is imported, which it may have been.
    """
    from megatron.core.transformer.moe import token_dispatcher

    with ExitStack() as stack:
        stack.enter_context(mock.patch.object(sys, "path", [str(STAND_IN), *sys.path]))
        stack.callback(_forget)
        spec = find_spec("megatron.core.transformer.moe.fused_a2a")
        assert spec is not None
        assert spec.loader is not None
        again = module_from_spec(spec)
        spec.loader.exec_module(again)
        for name in _NAMES:
            stack.enter_context(mock.patch.object(token_dispatcher, name, getattr(again, name)))
        yield


def _forget() -> None:
    for name in [name for name in sys.modules if name.partition(".")[0] == "deep_ep"]:
        del sys.modules[name]
