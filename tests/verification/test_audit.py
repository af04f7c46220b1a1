"""An audit names what was done to every wrong tensor of a conversion, and to no other."""

from __future__ import annotations

import json
from argparse import Namespace
from collections.abc import Callable
from dataclasses import replace
from fractions import Fraction
from functools import partial
from itertools import pairwise
from pathlib import Path
from string import ascii_lowercase as LETTERS

import pytest
import torch
from safetensors.torch import load_file

from mcore_qwen3vl.converters.convert import hf_to_mcore, mcore_to_hf
from mcore_qwen3vl.converters.mapping import dialects
from mcore_qwen3vl.converters.mapping.dialects import MEGATRON_BRIDGE, MS_SWIFT
from mcore_qwen3vl.converters.offline import to_mcore
from mcore_qwen3vl.tiny import write_tiny_checkpoint
from mcore_qwen3vl.verification.audit import audit
from mcore_qwen3vl.verification.checkpoints import compare_checkpoints
from tests.command import exit_code
from tests.converters.checkpoints import copy, edit_config, load, save
from tests.converters.peers.test_peers import HERE, PEERS, QKV, source_of
from tests.verification.faults import CONFIGS, WEIGHTS, Fault, FaultInjector

YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}


@pytest.mark.parametrize("kind", ["qwen3.5", "qwen3.5-moe", "yarn"])
def test_a_right_conversion_of_nested_settings_is_right(tmp_path: Path, kind: str) -> None:
    """Gated delta nets and YaRN have settings of their own in the config."""
    source = write_tiny_checkpoint(
        tmp_path / "hf",
        family="qwen3-vl" if kind == "yarn" else "qwen3.5",
        moe=kind.endswith("moe"),
    )
    if kind == "yarn":
        rope = json.loads((source / "config.json").read_text())["text_config"]["rope_scaling"]
        edit_config(source, text_config__rope_scaling=rope | YARN)
    hf_to_mcore(source, tmp_path / "mcore")
    assert audit(tmp_path / "mcore", source).ok
    assert audit(source, source).ok


def test_a_checkpoint_of_another_model_gets_a_verdict(tmp_path: Path) -> None:
    """Its layers have keys of their own, in another number than the right model's."""
    hybrid = write_tiny_checkpoint(tmp_path / "hybrid", family="qwen3.5", moe=True)
    right = write_tiny_checkpoint(tmp_path / "right", moe=True)
    hf_to_mcore(hybrid, tmp_path / "mcore")
    result = audit(tmp_path / "mcore", right)
    assert not result.ok
    assert "settings are another model's" in result.verdict


@pytest.mark.parametrize("fault", WEIGHTS, ids=lambda fault: fault.name.replace(" ", "-"))
def test_what_was_done_is_named(injector: FaultInjector, fault: Fault) -> None:
    right = injector.correct(moe=fault.moe)
    tensors, changed = (load_file(right / "model.safetensors") for _ in range(2))
    assert fault.inject is not None
    fault.inject(changed)
    wrong = {name for name, tensor in tensors.items() if not torch.equal(tensor, changed[name])}
    result = audit(injector.with_fault(fault), right)
    assert result.mistakes.keys() == wrong
    assert {kind for kind, _ in result.mistakes.values()} == {fault.kind}
    assert {f.name for f in result.failures} == wrong
    said = f"{len(wrong)} of {len(tensors)} tensors are wrong: {fault.kind} ({len(wrong)})"
    assert result.verdict == f"The conversion is wrong: {said}."
    (note,) = result.notes.values()
    assert all(sentence in note for _, sentence in list(result.mistakes.values())[:1])


def heads_turned(query: torch.Tensor) -> torch.Tensor:
    return query.unflatten(0, (-1, 2, 64)).flip(1).flatten(0, 2)


def queries_first(query: torch.Tensor) -> torch.Tensor:
    return query.unflatten(0, (-1, 2, 64)).transpose(0, 1).flatten(0, 2)


def keys_first(joined: torch.Tensor) -> torch.Tensor:
    query, key, value = joined.split([64, 64, 160])
    return torch.cat([key, query, value])


def by_key_head(joined: torch.Tensor) -> torch.Tensor:
    heads = [part.unflatten(0, (4, -1)) for part in joined.split([64, 64, 160])]
    return torch.cat(heads, dim=1).flatten(0, 1)


DELTA = "model.language_model.layers.0.linear_attn."
Q_3, Q_MTP = (
    f"{x}.self_attn.q_proj.weight" for x in ("model.language_model.layers.3", "mtp.layers.0")
)
PERMUTED, KEYS_FIRST = "permuted QKV", "is laid out as all k, all q, all v"
BY_HEAD = "is laid out head by head, each with q, k, v, instead of as all q, all k, all v"


@pytest.mark.parametrize(
    ("name", "change", "kind", "said"),
    [
        (Q_3, heads_turned, PERMUTED, "has the query and the gate of each head swapped"),
        (Q_MTP, queries_first, PERMUTED, "has all queries before all gates"),
        (f"{DELTA}in_proj_qkv.weight", keys_first, PERMUTED, KEYS_FIRST),
        (f"{DELTA}conv1d.weight", keys_first, PERMUTED, KEYS_FIRST),
        (f"{DELTA}in_proj_qkv.weight", by_key_head, PERMUTED, BY_HEAD),
        (
            *(f"{DELTA}norm.weight", lambda t: t - 1, "zero-centred norm"),
            "holds w - 1, for norms that multiply by 1 + w",
        ),
        (
            *(f"{DELTA}norm.weight", lambda t: (t - 1).bfloat16().float() + 1, "dtype"),
            "was rounded to bfloat16 as w - 1",
        ),
        (f"{DELTA}A_log", lambda t: t.bfloat16().float(), "dtype", "was rounded to bfloat16"),
    ],
)
def test_what_was_done_to_qwen3_5_is_named(tmp_path, name, change, kind, said) -> None:
    right, wrong = tmp_path / "right", tmp_path / "wrong"
    write_tiny_checkpoint(right, family="qwen3.5")
    tensors = load(copy(right, wrong))
    tensors[name] = change(tensors[name]).contiguous()
    save(tensors, wrong)
    hf_to_mcore(wrong, tmp_path / "mcore")
    assert audit(tmp_path / "mcore", right).mistakes == {name: (kind, said)}


@pytest.mark.parametrize("peer", PEERS)
def test_a_right_conversion_of_another_project_is_right(peer: str) -> None:
    result = audit(HERE / peer, source_of(peer))
    assert result.ok
    assert result.verdict.startswith(
        "The conversion is right: all 105 tensors are those of Hugging"
    )
    assert "bfloat16" in result.environment["stored as"]


def test_a_tower_by_head_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """The reader takes the rows in another order than Megatron-Bridge wrote them."""
    modules = [replace(m, by_head=m.by_head and m.ours != QKV) for m in MEGATRON_BRIDGE.modules]
    wrong = replace(MEGATRON_BRIDGE, modules=tuple(modules))
    monkeypatch.setattr(dialects, "DIALECTS", (wrong, MS_SWIFT))
    result = audit(HERE / "megatron-bridge-dense", HERE / "hf-dense")
    assert len(result.mistakes) == 8
    lines = (
        f"model.visual.blocks.*.attn.qkv.{kind}, 4 tensors: each {BY_HEAD}."
        for kind in ("weight", "bias")
    )
    assert result.notes == {"permuted vision QKV": "\n".join(lines)}


def swap_gate_and_up(expert: torch.Tensor) -> torch.Tensor:
    return torch.cat(expert.chunk(2, -1)[::-1], -1)  # (H, 2 I)


def test_one_expert_of_a_fused_tensor_is_examined(tmp_path: Path) -> None:
    source = copy(HERE / "hf-moe", tmp_path / "hf")
    tensors = load(source)
    name = "model.language_model.layers.1.mlp.experts.gate_up_proj"
    for expert in (2, 4):
        tensors[name][expert] = swap_gate_and_up(tensors[name][expert])
    save(tensors, source)
    other_layout = tmp_path / "v5"
    mcore_to_hf(HERE / "ms-swift-moe", other_layout, hf_config=HERE / "hf-moe", expert_layout="v5")
    for examined in (HERE / "ms-swift-moe", HERE / "hf-moe", other_layout):
        result = audit(examined, source)
        said = "has gate and up swapped; this is expert 2, and 2 experts are wrong"
        assert result.mistakes == {name: ("swapped gate and up", said)}


def test_a_conversion_to_another_dtype_is_right(tmp_path: Path) -> None:
    """The values are those of Hugging Face's, rounded; other values are not."""
    right = write_tiny_checkpoint(tmp_path / "hf")
    hf_to_mcore(right, tmp_path / "mcore", dtype="bf16")
    result = audit(tmp_path / "mcore", right)
    assert result.ok
    assert result.environment["stored as"] == "bfloat16"
    other = copy(right, tmp_path / "other")
    tensors = load(other)
    tensors["lm_head.weight"] *= 1.5
    save(tensors, other)
    (verdict,) = audit(tmp_path / "mcore", other).mistakes.values()
    assert verdict == ("scaled weight", "is multiplied by 0.666667")


def test_missing_and_further_tensors_are_named(tmp_path: Path) -> None:
    examined = copy(HERE / "hf-dense", tmp_path / "hf")
    tensors = load(examined)
    del tensors["model.visual.merger.norm.bias"]
    query, value = (f"model.language_model.layers.1.self_attn.{x}_proj.weight" for x in "qv")
    tensors[query] = tensors[query].flip(0).contiguous()
    del tensors[value]
    tensors["model.visual.class_token"] = torch.zeros(3)
    save(tensors, examined)
    assert {
        name: kind for name, (kind, _) in audit(examined, HERE / "hf-dense").mistakes.items()
    } == {
        "model.visual.merger.norm.bias": "missing tensor",
        query: "permuted QKV",
        value: "missing tensor",
        "model.visual.class_token": "further tensor",
    }


def test_a_checkpoint_of_other_sizes_has_other_shapes(tmp_path: Path) -> None:
    """Tensors with more or fewer rows differ too, even those of one dimension."""
    small, large = (
        write_tiny_checkpoint(tmp_path / str(size), vision={"intermediate_size": size}, seed=5)
        for size in (40, 48)
    )
    names = {
        name for name, tensor in load(small).items() if tensor.shape != load(large)[name].shape
    }
    assert {name.rpartition(".mlp.")[2] for name in names} == {
        "linear_fc1.weight",
        "linear_fc1.bias",
        "linear_fc2.weight",
    }
    for examined, right in ((small, large), (large, small)):
        result = audit(examined, right)
        found = {name for name, (kind, _) in result.mistakes.items() if kind == "another shape"}
        assert found == names
        assert "vision.intermediate_size" in result.verdict
        flaws = {f.name for f in compare_checkpoints(examined, right).failures if f.flaw}
        assert flaws >= names


def test_the_command(tmp_path: Path) -> None:
    source = copy(HERE / "hf-dense", tmp_path / "hf")
    tensors = load(source)
    tensors["lm_head.weight"][3] += 1
    save(tensors, source)
    peer, report = HERE / "ms-swift-dense", tmp_path / "report"
    assert exit_code("verify", "audit", peer, HERE / "hf-dense") == 0
    assert exit_code("verify", "audit", peer, source, "--report", report) == 1
    said = json.loads((report / "report.json").read_text("utf-8"))
    assert said["environment"]["written by"] == MS_SWIFT.maker
    assert list(said["notes"]) == ["changed values"]
    assert "changed values" in (report / "report.html").read_text("utf-8")
    assert exit_code("verify", "audit", source, peer) == 2


@pytest.mark.parametrize("fault", CONFIGS, ids=lambda fault: fault.name.replace(" ", "-"))
def test_a_setting_of_another_model_is_named(injector: FaultInjector, fault: Fault) -> None:
    result = audit(injector.with_fault(fault), injector.correct(moe=fault.moe))
    assert not result.mistakes
    (finding,) = result.failures
    assert finding.name == fault.kind
    assert result.verdict.endswith(f"; 1 settings are another model's: {finding.name}.")
    assert result.notes == {"settings": f"{finding.name} {finding.flaw}."}


OF_ANOTHER_MODEL = {"rotary_base": 1000000, "moe_router_score_function": "sigmoid"}


def in_common_state(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(to_mcore, "Namespace", partial(Namespace, **OF_ANOTHER_MODEL))
    hf_to_mcore(HERE / "hf-moe", folder, dialect="ms-swift")


def in_common_pt(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Older versions of Megatron write this file."""
    hf_to_mcore(HERE / "hf-moe", folder)
    torch.save({"args": Namespace(**OF_ANOTHER_MODEL)}, folder / "release" / "common.pt")


def in_legacy_files(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    hf_to_mcore(HERE / "hf-moe", folder, format="torch")
    (file,) = folder.rglob("*.pt")
    content = torch.load(file, weights_only=False)
    vars(content["args"]).update(OF_ANOTHER_MODEL)
    torch.save(content, file)


def in_run_config(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    hf_to_mcore(HERE / "hf-moe", folder, dialect="megatron-bridge")
    content = {"model": OF_ANOTHER_MODEL | {"num_moe_experts": 6, "mrope_section": [4, 2, 2]}}
    (folder / "release" / "run_config.yaml").write_text(json.dumps(content), "utf-8")


@pytest.mark.parametrize(
    "state",
    [in_common_state, in_common_pt, in_legacy_files, in_run_config],
    ids=lambda f: f.__name__,
)
def test_the_settings_of_the_run_are_compared(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    state: Callable[[Path, pytest.MonkeyPatch], None],
) -> None:
    assert audit(HERE / "hf-moe", HERE / "hf-moe").ok
    state(tmp_path / "mcore", monkeypatch)
    found = audit(tmp_path / "mcore", HERE / "hf-moe")
    assert {f.name: f.flaw for f in found.failures} == {
        "rotary_base": "is 1000000; the config says 5000000",
        "moe_router_score_function": "is sigmoid; the config says softmax",
    }


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (
            "a: &a [1, 1]\n"
            + "".join(f"{b}: &{b} [*{a}, *{a}]\n" for a, b in pairwise(LETTERS))
            + f"model: {{rotary_base: *{LETTERS[-1]}}}\n",
            "is a nested list; the config says 5000000",
        ),
        (
            "a: &a {x: 1}\n"
            + "".join(f"{b}: &{b} {{<<: [*{a}, *{a}]}}\n" for a, b in pairwise(LETTERS)),
            "cannot be read as YAML",
        ),
        ("model: " + "[" * 5000 + "]" * 5000, "cannot be read as YAML"),
        ("model: {rotary_base: " + "1" * 5000 + "}", "cannot be read as YAML"),
    ],
    ids=["shared lists", "merged mappings", "nested", "digits"],
)
def test_a_config_of_others_takes_no_more_memory_than_it_has_bytes(
    tmp_path: Path, content: str, said: str
) -> None:
    """A few lines of YAML can stand for more lists than any memory holds."""
    hf_to_mcore(HERE / "hf-dense", tmp_path / "mcore", dialect="megatron-bridge")
    (tmp_path / "mcore" / "release" / "run_config.yaml").write_text(content, "utf-8")
    result = audit(tmp_path / "mcore", HERE / "hf-dense")
    assert said in " ".join([result.environment.get("settings", ""), *result.notes.values()])


def test_a_setting_that_python_does_not_print_is_wrong(tmp_path: Path) -> None:
    hf_to_mcore(HERE / "hf-dense", tmp_path / "mcore", dialect="megatron-bridge")
    content = "model: {rotary_base: 0x" + "f" * 5000 + "}"  # no digits, which YAML would refuse
    (tmp_path / "mcore" / "release" / "run_config.yaml").write_text(content, "utf-8")
    (wrong,) = [f for f in audit(tmp_path / "mcore", HERE / "hf-dense").findings if not f.ok]
    assert wrong.flaw.startswith("is a number of thousands of digits; the config says")


def test_settings_that_are_not_unpickled_leave_the_tensors_to_judge(tmp_path: Path) -> None:
    hf_to_mcore(HERE / "hf-dense", tmp_path / "mcore")
    torch.save({"args": Namespace(step=Fraction(1, 3))}, tmp_path / "mcore/release/common.pt")
    result = audit(tmp_path / "mcore", HERE / "hf-dense")
    assert result.ok
    said = result.environment["settings"]
    assert said.startswith("not compared: ")
    assert "fractions.Fraction, which has no place" in said
