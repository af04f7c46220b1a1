"""Equal models pass at every probe point under any layout, and mistakes in the code are named."""

import json
from pathlib import Path

import pytest
import torch
import typer
from PIL import Image
from typer.testing import CliRunner, Result

from mcore_qwen3vl.cli.verify import verify_trace
from mcore_qwen3vl.errors import BadInput, CheckFailed
from mcore_qwen3vl.layout import Layout
from mcore_qwen3vl.model.decoder import attention
from mcore_qwen3vl.tiny import YARN, write_tiny_checkpoint
from mcore_qwen3vl.verify.trace import on_rank
from mcore_qwen3vl.verify.trace.probe_points import (
    ACTIVATION_GRADIENTS,
    ACTIVATIONS,
    GRADIENTS,
    TEXT,
    data_path,
)
from mcore_qwen3vl.verify.trace.recording import TraceReference
from mcore_qwen3vl.verify.trace.tracing import Trace, trace
from tests.verify.trace.fault_injection import FaultInjector
from tests.verify.trace.patched import deepstack


def traced(
    injector: FaultInjector, layout: str = "single", *, moe: bool = False, **kwargs
) -> Trace:
    return trace(injector.reference(moe=moe), layout=Layout.parse(layout), **kwargs)


@pytest.mark.parametrize(
    ("layout", "moe", "batch"),
    [
        ("single", True, "mixed"),
        pytest.param("tp2", False, "images", marks=pytest.mark.slow),
        pytest.param("tp4+sp", True, "padded", marks=pytest.mark.slow),
        # There are more ranks than key/value heads here.
        pytest.param("tp8+sp", False, "mixed", marks=pytest.mark.slow),
        ("pp2xvpp2", False, "video"),
        pytest.param("cp2", True, "packed", marks=pytest.mark.slow),
        ("tp2xcp2+sp", False, "padded-left"),
        ("ep2xdp2", True, "mixed"),
        ("tp2xpp2+sp", True, "text"),
    ],
)
def test_equal_models(injector: FaultInjector, layout: str, moe: bool, batch: str) -> None:
    result = traced(injector, layout, moe=moe, batch=batch, gradients=True)
    assert result.ok, [str(f) for f in result.failures[:5]]
    assert result.first is None
    assert result.cause is None
    # The bound leaves room, on every processor: 0.51 of it was seen on one.
    assert max(f.error / f.tolerance for f in result.findings if f.tolerance) < 3 / 4


def test_a_scaled_rope_has_equal_tables(tmp_path: Path) -> None:
    reference = TraceReference(write_tiny_checkpoint(tmp_path / "hf", text=YARN))
    assert trace(reference, layout=Layout.parse("tp2+sp"), batch="mixed").ok


def test_every_probe_point_is_compared(injector: FaultInjector) -> None:
    result = traced(injector, "tp2+sp", moe=True, gradients=True)
    names = {f.name for f in result.findings if f.part == ACTIVATIONS}
    assert names == {p.name for p in data_path(injector.reference(moe=True).architecture)}
    with_gradient = {f.name for f in result.findings if f.part == ACTIVATION_GRADIENTS}
    assert names - with_gradient == {
        "model.visual.rotary_pos_emb",  # both are computed from positions alone
        f"{TEXT}.rotary_emb",
    }
    assert any(f.part == GRADIENTS for f in result.findings)


def test_a_probe_point_that_nobody_saw_fails(
    injector: FaultInjector, monkeypatch: pytest.MonkeyPatch
) -> None:
    original = on_rank.hooks_of

    def without_head(chunk, points):
        return (t for t in original(chunk, points) if t.columns[0].point != "lm_head")

    monkeypatch.setattr(on_rank, "hooks_of", without_head)
    result = traced(injector)
    assert not result.ok
    assert [f.name for f in result.failures] == ["lm_head"]


def test_chunked_mrope(injector: FaultInjector, monkeypatch: pytest.MonkeyPatch) -> None:
    init = attention.InterleavedMRoPE.__init__

    def chunked(self, architecture):
        init(self, architecture)
        self.axis = torch.repeat_interleave(
            torch.arange(3), torch.tensor(architecture.mrope_section)
        )

    monkeypatch.setattr(attention.InterleavedMRoPE, "__init__", chunked)
    cause = traced(injector).cause
    assert cause.kind == "mrope interleaving"
    assert "ttttthhhhwww" in cause.explanation


def test_gradient_too_large_by_tp(injector: FaultInjector) -> None:
    """It is named when activations are right and DeepStack's backward gives twice as much."""
    with deepstack(lambda features: 2 * features - features.detach()):
        result = traced(injector, "tp2+sp", gradients=True)
    assert result.first.part == ACTIVATION_GRADIENTS
    assert result.first.name == "model.visual.deepstack_merger_list.2"
    assert result.cause.kind == "gradient scale"
    assert "which is TP" in result.cause.explanation


def test_unknown_causes_are_called_so(
    injector: FaultInjector, monkeypatch: pytest.MonkeyPatch
) -> None:
    apply = attention.apply_rotary
    monkeypatch.setattr(
        attention, "apply_rotary", lambda x, *a, **k: apply(x, *a, **k) * (1 + 0.01 * x.sin())
    )
    result = traced(injector)
    assert result.cause.kind == "unknown"
    assert not result.cause.confirmed
    with pytest.raises(CheckFailed, match="o_proj:input"):
        result.require()


def test_models_of_different_shape(injector: FaultInjector, tmp_path: Path) -> None:
    from mcore_qwen3vl.converters.convert import hf_to_mcore

    hf_to_mcore(injector.correct(moe=True), tmp_path / "mcore")
    with pytest.raises(BadInput, match="num_experts"):
        trace(injector.correct(moe=False), tmp_path / "mcore")


def run(*arguments: str | Path) -> Result:
    app = typer.Typer()
    app.command()(verify_trace)
    return CliRunner().invoke(app, list(map(str, arguments)), catch_exceptions=False)


def test_command_with_image(injector: FaultInjector, tmp_path: Path) -> None:
    Image.effect_noise((64, 40), 90).convert("RGB").save(tmp_path / "a.png")
    asked = ("--image", tmp_path / "a.png", "--prompt", "What is it?", "--tp", "2", "--sp")
    result = run(injector.correct(moe=False), *asked, "--report", tmp_path / "report", "--json")
    assert result.exit_code == 0, result.output
    assert json.loads(result.stdout)["ok"]
    assert json.loads((tmp_path / "report" / "report.json").read_text())["ok"]
    assert "PASSED" in (tmp_path / "report" / "report.html").read_text()


def test_command_refuses_what_is_no_image(injector: FaultInjector, tmp_path: Path) -> None:
    (tmp_path / "a.png").write_text("text")
    with pytest.raises(BadInput, match="cannot be read"):
        run(injector.correct(moe=False), "--image", tmp_path / "a.png", "--prompt", "?")
