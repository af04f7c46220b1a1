"""FlashAttention 3 is taken if it is asked for, once and before it is needed, or refused."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from torch.nn import attention

from mcore_qwen3vl.errors import BadInput
from mcore_qwen3vl.runtime import flash_attention
from mcore_qwen3vl.runtime.launch import run_layout
from mcore_qwen3vl.settings.run import ModelSettings
from mcore_qwen3vl.training.arguments import checks
from mcore_qwen3vl.training.events import FORWARD_BACKWARD, Built, Phase, RunObserver
from mcore_qwen3vl.verification.curves import run_rank
from tests.command import exit_code
from tests.training.arguments.commands import parsed
from tests.training.one_step import step_job

VERSION_3 = ("--flash-attention-version", "3")


def _events(argv: list[str], output: Path) -> list[str]:
    """Train on the CPU, where the kernels are never called, and return what happened."""
    events: list[str] = []

    class Observer(RunObserver):
        def begin(self, built: Built) -> None:
            events.append("model and optimizer are built")

        @contextmanager
        def during(self, phase: Phase) -> Iterator[None]:
            if phase == FORWARD_BACKWARD:
                events.append("forward")
            yield

    def register() -> None:
        events.append("activated")

    attention.register_flash_attention_impl("FA3", register_fn=register)
    checks.check_flash_attention_3 = lambda model: None  # it refuses --cpu
    run_rank(argv, output, Observer())
    return events


def test_a_run_activates_it_once_and_before_the_first_forward_pass(
    dense: Path, data: Path, tmp_path: Path
) -> None:
    """And a run that does not ask for it leaves PyTorch's own."""
    run = ["model and optimizer are built", "forward", "forward"]
    for flags, activated in ((VERSION_3, ["activated"]), ((), [])):
        job = step_job(dense, data, "single", *flags, steps=2)
        (events,) = run_layout(_events, 1, job.argv, tmp_path / "output.txt")
        assert events == [*activated, *run]
        said = (tmp_path / "output.txt").read_text()
        assert bool(activated) is ("attention   FlashAttention 3" in said)
        (tmp_path / "output.txt").unlink()


@pytest.mark.parametrize(
    ("package", "capability", "implementations", "why"),
    [
        (True, 9, ["FA3", "FA4"], None),
        (True, None, ["FA3"], None),
        (False, 9, ["FA3"], "needs the package flash_attn_3, whose module flash_attn_interface"),
        (True, 8, ["FA3"], r"needs a Hopper GPU \(compute capability 9.0\), and this one has 8.x"),
        (True, 10, ["FA3"], "this one has 10.x"),
        (True, 9, ["FA4"], "this PyTorch cannot call it"),
    ],
)
def test_what_is_missing_is_said(
    package: bool,
    capability: int | None,
    implementations: list[str],
    why: str | None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(flash_attention, "find_spec", lambda name: package or None)
    monkeypatch.setattr(flash_attention, "compute_capability", lambda: capability)
    monkeypatch.setattr(attention, "list_flash_attention_impls", lambda: implementations)
    if why is None:
        checks.check_flash_attention_3(ModelSettings())
    else:
        with pytest.raises(BadInput, match=f"^--flash-attention-version 3: .*{why}"):
            checks.check_flash_attention_3(ModelSettings())


def test_a_run_without_the_package_is_refused(
    dense: Path, data: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """With exit code 2 and one sentence or two; on the CPU whatever is installed."""
    run = ["train", "--hf-model", dense, "--data-path", data, "--train-iters", "1", *VERSION_3]
    for flags, why in (
        ([], "it needs the package flash_attn_3"),
        (["--cpu"], "with --cpu: it computes in half precision"),
        (["--fp32"], "with --fp32: it computes in half precision"),
    ):
        assert exit_code(*run, *flags) == 2
        said = " ".join(capsys.readouterr().err.split())
        assert said.startswith("error: --flash-attention-version 3")
        assert why in said


def test_version_4_is_transformer_engines(dense: Path) -> None:
    with pytest.raises(BadInput, match="--flash-attention-version 4 needs Transformer Engine"):
        parsed(dense, "--flash-attention-version", "4")
