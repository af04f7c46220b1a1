"""A demo on a tiny model: convert, load on four processes, compare logits, convert back."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import torch
from PIL import Image

from mcore_qwen3vl.config import Architecture
from mcore_qwen3vl.converters.convert import hf_to_mcore, mcore_to_hf
from mcore_qwen3vl.converters.live.load import load_checkpoint
from mcore_qwen3vl.data.encoding.positions import mrope_position_ids
from mcore_qwen3vl.layout import Layout
from mcore_qwen3vl.runtime import cpu
from mcore_qwen3vl.runtime.launch import run_layout
from mcore_qwen3vl.runtime.lifetime import scratch_folder
from mcore_qwen3vl.runtime.parallel import initialize
from mcore_qwen3vl.tiny import write_tiny_checkpoint
from mcore_qwen3vl.verify.checkpoints import compare_checkpoints
from mcore_qwen3vl.verify.measurement import measure

TOLERANCE = 2e-5
"""Largest accepted logit difference, relative to the largest logit: this model's float32
rounding."""

PROMPT = "What is in the picture?"


@dataclass(frozen=True)
class DemoStep:
    """One line of the demo's table; `ok` is None if there is nothing to check."""

    name: str
    result: str
    seconds: float
    ok: bool | None = None


@dataclass
class Demo:
    """The steps that the demo has done, in order."""

    steps: list[DemoStep] = field(default_factory=list)

    @property
    def ok(self) -> bool:
        return all(step.ok is not False for step in self.steps)

    def add(self, name: str, work: Callable[[], tuple[str, bool | None]]) -> None:
        started = time.monotonic()
        result, ok = work()
        self.steps.append(DemoStep(name, result, time.monotonic() - started, ok))


def run_demo(
    *, dense: bool = False, keep: Path | None = None, status: Callable[[str], None] | None = None
) -> Demo:
    """Run the whole chain; nothing is downloaded and no GPU is used."""
    _prepare()
    folder = nullcontext(keep) if keep else scratch_folder()
    with folder as path:
        return _run(path, dense, status or (lambda text: None))


def _run(folder: Path, dense: bool, status: Callable[[str], None]) -> Demo:
    hf, mcore, back = folder / "hf", folder / "mcore", folder / "hf-again"
    layout = Layout(tp=2, sp=True, dp=2) if dense else Layout(tp=2, sp=True, ep=2, dp=2)
    demo = Demo()
    kind = "dense, tied embeddings" if dense else "MoE, published expert layout"

    def write() -> tuple[str, None]:
        write_tiny_checkpoint(hf, moe=not dense, tie=dense, layout="published")
        return f"random weights: {kind}; tokenizer, processor, chat template", None

    def convert() -> tuple[str, None]:
        summary = hf_to_mcore(hf, mcore)
        return f"{summary.counted}, {summary.nbytes / 1e6:.2f} MB, torch_dist", None

    def compare() -> tuple[str, bool]:
        inputs = prompt_inputs(hf)
        expected = hugging_face_logits(hf, inputs)
        found = run_layout(_mcore_logits, layout.world_size, mcore, layout, inputs)
        relative = max(measure(logits, expected).relative for logits in found)
        text = (
            f"{expected.shape[1]} tokens, {int(inputs['image_grid_thw'].prod())} patches: "
            f"off by {relative:.1e} of max |logit| (limit {TOLERANCE:.0e})"
        )
        return text, relative <= TOLERANCE

    def convert_back() -> tuple[str, None]:
        summary = mcore_to_hf(mcore, back)
        return f"{summary.counted}, safetensors", None

    def check() -> tuple[str, bool]:
        report = compare_checkpoints(hf, back)
        tensors, files = report.parts().values()
        return (
            f"{tensors.held} of {tensors.count} tensors bitwise equal, "
            f"{files.held} of {files.count} other files equal"
        ), report.ok

    ranks = f"logits on {layout.world_size} ranks ({layout})"
    for name, work in (
        ("write Hugging Face checkpoint", write),
        ("convert to Megatron-Core", convert),
        (ranks, compare),
        ("convert back", convert_back),
        ("compare with the source", check),
    ):
        status(name)
        demo.add(name, work)
    return demo


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

    model = AutoModelForImageTextToText.from_pretrained(hf, dtype=torch.float32).eval()
    return model(**inputs).logits


@torch.no_grad()
def _mcore_logits(mcore: Path, layout: Layout, inputs: dict[str, torch.Tensor]) -> torch.Tensor:
    """Return the (1, S, V) logits of this rank's data-parallel replica, gathered over TP."""
    from mcore_qwen3vl.model.inputs import visual_inputs
    from mcore_qwen3vl.model.qwen3vl import Qwen3VLModel

    initialize(layout)
    architecture = Architecture.from_hf(mcore / "hf")
    model = Qwen3VLModel.from_hf_config(architecture, **layout.config_overrides()).eval()
    load_checkpoint([model], mcore)
    # Sequence parallelism divides the sequence over TP, so it is padded on the right, which changes
    # no logit before the padding.
    ids = inputs["input_ids"]
    padded = torch.nn.functional.pad(ids, (0, -ids.shape[1] % layout.tp))
    visual = visual_inputs(architecture, padded, inputs["pixel_values"], inputs["image_grid_thw"])
    positions, _ = mrope_position_ids(architecture, padded, inputs["image_grid_thw"])
    logits = model(padded, positions, visual=visual, runtime_gather_output=True)
    return logits[:, : ids.shape[1]]


def _prepare() -> None:
    """Import the modules that every rank needs, once: the ranks are forked from this process."""
    cpu.install()
    import mcore_qwen3vl.model.qwen3vl  # noqa: F401
