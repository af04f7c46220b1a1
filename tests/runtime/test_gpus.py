"""Before Blackwell, GPUs have one hardware queue; compiled functions need no C compiler."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from mcore_qwen3vl.simulated_gpu import Settings
from tests.docs.markdown import ROOT

QUEUES = """
import os
from mcore_qwen3vl.runtime.gpus import order_transfers
order_transfers(several_queues={several})
print(os.environ.get("CUDA_DEVICE_MAX_CONNECTIONS"))
"""


@pytest.mark.parametrize(
    ("capability", "given", "several", "expected"),
    [
        (90, None, False, "1"),
        (90, "8", False, "8"),
        (100, None, False, "None"),
        (120, None, False, "None"),
        (100, "1", False, "1"),
        (90, None, True, "32"),
        (90, "1", True, "1"),
        (None, None, False, "1"),  # no driver answers
    ],
)
def test_one_queue_before_blackwell(
    capability: int | None, given: str | None, several: bool, expected: str
) -> None:
    environment = {**os.environ, "LD_PRELOAD": ""}
    environment |= {} if capability is None else Settings(capability=capability).environment()
    environment.pop("CUDA_DEVICE_MAX_CONNECTIONS", None)
    environment |= {} if given is None else {"CUDA_DEVICE_MAX_CONNECTIONS": given}
    command = [sys.executable, "-c", QUEUES.format(several=several)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == expected


PROGRAM = """
import os, sys
os.environ.pop("CC", None)
os.environ["PATH"] = "/nowhere"
if sys.argv[1] == "as training":
    from mcore_qwen3vl.training.run import _choose_device
    _choose_device(cpu=False)
elif sys.argv[1] == "as generating":
    from mcore_qwen3vl.cli.inference import quiet_and_choose_backend
    quiet_and_choose_backend(cpu=False)
import torch
from megatron.core.fusions.fused_bias_swiglu import swiglu
print(tuple(swiglu(torch.randn(4, 8, device="cuda")).shape))
"""


@pytest.mark.slow  # half a minute of imports
@pytest.mark.parametrize("way", ["as training", "as generating", "as megatron"])
def test_fused_functions_run_without_a_compiler(way: str, tmp_path: Path) -> None:
    (tmp_path / "program.py").write_text(PROGRAM)
    environment = {
        **os.environ,
        **Settings().environment({"TORCHDYNAMO_DISABLE": "0"}),
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": str(ROOT),
        "TORCHINDUCTOR_CACHE_DIR": str(tmp_path / "inductor"),
        "TRITON_CACHE_DIR": str(tmp_path / "triton"),
    }
    # It is not run as a rank, whose record of operators would keep Dynamo out.
    command = [sys.executable, "program.py", way]
    done = subprocess.run(
        command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False
    )
    if way == "as megatron":  # the error that our choice of device avoids
        assert done.returncode != 0
        assert "compiler" in done.stderr
    else:
        assert done.returncode == 0, done.stderr
        assert done.stdout.strip() == "(4, 4)"
