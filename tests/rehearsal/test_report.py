"""The page of a rehearsal names its subject, plots the GPU's memory, and has readable labels."""

from __future__ import annotations

from pathlib import Path

import pytest

from mcore_qwen3vl.published_configs import PUBLISHED
from mcore_qwen3vl.rehearsal.command import Command, Role
from mcore_qwen3vl.rehearsal.rehearse import Rehearsal, RehearsedGpu, RoleOutcome
from mcore_qwen3vl.rehearsal.report import HEIGHT, LETTER, make_plot, write_page
from mcore_qwen3vl.runtime.gpus import find_gpu
from mcore_qwen3vl.simulated_gpu.device import Interval, Report

INTERVALS = {"model and optimizer": 0.3, "iteration 1": 2.0, "iteration 2": 2.0, "end": 0.0}


def outcome(peak: int, usable: int) -> RoleOutcome:
    """Make a role that holds `peak` bytes at most, in intervals of unequal length."""
    intervals = [
        Interval(n, seconds, 0, peak, peak, {}, [], [], {}) for n, seconds in INTERVALS.items()
    ]
    moments = [
        {"seconds": i / 10, "allocated": peak * i // 40, "sizes": {"weights": peak * i // 40}}
        for i in range(41)
    ]
    error = {"out of memory": False, "kind": "Stopped", "place": "here:1", "message": "why"}
    found = {"error": error, "over time": moments, "peak": moments[-1], "parameters": {}}
    return RoleOutcome(Role("every rank", 0, 0, 1), found, Report(intervals), 1.0, usable)


@pytest.mark.parametrize("peak", [36, 82, 90])
def test_the_memory_of_the_gpu_is_a_line_in_the_plot(peak: int) -> None:
    drawn = make_plot(outcome(peak * 10**9, 83 * 10**9))
    assert drawn.limit is not None
    assert 0 < drawn.limit < drawn.floor


def test_a_peak_that_is_far_below_it_is_drawn_alone() -> None:
    drawn = make_plot(outcome(2 * 10**8, 83 * 10**9))
    assert drawn.limit is None
    assert min(y for y, _ in drawn.ticks) < HEIGHT / 2


def test_labels_do_not_overlap() -> None:
    drawn = make_plot(outcome(10**9, 2 * 10**9))
    first, second, third = drawn.marks
    assert second.x < first.x + LETTER * len(first.name)  # on one line they would overlap
    assert second.y > first.y == third.y
    assert all(drawn.floor < mark.y < drawn.height for mark in drawn.marks)


def test_the_page_names_script_model_and_command(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.argv", ["/bin/mcore-qwen3vl", "rehearse", "sft_8b"])
    device = RehearsedGpu(find_gpu("h100-80gb"), 80.0, 2.0)
    run = Command(("--hf-model", str(PUBLISHED / "8b.json")), 1, "launch/sft_8b.sh")
    found = Rehearsal(run, device)
    found.outcomes.append(outcome(36 * 10**9, device.usable))
    write_page(found, tmp_path / "page.html")
    page = (tmp_path / "page.html").read_text()
    title = "Rehearsal of sft_8b: 8b, single on 1 x h100-80gb"
    assert f"<h1>{title}</h1>" in page
    assert f"{title}</title>" in page
    assert "mcore-qwen3vl rehearse sft_8b</dd>" in page
    assert '<line class="gpu"' in page


def test_names_and_errors_are_no_markup(tmp_path: Path) -> None:
    device, tag = RehearsedGpu(find_gpu("h100-80gb"), 80.0, 2.0), '"><script>'
    model = tmp_path / tag
    model.mkdir()
    (model / "config.json").write_bytes((PUBLISHED / "8b.json").read_bytes())
    found = Rehearsal(Command(("--hf-model", str(model)), 1, f"{tag}.sh"), device, (tag,))
    found.outcomes.append(outcome(36 * 10**9, device.usable))
    found.outcomes[0].measured["error"] |= {"kind": tag, "place": tag, "message": tag}
    found.outcomes[0].measured["peak"]["sizes"] = {tag: 1}
    write_page(found, tmp_path / "page.html")
    page = (tmp_path / "page.html").read_text()
    assert "&lt;script&gt;" in page
    assert tag not in page
