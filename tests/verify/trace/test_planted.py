"""Every planted mistake must be found where it is and named for what it is."""

import pytest

from mcore_qwen3vl.layout import Layout
from mcore_qwen3vl.verify.trace.planted import BUGS, Bug, Garden

BY_NAME = {bug.name: bug for bug in BUGS}


@pytest.mark.parametrize("bug", BUGS, ids=lambda bug: bug.name.replace(" ", "-"))
def test_named(garden: Garden, bug: Bug) -> None:
    outcome = garden.look(bug)
    assert (outcome.place, outcome.kind) == (bug.place, bug.kind), outcome.explanation
    assert outcome.confirmed


@pytest.mark.parametrize(
    ("name", "layout"),
    [
        ("QKV not grouped", "tp2xpp2+sp"),
        ("rms_norm_eps 1e-5", "cp2"),
        ("a vision block holds another's weights", "tp2xcp2"),
        ("two experts exchanged", "tp2xep2+sp"),
        ("head is the embedding", "pp2xvpp2"),
    ],
)
def test_named_from_shards(garden: Garden, name: str, layout: str) -> None:
    outcome = garden.look(BY_NAME[name], Layout.parse(layout))
    assert outcome.right, (outcome.place, outcome.kind, outcome.explanation)
