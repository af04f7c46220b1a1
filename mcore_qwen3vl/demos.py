"""The programs that ``make demo`` and ``make train-demo`` run, both on a tiny model on the CPU."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image

from mcore_qwen3vl.converters.convert import hf_to_mcore, mcore_to_hf
from mcore_qwen3vl.errors import CheckFailed
from mcore_qwen3vl.hf_kernels import without_gpu_kernels
from mcore_qwen3vl.layout import Layout
from mcore_qwen3vl.runtime import cpu
from mcore_qwen3vl.runtime.launch import run_layout
from mcore_qwen3vl.runtime.lifetime import scratch_folder
from mcore_qwen3vl.tiny import write_tiny_checkpoint
from mcore_qwen3vl.tiny.records import write_image_qa
from mcore_qwen3vl.verification.checkpoints import compare_checkpoints
from mcore_qwen3vl.verification.curves import DISTRIBUTED, Job, train, with_image_paths
from mcore_qwen3vl.verification.measurement import measure

TOLERANCE = 2e-5
"""Largest accepted logit difference, relative to the largest logit: this model's float32
rounding."""

PROMPT = "What is in the picture?"
SAMPLES, STEPS = 8, 60
LORA = ("--lora-rank", "16", "--lora-target", "all-linear", "--lora-modules-to-save", "lm_head")
LEARNT = 0.05
"""The loss below which the model has memorised the answers."""


@dataclass(frozen=True)
class DemoStep:
    """One line of the table of :func:`convert_demo`; `ok` is None if there is nothing to check."""

    name: str
    result: str
    seconds: float
    ok: bool | None = None


def convert_demo(
    *,
    dense: bool = False,
    keep: Path | None = None,
    status: Callable[[str], object] = lambda text: None,
) -> list[DemoStep]:
    """Convert, load on four processes, compare logits and convert back, without a download."""
    cpu.install()
    # Imported once, for every rank, since the ranks are forked from this process.
    import mcore_qwen3vl.inference  # noqa: F401

    with nullcontext(keep) if keep else scratch_folder() as folder:
        return _run_convert_demo(folder, dense, status)


def _run_convert_demo(folder: Path, dense: bool, status: Callable[[str], object]) -> list[DemoStep]:
    hf, mcore, back = folder / "hf", folder / "mcore", folder / "hf-again"
    layout = Layout(tp=2, sp=True, dp=2) if dense else Layout(tp=2, sp=True, ep=2, dp=2)
    kind = "dense, tied embeddings" if dense else "MoE, published expert layout"

    def write() -> tuple[str, None]:
        write_tiny_checkpoint(hf, moe=not dense, tie=dense, layout="published")
        return f"random weights: {kind}; tokenizer, processor, chat template", None

    def convert() -> tuple[str, None]:
        summary = hf_to_mcore(hf, mcore)
        return f"{summary.tensors_in_words}, {summary.nbytes / 1e6:.2f} MB, torch_dist", None

    def compare() -> tuple[str, bool]:
        inputs = prompt_inputs(hf)
        expected = hugging_face_logits(hf, inputs)
        outputs = run_layout(_mcore_logits, layout.world_size, mcore, layout, inputs)
        relative = max(measure(logits, expected).relative for logits in outputs)
        text = (
            f"{expected.shape[1]} tokens, {int(inputs['image_grid_thw'].prod())} patches: "
            f"off by {relative:.1e} of max |logit| (limit {TOLERANCE:.0e})"
        )
        return text, relative <= TOLERANCE

    def convert_back() -> tuple[str, None]:
        return f"{mcore_to_hf(mcore, back).tensors_in_words}, safetensors", None

    def check() -> tuple[str, bool]:
        report = compare_checkpoints(hf, back)
        tensors, files = report.parts().values()
        return (
            f"{tensors.count - tensors.failed} of {tensors.count} tensors bitwise equal, "
            f"{files.count - files.failed} of {files.count} other files equal"
        ), report.ok

    steps = []
    for name, work in (
        ("write Hugging Face checkpoint", write),
        ("convert to Megatron-Core", convert),
        (f"logits on {layout.world_size} ranks ({layout})", compare),
        ("convert back", convert_back),
        ("compare with the source", check),
    ):
        status(name)
        started = time.monotonic()
        result, ok = work()
        steps.append(DemoStep(name, result, time.monotonic() - started, ok))
    return steps


def prompt_inputs(hf: Path) -> dict[str, torch.Tensor]:
    """Process an image and a question with the checkpoint's own processor and chat template."""
    from transformers import AutoProcessor

    processor = AutoProcessor.from_pretrained(hf)
    pixels = np.random.default_rng(0).integers(0, 256, (40, 64, 3), dtype=np.uint8)
    content = [{"type": "image"}, {"type": "text", "text": PROMPT}]
    text = processor.apply_chat_template(
        [{"role": "user", "content": content}], add_generation_prompt=True
    )
    return dict(processor(text=text, images=[Image.fromarray(pixels)], return_tensors="pt"))


@torch.no_grad()
def hugging_face_logits(hf: Path, inputs: dict[str, torch.Tensor]) -> torch.Tensor:
    """Return the (1, S, V) logits of Hugging Face's own model, in float32."""
    from transformers import AutoModelForImageTextToText

    with without_gpu_kernels():
        model = AutoModelForImageTextToText.from_pretrained(hf, dtype=torch.float32).eval()
    return model(**inputs).logits


@torch.no_grad()
def _mcore_logits(mcore: Path, layout: Layout, inputs: dict[str, torch.Tensor]) -> torch.Tensor:
    """Return the (1, S, V) logits of this rank's data-parallel replica, gathered over TP."""
    from mcore_qwen3vl.data.encoding.batch import mrope_position_ids
    from mcore_qwen3vl.inference import CheckedModel, ModelRequest
    from mcore_qwen3vl.model.inputs import visual_inputs

    checked = CheckedModel(ModelRequest(mcore, layout=layout), "demo")
    (model,), architecture = checked.load(), checked.architecture
    # Sequence parallelism divides the sequence over TP, so it is padded on the right, which changes
    # no logit before the padding.
    ids = inputs["input_ids"]
    padded = torch.nn.functional.pad(ids, (0, -ids.shape[1] % layout.tp))
    visual = visual_inputs(architecture, padded, inputs["pixel_values"], inputs["image_grid_thw"])
    positions, _ = mrope_position_ids(architecture, padded, inputs["image_grid_thw"])
    logits = model.eval()(padded, positions, visual=visual, runtime_gather_output=True)
    return logits[:, : ids.shape[1]]


@dataclass(frozen=True)
class TrainDemo:
    """The measurements of :func:`train_demo`."""

    first_loss: float
    last_loss: float
    resumed_at: int
    answered: int
    asked: int
    seconds: float


def train_demo(
    *, keep: Path | None = None, say: Callable[[str], None] = print, lora: bool = False
) -> TrainDemo:
    """Train a tiny model, or an adapter, on image questions, stop once, and ask it the same.

    It raises CheckFailed if it does not resume, learn and answer as it should.
    """
    started = time.monotonic()
    cpu.install(training=True)  # before megatron is imported
    with nullcontext(keep) if keep else scratch_folder() as folder:
        say("a tiny Qwen3-VL with random weights, and image questions with PNGs")
        checkpoint = write_tiny_checkpoint(folder / "model")
        data = write_image_qa(folder / "data", SAMPLES, text_only_every=None)
        job = Job(
            checkpoint, data, Layout(tp=2, dp=2, sp=True), steps=STEPS, batch=2, seq_length=256,
            packing=True,
            flags=(
                "--lr", "5e-3", "--weight-decay", "0", "--packing-buffer", str(SAMPLES),
                *DISTRIBUTED,
                "--save", str(folder / "checkpoints"), "--save-interval", str(STEPS // 2),
                "--save-hf", str(folder / "hf"), *(LORA if lora else ()),
            ),
        )  # fmt: skip
        method, half = "LoRA" if lora else "SFT", STEPS // 2
        say(f"{method} at TP2 x DP2 on four processes, stopped after {half} of {STEPS} steps")
        first = train(job, folder / "first", "--exit-interval", str(STEPS // 2))
        format = "a PEFT adapter" if lora else "Hugging Face"
        say(f"the same command again: it resumes, finishes, and exports to {format}")
        rest = train(job, folder / "rest")
        say("Hugging Face's generate, with the exported model")
        records = [json.loads(line)["messages"] for line in data.read_text("utf-8").splitlines()]
        exported = folder / "hf" / f"iter_{STEPS:07d}"
        base, adapter = (checkpoint, exported) if lora else (exported, None)
        answers = answer_first_turns(base, records, data.parent, adapter)
        wanted = [messages[-1]["content"] for messages in records]
        for messages, got in zip(records, answers, strict=True):
            say(f"  {messages[0]['content'][0]['image']} {messages[0]['content'][1]['text']} {got}")
    result = TrainDemo(
        first_loss=first[0]["lm loss"],
        last_loss=rest[-1]["lm loss"],
        resumed_at=rest[0]["iteration"],
        answered=sum(got == want for got, want in zip(answers, wanted, strict=True)),
        asked=len(wanted),
        seconds=time.monotonic() - started,
    )
    if result.resumed_at != STEPS // 2 + 1:
        raise CheckFailed(f"resumed at step {result.resumed_at}, not {STEPS // 2 + 1}")
    if result.last_loss > LEARNT:
        raise CheckFailed(f"the loss ended at {result.last_loss:.3f}, above {LEARNT}")
    if result.answered != result.asked:
        raise CheckFailed(
            f"the exported model answers {result.answered} of {result.asked} questions as learnt"
        )
    return result


def answer_first_turns(
    checkpoint: Path,
    records: Sequence[list[dict[str, Any]]],
    folder: Path,
    adapter: Path | None = None,
) -> list[str]:
    """Return a Hugging Face model's greedy answers to the first turn of each conversation."""
    from transformers import AutoModelForImageTextToText, AutoProcessor

    processor = AutoProcessor.from_pretrained(checkpoint)
    with without_gpu_kernels():
        model = AutoModelForImageTextToText.from_pretrained(checkpoint, dtype=torch.float32)
    if adapter is not None:
        from peft import PeftModel

        model = PeftModel.from_pretrained(model, adapter)
    answers = []
    for messages in records:
        inputs = processor.apply_chat_template(
            with_image_paths(messages[:1], folder),
            add_generation_prompt=True,
            tokenize=True,
            return_dict=True,
            return_tensors="pt",
        )
        output = model.generate(**inputs, max_new_tokens=40, do_sample=False)
        new = output[0, inputs["input_ids"].shape[1] :]
        answers.append(processor.decode(new, skip_special_tokens=True))
    return answers
