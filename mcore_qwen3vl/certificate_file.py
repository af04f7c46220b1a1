"""``report.json`` of ``verify --report`` as a file: its form, and whether its verdict follows.

It is read without what makes it: by a training run, which quotes it in a model card, and by
``verify certificate``.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from mcore_qwen3vl.errors import BadInput
from mcore_qwen3vl.json_and_yaml import parse_json

FORMAT_OF_REPORT = 2
FORMAT_OF_CERTIFICATE = 1

_KEYS: dict[str, type] = {
    "format": int, "title": str, "ok": bool, "verdict": str, "findings": list, "environment": dict,
    "command": str, "certificate": dict,
}  # fmt: skip
_KEYS_OF_FINDING: dict[str, type | tuple[type, ...]] = {
    "part": str, "name": str, "ok": bool, "relative_error": (int, float, str),
    "tolerance": (int, float),
}  # fmt: skip


def read_certificate(file: Path) -> dict[str, Any]:
    """Return the content of a ``report.json`` that has a certificate.

    Raises:
        BadInput: the file is no certificate of this form.
    """
    try:
        if file.exists() and not file.is_file():
            raise BadInput(f"{file} is no file: {_REMEDY}.")
        held = parse_json(file.read_text("utf-8"))
    except (OSError, ValueError) as error:
        raise BadInput(f"{file} cannot be read as JSON ({error}).") from None
    if not isinstance(held, dict) or "certificate" not in held:
        raise BadInput(f"{file} is no certificate: {_REMEDY}.")
    _require(file, held, _KEYS)
    for finding in held["findings"]:
        _require(file, finding, _KEYS_OF_FINDING)
    sealed = held["certificate"]
    _require(file, sealed, {"format": int, "code": str, "inputs": list})
    for one in sealed["inputs"]:
        _require(file, one, {"argument": str, "path": str, "files": dict})
    if (held["format"], sealed["format"]) != (FORMAT_OF_REPORT, FORMAT_OF_CERTIFICATE):
        raise BadInput(
            f"{file} has the format {held['format']} with certificate {sealed['format']}, and this "
            f"version reads {FORMAT_OF_REPORT} with {FORMAT_OF_CERTIFICATE}: check it with the "
            f"version of mcore-qwen3vl that wrote it, {held['environment'].get('mcore-qwen3vl')}."
        )
    return held


_REMEDY = "give a report.json that `mcore-qwen3vl verify ... --report DIR` wrote"


def read_to_quote(file: Path) -> dict[str, Any]:
    """Return the content of a certificate whose verdict follows from its findings.

    Raises:
        BadInput: as for `read_certificate`; or the verdict does not follow.
    """
    held = read_certificate(file)
    if follows(held) != held["ok"]:
        raise BadInput(
            f"{file} says {'equal' if held['ok'] else 'different'}, and its findings say "
            "otherwise: make the certificate again."
        )
    return held


def follows(held: Mapping[str, Any]) -> bool:
    """Return what the findings of a certificate say, whatever its verdict is."""
    found = held["findings"]
    return bool(found) and all(map(_holds, found))


def _holds(finding: Mapping[str, Any]) -> bool:
    """Return whether a finding's numbers are within its tolerance, and it says so itself."""
    error = finding["relative_error"]
    return bool(finding["ok"]) and not isinstance(error, str) and error <= finding["tolerance"]


def _require(file: Path, value: Any, keys: Mapping[str, Any]) -> None:
    wrong = "the whole"
    if isinstance(value, dict):
        wrong = next((key for key, kind in keys.items() if not _is_of(value.get(key), kind)), "")
    if wrong:
        raise BadInput(f"{file} is damaged: {wrong} is missing or of another kind. Copy it again.")


def _is_of(value: Any, kind: Any) -> bool:
    return isinstance(value, kind) and not (isinstance(value, bool) and kind is not bool)
