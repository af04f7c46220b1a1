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
from pathlib import Path
from statistics import mean
from typing import Any

import pytest

pytest.importorskip("verl", reason="make test-grpo makes an environment that has VERL and vLLM")
pytest.importorskip("vllm", reason="make test-grpo makes an environment that has VERL and vLLM")

import torch
from peft import PeftModel
from PIL import Image
from pyarrow import parquet
from transformers import AutoModelForImageTextToText, AutoProcessor

from mcore_qwen3vl.tiny import SERVABLE, write_tiny_checkpoint
from mcore_qwen3vl.tiny.records import TASK, write_colour_task

ROOT = Path(__file__).parents[2]
WARM_UP = (
    *("--train-iters", "32", "--global-batch-size", "16", "--micro-batch-size", "16"),
    *("--lr", "3e-3", "--lr-decay-style", "constant", "--weight-decay", "0", "--num-workers", "0"),
)
PROMPTS = 12  # in a step of launch/grpo_tiny.yaml
CHANCE = 1 / len(TASK)
MODEL = "actor_rollout_ref.model"
MEGATRON = "actor_rollout_ref.actor.megatron"
EXPERTS = f"{MEGATRON}.expert_model_parallel_size=2"
ON_TWO = "trainer.n_gpus_per_node=2", "ray_kwargs.ray_init.num_gpus=2"
LORA = (
    *(f"{MODEL}.lora.{option}" for option in ("rank=16", "alpha=32", "merge=True")),
    f"{MODEL}.lora.target_modules=[all]",
    "actor_rollout_ref.actor.optim.lr=3e-3",
)
Metrics = list[dict[str, Any]]


def command(arguments: list[Any], log: Path, **variables: str) -> None:
    """Run a program in the log's folder, in a session of its own; show the log if it fails."""
    with log.open("wb") as output:
        process = subprocess.Popen(
            [str(one) for one in arguments],
            env=os.environ | {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", **variables},
            stdout=output,
            stderr=output,
            cwd=log.parent,  # Hydra writes to the working folder
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
    return warm_up(tmp_path_factory.mktemp("grpo"))


def warm_up(folder: Path, *, moe: bool = False) -> Path:
    """Make a model that answers with letters of colours, whatever it sees, and beside it the task.

    Returns:
        The model's path; the task is in `folder`.
    """
    write_tiny_checkpoint(folder / "tiny", moe=moe, text=SERVABLE["qwen3-vl"])
    write_colour_task(folder / "task")
    train = [ROOT / ".venv/bin/mcore-qwen3vl", "train", "--cpu", "--load-hf", folder / "tiny"]
    paths = ["--hf-model", folder / "tiny", "--data-path", folder / "task/warm_up/train.jsonl"]
    out = ["--save", folder / "run", "--save-hf", folder / "warmed"]
    command([*train, *paths, *out, *WARM_UP], folder / "warm_up.log")
    return folder / "warmed/iter_0000032"


def grpo(model: Path, out: Path, *options: str) -> Metrics:
    """Run the trainer, and return the metrics of each step."""
    task = task_of(model)
    out.mkdir(exist_ok=True)
    metrics = out / "metrics.jsonl"
    metrics.unlink(missing_ok=True)
    program = [sys.executable, "-m", "verl.trainer.main_ppo"]
    config = ["--config-dir", ROOT / "launch", "--config-name", "grpo_tiny"]
    given = [
        f"{MODEL}.path={model}",
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


def test_the_reward_rises_and_a_resumed_run_goes_on(warmed: Path, tmp_path: Path) -> None:
    """The limits leave room for chance, because vLLM draws samples in the order of their arrival.

    The 384 blind answers of four steps have a mean of one third and a standard deviation of 0.024.
    """
    steps = grpo(warmed, tmp_path)
    rewards = [step["critic/rewards/mean"] for step in steps]
    print([round(reward, 2) for reward in rewards])
    assert len(steps) == 24
    assert mean(rewards[:2]) < CHANCE + 0.15
    assert mean(rewards[-4:]) > 2 * CHANCE
    agrees(steps[0], warmed, warmed)
    agrees(steps[12], saved(tmp_path, 12), warmed)

    resumed = grpo(warmed, tmp_path, "trainer.total_training_steps=26")
    assert [step["step"] for step in resumed] == [25, 26]
    assert min(step["critic/rewards/mean"] for step in resumed) > 2 * CHANCE
    agrees(resumed[0], saved(tmp_path, 24), warmed)


@pytest.mark.parametrize("split", ["tensor", "pipeline"])
def test_weights_of_an_actor_on_two_ranks_reach_the_rollout(
    warmed: Path, tmp_path: Path, split: str
) -> None:
    two_steps(warmed, tmp_path, *ON_TWO, f"{MEGATRON}.{split}_model_parallel_size=2")


def test_weights_of_an_moe_actor_reach_the_rollout(tmp_path: Path) -> None:
    two_steps(warm_up(tmp_path / "moe", moe=True), tmp_path, *ON_TWO, EXPERTS)


def test_an_adapter_reaches_the_rollout_and_is_resumed(warmed: Path, tmp_path: Path) -> None:
    two_steps(warmed, tmp_path, *LORA)
    (third,) = grpo(warmed, tmp_path, "trainer.total_training_steps=3", *LORA)
    agrees(third, saved(tmp_path, 2), warmed)


def two_steps(model: Path, out: Path, *options: str) -> None:
    """Train for two steps, and compare the second with the model that the first has saved."""
    twice = "trainer.total_training_steps=2", "trainer.save_freq=1"
    first, second = grpo(model, out, *twice, *options)
    agrees(first, model, model)
    agrees(second, saved(out, 1), model)


def task_of(model: Path) -> Path:
    return model.parents[1] / "task"


def saved(out: Path, step: int) -> Path:
    """Return the path of the model that a run saved after a step."""
    return out / f"checkpoints/global_step_{step}/actor/model/huggingface"


def agrees(step: dict[str, Any], policy: Path, start: Path) -> None:
    """VERL's metric finds what its ban explains, by Hugging Face's model, and no more.

    VERL forbids the rollout, and not the actor, the tokens of images and those beyond the
    tokenizer's. The rollout's other probabilities are therefore higher.

    Args:
        step: the metrics.
        policy: the model of that step, or its adapter.
        start: the model that the run started from.
    """
    found = step["training/rollout_probs_diff_max"]
    first = (step["step"] - 1) * PROMPTS
    rows = parquet.read_table(task_of(start) / "train.parquet").to_pylist()
    batch = [rows[index % len(rows)] for index in range(first, first + PROMPTS)]
    adapted = (policy / "adapter_config.json").exists()
    model = AutoModelForImageTextToText.from_pretrained(
        start if adapted else policy, dtype="float32"
    )
    model = PeftModel.from_pretrained(model, policy) if adapted else model
    expected = largest_rise(model, AutoProcessor.from_pretrained(policy), batch)
    print(f"step {step['step']}: {found:.3e}, by the ban {expected:.3e}")
    # This is float32 noise: the weights of the step before change probabilities by 0.1.
    assert abs(found - expected) < 1e-5


def largest_rise(model: Any, processor: Any, rows: list[dict[str, Any]]) -> float:
    """Return how much the ban raises the probability of an answer, the largest of all rows."""
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
