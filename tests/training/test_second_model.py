"""A second, frozen model: what it is refused for, and that training leaves it alone."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from mcore_qwen3vl.config import Architecture
from mcore_qwen3vl.errors import BadInput
from mcore_qwen3vl.runtime.launch import run_layout
from mcore_qwen3vl.tiny import write_tiny_checkpoint
from mcore_qwen3vl.training.arguments.parser import validate
from mcore_qwen3vl.training.second_model import SecondModel
from mcore_qwen3vl.verification.curves import run_rank
from tests.training.one_step import step_job


def of_flags(student: Path, teacher: Path, *flags: str, ranks: int = 1) -> SecondModel | None:
    common = ("--cpu", "--hf-model", str(student), "--data-path", "x.jsonl", "--train-iters", "1")
    words = [*common, "--loss", "distill", "--teacher", str(teacher), *flags]
    settings = validate(words, ranks).settings
    return SecondModel.from_settings(settings, Architecture.from_hf(student))


@pytest.mark.parametrize(
    ("model", "flags", "message"),
    [
        ({"vision": {"num_position_embeddings": 49}}, (), "num_position_embeddings 49, and --hf"),
        ({"text": {"vocab_size": 1000}}, (), "has vocab_size 1000, and --hf-model has"),
        (
            {"text": {"num_hidden_layers": 5}},
            ("--pipeline-model-parallel-size", "2"),
            "--teacher .*: 5 decoder layers cannot be divided over PP",
        ),
        (
            {"text": {"num_attention_heads": 6, "num_key_value_heads": 2}},
            ("--tensor-model-parallel-size", "4"),
            "--teacher .*: 6 attention heads cannot be divided over TP 4",
        ),
    ],
)
def test_models_that_cannot_share_batches_and_ranks(
    model: dict[str, Any], flags: tuple[str, ...], message: str, dense: Path, tmp_path: Path
) -> None:
    teacher = write_tiny_checkpoint(tmp_path, **model)
    with pytest.raises(BadInput, match=message):
        of_flags(dense, teacher, *flags, ranks=int(flags[-1]) if flags else 1)


def test_a_teacher_with_other_tokens(dense: Path, tmp_path: Path) -> None:
    teacher = write_tiny_checkpoint(tmp_path, seed=3)
    assert of_flags(dense, teacher) is not None
    file = teacher / "tokenizer.json"
    file.write_text(file.read_text().replace("<|box_end|>", "<|other_end|>"))
    with pytest.raises(BadInput, match="has another vocabulary than --hf-model"):
        of_flags(dense, teacher)


def _left_alone(argv: list[str], output: Path) -> list[str]:
    """Train on this rank, and name the parameters of the second model that it has touched."""
    build = SecondModel.build
    built: list[tuple[str, torch.nn.Parameter, torch.Tensor]] = []

    def kept(self: SecondModel, *arguments: Any, **options: Any) -> None:
        build(self, *arguments, **options)
        named = [pair for chunk in self.chunks for pair in chunk.named_parameters()]
        built.extend((name, one, one.detach().clone()) for name, one in named)
        assert not any(module.training for chunk in self.chunks for module in chunk.modules())

    SecondModel.build = kept  # type: ignore[method-assign]
    run_rank(argv, output)
    assert built
    return [
        name
        for name, one, before in built
        if one.requires_grad or one.grad is not None or not torch.equal(one, before)
    ]


def test_training_leaves_the_second_model_alone(dense: Path, data: Path, tmp_path: Path) -> None:
    flags = ("--loss", "distill", "--teacher", str(dense), "--teacher-top-k", "5")
    job = step_job(dense, data, "pp2", *flags, steps=2)
    assert run_layout(_left_alone, 2, job.argv, tmp_path / "output.txt") == [[], []]
