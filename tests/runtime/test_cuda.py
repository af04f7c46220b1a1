"""Before Blackwell, GPUs are given one hardware queue, by which Megatron orders transfers."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from mcore_qwen3vl.pretended import Settings

PROGRAM = """
import os
from mcore_qwen3vl.runtime.cuda import order_transfers
order_transfers()
print(os.environ.get("CUDA_DEVICE_MAX_CONNECTIONS"))
"""


@pytest.mark.parametrize(
    ("capability", "given", "expected"),
    [(90, None, "1"), (90, "8", "8"), (100, None, "None"), (120, None, "None"), (100, "1", "1")],
)
def test_one_queue_before_blackwell(capability: int, given: str | None, expected: str) -> None:
    environment = {**os.environ, **Settings(capability=capability).environment()}
    environment.pop("CUDA_DEVICE_MAX_CONNECTIONS", None)
    environment |= {} if given is None else {"CUDA_DEVICE_MAX_CONNECTIONS": given}
    command = [sys.executable, "-c", PROGRAM]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == expected


def test_one_queue_where_no_driver_answers() -> None:
    environment = {**os.environ, "LD_PRELOAD": ""}
    environment.pop("CUDA_DEVICE_MAX_CONNECTIONS", None)
    command = [sys.executable, "-c", PROGRAM]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "1"
