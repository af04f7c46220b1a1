"""A command line that cannot work is refused, and what acts for nothing is named."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from mcore_qwen3vl.errors import BadInput
from mcore_qwen3vl.machine import version_of
from mcore_qwen3vl.training.arguments.command_line import CommandLine
from mcore_qwen3vl.training.arguments.megatron_flags import LISTED


def test_flags_that_change_nothing_are_named_and_those_that_mislead_refused() -> None:
    words = (
        "--split=9,1 --tokenizer-model m --seed 3 --packing-buffer 4 --eval-interval 3 "
        "--mtp-loss-scaling-factor 0.2"
    )
    unused = CommandLine(words.split()).unused()
    assert [item.name for item in unused] == [
        "--split", "--tokenizer-model", "--packing-buffer", "--eval-interval",
        "--mtp-loss-scaling-factor",
    ]  # fmt: skip
    assert all(item.why and item.where == "the command line" for item in unused)
    used = "--packing --packing-buffer 4 --valid-data-path v --eval-iters 2 --eval-interval 3"
    assert not CommandLine(used.split()).unused()


STEPS, SAMPLES = "--train-iters 8", "--train-samples 80"
WSD = "--lr-decay-style WSD"


@pytest.mark.parametrize(
    ("schedule", "message"),
    [
        ("0:2,1K:4", None),
        (
            "0:2 1.5K:3",
            "batch of 3, from token 1,500 on, is not a multiple of the 2 rows of a pass",
        ),
        ("0:1,1B:4", "batch of 1, from token 0 on, is not a multiple of the 2 rows"),
        ("0:2,8", "'8' is no TOKENS:SAMPLES"),
    ],
)
def test_a_batch_grows_to_what_the_ranks_can_divide(
    schedule: str, message: str | None, dense: Path, data: Path
) -> None:
    """Megatron asserts it when the batch grows, which may be after days."""
    base = ["--cpu", "--hf-model", str(dense), "--data-path", str(data), *SAMPLES.split()]
    command = CommandLine([*base, "--step-batch-size-schedule", schedule])
    if message is None:
        command.layout(2)
        return
    with pytest.raises(BadInput, match=message):
        command.layout(2)


def test_flags_of_another_schedule_are_named() -> None:
    flags = "--lr-warmup-init 1e-6 --lr-wsd-decay-style linear --lr-wsd-decay-iters 3"
    assert [item.name for item in CommandLine(flags.split()).unused()] == flags.split()[::2]
    used = f"{flags} {WSD} --lr-warmup-iters 2"
    assert not CommandLine(used.split()).unused()


def test_a_batch_that_ranks_do_not_divide_is_named(dense: Path) -> None:
    command = CommandLine(["--hf-model", str(dense), "--global-batch-size", "3"])
    said = "--global-batch-size 3 is not a multiple of the 2 rows .* Give --global-batch-size 4"
    with pytest.raises(BadInput, match=said):
        command.layout(2)


def test_data_paths_may_have_an_equals_sign(dense: Path, data: Path) -> None:
    argv = [f"--hf-model={dense}", f"--data-path={data}", f"--valid-data-path={data}"]
    loop = CommandLine(argv).settings.loop
    assert (loop.data_path, loop.train_data_path) == (None, (str(data),))


@pytest.mark.skipif(version_of("megatron-core") != LISTED, reason="its own parser finds a typo")
def test_the_command_says_it_without_torch(dense: Path) -> None:
    code = (
        "import sys, mcore_qwen3vl.cli as cli\n"
        "try: cli.main(sys.argv[1:])\n"
        "except SystemExit as left: sys.exit(left.code + 40 * ('torch' in sys.modules))"
    )
    for flags in (["--train-itres", "3"], ["--tensor-model-parallel-size", "3"], []):
        known = ["--train-iters", "3", "--data-path", str(dense)] if len(flags) > 1 else []
        command = ["train", "--cpu", "--hf-model", str(dense), *known, *flags]
        done = subprocess.run([sys.executable, "-c", code, *command], capture_output=True)
        assert done.returncode == 2, done.stderr.decode()
        assert done.stderr.startswith(b"error: ")
        assert len(done.stderr.splitlines()) == 1
