"""What routers add to a step is the same under every layout, however uneven the padding."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
import torch

from mcore_qwen3vl.layout import Layout
from mcore_qwen3vl.model.decoder.router import BalancedRouter
from mcore_qwen3vl.verification.curves import Job, train
from tests.turns import slow_except

LOSSES = ("--moe-aux-loss-coeff", "1", "--moe-z-loss-coeff", "0.1")


@pytest.fixture(scope="module")
def uneven(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return records of a few and of about a hundred tokens."""
    path = tmp_path_factory.mktemp("uneven") / "train.jsonl"
    answers = ["Yes.", "Once upon a time there was a ship. " * 4]
    turns = [[("user", "Tell me more."), ("assistant", answer)] for answer in answers]
    records = [{"messages": [{"role": r, "content": c} for r, c in turn]} for turn in turns]
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return path


def first_step(folder: Path, checkpoint: Path, data: Path, layout: str, *flags: str) -> list[float]:
    """Return loss and gradient norm of a step over both records."""
    job = Job(checkpoint, data, Layout.parse(layout), 1, batch=2, seq_length=256, flags=flags)
    (entry,) = train(job, folder, "--no-shuffle")
    return [entry["lm loss"], entry["grad norm"]]


LAYOUTS = ["cp2", "tp2+sp", "ep2xdp2"]


@pytest.mark.parametrize("layout", slow_except(LAYOUTS, "cp2"))
def test_router_losses_weigh_each_token_alike(moe: Path, uneven: Path, tmp_path, layout):
    """Under CP 2 one rank has half of the shorter record, and nothing but padding beside it."""
    one = first_step(tmp_path / "one", moe, uneven, "single", *LOSSES)
    without = first_step(tmp_path / "without", moe, uneven, "single")
    assert one[1] > 1.2 * without[1]
    several = first_step(tmp_path / "several", moe, uneven, layout, *LOSSES)
    assert several == pytest.approx(one, rel=1e-5)


@pytest.mark.parametrize("layout", slow_except(LAYOUTS[:2], "cp2"))
def test_the_log_has_the_losses_of_all_tokens(moe: Path, uneven: Path, tmp_path, layout):
    """Ranks that hold more padding do not count for more."""
    found = []
    for name in ("single", layout):
        save = tmp_path / name / "save"
        first_step(tmp_path / name / "run", moe, uneven, name, *LOSSES, "--save", str(save))
        (text,) = (file.read_text() for file in sorted((save / "logs").glob("*.txt"))[-1:])
        values = re.findall(r"(z_loss|load_balancing_loss): (\S+)", text)
        found.append({kind: float(value) for kind, value in values})
    assert found[0].keys() == {"z_loss", "load_balancing_loss"}
    assert found[1] == pytest.approx(found[0], rel=1e-6)


def test_padding_takes_no_capacity_and_no_layout_changes_what_is_dropped(
    moe: Path, uneven: Path, tmp_path
):
    """Megatron makes room for padding too, and each rank drops among its own tokens."""
    capacity = ("--moe-expert-capacity-factor", "0.8")
    exact = first_step(tmp_path / "exact", moe, uneven, "single", *capacity, "--pad-to-longest")
    padded = first_step(tmp_path / "padded", moe, uneven, "single", *capacity)
    divided = first_step(tmp_path / "divided", moe, uneven, "cp2", *capacity)
    assert padded == pytest.approx(exact, rel=1e-5)
    assert divided == pytest.approx(exact, rel=1e-5)
    without = first_step(tmp_path / "without", moe, uneven, "single")
    assert abs(without[0] - exact[0]) > 1e-3


def test_a_validation_has_neither_noise_nor_a_capacity(
    moe: Path, uneven: Path, tmp_path: Path
) -> None:
    """It is that of the model as it is exported."""
    job = Job(moe, uneven, Layout.parse("single"), 1, batch=2, seq_length=256)
    valid = ("--skip-train", "--valid-data-path", str(uneven))
    acting = ("--moe-input-jitter-eps", "0.5", "--moe-expert-capacity-factor", "0.5")
    logs = []
    for name, flags in (("without", ()), ("with", acting)):
        train(job, tmp_path / name, *valid, *flags)
        logs.append(json.loads((tmp_path / name / "log.jsonl").read_text()))
    assert logs[1] == pytest.approx(logs[0], rel=1e-6)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_the_counts_of_a_step_have_all_digits_in_a_model_of_16_bits(dtype: torch.dtype) -> None:
    """The largest value in float16 is 65,504, and bfloat16 has 8 digits, in base 2."""
    router = BalancedRouter.__new__(BalancedRouter)
    torch.nn.Module.__init__(router)
    router.register_buffer("global_tokens_per_expert", torch.zeros(3))
    router.to(dtype)._maintain_float32_expert_bias()
    router.global_tokens_per_expert += torch.tensor([70_001, 257, 0])
    assert router.global_tokens_per_expert.tolist() == [70_001, 257, 0]
