"""``make gpu-check`` and the Python example do not break at once, on the pretended device.

Floats mean nothing there, so parity must fail by its findings; everything else must pass.
"""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from mcore_qwen3vl.config import Architecture
from mcore_qwen3vl.layout import Layout
from mcore_qwen3vl.pretended import Settings
from mcore_qwen3vl.tiny import write_tiny_checkpoint
from mcore_qwen3vl.verify.parity.batches import build_batch
from mcore_qwen3vl.verify.parity.case import Case
from tests.docs.markdown import ROOT, blocks


@pytest.fixture
def gpu_check(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(ROOT))
    from benchmarks import gpu_check

    return gpu_check


def environment() -> dict[str, str]:
    return {**os.environ, **Settings().environment(), "OMP_NUM_THREADS": "1"}


@pytest.mark.slow  # a dozen processes that import everything
def test_every_part_runs(tmp_path: Path) -> None:
    out = tmp_path / "report"
    command = ["make", "gpu-check", f"ARGS=--shape tiny --gpu h100-80gb --gpus 2 --out {out}"]
    done = subprocess.run(
        command, cwd=ROOT, env=environment(), capture_output=True, text=True, check=False
    )
    parts = {part["name"]: part for part in json.loads((out / "report.json").read_text())}
    found = {name: (part["status"], part["found"]) for name, part in parts.items()}
    assert done.returncode != 0
    parity = {name for name in parts if name.startswith("parity")}
    assert len(parity) == 8
    for name in parity:
        assert parts[name]["status"] == "exit 1", found[name]
        compared = parts[name]["found"]["compared"]
        assert parts[name]["found"]["failed"] > 0.9 * compared, found[name]
    experts = "experts, torch spec, bf16"
    assert parts[experts]["status"] == "exit 1", found[experts]
    assert len(parts[experts]["found"]) == 3, found[experts]
    attention = "attention kernels, torch spec, bf16"
    assert parts[attention]["status"] == "exit 1", found[attention]
    assert parts[attention]["found"]["compared"] == 16, found[attention]
    nonsense = {*parity, experts, attention}
    others = {n: part["status"] for n, part in parts.items() if n not in nonsense}
    assert set(others.values()) == {"ok"}, found
    assert len(others) == 14
    assert parts["versions"]["found"]["GPUs"] == ["Pretended GPU, 80.0 GiB"]
    assert parts["training step, torch"]["found"]["peak memory GB"] > 0
    # With the same loop, flags and data, memory is the same.
    memory = parts["memory against its rehearsal"]["found"]
    assert memory["measured / rehearsed"] == pytest.approx(1, abs=0.02)
    assert memory["measured / modelled seconds"] > 0
    assert (out / "report.md").read_text().count("\n| ") == len(parts) + 1


def test_a_part_that_fails_or_hangs_is_reported_and_the_next_one_runs(
    gpu_check: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def parts(options: object) -> list[gpu_check.Part]:
        programs = {
            "crash": "raise SystemExit(3)",
            "hang": "import time; time.sleep(60)",
            "nonsense": "print('no JSON')",
            "good": "print('log\\n{\"x\": 1}')",
        }
        return [
            gpu_check.Part(name, [sys.executable, "-c", code], 2, gpu_check.last_json)
            for name, code in programs.items()
        ]

    monkeypatch.setattr(gpu_check, "parts", parts)
    assert gpu_check.main(["--out", str(tmp_path)]) == 1
    found = {p["name"]: p for p in json.loads((tmp_path / "report.json").read_text())}
    statuses = {name: part["status"] for name, part in found.items()}
    assert statuses == {"crash": "exit 3", "hang": "timeout", "nonsense": "unread", "good": "ok"}
    assert found["good"]["found"] == {"x": 1}
    assert gpu_check.main(["--out", str(tmp_path)]) == 1


@pytest.mark.slow
def test_attention_is_compared_as_it_is_computed(
    gpu_check: Any, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """On the host, half precision is within the limit, and a key too many is not."""
    from benchmarks import attention
    from mcore_qwen3vl.model.decoder import attention as ours

    assert attention.main(["--device", "cpu"]) == 0
    worst = gpu_check.worst_kernels(capsys.readouterr().out)
    assert worst["compared"] == 16
    assert 0 < worst["worst"] < attention.LIMIT
    run, causal = attention._run, ours._mask
    monkeypatch.setattr(ours, "_mask", lambda q, k, valid: torch.ones(q, k, dtype=torch.bool))

    def right_on_the_host(*arguments: Any) -> Any:
        with monkeypatch.context() as patched:
            if arguments[-1] == torch.float32:
                patched.setattr(ours, "_mask", causal)
            return run(*arguments)

    monkeypatch.setattr(attention, "_run", right_on_the_host)
    assert attention.main(["--device", "cpu"]) == 1


def test_losses_of_the_specs_are_compared(gpu_check: Any, tmp_path: Path) -> None:
    def log(name: str, losses: list[float]) -> Path:
        lines = [json.dumps({"lm loss": loss}) for loss in losses]
        (tmp_path / name).write_text("\n".join(lines) + "\n")
        return tmp_path / name

    torch_spec: list[float] = []
    right = [6 - i / 10 for i in range(gpu_check.ITERATIONS)]
    assert gpu_check.compare_losses(log("torch", right), torch_spec, "") == {
        "first loss": 6.0, "last loss": pytest.approx(4.1),
    }  # fmt: skip
    found = gpu_check.compare_losses(log("te", [1.01 * loss for loss in right]), torch_spec, "")
    assert found["worst difference"] == pytest.approx(0.01)
    for wrong in ([*right[:-1], 5.0], right[:-1], [*right[:-1], math.nan]):
        with pytest.raises(gpu_check.Mismatch):
            gpu_check.compare_losses(log("wrong", wrong), torch_spec, "")


DETACHED = """
import os, subprocess, sys, time
child = subprocess.Popen(["sleep", "60"], start_new_session=True)
print(child.pid, flush=True)
time.sleep(float(sys.argv[1]))
"""


@pytest.mark.parametrize("seconds", [60, 0])
def test_processes_in_sessions_of_their_own_end_with_their_part(
    gpu_check: Any, tmp_path: Path, seconds: int
) -> None:
    """Such are torchrun's workers, which would otherwise hold the GPUs in later parts."""
    command = [sys.executable, "-c", DETACHED, str(seconds)]
    part = gpu_check.Part("detached", command, 3, lambda printed: {"child": int(printed)})
    gpu_check.run(part, tmp_path, time.monotonic() + 60)
    assert part.status == ("timeout" if seconds else "ok")
    process = Path("/proc", str(part.found["child"]))
    assert not process.exists() or "\nState:\tZ" in (process / "status").read_text()


def test_json_is_found_among_lines_of_libraries(gpu_check: Any) -> None:
    report = json.dumps({"findings": [{"ok": True}], "verdict": "equal"}, indent=1)
    printed = f"host:1:1 [0] NCCL INFO {{comm}} Init\n{report}\nhost:1:1 [0] NCCL INFO Done {{}}\n"
    found = gpu_check.worst_finding(printed)
    assert found == {"compared": 1, "failed": 0, "verdict": "equal"}


@pytest.mark.parametrize("gpus", range(2, 20))
def test_any_number_of_gpus_has_a_layout(gpu_check: Any, dense: Path, moe: Path, gpus: int) -> None:
    used = gpu_check.even(gpus)
    assert gpus // 2 < used <= gpus or used == 16
    for name, model in (("dense", dense), ("moe", moe)):
        words = gpu_check.layout(name, used)
        words.remove("--sp")
        sizes = {flag[2:]: int(n) for flag, n in zip(words[::2], words[1::2], strict=True)}
        planned = Layout(**sizes, sp=True)
        assert planned.world_size == used
        architecture = Architecture.from_hf(model)
        batch = build_batch("text", architecture)
        Case(planned).validate(architecture, (batch,))


@pytest.mark.slow  # twenty seconds of imports
def test_python_example(tmp_path: Path) -> None:
    """The model lands on the device, trains and is exported; its losses mean nothing."""
    (example,) = blocks(ROOT / "docs" / "python.md", "python")
    write_tiny_checkpoint(tmp_path / "model")
    (tmp_path / "example.py").write_text(
        example.text + "\nassert next(model.parameters()).is_cuda\n"
    )
    command = [sys.executable, "-m", "mcore_qwen3vl.pretended", "example.py"]
    done = subprocess.run(
        command, cwd=tmp_path, env=environment(), capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("loss") == 3
    assert (tmp_path / "tuned" / "model.safetensors").exists()
