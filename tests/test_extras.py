"""A missing package names the extra that brings it."""

from __future__ import annotations

import ast
import tomllib
from pathlib import Path

import pytest

from mcore_qwen3vl import machine
from mcore_qwen3vl.errors import BadInput

ROOT = Path(__file__).parents[1]


@pytest.mark.parametrize(("package", "extra"), machine.EXTRAS.items())
def test_the_extra_is_named_and_brings_it(
    package: str, extra: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    machine.require_extra(package, "--plot")
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert any(p.startswith(package) for p in project["optional-dependencies"][extra])
    monkeypatch.setattr(machine, "find_spec", lambda name: None)
    said = rf"--plot needs the package {package}: pip install 'mcore-qwen3vl\[{extra}\]'\."
    with pytest.raises(BadInput, match=said):
        machine.require_extra(package, "--plot")


def test_no_module_needs_one_to_be_imported() -> None:
    """Only functions import them, so that all other commands work without."""
    files = [*ROOT.glob("mcore_qwen3vl/**/*.py"), *ROOT.glob("converters/**/*.py")]
    needed = {
        (file.name, name)
        for file in files
        for node in ast.parse(file.read_text("utf-8")).body
        for name in _imported(node)
        if name.partition(".")[0] in machine.EXTRAS
    }
    assert needed == set()
    assert _imported(ast.parse("from pyarrow import parquet").body[0]) == ["pyarrow"]


def _imported(node: ast.stmt) -> list[str]:
    if isinstance(node, ast.Import):
        return [alias.name for alias in node.names]
    return [node.module or ""] if isinstance(node, ast.ImportFrom) else []
