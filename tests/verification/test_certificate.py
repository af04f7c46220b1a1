"""A report that is handed over is checked against what it was made of."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from mcore_qwen3vl.errors import BadInput
from mcore_qwen3vl.files import package_modules
from mcore_qwen3vl.verification import certificate
from mcore_qwen3vl.verification.certificate import check_certificate
from tests.command import exit_code


@pytest.fixture(scope="module")
def compared(dense: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with two models and the certificate of their comparison."""
    folder = tmp_path_factory.mktemp("compared")
    for name in ("a", "b"):
        shutil.copytree(dense, folder / name)
    report = folder / "report"
    assert exit_code("verify", "tensors", folder / "a", folder / "b", "--report", report) == 0
    return folder


def failures(file: Path) -> dict[tuple[str, str], str]:
    report = check_certificate(file)
    return {(one.part, one.name): one.flaw for one in report.failures}


def test_a_certificate_holds_where_nothing_has_changed(compared: Path) -> None:
    file = compared / "report" / "report.json"
    assert exit_code("verify", "certificate", file) == 0
    inputs = [one for one in check_certificate(file).findings if one.part == "inputs"]
    assert {Path(one.name).parent.name for one in inputs} == {"a", "b"}
    assert any(one.name.endswith(".safetensors") for one in inputs)


def test_it_is_checked_without_torch(compared: Path) -> None:
    """Torch takes four times as long to import as the rest of the command."""
    code = (
        "import sys, mcore_qwen3vl.cli as cli\n"
        "try: cli.main(sys.argv[1:])\n"
        "except SystemExit as left: sys.exit(left.code + 40 * ('torch' in sys.modules))"
    )
    words = ["verify", "certificate", str(compared / "report" / "report.json")]
    done = subprocess.run([sys.executable, "-c", code, *words], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


@pytest.fixture
def moved(compared: Path, tmp_path: Path) -> Path:
    """Return a copy of it all whose certificate names the copy."""
    shutil.copytree(compared, tmp_path / "copy")
    file = tmp_path / "copy" / "report" / "report.json"
    file.write_text(file.read_text().replace(str(compared), str(tmp_path / "copy")))
    assert not failures(file)
    return tmp_path / "copy"


@pytest.mark.parametrize(
    "path", ["labels.py", "converters/mapping/table.py", "launch/catalogue.py"]
)
def test_a_change_in_any_module_is_other_code(
    path: str, compared: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two folders of the package are links in a checkout."""
    changed, sha256_of = package_modules()[path], certificate.sha256_of

    def sha256_after_the_change(file: Path) -> str:
        return "another" if file == changed else sha256_of(file)

    monkeypatch.setattr(certificate, "sha256_of", sha256_after_the_change)
    assert ("code", "mcore-qwen3vl") in failures(compared / "report" / "report.json")


def test_an_input_with_another_byte_a_new_and_a_missing_file_are_named(moved: Path) -> None:
    weights = next((moved / "a").glob("*.safetensors"))
    content = bytearray(weights.read_bytes())
    content[-1] ^= 1
    weights.write_bytes(content)
    (moved / "a" / "new.txt").touch()
    (moved / "b" / "tokenizer.json").unlink()
    assert failures(moved / "report" / "report.json") == {
        ("inputs", str(weights)): "it has another content",
        ("inputs", str(moved / "a" / "new.txt")): "it is new",
        ("inputs", str(moved / "b" / "tokenizer.json")): "it is not there any more",
    }
    shutil.rmtree(moved / "b")
    assert ("inputs", str(moved / "b")) in failures(moved / "report" / "report.json")


def _set_code(held: dict[str, Any]) -> None:
    held["certificate"]["code"] = "0" * 64


def _set_version(held: dict[str, Any]) -> None:
    held["environment"]["torch"] = "1.0"


def _make_it_good(held: dict[str, Any]) -> None:
    held["findings"][0] |= {"relative_error": 0.5, "tolerance": 0.0}


def _remove_findings(held: dict[str, Any]) -> None:
    held["findings"] = []


@pytest.mark.parametrize(
    ("change", "named"),
    [
        (_set_code, ("code", "mcore-qwen3vl")),
        (_set_version, ("versions", "torch")),
        (_make_it_good, ("verdict", "of its findings")),
        (_remove_findings, ("verdict", "of its findings")),
    ],
)
def test_what_was_changed_in_a_certificate_is_named(
    change: Callable[[dict[str, Any]], None], named: tuple[str, str], moved: Path
) -> None:
    file = moved / "report" / "report.json"
    held = json.loads(file.read_text())
    change(held)
    file.write_text(json.dumps(held))
    assert list(failures(file)) == [named]
    assert exit_code("verify", "certificate", file) == 1


def test_a_certificate_of_a_comparison_that_failed_fails(moved: Path) -> None:
    weights = next((moved / "a").glob("*.safetensors"))
    content = bytearray(weights.read_bytes())
    content[-1] ^= 1
    weights.write_bytes(content)
    words = ("verify", "tensors", moved / "a", moved / "b", "--report", moved / "other")
    assert exit_code(*words) == 1
    assert list(failures(moved / "other" / "report.json")) == [("verdict", "equal")]


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda held: held.pop("certificate"), "is no certificate: give a report.json"),
        (lambda held: held.pop("findings"), "findings is missing or of another kind"),
        (lambda held: held["findings"][0].pop("ok"), "ok is missing or of another kind"),
        (lambda held: held["certificate"].update(inputs=[3]), "the whole is missing"),
        (lambda held: held["certificate"].update(format=9), "with certificate 9, and this"),
    ],
)
def test_what_is_no_certificate_is_refused(
    change: Callable[[dict[str, Any]], object], said: str, compared: Path, tmp_path: Path
) -> None:
    held = json.loads((compared / "report" / "report.json").read_text())
    change(held)
    file = tmp_path / "report.json"
    file.write_text(json.dumps(held))
    with pytest.raises(BadInput, match=said):
        check_certificate(file)
    file.write_text("{")
    with pytest.raises(BadInput, match="cannot be read as JSON"):
        check_certificate(file)
