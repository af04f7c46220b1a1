"""Prompts of every kind, with Hugging Face's answers and those of a layout."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

import av
import numpy as np
import torch
import transformers
from PIL import Image
from transformers.video_utils import VideoMetadata

from mcore_qwen3vl.config import Architecture
from mcore_qwen3vl.converters.live import load_hf
from mcore_qwen3vl.generation.generate import Generation, generate
from mcore_qwen3vl.generation.sampling import load_generation_config
from mcore_qwen3vl.layout import Layout
from mcore_qwen3vl.model.qwen3vl import Qwen3VLModel, build_chunks
from mcore_qwen3vl.runtime.launch import initialize, run_layout
from mcore_qwen3vl.tiny import YARN, write_tiny_checkpoint

NEW_TOKENS = 24
MODELS: dict[str, dict[str, Any]] = {
    "dense": {"seed": 5},
    "moe": {"moe": True, "seed": 1},
    "yarn": {"text": YARN, "seed": 0},
    "qwen3.5": {"family": "qwen3.5", "seed": 0},
    "qwen3.5-moe": {"family": "qwen3.5", "moe": True, "seed": 0},
}
"""Arguments of :func:`write_tiny_checkpoint`. With these seeds no greedy choice is so close that
float32 rounding could change it; the tests check the margin."""
Conversation = list[dict[str, Any]]


@cache
def checkpoint(model: str) -> Path:
    return write_tiny_checkpoint(Path(mkdtemp()) / "hf", **MODELS[model])


def picture(number: int, height: int, width: int) -> Image.Image:
    pixels = np.random.default_rng(number).integers(0, 256, (height, width, 3), dtype=np.uint8)
    return Image.fromarray(pixels)


@cache
def clip() -> Path:
    """Make two seconds of moving stripes, 40 x 24 pixels at 8 frames a second."""
    path = Path(mkdtemp()) / "clip.mp4"
    with av.open(str(path), "w") as container:
        stream = container.add_stream("mpeg4", rate=8)
        stream.width, stream.height, stream.pix_fmt = 40, 24, "yuv420p"
        columns = np.arange(40)[None, :, None]
        for index in range(16):
            stripes = (columns * 9 + index * 23 + np.array([0, 70, 140])) % 256
            frame = np.broadcast_to(stripes, (24, 40, 3)).astype(np.uint8)
            container.mux(stream.encode(av.VideoFrame.from_ndarray(np.ascontiguousarray(frame))))
        container.mux(stream.encode(None))
    return path


def frames(path: str) -> tuple[np.ndarray, VideoMetadata]:
    """Return all frames, (F, H, W, 3), and the metadata by which a processor samples them."""
    with av.open(path) as container:
        fps = float(container.streams.video[0].average_rate)
        decoded = [frame.reformat(format="rgb24", threads=1) for frame in container.decode(video=0)]
        images = np.stack([frame.to_ndarray() for frame in decoded])
    return images, VideoMetadata(total_num_frames=len(images), fps=fps)


def user(text: str, *media: dict[str, Any]) -> Conversation:
    return [{"role": "user", "content": [*media, {"type": "text", "text": text}]}]


def image(number: int, height: int = 40, width: int = 64) -> dict[str, Any]:
    return {"type": "image", "image": picture(number, height, width)}


def conversations(kind: str) -> list[Conversation]:
    video = {"type": "video", "video": str(clip())}
    kinds = {
        "text": [user("Say something about the sea.")],
        "image": [user("What is this?", image(0))],
        "multi-image": [user("Compare these.", image(1), image(2, 72, 24), image(3, 24, 24))],
        "video": [user("What moves?", video)],
        "batch": [
            user("Why?"),
            user("Describe the picture in a few words, please.", image(4, 56, 32)),
            user("And both?", image(5, 24, 48), video),
            user("Tell a long story about a river, a ship and the people on the other side."),
        ],
    }
    return kinds[kind]


LAYOUTS = {
    "dense": ("single", "tp2", "tp2+sp", "pp2", "pp4"),
    "yarn": ("single", "tp2+sp"),
    "moe": ("single", "tp2", "tp2+sp", "pp2", "ep2xdp2"),
    "qwen3.5": ("single", "tp2", "tp2+sp", "pp2"),
    "qwen3.5-moe": ("single", "tp2+sp", "ep2xdp2"),
}
"""Layouts under which greedy answers are compared, by model."""

KINDS = ("text", "image", "multi-image", "video", "batch")


@dataclass(frozen=True)
class Expected:
    tokens: list[list[int]]  # the answer to each conversation
    margin: float  # smallest lead of a chosen token's logit over the second largest


@cache
def hugging_face_model(model: str) -> Any:
    path = checkpoint(model)
    model = transformers.AutoModelForImageTextToText.from_pretrained(path, dtype=torch.float32)
    return model.eval()


def hugging_face_inputs(
    processor: Any, conversation: Conversation, *, add_generation_prompt: bool = True
) -> dict[str, Any]:
    """Encode one conversation alone, unpadded; the processor samples the frames of its video."""
    parts = [part for message in conversation for part in message["content"]]
    videos = [frames(p["video"]) for p in parts if p["type"] == "video"]
    text = processor.apply_chat_template(conversation, add_generation_prompt=add_generation_prompt)
    return processor(
        text=[text],
        images=[p["image"] for p in parts if p["type"] == "image"] or None,
        videos=[images for images, _ in videos] or None,
        video_metadata=[metadata for _, metadata in videos] or None,
        do_sample_frames=True,
        return_tensors="pt",
    )


@cache
def expected(model: str, kind: str, new_tokens: int = NEW_TOKENS) -> Expected:
    """Return the greedy answers of HF's ``generate``, each conversation by itself."""
    processor = transformers.AutoProcessor.from_pretrained(checkpoint(model))
    tokens, margin = [], float("inf")
    for conversation in conversations(kind):
        inputs = hugging_face_inputs(processor, conversation)
        out = hugging_face_model(model).generate(
            **inputs,
            max_new_tokens=new_tokens,
            do_sample=False,
            output_logits=True,
            return_dict_in_generate=True,
        )
        tokens.append(out.sequences[0, inputs["input_ids"].shape[1] :].tolist())
        best = torch.cat(out.logits).topk(2).values  # (steps, 2)
        margin = min(margin, float((best[:, 0] - best[:, 1]).min()))
    return Expected(tokens, margin)


def answer(
    model: str, batches: list[list[Conversation]], layout: Layout, **options: Any
) -> list[list[list[Generation]]]:
    """Return what every rank of `layout` answers for each batch."""
    path = checkpoint(model)  # written before the ranks are forked
    return run_layout(on_rank, layout.world_size, path, layout, batches, options)


def load(path: Path, layout: Layout) -> tuple[Qwen3VLModel, Any]:
    """Return this rank's loaded model, and the processor."""
    initialize(layout)
    (model,) = build_chunks(Architecture.from_hf(path), layout)
    load_hf(model, path)
    return model, transformers.AutoProcessor.from_pretrained(path)


def on_rank(
    path: Path, layout: Layout, batches: list[list[Conversation]], options: dict[str, Any]
) -> list[list[Generation]]:
    model, processor = load(path, layout)
    defaults = {"max_new_tokens": NEW_TOKENS, "generation_config": load_generation_config(path)}
    return [generate(model, processor, batch, **{**defaults, **options}) for batch in batches]
