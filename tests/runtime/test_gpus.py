"""Before Blackwell, GPUs are given one hardware queue, by which Megatron orders transfers."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from mcore_qwen3vl.pretended import Settings

PROGRAM = """
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
    ],
)
def test_one_queue_before_blackwell(
    capability: int, given: str | None, several: bool, expected: str
) -> None:
    environment = {**os.environ, **Settings(capability=capability).environment()}
    environment.pop("CUDA_DEVICE_MAX_CONNECTIONS", None)
    environment |= {} if given is None else {"CUDA_DEVICE_MAX_CONNECTIONS": given}
    command = [sys.executable, "-c", PROGRAM.format(several=several)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == expected


def test_one_queue_where_no_driver_answers() -> None:
    environment = {**os.environ, "LD_PRELOAD": ""}
    environment.pop("CUDA_DEVICE_MAX_CONNECTIONS", None)
    command = [sys.executable, "-c", PROGRAM.format(several=False)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "1"
