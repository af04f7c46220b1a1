"""The tests that run a file are found by a record, and without one by their names."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests import tests_of

SUITE = """
import os
import subprocess
import sys

import pytest

from mcore_qwen3vl import lazy


@pytest.mark.parametrize("name", ["one", "two [x]"])
def test_here(name):
    assert lazy.Lazy("math").floor(1.5) == 1


def test_in_a_fork():
    child = os.fork()
    if child == 0:
        from mcore_qwen3vl.part import Part

        Part.parse("1/2")
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


def test_in_a_command():
    code = "from mcore_qwen3vl.layout import Layout; Layout.parse('tp2')"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_nothing():
    pass
"""


def test_a_record_has_what_ranks_and_commands_run(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "test_suite.py").write_text(SUITE)
    record = tmp_path / "record.tsv"
    words = [sys.executable, "-m", "pytest", "-q", "-p", "tests.tests_of", "-p", "no:cacheprovider"]
    environment = os.environ | {
        "PYTHONPATH": str(tests_of.ROOT),
        tests_of.VARIABLE: str(record),
    }
    done = subprocess.run(
        [*words, str(tmp_path / "test_suite.py")],
        cwd=tmp_path, env=environment, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout
    found = {}
    for file in ("lazy", "part", "layout", "errors"):
        assert tests_of.main([f"mcore_qwen3vl/{file}.py"], record) == 0
        found[file] = [line.split("::")[1] for line in capsys.readouterr().out.splitlines()]
    assert found == {
        "lazy": ["test_here"],
        "part": ["test_in_a_fork"],
        "layout": ["test_in_a_command"],
        "errors": [],
    }


@pytest.mark.parametrize(
    ("file", "tests"),
    [
        ("mcore_qwen3vl/data/parts.py", ["tests/data/test_parts.py"]),
        ("converters/identify.py", ["tests/converters/test_identify.py",
                                    "tests/converters/test_identify_hub.py"]),
        # test_lora_modules.py is that of another file.
        ("mcore_qwen3vl/model/lora.py", ["tests/model/test_lora.py",
                                         "tests/model/test_lora_checkpoint.py"]),
        ("mcore_qwen3vl/training/__main__.py", ["tests/training/test_main.py"]),
        ("mcore_qwen3vl/generation/__init__.py", ["tests/generation"]),
        ("converters/offline/__init__.py", ["tests/converters/offline"]),
        ("launch/train.py", ["tests/launch/test_train.py"]),
    ],
)  # fmt: skip
def test_names_lead_to_the_tests_of_a_file(
    file: str, tests: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert tests_of.main([file], tmp_path / "none.tsv") == 0
    printed = capsys.readouterr()
    assert printed.out.splitlines() == tests
    assert "make test-contexts" in printed.err


@pytest.mark.parametrize(
    ("file", "test"),
    [
        ("mcore_qwen3vl/settings/run.py", "tests/training/arguments/test_help.py"),
        # No test imports this one: the plans for both directions do.
        ("converters/offline/to_mcore.py", "tests/converters/test_convert.py"),
    ],
)
def test_imports_lead_to_tests_where_no_name_does(
    file: str, test: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert tests_of.by_name(file) == []
    assert tests_of.main([file], tmp_path / "none.tsv") == 0
    assert test in capsys.readouterr().out.splitlines()


def test_what_is_no_file_is_refused() -> None:
    assert tests_of.main(["mcore_qwen3vl/no_such_file.py"]) == 2
    assert tests_of.main([""]) == 2
