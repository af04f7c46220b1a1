"""``make gpu-check`` and the Python example do not break at once, on the simulated GPU.

Floats mean nothing there, so parity must fail by its findings; everything else must pass.
"""

from __future__ import annotations

import json
import math
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from itertools import chain, repeat
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open

from mcore_qwen3vl.config import Architecture
from mcore_qwen3vl.layout import Layout
from mcore_qwen3vl.model.decoder.experts import _has_kernel
from mcore_qwen3vl.rehearsal.step_time import Constants
from mcore_qwen3vl.simulated_gpu import Settings
from mcore_qwen3vl.tiny import write_tiny_checkpoint
from mcore_qwen3vl.verification.parity.case import ParityCase, build_batch
from mcore_qwen3vl.verification.parity.comparison import verify_parity
from tests.docs.markdown import ROOT, blocks
from tests.leftovers import run_and_end


@pytest.fixture
def gpu_check(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(ROOT))
    from benchmarks import gpu_check

    return gpu_check


def environment() -> dict[str, str]:
    return {**os.environ, **Settings().environment(), "OMP_NUM_THREADS": "1"}


PARTS = (
    "^(?!parity|delta net|generate.*Qwen)|^parity, .*, (dense, one GPU|moe, 4 GPUs|wide, compiled)$"
)
"""Of parity three parts of a minute, and none that calls flash-linear-attention's own kernels."""


@pytest.mark.slow  # thirty processes that import everything
def test_every_part_runs(tmp_path: Path) -> None:
    """With four GPUs there are pipelines; the shapes that their stages exchange must arrive."""
    out = tmp_path / "report"
    command = [sys.executable, "benchmarks/gpu_check.py", "--shape", "tiny", "--gpu", "h100-80gb"]
    command += ["--gpus", "4", "--patience", "4", "--only", PARTS, "--out", str(out)]
    done = subprocess.run(
        command, cwd=ROOT, env=environment(), capture_output=True, text=True, check=False
    )
    parts = {part["name"]: part for part in json.loads((out / "report.json").read_text())}
    found = {name: (part["status"], part["found"]) for name, part in parts.items()}
    assert done.returncode != 0
    parity = {name for name in parts if name.startswith("parity")}
    assert len(parity) == 3
    for name in parity:
        assert parts[name]["status"] == "exit 1", found[name]
        compared = parts[name]["found"]["compared"]
        assert parts[name]["found"]["failed"] > 0.9 * compared, found[name]
        assert "logits" in parts[name]["found"]["failed first"], found[name]
    experts = "experts, torch spec, bf16"
    assert parts[experts]["status"] == "exit 1", found[experts]
    assert len(parts[experts]["found"]) == 3, found[experts]
    attention = "attention kernels, torch spec, bf16"
    assert parts[attention]["status"] == "exit 1", found[attention]
    assert parts[attention]["found"]["compared"] == 16, found[attention]
    rates = parts["rates"]
    constants = {"gemm", "attention", "memory", "launch_us", "wait_us"}
    assert constants <= set(rates["found"])
    # What memory holds that no kernel wrote is the same for both dtypes, or is not.
    assert rates["status"] in ("ok", "exit 1"), found["rates"]
    assert (out / "constants.json").exists() is (rates["status"] == "ok")
    absent = {name for name, part in parts.items() if part["status"] == "not applicable"}
    te = {f"{what}, tiny, te" for what in ("training step", "training run", "loop profile")}
    version_3 = "attention kernels, FlashAttention 3, bf16"
    assert absent == {"training loop, dense, FP8", version_3, *te}
    expert_parallel = "training loop, torch spec, MoE, EP 2"
    assert parts[expert_parallel]["status"] in ("ok", "differs"), found[expert_parallel]
    assert "worst difference" in parts[expert_parallel]["found"], found[expert_parallel]
    nonsense = {*parity, experts, attention, "rates", expert_parallel, *absent}
    others = {n: part["status"] for n, part in parts.items() if n not in nonsense}
    assert set(others.values()) == {"ok"}, found
    assert len(others) == 18
    loops = {name.split("spec, ")[1] for name in others if name.startswith("training loop")}
    hybrid = {"Qwen3.5", "Qwen3.5, MTP"}
    assert loops == {"dense", "MoE", "dense, LoRA", "dense, TP 2, PP 2", *hybrid}
    assert parts["versions"]["found"]["GPUs"] == ["Simulated GPU, 80.0 GiB"]
    # With the same step or loop, flags and data, memory is the same.
    for what in ("step, tiny, torch", "step, tiny, hf", "run, tiny, torch"):
        name = f"training {what}"
        measured = parts[name]["found"]
        assert measured["measured / rehearsed"] == pytest.approx(1, abs=0.02), found[name]
        assert measured["measured / modelled seconds"] > 0
    report = (out / "report.md").read_text()
    assert report.count("\n| ") == len(parts) + 1
    assert f": {len(parts)} parts of {len(parts)} are over." in report
    assert "Not finished" not in report


@pytest.mark.slow
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
            gpu_check.Part(name, [sys.executable, "-c", code], 1, gpu_check.find_json)
            for name, code in programs.items()
        ] + [gpu_check.Part("zero", ["true"], 1, lambda printed: {"x": 1 / 0})]

    monkeypatch.setattr(gpu_check, "all_parts", parts)
    monkeypatch.setattr(gpu_check, "MARGIN", 0)
    assert gpu_check.main(["--out", str(tmp_path)]) == 1
    found = {p["name"]: p for p in json.loads((tmp_path / "report.json").read_text())}
    statuses = {name: part["status"] for name, part in found.items()}
    others = {"nonsense": "unread", "good": "ok", "zero": "unread"}
    assert statuses == {"crash": "exit 3", "hang": "timeout", **others}
    assert found["good"]["found"] == {"x": 1}
    assert gpu_check.main(["--out", str(tmp_path)]) == 1


@pytest.mark.slow
def test_attention_is_compared_as_it_is_computed(
    gpu_check: Any, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """On the host, half precision is within the limit, and a key too many is not."""
    from benchmarks import kernels
    from mcore_qwen3vl.model.decoder import attention as ours

    assert kernels.main(["--device", "cpu"]) == 0
    worst = gpu_check.read_worst_kernel(capsys.readouterr().out)
    assert worst["compared"] == 16
    assert 0 < worst["worst"] < kernels.LIMIT
    run, causal = kernels._run_with_gradients, ours._mask
    monkeypatch.setattr(ours, "_mask", lambda q, k, valid: torch.ones(q, k, dtype=torch.bool))

    def right_on_the_host(*arguments: Any) -> Any:
        with monkeypatch.context() as patched:
            if arguments[-1] == torch.float32:
                patched.setattr(ours, "_mask", causal)
            return run(*arguments)

    monkeypatch.setattr(kernels, "_run_with_gradients", right_on_the_host)
    assert kernels.main(["--device", "cpu"]) == 1


def test_a_gradient_that_is_no_number_is_an_error(
    gpu_check: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    from benchmarks import kernels
    from mcore_qwen3vl.model.decoder import delta_net as nets

    convolve, rule = nets._PLAIN

    def convolve_wrongly(x: torch.Tensor, weight: torch.Tensor, *others: Any) -> Any:
        if x.dtype == torch.bfloat16:
            weight.register_hook(lambda gradient: gradient * math.nan)
        return convolve(x, weight, *others)

    monkeypatch.setattr(nets, "_PLAIN", (convolve_wrongly, rule))
    assert next(kernels.compare_delta_net(torch.device("cpu")))[1] == math.inf


@pytest.mark.slow
def test_the_loss_that_is_compared_falls(gpu_check: Any, models: Path) -> None:
    """On the CPU; a wrong gradient then shows in the losses."""
    (part,) = (
        part for part in gpu_check.training_parts(models.parent, ["torch"], 1, 9)
        if part.name == "training loop, torch spec, dense"
    )  # fmt: skip
    command = [*part.command, "--cpu", "--num-workers", "0"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    found = part.read(done.stdout)
    assert found["first loss"] > 6
    assert found["last loss"] < 3.5


def test_what_the_machine_cannot_run_is_not_applicable(
    gpu_check: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is said in words, and is no failure."""
    kernels = ["Qwen3.5", "Qwen3.5, MTP"]
    ways = ["MoE, EP 2", "dense, TP 2, PP 2", "dense, FP8"]
    for gpus, specs, capability, package, absent in (
        (1, ["torch"], 9, None, [*kernels, *ways]),
        (1, ["torch"], 9, "fla", ways),
        (1, ["torch", "te"], 9, "fla", ways[:2]),
        (3, ["torch", "te"], 8, "fla", ways[1:]),
        (4, ["torch", "te"], 10, None, kernels),
    ):
        monkeypatch.setattr(gpu_check, "find_spec", lambda name, found=package: found)
        loops = list(gpu_check.training_parts(tmp_path, specs, gpus, capability))
        missing = [part for part in loops if part.status == "not applicable"]
        assert [part.name for part in missing] == [f"training loop, {name}" for name in absent]
        assert all(part.results["why"] and not part.command for part in missing)
        run = [part.name for part in loops if part not in missing]
        of_both_specs = 7 - len({*absent} & {*kernels, *ways[:2]})
        assert len(run) == of_both_specs * len(specs) + (ways[2] not in absent)


def test_what_is_not_applicable_is_reported_and_is_no_failure(
    gpu_check: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    good = gpu_check.Part("good", [sys.executable, "-c", ""], 60)
    other = gpu_check.Part("other", [sys.executable, "-c", "raise SystemExit(1)"], 60)
    found = [gpu_check.not_applicable_part("FP8", "no TE"), good, other]
    monkeypatch.setattr(gpu_check, "all_parts", lambda options: iter(found))
    assert gpu_check.main(["--out", str(tmp_path), "--only", "FP8|go+d"]) == 0
    report = (tmp_path / "report.md").read_text()
    assert "| FP8 | not applicable | 0 | why: no TE |" in report
    assert "| good | ok |" in report
    assert "other" not in report


def test_a_writer_runs_before_the_first_part_that_needs_it(
    gpu_check: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And only if a part needs it, whatever ``--only`` says."""

    def parts(options: Any) -> Any:
        yield gpu_check.Part("first", [sys.executable, "-c", ""], 60)
        for name in ("a", "b"):
            folder = options.out / name
            code = f"import pathlib; pathlib.Path({str(folder)!r}).mkdir()"
            writer = gpu_check.Part(f"write {name}", [sys.executable, "-c", code], 60, serves=True)
            yield writer
            code = f"import os; os.listdir({str(folder)!r})"
            command = [sys.executable, "-c", code]
            yield gpu_check.Part(f"read {name}", command, 60, after=[writer])

    monkeypatch.setattr(gpu_check, "all_parts", parts)
    assert gpu_check.main(["--out", str(tmp_path), "--only", "read b", "--jobs", "3"]) == 0
    report = json.loads((tmp_path / "report.json").read_text())
    assert [part["name"] for part in report] == ["write b", "read b"]


def test_the_worthiest_parts_that_fit_are_chosen(gpu_check: Any) -> None:
    """Two checks run at once, a part brings what it needs, and what is left out is named."""

    def part(name: str, expected: float, **more: Any) -> Any:
        return gpu_check.Part(name, ["true"], expected, **more)

    writer = part("write models", 10, serves=True)
    loop = part("training loop, torch spec, dense", 40, after=[writer])
    other = part("training loop, te spec, dense", 40, after=[writer, loop])
    rates = part("rates", 20, measures=True)
    simulated = part("training step, 2B, te, simulated", 60, serves=True)
    step = part("training step, 2B, te", 35, after=[simulated], measures=True)
    late = part("generate, te spec", 20)
    everything = [late, step, simulated, rates, loop, other, writer]
    for seconds, chosen, left in (
        (300, [writer, loop, other, rates, simulated, step, late], []),
        (165, [writer, loop, other, rates, simulated, step, late], []),
        (160, [writer, loop, other, rates, late], [step]),
        (90, [writer, loop, other, late], [rates, step]),
        (60, [writer, loop, late], [other, rates, step]),
        (5, [], [loop, other, rates, step, late]),
    ):
        for p in everything:
            p.status = gpu_check.WAITING
        got = gpu_check.choose_parts(everything, None, seconds, 2)
        assert [p for p in got if p.status == gpu_check.WAITING] == chosen
        assert [p for p in got if p.status == gpu_check.LEFT_OUT] == left
        assert all(p.results["why"] for p in left)
    assert gpu_check.choose_parts(everything, "te spec, dense", math.inf, 2)[-1] is other
    assert other.after == [writer], "what --only leaves out is read from an earlier run"


SEEN = """
import pathlib, sys, time
folder, name, other, seconds = pathlib.Path(sys.argv[1]), *sys.argv[2:]
running = " ".join(p.name for p in folder.iterdir())
(folder / name).touch()
for _ in range(600):
    if not other or (folder / other).exists() or (folder.parent / other).exists():
        break
    time.sleep(0.05)
else:
    sys.exit("it is alone")
time.sleep(float(seconds))
(folder / name).unlink()
(folder.parent / name).write_text(running)
"""


def test_checks_run_side_by_side_and_measurements_alone(gpu_check: Any, tmp_path: Path) -> None:
    """Two checks wait for each other. The others write down what runs when they start."""
    running = tmp_path / "running"
    running.mkdir()

    def part(name: str, seconds: float, other: str = "", **more: Any) -> Any:
        command = [sys.executable, "-c", SEEN, str(running), name, other, str(seconds)]
        return gpu_check.Part(name, command, 60, **more)

    first, second = (part(name, 0.5, measures=True) for name in ("first", "second"))
    checks = [part("long", 1.5, "short"), part("short", 0, "long")]
    third = part("third", 0, after=checks)
    gpu_check.Conductor(tmp_path).run_parts([first, second, *checks, third], 2)
    assert [p.status for p in (first, second, *checks, third)] == ["ok"] * 5
    assert [(tmp_path / p.name).read_text() for p in (first, second, third)] == [""] * 3
    report = json.loads((tmp_path / "report.json").read_text())
    assert [p["name"] for p in report] == ["first", "second", "long", "short", "third"]


def test_what_outlasts_the_minutes_is_stopped_and_what_cannot_end_is_left_out(
    gpu_check: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    slow = gpu_check.Part("slow", [sys.executable, "-c", "import time; time.sleep(60)"], 1)
    late = gpu_check.Part("late", [sys.executable, "-c", ""], 2, measures=True)
    monkeypatch.setattr(gpu_check, "all_parts", lambda options: iter([slow, late]))
    assert gpu_check.main(["--out", str(tmp_path), "--minutes", str(8 / 60)]) == 1
    assert (slow.status, late.status) == ("no time", "left out")
    assert "| late | left out |" in (tmp_path / "report.md").read_text()


KILLED = """
import pathlib, sys
sys.path.insert(0, sys.argv[1])
from benchmarks import gpu_check
out = sys.argv[2]
def parts(options):
    python = [sys.executable, "-c"]
    good = [*python, "import json; print(json.dumps(dict(x=1)))"]
    yield gpu_check.Part("good", good, 60, gpu_check.find_json)
    yield gpu_check.Part("hangs", [*python, "import time; time.sleep(60)"], 60)
    yield gpu_check.Part("waits", [*python, ""], 60, measures=True)
gpu_check.all_parts = parts
gpu_check.signal.signal(gpu_check.signal.SIGTERM, lambda number, frame: sys.exit(143))
gpu_check.main(["--out", out])
"""


@pytest.mark.parametrize("ending", ["SIGTERM", "SIGKILL"])
def test_a_kill_leaves_what_ended(tmp_path: Path, ending: str) -> None:
    """Both reports are whole, and say that they are not finished."""
    command = [sys.executable, "-c", KILLED, str(ROOT), str(tmp_path)]
    process = subprocess.Popen(command, start_new_session=True)
    report = tmp_path / "report.json"
    while not report.exists() or '"running"' not in report.read_text().partition('"hangs"')[2]:
        assert process.poll() is None
        time.sleep(0.05)
    process.send_signal(getattr(signal, ending))
    process.wait()
    with suppress(ProcessLookupError):  # SIGKILL leaves the part that runs
        os.killpg(process.pid, signal.SIGKILL)
    parts = {p["name"]: p for p in json.loads(report.read_text())}
    assert parts["good"]["found"] == {"x": 1}
    hanging = "running" if ending == "SIGKILL" else "cut off"
    statuses = {name: part["status"] for name, part in parts.items()}
    assert statuses == {"good": "ok", "hangs": hanging, "waits": "waiting"}
    text = (tmp_path / "report.md").read_text()
    assert "**Not finished**" in text
    assert "| good | ok |" in text


def test_rates_are_the_constants_of_the_model_of_time(
    gpu_check: Any,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """On the host, by a clock of our own; and no file if attention is wrong."""
    from benchmarks import kernels

    # Seconds of the product, of attention over 16 and 256 tokens, and of all others. Each is
    # measured thirteen times.
    seconds = [s for s in (1e-3, 2e-4, 1e-3) for _ in range(13)]
    clock = chain(seconds, repeat(1e-2))

    def timed(work: Callable[[], Any], device: str) -> tuple[float, float]:
        work()
        return next(clock), 0.0

    monkeypatch.setattr(kernels, "time_step", timed)
    file = tmp_path / "constants.json"
    words = ["--rates", str(file), "--gpu", "h100-80gb", "--device", "cpu"]
    assert kernels.main(words) == 0
    shown = json.loads(capsys.readouterr().out)
    # 1 / rate = (1 + attention_keys / keys) / attention, with 8 and 128 keys in the mean.
    keys = shown["attention_keys"]
    assert (1 + keys / 8) / (1 + keys / 128) == pytest.approx(2e-4 * 16 / 1e-3)
    assert Constants.from_file(file) == replace(Constants(), **json.loads(file.read_text()))
    assert shown["product of 256 x 128 x 256, TFLOP/s"] == pytest.approx(989 * shown["gemm"])
    file.unlink()
    attend = torch.nn.functional.scaled_dot_product_attention

    def wrong(q: torch.Tensor, *others: Any, **more: Any) -> torch.Tensor:
        return attend(q, *others, is_causal=q.dtype == torch.float32)

    monkeypatch.setattr(torch.nn.functional, "scaled_dot_product_attention", wrong)
    clock = chain(seconds, repeat(1e-2))
    assert kernels.main(words) == 1
    assert "attention over 256" in capsys.readouterr().err
    assert not file.exists()


def test_what_is_predicted_stands_beside_what_is_measured(gpu_check: Any) -> None:
    """A peak must be as predicted; a time need not."""
    simulation = gpu_check.Part("simulated", [], 0)
    measured = {"peak GB": 10.2, "seconds": 3.0}
    shown = gpu_check.compare_with_prediction(lambda printed: measured, [simulation], "")
    assert shown == {**measured, "simulated": "waiting: see simulated"}
    simulation.results = {"peak GB": 10.0, "modelled seconds": 2.0}
    shown = gpu_check.compare_with_prediction(lambda printed: measured, [simulation], "")
    assert shown["measured / rehearsed"] == pytest.approx(1.02)
    assert shown["measured / modelled seconds"] == 1.5
    simulation.results["peak GB"] = 9.6
    with pytest.raises(gpu_check.Mismatch):
        gpu_check.compare_with_prediction(lambda printed: measured, [simulation], "")


@pytest.mark.parametrize(
    ("name", "memory_gib", "kind"),
    [
        ("NVIDIA H100 80GB HBM3", 79.2, "h100-80gb"),
        ("NVIDIA H200", 139.8, "h200-141gb"),
        ("NVIDIA A100-SXM4-40GB", 39.4, "a100-40gb"),
        ("NVIDIA A100-SXM4-80GB", 79.3, "a100-80gb"),
        ("NVIDIA GeForce RTX 4090", 23.6, None),
    ],
)
def test_the_kind_of_gpu_is_the_machines(
    gpu_check: Any, name: str, memory_gib: float, kind: str | None
) -> None:
    assert gpu_check.Machine(1, 9, memory_gib, name).kind == kind


def test_ep_has_the_losses_of_the_same_spec_without_it(gpu_check: Any, tmp_path: Path) -> None:
    """But only on as many GPUs, since each data-parallel rank has batches of its own.

    Listing the parts keeps the losses of an earlier run, to which ``--only`` compares."""
    (tmp_path / "losses-MoE-te.jsonl").touch()

    def against(gpus: int) -> dict[str, Any]:
        found = gpu_check.training_parts(tmp_path, ["torch", "te"], gpus, 9)
        return {p.name: p.read.args[1] and p.read.args[1].stem for p in found if p.command}

    ep, fp8 = "training loop, te spec, MoE, EP 2", "training loop, te spec, dense, FP8"
    assert against(4)[ep] == "losses-MoE-te"
    assert against(3)[ep] == "losses-MoE-EP-2-torch"
    assert against(4)[ep.replace("te", "torch")] == "losses-MoE-torch"
    assert against(3)[ep.replace("te", "torch")] is None
    assert against(1)[fp8] == "losses-dense-te"
    assert (tmp_path / "losses-MoE-te.jsonl").exists()


DETACHED = """
import os, subprocess, sys, time
child = subprocess.Popen(["sleep", "60"], start_new_session=True)
print(child.pid, flush=True)
time.sleep(float(sys.argv[1]))
"""


@pytest.mark.parametrize("seconds", [60, 0])
def test_processes_in_sessions_of_their_own_end_with_their_part(
    gpu_check: Any, tmp_path: Path, seconds: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Such are torchrun's workers, which would otherwise hold the GPUs in later parts."""
    command = [sys.executable, "-c", DETACHED, str(seconds)]
    part = gpu_check.Part("detached", command, 1, lambda printed: {"child": int(printed)})
    monkeypatch.setattr(gpu_check, "MARGIN", 0)
    gpu_check.Conductor(tmp_path).run_parts([part], 1)
    assert part.status == ("timeout" if seconds else "ok")
    process = Path("/proc", str(part.results["child"]))
    assert not process.exists() or "\nState:\tZ" in (process / "status").read_text()


STOPPED = """
import runpy, sys
sys.executable, *sys.argv = sys.argv[1:]
runpy.run_path(sys.argv[0], run_name="__main__")
"""


@pytest.mark.parametrize(("ending", "code"), [("Ctrl-C", -signal.SIGINT), ("SIGTERM", 143)])
def test_a_part_ends_with_the_program(tmp_path: Path, ending: str, code: int) -> None:
    """It would hold the GPUs after Ctrl-C, or after a scheduler has stopped the program."""
    part = tmp_path / "python"  # as torchrun, it gives its worker a session of its own
    part.write_text("#!/bin/sh\nsetsid sleep 60 &\nsleep 60\n")
    part.chmod(0o755)
    command = [sys.executable, "-c", STOPPED, part, ROOT / "benchmarks" / "gpu_check.py"]
    left = run_and_end([*command, "--out", tmp_path / "out"], tmp_path, ending, processes=4)
    assert left.exit_code == code, left.printed
    assert not left.anything


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from benchmarks import gpu_models

    out = tmp_path_factory.mktemp("gpu-check") / "models"
    gpu_models.write_tiny_models(str(out))
    return out


def test_what_trains_is_computed_by_the_kernels_of_published_sizes(
    gpu_check: Any, models: Path
) -> None:
    """The torch spec loops over experts whose rows are not multiples of 16 bytes, FP8 wants 128."""
    for way in gpu_check.training_parts(models.parent, ["torch"], 4, 9):
        if "MoE" in way.name:
            model = Path(way.command[way.command.index("--load-hf") + 1])
            for experts in tensors(model, "experts"):
                one = experts.bfloat16()
                assert _has_kernel(one.new_empty(3, one.shape[-1]), one)
    wide = json.loads((models / "wide" / "config.json").read_text())["text_config"]
    assert [wide[k] % 128 for k in ("head_dim", "hidden_size", "intermediate_size")] == [0] * 3


@pytest.mark.parametrize("name", ["moe", "wide-moe", "wide-moe-all"])
def test_no_expert_is_square(models: Path, name: str) -> None:
    """Transformers transposes published experts unless their shape is that of its own module."""
    for experts in tensors(models / name, "experts"):
        assert experts.shape[-1] != experts.shape[-2]


@pytest.mark.slow
@pytest.mark.parametrize("name", ["wide", "wide-moe-all"])
def test_parity_in_bf16_holds_on_the_host(models: Path, name: str) -> None:
    """The simulated GPU has no numbers, so nothing else shows that these models can be equal."""
    verify_parity(models / name, batches=["mixed"], dtype="bf16").require()


def tensors(model: Path, name: str) -> list[torch.Tensor]:
    with safe_open(model / "model.safetensors", "pt") as file:
        return [file.get_tensor(key) for key in file.keys() if name in key]  # noqa: SIM118


@pytest.mark.parametrize("gpus", range(2, 20))
def test_any_number_of_gpus_has_a_layout(gpu_check: Any, models: Path, gpus: int) -> None:
    used = gpu_check.shareable_gpus(gpus)
    assert gpus // 2 < used <= gpus or used == 16
    for name in sorted(folder.name for folder in models.iterdir() if folder.name != "data"):
        words = gpu_check.layout_flags(name, used)
        words.remove("--sp")
        sizes = {flag[2:]: int(n) for flag, n in zip(words[::2], words[1::2], strict=True)}
        planned = Layout(**sizes, sp=True)
        assert planned.world_size == used
        architecture = Architecture.from_hf(models / name)
        batch = build_batch("text", architecture)
        ParityCase(planned).validate(architecture, (batch,))


@pytest.mark.slow  # twenty seconds of imports
def test_python_example(tmp_path: Path) -> None:
    """The model lands on the device, trains and is exported; its losses mean nothing."""
    example, _ = blocks(ROOT / "docs" / "python.md", "python")
    write_tiny_checkpoint(tmp_path / "model")
    (tmp_path / "example.py").write_text(
        example.text + "\nassert next(model.parameters()).is_cuda\n"
    )
    command = [sys.executable, "-m", "mcore_qwen3vl.simulated_gpu", "example.py"]
    done = subprocess.run(
        command, cwd=tmp_path, env=environment(), capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("loss") == 3
    assert (tmp_path / "tuned" / "model.safetensors").exists()
