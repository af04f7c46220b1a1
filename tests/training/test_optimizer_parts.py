"""Freezing, learning rates and gradient norms by part of the model, in the training loop."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F

from mcore_qwen3vl.config import Architecture
from mcore_qwen3vl.layout import Layout
from mcore_qwen3vl.runtime.launch import initialize, run_layout
from mcore_qwen3vl.verification.curves import Job, encode_conversation, sample_order, train
from tests.training.log import numbers_of
from tests.training.one_step import Plain, check_step, plain_model, step_job
from tests.turns import slow


def test_learning_rates_by_part_reach_the_optimizer(dense: Path) -> None:
    (groups,) = run_layout(rates, 1, dense)
    assert groups == {("vision", 1e-4), ("aligner", 5e-4), ("language", 1e-3)}


def rates(path: Path) -> set[tuple[str, float]]:
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
    from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
    from megatron.core.optimizer import get_standard_config_overrides as standard

    from mcore_qwen3vl.model.freeze import part_of
    from mcore_qwen3vl.model.qwen3vl import Qwen3VLModel
    from mcore_qwen3vl.training.arguments.command_line import CommandLine
    from mcore_qwen3vl.training.optimizer import learning_rate_overrides

    initialize(Layout())
    factors = ["--vision-lr-mult", "0.1", "--aligner-lr-mult", "0.5"]
    settings = CommandLine([*factors, "--lr", "1e-3", "--min-lr", "0"]).settings
    config = OptimizerConfig(optimizer="adam", lr=1e-3, min_lr=0.0)
    model = Qwen3VLModel.from_hf_config(path)
    chunk = DistributedDataParallel(model.config, DistributedDataParallelConfig(), model)
    overrides = {**standard(config), **learning_rate_overrides(settings)}
    optimizer = get_megatron_optimizer(config, [chunk], config_overrides=overrides)
    names = {parameter: name for name, parameter in model.named_parameters()}
    return {
        (part_of(names[parameter]), group["max_lr"])
        for group in optimizer.param_groups
        for parameter in group["params"]
    }


def test_each_part_warms_up_from_the_same_share_of_its_rate() -> None:
    from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler

    from mcore_qwen3vl.training.optimizer import scale_warmup_start

    parts = [{"max_lr": 1e-4, "min_lr": 1e-5}, {"max_lr": 0.0, "min_lr": 0.0}]
    optimizer = SimpleNamespace(param_groups=[{}, *parts])
    scheduler = OptimizerParamScheduler(
        optimizer, init_lr=5e-4, max_lr=1e-3, min_lr=1e-4, lr_warmup_steps=2, lr_decay_steps=6,
        lr_decay_style="linear", start_wd=0.1, end_wd=0.1, wd_incr_steps=6,
        wd_incr_style="constant",
    )  # fmt: skip
    scale_warmup_start(scheduler)
    for rate in (5e-4, 7.5e-4, 1e-3, 7.75e-4, 5.5e-4, 3.25e-4, 1e-4, 1e-4):
        found = [group["lr"] for group in optimizer.param_groups]
        assert found == pytest.approx([rate, rate / 10, 0])
        scheduler.step(1)


def test_a_part_whose_rate_is_zero_stays_in_the_warmup_too(
    dense: Path, data: Path, tmp_path: Path
) -> None:
    from safetensors.torch import load_file

    warmup = ("--lr-warmup-iters", "1", "--lr-warmup-init", "5e-4", "--vision-lr-mult", "0")
    train(Job(dense, data, steps=2, batch=1, flags=warmup), tmp_path, "--save-hf", str(tmp_path))
    before = load_file(dense / "model.safetensors")
    after = load_file(tmp_path / "iter_0000002" / "model.safetensors")
    moved = {name for name in before if not torch.equal(before[name], after[name])}
    tower = {name for name in before if ".visual." in name and "merger" not in name}
    assert tower
    assert not moved & tower
    assert moved


def test_frozen_weights_stay_and_the_rest_learns_under_recompute(
    dense: Path, data: Path, tmp_path: Path
) -> None:
    from safetensors.torch import load_file

    frozen = ("--freeze", "vision", "aligner", "embedding")
    full = ("--recompute-granularity", "full", "--recompute-method", "uniform",
            "--recompute-num-layers", "2")  # fmt: skip
    job = Job(dense, data, steps=2, flags=frozen)
    plain = train(job, tmp_path / "plain", "--save-hf", str(tmp_path / "hf"))
    recomputed = train(replace(job, flags=(*frozen, *full)), tmp_path / "recomputed")
    assert numbers_of(recomputed) == pytest.approx(numbers_of(plain), rel=1e-6)
    assert plain[0]["grad norm vision"] == plain[0]["grad norm aligner"] == 0
    before = load_file(dense / "model.safetensors")
    after = load_file(tmp_path / "hf" / "iter_0000002" / "model.safetensors")
    moved = {name for name in before if not torch.equal(before[name], after[name])}
    language = {n for n in before if ".visual." not in n and "embed_tokens" not in n}
    assert moved == language
    assert Architecture.from_hf(tmp_path / "hf" / "iter_0000002") == Architecture.from_hf(dense)


VISION, ALIGNER = r"model\.visual\.(?!merger\.)", r"model\.visual\.merger\."


@pytest.mark.parametrize(
    ("frozen", "names", "layout"),
    [
        (("language",), r"model\.language_model\.|lm_head\.", "tp2+sp"),
        *slow(
            (("vision",), VISION, "cp2"),
            (("aligner",), ALIGNER, "pp2"),
            (("vision", "aligner"), f"{VISION}|{ALIGNER}", "single"),
        ),
    ],
)
def test_what_a_hybrid_model_trains_has_the_gradients_of_a_plain_loop(
    frozen: tuple[str, ...], names: str, layout: str, hybrid: Path, data: Path, tmp_path: Path
) -> None:
    """What is frozen has none, and what is not has those of a model that trains the same."""
    from transformers import AutoProcessor

    # A pack's work depends on what is trained, which the plain loop's loader is not told.
    job = step_job(hybrid, data, layout, "--packing", "--no-balance", "--freeze", *frozen)
    model, named = plain_model(job)
    for name, parameter in named.items():
        parameter.requires_grad_(not re.match(names, name))
    processor = AutoProcessor.from_pretrained(hybrid)
    records = [json.loads(line)["messages"] for line in data.read_text().splitlines()]
    total, tokens = torch.zeros([]), 0
    for line in sample_order(job)[0]:
        inputs, labels = encode_conversation(processor, records[line], data.parent)
        logits = model(**inputs).logits[0, :-1]
        total = total + F.cross_entropy(logits, labels[1:], reduction="sum")
        tokens += int((labels[1:] != -100).sum())
    expected = Plain.of(total / tokens, named)
    assert len(expected.gradients) == sum(p.requires_grad for p in named.values()) < len(named)
    check_step(job, expected, "lm loss", tmp_path)


@pytest.mark.parametrize(
    ("layout", "flags"), [("tp2+sp", ()), *slow(("dp2", ("--use-distributed-optimizer",)))]
)
def test_norms_by_part_add_up_to_the_whole(
    layout: str, flags: tuple[str, ...], moe: Path, data: Path, tmp_path: Path
) -> None:
    (entry,) = train(Job(moe, data, Layout.parse(layout), steps=1, flags=flags), tmp_path)
    parts = [entry[f"grad norm {part}"] for part in ("vision", "aligner", "language")]
    assert all(part > 0 for part in parts)
    assert sum(part**2 for part in parts) ** 0.5 == pytest.approx(entry["grad norm"], rel=1e-5)
