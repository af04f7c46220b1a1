"""Equal models pass at every place under any layout; mistakes in the code are named too."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import typer
from PIL import Image
from typer.testing import CliRunner

from mcore_qwen3vl.cli.trace import verify_trace
from mcore_qwen3vl.errors import BadInput, CheckFailed
from mcore_qwen3vl.layout import Layout
from mcore_qwen3vl.model import fusion, rope
from mcore_qwen3vl.verify.parity.batches import build_batch
from mcore_qwen3vl.verify.trace import ranks
from mcore_qwen3vl.verify.trace.places import TEXT, data_path
from mcore_qwen3vl.verify.trace.planted import Garden
from mcore_qwen3vl.verify.trace.result import ACTIVATIONS, GRADIENTS, SLOPES, Trace
from mcore_qwen3vl.verify.trace.run import MARGIN, trace


def traced(garden: Garden, layout: str = "single", *, moe: bool = False, **kwargs) -> Trace:
    return trace(garden.truth(moe=moe), layout=Layout.parse(layout), **kwargs)


@pytest.mark.parametrize(
    ("layout", "moe", "batch"),
    [
        ("single", True, "mixed"),
        ("tp2", False, "images"),
        ("tp4+sp", True, "padded"),
        ("tp8+sp", False, "mixed"),  # more ranks than key/value heads
        ("pp2xvpp2", False, "video"),
        ("cp2", True, "packed"),
        ("tp2xcp2+sp", False, "padded-left"),
        ("ep2xdp2", True, "mixed"),
        ("tp2xpp2+sp", True, "text"),
    ],
)
def test_equal_models(garden: Garden, layout: str, moe: bool, batch: str) -> None:
    result = traced(garden, layout, moe=moe, batch=batch, gradients=True)
    assert result.ok, [str(f) for f in result.failures[:5]]
    assert result.first is None
    assert result.cause is None
    assert max(result.margins.values()) < MARGIN / 2  # the bound has room, and is no guess


def test_every_place_is_compared(garden: Garden) -> None:
    result = traced(garden, "tp2+sp", moe=True, gradients=True)
    from mcore_qwen3vl.config import Architecture

    names = {f.name for f in result.findings if f.part == ACTIVATIONS}
    assert names == {p.name for p in data_path(Architecture.from_hf(garden.correct(moe=True)))}
    slopes = {f.name for f in result.findings if f.part == SLOPES}
    assert names - slopes == {
        "model.visual.rotary_pos_emb",  # computed from positions alone
        f"{TEXT}.rotary_emb",
    }
    assert any(f.part == GRADIENTS for f in result.findings)


def test_a_place_that_nobody_saw_fails(garden: Garden, monkeypatch: pytest.MonkeyPatch) -> None:
    original = ranks.taps

    def without_head(chunk, places):
        return (t for t in original(chunk, places) if t.cuts[0].place != "lm_head")

    monkeypatch.setattr(ranks, "taps", without_head)
    result = traced(garden)
    assert not result.ok
    assert [f.name for f in result.failures] == ["lm_head"]


def test_missing_deepstack_in_the_code(garden: Garden, monkeypatch: pytest.MonkeyPatch) -> None:
    add_to = fusion.DeepStack.add_to
    monkeypatch.setattr(
        fusion.DeepStack,
        "add_to",
        lambda self, layer, hidden: hidden if layer == 1 else add_to(self, layer, hidden),
    )
    result = traced(garden, "tp2+sp")
    assert (result.first.name, result.cause.kind) == (f"{TEXT}.layers.1", "missing DeepStack")


def test_features_at_the_wrong_placeholders(
    garden: Garden, monkeypatch: pytest.MonkeyPatch
) -> None:
    fuse = fusion.fuse
    monkeypatch.setattr(
        "mcore_qwen3vl.model.qwen3vl.fuse",
        lambda embeddings, features, plan: fuse(embeddings, features.flip(0), plan),
    )
    result = traced(garden)
    assert (result.first.name, result.cause.kind) == (f"{TEXT}.inputs_embeds", "feature order")


def test_chunked_mrope(garden: Garden, monkeypatch: pytest.MonkeyPatch) -> None:
    init = rope.InterleavedMRoPE.__init__

    def chunked(self, head_dim, base, section):
        init(self, head_dim, base, section)
        self.axis = torch.repeat_interleave(torch.arange(3), torch.tensor(section))

    monkeypatch.setattr(rope.InterleavedMRoPE, "__init__", chunked)
    cause = traced(garden).cause
    assert cause.kind == "mrope interleaving"
    assert "ttttthhhhwww" in cause.explanation


def test_queries_and_keys_not_turned(garden: Garden, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rope, "apply_rotary_pos_emb", lambda x, *args, **kwargs: x)
    result = traced(garden)
    assert result.first.name == f"{TEXT}.layers.0.self_attn.o_proj:input"
    assert result.cause.kind == "rotary not applied"


def test_gradient_too_large_by_tp(garden: Garden, monkeypatch: pytest.MonkeyPatch) -> None:
    """The activations are right; what comes back through DeepStack is twice as much."""
    add_to = fusion.DeepStack.add_to

    def doubled(self, layer, hidden):
        twice = tuple(2 * f - f.detach() for f in self.features)
        return add_to(replace(self, features=twice), layer, hidden)

    monkeypatch.setattr(fusion.DeepStack, "add_to", doubled)
    result = traced(garden, "tp2+sp", gradients=True)
    assert result.first.part == SLOPES
    assert result.first.name == "model.visual.deepstack_merger_list.2"
    assert result.cause.kind == "gradient scale"
    assert "which is TP" in result.cause.explanation


def test_unknown_causes_are_called_so(garden: Garden, monkeypatch: pytest.MonkeyPatch) -> None:
    apply = rope.apply_rotary_pos_emb
    monkeypatch.setattr(
        rope, "apply_rotary_pos_emb", lambda x, *a, **k: apply(x, *a, **k) * (1 + 0.01 * x.sin())
    )
    result = traced(garden)
    assert result.cause.kind == "unknown"
    assert not result.cause.confirmed
    with pytest.raises(CheckFailed, match="o_proj:input"):
        result.require()


def test_models_of_different_shape(garden: Garden, tmp_path: Path) -> None:
    from mcore_qwen3vl.converters.convert import hf_to_mcore

    hf_to_mcore(garden.correct(moe=True), tmp_path / "mcore")
    with pytest.raises(BadInput, match="num_experts"):
        trace(garden.correct(moe=False), tmp_path / "mcore")


def app() -> typer.Typer:
    made = typer.Typer()
    made.command()(verify_trace)
    return made


def test_command_with_image(garden: Garden, tmp_path: Path) -> None:
    Image.effect_noise((64, 40), 90).convert("RGB").save(tmp_path / "a.png")
    arguments = [str(garden.correct(moe=False)), "--image", str(tmp_path / "a.png")]
    arguments += ["--prompt", "What is it?", "--tp", "2", "--sp"]
    arguments += ["--report", str(tmp_path / "report"), "--json", str(tmp_path / "out.json")]
    result = CliRunner().invoke(app(), arguments, catch_exceptions=False)
    assert result.exit_code == 0, result.output
    assert json.loads((tmp_path / "out.json").read_text())["ok"]
    assert json.loads((tmp_path / "report" / "report.json").read_text())["ok"]
    assert "PASSED" in (tmp_path / "report" / "report.html").read_text()


def test_command_refuses_what_is_no_image(garden: Garden, tmp_path: Path) -> None:
    (tmp_path / "a.png").write_text("text")
    arguments = [
        str(garden.correct(moe=False)),
        "--image",
        str(tmp_path / "a.png"),
        "--prompt",
        "?",
    ]
    with pytest.raises(BadInput, match="cannot be read"):
        CliRunner().invoke(app(), arguments, catch_exceptions=False)


def test_batches_come_from_the_parity_recipes(garden: Garden) -> None:
    from mcore_qwen3vl.config import Architecture

    architecture = Architecture.from_hf(garden.correct(moe=False))
    micro = build_batch("images", architecture).micro_batches[0]
    assert traced(garden, micro=micro).ok
