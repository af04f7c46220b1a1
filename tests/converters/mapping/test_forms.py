"""Every published form of a checkpoint goes to mcore and back bitwise, under its own names."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from transformers import Qwen3VLModel

from mcore_qwen3vl.converters.convert import hf_to_hf, hf_to_mcore, mcore_to_hf, plan_hf_to_mcore
from mcore_qwen3vl.converters.describe import inspect_path
from mcore_qwen3vl.converters.mapping.forms import COSMOS
from mcore_qwen3vl.errors import BadInput
from mcore_qwen3vl.training.arguments.checks import check_surroundings
from mcore_qwen3vl.training.arguments.command_line import CommandLine
from mcore_qwen3vl.verification.checkpoints import check_manifest, compare_checkpoints
from mcore_qwen3vl.verification.parity.reference import Reference
from tests.converters.checkpoints import assert_same_files, assert_same_tensors, copy, load, save
from tests.converters.forms import FORMS, record_of, rewritten
from tests.turns import slow_except

Tiny = Callable[[str], Path]
Make = Callable[[str], Path]

USUAL = {"names": "current", "head": "language model", "labels": 0, "bias": False}


@dataclass(frozen=True)
class Trip:
    """A checkpoint that went to mcore and back."""

    mcore: Path
    back: Path
    notes: tuple[tuple[str, ...], tuple[str, ...]]  # there, and back


@pytest.fixture(scope="module")
def trip(form: Make, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Trip]:
    """Return a function that takes a form there and back, once; read-only."""
    made: dict[str, Trip] = {}

    def get(name: str) -> Trip:
        if name not in made:
            folder = tmp_path_factory.mktemp("trip")
            mcore, back = folder / "mcore", folder / "back"
            there = hf_to_mcore(form(name), mcore)
            made[name] = Trip(mcore, back, (there.notes, mcore_to_hf(mcore, back).notes))
        return made[name]

    return get


Travel = Callable[[str], Trip]


@pytest.mark.parametrize("name", slow_except([*FORMS], *[*FORMS][::2]))
def test_it_goes_round_under_its_own_names(form: Make, trip: Travel, name: str) -> None:
    source, mcore, back = form(name), trip(name).mcore, trip(name).back
    case = FORMS[name]
    assert_same_tensors(source, back)
    assert_same_files(source, back)
    assert record_of(mcore / "hf") == (USUAL | case.record if case.record else {})
    for notes in trip(name).notes:
        assert bool(notes) == (case.says is not None)
        assert re.search(case.says or "", " ".join(notes))
    for pair in ((source, mcore), (mcore, source), (source, back)):
        compare_checkpoints(*pair).require()
    check_manifest(mcore).require()


@pytest.mark.parametrize("name", [name for name, case in FORMS.items() if case.load is not None])
def test_transformers_loads_what_comes_back(trip: Travel, name: str) -> None:
    case = FORMS[name]
    _, info = case.load.from_pretrained(trip(name).back, output_loading_info=True, **case.arguments)
    assert not any(info.values())


COPIED = (
    *("before the move", "head stored though tied", "base, MoE", "Qwen3.5"),
    *("Qwen3.5 MoE as transformers saves it", "Qwen3.5's language model, MoE"),
)


@pytest.mark.parametrize("name", COPIED)
def test_a_copy_keeps_the_form(form: Make, tmp_path: Path, name: str) -> None:
    hf_to_hf(form(name), tmp_path / "copy")
    assert_same_tensors(form(name), tmp_path / "copy")
    assert_same_files(form(name), tmp_path / "copy")


@pytest.mark.parametrize("name", ["before the move", "head stored though tied"])
def test_an_export_for_transformers_has_its_names(
    form: Make, trip: Travel, tiny: Tiny, tmp_path: Path, name: str
) -> None:
    result = mcore_to_hf(trip(name).mcore, tmp_path / "back", expert_layout="v5")
    hf_to_hf(form(name), tmp_path / "copy", expert_layout="v5")
    assert not result.notes
    assert_same_tensors(tiny(FORMS[name].source), tmp_path / "back")
    assert_same_tensors(tiny(FORMS[name].source), tmp_path / "copy")


@pytest.mark.parametrize("name", FORMS)
def test_inspection_counts_what_is_there_under_its_names(
    form: Make, trip: Travel, name: str
) -> None:
    source, mcore = form(name), trip(name).mcore
    tensors = load(source)
    tied_copy = FORMS[name].record.get("head") == "tied copy"
    once = [t.numel() for n, t in tensors.items() if not (tied_copy and n == "lm_head.weight")]
    for path in (source, mcore):
        found = inspect_path(path)
        assert found.total_parameters == sum(once)
        assert {s.name for row in found.mapping() for s in row.sources} == set(tensors)
    assert {tensor.name for tensor in inspect_path(source).tensors} == set(tensors)


@pytest.mark.parametrize("kind", ["hybrid", "hybrid-moe"])
def test_what_a_run_does_not_hold_is_copied_from_its_origin(
    tiny: Tiny, tmp_path: Path, kind: str
) -> None:
    """A run's checkpoints have no mtp.*; an export names it, or takes it from --hf-config."""
    origin = tiny(kind)
    bare = copy(origin, tmp_path / "bare")
    tensors = load(origin)
    kept = {name: t for name, t in tensors.items() if not name.startswith("mtp.")}
    save(kept, bare)
    hf_to_mcore(bare, tmp_path / "run")
    result = mcore_to_hf(tmp_path / "run", tmp_path / "without")
    assert "lacks the MTP layer" in " ".join(result.notes)
    assert load(tmp_path / "without").keys() == kept.keys()
    result = mcore_to_hf(tmp_path / "run", tmp_path / "with", hf_config=origin)
    assert result.notes == (f"mtp.* is from {origin}.",)
    assert_same_tensors(origin, tmp_path / "with")


def test_an_origin_does_not_undo_a_layout_that_is_asked_for(
    form: Make, tiny: Tiny, tmp_path: Path
) -> None:
    """Experts are fused though those of the origin are one by one, which `source` keeps."""
    origin, run, back = form("Qwen3.5 MoE, experts one by one"), tmp_path / "run", tmp_path / "back"
    bare = copy(origin, tmp_path / "bare")
    save({name: t for name, t in load(origin).items() if not name.startswith("mtp.")}, bare)
    hf_to_mcore(bare, run)
    mcore_to_hf(run, back, hf_config=origin)
    assert_same_tensors(origin, back)
    mcore_to_hf(run, tmp_path / "fused", hf_config=origin, expert_layout="v5")
    assert_same_tensors(tiny("hybrid-moe"), tmp_path / "fused")


@pytest.mark.parametrize(
    ("name", "change", "message"),
    [
        (
            "model.language_model.layers.1.linear_attn.in_proj_qkv.weight",
            lambda t: t[:-1],
            r"in_proj_qkv.weight has shape \[287, 48\], but .* \[288, 48\]",
        ),
        (
            "model.language_model.layers.1.linear_attn.conv1d.weight",
            lambda t: t[..., 1:],
            r"conv1d.weight has shape \[288, 1, 3\]",
        ),
        (
            "model.language_model.layers.3.self_attn.q_proj.weight",
            lambda t: t[:256],  # no gate
            r"q_proj.weight has shape \[256, 48\], but .* \[512, 48\]",
        ),
        ("mtp.fc.weight", None, r"lacks the tensor mtp.fc.weight \[48, 96\]"),
        ("model.language_model.layers.0.linear_attn.A_log", None, r"lacks the tensor .*A_log"),
    ],
)
def test_what_does_not_fit_is_named(
    tiny: Tiny, tmp_path: Path, name: str, change: Callable[..., torch.Tensor], message: str
) -> None:
    source = copy(tiny("hybrid"), tmp_path / "hf")
    tensors = load(source)
    changed = tensors.pop(name)
    save(tensors | ({} if change is None else {name: change(changed).contiguous()}), source)
    with pytest.raises(BadInput, match=message):
        plan_hf_to_mcore(source)


def test_the_legacy_format_of_qwen3_5_is_refused(tiny: Tiny) -> None:
    with pytest.raises(BadInput, match=r"legacy format .* six tensors of unequal sizes"):
        plan_hf_to_mcore(tiny("hybrid"), format="torch")


def test_a_tied_head_that_differs_is_refused(form: Make, tmp_path: Path) -> None:
    source = copy(form("head stored though tied"), tmp_path / "hf")
    tensors = load(source)
    tensors["lm_head.weight"][-1, -1] += 1
    save(tensors, source)
    with pytest.raises(
        BadInput, match=r"tie_word_embeddings.*lm_head.weight differs from \S+embed_tokens"
    ):
        plan_hf_to_mcore(source)
    embedding = tensors["model.language_model.embed_tokens.weight"].bfloat16()
    tensors["model.language_model.embed_tokens.weight"] = embedding
    tensors["lm_head.weight"] = embedding.clone().view(torch.float16)  # the same bits
    save(tensors, source)
    with pytest.raises(BadInput, match=r"lm_head.weight differs"):
        plan_hf_to_mcore(source)


def test_a_tied_head_is_compared_bit_by_bit(form: Make, tmp_path: Path) -> None:
    source = copy(form("head stored though tied"), tmp_path / "hf")
    tensors = load(source)
    for name in ("lm_head.weight", "model.language_model.embed_tokens.weight"):
        tensors[name][0, 0] = float("nan")
    save(tensors, source)
    plan_hf_to_mcore(source)


def test_two_ways_of_naming_are_refused(form: Make, tmp_path: Path) -> None:
    source = copy(form("before the move"), tmp_path / "hf")
    tensors = load(source)
    extra = {"model.language_model.embed_tokens.weight": torch.ones(2, 2)}
    save(tensors | extra, source)
    with pytest.raises(BadInput, match=r"holds both model\.language_model.* and model\.embed"):
        plan_hf_to_mcore(source)


def test_a_tensor_is_named_as_its_file_names_it(form: Make, tmp_path: Path) -> None:
    source = copy(form("before the move"), tmp_path / "hf")
    tensors = load(source)
    removed = tensors.pop("model.layers.1.mlp.up_proj.weight")
    save(tensors, source)
    with pytest.raises(BadInput, match=r"lacks the tensor model\.layers\.1\.mlp\.up_proj\.weight"):
        plan_hf_to_mcore(source)
    save(tensors | {"model.layers.1.mlp.up_proj.weight": removed[1:]}, source)
    with pytest.raises(BadInput, match=r"tensor model\.layers\.1\.mlp\.up_proj\.weight has shape"):
        plan_hf_to_mcore(source)
    save(
        tensors | {"model.layers.1.mlp.up_proj.weight": removed, "visual.extra": removed + 1},
        source,
    )
    with pytest.raises(BadInput, match=r"holds the tensor visual\.extra"):
        plan_hf_to_mcore(source)


@pytest.mark.parametrize(
    "content",
    [
        *("{", "[]", '{"names": "other"}', '{"names": "old"}'),
        *(json.dumps(USUAL | {"split_experts": split}) for split in ("abc", {"mtp.": 1})),
    ],
)
def test_a_damaged_record_is_refused(form: Make, tmp_path: Path, content: str) -> None:
    hf_to_mcore(form("before the move"), tmp_path / "mcore")
    (tmp_path / "mcore/hf/checkpoint_form.json").write_text(content)
    with pytest.raises(BadInput, match=r"checkpoint_form\.json does not say"):
        mcore_to_hf(tmp_path / "mcore", tmp_path / "back")


@pytest.mark.parametrize("name", ["embedding", "sequence classifier"])
def test_the_legacy_format_is_for_language_models(form: Make, name: str) -> None:
    with pytest.raises(BadInput, match=r"no language model's head.*choose --format torch_dist"):
        plan_hf_to_mcore(form(name), format="torch")


GENERATOR = {
    "layers.0.self_attn.add_q_proj.weight": "layers.*.self_attn.add_q_proj.weight",
    "layers.1.self_attn.add_k_proj.weight": "layers.*.self_attn.add_k_proj.weight",
    "layers.1.self_attn.add_v_proj.weight": "layers.*.self_attn.add_v_proj.weight",
    "layers.1.self_attn.to_add_out.weight": "layers.*.self_attn.to_add_out.weight",
    "layers.1.self_attn.norm_added_q.weight": "layers.*.self_attn.norm_added_q.weight",
    "layers.1.self_attn.norm_added_k.weight": "layers.*.self_attn.norm_added_k.weight",
    "layers.0.mlp_moe_gen.up_proj.weight": "2 layers.*.mlp_moe_gen.up_proj.weight",
    "layers.1.mlp_moe_gen.up_proj.weight": "2 layers.*.mlp_moe_gen.up_proj.weight",
    **{
        name: f"1 {name}"
        for part in ("", "audio_", "action_")
        for name in (f"{part}proj_in.weight", f"{part}proj_out.bias")
    },
    "time_embedder.linear_1.weight": "1 time_embedder.linear_1.weight",
    "audio_modality_embed": "1 audio_modality_embed",
    "action_modality_embed": "1 action_modality_embed",
}
"""Tensors of a Cosmos3 checkpoint that are no part of its reasoner, and how a note lists them."""


def test_the_generator_of_cosmos_is_left_out_and_listed(form: Make, tmp_path: Path) -> None:
    reasoner = form("Cosmos3, newer names")
    source = copy(reasoner, tmp_path / "hf")
    save(load(source) | {name: torch.ones(2) for name in GENERATOR}, source)
    for result in (hf_to_mcore(source, tmp_path / "mcore"), hf_to_hf(source, tmp_path / "copy")):
        (note,) = (note for note in result.notes if "left out" in note)
        assert {listed for listed in GENERATOR.values() if listed not in note} == set()
        assert len(note.split(": ")[1].split(", ")) == len(set(GENERATOR.values()))
    mcore_to_hf(tmp_path / "mcore", tmp_path / "back")
    for folder in ("back", "copy"):
        assert_same_tensors(reasoner, tmp_path / folder)
    save(load(source) | {"layers.0.self_attn.gate.weight": torch.ones(2)}, source)
    with pytest.raises(BadInput, match=r"holds the tensor layers\.0\.self_attn\.gate\.weight"):
        plan_hf_to_mcore(source)


def test_what_is_left_out_is_what_transformers_ignores() -> None:
    source = pytest.importorskip("transformers.models.cosmos3_omni.modeling_cosmos3_omni")
    ignored = source.Cosmos3OmniPreTrainedModel._keys_to_ignore_on_load_unexpected
    assert list(COSMOS.left_out) == ignored


@pytest.mark.parametrize("name", ["Cosmos3", "Cosmos3, newer names"])
def test_cosmos_has_the_tensors_that_transformers_reads(
    form: Make, tiny: Tiny, tmp_path: Path, name: str
) -> None:
    if (model := FORMS[name].load) is None:
        pytest.skip("this transformers has no cosmos3_omni")
    hf_to_hf(form(name), tmp_path / "v5", expert_layout="v5")
    assert_same_tensors(tiny(FORMS[name].source), tmp_path / "v5")
    loaded, states = [], []
    for path in (form(name), tmp_path / "v5"):
        made, info = model.from_pretrained(path, output_loading_info=True)
        loaded.append(info)
        states.append(made.state_dict())
    assert not any(value for info in loaded for value in info.values())
    assert states[0].keys() == states[1].keys()
    assert all(torch.equal(tensor, states[1][key]) for key, tensor in states[0].items())


def unquantised_config_of_gptq(source: Path, target: Path) -> None:
    tensors = load(copy(source, target))
    name = "model.language_model.layers.0.mlp.up_proj.weight"
    weight = tensors.pop(name)
    packed = torch.zeros(weight.shape[1] // 8, weight.shape[0], dtype=torch.int32)
    save(tensors | {name.replace("weight", "qweight"): packed}, target)


def pickled(source: Path, target: Path) -> None:
    torch.save(load(copy(source, target)), target / "pytorch_model.bin")
    (target / "model.safetensors").unlink()


def without_vision(source: Path, target: Path) -> None:
    Qwen3VLModel.from_pretrained(source).language_model.save_pretrained(target)


REFUSED = {
    "GPTQ": (rewritten(dict, quantization_config={"quant_method": "gptq"}), r"'gptq'.*original"),
    "GPTQ, config restored": (unquantised_config_of_gptq, r"qweight .* I32.*original one"),
    "pickled": (
        pickled,
        # transformers 5 has no safe_serialization
        r"pytorch_model\.bin, are not read(?!.*safe_serialization).*save_pretrained",
    ),
    "text only": (without_vision, r"'qwen3_vl_text', a model without vision.*Name a whole"),
    "another family": (rewritten(dict, model_type="qwen3_omni"), r"'qwen3_omni';.*Name a whole"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_other_forms_are_refused_in_one_line(tiny: Tiny, tmp_path: Path, name: str) -> None:
    make, message = REFUSED[name]
    make(tiny("dense-v5"), tmp_path / "hf")
    with pytest.raises(BadInput, match=message) as refused:
        plan_hf_to_mcore(tmp_path / "hf")
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize("name", ["embedding", "sequence classifier", "before the move", "Cosmos3"])
def test_parity_is_of_what_transformers_loads(form: Make, name: str) -> None:
    with pytest.raises(BadInput, match=r"language model's head|older transformers|Cosmos3"):
        Reference(form(name))


@pytest.mark.parametrize("name", ["embedding", "reward model, MoE"])
def test_a_run_begins_from_a_language_model(
    form: Make, trip: Travel, tmp_path: Path, name: str
) -> None:
    flags = ["--cpu", "--data-path", str(tmp_path), "--train-iters", "1"]
    started = CommandLine([*flags, "--hf-model", str(form(name)), "--load", str(trip(name).mcore)])
    with pytest.raises(BadInput, match=r"language model's head\. Name a checkpoint that has one"):
        check_surroundings(started.settings)
