"""Merging gives PEFT's result within float32's rounding, where PEFT's is the adapted model."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor

from mcore_qwen3vl.config import Architecture
from mcore_qwen3vl.converters.adapters import adapter as update
from mcore_qwen3vl.converters.adapters.adapter import read_adapter
from mcore_qwen3vl.converters.adapters.merge import merge
from mcore_qwen3vl.verify.measurement import measure
from mcore_qwen3vl.verify.parity.comparison import TOLERANCE
from tests.converters.adapters.conftest import Made
from tests.converters.adapters.peft_made import EXPERTS, KINDS, Kind, base_model, logits, make
from tests.converters.adapters.rounding import assert_merged, is_merged, update_range
from tests.converters.checkpoints import load, turned
from tests.turns import slow_except

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
