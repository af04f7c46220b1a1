"""What ``make gpu-check`` reads of its parts, and which results do not hold."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest

from benchmarks import gpu_results


def test_losses_of_two_runs_are_compared(tmp_path: Path) -> None:
    def log(name: str, losses: list[float]) -> Path:
        lines = [json.dumps({"lm loss": loss}) for loss in losses]
        (tmp_path / name).write_text("\n".join(lines) + "\n")
        return tmp_path / name

    right = [6 - i / 10 for i in range(gpu_results.ITERATIONS)]
    torch_spec = log("torch", right)
    assert gpu_results.compare_losses(torch_spec, None, "") == {
        "first loss": 6.0, "last loss": pytest.approx(4.1),
    }  # fmt: skip
    close = log("te", [1.01 * loss for loss in right])
    found = gpu_results.compare_losses(close, torch_spec, "")
    assert found["worst difference"] == pytest.approx(0.01)
    assert found["from"] == "torch"
    for wrong in ([*right[:-1], 5.0], right[:-1], [*right[:-1], math.nan]):
        with pytest.raises(gpu_results.Mismatch):
            gpu_results.compare_losses(log("wrong", wrong), torch_spec, "")
    for other in (log("short", right[:-1]), tmp_path / "absent", log("nan", [math.nan] * 20)):
        with pytest.raises(gpu_results.Mismatch):
            gpu_results.compare_losses(close, other, "")


def test_a_profile_without_kernels_is_a_failure() -> None:
    """Where the profiler may not see the GPU, it would be called idle."""
    gap = {"at ms": 0.0, "ms": 7.0, "phase": "log", "host": "aten::item", "host ms": 1.0}
    found = {
        "ms without profile": 800.0, "busy without profile": 0.75, "ms": 900.0, "busy ms": 600.0,
        "launches": 5447.0, "groups": {"products": {"ms": 410.0, "launches": 900.0}},
        "idle ms by phase": {"log": 300.0}, "longest gaps": [gap],
        "allocator": {"num_alloc_retries": 3},
    }  # fmt: skip
    assert gpu_results.read_profile("step 1\n" + json.dumps(found)) == {
        "ms": 800, "busy": 0.75, "busy ms": 600, "profiled ms": 900, "launches": 5447,
        "kernels, ms": "products 410.0 in 900", "idle ms": "log 300.0",
        "longest gap": "7.0 ms in log: aten::item", "num_alloc_retries": 3,
    }  # fmt: skip
    with pytest.raises(gpu_results.Mismatch, match="no kernel"):
        gpu_results.read_profile(json.dumps({**found, "launches": 0.0, "groups": {}}))


def test_both_specs_must_generate_the_same_tokens(tmp_path: Path) -> None:
    first, second = tmp_path / "torch.json", tmp_path / "te.json"

    def printed(*tokens: int) -> str:
        return "a line of NCCL\n" + json.dumps({"answers": [{"token_ids": tokens}]})

    gpu_results.compare_tokens(first, first, printed(1, 2))
    gpu_results.compare_tokens(second, first, printed(1, 2))
    with pytest.raises(gpu_results.Mismatch, match=r"not those of torch\.json"):
        gpu_results.compare_tokens(second, first, printed(1, 3))


def test_json_is_found_among_lines_of_libraries() -> None:
    report = json.dumps({"findings": [{"ok": True}], "verdict": "equal"}, indent=1)
    printed = f"host:1:1 [0] NCCL INFO {{comm}} Init\n{report}\nhost:1:1 [0] NCCL INFO Done {{}}\n"
    found = gpu_results.read_verify_report(printed)
    assert found == {"compared": 1, "failed": 0, "verdict": "equal"}
