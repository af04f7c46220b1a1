"""Every launch script's final command passes Megatron's own validation at its stated size."""

from __future__ import annotations

import argparse
import re
import shlex
import subprocess
from pathlib import Path

import pytest

from mcore_qwen3vl.config import Architecture
from mcore_qwen3vl.errors import BadInput
from mcore_qwen3vl.shapes import SHAPES

LAUNCH = Path(__file__).parents[2] / "launch"
TASKS = ("sft", "pretrain", "lora")
OTHERS = ("dpo_8b",)
SCRIPTS = [script for task in TASKS for script in sorted(LAUNCH.glob(f"{task}_*.sh"))]
SCRIPTS += [LAUNCH / f"{name}.sh" for name in OTHERS]


@pytest.fixture(autouse=True)
def _hopper(monkeypatch: pytest.MonkeyPatch) -> None:
    """Megatron asks for the device and for Transformer Engine; answer as an H100 node does."""
    from megatron.core.transformer.moe import moe_utils

    for fused in [name for name in vars(moe_utils) if name.startswith("fused_")]:
        monkeypatch.setattr(moe_utils, fused, object())
    for module in ("training.arguments", "core.transformer.transformer_config"):
        monkeypatch.setattr(f"megatron.{module}.is_te_min_version", lambda *_, **__: True)
    monkeypatch.setattr("torch.cuda.get_device_capability", lambda device=None: (9, 0))
    monkeypatch.setattr("megatron.training.arguments.get_device_arch_version", lambda: 9)
    monkeypatch.setenv("CUDA_DEVICE_MAX_CONNECTIONS", "1")


def final_command(script: Path, *arguments: str, **environment: str) -> list[str]:
    """What the script would run, word by word."""
    command = ["bash", str(script), *arguments, "--dry-run"]
    clean = {"PATH": "/usr/bin:/bin", **environment}
    shown = subprocess.run(command, capture_output=True, text=True, check=True, env=clean)
    return shlex.split(shown.stdout)


def parsed(script: Path, tmp_path: Path, *arguments: str, **env: str) -> argparse.Namespace:
    """The script's flags, validated by Megatron on the world size that it starts."""
    from mcore_qwen3vl.training.arguments.parser import validate

    words = final_command(
        script, "--hf-model", str(config_of(script)), "--data-path", "train.jsonl",
        "--save", str(tmp_path), "--load-hf", str(tmp_path), *arguments, **env,
    )  # fmt: skip
    nodes, gpus = (int(words[words.index(w) + 1]) for w in ("--nnodes", "--nproc-per-node"))
    entry = next(i for i, word in enumerate(words) if word.endswith("/train.py"))
    return validate(words[entry + 1 :], nodes * gpus)


def config_of(script: Path) -> Path:
    return SHAPES / f"{script.stem.split('_', 1)[1]}.json"


def test_there_is_a_script_for_every_size_and_task() -> None:
    sizes = {config.stem for config in SHAPES.glob("*.json")}
    assert len(sizes) == 6
    assert {script.stem for script in LAUNCH.glob("*_*.sh")} == {
        *(f"{task}_{size}" for task in TASKS for size in sizes),
        *OTHERS,
    }


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda script: script.stem)
def test_megatron_accepts_the_flags_which_describe_the_model(script: Path, tmp_path: Path) -> None:
    from mcore_qwen3vl.model.transformer_config import transformer_config
    from mcore_qwen3vl.training.feed.provider import data_config
    from mcore_qwen3vl.training.model import fields_from_flags

    args = parsed(script, tmp_path)
    architecture = Architecture.from_hf(config_of(script))
    assert args.global_batch_size % (args.micro_batch_size * args.data_parallel_size) == 0
    assert args.padded_vocab_size == architecture.vocab_size
    assert data_config(args).packing
    config = transformer_config(architecture, spec="te", **fields_from_flags(args))
    assert config.num_layers == architecture.num_hidden_layers
    assert config.num_moe_experts == (architecture.num_experts or None)


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda script: script.stem)
def test_stated_nodes_agree(script: Path) -> None:
    text = script.read_text()
    slurm, own = re.search(r"--nodes=(\d+)", text), re.search(r"^NODES=(\d+)$", text, re.MULTILINE)
    assert slurm is not None
    assert own is not None
    assert slurm[1] == own[1]


def test_optional_flags_are_accepted(tmp_path: Path) -> None:
    from mcore_qwen3vl.model.transformer_config import transformer_config
    from mcore_qwen3vl.training.model import fields_from_flags

    args = parsed(LAUNCH / "sft_30b_a3b.sh", tmp_path, FP8="1", TP_OVERLAP="1", DEEPEP="1")
    assert args.fp8 == "e4m3"
    assert args.moe_router_padding_for_quantization
    assert args.tp_comm_overlap
    assert args.moe_enable_deepep
    architecture = Architecture.from_hf(config_of(LAUNCH / "sft_30b_a3b.sh"))
    assert transformer_config(architecture, spec="te", **fields_from_flags(args)).fp8 == "e4m3"


def test_the_users_flags_win_but_not_over_the_architecture(tmp_path: Path) -> None:
    script = LAUNCH / "sft_2b.sh"
    assert parsed(script, tmp_path, "--lr", "3e-6").lr == 3e-6
    with pytest.raises(BadInput, match=r"--hidden-size sets hidden_size to 4096.*says 2048"):
        parsed(script, tmp_path, "--hidden-size", "4096")


def test_slurm_starts_one_torchrun_a_node(tmp_path: Path) -> None:
    (tmp_path / "scontrol").write_text("#!/bin/sh\nprintf 'n1\\nn2\\n'\n")
    (tmp_path / "scontrol").chmod(0o755)
    words = final_command(
        LAUNCH / "sft_32b.sh",
        PATH=f"{tmp_path}:/usr/bin:/bin",
        SLURM_JOB_ID="7",
        SLURM_JOB_NODELIST="n[1-2]",
    )
    assert words[:2] == ["srun", "--ntasks-per-node=1"]
    assert words[words.index("--rdzv-endpoint") + 1] == "n1:29500"


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda script: script.stem)
def test_the_torch_spec_can_be_appended(script: Path, tmp_path: Path) -> None:
    """Flags that only Transformer Engine knows, and that no flag takes back, are left out."""
    args = parsed(script, tmp_path, "--spec", "torch")
    assert args.spec == ["torch"]
    assert args.moe_grouped_gemm == bool(args.num_experts)
    assert not args.moe_permute_fusion


@pytest.mark.parametrize("apex", [True, False])
def test_gradients_are_accumulated_in_the_product_where_apex_is_installed(
    apex: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The head is Megatron's own layer, which crashes without Apex whatever the spec."""
    from mcore_qwen3vl.training.arguments import parser

    kernel = "fused_weight_gradient_mlp_cuda"
    monkeypatch.setattr(
        parser, "find_spec", lambda name: object() if apex and name == kernel else None
    )
    args = parsed(LAUNCH / "sft_8b.sh", tmp_path)
    assert args.spec == ["te"]
    assert args.gradient_accumulation_fusion == apex


def test_nothing_waits_inside_the_backward_pass_and_one_rank_gathers_the_optimizer(
    tmp_path: Path,
) -> None:
    args = parsed(LAUNCH / "sft_8b.sh", tmp_path)
    assert not args.check_for_nan_in_loss_and_grad
    assert args.dist_ckpt_optim_fully_reshardable
    assert args.distrib_optim_fully_reshardable_mem_efficient
