"""The folders that a run writes to: what it may not overwrite."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from mcore_qwen3vl.converters.convert import hf_to_mcore
from mcore_qwen3vl.converters.place import TRACKER
from mcore_qwen3vl.errors import BadInput
from mcore_qwen3vl.training.arguments.checks import check_early
from mcore_qwen3vl.training.arguments.command_line import CommandLine


@pytest.fixture(scope="module")
def runs(dense: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with a run of steps 2 and 4, a link to it, and ``hf``.

    In ``adapter`` are an adapter and the tracker of the run of ms-swift's that trained it.
    """
    tmp_path = tmp_path_factory.mktemp("runs")
    for step in (2, 4):
        hf_to_mcore(dense, tmp_path / "converted")
        (tmp_path / "run").mkdir(exist_ok=True)
        (tmp_path / "converted" / "release").rename(tmp_path / "run" / f"iter_{step:07d}")
        shutil.rmtree(tmp_path / "converted")
    (tmp_path / "run" / TRACKER).write_text("4")
    (tmp_path / "link").symlink_to("run")
    shutil.copytree(dense, tmp_path / "run" / "exports" / "iter_0000004")
    shutil.copytree(dense, tmp_path / "hf")
    hf_to_mcore(dense, tmp_path / "base")
    (tmp_path / "adapter").mkdir()
    for name, text in (("adapter_config.json", "{}"), (TRACKER, "4")):
        (tmp_path / "adapter" / name).write_text(text)
    return tmp_path


OVERWRITTEN = "holds a run, up to iter_0000004, which {} would overwrite: name another folder"
BOTH_OVERWRITE = OVERWRITTEN.format("--load and --finetune")
ALONE = OVERWRITTEN.format("--finetune") + ".* or leave out --finetune"
INSIDE = "the checkpoint .*/{}, or inside it: name another folder with {}"


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ("--load run --finetune --save run", ALONE),
        ("--finetune --save run", ALONE),
        ("--load run --finetune --save {here}/run/", ALONE),
        ("--load link --finetune --save run", ALONE),
        ("--load run/ --finetune --save hf/../link", ALONE),
        ("--load base --save run", OVERWRITTEN.format("--load")),
        ("--load base --finetune --save run", BOTH_OVERWRITE),
        ("--load run --ckpt-step 2 --save link", "from --ckpt-step 2 would overwrite: add --load"),
        ("--load run --finetune --save run/new", "--save run/new is the folder that the weights"),
        ("--pretrained-checkpoint base --save base", "--save base is the folder that the weights"),
        ("--load run --finetune --save run/iter_0000004", INSIDE.format("iter_0000004", "--save")),
        ("--save run/exports/iter_0000004", INSIDE.format("exports/iter_0000004", "--save")),
        ("--load-hf hf --save hf", INSIDE.format("hf", "--save")),
        ("--load-hf hf --save adapter", INSIDE.format("adapter", "--save")),
        ("--load-hf hf --save-hf hf", INSIDE.format("hf", "--save-hf")),
        ("--hf-model hf --save-hf hf/../hf/new", INSIDE.format("hf", "--save-hf")),
        ("--save run --save-hf link", "--save and --save-hf are both run"),
        ("--save run", None),
        ("--load link --save run/", None),
        ("--load run --ckpt-step 4 --save run", None),
        ("--load run --ckpt-step 2 --save new", None),
        ("--load run --finetune --save new --save-hf new/exports", None),
        ("--load-hf hf --save new --save-hf new-hf", None),
        ("--hf-model hf --load base --save base", None),  # beside what was converted
    ],
)
def test_a_run_overwrites_nothing_that_it_does_not_resume(
    flags: str,
    message: str | None,
    dense: Path,
    data: Path,
    runs: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(runs)
    words = flags.format(here=runs).split()
    length = ["--cpu", "--train-iters", "8", "--data-path", str(data)]
    command = CommandLine(["--hf-model", str(dense), *length, *words])
    if message is None:
        check_early(command)
        return
    with pytest.raises(BadInput, match=message):
        check_early(command)
