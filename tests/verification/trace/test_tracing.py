"""The trace names the first module that differs: for mistakes in weights, config and code."""

from __future__ import annotations

import json
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
import typer
from PIL import Image
from torch import Tensor
from typer.testing import CliRunner, Result

from mcore_qwen3vl.cli.verify import verify_trace
from mcore_qwen3vl.errors import BadInput, CheckFailed
from mcore_qwen3vl.layout import Layout
from mcore_qwen3vl.model import lora, qwen3vl
from mcore_qwen3vl.model.decoder import attention, delta_net, norm
from mcore_qwen3vl.model.decoder.layer import DeepStackLayer
from mcore_qwen3vl.model.lora_modules import GroupedSite, Site
from mcore_qwen3vl.tiny import YARN, write_tiny_checkpoint
from mcore_qwen3vl.verification.parity.case import ADAPTERS, ParityCase, write_random_adapter
from mcore_qwen3vl.verification.trace import on_rank
from mcore_qwen3vl.verification.trace.recording import (
    ACTIVATION_GRADIENTS,
    ACTIVATIONS,
    GRADIENTS,
    WEIGHTS,
    TraceReference,
    probe_points,
)
from mcore_qwen3vl.verification.trace.tracing import Trace, trace
from tests.turns import slow, slow_except
from tests.verification import faults
from tests.verification.faults import TEXT, Fault, FaultInjector

Adapted = Callable[[str, bool], TraceReference]


def traced(
    injector: FaultInjector, layout: str = "single", *, moe: bool = False, **kwargs
) -> Trace:
    return trace(injector.reference(moe=moe), layout=Layout.parse(layout), **kwargs)


@pytest.mark.parametrize(
    ("layout", "moe", "batch"),
    [
        ("single", True, "mixed"),
        *slow(("tp2", False, "images"), ("tp4+sp", True, "padded")),
        # There are more ranks than key/value heads here.
        *slow(("tp8+sp", False, "mixed")),
        *slow(("cp2", True, "packed"), ("pp2xvpp2", False, "video")),
        ("tp2xcp2+sp", False, "padded-left"),
        ("ep2xdp2", True, "mixed"),
        *slow(("tp2xpp2+sp", True, "text")),
    ],
)
def test_equal_models(injector: FaultInjector, layout: str, moe: bool, batch: str) -> None:
    result = traced(injector, layout, moe=moe, batch=batch, gradients=True)
    assert result.ok, [str(f) for f in result.failures[:5]]
    assert result.first is None
    assert result.notes == {}
    # The bound leaves room, on every processor: 0.51 of it was seen on one.
    assert max(f.relative_error / f.tolerance for f in result.findings if f.tolerance) < 3 / 4


@pytest.mark.parametrize(
    ("layout", "moe"), [("tp2+sp", False), pytest.param("ep2xdp2", True, marks=pytest.mark.slow)]
)
def test_hybrid_models(
    layout: str, moe: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write_tiny_checkpoint(tmp_path / "hf", family="qwen3.5", moe=moe)
    reference = TraceReference(path)
    where = {"layout": Layout.parse(layout), "batch": "mixed", "gradients": True}
    result = trace(reference, **where)
    assert result.ok, [str(f) for f in result.failures[:5]]
    compared = {finding.name for finding in result.findings}
    net = f"{TEXT}.layers.0.linear_attn"
    assert {f"{net}.in_proj_{part}" for part in ("qkv", "z", "b", "a")} <= compared
    # A decay that is computed otherwise shows first where the rule's output enters a projection.
    name, part_of = "get_parameter_local_cp", delta_net.get_parameter_local_cp
    monkeypatch.setattr(delta_net, name, lambda p, *rest: 1.01 * part_of(p, *rest))
    first = trace(reference, **where).first
    assert first is not None
    assert first.name == f"{net}.out_proj:input"


def test_a_language_model_alone_is_said_to_get_text(tmp_path: Path) -> None:
    """A batch of images would otherwise seem to have been compared."""
    write_tiny_checkpoint(tmp_path / "model", family="qwen3.5", text_only=True)
    result = trace(tmp_path / "model", batch="image")
    assert result.ok
    assert result.environment["images and videos"].startswith(
        "none: text in place of those of batch im"
    )


def test_a_scaled_rope_has_equal_tables(tmp_path: Path) -> None:
    reference = TraceReference(write_tiny_checkpoint(tmp_path / "hf", text=YARN))
    assert trace(reference, layout=Layout.parse("tp2+sp"), batch="mixed").ok


def test_every_probe_point_is_compared(injector: FaultInjector) -> None:
    result = traced(injector, "tp2+sp", moe=True, gradients=True)
    names = {f.name for f in result.findings if f.part == ACTIVATIONS}
    assert names == {p.name for p in probe_points(injector.reference(moe=True).architecture)}
    with_gradient = {f.name for f in result.findings if f.part == ACTIVATION_GRADIENTS}
    assert names - with_gradient == {
        "model.visual.rotary_pos_emb",  # both are computed from positions alone
        f"{TEXT}.rotary_emb",
    }
    assert any(f.part == GRADIENTS for f in result.findings)


def test_a_probe_point_that_nobody_saw_fails(
    injector: FaultInjector, monkeypatch: pytest.MonkeyPatch
) -> None:
    original = on_rank.traced_tensors

    def without_head(chunk, points):
        return (t for t in original(chunk, points) if t.columns[0].point != "lm_head")

    monkeypatch.setattr(on_rank, "traced_tensors", without_head)
    result = traced(injector)
    assert not result.ok
    assert [f.name for f in result.failures] == ["lm_head"]


BY_NAME = {fault.name: fault for fault in (*faults.WEIGHTS, *faults.CONFIGS)}


def traced_fault(injector: FaultInjector, fault: Fault, layout: str = "single") -> Trace:
    examined = injector.with_fault(fault)
    return trace(injector.reference(moe=fault.moe), examined, layout=Layout.parse(layout))


QUICK = (
    "DeepStack from blocks 0, 2, 3",
    "QKV not grouped",
    "a vision block holds another's weights",
    "attention output rounded to bfloat16",
    "mrope_section [6, 3, 3]",
    "rms_norm_eps 1e-5",
    "top-2 router",
    "two experts exchanged",
)


@pytest.mark.parametrize("name", slow_except([*BY_NAME], *QUICK))
def test_a_planted_mistake(injector: FaultInjector, name: str) -> None:
    fault = BY_NAME[name]
    result = traced_fault(injector, fault)
    assert (result.first.name, result.first.part) == (fault.point, ACTIVATIONS)
    assert result.verdict == f"The models differ first at {fault.point} (activations)."
    if fault.config is not None:
        assert result.notes["Settings"].startswith(f"{fault.kind} is ")
        assert "Its weights" not in result.notes
    else:
        wrong = result.wrong_weights()
        assert wrong
        assert set(wrong) <= {f.name for f in result.failures if f.part == WEIGHTS}
        assert wrong[0] in result.notes["Its weights"]
        assert "Settings" not in result.notes
    assert "What remains" not in result.notes


@pytest.mark.parametrize(
    ("name", "layout"),
    [
        ("QKV not grouped", "tp2xpp2+sp"),
        *slow(
            ("rms_norm_eps 1e-5", "cp2"),
            ("a vision block holds another's weights", "tp2xcp2"),
            ("two experts exchanged", "tp2xep2+sp"),
            ("head is the embedding", "pp2xvpp2"),
        ),
    ],
)
def test_a_planted_mistake_in_shards(injector: FaultInjector, name: str, layout: str) -> None:
    result = traced_fault(injector, BY_NAME[name], layout)
    assert result.first.name == BY_NAME[name].point


def deepstack(
    change: Callable[[Tensor], Tensor], layer: int | None = None
) -> AbstractContextManager[Any]:
    """Let one decoder layer (counted from 1), or every one, add changed DeepStack features."""
    forward = DeepStackLayer.forward

    def changed(self: Any, *args: Any, context: Tensor | None = None, **kwargs: Any) -> Any:
        wrong = context is not None and layer in (None, self.layer_number)
        features = change(context) if wrong else context
        return forward(self, *args, context=features, **kwargs)[0], context

    return mock.patch.object(DeepStackLayer, "forward", changed)


def seeing_all(*args: Any, **kwargs: Any) -> Tensor:
    return F.scaled_dot_product_attention(*args, **{**kwargs, "is_causal": False})


def doubled_gradient(features: Tensor) -> Tensor:
    return 2 * features - features.detach()


patch = mock.patch.object
everywhere = patch(attention, "F", SimpleNamespace(scaled_dot_product_attention=seeing_all))
unrotated = patch(attention, "apply_rotary", lambda x, *_, **__: x)
GRADIENT_OF_TP2 = {"layout": Layout(tp=2, sp=True), "gradients": True}
IN_CODE: tuple[tuple[str, AbstractContextManager[Any], dict[str, Any]], ...] = (
    ("layers.0.self_attn.o_proj:input", everywhere, {}),
    ("layers.0.self_attn.o_proj:input", unrotated, {}),
    ("layers.0.input_layernorm", patch(norm.RMSNorm, "forward", lambda self, x: x), {}),
    ("inputs_embeds", patch(qwen3vl, "fuse", lambda text, *_: text), {}),
    ("layers.1", deepstack(torch.zeros_like, layer=2), {"layout": Layout(tp=2, sp=True)}),
    ("deepstack_merger_list.2", deepstack(doubled_gradient), GRADIENT_OF_TP2),
)


@pytest.mark.parametrize(("place", "mistake", "options"), IN_CODE)
def test_a_mistake_in_the_code(
    injector: FaultInjector,
    place: str,
    mistake: AbstractContextManager[Any],
    options: dict[str, Any],
) -> None:
    with mistake:
        result = trace(injector.reference(moe=False), **options)
    assert result.first.name.endswith(f".{place}")
    assert (result.first.part == ACTIVATION_GRADIENTS) is ("gradients" in options)
    assert "so the code that computes it" in result.notes["What remains"]
    with pytest.raises(CheckFailed, match=place):
        result.require()


def test_an_argument_of_another_model(injector: FaultInjector) -> None:
    case = ParityCase(config={"moe_router_score_function": "sigmoid"})
    result = trace(injector.reference(moe=True), case=case)
    assert result.first.name == f"{TEXT}.layers.0.mlp.gate"


@pytest.fixture(scope="module")
def adapted(injector: FaultInjector, tmp_path_factory: pytest.TempPathFactory) -> Adapted:
    references: dict[tuple[str, bool], TraceReference] = {}

    def reference(name: str, moe: bool = False) -> TraceReference:
        if (name, moe) not in references:
            hf = injector.correct(moe=moe)
            path = tmp_path_factory.mktemp("lora") / "adapter"
            adapter = write_random_adapter(path, ADAPTERS[name], hf)
            references[name, moe] = TraceReference(hf, adapter)
        return references[name, moe]

    return reference


@pytest.mark.parametrize(
    ("name", "layout", "moe"),
    [
        *slow(("everything", "tp8+sp", False)),
        ("router", "tp2xep2+sp", True),
        *slow(("whole", "pp2", False)),
    ],
)
def test_equal_adapted_models(adapted: Adapted, name: str, layout: str, moe: bool) -> None:
    reference = adapted(name, moe)
    result = trace(reference, layout=Layout.parse(layout), gradients=True)
    assert result.ok, [str(f) for f in result.failures[:5]]
    factors = set(reference.adapter.factor_tensors())
    for part in (WEIGHTS, GRADIENTS):
        assert factors <= {f.name for f in result.findings if f.part == part}


@pytest.mark.slow
def test_an_adapted_converted_base(
    injector: FaultInjector, adapted: Adapted, tmp_path: Path
) -> None:
    from mcore_qwen3vl.converters.convert import hf_to_mcore

    hf_to_mcore(injector.correct(moe=False), tmp_path / "mcore")
    assert trace(adapted("everything", False), tmp_path / "mcore").ok


@pytest.mark.parametrize(
    ("name", "moe", "place"),
    [
        *slow(("everything", False, "layers.2.mlp.down_proj")),
        ("router", True, "layers.1.mlp.experts"),
    ],
)
def test_an_adapter_left_out(
    adapted: Adapted, name: str, moe: bool, place: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    add, add_each = Site.add, GroupedSite._add

    def without(self, x, output):
        left_out = place in self.pairs[0].name
        return output if left_out else add(self, x, output)

    def without_each(self, x, output, groups):
        left_out = place in self._sites[0].pairs[0].name
        return output if left_out else add_each(self, x, output, groups)

    monkeypatch.setattr(Site, "add", without)
    monkeypatch.setattr(GroupedSite, "_add", without_each)
    assert trace(adapted(name, moe)).first.name == f"{TEXT}.{place}"


def test_a_factor_of_another_layer(adapted: Adapted, monkeypatch: pytest.MonkeyPatch) -> None:
    load = lora.load_factors
    names = [f"{TEXT}.layers.{i}.self_attn.v_proj.weight" for i in (1, 2)]

    def exchanged(chunks, factors):
        load(chunks, factors | {names[0]: factors[names[1]]})

    monkeypatch.setattr(lora, "load_factors", exchanged)
    result = trace(adapted("mixed ranks", False), layout=Layout(tp=2, sp=True))
    assert result.first.name == names[0].removesuffix(".weight")
    assert set(result.wrong_weights()) == {f"{names[0]}.lora_A", f"{names[0]}.lora_B"}


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


def test_command_with_an_adapter(adapted: Adapted) -> None:
    reference = adapted("mixed ranks", False)
    result = run(reference.path, "--lora", reference.lora, "--json")
    assert result.exit_code == 0, result.output
    assert json.loads(result.stdout)["ok"]
