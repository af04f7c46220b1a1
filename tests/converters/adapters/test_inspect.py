"""``inspect`` describes an adapter with and without its base model."""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from mcore_qwen3vl.cli import main
from tests.command import exit_code
from tests.converters.adapters.conftest import Made


def inspect(capsys: pytest.CaptureFixture[str], *arguments: object) -> Any:
    """Run ``inspect``; return its exit code, and its JSON, text or error message."""
    with pytest.raises(SystemExit) as ended:
        main(["inspect", *map(str, arguments)])
    captured = capsys.readouterr()
    if ended.value.code:
        return ended.value.code, " ".join(captured.err.split())
    return 0, json.loads(captured.out) if "--json" in arguments else captured.out


def test_an_adapter(
    made: Callable[[str], Made], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source = made("swapped roles")
    code, found = inspect(capsys, source.folder, "--json")  # PEFT's config names the base
    assert (code, found["kind"], found["base"]) == (0, "adapter", str(source.base))
    assert (found["roles"], found["dtypes"], found["tensors"]) == ("swapped", ["float32"], 24)
    parts = {part["name"]: part for part in found["parts"]}
    down = parts["model.language_model.layers.*.mlp.experts.down_proj"]
    assert (down["count"], down["r"], down["shapes"]) == (4, 5, [[60, 36], [48, 60]])
    assert any("only in the canonical roles" in note for note in found["notes"])
    code, text = inspect(capsys, source.folder)
    assert "swapped" in text
    assert "vLLM reads the factors" in text

    moved = Path(shutil.copytree(source.folder, tmp_path / "moved"))
    config = json.loads((moved / "adapter_config.json").read_text())
    (moved / "adapter_config.json").write_text(
        json.dumps(config | {"base_model_name_or_path": "someone/model"})
    )
    code, found = inspect(capsys, moved, "--json")
    assert (code, found["base"], found["roles"], found["tensors"]) == (0, None, None, 24)
    code, found = inspect(capsys, moved, "--hf-config", source.base, "--json")
    assert (code, found["roles"]) == (0, "swapped")
    assert exit_code("lora", "convert", moved, tmp_path / "out") == 2
    assert "('someone/model') was not found" in " ".join(capsys.readouterr().err.split())


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (None, "which is not installed: pip install 'mcore-qwen3vl[lora]'."),
        ("import accelerate.none", "which fails: No module named 'accelerate.none'."),
    ],
)
def test_without_peft(
    text: str | None,
    expected: str,
    made: Callable[[str], Made],
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    source = made("swapped roles")
    if text is None:
        monkeypatch.setitem(sys.modules, "peft", None)
    else:
        (tmp_path / "peft.py").write_text(text)
        monkeypatch.syspath_prepend(tmp_path)
        monkeypatch.delitem(sys.modules, "peft", raising=False)
    code, message = inspect(capsys, source.folder)
    assert code == 2
    assert f"adapters need PEFT, {expected}" in message
