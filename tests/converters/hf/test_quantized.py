"""Block-wise FP8 is read dequantised; every other quantisation is refused by name."""

from __future__ import annotations

import json
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
import xxhash
from torch import Tensor

from mcore_qwen3vl.config import ExpertLayout
from mcore_qwen3vl.converters.convert import (
    hf_to_hf,
    hf_to_mcore,
    mcore_to_hf,
    plan_hf_to_mcore,
)
from mcore_qwen3vl.converters.describe import inspect_path
from mcore_qwen3vl.converters.hf.hf_checkpoint import HuggingFaceCheckpoint
from mcore_qwen3vl.errors import BadInput
from mcore_qwen3vl.layout import Layout
from mcore_qwen3vl.tiny import write_tiny_checkpoint
from mcore_qwen3vl.verification.checkpoints import check_manifest, roundtrip
from tests.converters.checkpoints import copy, edit_config, load, one_by_one, save, turned

Tensors = dict[str, Tensor]
Tiny = Callable[[str], Path]
FP8 = torch.float8_e4m3fn
CONFIG = {
    "activation_scheme": "dynamic",
    "fmt": "e4m3",
    "modules_to_not_convert": ["lm_head", "model.visual", "model.language_model.embed_tokens"],
    "quant_method": "fp8",
    "weight_block_size": [128, 128],
}
# No dimension of a matrix is a multiple of 128, and most are longer than one block.
LARGE: dict[str, Any] = {
    "text": {
        "hidden_size": 152,
        "intermediate_size": 328,
        "moe_intermediate_size": 140,
        "num_hidden_layers": 2,
        "num_experts": 3,
        "num_experts_per_tok": 2,
    },
    "vision": {"depth": 4},
}
LAYER = "model.language_model.layers.1."
QUERY = LAYER + "self_attn.q_proj.weight"
EXPERTS = LAYER + "mlp.experts.gate_up_proj"


def is_quantized(name: str) -> bool:
    ends = ("_proj", "experts", "in_proj_qkv", "in_proj_z")
    return ".layers." in name and name.split(".")[-2].endswith(ends)


def quantize(tensors: Tensors) -> tuple[Tensors, Tensors]:
    """Quantise like published checkpoints: each block's factor makes its largest value 448.

    Returns:
        The tensors of the FP8 checkpoint, and their values in float32. They are computed block by
        block, to have nothing in common with the code under test.
    """
    stored: Tensors = {}
    meant: Tensors = {}
    for name, tensor in tensors.items():
        stored[name] = meant[name] = tensor
        if not is_quantized(name):
            continue
        matrices = tensor.float().reshape(-1, *tensor.shape[-2:])
        _, rows, columns = matrices.shape
        codes = torch.zeros(matrices.shape, dtype=FP8)
        values = torch.zeros(matrices.shape)
        grid = torch.zeros(len(matrices), (rows + 127) // 128, (columns + 127) // 128).bfloat16()
        for m, matrix in enumerate(matrices):
            for r in range(grid.shape[1]):
                for c in range(grid.shape[2]):
                    at = m, slice(128 * r, 128 * r + 128), slice(128 * c, 128 * c + 128)
                    grid[m, r, c] = matrix[at[1:]].abs().max() / 448
                    codes[at] = (matrix[at[1:]] / grid[m, r, c].float()).to(FP8)
                    values[at] = codes[at].float() * grid[m, r, c].float()
        stored[name] = codes.reshape(tensor.shape)
        stored[f"{name}_scale_inv"] = grid.reshape(*tensor.shape[:-2], *grid.shape[-2:])
        meant[name] = values.reshape(tensor.shape)
    return stored, meant


def fused(tensors: Tensors, layout: ExpertLayout) -> Tensors:
    """Invert `one_by_one`, and lay the experts out so."""
    whole = {name: tensor for name, tensor in tensors.items() if ".mlp.experts." not in name}
    for layer in range(LARGE["text"]["num_hidden_layers"]):
        prefix = f"model.language_model.layers.{layer}.mlp.experts."
        for kind, parts in {
            "gate_up_proj": ("gate_proj", "up_proj"),
            "down_proj": ("down_proj",),
        }.items():
            whole[prefix + kind] = torch.stack(
                [
                    torch.cat([tensors[f"{prefix}{expert}.{part}.weight"] for part in parts])
                    for expert in range(LARGE["text"]["num_experts"])
                ]
            )
    return turned(whole) if layout == "published" else whole


def write(path: Path, kind: str) -> Tensors:
    """Write an FP8 checkpoint in `path`, and return its dequantised tensors."""
    layout: ExpertLayout = "v5" if "v5" in kind else "published"
    write_tiny_checkpoint(path, moe="moe" in kind, layout=layout, dtype="bfloat16", **LARGE)
    tensors = load(path)
    if "split" in kind:
        tensors = one_by_one(turned(tensors) if layout == "published" else tensors)
    stored, meant = quantize(tensors)
    save(stored, path)
    edit_config(path, quantization_config=CONFIG)
    return fused(meant, layout) if "split" in kind else meant


@pytest.fixture(scope="module")
def sources(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], tuple[Path, Tensors]]:
    """Return a function that gives the FP8 checkpoint of a kind, read-only, and its values."""
    made: dict[str, tuple[Path, Tensors]] = {}

    def get(kind: str) -> tuple[Path, Tensors]:
        if kind not in made:
            path = tmp_path_factory.mktemp("fp8") / kind
            made[kind] = path, write(path, kind)
        return made[kind]

    return get


Sources = Callable[[str], tuple[Path, Tensors]]


def assert_equal(path: Path, expected: Tensors, dtype: torch.dtype) -> None:
    found = load(path)
    assert set(found) == set(expected)
    for name, tensor in expected.items():
        assert found[name].dtype == dtype, name
        assert torch.equal(found[name], tensor.to(dtype)), name


@pytest.mark.parametrize("kind", ["dense", "moe", "moe-v5", "moe-split", "moe-v5-split"])
def test_fp8_is_imported_as_what_it_means(sources: Sources, tmp_path: Path, kind: str) -> None:
    source, meant = sources(kind)
    summary = hf_to_mcore(source, tmp_path / "mcore")
    mcore_to_hf(tmp_path / "mcore", tmp_path / "back")
    assert_equal(tmp_path / "back", meant, torch.bfloat16)
    count = sum(map(is_quantized, meant))
    assert count == 2 * (6 if "moe" in kind else 7)
    assert summary.notes == (f"{count} tensors are FP8 and are written dequantised, as bfloat16.",)
    mcore_to_hf(tmp_path / "mcore", tmp_path / "named", hf_config=source)
    original = json.loads((source / "config.json").read_text())
    del original["quantization_config"]
    for target in ("back", "named"):
        assert json.loads((tmp_path / target / "config.json").read_text()) == original
    assert check_manifest(tmp_path / "mcore").ok


@pytest.mark.parametrize("apart", [False, True])
def test_fp8_of_qwen3_5_is_imported_as_what_it_means(tmp_path: Path, apart: bool) -> None:
    """Parts of a tensor begin inside blocks; experts of the MTP layer are quantised too."""
    text = LARGE["text"] | {"num_hidden_layers": 4, "shared_expert_intermediate_size": 150}
    source = tmp_path / "hf"
    write_tiny_checkpoint(source, family="qwen3.5", moe=True, dtype="bfloat16", text=text)
    tensors = load(source)
    stored, meant = quantize(one_by_one(tensors) if apart else tensors)
    save(stored, source)
    edit_config(source, quantization_config=CONFIG)
    hf_to_mcore(source, tmp_path / "mcore")
    assert check_manifest(tmp_path / "mcore").ok
    mcore_to_hf(tmp_path / "mcore", tmp_path / "back")
    found = load(tmp_path / "back")
    assert set(found) == set(meant)
    assert any(name.startswith("mtp.") and is_quantized(name) for name in meant)
    for name, tensor in meant.items():
        assert torch.equal(found[name], tensor.to(tensors.get(name, found[name]).dtype)), name
        in_float32 = name.endswith(("A_log", "linear_attn.norm.weight"))
        assert found[name].dtype == (torch.float32 if in_float32 else torch.bfloat16), name


RENAMED = {
    "base": lambda name: name.removeprefix("model."),
    "old": lambda name: name.replace("model.language_model.", "model.").replace(
        "model.visual.", "visual."
    ),
    "current": lambda name: name,
}


@pytest.mark.parametrize("names", RENAMED)
@pytest.mark.parametrize("kind", ["dense", "moe-split"])
@pytest.mark.parametrize("headless", [False, True])
def test_fp8_under_other_names(
    sources: Sources, tmp_path: Path, names: str, kind: str, headless: bool
) -> None:
    original, meant = sources(kind)
    source = copy(original, tmp_path / "hf")

    def renamed(tensors: Tensors) -> Tensors:
        return {
            RENAMED[names](name): tensor
            for name, tensor in tensors.items()
            if not (headless and name == "lm_head.weight")
        }

    save(renamed(load(original)), source)
    summary = hf_to_mcore(source, tmp_path / "mcore")
    mcore_to_hf(tmp_path / "mcore", tmp_path / "back")
    assert_equal(tmp_path / "back", renamed(meant), torch.bfloat16)
    hf_to_hf(source, tmp_path / "copy")
    assert_equal(tmp_path / "copy", renamed(meant), torch.bfloat16)
    assert len(summary.notes) == 1 + headless + (names != "current")


def test_fp8_to_float32_is_not_rounded(sources: Sources, tmp_path: Path) -> None:
    source, meant = sources("moe")
    hf_to_mcore(source, tmp_path / "mcore", dtype="fp32")
    mcore_to_hf(tmp_path / "mcore", tmp_path / "back")
    assert_equal(tmp_path / "back", meant, torch.float32)


def test_the_manifest_states_it(sources: Sources, tmp_path: Path) -> None:
    source, meant = sources("moe")
    hf_to_mcore(source, tmp_path / "mcore")
    manifest = json.loads((tmp_path / "mcore" / "manifest.json").read_text())
    stored = load(source)
    assert manifest["quantization"] == CONFIG

    def checksum(tensor: Tensor) -> str:
        return xxhash.xxh3_128(tensor.view(torch.uint8).numpy().tobytes()).hexdigest()

    for name in (QUERY, EXPERTS):
        pieces = (lambda t: list(map(checksum, t))) if name == EXPERTS else checksum
        factors = stored[f"{name}_scale_inv"]
        assert manifest["tensors"][name] == {
            "shape": list(meant[name].shape),
            "dtype": "bfloat16",
            "source_dtype": "float8_e4m3fn",
            "source_scale": {
                "name": f"{name}_scale_inv",
                "shape": list(factors.shape),
                "dtype": "bfloat16",
                "xxh3_128": checksum(factors),
            },
            "xxh3_128": pieces(meant[name].bfloat16()),
            "source_xxh3_128": pieces(stored[name]),
        }


@pytest.mark.parametrize("kind", ["moe", "moe-split"])
def test_other_commands_understand_it(sources: Sources, tmp_path: Path, kind: str) -> None:
    source, _ = sources(kind)
    report = roundtrip(source, tmp_path, lambda title: nullcontext(lambda *_: None))
    assert report.ok, report.failures
    inspection = inspect_path(source)
    assert inspection.dtypes == ("bfloat16", "float8_e4m3fn")
    assert inspection.nbytes == sum(t.nbytes for t in load(source).values())
    legacy = {"format": "torch", "layout": Layout(tp=2), "spec": "torch"}
    hf_to_mcore(source, tmp_path / "legacy", dtype="fp32", **legacy)
    assert check_manifest(tmp_path / "legacy").ok


@pytest.mark.parametrize("kind", ["moe", "moe-split", "moe-v5-split"])
def test_any_box_can_be_read(sources: Sources, kind: str) -> None:
    source, meant = sources(kind)
    checkpoint = HuggingFaceCheckpoint(source)
    boxes: list[tuple[str, tuple[int | slice, ...]]] = [
        (QUERY, ()),
        (QUERY, (slice(3),)),
        (QUERY, (slice(120, 192), slice(127, 129))),
        (QUERY, (slice(128, 129), slice(0, 152))),
        (EXPERTS, ()),
        (EXPERTS, (2,)),
        (EXPERTS, (1, slice(140, 152), slice(130, 280))),
        (EXPERTS, (1, slice(130, 150), slice(0, 70))),
        (EXPERTS, (0, slice(3), slice(139, 141))),
        (EXPERTS, (slice(1, 3), slice(0, 130))),
        (LAYER + "mlp.gate.weight", (slice(1, 2),)),
    ]
    for name, box in boxes:
        found = checkpoint.read_tensor(name, box, torch.float32)
        assert torch.equal(found, meant[name][box].float()), (name, box)


Damage = Callable[[Path], object]


def config(**changes: Any) -> Damage:
    return lambda path: edit_config(path, quantization_config={**CONFIG, **changes})


def tensors(change: Callable[[Tensors], object]) -> Damage:
    def damage(path: Path) -> None:
        found = load(path)
        change(found)
        save(found, path)

    return damage


def replace(name: str, value: Tensor) -> Damage:
    return tensors(lambda t: t.update({name: value}))


DAMAGES: dict[str, tuple[Damage, str]] = {
    "compressed-tensors": (config(quant_method="compressed-tensors"), "'compressed-tensors'"),
    "no method": (config(quant_method=None), "quant_method None"),
    "other blocks": (config(weight_block_size=[64, 128]), r"weight_block_size \[64, 128\]"),
    "no blocks": (config(weight_block_size=None), "weight_block_size None"),
    "static activations": (config(activation_scheme="static"), "activation_scheme 'static'"),
    "e5m2": (config(fmt="e5m2"), "fmt 'e5m2'"),
    "powers of two": (config(scale_fmt="ue8m0"), "scale_fmt 'ue8m0'"),
    "modules to skip": (config(ignored_layers="lm_head"), "ignored_layers .* is not a list"),
    "not an object": (
        lambda p: edit_config(p, quantization_config=[1]),
        "one that is not an object",
    ),
    "in the text config": (
        lambda p: edit_config(p, text_config__quantization_config={"quant_method": "hqq"}),
        "several quantization_config",
    ),
    "not declared": (
        lambda p: edit_config(p, quantization_config=None),
        "is float8_e4m3fn, but config.json has no quantization_config",
    ),
    "declared as not quantised": (
        config(modules_to_not_convert=[QUERY.removesuffix(".weight")]),
        r"says that \S+q_proj is not quantised, but tensor \S+q_proj.weight is float8",
    ),
    "no factors": (
        tensors(lambda t: t.pop(f"{QUERY}_scale_inv")),
        r"tensor \S+q_proj.weight is float8_e4m3fn, but there is no \S+q_proj.weight_scale_inv",
    ),
    "factors of nothing": (
        replace(f"{QUERY}_scale_inv_scale_inv", torch.ones(2, 2)),
        "_scale_inv_scale_inv .* belongs to a quantised checkpoint",
    ),
    "a factor a tensor": (
        replace(f"{QUERY}_scale_inv", torch.ones(1)),
        r"_scale_inv has shape \[1\] \(float32\); \S+ \[192, 152\] .* has \[2, 2\] factors",
    ),
    "one grid for all experts": (
        replace(f"{EXPERTS}_scale_inv", torch.ones(2, 3)),
        r"_scale_inv has shape \[2, 3\] .* has \[3, 2, 3\] factors",
    ),
    "factors in FP8": (
        replace(f"{QUERY}_scale_inv", torch.ones(2, 2).to(FP8)),
        r"weight_scale_inv has shape \[2, 2\] \(float8_e4m3fn\)|there is no \S+_scale_inv_scale",
    ),
    "weight_scale": (
        replace(LAYER + "mlp.gate.weight_scale", torch.ones(1)),
        r"mlp.gate.weight_scale \[1\] \(float32\) belongs to a quantised checkpoint",
    ),
    "input_scale": (
        replace(LAYER + "self_attn.q_proj.input_scale", torch.ones(())),
        "q_proj.input_scale .* belongs to a quantised checkpoint",
    ),
    "FP8 norm": (
        replace(LAYER + "input_layernorm.weight", torch.ones(152).to(FP8)),
        "input_layernorm.weight is float8_e4m3fn, but there is no",
    ),
    "FP8 of the other kind": (
        replace(QUERY, torch.ones(192, 152).to(torch.float8_e5m2)),
        r"q_proj.weight .* dtype F8_E5M2",
    ),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_anything_else_is_refused_by_name(sources: Sources, tmp_path: Path, damage: str) -> None:
    change, message = DAMAGES[damage]
    source = copy(sources("moe")[0], tmp_path / "source")
    change(source)
    with pytest.raises(BadInput, match=message):
        plan_hf_to_mcore(source)


def test_a_factor_that_is_not_finite_is_refused(sources: Sources, tmp_path: Path) -> None:
    source = copy(sources("moe")[0], tmp_path / "source")
    factors = load(source)[f"{EXPERTS}_scale_inv"]
    factors[2, 1, 0] = torch.inf
    replace(f"{EXPERTS}_scale_inv", factors)(source)
    with pytest.raises(BadInput, match=r"gate_up_proj_scale_inv holds a factor .* not finite"):
        hf_to_mcore(source, tmp_path / "mcore")
    assert not (tmp_path / "mcore").exists()


def test_experts_one_by_one_in_the_manifest(sources: Sources, tmp_path: Path) -> None:
    source, _ = sources("moe-split")
    hf_to_mcore(source, tmp_path / "mcore")
    stated = json.loads((tmp_path / "mcore" / "manifest.json").read_text())["tensors"][EXPERTS]
    names = [f"{EXPERTS.removesuffix('gate_up_proj')}{{expert}}.{p}_proj" for p in ("gate", "up")]
    assert stated["source_tensors"] == [f"{name}.weight" for name in names]
    scales = [f"{name}.weight_scale_inv".format(expert=e) for e in range(3) for name in names]
    assert [factors["name"] for factors in stated["source_scales"]] == scales


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda t, name: t.pop(name), r"one by one, but \S+experts.2.up_proj.weight is missing"),
        (lambda t, name: t.update({name: torch.ones(140, 151)}), "is not like the same matrix"),
        (lambda t, name: t.update({name: torch.ones(140, 152)}), "is not like the same matrix"),
        (
            lambda t, name: t.update({name.replace(".2.", ".999999."): torch.ones(1)}),
            r"one by one and has 4 of them, but lacks number 3",
        ),
        (
            lambda t, name: t.update({name.replace(".2.", ".02."): torch.ones(140, 152)}),
            r"experts.02.up_proj.weight \[140, 152\], which is no part of the model",
        ),
        (lambda t, name: t.update({EXPERTS: torch.ones(1)}), "both one by one and fused"),
    ],
    ids=["missing", "shape", "dtype", "number", "leading zero", "fused too"],
)
def test_incomplete_experts_are_refused(
    sources: Sources, tmp_path: Path, change: Callable[[Tensors, str], object], message: str
) -> None:
    source = copy(sources("moe-split")[0], tmp_path / "source")
    name = f"{LAYER}mlp.experts.2.up_proj.weight"

    def damage(found: Tensors) -> None:
        change(found, name)
        if name not in found or found[name].dtype != FP8:
            del found[f"{name}_scale_inv"]

    tensors(damage)(source)
    with pytest.raises(BadInput, match=message):
        plan_hf_to_mcore(source)


def test_names_of_a_plain_checkpoint_are_not_mistaken(tiny: Tiny) -> None:
    for case in ("dense", "moe"):
        assert HuggingFaceCheckpoint(tiny(case)).quantization is None
