"""A command and the processes it starts import nothing that lies in the current folder."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence
from importlib.metadata import packages_distributions
from pathlib import Path

import pytest

from mcore_qwen3vl.safe_path import leave_out_current_folder

ROOT = Path(__file__).parents[1]
OWN = ("mcore_qwen3vl", "tests")  # found by PYTHONPATH, which counts


@pytest.fixture(scope="module")
def hostile(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with a file named like each module of Python and of installed packages."""
    folder = tmp_path_factory.mktemp("downloaded")
    modules = {*sys.stdlib_module_names, *packages_distributions(), "sitecustomize", "conftest"}
    ours = "with open('ran', 'a') as file: file.write(f'{__name__}\\n')\nraise SystemExit(9)\n"
    for name in modules - {*OWN, "__main__"}:
        if name.isidentifier():
            (folder / f"{name}.py").write_text(ours)
    return folder


def run(words: Sequence[object], folder: Path, **variables: str) -> str:
    """Run a command in the hostile folder, and return what it prints."""
    (folder / "ran").unlink(missing_ok=True)
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    places = os.pathsep.join(filter(None, (str(ROOT), variables.pop("places", ""))))
    inherited = {name: v for name, v in os.environ.items() if name != "PYTHONSAFEPATH"}
    done = subprocess.run(
        [str(word) for word in words],
        cwd=folder,
        env={**inherited, "PATH": path, "PYTHONPATH": places, "OMP_NUM_THREADS": "1", **variables},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    ran = folder / "ran"
    assert not ran.exists(), f"{ran.read_text()}{done.stdout}"
    assert done.returncode == 0, done.stdout
    return done.stdout


COMMAND = ("mcore-qwen3vl",)
AS_MODULE = (sys.executable, "-m", "mcore_qwen3vl")
TRAIN = (
    *("--cpu", "--hf-model", "{dense}", "--load-hf", "{dense}", "--data-path", "{data}"),
    *("--train-iters", 1, "--global-batch-size", 2, "--lr", 1e-3, "--num-workers", 1),
)
PROMPT = ("--prompt", "Hello", "--max-new-tokens", 1)
SIMULATED = (sys.executable, "-m", "mcore_qwen3vl.simulated_gpu", "-m")
SLOW = {
    "train as a module": (*AS_MODULE, "train", "--processes", 2, *TRAIN),
    "one rank": (*COMMAND, "train", *TRAIN),
    "torchrun of the script": (
        *("torchrun", "--standalone", "--nproc-per-node", 2, ROOT / "launch" / "train.py", *TRAIN),
    ),
    "generate": (*COMMAND, "generate", "{dense}", "--cpu", "--tp", 2, *PROMPT),
    "generate on the simulated GPU": (*SIMULATED, "mcore_qwen3vl", "generate", "{dense}", *PROMPT),
    "score": (*COMMAND, "score", "{dense}", "{data}", "--cpu", "--tp", 2, "--out", "{out}/scores"),
    "parity": (*COMMAND, "verify", "parity", "{dense}", "--tp", 2),
    "trace": (*COMMAND, "verify", "trace", "{dense}", "--prompt", "Hello", "--tp", 2),
    "rehearse": (
        *(*COMMAND, "rehearse", "--gpus", 1, *TRAIN[1:3], "--spec", "torch"),
        *("--bf16", "--seq-length", 256, "--packing"),
    ),
    "demo": (*COMMAND, "demo", "--dense"),
    "train-demo": (*COMMAND, "train-demo"),
    "the layout matrix": (*AS_MODULE[:2], "mcore_qwen3vl.verification.parity", "--help"),
    "data workers": (*COMMAND, "data", "check", "{data}", "--hf-model", "{dense}"),
}


def filled(words: Sequence[object], dense: Path, data: Path, out: Path) -> list[str]:
    return [str(word).format(dense=dense, data=data, out=out) for word in words]


@pytest.mark.slow
@pytest.mark.parametrize("name", SLOW)
def test_commands(name: str, hostile: Path, dense: Path, data: Path, tmp_path: Path) -> None:
    run(filled(SLOW[name], dense, data, tmp_path), hostile)


def test_ranks_and_what_the_user_names(
    hostile: Path, dense: Path, data: Path, tmp_path: Path
) -> None:
    """Ranks find a loss by PYTHONPATH and a hook by its path, and nothing in the current folder."""
    (tmp_path / "places").mkdir()
    called = f"import pathlib\ndef call(name): pathlib.Path({str(tmp_path)!r}, name).touch()\n"
    (tmp_path / "places" / "my_losses.py").write_text(
        f"{called}def summed(losses, weights):\n    call('loss')\n"
        "    return (losses * weights).sum(), weights.sum()\n"
    )
    (tmp_path / "my_hooks.py").write_text(
        f"{called}def same(record):\n    call('hook')\n    return record\n"
    )
    own = ("--loss", "my_losses:summed", "--preprocess", tmp_path / "my_hooks.py:same")
    words = filled((*COMMAND, "train", "--processes", 2, *TRAIN, *own), dense, data, tmp_path)
    assert "done: step 1" in run(words, hostile, places=str(tmp_path / "places"))
    assert (tmp_path / "loss").exists()
    assert (tmp_path / "hook").exists()


def test_a_script(hostile: Path, dense: Path, data: Path, tmp_path: Path) -> None:
    flags = ("--hf-model", "{dense}", "--load-hf", "{dense}", "--data-path", "{data}", "--dry-run")
    script = ("bash", ROOT / "launch" / "sft_2b.sh", *flags)
    assert "torchrun" in run(filled(script, dense, data, tmp_path), hostile)


def test_the_command_as_a_module(hostile: Path) -> None:
    assert "mcore-qwen3vl" in run((*AS_MODULE, "--version"), hostile)


@pytest.mark.parametrize("here", [ROOT, Path("/elsewhere")], ids=str)
def test_a_clone_that_is_not_installed_is_found_in_its_own_folder(
    here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its children find it too; any other folder is left out."""
    monkeypatch.setenv("PYTHONPATH", f"/some{os.pathsep}")
    monkeypatch.setattr("sys.path", [str(here), "/some", "/usr/lib"])
    leave_out_current_folder()
    clone = [str(ROOT)] if here == ROOT else []
    assert sys.path == [*clone, "/some", "/usr/lib"]
    assert os.environ["PYTHONPATH"] == (f"{ROOT}:/some" if clone else "/some:")
    assert os.environ["PYTHONSAFEPATH"] == "1"


SPAWN = """
import multiprocessing
from mcore_qwen3vl.runtime.lifetime import protected_children
with protected_children():
    process = multiprocessing.get_context("spawn").Process(target=print, args=("spawned",))
    process.start()
process.join()
raise SystemExit(process.exitcode)
"""


def test_spawned_ranks_of_a_program_of_the_users(hostile: Path, tmp_path: Path) -> None:
    """Its environment is as it was."""
    program = tmp_path / "program.py"
    asked = "import os; assert 'PYTHONSAFEPATH' not in os.environ"
    program.write_text(f"if __name__ == '__main__':\n    exec({SPAWN!r} + {asked!r})\n")
    assert "spawned" in run((sys.executable, program), hostile)
