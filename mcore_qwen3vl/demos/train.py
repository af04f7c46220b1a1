"""A demo of training on the CPU: data, SFT at TP2 x DP2, stop, resume, export, generate."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mcore_qwen3vl.errors import CheckFailed
from mcore_qwen3vl.layout import Layout
from mcore_qwen3vl.runtime import cpu
from mcore_qwen3vl.runtime.lifetime import scratch_folder

SAMPLES, STEPS = 8, 60
LORA = ("--lora-rank", "16", "--lora-target", "all-linear", "--lora-modules-to-save", "lm_head")
LEARNT = 0.05
"""The loss below which the model has memorised the answers."""


@dataclass(frozen=True)
class DemoResult:
    """The measurements of :func:`run_demo`."""

    first_loss: float
    last_loss: float
    resumed_at: int
    answered: int
    asked: int
    seconds: float


def run_demo(
    *, keep: Path | None = None, say: Callable[[str], None] = print, lora: bool = False
) -> DemoResult:
    """Train a tiny model on image questions, with one interruption, and ask it the same questions.

    Args:
        lora: whether to train an adapter, and ask PEFT's model.

    Raises:
        CheckFailed: the run resumed at another step, the loss stayed high, or the exported model
            answers wrongly.
    """
    started = time.monotonic()
    cpu.install(training=True)  # before megatron is imported
    from mcore_qwen3vl.tiny import write_tiny_checkpoint
    from mcore_qwen3vl.tiny.records import write_image_qa
    from mcore_qwen3vl.verify.job import DISTRIBUTED, Job, train

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
        answers = (
            answer(checkpoint, records, data.parent, adapter=exported)
            if lora
            else answer(exported, records, data.parent)
        )
        wanted = [messages[-1]["content"] for messages in records]
        for messages, got in zip(records, answers, strict=True):
            say(f"  {messages[0]['content'][0]['image']} {messages[0]['content'][1]['text']} {got}")
    result = DemoResult(
        first_loss=first[0]["lm loss"],
        last_loss=rest[-1]["lm loss"],
        resumed_at=rest[0]["iteration"],
        answered=sum(got == want for got, want in zip(answers, wanted, strict=True)),
        asked=len(wanted),
        seconds=time.monotonic() - started,
    )
    _check(result)
    return result


def _check(result: DemoResult) -> None:
    if result.resumed_at != STEPS // 2 + 1:
        raise CheckFailed(f"resumed at step {result.resumed_at}, not {STEPS // 2 + 1}")
    if result.last_loss > LEARNT:
        raise CheckFailed(f"the loss ended at {result.last_loss:.3f}, above {LEARNT}")
    if result.answered != result.asked:
        raise CheckFailed(
            f"the exported model answers {result.answered} of {result.asked} questions as learnt"
        )


def answer(
    checkpoint: Path,
    records: Sequence[list[dict[str, Any]]],
    folder: Path,
    max_tokens: int = 40,
    adapter: Path | None = None,
) -> list[str]:
    """Return a Hugging Face model's greedy answers to the first turn of each conversation."""
    import torch
    from transformers import AutoModelForImageTextToText, AutoProcessor

    from mcore_qwen3vl.verify.curves import located

    processor = AutoProcessor.from_pretrained(checkpoint)
    model = AutoModelForImageTextToText.from_pretrained(checkpoint, dtype=torch.float32)
    if adapter is not None:
        from peft import PeftModel

        model = PeftModel.from_pretrained(model, adapter)
    answers = []
    for messages in records:
        inputs = processor.apply_chat_template(
            located(messages[:1], folder),
            add_generation_prompt=True,
            tokenize=True,
            return_dict=True,
            return_tensors="pt",
        )
        output = model.generate(**inputs, max_new_tokens=max_tokens, do_sample=False)
        new = output[0, inputs["input_ids"].shape[1] :]
        answers.append(processor.decode(new, skip_special_tokens=True))
    return answers
