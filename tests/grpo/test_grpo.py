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
from torch import Tensor
from transformers import AutoModelForImageTextToText, AutoProcessor

from mcore_qwen3vl.tiny import SERVABLE, write_tiny_checkpoint
from mcore_qwen3vl.tiny.records import TASK, write_colour_task
from mcore_qwen3vl.tiny.tiny_checkpoint import FamilyName
from tests.half_precision import MORE_NOISE

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


def warm_up(folder: Path, *, family: FamilyName = "qwen3-vl", moe: bool = False) -> Path:
    """Make a model that answers with letters of colours, whatever it sees, and beside it the task.

    Returns:
        The model's path; the task is in `folder`.
    """
    write_tiny_checkpoint(folder / "tiny", family=family, moe=moe, text=SERVABLE[family])
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
    program = [sys.executable, "-P", "-m", "verl.trainer.main_ppo"]
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
    rises(steps)
    agrees(steps[0], warmed, warmed)
    agrees(steps[12], saved(tmp_path, 12), warmed)

    resumed = grpo(warmed, tmp_path, "trainer.total_training_steps=26")
    assert [step["step"] for step in resumed] == [25, 26]
    assert min(step["critic/rewards/mean"] for step in resumed) > 2 * CHANCE
    agrees(resumed[0], saved(tmp_path, 24), warmed)


def test_the_reward_of_qwen3_5_rises(tmp_path: Path) -> None:
    """Its rollout is in bf16, because vLLM's gated delta nets take nothing else on the CPU."""
    model = warm_up(tmp_path / "hybrid", family="qwen3.5")
    steps = grpo(model, tmp_path, "actor_rollout_ref.rollout.dtype=bfloat16")
    rises(steps)
    agrees_but_for_rounding(steps[0], model, model)
    agrees_but_for_rounding(steps[12], saved(tmp_path, 12), model)


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


def rises(steps: Metrics) -> None:
    """Fail if the mean reward does not rise from chance."""
    rewards = [step["critic/rewards/mean"] for step in steps]
    print([round(reward, 2) for reward in rewards])
    assert len(steps) == 24
    assert mean(rewards[:2]) < CHANCE + 0.15
    assert mean(rewards[-4:]) > 2 * CHANCE


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
    answers, allowed = probabilities(loaded(policy, start), policy, rows_of(step, start))
    expected = float((answers / allowed - answers).max())
    print(f"step {step['step']}: {found:.3e}, by the ban {expected:.3e}")
    # This is float32 noise: the weights of the step before change probabilities by 0.1.
    assert abs(found - expected) < 1e-5


def agrees_but_for_rounding(step: dict[str, Any], policy: Path, start: Path) -> None:
    """As :func:`agrees`, with a rollout in bf16, which is as far off as Hugging Face's in bf16."""
    found, rows = step["training/rollout_probs_diff_max"], rows_of(step, start)
    (exact, _), (rounded, allowed) = (
        probabilities(loaded(policy, start, dtype), policy, rows)
        for dtype in ("float32", "bfloat16")
    )
    noise = float((rounded / allowed - exact).abs().max())
    print(f"step {step['step']}: {found:.3e}, by rounding and the ban {noise:.3e}")
    # The weights of the step before change probabilities by 0.04 to 0.1, which is more.
    assert found < MORE_NOISE * noise < 0.03


def loaded(policy: Path, start: Path, dtype: str = "float32") -> Any:
    """Return Hugging Face's model `policy`, which may be an adapter of `start`."""
    if not (policy / "adapter_config.json").exists():
        return AutoModelForImageTextToText.from_pretrained(policy, dtype=dtype)
    base = AutoModelForImageTextToText.from_pretrained(start, dtype=dtype)
    return PeftModel.from_pretrained(base, policy)


def rows_of(step: dict[str, Any], start: Path) -> list[dict[str, Any]]:
    """Return the prompts of a step of a run that started from a model."""
    first = (step["step"] - 1) * PROMPTS
    rows = parquet.read_table(task_of(start) / "train.parquet").to_pylist()
    return [rows[index % len(rows)] for index in range(first, first + PROMPTS)]


def probabilities(model: Any, path: Path, rows: list[dict[str, Any]]) -> tuple[Tensor, Tensor]:
    """Return what a model, with the processor of `path`, says of the answers to n prompts.

    Returns:
        The answers' probabilities (n, answers), in float64, and the probability of all tokens that
        VERL does not forbid (n, 1).
    """
    processor = AutoProcessor.from_pretrained(path)
    tokens = processor.tokenizer.convert_tokens_to_ids
    banned = [tokens("<|image_pad|>"), tokens("<|video_pad|>")]
    banned += range(len(processor.tokenizer), model.config.text_config.vocab_size)
    every = []
    for row in rows:
        image = Image.open(io.BytesIO(row["images"][0]["bytes"]))
        question = {"type": "text", "text": row["prompt"][0]["content"].removeprefix("<image>")}
        turn = {"role": "user", "content": [{"type": "image"}, question]}
        text = processor.apply_chat_template([turn], add_generation_prompt=True, tokenize=False)
        inputs = processor(text=[text], images=[image], return_tensors="pt")
        with torch.no_grad():
            every.append(model(**inputs).logits[0, -1].double().softmax(-1))
    rows_of_all = torch.stack(every)
    allowed = 1 - rows_of_all[:, banned].sum(-1, keepdim=True)
    return rows_of_all[:, tokens(list(TASK))], allowed
