"""What a report needs to be handed over: hashes of what was compared and of the code that did it.

``--report DIR`` writes it into ``report.json``, and ``verify certificate FILE`` checks it::

    certificate  1, raised when a key below changes its meaning
    code         SHA-256 of this package's modules
    inputs       for each folder that the command was given: its argument, path, and the SHA-256 of
                 its files by name
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from mcore_qwen3vl.certificate_file import FORMAT_OF_CERTIFICATE, follows, read_certificate
from mcore_qwen3vl.converters.hf.companions import sha256_of
from mcore_qwen3vl.converters.identify import PathKind, identify
from mcore_qwen3vl.files import package_modules, refuse_special_files
from mcore_qwen3vl.verification.measurement import Finding
from mcore_qwen3vl.verification.report import PACKAGES, Report, environment

_WEIGHTS = (PathKind.ADAPTER, PathKind.MEGATRON, PathKind.HUGGINGFACE)


def certify(report: Report, arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Return a report with hashes, as plain values for JSON.

    Args:
        arguments: the command's; the folders of weights among them are hashed.
    """
    inputs = [
        {"argument": name, "path": str(path.absolute()), "files": _hashes_of(path)}
        for name, path in sorted(_folders(arguments))
    ]
    sealed = {"format": FORMAT_OF_CERTIFICATE, "code": hash_of_code(), "inputs": inputs}
    return {**report.to_dict(), "certificate": sealed}


def _folders(arguments: Mapping[str, Any]) -> Iterator[tuple[str, Path]]:
    """Yield the arguments that are folders of weights, with their names."""
    for name, value in arguments.items():
        for path in value if isinstance(value, list | tuple) else [value]:
            if isinstance(path, Path) and path.is_dir() and identify(path).kind in _WEIGHTS:
                yield name, path


def _hashes_of(path: Path) -> dict[str, str]:
    """Return the SHA-256 of each file of a checkpoint, of a run of that iteration which is read."""
    folder = identify(path).folder
    refuse_special_files(folder)
    files = sorted(file for file in folder.rglob("*") if file.is_file())
    return {str(file.relative_to(folder)): sha256_of(file) for file in files}


def hash_of_code() -> str:
    """Return one SHA-256 of the names and contents of this package's modules."""
    whole = hashlib.sha256()
    for path, file in package_modules().items():
        whole.update(f"{path}\0{sha256_of(file)}\n".encode())
    return whole.hexdigest()


def check_certificate(file: Path) -> Report:
    """Check a ``report.json``: its form, its verdict, and that what it names is what is here.

    Nothing of its command is run. Give that command again to repeat the comparison.

    Raises:
        BadInput: the file is no certificate of this form.
    """
    held = read_certificate(file)
    report = Report(f"The certificate {file.name} of {held['title']}")
    report.environment = {"its command": held["command"], "its verdict": held["verdict"]}
    said = follows(held)
    flaw = "" if said == held["ok"] else f"it says {held['ok']}, and its findings say {said}"
    report.findings.append(Finding("verdict", "of its findings", flaw=flaw))
    flaw = "" if held["ok"] else held["verdict"]
    report.findings.append(Finding("verdict", "equal", flaw=flaw))
    sealed = held["certificate"]
    flaw = "" if sealed["code"] == hash_of_code() else "it was made by other code than is installed"
    report.findings.append(Finding("code", "mcore-qwen3vl", flaw=flaw))
    here = environment()
    for package in PACKAGES:
        then, now = held["environment"].get(package), here.get(package)
        flaw = "" if then == now else f"{then} then, {now} now"
        report.findings.append(Finding("versions", package, flaw=flaw))
    for one in sealed["inputs"]:
        report.findings += _compared_files(Path(one["path"]), one["files"])
    return report


def _compared_files(path: Path, files: Mapping[str, str]) -> Iterator[Finding]:
    """Compare the files of an input with those that are there now."""
    if not path.is_dir():
        yield Finding("inputs", str(path), flaw="it is not there")
        return
    now = _hashes_of(path)
    for name in sorted({*files, *now}):
        flaw = ""
        if name not in now:
            flaw = "it is not there any more"
        elif name not in files:
            flaw = "it is new"
        elif files[name] != now[name]:
            flaw = "it has another content"
        yield Finding("inputs", str(path / name), flaw=flaw)
