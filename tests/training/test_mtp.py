"""MTP is computed and trained as a plain loop does, under every layout.

transformers has no such layer: the plain loop takes `PlainMTP`.
"""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from megatron.core.extensions.transformer_engine import HAVE_TE
from megatron.core.tensor_parallel import inference_layers
from PIL import Image
from safetensors.torch import load_file
from torch import nn

from mcore_qwen3vl.config import Architecture
from mcore_qwen3vl.converters.convert import mcore_to_hf
from mcore_qwen3vl.layout import Layout
from mcore_qwen3vl.model.patches import patch_libraries
from mcore_qwen3vl.model.transformer_config import transformer_config
from mcore_qwen3vl.tiny import write_tiny_checkpoint
from mcore_qwen3vl.verification.curves import (
    OTHER_LAYOUT,
    Job,
    curve_of,
    sample_order,
    train,
    train_and_rewind,
    worst_difference,
)
from tests.converters.checkpoints import assert_same_tensors
from tests.training.log import numbers_of
from tests.training.one_step import Plain, check_step, plain_model, step_job
from tests.training.plain_mtp import PlainMTP
from tests.turns import slow

FACTOR = 0.4
FLAGS = ("--mtp-num-layers", "1", "--mtp-loss-scaling-factor", str(FACTOR))
PACKED = ("--packing",)
FULL = (
    *("--recompute-granularity", "full", "--recompute-method", "uniform"),
    *("--recompute-num-layers", "2"),
)
IMAGE = "<|vision_start|><|image_pad|><|vision_end|>"


@pytest.fixture(scope="module")
def documents(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write documents, of which every text token is trained, the first of each among them.

    Some have an image between their texts.
    """
    folder = tmp_path_factory.mktemp("documents")
    lines = []
    for i in range(12):
        record: dict[str, Any] = {"texts": [f"page {i * 37} says ", f"that {i * i} is it"]}
        record["images"] = [None, None]
        if i % 3:
            Image.radial_gradient("L").convert("RGB").resize((32 + 16 * (i % 2), 32)).save(
                folder / f"{i}.png"
            )
            record = {"texts": [*record["texts"][:1], None, *record["texts"][1:]]}
            record["images"] = [None, f"{i}.png", None]
        lines.append(json.dumps(record))
    file = folder / "train.jsonl"
    file.write_text("\n".join(lines) + "\n")
    return file


@pytest.fixture(scope="module")
def hybrid_tied(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_checkpoint(tmp_path_factory.mktemp("tied"), family="qwen3.5", tie=True)


def plain_step(job: Job) -> tuple[Plain, float]:
    """Run the first step, one document at a time; return the next token's loss, and the other's.

    The gradients are those of the sum of both losses, divided by the number of the first's tokens.
    """
    from transformers import AutoProcessor

    processor = AutoProcessor.from_pretrained(job.checkpoint)
    model, named = plain_model(job)
    further = PlainMTP(job.checkpoint, model)
    named |= {f"mtp.{name}": parameter for name, parameter in further.named_parameters()}
    seen: dict[str, Any] = {}
    text = further.text[0]
    text.register_forward_pre_hook(lambda _, args, kwargs: seen.update(kwargs), with_kwargs=True)
    text.rotary_emb.register_forward_hook(lambda _, args, angles: seen.update(angles=angles))
    records = [json.loads(line) for line in job.data.read_text().splitlines()]
    sums, counts = [torch.zeros([]), torch.zeros([])], [0, 0]
    for line in sample_order(job)[0]:
        parts = zip(records[line]["texts"], records[line]["images"], strict=True)
        words = "".join(IMAGE if one is None else one for one, _ in parts)
        images = [Image.open(job.data.parent / name) for name in records[line]["images"] if name]
        inputs = processor(
            text=[words + processor.tokenizer.pad_token], images=images or None, return_tensors="pt"
        )
        tokens = inputs["input_ids"][0]
        media = [
            processor.tokenizer.convert_tokens_to_ids(f"<|{name}|>")
            for name in ("vision_start", "image_pad", "vision_end")
        ]
        trained = ~torch.isin(tokens, torch.tensor(media))
        hidden = model.model(**inputs).last_hidden_state
        states = further(hidden, seen["inputs_embeds"], seen["angles"])
        for k, at in enumerate((hidden[0, :-1], states[:-1])):
            of = trained[k + 1 :]
            logits = model.lm_head(at)[of]
            sums[k] = sums[k] + F.cross_entropy(logits, tokens[k + 1 :][of], reduction="sum")
            counts[k] += int(of.sum())
    plain = Plain.of((sums[0] + FACTOR * sums[1]) / counts[0], named)
    return replace(plain, loss=float(sums[0]) / counts[0]), float(sums[1]) / counts[1]


@pytest.mark.parametrize(
    ("kind", "layout", "flags"),
    [
        ("hybrid", "tp2+sp", PACKED),
        ("hybrid", "pp2", ("--micro-batch-size", "2")),
        *slow(
            ("hybrid", "single", PACKED),
            ("hybrid", "single", (*PACKED, *FULL)),
            ("hybrid", "single", (*PACKED, "--no-chunked-head")),
            ("hybrid", "tp2", PACKED),
            ("hybrid", "cp2", PACKED),
            ("hybrid", "cp2", ()),
            ("hybrid", "pp2xvpp2", PACKED),
            ("hybrid", "dp2", PACKED),
            ("hybrid", "tp2xpp2+sp", PACKED),
            ("hybrid_tied", "pp2", PACKED),
            ("hybrid_moe", "ep2xdp2", PACKED),
            ("hybrid_moe", "tp2xetp2+sp", PACKED),
        ),
    ],
)
def test_both_losses_and_every_gradient_are_those_of_a_plain_loop(
    checkpoint: Path, layout: str, flags: tuple[str, ...], documents: Path, tmp_path: Path
) -> None:
    job = step_job(checkpoint, documents, layout, *FLAGS, *flags)
    expected, further = plain_step(job)
    entry = check_step(job, expected, "lm loss", tmp_path)
    assert entry["mtp_1 loss"] == pytest.approx(further, rel=2e-5)


def test_the_layer_is_saved_resumed_and_exported_as_trained(
    hybrid: Path, data: Path, tmp_path: Path
) -> None:
    job = replace(step_job(hybrid, data, "single", *FLAGS, *PACKED, steps=4), batch=2)
    whole, save = train_and_rewind(job, tmp_path)
    export = tmp_path / "export"
    flags = ("--save", str(save), "--save-interval", "1000", "--save-hf", str(export))
    rest = train(job, tmp_path / "rest", *flags)
    assert numbers_of(rest) == numbers_of(whole[2:])
    assert [entry["mtp_1 loss"] for entry in rest] == [e["mtp_1 loss"] for e in whole[2:]]
    before, after = (
        load_file(folder / "model.safetensors") for folder in (hybrid, export / "iter_0000004")
    )
    further = [name for name in before if name.startswith("mtp.")]
    assert further
    assert all(not torch.equal(before[name], after[name]) for name in further)
    mcore_to_hf(save, tmp_path / "back", hf_config=hybrid)
    assert_same_tensors(export / "iter_0000004", tmp_path / "back")


def test_a_pipeline_layout_does_not_name_the_layer(hybrid: Path) -> None:
    architecture = Architecture.from_hf(hybrid)
    layers = "t" * (architecture.num_hidden_layers - 1)
    overrides = Layout.parse(f"pp2+E{layers}|tL").config_overrides()
    config = transformer_config(architecture, **overrides, mtp_num_layers=1)
    assert config.mtp_num_layers == 1


@pytest.mark.skipif(HAVE_TE, reason="asks for what Megatron has without Transformer Engine")
def test_megatrons_next_version_can_ask_for_layers_of_inference(hybrid: Path) -> None:
    """It asks isinstance of them, and without Transformer Engine they are mocks."""
    config = transformer_config(Architecture.from_hf(hybrid), mtp_num_layers=1)
    patch_libraries(config, "torch")
    assert not isinstance(nn.Linear(1, 1), inference_layers.InferenceColumnParallelLinear)
    assert not isinstance(nn.Linear(1, 1), inference_layers.InferenceLayerNormColumnParallelLinear)


@pytest.mark.slow
def test_the_layer_goes_on_under_another_layout(
    hybrid_moe: Path, data: Path, tmp_path: Path
) -> None:
    job = replace(step_job(hybrid_moe, data, "ep2xdp2", *FLAGS, steps=4), batch=2)
    job = replace(job, flags=(*job.flags, "--use-distributed-optimizer"))
    whole, save = train_and_rewind(job, tmp_path)
    other = step_job(hybrid_moe, data, "pp2", *job.flags, steps=4)
    rest = train(replace(other, batch=2), tmp_path / "rest", "--save", str(save))
    difference = worst_difference(curve_of(rest), curve_of(whole[2:]))
    assert max(difference.loss, difference.grad_norm) <= OTHER_LAYOUT
