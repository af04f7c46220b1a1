"""The command and ranks of launch scripts, on the workbench that all tests share."""

from __future__ import annotations

import json
import shlex
import subprocess
import sys
from collections.abc import Callable
from contextlib import nullcontext
from importlib.metadata import distributions
from pathlib import Path
from typing import Any

import pytest
import torch

from mcore_qwen3vl.published_configs import PUBLISHED
from mcore_qwen3vl.simulated_gpu import Report, Workbench
from mcore_qwen3vl.tiny import tiny_config
from mcore_qwen3vl.tiny.records import write_half_images
from mcore_qwen3vl.tiny.tiny_checkpoint import write_stand_in
from tests.docs.markdown import ROOT

Command = Callable[..., tuple[int, Any]]
Rehearse = Callable[..., Report]

# Host syncs inside forward and backward, by the beginning of their place.
# The alltoall dispatcher copies the number of tokens of each expert to the host. Transfers between
# pipeline stages are batched, and Megatron synchronises the device after them.
DISPATCHER = "megatron/core/transformer/moe/token_dispatcher.py"
TRANSFERS = "megatron/core/pipeline_parallel/p2p_communication.py"
# Transformer Engine's CUTLASS kernel copies the addresses of its operands from pageable memory,
# before which CUDA may wait for the stream.
GROUPED_PRODUCTS = "transformer_engine/pytorch/cpp_extensions/gemm.py"
KNOWN_HOST_SYNCS = (DISPATCHER, TRANSFERS, GROUPED_PRODUCTS)

RECORDED_WITH = {"torch": "2.13", "te": "2.11"}
"""The torch with which the memory of each spec was recorded."""


def skip_other_torch(spec: str) -> None:
    """Skip a test of recorded memory under another torch than it was recorded with."""
    if not torch.__version__.startswith(RECORDED_WITH[spec]):
        pytest.skip(f"recorded with torch {RECORDED_WITH[spec]}, whose kernels keep other tensors")


# By its distribution: the tests' CPU backend hides the package itself from this process.
WITHOUT_TE = pytest.mark.skipif(
    not any(distribution.name == "transformer_engine_torch" for distribution in distributions()),
    reason="Transformer Engine is not installed: CONTRIBUTING.md says how its spec is tested",
)


@pytest.fixture
def command(
    workbench: Workbench, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Command:
    """Return a function that runs ``rehearse --json``, and gives its exit code and output."""
    from mcore_qwen3vl.cli import main
    from mcore_qwen3vl.rehearsal import rehearse

    # The tests' CPU backend hides an installed Transformer Engine, and a rehearsal would choose the
    # torch spec.
    if "transformer_engine" in sys.modules and sys.modules["transformer_engine"] is None:
        monkeypatch.delitem(sys.modules, "transformer_engine")
    # Imports take fifteen seconds; the shared workbench has done them.
    monkeypatch.setattr(rehearse, "Workbench", lambda *_: nullcontext(workbench))

    def call(*words: object) -> tuple[int, Any]:
        code = 0
        try:
            main(["rehearse", "--json", *map(str, words)])
        except SystemExit as left:
            code = int(left.code or 0)
        return code, json.loads(capsys.readouterr().out)

    return call


@pytest.fixture(scope="session")
def config(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a directory with nothing but the config of a tiny MoE model."""
    folder = tmp_path_factory.mktemp("config")
    (folder / "config.json").write_text(json.dumps(tiny_config(moe=True)))
    return folder


@pytest.fixture(scope="session")
def rehearse(workbench: Workbench, tmp_path_factory: pytest.TempPathFactory) -> Rehearse:
    """Return a function that runs two iterations of a launch script as one of its ranks."""
    data = write_half_images(tmp_path_factory.mktemp("rehearsal") / "data")

    def run(
        script: str,
        *flags: str,
        rank: int = 0,
        layers: int | None = None,
        vision_blocks: int | None = None,
        model: Path | None = None,
        gpus_per_node: int = 8,
        spec: str = "torch",
    ) -> Report:
        if model is None:
            model = tmp_path_factory.mktemp("models") / "model"
            shape = PUBLISHED / f"{script.split('_', 1)[1]}.json"
            write_stand_in(shape, model, layers=layers, vision_blocks=vision_blocks)
        words = final_command(
            script, "--spec", spec, "--hf-model", str(model), "--data-path", str(data),
            "--train-iters", "2", "--lr-warmup-fraction", "0", "--num-workers", "0", *flags,
            gpus_per_node=gpus_per_node,
        )  # fmt: skip
        nodes, gpus = (int(words[words.index(w) + 1]) for w in ("--nnodes", "--nproc-per-node"))
        entry = next(i for i, word in enumerate(words) if word.endswith("/train.py"))
        program = "mcore_qwen3vl.rehearsal.rank:main"
        _, report = workbench.call(program, words[entry + 1 :], rank=rank, world_size=nodes * gpus)
        return report

    return run


def final_command(script: str, *flags: str, gpus_per_node: int) -> list[str]:
    """Return the words of the command that a launch script would run."""
    command = ["bash", str(ROOT / "launch" / f"{script}.sh"), *flags, "--dry-run"]
    environment = {"PATH": "/usr/bin:/bin", "GPUS_PER_NODE": str(gpus_per_node)}
    shown = subprocess.run(command, capture_output=True, text=True, check=True, env=environment)
    return shlex.split(shown.stdout)
