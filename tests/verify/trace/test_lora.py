"""Adapted models are traced against PEFT's, and a fault of an adapter is named."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner

from mcore_qwen3vl.cli.verify import verify_trace
from mcore_qwen3vl.layout import Layout
from mcore_qwen3vl.model.lora import attach
from mcore_qwen3vl.model.lora.adapter import GroupedSite, Site
from mcore_qwen3vl.verify.parity.adapters import ADAPTERS, write_random_adapter
from mcore_qwen3vl.verify.trace.probe_points import GRADIENTS, TEXT, WEIGHTS
from mcore_qwen3vl.verify.trace.recording import TraceReference
from mcore_qwen3vl.verify.trace.tracing import trace
from tests.verify.trace.fault_injection import FaultInjector

Adapted = Callable[[str, bool], TraceReference]


@pytest.fixture(scope="module")
def adapted(injector: FaultInjector, tmp_path_factory: pytest.TempPathFactory) -> Adapted:
    made: dict[tuple[str, bool], TraceReference] = {}

    def of(name: str, moe: bool = False) -> TraceReference:
        if (name, moe) not in made:
            hf = injector.correct(moe=moe)
            path = tmp_path_factory.mktemp("lora") / "adapter"
            made[name, moe] = TraceReference(hf, write_random_adapter(path, ADAPTERS[name], hf))
        return made[name, moe]

    return of


@pytest.mark.parametrize(
    ("name", "layout", "moe"),
    [
        pytest.param("everything", "tp8+sp", False, marks=pytest.mark.slow),
        ("router", "tp2xep2+sp", True),
        pytest.param("whole", "pp2", False, marks=pytest.mark.slow),
    ],
)
def test_equal_models(adapted: Adapted, name: str, layout: str, moe: bool) -> None:
    reference = adapted(name, moe)
    result = trace(reference, layout=Layout.parse(layout), gradients=True)
    assert result.ok, [str(f) for f in result.failures[:5]]
    factors = set(reference.adapter.tensors())
    for part in (WEIGHTS, GRADIENTS):
        assert factors <= {f.name for f in result.findings if f.part == part}


@pytest.mark.slow
def test_a_converted_base(injector: FaultInjector, adapted: Adapted, tmp_path: Path) -> None:
    from mcore_qwen3vl.converters.convert import hf_to_mcore

    hf_to_mcore(injector.correct(moe=False), tmp_path / "mcore")
    assert trace(adapted("everything", False), tmp_path / "mcore").ok


def test_a_scaling_of_another_kind(adapted: Adapted, monkeypatch: pytest.MonkeyPatch) -> None:
    init = Site.__init__

    def scaled(self, pairs, *args, **kwargs):
        for pair in pairs:
            if pair.name.endswith("layers.1.self_attn.o_proj.weight"):
                pair.scaling *= 1.5
        init(self, pairs, *args, **kwargs)

    monkeypatch.setattr(Site, "__init__", scaled)
    result = trace(adapted("everything", False), layout=Layout(tp=2))
    assert result.first.name == f"{TEXT}.layers.1.self_attn.o_proj"
    assert result.cause.kind == "adapter scaling"
    assert "by 4.5 instead of 3" in result.cause.explanation


@pytest.mark.parametrize(
    ("name", "moe", "place"),
    [("everything", False, "layers.2.mlp.down_proj"), ("router", True, "layers.1.mlp.experts")],
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
    result = trace(adapted(name, moe))
    assert result.first.name == f"{TEXT}.{place}"
    assert result.cause.kind == "adapter not applied"


def test_a_factor_of_another_layer(adapted: Adapted, monkeypatch: pytest.MonkeyPatch) -> None:
    load = attach.load_factors
    names = [f"{TEXT}.layers.{i}.self_attn.v_proj.weight" for i in (1, 2)]

    def exchanged(chunks, factors):
        factors = dict(factors)
        factors[names[0]] = factors[names[1]]
        load(chunks, factors)

    monkeypatch.setattr(attach, "load_factors", exchanged)
    result = trace(adapted("mixed ranks", False), layout=Layout(tp=2, sp=True))
    assert result.first.name == names[0].removesuffix(".weight")
    assert result.cause.confirmed
    assert "v_proj.weight.lora_" in result.cause.explanation
    assert {f.name for f in result.failures if f.part == WEIGHTS} == {
        f"{names[0]}.lora_A",
        f"{names[0]}.lora_B",
    }


def test_command(adapted: Adapted, tmp_path: Path) -> None:
    app = typer.Typer()
    app.command()(verify_trace)
    reference = adapted("mixed ranks", False)
    out = CliRunner().invoke(app, [str(reference.path), "--lora", str(reference.lora), "--json"])
    assert out.exit_code == 0, out.output
    assert json.loads(out.stdout)["ok"]
