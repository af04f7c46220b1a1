"""The trace finds every injected fault at its place and names its kind."""

import pytest

from mcore_qwen3vl.layout import Layout
from tests.verify.trace.fault_injection import FaultInjector
from tests.verify.trace.faults import FAULTS, Fault

BY_NAME = {fault.name: fault for fault in FAULTS}


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.name.replace(" ", "-"))
def test_named(injector: FaultInjector, fault: Fault) -> None:
    outcome = injector.trace(fault)
    assert (outcome.point, outcome.kind) == (fault.point, fault.kind), outcome.explanation
    assert outcome.confirmed


@pytest.mark.parametrize(
    ("name", "layout"),
    [
        ("QKV not grouped", "tp2xpp2+sp"),
        pytest.param("rms_norm_eps 1e-5", "cp2", marks=pytest.mark.slow),
        pytest.param("a vision block holds another's weights", "tp2xcp2", marks=pytest.mark.slow),
        ("two experts exchanged", "tp2xep2+sp"),
        ("head is the embedding", "pp2xvpp2"),
    ],
)
def test_named_from_shards(injector: FaultInjector, name: str, layout: str) -> None:
    outcome = injector.trace(BY_NAME[name], Layout.parse(layout))
    assert outcome.right, (outcome.point, outcome.kind, outcome.explanation)
