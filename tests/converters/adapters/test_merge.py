"""Merging, offline and in a running model, is PEFT's result within float32's rounding."""

from __future__ import annotations

import copy
import shutil
import warnings
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file, save_file
from torch import Tensor

from mcore_qwen3vl.config import Architecture
from mcore_qwen3vl.converters.adapters import adapter as update
from mcore_qwen3vl.converters.adapters.adapter import (
    Factors,
    add_update,
    convert_adapter,
    read_adapter,
)
from mcore_qwen3vl.converters.adapters.config import AdapterConfig, resolve_targets
from mcore_qwen3vl.converters.adapters.merge import merge
from mcore_qwen3vl.converters.export import export_merged, save_adapter, save_hf
from mcore_qwen3vl.converters.live import initialize_factors, load_hf
from mcore_qwen3vl.errors import BadInput
from mcore_qwen3vl.layout import Layout
from mcore_qwen3vl.model.lora import adapt, attach
from mcore_qwen3vl.model.qwen3vl import build_chunks
from mcore_qwen3vl.runtime.launch import initialize, run_layout
from mcore_qwen3vl.tiny import write_tiny_checkpoint
from mcore_qwen3vl.verification.measurement import measure
from mcore_qwen3vl.verification.parity.case import ADAPTERS, write_random_adapter
from mcore_qwen3vl.verification.parity.comparison import TOLERANCE
from tests.converters.adapters import peft_made
from tests.converters.adapters.conftest import Made
from tests.converters.adapters.peft_made import (
    EXPERTS,
    KINDS,
    Kind,
    base_model,
    fill,
    logits,
    make,
)
from tests.converters.adapters.rounding import assert_merged, is_merged, update_range
from tests.converters.checkpoints import load, turned
from tests.turns import slow, slow_except

PARTED = ("lm_head of tied", "untied apart")
"""Kinds whose adapter changes one of two tied embeddings."""


def peft_merged(made: Made) -> dict[str, Tensor]:
    """Return what ``merge_and_unload`` makes, by HF name, in the layout of transformers 5."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return copy.deepcopy(made.model).merge_and_unload().state_dict()


def in_v5(path: Path) -> dict[str, Tensor]:
    """Load the tensors of a checkpoint, with experts in the layout of transformers 5."""
    published = Architecture.from_hf(path).expert_layout == "published"
    return turned(load(path)) if published else load(path)


@pytest.mark.parametrize("kind", slow_except([*KINDS], *[*KINDS][::2]))
def test_equals_peft(
    kind: str, made: Callable[[str], Made], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Tensors equal PEFT's bit for bit, except sums: both are within float32's rounding."""
    monkeypatch.setattr(update, "CHUNK_VALUES", 100)
    source, target = made(kind), tmp_path / "merged"
    result = merge(source.base, source.folder, target, max_shard_size="300KB")
    assert result.files > 1
    hybrid = Architecture.from_hf(source.base).delta_net is not None
    assert result.expert_layout in (None, "v5" if hybrid else "published")
    found, wanted, before = in_v5(target), peft_merged(source), in_v5(source.base)
    for name in [name for name in found if name.startswith("mtp.")]:  # no tensor of PEFT's model
        assert torch.equal(found.pop(name), before.pop(name))
    adapter = read_adapter(source.folder, source.base)
    architecture = Architecture.from_hf(target)
    if architecture.tie_word_embeddings:
        assert torch.equal(
            wanted.pop("lm_head.weight"), found["model.language_model.embed_tokens.weight"]
        )
    if kind == "lm_head of tied":  # PEFT adds the head's update to the embedding too
        name = "model.language_model.embed_tokens.weight"
        before["lm_head.weight"] = before[name]
        assert torch.equal(found.pop(name), before[name])
        assert not torch.equal(wanted.pop(name), before[name])
    assert set(found) == set(wanted)
    for tensors in (found, wanted):
        assert_merged(tensors, before, adapter)
    architectures = [Architecture.from_hf(path) for path in (source.base, target)]
    assert architectures[1].tie_word_embeddings == (
        architectures[0].tie_word_embeddings and kind not in PARTED
    )


@pytest.mark.parametrize("kind", ["swapped roles", "rslora", *PARTED])
def test_computes_what_the_adapted_model_does(
    kind: str, made: Callable[[str], Made], tmp_path: Path
) -> None:
    source = made(kind)
    merge(source.base, source.folder, tmp_path / "merged")
    architecture = Architecture.from_hf(source.base)
    merged, plain = base_model(tmp_path / "merged"), base_model(source.base)
    found, wanted, without = (logits(m, architecture) for m in (merged, source.model, plain))
    assert measure(found, wanted).relative <= TOLERANCE
    assert (without - wanted).abs().max() > 1e-3


def test_bf16_is_rounded_once(tiny: Callable[[str], Path], tmp_path: Path) -> None:
    """Linear layers equal PEFT's; for parameters, PEFT rounds the update before it adds it."""
    base, folder = tiny("bf16-sharded"), tmp_path / "adapter"
    kind = Kind("", {"target_modules": ["q_proj"], "target_parameters": EXPERTS})
    model = make(kind, base, folder, dtype=torch.bfloat16)
    merge(base, folder, tmp_path / "merged")
    found, before = in_v5(tmp_path / "merged"), in_v5(base)
    wanted = peft_merged(Made(base, folder, model))
    adapted = read_adapter(folder, base).factors
    assert len(adapted) == 12
    for name, factors in adapted.items():
        assert is_merged(found[name], before[name], factors)
        if found[name].ndim == 2:
            assert is_merged(wanted[name], before[name], factors)
            continue
        low, high = (before[name] + end.bfloat16() for end in update_range(factors))
        assert ((low <= wanted[name]) & (wanted[name] <= high)).all()
        assert not is_merged(wanted[name], before[name], factors)


ROWS, COLUMNS, R, COUNT = 24, 24, 4, 3


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("experts", [1, COUNT])
def test_a_wrong_update_is_told_from_rounding(experts: int, dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(5)

    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator)

    right = Factors(draw(R * experts, COLUMNS), draw(ROWS, R * experts), R, 1.5)
    weight = draw(*(experts, ROWS, COLUMNS)[experts == 1 :]).to(dtype)
    last = right.b.clone()
    last[-1] = 0
    wrong = {
        "scaling": replace(right, scaling=1.5 * (1 + (1e-5 if dtype == torch.float32 else 0.01))),
        "A and B swapped": replace(right, a=right.b.T.contiguous(), b=right.a.T.contiguous()),
        "a row without it": replace(right, b=last),
        "factors rounded": replace(right, a=right.a.bfloat16(), b=right.b.bfloat16()),
        "a term missing": replace(right, a=right.a * (torch.arange(len(right.a)) % R > 0)[:, None]),
    }
    if experts > 1:
        wrong["experts in the other order"] = replace(right, b=right.b.roll(1, 1))
    for what, factors in ("nothing", right), *wrong.items():
        merged = weight.clone()
        add_update(merged, factors, "", swapped=False)
        assert is_merged(merged, weight, right) == (what == "nothing"), what


BUCKET = 20_000
"""Bytes of a bucket: some buckets hold several tensors, and some tensors are larger than one."""


def merged_of(layout: Layout, dtype: torch.dtype, hf: Path, adapter: Path, out: Path) -> dict:
    """Return this rank's merged weights; write the base and the adapter to `out`."""
    initialize(layout)
    chunks = build_chunks(Architecture.from_hf(hf), layout, params_dtype=dtype)
    load_hf(chunks, hf)
    save_hf(chunks, out / "base", hf_config=hf)
    read = read_adapter(adapter, hf)
    adapt(chunks, read)
    save_adapter(chunks, out / "adapter", config=read.config, hf_config=hf)
    before = [p.detach().clone() for chunk in chunks for p in chunk.parameters()]
    merged = {
        name: tensor.clone()
        for name, tensor in export_merged(
            chunks,
            resolve_targets(read.config, hf),
            expert_layout="published",
            bucket_bytes=BUCKET,
        )
    }
    after = [p for chunk in chunks for p in chunk.parameters()]
    assert all(torch.equal(a, b) for a, b in zip(after, before, strict=True))
    return merged


@pytest.mark.parametrize(
    ("name", "moe", "layout", "dtype"),
    [
        ("router", True, "ep2xdp2", torch.bfloat16),
        *slow(
            ("everything", False, "tp2", torch.float32),
            ("router", True, "tp2xep2xetp2xdp2+sp", torch.bfloat16),
            ("everything", False, "tp2xpp2", torch.float32),
        ),
    ],
)
def test_equals_the_offline_merge(
    name: str, moe: bool, layout: str, dtype: torch.dtype, tmp_path: Path
) -> None:
    hf = write_tiny_checkpoint(tmp_path / "hf", moe=moe, seed=3)
    adapter = write_random_adapter(tmp_path / "random", ADAPTERS[name], hf)
    parsed = Layout.parse(layout)
    found: dict[str, Tensor]
    found, *others = run_layout(merged_of, parsed.world_size, parsed, dtype, hf, adapter, tmp_path)
    merge(tmp_path / "base", tmp_path / "adapter", tmp_path / "merged")
    wanted, base = load(tmp_path / "merged"), turned(load(tmp_path / "base"))
    read = read_adapter(tmp_path / "adapter", tmp_path / "base")
    assert found.keys() == wanted.keys()
    for tensors in (wanted, found, *others):
        assert_merged(turned(tensors), base, read)


def tied_head(hf: Path) -> None:
    initialize(Layout())
    config = AdapterConfig(r=2, lora_alpha=2, target_modules=("lm_head",))
    chunks = build_chunks(Architecture.from_hf(hf), Layout())
    next(export_merged(chunks, resolve_targets(config, hf)))


def test_the_head_of_tied_embeddings_is_refused(tmp_path: Path) -> None:
    hf = write_tiny_checkpoint(tmp_path / "hf", tie=True)
    with pytest.raises(BadInput, match="one merged weight cannot serve as both"):
        run_layout(tied_head, 1, hf)


CONFIG = ADAPTERS["experts"]


def start(layout: Layout, hf: Path, targets: Any, folder: Path) -> None:
    initialize(layout)
    chunks = build_chunks(Architecture.from_hf(hf), layout)
    for chunk in chunks:
        attach(chunk, targets)
    initialize_factors(chunks, seed=7)
    save_adapter(chunks, folder / str(layout), config=CONFIG, hf_config=hf)


@pytest.fixture(scope="module")
def started(moe: Path, tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, torch.Tensor]]:
    folder, targets = tmp_path_factory.mktemp("start"), resolve_targets(CONFIG, moe)
    for layout in (Layout(), Layout(tp=2, etp=2, sp=True)):
        run_layout(start, layout.world_size, layout, moe, targets, folder)
    return [load_file(f / "adapter_model.safetensors") for f in sorted(folder.iterdir())]


def test_every_layout_starts_from_the_same_values(started: list[dict[str, torch.Tensor]]) -> None:
    single, cut = started
    assert single.keys() == cut.keys()
    assert all(torch.equal(single[key], cut[key]) for key in single)


def test_a_is_uniform_and_b_zero(started: list[dict[str, torch.Tensor]]) -> None:
    for key, factor in started[0].items():
        if "lora_B" in key:
            assert not factor.any(), key
            continue
        bound = factor.shape[1] ** -0.5
        assert factor.abs().max() <= bound
        assert factor.abs().max() > 0.9 * bound
        assert factor.std() == pytest.approx(bound / 3**0.5, rel=0.15)


@pytest.mark.parametrize(("case", "left_out"), [("dense", ""), ("dense-tied", ""),
                                                ("dense-tied", "lm_head"),
                                                ("dense-tied", "embed_tokens")])  # fmt: skip
def test_embeddings_that_peft_saves_beside_the_factors(
    case: str, left_out: str, tiny: Callable[[str], Path], tmp_path: Path
) -> None:
    """`save_embedding_layers` stores them without a word in the config; PEFT loads them."""
    base, folder = tiny(case), tmp_path / "adapter"
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = get_peft_model(base_model(base), LoraConfig(r=4, target_modules=["v_proj"]))
        fill(model)
        with torch.no_grad():
            model.get_input_embeddings().weight.add_(1)
        model.save_pretrained(folder, save_embedding_layers=True)
    file = folder / "adapter_model.safetensors"
    tensors = load_file(file)
    kept = {key: t for key, t in tensors.items() if not left_out or left_out not in key}
    assert (len(kept) < len(tensors)) == bool(left_out)
    save_file(kept, file, metadata={"format": "pt"})
    reloaded = peft_made.load(base, folder)
    merge(base, folder, tmp_path / "merged")
    found, before = in_v5(tmp_path / "merged"), in_v5(base)
    wanted = peft_merged(Made(base, folder, reloaded))
    if case == "dense-tied":
        wanted.pop("lm_head.weight")
    assert set(found) == set(wanted)
    for tensors in (found, wanted):
        assert_merged(tensors, before, read_adapter(folder, base))
    name = "model.language_model.embed_tokens.weight"
    assert torch.equal(found[name], wanted[name])
    assert torch.equal(found[name], before[name] + 1)
    convert_adapter(folder, tmp_path / "again", base, roles="canonical")
    peft_made.load(base, tmp_path / "again")


def test_what_a_refusal_says_of_peft(made: Callable[[str], Made], tmp_path: Path) -> None:
    source, folder = made("vision"), tmp_path / "adapter"
    shutil.copytree(source.folder, folder)
    file = folder / "adapter_model.safetensors"
    tensors = load_file(file)
    lost = next(key for key in tensors if key.endswith("lora_B.weight"))
    save_file({k: t for k, t in tensors.items() if k != lost}, file, metadata={"format": "pt"})
    with pytest.raises(BadInput, match=r"PEFT warns of them, and leaves them at their initial"):
        read_adapter(folder, source.base)
    with pytest.warns(UserWarning, match="Found missing adapter keys"):
        model = PeftModel.from_pretrained(base_model(source.base), folder)
    name = lost.replace("lora_B.weight", "lora_B.default.weight")
    assert not model.get_parameter(name).any()
