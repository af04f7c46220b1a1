"""Checkpoints with the keys of Megatron-Core's ``HybridModel`` are read and written bitwise.

The installed ``HybridModel`` is asked for its keys, saves and loads: as the prototype of
``docs/hybrid.md`` (:mod:`tests.model.hybrid.hybrid_model`) builds it, with a vision tower.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from megatron.core import dist_checkpointing

from mcore_qwen3vl.config import Architecture
from mcore_qwen3vl.converters import torch_dist, torch_pickle
from mcore_qwen3vl.converters.convert import hf_to_mcore, mcore_to_hf
from mcore_qwen3vl.converters.describe import inspect_path
from mcore_qwen3vl.converters.live import load_checkpoint
from mcore_qwen3vl.converters.mapping import dialects
from mcore_qwen3vl.converters.mapping.dialects import HYBRID, MEGATRON_BRIDGE
from mcore_qwen3vl.converters.megatron_checkpoint import CheckpointIndex
from mcore_qwen3vl.converters.torch_dist import TorchDistCheckpoint
from mcore_qwen3vl.errors import BadInput
from mcore_qwen3vl.layout import Layout
from mcore_qwen3vl.runtime.launch import initialize, run_layout
from mcore_qwen3vl.training.checkpoints.other_maker import checkpoint_of_other_maker
from mcore_qwen3vl.verification.audit import audit
from mcore_qwen3vl.verification.checkpoints import check_manifest, compare_checkpoints
from tests.converters.checkpoints import assert_same_files, assert_same_tensors, copy
from tests.converters.peers.test_load import arguments, first_step, job_of
from tests.converters.ranks import build_empty, check_chunks
from tests.converters.test_load_into_model import Tiny, load_strictly, stored
from tests.model.hybrid.hybrid_model import HybridQwen3VL
from tests.turns import slow_except

Converted = Callable[[str], Path]


@pytest.fixture(scope="session")
def converted(converted: Callable[..., Path]) -> Converted:
    return partial(converted, dialect="hybrid")


def rewritten(source: Path, target: Path, *changes: Callable[[CheckpointIndex], None]) -> Path:
    """Copy a converted checkpoint without its config and manifest, and change its index."""
    folder = copy(source / "release", target / "release")
    (target / "latest_checkpointed_iteration.txt").write_text("release")
    index = torch_dist.read_metadata(folder)
    for change in changes:
        change(index)
    (folder / torch_pickle.METADATA).write_bytes(torch_dist.dumps_metadata(index))
    return target


def renamed(
    pattern: str, by: str | Callable[[re.Match[str]], str]
) -> Callable[[CheckpointIndex], None]:
    def change(index: CheckpointIndex) -> None:
        index.tensors = {re.sub(pattern, by, key): t for key, t in index.tensors.items()}

    return change


def without(pattern: str) -> Callable[[CheckpointIndex], None]:
    def change(index: CheckpointIndex) -> None:
        left = {key: t for key, t in index.tensors.items() if not re.match(pattern, key)}
        index.tensors = left

    return change


def on_one_rank(source: Path) -> Any:
    initialize(Layout())
    return stored(build_empty(Layout(), Architecture.from_hf(source), kind=HybridQwen3VL))


@pytest.mark.parametrize("case", ["dense", "dense-tied", "moe", "mixed-listed"])
def test_keys_shapes_and_dtypes_are_the_hybrid_models(
    tiny: Tiny, converted: Converted, case: str
) -> None:
    [(shapes, objects)] = run_layout(on_one_rank, 1, tiny(case))
    index = torch_dist.read_metadata(converted(case) / "release")
    assert {key: (t.shape, t.dtype) for key, t in index.tensors.items()} == shapes
    assert set(index.objects) == objects | {"common_state/shard_0_1"}
    saved = dist_checkpointing.load_common_state_dict(str(converted(case) / "release"))["args"]
    mlps = {"moe": "EEEE", "mixed-listed": "-E-E"}.get(case, "----")
    assert saved.hybrid_layer_pattern == "".join("*" + mlp for mlp in mlps)
    assert saved.num_layers == 8


def through_a_model(layout: Layout, source: Path, checkpoint: Path, out: Path) -> int:
    """Load into a hybrid model as Megatron does, compare every parameter, and save it again."""
    initialize(layout)
    chunks = build_empty(layout, Architecture.from_hf(source), kind=HybridQwen3VL)
    load_strictly(chunks, checkpoint)
    compared = check_chunks(chunks, source)
    state = {f"model{i}": chunk.sharded_state_dict() for i, chunk in enumerate(chunks)}
    dist_checkpointing.save(state, str(out / "iter_0000007"))
    return compared


SAVED = [("dense-tied", "pp2"), ("dense", "tp2"), ("moe", "tp2xep2+sp"), ("mixed-listed", "single")]


@pytest.mark.parametrize(("case", "layout"), slow_except(SAVED, SAVED[0], SAVED[2]))
def test_a_hybrid_model_loads_it_strictly_and_what_it_saves_is_bitwise(
    tiny: Tiny, converted: Converted, tmp_path: Path, case: str, layout: str
) -> None:
    saved, sizes = tmp_path / "saved", Layout.parse(layout)
    (saved / "iter_0000007").mkdir(parents=True)
    ranks = run_layout(through_a_model, sizes.world_size, sizes, tiny(case), converted(case), saved)
    assert min(ranks) > 10
    (saved / "latest_checkpointed_iteration.txt").write_text("7")
    mcore_to_hf(saved, tmp_path / "back", hf_config=tiny(case))
    assert_same_tensors(tiny(case), tmp_path / "back")
    assert inspect_path(saved, hf_config=tiny(case)).maker == HYBRID.maker
    assert compare_checkpoints(saved, tiny(case)).ok


@pytest.mark.parametrize("case", ["dense", "moe-v5", "bf16-sharded", "yarn"])
def test_there_and_back_is_bitwise(
    tiny: Tiny, converted: Converted, tmp_path: Path, case: str
) -> None:
    mcore_to_hf(converted(case), tmp_path / "back")
    assert_same_tensors(tiny(case), tmp_path / "back")
    assert_same_files(tiny(case), tmp_path / "back")
    assert check_manifest(converted(case)).ok
    assert inspect_path(converted(case)).total_parameters > 0
    # Its arguments say that there are twice as many layers.
    assert audit(converted(case), tiny(case)).ok


LOADED = slow_except([("dense", "tp2"), ("moe", "pp2xep2xdp2")], ("dense", "tp2"))


def into_our_model(layout: Layout, source: Path, checkpoint: Path) -> int:
    initialize(layout)
    chunks = build_empty(layout, Architecture.from_hf(source))
    load_checkpoint(chunks, checkpoint)
    return check_chunks(chunks, source)


@pytest.mark.parametrize(("case", "layout"), LOADED)
def test_our_model_loads_it(tiny: Tiny, converted: Converted, case: str, layout: str) -> None:
    sizes = Layout.parse(layout)
    run_layout(into_our_model, sizes.world_size, sizes, tiny(case), converted(case))


def test_a_run_starts_from_it_at_iteration_0(tiny: Tiny, converted: Converted) -> None:
    flags = ("--load", str(converted("dense")))
    found = checkpoint_of_other_maker(arguments(tiny("dense"), *flags).settings.checkpoints)
    assert found is not None
    assert (found.folder, found.maker) == (converted("dense") / "release", HYBRID.maker)


@pytest.mark.slow
def test_a_run_starts_from_it_as_from_our_own_conversion(data: Path, tmp_path: Path) -> None:
    from tests.converters.peers.test_peers import source_of

    peer = "ms-swift-dense"  # any model
    hf_to_mcore(source_of(peer), tmp_path / "own")
    hf_to_mcore(source_of(peer), tmp_path / "hybrid", dialect="hybrid")
    job = job_of(peer, "tp2", data, tmp_path)
    want = first_step(job, tmp_path / "1", "--load", str(tmp_path / "own"))
    assert first_step(job, tmp_path / "2", "--load", str(tmp_path / "hybrid")) == want


def half(match: re.Match[str]) -> str:
    return f"decoder.layers.{int(match[1]) // 2}."


NUMBER = r"decoder\.layers\.(\d+)\."
GROUPS = [renamed(NUMBER, half)]
FORMS: dict[str, list[Callable[[CheckpointIndex], None]]] = {
    "groups as [*-] that keep a number": GROUPS,
    "groups with the keys of a GPT model": [*GROUPS, renamed("final_norm", "final_layernorm")],
    "norms of their own": [
        renamed(r"self_attention\.linear_qkv\.layer_norm_", "input_layernorm."),
        renamed(r"mlp\.linear_fc1\.layer_norm_", "pre_mlp_layernorm."),
    ],
}


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("case", ["dense", "moe"])
def test_other_forms_are_bitwise_too(
    tiny: Tiny, converted: Converted, tmp_path: Path, form: str, case: str
) -> None:
    changed = rewritten(converted(case), tmp_path / "changed", *FORMS[form])
    mcore_to_hf(changed, tmp_path / "back", hf_config=tiny(case))
    assert_same_tensors(tiny(case), tmp_path / "back")


@pytest.mark.parametrize("case", ["dense-tied", "moe", "moe-v5"])
def test_whole_tensors_as_megatrons_tool_stores_them_are_bitwise(
    tiny: Tiny, converted: Converted, tmp_path: Path, case: str
) -> None:
    """``save_dist_checkpoint_full``: all experts of a layer are one chunk, and no objects."""
    index = torch_dist.read_metadata(converted(case) / "release")
    stored = TorchDistCheckpoint(converted(case) / "release")
    folder = tmp_path / "tool" / "iter_0000000"
    folder.mkdir(parents=True)
    state = {key: stored.tensor(key).clone() for key in index.tensors}
    dcp.save(state, storage_writer=dcp.FileSystemWriter(folder), no_dist=True)
    (folder / "metadata.json").write_text('{"sharded_backend": "torch_dist"}')
    (tmp_path / "tool" / "latest_checkpointed_iteration.txt").write_text("0")
    mcore_to_hf(tmp_path / "tool", tmp_path / "back", hf_config=tiny(case))
    assert_same_tensors(tiny(case), tmp_path / "back")


def test_a_language_model_in_megatron_bridge_is_read_too(
    monkeypatch: pytest.MonkeyPatch, tiny: Tiny, tmp_path: Path
) -> None:
    """Its pull request 4837 moves its Qwen3-VL to ``HybridModel``, after the same prefix."""
    written = tuple(replace(d, hybrid_model=d is MEGATRON_BRIDGE) for d in dialects.DIALECTS)
    with monkeypatch.context() as patched:
        patched.setattr(dialects, "DIALECTS", written)
        hf_to_mcore(tiny("dense"), tmp_path / "peer", dialect="megatron-bridge")
    keys = torch_dist.read_metadata(tmp_path / "peer" / "release").tensors
    assert {"language_model.decoder.final_norm.weight", "vision_model.patch_embed.proj.bias"} <= (
        keys.keys()
    )
    mcore_to_hf(tmp_path / "peer", tmp_path / "back")
    assert_same_tensors(tiny("dense"), tmp_path / "back")
    assert inspect_path(tmp_path / "peer").maker == MEGATRON_BRIDGE.maker


def all_attention_first(match: re.Match[str]) -> str:
    layer, mlp = divmod(int(match[1]), 2)
    return f"decoder.layers.{layer + 4 * mlp}."


REFUSED: dict[str, tuple[Callable[[CheckpointIndex], None], str]] = {
    "all attention first": (
        renamed(NUMBER, all_attention_first),
        r"attention in the layers \[0, 1, 2, 3\] and an MLP in \[4, 5, 6, 7\]",
    ),
    "no MLP of the last layer": (
        without(r"decoder\.layers\.7\."),
        r"an MLP in \[1, 3, 5\]\. In this model they take turns",
    ),
    "a layer of Mamba": (
        renamed(r"decoder\.layers\.3\.mlp\.linear_fc2\.weight", "decoder.layers.8.mixer.A_log"),
        r"decoder\.layers\.8\.mixer\.A_log, of a layer that is neither attention nor an MLP",
    ),
    "one norm twice": (
        renamed(r"0\.self_attention\.linear_proj\.weight", "0.input_layernorm.weight"),
        r"one tensor under two keys, .*decoder\.layers\.0\.input_layernorm\.weight",
    ),
}


@pytest.mark.parametrize("what", REFUSED)
def test_another_model_is_refused(
    tiny: Tiny, converted: Converted, tmp_path: Path, what: str
) -> None:
    change, refused = REFUSED[what]
    changed = rewritten(converted("dense"), tmp_path / "changed", change)
    with pytest.raises(BadInput, match=refused) as error:
        mcore_to_hf(changed, tmp_path / "back", hf_config=tiny("dense"))
    assert "\n" not in str(error.value)
    assert not (tmp_path / "back").exists()


def test_qwen3_5_is_refused_both_ways(tiny: Tiny, tmp_path: Path) -> None:
    refused = r"^Qwen3\.5 is neither read nor written in the keys of a HybridModel"
    with pytest.raises(BadInput, match=refused):
        hf_to_mcore(tiny("hybrid"), tmp_path / "out", dialect="hybrid")
    hf_to_mcore(tiny("hybrid"), tmp_path / "mcore")
    changed = rewritten(
        tmp_path / "mcore", tmp_path / "changed", renamed("final_layernorm", "final_norm")
    )
    with pytest.raises(BadInput, match=refused):
        mcore_to_hf(changed, tmp_path / "back", hf_config=tiny("hybrid"))
    assert not (tmp_path / "out").exists()
    hf_to_mcore(tiny("hybrid"), tmp_path / "bridge", dialect="megatron-bridge")
    prefixed = rewritten(
        tmp_path / "bridge", tmp_path / "prefixed", renamed("final_layernorm", "final_norm")
    )
    with pytest.raises(BadInput, match=refused):
        mcore_to_hf(prefixed, tmp_path / "back", hf_config=tiny("hybrid"))


def test_the_legacy_format_is_refused(tiny: Tiny, tmp_path: Path) -> None:
    hf_to_mcore(tiny("dense"), tmp_path / "legacy", format="torch")
    (file,) = tmp_path.rglob("model_optim_rng.pt")
    content = torch.load(file, weights_only=False)
    content["model"]["decoder.final_norm.weight"] = content["model"].pop(
        "decoder.final_layernorm.weight"
    )
    torch.save(content, file)
    with pytest.raises(BadInput, match=r"the keys of a HybridModel .* in which they are not read"):
        mcore_to_hf(tmp_path / "legacy", tmp_path / "out")
