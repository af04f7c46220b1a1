"""VERL's own trainer: GRPO with our engine and vLLM on the CPU, the run of docs/verl.md.

It skips itself where VERL or vLLM is not installed; ``make test-grpo`` makes environments for both
and for the warm-up.
"""

from __future__ import annotations

import io
import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from statistics import mean
from typing import Any

import pytest

pytest.importorskip("verl", reason="make test-grpo makes an environment that has VERL and vLLM")
pytest.importorskip("vllm", reason="make test-grpo makes an environment that has VERL and vLLM")

import torch
from PIL import Image
from pyarrow import parquet
from transformers import AutoProcessor, Qwen3VLForConditionalGeneration

from mcore_qwen3vl.tiny import SERVABLE, write_tiny_checkpoint
from mcore_qwen3vl.tiny.colours import TASK, write_colour_task

ROOT = Path(__file__).parents[2]
WARM_UP = (
    *("--train-iters", "32", "--global-batch-size", "16", "--micro-batch-size", "16"),
    *("--lr", "3e-3", "--lr-decay-style", "constant", "--weight-decay", "0", "--num-workers", "0"),
)
PROMPTS = 12  # in a step of launch/grpo_tiny.yaml
CHANCE = 1 / len(TASK)
Metrics = list[dict[str, Any]]


def command(arguments: list[Any], log: Path, **variables: str) -> None:
    """Run a program with all that it starts in a session of its own; show its log if it fails."""
    with log.open("wb") as output:
        process = subprocess.Popen(
            [str(one) for one in arguments],
            env=os.environ | {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", **variables},
            stdout=output,
            stderr=output,
            start_new_session=True,
        )
        try:
            code = process.wait(timeout=1500)
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGTERM)
    assert code == 0, log.read_text("utf-8", "replace")[-4000:]


@pytest.fixture(scope="module")
def warmed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model that answers with letters of colours, whatever it sees, and beside it the task."""
    folder = tmp_path_factory.mktemp("grpo")
    write_tiny_checkpoint(folder / "tiny", text=SERVABLE)
    write_colour_task(folder / "task")
    train = [ROOT / ".venv/bin/mcore-qwen3vl", "train", "--cpu", "--load-hf", folder / "tiny"]
    paths = ["--hf-model", folder / "tiny", "--data-path", folder / "task/warm_up/train.jsonl"]
    out = ["--save", folder / "run", "--save-hf", folder / "warmed"]
    command([*train, *paths, *out, *WARM_UP], folder / "warm_up.log")
    return folder / "warmed/iter_0000032"


@pytest.fixture(scope="module")
def grpo(warmed: Path) -> Callable[..., Metrics]:
    """Return ``grpo(out, *options)``, which runs the trainer and gives the metrics of each step."""
    task = warmed.parents[1] / "task"

    def run(out: Path, *options: str) -> Metrics:
        out.mkdir(exist_ok=True)
        metrics = out / "metrics.jsonl"
        metrics.unlink(missing_ok=True)
        program = [sys.executable, "-m", "verl.trainer.main_ppo"]
        config = ["--config-dir", ROOT / "launch", "--config-name", "grpo_tiny"]
        given = [
            f"actor_rollout_ref.model.path={warmed}",
            f"data.train_files={task}/train.parquet",
            f"data.val_files={task}/val.parquet",
            f"trainer.default_local_dir={out}/checkpoints",
            "trainer.logger=[console,file]",
        ]
        command(
            [*program, *config, *given, *options],
            out / "log",
            VERL_USE_EXTERNAL_MODULES="mcore_qwen3vl.runtime.verl_cpu",
            VERL_FILE_LOGGER_PATH=str(metrics),
            VLLM_CPU_KVCACHE_SPACE="1",
        )
        lines = map(json.loads, metrics.read_text("utf-8").splitlines())
        return [{"step": line["step"], **line["data"]} for line in lines]

    return run


def test_the_reward_rises_and_a_resumed_run_goes_on(
    grpo: Callable[..., Metrics], warmed: Path, tmp_path: Path
) -> None:
    steps = grpo(tmp_path)
    rewards = [step["critic/rewards/mean"] for step in steps]
    print([round(reward, 2) for reward in rewards])
    assert len(steps) == 24
    assert mean(rewards[:2]) < CHANCE + 0.15
    assert mean(rewards[-4:]) > 0.9

    task = warmed.parents[1] / "task"
    weights = "actor/model/huggingface"
    agrees(steps[0], warmed, task)
    agrees(steps[12], tmp_path / "checkpoints/global_step_12" / weights, task)

    resumed = grpo(tmp_path, "trainer.total_training_steps=26")
    assert [step["step"] for step in resumed] == [25, 26]
    assert min(step["critic/rewards/mean"] for step in resumed) > 0.8
    agrees(resumed[0], tmp_path / "checkpoints/global_step_24" / weights, task)


def agrees(step: dict[str, Any], policy: Path, task: Path) -> None:
    """VERL's metric finds what its ban explains, by Hugging Face's model, and no more.

    VERL forbids the rollout, and not the actor, the tokens of images and those beyond the
    tokenizer's. The rollout's other probabilities are therefore higher.
    """
    found = step["training/rollout_probs_diff_max"]
    start = (step["step"] - 1) * PROMPTS
    rows = parquet.read_table(task / "train.parquet").to_pylist()
    batch = [rows[index % len(rows)] for index in range(start, start + PROMPTS)]
    expected = largest_rise(policy, batch)
    print(f"step {step['step']}: {found:.3e}, by the ban {expected:.3e}")
    assert abs(found - expected) < 1e-6


def largest_rise(policy: Path, rows: list[dict[str, Any]]) -> float:
    """Return how much the ban raises the probability of an answer, the largest of all rows."""
    model = Qwen3VLForConditionalGeneration.from_pretrained(policy, dtype=torch.float32)
    processor = AutoProcessor.from_pretrained(policy)
    tokens = processor.tokenizer.convert_tokens_to_ids
    banned = [tokens("<|image_pad|>"), tokens("<|video_pad|>")]
    banned += range(len(processor.tokenizer), model.config.text_config.vocab_size)
    rises = []
    for row in rows:
        image = Image.open(io.BytesIO(row["images"][0]["bytes"]))
        question = {"type": "text", "text": row["prompt"][0]["content"].removeprefix("<image>")}
        turn = {"role": "user", "content": [{"type": "image"}, question]}
        text = processor.apply_chat_template([turn], add_generation_prompt=True, tokenize=False)
        inputs = processor(text=[text], images=[image], return_tensors="pt")
        with torch.no_grad():
            probabilities = model(**inputs).logits[0, -1].double().softmax(-1)
        answers = probabilities[tokens(list(TASK))]
        rises.append(float((answers / (1 - probabilities[banned].sum()) - answers).max()))
    return max(rises)
