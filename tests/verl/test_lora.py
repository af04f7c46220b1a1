"""LoRA under VERL has the right reference, merged weights for rollouts, and checkpoints."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("verl", reason="make test-verl makes an environment that has VERL")

from mcore_qwen3vl.converters.adapters.merge import merge
from mcore_qwen3vl.converters.hf.hf_checkpoint import HuggingFaceCheckpoint
from mcore_qwen3vl.errors import BadInput
from mcore_qwen3vl.verl.options import LORA_LINEARS
from tests.verl.engines import build, error, exported, infer, ppo_step, same
from tests.verl.test_layouts import CP2, EP2, PP2, TOLERANCE, TP2, published_shapes

LORA = {"rank": 4, "alpha": 6, "merge": True, "dropout": 0.0}
FROZEN = {"override_mcore_model_config": {"freeze": ["vision"]}}
CASES = {
    "dense 1": ("dense", 1, {}, {}),
    "dense tp2": ("dense", 2, TP2, {"target_modules": ["all"]}),
    "dense pp2": ("dense", 2, PP2, {"target_modules": ["linear_qkv", "linear_fc2"]}),
    "dense cp2": ("dense", 2, CP2, {}),
    "moe tp2xep2": (
        *("moe", 2, TP2 | EP2),
        {"target_modules": ["linear_fc1", "linear_fc2", "router"]},
    ),
    "hybrid moe tp2xep2": (
        *("hybrid moe", 2, TP2 | EP2),
        {"target_modules": ["linear_qkv", "linear_fc1", "linear_fc2", "in_proj", "out_proj"]},
    ),
}

MEANT = {
    "linear_qkv": ("q_proj", "k_proj", "v_proj"),
    "linear_proj": ("o_proj",),
    "linear_fc1": ("gate_proj", "up_proj", "gate_up_proj"),
    "linear_fc2": ("down_proj",),
    "in_proj": ("in_proj_qkv", "in_proj_z", "in_proj_b", "in_proj_a"),
    "out_proj": ("out_proj",),
    "router": ("gate",),
}
"""The last parts of Hugging Face's names that Megatron's names in ``target_modules`` mean."""


def lora_run(path: Path, layout: Any, given: Any, samples: Any, expected: Any, folder: Path) -> Any:
    """Do two steps with a checkpoint between, and report what the rollout receives."""
    engine = build(path, layout, {"lora": LORA | given})
    first = ppo_step(engine, samples, expected)
    trained = bits(engine)
    handed = exported(engine)
    report: dict[str, Any] = {"kept": same(trained, bits(engine)) == list(trained)}
    with engine.disable_adapter():
        base, own = infer(engine, samples)
    adapted, _ = infer(engine, samples)
    report["back"] = same(trained, bits(engine)) == list(trained)
    engine.save_checkpoint(str(folder / "step"), global_step=1)
    ppo_step(engine, samples, expected)
    end = bits(engine)
    engine.load_checkpoint(str(folder / "step"), del_local_after_load=False)
    report["loaded"] = same(trained, bits(engine)) == list(trained)
    ppo_step(engine, samples, expected)
    report["repeated"] = same(end, bits(engine)) == list(end)
    report["handed"] = handed
    if adapted:
        report["norm"] = float(first["metrics"]["grad_norm"])
        report["base"] = error(base["log_probs"], expected.log_probs[own], shifted=True)
        report["adapted"] = error(adapted["log_probs"], expected.log_probs[own], shifted=True)
        report["log_probs"] = [t.clone() for t in adapted["log_probs"].unbind()]
    return report


def bits(engine: Any) -> dict[str, torch.Tensor]:
    """Return copies of every parameter of this rank."""
    return {
        f"{number}.{name}": parameter.detach().clone()
        for number, chunk in enumerate(engine.module)
        for name, parameter in chunk.named_parameters()
    }


def of_checkpoint(path: Path, samples: Any) -> Any:
    out, _ = infer(build(path), samples)
    return [t.clone() for t in out["log_probs"].unbind()]


@pytest.mark.parametrize("name", CASES)
def test_lora(name: str, case: Any, on_ranks: Any, tmp_path: Path) -> None:
    kind, ranks, layout, options = CASES[name]
    given = case(kind)
    reports = on_ranks(
        ranks, lora_run, given.path, layout, options, given.samples, given.expected, tmp_path
    )
    for report in reports:
        assert report["kept"], "merging changed weights that train"
        assert report["back"], "switching the adapter off and on changed it"
        assert report["loaded"]
        assert report["repeated"], "the step after loading is another one"
    (report,) = [r for r in reports if "base" in r]
    assert report["base"] < TOLERANCE, "the reference is not the base model"
    assert report["adapted"] > 100 * TOLERANCE

    # The rollout received what `lora merge` makes from the saved adapter.
    adapter = tmp_path / "step" / "model" / "huggingface"
    assert (adapter / "adapter_config.json").exists()
    merged = tmp_path / "merged"
    merge(given.path, adapter, merged)
    stored = HuggingFaceCheckpoint(merged)
    assert set(report["handed"]) == set(published_shapes(merged))
    source = HuggingFaceCheckpoint(given.path)
    handed = report["handed"].items()
    adapted = {n for n, tensor in handed if not torch.equal(tensor, source.read_tensor(n))}
    targets = options.get("target_modules", LORA_LINEARS)
    if targets != ["all"]:
        parts = {part for target in targets for part in MEANT[target]}
        names = (n for n in source.entries if n.startswith("model.language_model.layers."))
        assert adapted == {n for n in names if n.removesuffix(".weight").split(".")[-1] in parts}
    for tensor_name, tensor in handed:
        assert torch.allclose(tensor, stored.read_tensor(tensor_name), rtol=0, atol=1e-6), (
            tensor_name
        )
    (log_probs,) = on_ranks(1, of_checkpoint, merged, given.samples)
    for ours, theirs in zip(report["log_probs"], log_probs, strict=True):
        assert float((ours[:-1] - theirs[:-1]).abs().max()) < TOLERANCE


def test_goes_on_from_an_adapter(case: Any, on_ranks: Any, tmp_path: Path) -> None:
    given = case()
    on_ranks(1, lora_run, given.path, {}, {}, given.samples, given.expected, tmp_path)
    adapter = tmp_path / "step" / "model" / "huggingface"
    options = {"lora": {"adapter_path": str(adapter), "merge": True}}

    def factors(path: Path, options: Any) -> Any:
        engine = build(path, {}, options)
        return {name: value for name, value in bits(engine).items() if "lora_B" in name}

    (found,) = on_ranks(1, factors, given.path, options)
    assert found
    assert all(value.any() for value in found.values())


@pytest.mark.parametrize(
    ("engine", "given", "message"),
    [
        ({}, {"merge": False}, "model.lora.merge: the rollout cannot take an adapter"),
        ({}, {"type": "canonical_lora"}, "model.lora.type: use lora"),
        (
            *({}, {"dropout_position": "post"}),
            "model.lora.dropout_position: an option of Megatron-Bridge",
        ),
        ({}, {"exclude_modules": ["router"]}, "model.lora.exclude_modules: an option"),
        ({}, {"target_modules": ["*.linear_qkv"]}, "PEFT does not apply this"),
        (FROZEN, {}, r"model\.lora freezes all of it"),
    ],
)
def test_refused(engine: Any, given: Any, message: str, case: Any, on_ranks: Any) -> None:
    def ask(path: Path, lora: Any) -> None:
        build(path, engine, {"lora": lora})

    with pytest.raises(BadInput, match=message):
        on_ranks(1, ask, case().path, LORA | given)


def test_no_reference_without_an_adapter(case: Any, on_ranks: Any) -> None:
    def ask(path: Path) -> None:
        with build(path).disable_adapter():
            pass

    with pytest.raises(BadInput, match=r"set model\.lora\.rank"):
        on_ranks(1, ask, case().path)
