"""PEFT's adapters are read, described and written back unchanged; a damaged one is refused."""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig
from safetensors.torch import load_file, save_file
from torch import Tensor

from mcore_qwen3vl.config import Architecture
from mcore_qwen3vl.converters.adapters.adapter import (
    convert_adapter,
    read_adapter,
    swap_roles,
    write_adapter,
)
from mcore_qwen3vl.converters.adapters.config import AdapterConfig, resolve_targets
from mcore_qwen3vl.converters.convert import hf_to_mcore
from mcore_qwen3vl.errors import BadInput
from mcore_qwen3vl.verification.measurement import measure
from mcore_qwen3vl.verification.parity.comparison import TOLERANCE
from tests.command import exit_code
from tests.converters.adapters.conftest import Made
from tests.converters.adapters.peft_made import (
    EXPERTS,
    KINDS,
    Kind,
    edit_config,
    load,
    logits,
    make,
)
from tests.converters.fuzz import Damage, spoil_header, spoil_json, trial
from tests.turns import slow_except

WEIGHTS, CONFIG = "adapter_model.safetensors", "adapter_config.json"


@pytest.mark.parametrize("kind", slow_except([*KINDS], *[*KINDS][1::2]))
def test_there_and_back(kind: str, made: Callable[[str], Made], tmp_path: Path) -> None:
    """Tensors come back byte for byte, and the config field by field."""
    source = made(kind)
    adapter = read_adapter(source.folder, source.base)
    assert adapter.roles == ("swapped" if KINDS[kind].swapped else "canonical")
    back = tmp_path / "back"
    write_adapter(
        back, adapter.config, adapter.factors, adapter.saved, source.base, roles=adapter.roles
    )
    before, after = load_file(source.folder / WEIGHTS), load_file(back / WEIGHTS)
    assert list(before) == list(after)
    for key, tensor in before.items():
        assert tensor.dtype == after[key].dtype
        assert torch.equal(tensor, after[key]), key
    assert (source.folder / WEIGHTS).read_bytes() == (back / WEIGHTS).read_bytes()
    configs = [json.loads((f / CONFIG).read_text()) for f in (source.folder, back)]
    assert configs[0] == configs[1]
    assert LoraConfig.from_pretrained(source.folder) == LoraConfig.from_pretrained(back)


def test_a_base_from_the_hub_is_known_by_its_commit(
    made: Callable[[str], Made], tmp_path: Path
) -> None:
    """The manifest of a checkpoint that was converted from the cache names no folder."""
    source = made("tied")
    snapshot = tmp_path / "models--Qwen--tiny" / "snapshots" / "0f"
    shutil.copytree(source.base, snapshot)
    hf_to_mcore(snapshot, tmp_path / "mcore")
    adapter = read_adapter(source.folder, source.base)
    for named, notes in ((snapshot, 0), (source.base, 1)):
        config = replace(adapter.config, raw={"base_model_name_or_path": str(named)})
        assert len(replace(adapter, config=config).other_base_notes(tmp_path / "mcore")) == notes


@pytest.mark.parametrize("kind", ["swapped roles", "tied", "lm_head"])
def test_peft_takes_it(kind: str, made: Callable[[str], Made], tmp_path: Path) -> None:
    """Every key loads, and the logits are those of the model that the adapter was saved from.

    With the source's roles, files are equal byte for byte (above), so three kinds are enough.
    """
    source = made(kind)
    adapter = read_adapter(source.folder, source.base)
    write_adapter(
        tmp_path / "canonical", adapter.config, adapter.factors, adapter.saved, source.base
    )
    loaded = load(source.base, tmp_path / "canonical")
    architecture = Architecture.from_hf(source.base)
    found, wanted = (logits(model, architecture) for model in (loaded, source.model))
    assert measure(found, wanted).relative <= TOLERANCE


def test_all_linear_is_spelled_out(made: Callable[[str], Made], tmp_path: Path) -> None:
    """Modules are listed, as PEFT does: the word's meaning depends on transformers' release."""
    source = made("all-linear")
    adapter = read_adapter(source.folder, source.base)
    short = replace(adapter.config, target_modules="all-linear")
    write_adapter(tmp_path / "short", short, adapter.factors, adapter.saved, source.base)
    assert (
        LoraConfig.from_pretrained(tmp_path / "short").target_modules
        == LoraConfig.from_pretrained(source.folder).target_modules
    )


def test_a_router_that_was_a_linear_layer(made: Callable[[str], Made], tmp_path: Path) -> None:
    """An adapter of transformers 4.57 has the same tensors; converted, it loads with version 5."""
    source, old = made("router"), tmp_path / "old"
    shutil.copytree(source.folder, old)
    linear = {"target_modules": ["k_proj", "gate"], "target_parameters": None}
    edit_config(old, **linear, lora_dropout=0.1)
    with pytest.raises(BadInput, match=r"name mlp\.gate\.weight in target_parameters"):
        resolve_targets(AdapterConfig.from_file(old), source.base)
    assert "has its name of transformers 4.57" in " ".join(read_adapter(old, source.base).notes)
    edit_config(old, lora_dropout=0.0)
    convert_adapter(old, tmp_path / "new", source.base, roles="canonical")
    assert (source.folder / WEIGHTS).read_bytes() == (tmp_path / "new" / WEIGHTS).read_bytes()
    architecture = Architecture.from_hf(source.base)
    loaded = load(source.base, tmp_path / "new")
    found, wanted = (logits(model, architecture) for model in (loaded, source.model))
    assert measure(found, wanted).relative <= TOLERANCE


PREFIX = "base_model.model.model.language_model.layers.0."
QUERY_A = f"{PREFIX}self_attn.q_proj.lora_A.weight"
EXPERTS_A = f"{PREFIX}mlp.experts.lora_A.weight"


def rename(tensors: dict[str, Tensor], old: str, new: str) -> None:
    for key in list(tensors):
        tensors[key.replace(old, new, 1)] = tensors.pop(key)


@pytest.fixture
def bad(made: Callable[[str], Made], tmp_path: Path) -> Made:
    """Return a copy of an adapter, for a test to damage."""
    source = made("rank patterns")
    return replace(source, folder=Path(shutil.copytree(source.folder, tmp_path / "bad")))


def refused(adapter: Made, message: str) -> None:
    with pytest.raises(BadInput, match=message):
        read_adapter(adapter.folder, adapter.base)


EMBEDDING = "base_model.model.model.language_model.embed_tokens.weight"


@pytest.mark.parametrize(
    ("edit", "fields", "message"),
    [
        (lambda t: t.pop(QUERY_A), {}, "lacks .*q_proj.lora_A.weight of the 48 tensors"),
        (
            lambda t: t.update(x=torch.ones(2)),
            {},
            "holds x, which adapter_config.json does not call",
        ),
        (
            lambda t: t.update({QUERY_A: t[QUERY_A][:2]}),
            {},
            r"q_proj.* has shape \[2, 48\]; rank 4",
        ),
        (
            lambda t: t.update({EXPERTS_A: t[EXPERTS_A][:, :9].clone()}),
            {},
            r"down_proj have shapes \[60, 9\]",
        ),
        (
            lambda t: t[EXPERTS_A][3, 1].fill_(torch.nan),
            {},
            "experts.lora_A.weight holds a value that is not finite",
        ),
        (lambda t: t.update({QUERY_A: t[QUERY_A].double()}), {}, "has dtype F64"),
        (
            lambda t: rename(t, "base_model.model.", ""),
            {},
            r"calls none of its tensors as PEFT does .* holds model\.language_model",
        ),
        (
            lambda t: rename(t, "model.model", "model._orig_mod.model"),
            {},
            r"saved from within a wrapper .* '_orig_mod' into its name",
        ),
        (
            lambda t: t.update({EMBEDDING: torch.ones(360, 48)}),
            {"modules_to_save": ["embed_tokens"]},
            r"\[360, 48\], but \[352, 48\] .* vocabulary was resized",
        ),
        (dict, {"r": 0}, "r is 0"),
        (dict, {"r": True}, "r is True"),
        (dict, {"lora_alpha": "x"}, "lora_alpha is 'x'"),
        (dict, {"rank_pattern": {"q_proj": 1.5}}, "rank_pattern is"),
        (dict, {"target_modules": [1]}, r"target_modules is \[1\]"),
        (dict, {"peft_type": "LOHA"}, "peft_type 'LOHA'"),
        (dict, {"use_dora": True}, "DoRA"),
        (dict, {"r": 5}, "rank 5"),
    ],
)
def test_bad_tensors_and_fields(
    edit: Callable[[dict[str, Tensor]], Any], fields: dict[str, Any], message: str, bad: Made
) -> None:
    tensors = load_file(bad.folder / WEIGHTS)
    edit(tensors)
    save_file(tensors, bad.folder / WEIGHTS)
    edit_config(bad.folder, **fields)
    refused(bad, message)


def test_bad_files(bad: Made) -> None:
    weights, config = bad.folder / WEIGHTS, bad.folder / CONFIG
    weights.write_bytes(weights.read_bytes()[:-5])
    refused(bad, "not a complete safetensors file")
    weights.rename(bad.folder / "adapter_model.bin")
    refused(bad, "a pickle, which is not read")
    (bad.folder / "adapter_model.bin").unlink()
    refused(bad, r"holds no adapter_model\.safetensors")
    config.write_text("{")
    refused(bad, "cannot be read as JSON")
    config.unlink()
    refused(bad, r"does not exist\. A PEFT adapter is a directory")


def test_an_adapter_of_another_model(made: Callable[[str], Made]) -> None:
    with pytest.raises(BadInput, match="not found in the base model"):
        read_adapter(made("rslora").folder, made("rank patterns").base)
    with pytest.raises(BadInput, match=r"lacks .*, which|holds .* and \d+ more, which"):
        read_adapter(made("rank patterns").folder, made("vision").base)


def test_ambiguous_roles(tiny: Callable[[str], Path], tmp_path: Path) -> None:
    """Roles of one square expert parameter are not guessed; with both parameters they are clear."""
    base, folder = tiny("moe-H=I"), tmp_path / "down"
    make(Kind("", {"target_parameters": EXPERTS[1:]}), base, folder)
    with pytest.raises(BadInput, match="do not tell which roles"):
        read_adapter(folder, base)
    straight = read_adapter(folder, base, roles="canonical").factors
    swapped = read_adapter(folder, base, roles="swapped").factors
    for name, factors in straight.items():
        a, b = swap_roles(factors.a, factors.b, 12)
        assert torch.equal(a, swapped[name].a)
        assert torch.equal(b, swapped[name].b)
        assert not torch.equal(factors.a, a)
    make(Kind("", {"target_parameters": EXPERTS}), base, tmp_path / "both")
    assert read_adapter(tmp_path / "both", base).roles == "canonical"
    with pytest.raises(BadInput, match="are not the swapped roles"):
        read_adapter(tmp_path / "both", base, roles="swapped")


def test_writing_refuses_what_the_config_does_not_call_for(
    made: Callable[[str], Made], tmp_path: Path
) -> None:
    source = made("tied")
    adapter = read_adapter(source.folder, source.base)
    name = next(iter(adapter.factors))
    fewer = {key: value for key, value in adapter.factors.items() if key != name}
    with pytest.raises(BadInput, match=f"factors given are not those .*{name}"):
        write_adapter(tmp_path / "out", adapter.config, fewer, adapter.saved, source.base)
    with pytest.raises(BadInput, match="whole tensors given are not those"):
        write_adapter(tmp_path / "out", adapter.config, adapter.factors, {}, source.base)
    assert list(tmp_path.iterdir()) == []
    (one, *_) = adapter.saved  # one of two tied embeddings is enough
    write_adapter(
        tmp_path / "out", adapter.config, adapter.factors, {one: adapter.saved[one]}, source.base
    )
    assert (tmp_path / "out" / WEIGHTS).read_bytes() == (source.folder / WEIGHTS).read_bytes()
    with pytest.raises(BadInput, match=r"exists\. Remove it"):
        write_adapter(tmp_path / "out", adapter.config, adapter.factors, adapter.saved, source.base)


def inspect(capsys: pytest.CaptureFixture[str], *arguments: object) -> Any:
    """Run ``inspect``; return its exit code, and its JSON, text or error message."""
    code, captured = exit_code("inspect", *arguments), capsys.readouterr()
    if code:
        return code, " ".join(captured.err.split())
    return 0, json.loads(captured.out) if "--json" in arguments else captured.out


def test_an_adapter(
    made: Callable[[str], Made], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source = made("swapped roles")
    code, found = inspect(capsys, source.folder, "--json")  # PEFT's config names the base
    assert (code, found["kind"], found["base"]) == (0, "adapter", str(source.base))
    assert (found["roles"], found["dtypes"], found["tensors"]) == ("swapped", ["float32"], 24)
    parts = {part["name"]: part for part in found["parts"]}
    down = parts["model.language_model.layers.*.mlp.experts.down_proj"]
    assert (down["count"], down["r"], down["shapes"]) == (4, 5, [[60, 36], [48, 60]])
    assert any("only in the canonical roles" in note for note in found["notes"])
    code, text = inspect(capsys, source.folder)
    assert "swapped" in text
    assert "vLLM reads the factors" in text

    moved = Path(shutil.copytree(source.folder, tmp_path / "moved"))
    edit_config(moved, base_model_name_or_path="someone/model")
    code, found = inspect(capsys, moved, "--json")
    assert (code, found["base"], found["roles"], found["tensors"]) == (0, None, None, 24)
    code, found = inspect(capsys, moved, "--hf-config", source.base, "--json")
    assert (code, found["roles"]) == (0, "swapped")
    assert exit_code("lora", "convert", moved, tmp_path / "out") == 2
    assert "('someone/model') was not found" in " ".join(capsys.readouterr().err.split())


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (None, "which is not installed: pip install 'mcore-qwen3vl[lora]'."),
        ("import accelerate.none", "which fails: No module named 'accelerate.none'."),
    ],
)
def test_without_peft(
    text: str | None,
    expected: str,
    made: Callable[[str], Made],
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    source = made("swapped roles")
    if text is None:
        monkeypatch.setitem(sys.modules, "peft", None)
    else:
        (tmp_path / "peft.py").write_text(text)
        monkeypatch.syspath_prepend(tmp_path)
        monkeypatch.delitem(sys.modules, "peft", raising=False)
    code, message = inspect(capsys, source.folder)
    assert code == 2
    assert f"adapters need PEFT, {expected}" in message


SPOIL = {"weights": (WEIGHTS, spoil_header), "config": (CONFIG, spoil_json)}


def attempt_in(folder: Path, base: Path) -> Callable[[], str | None]:
    """Return a trial that reads and rewrites: other code must read the same from the copy."""

    def attempt() -> str | None:
        back = folder.parent / "back"
        shutil.rmtree(back, ignore_errors=True)
        adapter = read_adapter(folder, base)
        write_adapter(
            back, adapter.config, adapter.factors, adapter.saved, base, roles=adapter.roles
        )
        before, after = load_file(folder / WEIGHTS), load_file(back / WEIGHTS)
        if before.keys() != after.keys():
            return "other keys"
        for key, tensor in before.items():
            if tensor.dtype != after[key].dtype or not torch.equal(tensor, after[key]):
                return f"another tensor {key}"
        said, written = (json.loads((f / CONFIG).read_text()) for f in (folder, back))
        # PEFT saves embeddings that modules_to_save does not name; what is written names them.
        saved = said.get("modules_to_save") or []
        if any(embedding in key for key in before for embedding in ("embed_tokens", "lm_head")):
            if written["modules_to_save"][: len(saved)] != saved:
                return "other modules to save"
            written["modules_to_save"] = said.get("modules_to_save")
        pair = (json.dumps(one, sort_keys=True) for one in (said, {k: written[k] for k in said}))
        return None if len({*pair}) == 1 else "another config"

    return attempt


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["rank patterns", "swapped roles", "tied", "some layers"])
@pytest.mark.parametrize("part", SPOIL)
def test_fuzz(part: str, kind: str, made: Callable[[str], Made], tmp_path: Path) -> None:
    folder = Path(shutil.copytree(made(kind).folder, tmp_path / "adapter"))
    file, mutate = SPOIL[part]
    attempt = attempt_in(folder, made(kind).base)
    assert attempt() is None
    trial([Damage(folder / file, mutate)], attempt, 300, f"long {kind} {part}", tmp_path)
