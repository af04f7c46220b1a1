"""A tiny model that one data set has taught to answer with thinking, and without."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

from mcore_qwen3vl.tiny import SERVABLE, write_tiny_checkpoint

QUESTION = "17 x 3?"
ANSWERS = {True: "17 x 3 is 51.\n</think>\n\n51", False: "51"}
"""What it generates, by ``enable_thinking``: behind ``<think>``, and behind an empty block."""
STEPS = 40


def train_both_modes(folder: Path) -> Path:
    """Train the records of docs/data.md in turn; return the export."""
    model = write_tiny_checkpoint(
        folder / "model", family="qwen3.5", text=SERVABLE["qwen3.5"], dtype="bfloat16"
    )
    user = {"role": "user", "content": QUESTION}
    thought = {"role": "assistant", "reasoning_content": "17 x 3 is 51.", "content": "51"}
    told = {"role": "assistant", "content": "51"}
    records = [
        {"messages": [user, turn], "chat_template_kwargs": {"enable_thinking": thinks}}
        for thinks, turn in ((True, thought), (False, told))
    ]
    data = folder / "both.jsonl"
    data.write_text("".join(f"{json.dumps(record)}\n" for record in records))
    flags = {
        "--hf-model": model, "--load-hf": model, "--data-path": data, "--seq-length": 128,
        "--train-iters": STEPS, "--global-batch-size": 2, "--micro-batch-size": 2, "--lr": 5e-3,
        "--lr-decay-style": "constant", "--weight-decay": 0, "--num-workers": 0,
        "--save-hf": folder / "export",
    }  # fmt: skip
    words = [str(word) for pair in flags.items() for word in pair]
    command = [sys.executable, "-m", "mcore_qwen3vl", "train", "--cpu", "--fp32", *words]
    subprocess.run(command, check=True)
    return folder / "export" / f"iter_{STEPS:07d}"
