"""A missing package names the extra that brings it."""

from __future__ import annotations

import tomllib
from pathlib import Path

import pytest

from mcore_qwen3vl.errors import BadInput
from mcore_qwen3vl.runtime import extras

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize(("package", "extra"), extras._EXTRAS.items())
def test_the_extra_is_named_and_brings_it(
    package: str, extra: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    extras.require_extra(package, "--plot")
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert any(p.startswith(package) for p in project["optional-dependencies"][extra])
    monkeypatch.setattr(extras, "find_spec", lambda name: None)
    said = rf"--plot needs the package {package}: pip install 'mcore-qwen3vl\[{extra}\]'\."
    with pytest.raises(BadInput, match=said):
        extras.require_extra(package, "--plot")
