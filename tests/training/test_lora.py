"""A LoRA run in Megatron's loop has PEFT's curve, and its checkpoints and exports are right."""

from __future__ import annotations

import json
import re
import shutil
import warnings
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from mcore_qwen3vl.config import Architecture
from mcore_qwen3vl.converters import torch_dist
from mcore_qwen3vl.converters.convert import hf_to_mcore
from mcore_qwen3vl.converters.identify import ADAPTER_CONFIG, TRACKER
from mcore_qwen3vl.errors import BadInput
from mcore_qwen3vl.layout import Layout
from mcore_qwen3vl.model.qwen3vl import build_chunks
from mcore_qwen3vl.runtime.launch import initialize, run_layout
from mcore_qwen3vl.tiny import write_tiny_checkpoint
from mcore_qwen3vl.training.arguments.command_line import CommandLine
from mcore_qwen3vl.training.lora import BASE_FILE, Base, Identity, LoraRun, check_checkpoint
from mcore_qwen3vl.verification.curves import (
    DISTRIBUTED,
    OTHER_LAYOUT,
    TOLERANCE,
    Job,
    curve_of,
    hf_curve,
    train,
    train_and_rewind,
    worst_difference,
)
from mcore_qwen3vl.verification.parity.case import ADAPTERS, write_random_adapter
from mcore_qwen3vl.verification.parity.comparison import verify_parity

KEEP = ("--save-interval", "1000")


def lora_job(folder: Path, checkpoint: Path, data: Path, lora: str, layout: str) -> Job:
    adapter = folder / "adapter"
    if not adapter.exists():
        write_random_adapter(adapter, ADAPTERS[lora], checkpoint)
    return Job(checkpoint, data, Layout.parse(layout), steps=4, lora=adapter)


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "lora"), [("dense", "everything"), ("hybrid", "hybrid")])
def test_a_run_goes_on_under_another_layout_and_its_export_is_pefts(
    checkpoint: Path, lora: str, data: Path, tmp_path: Path
) -> None:
    job = lora_job(tmp_path, checkpoint, data, lora, "dp2")
    job = replace(job, flags=(*DISTRIBUTED, "--num-workers", "1"))
    whole, save = train_and_rewind(job, tmp_path)
    difference = worst_difference(curve_of(whole), hf_curve(job))
    assert max(difference.loss, difference.grad_norm) <= TOLERANCE
    held = torch_dist.read_metadata(save / "iter_0000002").tensors
    assert all("adapter.model." in key or "adapter.lm_head." in key for key in held)

    flags = ("--use-distributed-optimizer", "--num-workers", "2")
    other = replace(job, layout=Layout.parse("tp2+sp"), flags=flags)
    export = tmp_path / "export"
    rest = train(other, tmp_path / "rest", "--save", str(save), *KEEP, "--save-hf", str(export))
    difference = worst_difference(curve_of(rest), curve_of(whole[2:]))
    assert max(difference.loss, difference.grad_norm) <= OTHER_LAYOUT

    written = export / "iter_0000004"
    loads_strictly(checkpoint, written)
    before, after = (
        load_file(folder / "adapter_model.safetensors")
        for folder in (tmp_path / "adapter", written)
    )
    assert before.keys() == after.keys()
    assert all(not torch.equal(before[key], after[key]) for key in before)
    # PEFT gives our logits from the exported adapter.
    verify_parity(checkpoint, None, ["image"], gradients=False, lora=written).require()


def loads_strictly(checkpoint: Path, adapter: Path) -> None:
    """Check that PEFT finds every factor that it looks for, and no unknown key."""
    from peft import PeftConfig, get_peft_model, set_peft_model_state_dict
    from transformers import AutoModelForImageTextToText

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = AutoModelForImageTextToText.from_pretrained(checkpoint)
        peft = get_peft_model(model, PeftConfig.from_pretrained(adapter))
        found = set_peft_model_state_dict(peft, load_file(adapter / "adapter_model.safetensors"))
    assert not found.unexpected_keys
    trained = [name for name, p in peft.named_parameters() if "lora_" in name]
    assert not set(trained).intersection(found.missing_keys)


def test_flags_make_an_adapter_that_peft_loads(moe: Path, data: Path, tmp_path: Path) -> None:
    flags = ("--lora-rank", "4", "--lora-modules-to-save", "merger", "--load-hf", str(moe))
    job = Job(moe, data, Layout.parse("tp2+sp"), steps=1, flags=flags)
    train(job, tmp_path / "run", "--save-hf", str(tmp_path / "export"))
    written = tmp_path / "export" / "iter_0000001"
    config = json.loads((written / "adapter_config.json").read_text())
    assert (config["r"], config["lora_alpha"]) == (4, 8)
    assert set(config["target_modules"]) == {"q_proj", "k_proj", "v_proj", "o_proj"}
    assert len(config["target_parameters"]) == 2
    loads_strictly(moe, written)
    _, lora = asked(moe, tmp_path, *flags[:-2])
    assert lora is not None
    tensors = load_file(written / "adapter_model.safetensors").values()
    assert lora.parameters == sum(tensor.numel() for tensor in tensors)
    said = (tmp_path / "run" / "output.txt").read_text()
    count = f"{lora.parameters / 1e6:.2f}M parameters, "
    assert f"a LoRA adapter of rank 4, alpha 8 on {len(lora.targets)} matrices (language)" in said
    assert f", and merger whole: {count}" in said


def test_a_tied_head_counts_once(dense: Path, tmp_path: Path) -> None:
    tied = write_tiny_checkpoint(tmp_path / "tied", tie=True)
    both = ("--lora-rank", "4", "--lora-modules-to-save", "embed_tokens", "lm_head")
    (_, apart), (_, together) = (asked(model, tmp_path, *both) for model in (dense, tied))
    assert apart is not None
    assert together is not None
    a = Architecture.from_hf(tied)
    assert apart.parameters - together.parameters == a.vocab_size * a.hidden_size


def asked(model: Path, folder: Path, *flags: str) -> tuple[str, LoraRun | None]:
    settings = CommandLine(["--hf-model", str(model), "--load-hf", str(model), *flags]).settings
    return str(folder), LoraRun.from_settings(settings, Architecture.from_hf(model))


def test_checkpoints_of_another_kind_are_refused(dense: Path, tmp_path: Path) -> None:
    run = partial(asked, dense, tmp_path)

    check_checkpoint(*run())  # there is none yet
    (tmp_path / TRACKER).write_text("1")
    with pytest.raises(BadInput, match="of a whole model, not of an adapter"):
        check_checkpoint(*run("--lora-rank", "4"))
    _, lora = run("--lora-rank", "4")
    assert lora is not None
    run_layout(lora.save_config, 1, str(tmp_path))
    check_checkpoint(*run("--lora-rank", "4"))
    check_checkpoint(*run("--lora-config", str(tmp_path / "lora" / "adapter_config.json")))
    with pytest.raises(BadInput, match="holds the checkpoints of a LoRA run"):
        check_checkpoint(*run())
    for other in (("--lora-rank", "8"), ("--lora-rank", "4", "--lora-target", "q_proj")):
        with pytest.raises(BadInput, match="another adapter config"):
            check_checkpoint(*run(*other))


@pytest.mark.slow
def test_a_converted_base_is_the_same_base(
    dense: Path, data: Path, tmp_path: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    hf_to_mcore(dense, tmp_path / "mcore")
    job = lora_job(tmp_path, dense, data, "whole", "pp2xvpp2")
    job = replace(job, flags=("--num-workers", "1"))
    converted = replace(job, converted=tmp_path / "mcore")
    whole, save = train_and_rewind(converted, tmp_path)
    known = curve_of(train(job, tmp_path / "from-hf"))
    assert worst_difference(curve_of(whole), known) == worst_difference(known, known)
    rest = train(replace(job, layout=Layout(tp=2)), tmp_path / "rest", "--save", str(save), *KEEP)
    difference = worst_difference(curve_of(rest), curve_of(whole[2:]))
    assert max(difference.loss, difference.grad_norm) <= OTHER_LAYOUT

    other = write_tiny_checkpoint(tmp_path_factory.mktemp("other"), seed=99)
    with pytest.raises(BadInput, match="has others: give the same base"):
        train(replace(job, checkpoint=other), tmp_path / "other", "--save", str(save), *KEEP)


LAYOUTS = [
    ("dense", "single", ("--packing",)),
    ("dense", "tp2+sp", ()),
    ("dense", "pp2xvpp2", ()),
    ("dense", "cp2", ()),
    ("dense", "dp2", DISTRIBUTED),
    ("moe", "ep2xdp2", DISTRIBUTED),
    ("moe", "tp2xetp2+sp", ()),
]


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "layout", "flags"), LAYOUTS)
def test_thirty_steps_are_those_of_a_plain_peft_loop(
    kind: str, layout: str, flags: tuple[str, ...], data: Path, tmp_path: Path
) -> None:
    checkpoint = write_tiny_checkpoint(tmp_path / "checkpoint", moe=kind == "moe")
    lora = "router" if kind == "moe" else "everything"
    job = lora_job(tmp_path, checkpoint, data, lora, layout)
    packing = "--packing" in flags
    job = replace(job, steps=30, packing=packing, flags=tuple(f for f in flags if f != "--packing"))
    ours, theirs = curve_of(train(job, tmp_path / "run")), hf_curve(job)
    difference = worst_difference(ours, theirs)
    print(f"observed: {kind} {layout} {ours[0].loss:.3f} to {ours[-1].loss:.3f}, {difference}")
    assert theirs[-1].loss < theirs[0].loss - 0.5
    assert max(difference.loss, difference.grad_norm) <= TOLERANCE


def test_an_adapter_to_begin_from_that_has_another_base_is_warned_of(
    dense: Path, tmp_path: Path
) -> None:
    other = shutil.copytree(dense, tmp_path / "other")
    adapter = write_random_adapter(tmp_path / "adapter", ADAPTERS["language"], dense)
    config = json.loads((adapter / ADAPTER_CONFIG).read_text()) | {
        "base_model_name_or_path": str(other)
    }
    (adapter / ADAPTER_CONFIG).write_text(json.dumps(config))
    said = f"The adapter was trained on {other}, and is used with {dense}."
    with pytest.warns(UserWarning, match=re.escape(said)):
        asked(dense, tmp_path, "--lora-init", str(adapter))
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        asked(other, tmp_path, "--lora-init", str(adapter))


def of_rank(hf: Path, mcore: Path | None, layout: Layout, folder: Path | None = None) -> Identity:
    initialize(layout)
    base = Base(str(mcore or hf))
    for chunk in build_chunks(Architecture.from_hf(hf), layout):
        base.load(chunk)
    if folder is not None:
        base.check(folder)
    found = base.identity()
    assert found is not None
    return found


def identity(*args: object, layout: str) -> Identity:
    parsed = Layout.parse(layout)
    first, *others = run_layout(of_rank, parsed.world_size, *args[:2], parsed, *args[2:])
    assert all(other == first for other in others)
    return first


def test_an_adapter_with_embeddings_that_its_config_does_not_name_is_refused(
    dense: Path, tmp_path: Path
) -> None:
    """The run would load them, and export an adapter without them."""
    adapter = write_random_adapter(tmp_path / "adapter", ADAPTERS["language"], dense)
    file = adapter / "adapter_model.safetensors"
    name = "model.language_model.embed_tokens.weight"
    whole = {f"base_model.model.{name}": load_file(dense / "model.safetensors")[name]}
    save_file(load_file(file) | whole, file, metadata={"format": "pt"})
    with pytest.raises(BadInput, match=rf"holds {name}, which its config .*lora merge"):
        asked(dense, tmp_path, "--lora-init", str(adapter))


def test_one_sum_under_every_layout_and_format(moe: Path, tmp_path: Path) -> None:
    hf_to_mcore(moe, tmp_path / "mcore")
    found = identity(moe, None, layout="tp2xep2xetp2xdp2")
    for layout in ("pp2xvpp2", "tp2+sp"):
        other = identity(moe, tmp_path / "mcore", layout=layout)
        assert (other["sum"], other["dtype"]) == (found["sum"], "float32")
        assert other["path"] == str(tmp_path / "mcore")


def test_other_weights_are_refused(dense: Path, tmp_path: Path) -> None:
    (tmp_path / BASE_FILE).write_text(json.dumps(identity(dense, None, layout="single")))
    identity(dense, None, tmp_path, layout="dp2")
    other = write_tiny_checkpoint(tmp_path / "other", seed=99)
    with pytest.raises(BadInput, match="has others: give the same base"):
        identity(other, None, tmp_path, layout="single")
    for content in ("[]", "{", "[" * 100_000, '{"path": "x"}'):
        (tmp_path / BASE_FILE).write_text(content)
        with pytest.raises(BadInput, match=rf"{BASE_FILE} (is damaged|cannot be read|holds list)"):
            identity(dense, None, tmp_path, layout="single")
