"""A real Slurm with two nodes on this machine runs a launch script, and its ranks are killed.

``make test-slurm`` runs this. It needs Debian's packages slurm-wlm and munge, and runs as root.
"""

from __future__ import annotations

import getpass
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from mcore_qwen3vl.tiny import write_tiny_checkpoint
from mcore_qwen3vl.tiny.records import write_image_qa
from tests.free_ports import free_ports

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        not all(map(shutil.which, ("slurmctld", "slurmd", "munged"))) or os.geteuid() != 0,
        reason="make test-slurm runs it, with Slurm installed and as root",
    ),
]

ROOT = Path(__file__).parents[2]
NODES = ("127.0.0.1", "127.0.0.2")  # Slurm's names, which torchrun resolves
GPUS = 2
STEPS, INTERVAL = 8, 3
PATIENCE = 300.0
CONFIG = """
ClusterName=local
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={ports[0]}
SlurmUser={user}
SlurmdUser={user}
AuthType=auth/munge
CredType=cred/munge
AuthInfo=socket={folder}/munge.socket
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool-%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd-%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd-%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
MpiDefault=none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
ReturnToService=2
GresTypes=gpu
NodeName=DEFAULT CPUs={cpus} Gres=gpu:{gpus}
NodeName={nodes[0]} NodeHostname={host} NodeAddr=127.0.0.1 Port={ports[1]}
NodeName={nodes[1]} NodeHostname={host} NodeAddr=127.0.0.1 Port={ports[2]}
PartitionName=all Nodes=ALL Default=YES MaxTime=INFINITE
"""


def wait_for[T](found: Callable[[], T], what: Callable[[], str]) -> T:
    """Return what the function returns as soon as it is true."""
    deadline = time.monotonic() + PATIENCE
    while not (one := found()):
        assert time.monotonic() < deadline, what()
        time.sleep(0.1)
    return one


class Slurm:
    """Slurm's daemons for two nodes with GPUs, of which one file of the system stands for each."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        config = folder / "slurm.conf"
        config.write_text(
            CONFIG.format(
                folder=folder, host=socket.gethostname(), user=getpass.getuser(), nodes=NODES,
                ports=free_ports(3), gpus=GPUS, cpus=os.cpu_count(),
            )
        )  # fmt: skip
        gpus = f"NodeName={','.join(NODES)} Name=gpu File=/dev/tty[0-{GPUS - 1}]\n"
        (folder / "gres.conf").write_text(gpus)
        (folder / "state").mkdir()
        self.environment = {
            **os.environ,
            "SLURM_CONF": str(config),
            "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
            "PYTHONPATH": str(ROOT),
            "OMP_NUM_THREADS": "1",
            "MASTER_PORT": str(*free_ports(1)),
        }
        self._daemons: list[subprocess.Popen[bytes]] = []

    def start(self) -> None:
        key = self.folder / "munge.key"
        key.write_bytes(os.urandom(1024))
        key.chmod(0o600)
        files = ("pid-file", "log-file", "seed-file", "key-file", "socket")
        named = [f"--{name}={self.folder}/munge.{name.removesuffix('-file')}" for name in files]
        self._start("munged", "--foreground", "--force", *named)
        wait_for((self.folder / "munge.socket").exists, self._said)
        self._start("slurmctld", "-D")
        for node in NODES:
            self._start("slurmd", "-D", "-N", node)
        wait_for(self.is_idle, self._said)

    def is_idle(self) -> bool:
        """Return whether all nodes are up, and no job runs or ends on them."""
        states = self.ask("sinfo", "--noheader", "--format", "%T %D")
        return states.split() == ["idle", str(len(NODES))]

    def _said(self) -> str:
        """Return what the daemons have printed."""
        files = [*self.folder.glob("*.log"), self.folder / "daemons.txt"]
        return "\n".join(file.read_text() for file in files)

    def _start(self, *words: str) -> None:
        output = self.folder / "daemons.txt"
        with output.open("ab") as stream:
            self._daemons.append(
                subprocess.Popen(
                    words, env=self.environment, stdout=stream, stderr=stream, cwd=self.folder
                )
            )

    def stop(self) -> None:
        self.ask("scancel", "--full", "--state=RUNNING")
        for daemon in reversed(self._daemons):
            daemon.terminate()
        for daemon in self._daemons:
            daemon.wait(60)

    def ask(self, *words: str) -> str:
        """Run one of Slurm's commands, and return what it prints."""
        done = subprocess.run(
            words, env=self.environment, capture_output=True, text=True, check=False
        )
        return done.stdout


@pytest.fixture(scope="module")
def slurm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Slurm]:
    made = Slurm(tmp_path_factory.mktemp("slurm"))
    try:
        made.start()
        yield made
    finally:
        made.stop()


class Job:
    """A job of two nodes with one rank each, which trains a tiny model in a folder of its own."""

    def __init__(
        self, slurm: Slurm, files: Path, folder: Path, *further: str, **environment: str
    ) -> None:
        self.folder, self._slurm = folder, slurm
        flags = {
            "--hf-model": files / "model", "--load-hf": files / "model",
            "--data-path": files / "data" / "train.jsonl", "--seq-length": 256,
            "--global-batch-size": 2, "--train-iters": STEPS, "--lr": 1e-3, "--log-interval": 1,
            "--num-workers": 1, "--tensor-model-parallel-size": 2, "--save-interval": INTERVAL,
            "--save": folder / "save", "--log-json": folder / "log.jsonl",
        }  # fmt: skip
        words = [str(word) for pair in flags.items() for word in pair]
        submit = ["sbatch", "--parsable", "--nodes=2", "--gpus-per-node=1"]
        submit += [f"--output={folder / 'out.txt'}", str(ROOT / "launch" / "sft_2b.sh")]
        done = subprocess.run(
            [*submit, "--spec", "torch", "--cpu", "--sequence-parallel", *words, *further],
            env=slurm.environment | environment,
            capture_output=True,
            text=True,
            check=True,
        )
        self.number = done.stdout.strip()

    def printed(self) -> str:
        file = self.folder / "out.txt"
        return file.read_text() if file.exists() else ""

    def losses(self) -> dict[int, float]:
        """Return the loss of each step; of a step that ran twice, the later one."""
        file = self.folder / "log.jsonl"
        lines = file.read_text().splitlines() if file.exists() else []
        entries: list[dict[str, Any]] = [json.loads(line) for line in lines]
        return {entry["iteration"]: entry["lm loss"] for entry in entries}

    def state(self) -> str:
        shown = self._slurm.ask("scontrol", "show", "job", self.number)
        return shown.split("JobState=")[1].split()[0]

    def wait_for_step(self, step: int) -> None:
        wait_for(lambda: step in self.losses(), self.printed)

    def wait_for_state(self, state: str) -> None:
        wait_for(lambda: self.state() == state, lambda: f"{self.state()}\n{self.printed()}")

    def signal_rank(self, node: int, number: signal.Signals) -> None:
        """Send a signal to the rank of a node, and not to its data workers."""
        wanted = {f"SLURM_JOB_ID={self.number}", f"GROUP_RANK={node}"}
        for folder in Path("/proc").glob("[0-9]*"):
            with suppress(OSError):
                variables = (folder / "environ").read_text(errors="replace").split("\0")
                words = (folder / "cmdline").read_text(errors="replace")
                parent = int((folder / "stat").read_text().rsplit(")", 1)[1].split()[1])
                by_torchrun = "torchrun" in Path(f"/proc/{parent}/cmdline").read_text()
                if wanted <= set(variables) and "launch/train.py" in words and by_torchrun:
                    os.kill(int(folder.name), number)
                    return
        raise AssertionError(f"there is no rank of node {node}")

    def send(self, number: signal.Signals) -> None:
        """Send the job's ranks a signal, as Slurm does with ``--signal`` before the time is up."""
        self._slurm.ask("scancel", f"--signal={number.name.removeprefix('SIG')}", self.number)

    def go_on(self) -> None:
        """Let the job start soon; Slurm holds it back for two minutes.

        At once would be too early: a node refuses for a moment what it has just killed.
        """
        wait_for(lambda: self.state() == "PENDING" and self._slurm.is_idle(), self.printed)
        self._slurm.ask("scontrol", "update", f"jobid={self.number}", "StartTime=now+10")

    def cancel(self) -> None:
        self._slurm.ask("scancel", self.number)
        self.wait_for_state("CANCELLED")


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("files")
    write_tiny_checkpoint(folder / "model")
    write_image_qa(folder / "data", 24)
    return folder


@pytest.fixture(scope="module")
def undisturbed(slurm: Slurm, files: Path, tmp_path_factory: pytest.TempPathFactory) -> Job:
    """A job that ran to its end."""
    job = Job(slurm, files, tmp_path_factory.mktemp("undisturbed"))
    job.wait_for_state("COMPLETED")
    return job


def test_a_job_with_one_of_a_nodes_two_gpus_starts_one_rank_a_node(undisturbed: Job) -> None:
    assert "tp2+sp on 2 ranks" in undisturbed.printed()
    assert list(undisturbed.losses()) == list(range(1, STEPS + 1))


@pytest.mark.parametrize("ended", ["killed", "signalled"])
def test_a_job_that_has_saved_goes_back_into_the_queue_and_to_its_end(
    ended: str, slurm: Slurm, files: Path, undisturbed: Job, tmp_path: Path
) -> None:
    job = Job(slurm, files, tmp_path, REQUEUE="1")
    job.wait_for_step(INTERVAL + 1)
    if ended == "killed":
        job.signal_rank(1, signal.SIGKILL)
    else:
        job.send(signal.SIGTERM)
    job.go_on()
    job.wait_for_state("COMPLETED")
    assert "the job goes back into the queue" in job.printed()
    assert job.losses() == pytest.approx(undisturbed.losses(), rel=1e-5)


def test_a_frozen_rank_ends_the_job_after_the_time_for_communication(
    slurm: Slurm, files: Path, undisturbed: Job, tmp_path: Path
) -> None:
    patience = ("--distributed-timeout-seconds-after-init", "20")
    job = Job(slurm, files, tmp_path, *patience, REQUEUE="1")
    job.wait_for_step(INTERVAL + 1)
    job.signal_rank(1, signal.SIGSTOP)
    job.go_on()
    job.wait_for_state("COMPLETED")
    assert job.losses() == pytest.approx(undisturbed.losses(), rel=1e-5)


def test_a_job_that_has_saved_nothing_and_one_that_is_cancelled_end(
    slurm: Slurm, files: Path, tmp_path: Path
) -> None:
    job = Job(slurm, files, tmp_path, REQUEUE="1")
    job.wait_for_step(1)
    job.signal_rank(0, signal.SIGKILL)
    job.wait_for_state("FAILED")
    assert "has saved no checkpoint" in job.printed()
    (tmp_path / "other").mkdir()
    other = Job(slurm, files, tmp_path / "other", REQUEUE="1")
    other.wait_for_step(INTERVAL + 1)
    other.cancel()
    assert "back into the queue" not in other.printed()
