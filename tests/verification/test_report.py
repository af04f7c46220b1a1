"""Every ``verify`` command writes the same kind of report, complete without any other file."""

import json
import re
from itertools import count
from pathlib import Path
from xml.etree import ElementTree

import pytest

from mcore_qwen3vl.errors import BadInput, CheckFailed
from mcore_qwen3vl.verification.measurement import Finding, Measurement
from mcore_qwen3vl.verification.report import Report, html, junit, write_report
from mcore_qwen3vl.verification.trace.tracing import Trace


def finding(name: str, error: float) -> Finding:
    return Finding("gradients", name, Measurement(error, 1.0, 7), 2e-5, 7, "images")


def report(*errors: float) -> Report:
    names = (f"model.language_model.layers.{i}.mlp.up_proj.weight" for i in count())
    found = [finding(*pair) for pair in zip(names, errors, strict=False)]
    return Report("a against b", {"layout": "tp2"}, found)


def read(report: Report) -> str:
    """Return the text of the page, which must be sound and load nothing."""
    text = html(report)
    assert not re.search(r"url\(|@import|https?://|<script|<img|\bsrc=|\bhref=", text)
    page = ElementTree.fromstring(re.sub(r"<!doctype html>|<meta [^>]*>", "", text))
    return re.sub(r"\s+", " ", " ".join(page.itertext()))


def test_passing_report() -> None:
    text = read(report(1e-6, 2e-6, 3e-6, 0.0))
    assert "PASSED" in text
    assert "All 4 comparisons hold." in text
    assert "FAILED" not in text
    assert "megatron-core" in text


def test_failing_report_names_the_worst_first() -> None:
    failing = report(1e-6, 5e-3, 3e-4, 1e-6)
    assert [finding.relative_error for finding in failing.failures] == [5e-3, 3e-4]
    assert [finding.relative_error for finding in failing.worst()[:2]] == [5e-3, 3e-4]
    text = read(failing)
    assert "FAILED" in text
    assert "2 of 4 comparisons failed." in text


def test_nothing_compared_is_no_success() -> None:
    assert "Nothing was compared" in read(Report("t"))
    with pytest.raises(CheckFailed, match="Nothing was compared"):
        Report("t").require()


def test_bitwise_comparisons_and_files() -> None:
    same = Finding("tensors", "a.weight", Measurement(count=7))
    off = Finding("tensors", "b.weight", Measurement(0.1, 1.0, 7, different=3))
    files = [Finding("files", "config.json"), Finding("files", "vocab", flaw="only in A")]
    text = read(Report("x and y", {}, [same, off, *files]))
    assert "2 of 4 comparisons failed." in text
    assert "3 values differ, by at most 0.1" in text
    assert "only in A" in text
    assert Report("x and y", {}, [same, files[0]]).ok
    assert same.to_dict()["largest_expected"] is None  # bits have no scale


def test_a_trace_says_where() -> None:
    bad = report(1e-6, 5e-3)
    settings = [Finding("settings", "rope_theta", flaw="is 10; the config says 5000000")]
    text = read(Trace(bad.title, {}, bad.findings, bad.findings[1], settings))
    assert "The models differ first at model.language_model.layers.1" in text
    assert "rope_theta is 10; the config says 5000000." in text


def test_infinite_errors(tmp_path: Path) -> None:
    infinite = report(float("inf"), 0.0, 1e-6, 1e-6)
    write_report(infinite, tmp_path)
    assert "not finite" in read(infinite)
    written = json.loads((tmp_path / "report.json").read_text(), parse_constant=pytest.fail)
    assert written["findings"][0]["relative_error"] == "inf"


def test_names_are_escaped() -> None:
    text = html(Report("<script>alert(1)</script>", {}, [finding("<b>", 1.0)]))
    assert "<script>" not in text
    assert "<b>" not in text


@pytest.mark.parametrize("none", ["\ufffe", "\uffff", "\ud800", "\x1b", "\0"])
def test_what_xml_cannot_hold_is_spelled_out(none: str) -> None:
    page = junit(Report(none, {}, [finding(f"a{none}b", 1.0)]))
    root = ElementTree.fromstring(page)
    assert f"a{ascii(none)[1:-1]}b" in "".join(root.itertext())


def test_folder_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(BadInput, match="cannot be written"):
        write_report(report(0.0), tmp_path / "file" / "report")


def test_ci_systems_see_each_part(tmp_path: Path) -> None:
    write_report(report(1e-6, 1.0), tmp_path)
    suite = ElementTree.parse(tmp_path / "junit.xml").getroot()
    assert (suite.get("tests"), suite.get("failures")) == ("1", "1")
    failure = suite.find("testcase[@name='gradients (images)']/failure")
    assert failure is not None
    assert failure.get("message") == "1 of 2 comparisons failed"
    assert "layers.1.mlp.up_proj" in (failure.text or "")
    write_report(report(1e-6), tmp_path)
    assert ElementTree.parse(tmp_path / "junit.xml").find(".//failure") is None
    write_report(report(), tmp_path)  # a report of no comparison is no success
    assert ElementTree.parse(tmp_path / "junit.xml").find("error") is not None
