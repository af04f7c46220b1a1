"""Scripts and commands run on the CPU in their own processes, with right signals and exit codes."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import psutil
import pytest

from mcore_qwen3vl.tiny import write_tiny_checkpoint
from mcore_qwen3vl.tiny.records import write_image_qa
from tests.free_ports import free_ports
from tests.leftovers import heed_ctrl_c

pytestmark = pytest.mark.slow  # every rank imports torch and megatron anew

ROOT = Path(__file__).parents[2]
STEPS = 12
PATIENCE = 300.0


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    folder = tmp_path_factory.mktemp("files")
    model = str(write_tiny_checkpoint(folder / "model"))
    data = str(write_image_qa(folder / "data", 24))
    return {"--hf-model": model, "--load-hf": model, "--data-path": data}


def words(files: dict[str, str], *flags: object) -> list[str]:
    tiny = {"--seq-length": 256, "--global-batch-size": 4, "--train-iters": STEPS, "--lr": 1e-3}
    given = [word for pair in {**files, **tiny}.items() for word in pair]
    return [str(word) for word in (*given, "--log-interval", 1, "--num-workers", 1, *flags)]


def start(command: list[str], output: Path, **environment: str) -> subprocess.Popen[bytes]:
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    env = {**os.environ, "PATH": path, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    with output.open("ab") as stream:
        return subprocess.Popen(
            command,
            env={**env, **environment},
            stdout=stream,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            preexec_fn=heed_ctrl_c,
        )


def entries(log: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in log.read_text().splitlines()] if log.exists() else []


def wait_for_steps(count: int, process: subprocess.Popen[bytes], log: Path) -> None:
    """Wait until a run has logged so many steps."""
    deadline = time.monotonic() + PATIENCE
    while len(entries(log)) < count:
        assert process.poll() is None, f"ended before step {count}"
        assert time.monotonic() < deadline
        time.sleep(0.02)


def interrupt_after_two_steps(
    process: subprocess.Popen[bytes], log: Path, number: signal.Signals
) -> int:
    """Send the signal after two steps, and return the exit code."""
    wait_for_steps(2, process, log)
    os.killpg(process.pid, number) if number == signal.SIGINT else process.send_signal(number)
    return process.wait(PATIENCE)


def exit_signal(number: signal.Signals) -> tuple[str, ...]:
    """Return the flag that a signal other than SIGTERM needs; Ctrl-C needs none."""
    named = number not in (signal.SIGTERM, signal.SIGINT)
    return ("--exit-signal", number.name) if named else ()


COMMANDS = {
    "script": ["bash", str(ROOT / "launch" / "sft_2b.sh"), "--spec", "torch"],
    "command": ["mcore-qwen3vl", "train", "--processes", "2", "--micro-batch-size", "1",
                "--packing", "--save-interval", "1000"],
}  # fmt: skip


@pytest.mark.parametrize(
    ("name", "number"),
    [
        ("script", signal.SIGTERM),
        ("script", signal.SIGALRM),
        ("command", signal.SIGTERM),
        ("command", signal.SIGINT),
    ],
)
def test_training_goes_on_after_a_signal_and_exports(
    name: str, number: signal.Signals, files: dict[str, str], tmp_path: Path
) -> None:
    log, hf = tmp_path / "log.jsonl", tmp_path / "hf"
    command = COMMANDS[name] + words(
        files, "--cpu", "--tensor-model-parallel-size", 2, "--sequence-parallel",
        "--save", tmp_path / "save", "--save-hf", hf, "--log-json", log, *exit_signal(number),
    )  # fmt: skip
    first = start(command, tmp_path / "out.txt", GPUS_PER_NODE="2")
    assert interrupt_after_two_steps(first, log, number) != 0
    stopped = len(entries(log))
    assert stopped < STEPS
    second = start(command, tmp_path / "out.txt", GPUS_PER_NODE="2")
    assert second.wait(PATIENCE) == 0, (tmp_path / "out.txt").read_text()[-3000:]
    losses = [entry["lm loss"] for entry in entries(log)]
    assert [entry["iteration"] for entry in entries(log)] == list(range(1, STEPS + 1))
    assert losses[-1] < losses[0] - 0.5
    assert (hf / f"iter_{STEPS:07d}" / "model.safetensors").exists()


@pytest.mark.parametrize(
    ("number", "code", "flags"),
    [
        (signal.SIGTERM, 143, ()),
        (signal.SIGINT, 130, ()),
        (signal.SIGUSR1, 138, exit_signal(signal.SIGUSR1)),
        (signal.SIGINT, 130, exit_signal(signal.SIGUSR1)),
        (signal.SIGINT, 130, ("--exit-signal", "SIGINT")),
    ],
)
def test_one_rank_in_the_commands_own_process(
    number: signal.Signals,
    code: int,
    flags: tuple[str, ...],
    files: dict[str, str],
    tmp_path: Path,
) -> None:
    log, output = tmp_path / "log.jsonl", tmp_path / "out.txt"
    command = ["mcore-qwen3vl", "train", *words(files, "--cpu", "--save", tmp_path / "save")]
    command += ["--log-json", str(log)]
    process = start([*command, "--train-iters", "100000", *flags], output)
    assert interrupt_after_two_steps(process, log, number) == code
    *_, saved, stopped = output.read_text().splitlines()
    assert saved == f"step {len(entries(log))}: saved to {tmp_path}/save"
    assert stopped.endswith(": run the same command again to continue")


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (("--no-such-flag",), "unrecognized arguments: --no-such-flag"),
        (("--data-path", "gone.jsonl"), "gone.jsonl does not exist"),
        (("--tensor-model-parallel-size", "2"), "world size"),
        (("--load-hf", "gone"), "gone"),
    ],
)
def test_bad_input_is_one_error_and_exit_code_2(
    flags: tuple[str, ...], message: str, files: dict[str, str], tmp_path: Path
) -> None:
    command = ["mcore-qwen3vl", "train", "--processes", "3", "--cpu"]
    command += words(files, "--micro-batch-size", 1, "--global-batch-size", 3, *flags)
    output = tmp_path / "out.txt"
    assert start(command, output).wait(PATIENCE) == 2
    text = output.read_text()
    (error,) = [line for line in text.splitlines() if line.startswith("error: ")]
    assert message in error
    assert "Traceback" not in text


def test_two_nodes_without_a_scheduler_go_on_after_one_has_lost_its_rank(
    files: dict[str, str], tmp_path: Path
) -> None:
    """The second node starts again before the first has ended, and waits for it."""
    log = tmp_path / "log.jsonl"
    command = COMMANDS["script"] + words(
        files, "--cpu", "--tensor-model-parallel-size", 2, "--sequence-parallel",
        "--save", tmp_path / "save", "--save-interval", 3, "--log-json", log,
    )  # fmt: skip
    (port,) = free_ports(1)

    def start_node(number: int) -> subprocess.Popen[bytes]:
        node = {"NODES": "2", "NODE_RANK": str(number), "GPUS_PER_NODE": "1"}
        node |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
        return start(command, tmp_path / f"node{number}.txt", **node)

    first, second = start_node(0), start_node(1)
    wait_for_steps(4, first, log)
    (rank,) = psutil.Process(second.pid).children()
    rank.kill()
    assert second.wait(PATIENCE) != 0
    second = start_node(1)
    assert first.wait(PATIENCE) != 0
    first = start_node(0)
    said = [(tmp_path / f"node{number}.txt").read_text()[-3000:] for number in (0, 1)]
    assert [node.wait(PATIENCE) for node in (first, second)] == [0, 0], said
    assert [entry["iteration"] for entry in entries(log)] == [1, 2, 3, 4, *range(4, STEPS + 1)]
