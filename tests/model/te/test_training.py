"""Megatron's loop with the ``te`` spec follows Hugging Face's curve and resumes exactly.

``--cpu`` refuses Transformer Engine, which has no CPU kernels; here it has reference kernels.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.model.te.installed import require

require()

from mcore_qwen3vl.layout import Layout  # noqa: E402
from mcore_qwen3vl.model.qwen3vl import Qwen3VLModel  # noqa: E402
from mcore_qwen3vl.training.arguments import parser  # noqa: E402
from mcore_qwen3vl.verification.curves import (  # noqa: E402
    DISTRIBUTED,
    OTHER_LAYOUT,
    TOLERANCE,
    Job,
    curve_of,
    hf_curve,
    train,
    train_and_rewind,
    worst_difference,
)
from tests.training.log import numbers_of  # noqa: E402

pytestmark = pytest.mark.slow
STEPS = 4


@pytest.fixture(autouse=True)
def allowed(monkeypatch: pytest.MonkeyPatch) -> None:
    build = Qwen3VLModel.__init__

    def only_te(self: Qwen3VLModel, *args: object, **kwargs: object) -> None:
        assert kwargs["spec"] == "te"
        build(self, *args, **kwargs)  # type: ignore[arg-type]

    monkeypatch.setattr(Qwen3VLModel, "__init__", only_te)
    monkeypatch.setattr(parser, "_chosen_spec", lambda value, cpu: "te")


@pytest.mark.parametrize(
    ("is_moe", "layout", "packing", "flags"),
    [
        (False, "single", True, ()),
        (False, "tp2+sp", False, ()),
        (False, "pp2xvpp2", False, ()),
        (False, "cp2", True, ()),
        (False, "dp2", False, DISTRIBUTED),
        (True, "single", True, ("--moe-permute-fusion",)),
        (True, "ep2xdp2", False, (*DISTRIBUTED, "--moe-permute-fusion")),
    ],
)
def test_follows_hugging_faces_curve(
    is_moe: bool, layout: str, packing: bool, flags: tuple[str, ...], dense: Path, moe: Path,
    data: Path, tmp_path: Path,
) -> None:  # fmt: skip
    checkpoint = moe if is_moe else dense
    job = Job(checkpoint, data, Layout.parse(layout), steps=6, packing=packing, flags=flags)
    difference = worst_difference(curve_of(train(job, tmp_path)), hf_curve(job))
    print(f"loss {difference.loss:.1e}, gradient norm {difference.grad_norm:.1e}")
    assert difference.loss < TOLERANCE
    assert difference.grad_norm < TOLERANCE


@pytest.mark.parametrize(
    ("is_moe", "before", "after", "flags"),
    [
        (False, "single", "single", ("--packing",)),
        (True, "ep2xdp2", "ep2xdp2", DISTRIBUTED),
        (False, "tp2+sp", "pp2", ("--use-distributed-optimizer",)),
    ],
)
def test_goes_on_where_it_stopped(
    is_moe: bool, before: str, after: str, flags: tuple[str, ...], dense: Path, moe: Path,
    data: Path, tmp_path: Path,
) -> None:  # fmt: skip
    """A run resumes with the states of TE's Adam, where torch's needs extra steps."""
    first, then = (
        Job(moe if is_moe else dense, data, Layout.parse(layout), steps=STEPS, flags=flags)
        for layout in (before, after)
    )
    whole, save = train_and_rewind(first, tmp_path)
    rest = train(then, tmp_path / "rest", "--save", str(save), "--save-interval", "100")
    if before == after:
        assert numbers_of(rest) == numbers_of(whole[STEPS // 2 :])
    difference = worst_difference(curve_of(rest), curve_of(whole[STEPS // 2 :]))
    assert max(difference.loss, difference.grad_norm) <= OTHER_LAYOUT
