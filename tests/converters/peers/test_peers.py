"""Checkpoints that other projects' own converters wrote (`make_peers`) come back bitwise."""

from __future__ import annotations

import re
from argparse import Namespace
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from megatron.core import dist_checkpointing

from mcore_qwen3vl.converters import torch_dist, torch_pickle
from mcore_qwen3vl.converters.convert import hf_to_mcore, mcore_to_hf
from mcore_qwen3vl.converters.describe import inspect_path
from mcore_qwen3vl.converters.identify import identify
from mcore_qwen3vl.converters.legacy import check_run, saved_arguments
from mcore_qwen3vl.converters.mapping import dialects
from mcore_qwen3vl.converters.mapping.dialects import (
    DeltaNetForm,
    dialect_of,
)
from mcore_qwen3vl.converters.megatron_checkpoint import ChunkedTensor
from mcore_qwen3vl.converters.torch_dist import TorchDistCheckpoint
from mcore_qwen3vl.errors import BadInput
from mcore_qwen3vl.tiny import write_tiny_checkpoint
from mcore_qwen3vl.verification.checkpoints import (
    FILES,
    TENSORS,
    check_manifest,
    compare_checkpoints,
)
from tests.converters.checkpoints import (
    assert_same_files,
    assert_same_tensors,
    copy,
    edit_config,
    load,
    save,
)
from tests.turns import slow

HERE = Path(__file__).parent
MAKERS = {
    "megatron-bridge": "NVIDIA Megatron-Bridge, or VERL with it",
    "ms-swift": "ms-swift (mcore-bridge)",
    "pai-megatron-patch": "Pai-Megatron-Patch",
    "verl": "NVIDIA Megatron-Bridge, or VERL with it",
}
WRITTEN = [
    f"{maker}-{model}" for maker in ("megatron-bridge", "ms-swift") for model in ("dense", "moe")
]
HYBRIDS = ["megatron-bridge-hybrid", "ms-swift-hybrid", "ms-swift-hybrid_moe"]
"""Of Qwen3.5: the source of the dense one is as published, the other is bf16 in every tensor."""
PEERS = [*WRITTEN, "pai-megatron-patch-dense", "pai-megatron-patch-moe"]
ALL = [*PEERS, *HYBRIDS]
FLOAT32 = [
    f"model.visual.{name}"
    for name in ("patch_embed.proj.weight", "patch_embed.proj.bias", "pos_embed.weight")
]
"""What Pai-Megatron-Patch's converter stores in float32."""


def source_of(peer: str) -> Path:
    return HERE / f"hf-{peer.rpartition('-')[2]}"


def as_stored(peer: str, folder: Path) -> Path:
    """Return a copy of the peer's source that is rounded as in the peer's checkpoint."""
    source = copy(source_of(peer), folder / "hf")
    tensors = load(source)
    if peer.startswith("pai-megatron-patch"):
        tensors |= {name: tensors[name].float() for name in FLOAT32}
    for name, tensor in tensors.items():
        if "linear_attn" in name and tensor.dtype == torch.float32:  # everything is bf16 there
            centred = peer.startswith("megatron-bridge") and name.endswith("norm.weight")
            rounded = (tensor - 1).bfloat16().float() + 1 if centred else tensor.bfloat16()
            tensors[name] = rounded
    save(tensors, source)
    return source


@pytest.mark.parametrize("peer", [*ALL, "verl-dense"])
def test_it_is_bitwise_what_the_peer_was_given(tmp_path: Path, peer: str) -> None:
    source, out = source_of(peer), tmp_path / "out"
    mcore_to_hf(HERE / peer, out, hf_config=source)
    assert_same_tensors(as_stored(peer, tmp_path), out)
    assert_same_files(source, out)


def test_float32_of_its_converter_becomes_bf16_again(tmp_path: Path) -> None:
    source, out = HERE / "hf-dense", tmp_path / "out"
    mcore_to_hf(HERE / "pai-megatron-patch-dense", out, hf_config=source, dtype="bf16")
    assert_same_tensors(source, out)


@pytest.mark.parametrize("peer", [*ALL, "verl-dense"])
def test_inspection_names_the_maker(peer: str) -> None:
    maker = MAKERS[peer.rpartition("-")[0]]
    found = inspect_path(HERE / peer, hf_config=source_of(peer))
    assert found.maker == maker
    if peer in ALL:  # VERL's has a config
        with pytest.raises(BadInput, match=rf"^Written by {re.escape(maker)}\. .* --hf-config DIR"):
            inspect_path(HERE / peer)
    assert found.total_parameters == sum(t.numel() for t in load(source_of(peer)).values())


def test_inspection_names_no_maker_of_our_own(tmp_path: Path) -> None:
    hf_to_mcore(HERE / "hf-dense", tmp_path / "mcore")
    assert inspect_path(tmp_path / "mcore").maker is None


IN_ATTENTION = "model.language_model.layers.1.self_attn.k_proj.weight"
IN_VISION = ("blocks.2.attn.qkv.bias", "deepstack_merger_list.1.linear_fc2.weight")
IN_DELTA_NETS = ("in_proj_qkv.weight", "in_proj_a.weight", "conv1d.weight", "norm.weight")


@pytest.mark.parametrize(
    ("peer", "name"),
    [
        *((peer, IN_ATTENTION) for peer in ALL),
        *slow(*((p, f"model.visual.{name}") for p in PEERS for name in IN_VISION)),
        *(
            (peer, f"model.language_model.layers.2.linear_attn.{name}")
            for peer in HYBRIDS
            for name in IN_DELTA_NETS
        ),
    ],
)
def test_an_audit_names_the_tensor_that_differs(tmp_path: Path, peer: str, name: str) -> None:
    source = as_stored(peer, tmp_path)
    assert compare_checkpoints(HERE / peer, source).ok
    assert not any(f.part == FILES for f in compare_checkpoints(HERE / peer, source).findings)
    tensors = load(source)
    tensors[name].view(-1)[3] += 1
    save(tensors, source)
    for sides in ((HERE / peer, source), (source, HERE / peer)):
        result = compare_checkpoints(*sides)
        said = [who for name, who in result.environment.items() if name.endswith("written by")]
        assert said == [MAKERS[peer.rpartition("-")[0]]]
        assert [(f.part, f.name) for f in result.failures] == [(TENSORS, name)]
        assert result.failures[0].measured.different == 1


QKV = "blocks.{}.attn.qkv."


def test_a_trained_norm_is_read_in_float32(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The norms are read as if w - 1 were stored, so that they need more digits than bf16 has."""
    peer, source = HERE / "ms-swift-hybrid_moe", HERE / "hf-hybrid_moe"
    form = DeltaNetForm(centred=True, by_head=True)
    monkeypatch.setattr(dialects, "DIALECTS", (replace(dialects.MS_SWIFT, delta_nets=form),))
    mcore_to_hf(peer, tmp_path / "exact", hf_config=source)
    mcore_to_hf(peer, tmp_path / "rounded", hf_config=source, dtype="bf16")
    exact, rounded = load(tmp_path / "exact"), load(tmp_path / "rounded")
    for name, tensor in load(source).items():
        if name.endswith("linear_attn.norm.weight"):
            assert torch.equal(exact[name], tensor.float() + 1)
            assert torch.equal(rounded[name], exact[name].bfloat16())


def test_gated_delta_nets_of_which_nothing_is_known_are_refused(tmp_path: Path) -> None:
    peer = HERE / "pai-megatron-patch-dense"
    refused = r"^Qwen3\.5 is neither read nor written in the keys of Pai-"
    with pytest.raises(BadInput, match=refused):
        mcore_to_hf(peer, tmp_path / "out", hf_config=HERE / "hf-hybrid")


def test_which_weights_come_back_from_one_less() -> None:
    """Of bf16, all from 0.5 to 256; smaller ones are off by 2**-9 at most, as stored there."""
    every = torch.arange(2**16, dtype=torch.int32).to(torch.int16).view(torch.bfloat16)
    weight = every[every.isfinite()].float()
    error = ((weight - 1).bfloat16().float() + 1 - weight).abs()
    assert error[(weight >= 0.5) & (weight <= 256)].max() == 0
    assert error[(weight > 0) & (weight < 0.5)].max() == 2**-9


@pytest.mark.parametrize("model", ["hybrid", "hybrid_moe"])
def test_gated_delta_nets_are_written_as_read_in_megatron_bridge(
    tmp_path: Path, model: str
) -> None:
    """Source: ``GDNLinearMappingSeparate`` and ``RMSNorm2ZeroCenteredRMSNormMapping``."""
    source, out = HERE / f"hf-{model}", tmp_path / "mcore"
    hf_to_mcore(source, out, dialect="megatron-bridge")
    tensors, stored = load(source), TorchDistCheckpoint(identify(out).folder)
    hf = "model.language_model.layers.2.linear_attn."
    ours = "language_model.decoder.layers.2.self_attention."
    norm = tensors[f"{hf}norm.weight"]
    assert torch.equal(stored.tensor(f"{ours}out_norm.weight"), norm - 1)
    parts = ("query", "key", "value")
    joined = torch.cat([stored.tensor(f"{ours}in_proj.weight.{part}") for part in parts])
    assert torch.equal(joined, tensors[f"{hf}in_proj_qkv.weight"])
    assert torch.equal(
        stored.tensor(f"{ours}in_proj.weight.beta"), tensors[f"{hf}in_proj_b.weight"]
    )
    mcore_to_hf(out, tmp_path / "back")
    assert_same_tensors(source, tmp_path / "back")


def test_a_norm_that_would_be_rounded_is_not_written(tmp_path: Path) -> None:
    source = copy(HERE / "hf-hybrid_moe", tmp_path / "hf")
    tensors, name = load(source), "model.language_model.layers.2.linear_attn.norm.weight"
    tensors[name][1] = 0.251
    save(tensors, source)
    refused = rf"1 of 6 weights of {re.escape(name)} would be rounded, since NVIDIA Megatron-Bridge"
    with pytest.raises(BadInput, match=refused) as error:
        hf_to_mcore(source, tmp_path / "out", dialect="megatron-bridge")
    assert "\n" not in str(error.value)
    assert not (tmp_path / "out").exists()
    hf_to_mcore(source, tmp_path / "out", dialect="ms-swift")
    mcore_to_hf(tmp_path / "out", tmp_path / "back")
    assert_same_tensors(source, tmp_path / "back")


EMBEDDING = "language_model.embedding.word_embeddings.weight"


def test_keys_of_others_are_refused() -> None:
    refused = "the keys of an unknown project, which are not understood here"
    with pytest.raises(BadInput, match=refused):
        dialect_of(Path("DIR"), {EMBEDDING, "tower.merger.linear_fc1.weight"})


LEGACY = [
    ("visual.", r"the keys of ms-swift .* legacy format, in which they are"),
    (
        "vision_model.projection.",
        r"the keys of Pai-Megatron-Patch .* legacy format, in which they are",
    ),
]


@pytest.mark.parametrize(("vision", "refused"), LEGACY, ids=["ms-swift", "Pai-Megatron-Patch"])
def test_the_legacy_format_is_refused(tmp_path: Path, vision: str, refused: str) -> None:
    hf_to_mcore(HERE / "hf-dense", tmp_path / "legacy", format="torch")
    (file,) = tmp_path.rglob("model_optim_rng.pt")
    content = torch.load(file, weights_only=False)
    prefixes = {True: vision, False: "language_model."}
    state = {prefixes[key.startswith("visual.")] + key: t for key, t in content["model"].items()}
    torch.save(content | {"model": state}, file)
    with pytest.raises(BadInput, match=refused) as error:
        mcore_to_hf(tmp_path / "legacy", tmp_path / "out")
    folder = identify(tmp_path / "legacy").folder
    run = Namespace(**{**vars(saved_arguments(folder)), "num_experts": None})
    with pytest.raises(BadInput, match=re.escape(str(error.value))):
        check_run(folder, run)
    assert "\n" not in str(error.value)


def test_two_dialects_in_one_checkpoint_are_refused(tmp_path: Path) -> None:
    folder = copy(HERE / "ms-swift-dense", tmp_path / "peer") / "iter_0000001"
    index = torch_dist.read_metadata(folder)
    index.tensors["embedding.word_embeddings.weight"] = index.tensors.pop(
        "language_model.output_layer.weight"
    )
    (folder / torch_pickle.METADATA).write_bytes(torch_dist.dumps_metadata(index))
    with pytest.raises(BadInput, match=r"the tensor embedding\.word\S+ under two keys"):
        mcore_to_hf(tmp_path / "peer", tmp_path / "out", hf_config=HERE / "hf-dense")


ROUTER = "language_model.decoder.layers.{}mlp.router.weight"


@pytest.mark.parametrize(
    ("changed", "place", "refused"),
    [
        (ROUTER.format("1."), None, r"layers\.2\.\S+ does not fit the 2"),
        (ROUTER.format("2."), None, r"has shape \[2, 6, 20\]"),
        (ROUTER.format("2."), ROUTER.format("02."), r"has shape \[2, 6, 20\]"),
        ("vision_model.decoder.layers.0.mlp.linear_fc1.bias", None, r"\S+ does not fit the 3"),
    ],
)
def test_layers_of_which_one_is_missing_are_refused(
    tmp_path: Path, changed: str, place: str | None, refused: str
) -> None:
    checkpoint = copy(HERE / "pai-megatron-patch-moe", tmp_path / "peer")
    index = torch_dist.read_metadata(checkpoint / "release")
    tensor = index.tensors.pop(changed)
    if place is not None:
        index.tensors[place] = tensor
    (checkpoint / "release" / torch_pickle.METADATA).write_bytes(torch_dist.dumps_metadata(index))
    with pytest.raises(BadInput, match=refused) as error:
        mcore_to_hf(checkpoint, tmp_path / "out", hf_config=HERE / "hf-moe")
    assert "\n" not in str(error.value)


def test_layers_that_are_also_stacked_are_refused(tmp_path: Path) -> None:
    checkpoint = copy(HERE / "pai-megatron-patch-moe", tmp_path / "peer")
    index = torch_dist.read_metadata(checkpoint / "release")
    (first,) = index.tensors[ROUTER.format("0.")].chunks
    data = replace(first.data, offset=0, length=0)
    whole = replace(first, offsets=(0, 0, 0), sizes=(3, 6, 20), data=data)
    index.tensors[ROUTER.format("")] = ChunkedTensor(torch.bfloat16, whole.sizes, [whole])
    (checkpoint / "release" / torch_pickle.METADATA).write_bytes(torch_dist.dumps_metadata(index))
    with pytest.raises(BadInput, match=r"does not fit the 3 layers .* two checkpoints are mixed"):
        mcore_to_hf(checkpoint, tmp_path / "out", hf_config=HERE / "hf-moe")


def test_layers_that_differ_keep_keys_of_their_own(tmp_path: Path) -> None:
    source = write_tiny_checkpoint(tmp_path / "hf", moe=True, text={"mlp_only_layers": [1]})
    hf_to_mcore(source, tmp_path / "mcore", dialect="megatron-bridge")
    keys = TorchDistCheckpoint(tmp_path / "mcore" / "release").model_keys()
    assert any("decoder.layers.1." in key for key in keys)
    mcore_to_hf(tmp_path / "mcore", tmp_path / "back")
    assert_same_tensors(source, tmp_path / "back")


def test_a_config_of_another_tower_is_refused(tmp_path: Path) -> None:
    other = copy(HERE / "hf-dense", tmp_path / "hf")
    edit_config(other, vision_config__depth=5)
    shapes = r"vision_model\.\S+ has shape \[4, 24\].* makes it \[5, 24\]"
    with pytest.raises(BadInput, match=shapes):
        mcore_to_hf(HERE / "megatron-bridge-dense", tmp_path / "out", hf_config=other)
    with pytest.raises(BadInput, match=r"lacks the tensor visual\.blocks\.4\."):
        mcore_to_hf(HERE / "ms-swift-dense", tmp_path / "out", hf_config=other)
    edit_config(other, vision_config__depth=4, vision_config__deepstack_visual_indexes=[1])
    with pytest.raises(BadInput, match=r"holds the tensor visual\.visual\.deepstack_merger_list"):
        mcore_to_hf(HERE / "ms-swift-dense", tmp_path / "out", hf_config=other)


@pytest.mark.parametrize("peer", [*WRITTEN, "ms-swift-hybrid_moe"])
def test_it_holds_what_the_peers_own_holds(tmp_path: Path, peer: str) -> None:
    maker, source, out = peer.rpartition("-")[0], source_of(peer), tmp_path / "out"
    hf_to_mcore(source, out, dialect=maker)
    ours, theirs = (TorchDistCheckpoint(identify(path).folder) for path in (out, HERE / peer))
    assert ours.index.tensors.keys() == theirs.index.tensors.keys()
    for key, tensor in theirs.index.tensors.items():
        assert ours.index.tensors[key].shape == tensor.shape, key
        assert ours.dtype(key) == tensor.dtype, key
        assert torch.equal(ours.tensor(key), theirs.tensor(key)), key
    assert ours.index.objects.keys() == theirs.index.objects.keys()
    assert ours.folder.name == {"megatron-bridge": "release", "ms-swift": "iter_0000001"}[maker]
    arguments = dist_checkpointing.load_common_state_dict(str(ours.folder))["args"]
    assert (arguments.tensor_model_parallel_size, arguments.no_save_optim) == (1, True)
    mcore_to_hf(out, tmp_path / "back")
    assert_same_tensors(source, tmp_path / "back")
    assert_same_files(source, tmp_path / "back")
    assert check_manifest(out).ok
    report = compare_checkpoints(out, HERE / peer)
    assert report.ok
    said = [who for name, who in report.environment.items() if name.endswith("written by")]
    assert said == [MAKERS[maker]] * 2


@pytest.mark.parametrize("maker", ["megatron-bridge", "ms-swift"])
def test_float32_comes_back_from_their_keys(tmp_path: Path, maker: str) -> None:
    source = HERE / "hf-hybrid"  # A_log and the norms of its gated delta nets are float32
    hf_to_mcore(source, tmp_path / "mcore", dialect=maker)
    mcore_to_hf(tmp_path / "mcore", tmp_path / "back")
    assert_same_tensors(source, tmp_path / "back")
    assert check_manifest(tmp_path / "mcore").ok


def test_only_a_language_model_in_torch_dist_has_a_dialect(tmp_path: Path) -> None:
    source = write_tiny_checkpoint(tmp_path / "hf")
    edit_config(source, architectures=None)
    with pytest.raises(BadInput, match="--dialect ms-swift is written in the torch_dist format"):
        hf_to_mcore(source, tmp_path / "out", dialect="ms-swift", format="torch")
    with pytest.raises(
        BadInput, match="dialect 'x' is not known: megatron-bridge, ms-swift and hybrid can"
    ):
        hf_to_mcore(source, tmp_path / "out", dialect="x")
    with pytest.raises(BadInput, match=r"is only read, since its MoE recipes .* hybrid can"):
        hf_to_mcore(source, tmp_path / "out", dialect="pai-megatron-patch")
    assert not (tmp_path / "out").exists()
