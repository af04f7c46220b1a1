"""Checkpoints that vLLM can serve, prompts of every kind, and vLLM's results for them.

Every file here skips itself where vLLM is not installed; ``make test-vllm`` makes an environment
that has it. vLLM runs in separate processes.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from mcore_qwen3vl.converters.convert import hf_to_mcore, mcore_to_hf
from mcore_qwen3vl.tiny import SERVABLE, write_tiny_checkpoint
from mcore_qwen3vl.tiny.tiny_checkpoint import FamilyName
from tests.data.conftest import write_png, write_video


def write_servable(path: Path, kind: str, dtype: str = "float32", **text: Any) -> Path:
    """Write a Hugging Face checkpoint of `kind`: dense, tied, moe, hybrid, ..., hybrid_moe.

    `text` overrides fields of the text config.
    """
    family: FamilyName = "qwen3.5" if kind.startswith("hybrid") else "qwen3-vl"
    return write_tiny_checkpoint(
        path,
        family=family,
        moe=kind.endswith("moe"),
        tie=kind.endswith("tied"),
        dtype=dtype,
        text=SERVABLE[family] | text,
    )


def environment() -> dict[str, str]:
    """Return the environment of a process with vLLM: no network, and little memory."""
    return os.environ | {
        "HF_HUB_OFFLINE": "1",
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_LOGGING_LEVEL": "ERROR",
        "VLLM_NO_USAGE_STATS": "1",
    }


def in_process(script: str, *arguments: Path) -> None:
    """Run a script of this folder in its own process.

    Raises:
        RuntimeError: the script failed; the message is the end of its error output.
    """
    command = [sys.executable, Path(__file__).parent / script, *arguments]
    variables = environment() | {"VLLM_ENABLE_V1_MULTIPROCESSING": "0"}  # errors reach the script
    done = subprocess.run(
        command, capture_output=True, text=True, check=False, timeout=600, env=variables
    )
    if done.returncode:
        raise RuntimeError(done.stderr[-4000:])


@dataclass(frozen=True)
class Made:
    """A model in both forms: our checkpoint, and the export from it."""

    mcore: Path
    exported: Path


Models = Callable[[str], Made]


@pytest.fixture(scope="session")
def models(tmp_path_factory: pytest.TempPathFactory) -> Models:
    """Return a function that gives the model of a kind, made once."""
    made: dict[str, Made] = {}

    def make(kind: str) -> Made:
        if kind not in made:
            folder = tmp_path_factory.mktemp(kind)
            hf_to_mcore(write_servable(folder / "hf", kind), folder / "mcore")
            mcore_to_hf(folder / "mcore", folder / "exported", expert_layout="published")
            made[kind] = Made(folder / "mcore", folder / "exported")
        return made[kind]

    return make


@dataclass(frozen=True)
class Prompt:
    """One user turn, with parts in Hugging Face's form and paths, and an answer to score."""

    parts: list[dict[str, str]]
    answer: str

    @property
    def conversation(self) -> list[dict[str, Any]]:
        """The conversation in the form of `generate` and data sets."""
        return [{"role": "user", "content": self.parts}]

    @property
    def openai(self) -> list[dict[str, Any]]:
        """The conversation in the form of OpenAI's clients."""
        content = [
            part
            if part["type"] == "text"
            else {"type": f"{kind}_url", f"{kind}_url": {"url": f"file://{part[kind]}"}}
            for part in self.parts
            for kind in [part["type"]]
        ]
        return [{"role": "user", "content": content}]


Prompts = dict[str, Prompt]
InVllm = Callable[..., dict[str, Any]]


@pytest.fixture(scope="session")
def prompts(tmp_path_factory: pytest.TempPathFactory) -> Prompts:
    """Return one prompt of each kind."""
    folder = tmp_path_factory.mktemp("media")
    sizes = [(24, 40), (50, 31), (64, 64)]
    images = [
        {"type": "image", "image": str(write_png(folder / f"{i}.png", *size, seed=i))}
        for i, size in enumerate(sizes)
    ]
    clip = write_video(folder / "clip.mp4", frames=23, height=32, width=48)

    def text(said: str) -> dict[str, str]:
        return {"type": "text", "text": said}

    return {
        "text": Prompt([text("Say something about the sea.")], "It is wide, and blue at noon."),
        "image": Prompt([images[0], text("What is this?")], "Noise in many colours."),
        "several images": Prompt(
            [images[1], images[2], text("and"), images[0], text("Compare these.")],
            "The second is the largest of the three.",
        ),
        "video": Prompt(
            [{"type": "video", "video": str(clip)}, text("What moves?")], "An edge fades."
        ),
    }


@pytest.fixture(scope="session")
def in_vllm(tmp_path_factory: pytest.TempPathFactory, prompts: Prompts) -> InVllm:
    """Return ``in_vllm(checkpoint, adapters, **options)``: it runs `engine.py` on all prompts."""

    def run(
        checkpoint: Path,
        adapters: Mapping[str, Path | None],
        *,
        score: bool = True,
        together: bool = False,
        **options: Any,
    ) -> dict[str, Any]:
        folder = tmp_path_factory.mktemp("job")
        job = {
            "model": str(checkpoint),
            "score": score,
            "together": together,
            "options": options,
            "adapters": {n: None if p is None else str(p) for n, p in adapters.items()},
            "prompts": {
                name: {"conversation": prompt.openai, "answer": prompt.answer}
                for name, prompt in prompts.items()
            },
        }
        (folder / "job.json").write_text(json.dumps(job), "utf-8")
        in_process("engine.py", folder / "job.json", folder / "result.json")
        return json.loads((folder / "result.json").read_text("utf-8"))

    return run
