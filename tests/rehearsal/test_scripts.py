"""Every launch script runs and fits at its real size, one rank of each role, as its header says."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from mcore_qwen3vl.rehearsal.rehearse import SPARE
from mcore_qwen3vl.training.events import FINALIZE, FORWARD_BACKWARD
from tests.docs.markdown import ROOT
from tests.rehearsal.conftest import KNOWN_HOST_SYNCS, WITHOUT_TE, Command, skip_other_torch

SCRIPTS = sorted((ROOT / "launch").glob("*_*.sh"))
TOLERANCE = 0.02  # of memory; benchmarks/launch_memory.py records an intended change
ROUNDING = 0.11  # GB
ROW_OF_TE_KEEPS_NOTHING = ("sft_2b", "pretrain_2b", "lora_2b", "lora_4b", "lora_8b")  # as it says
WITHOUT_TE_ROW = ("sft_qwen3.8_2.4t_a95b",)  # was rehearsed where there is no Transformer Engine
ROWS = [
    pytest.param(script, spec, id=f"{script.stem}-{spec}", marks=marks)
    for script in SCRIPTS
    for spec, marks in (("torch", ()), ("te", WITHOUT_TE))
    if spec == "torch" or script.stem not in WITHOUT_TE_ROW
]


def figures(text: str) -> list[float]:
    """Return the numbers in a header's line about memory."""
    stated = re.search(r"([\d.]+ GB reserved of .*?\))", " ".join(text.split("\n# ")), re.DOTALL)
    assert stated is not None
    return [float(number) for number in re.findall(r"\d+\.\d", stated[1])]


def recorded(name: str) -> dict[str, list[float]]:
    """Return what the page says of a script's roles: GB held and reserved."""
    page = (ROOT / "docs" / "measurements" / "launch_scripts.md").read_text()
    rows = re.findall(rf"^\| {name} \| (.+?) \| *([\d.]+) \| *([\d.]+) ", page, re.MULTILINE)
    return {role: [float(held), float(reserved)] for role, held, reserved in rows}


def waiting(text: str) -> list[float]:
    """Return the percentage of an iteration that a rank waits, if the header states it."""
    stated = " ".join(text.split("\n# "))
    return [float(share) for share in re.findall(r"A rank waits ([\d.]+)% of an iteration", stated)]


@pytest.mark.slow
@pytest.mark.parametrize(("script", "spec"), ROWS)
def test_it_runs_and_fits_as_its_row_says(command: Command, script: Path, spec: str) -> None:
    stated = recorded(script.stem if spec == "torch" else f"{script.stem}, {spec}")
    less = spec == "te" and script.stem in ROW_OF_TE_KEEPS_NOTHING
    flags = ["--no-keep-activations"] * less
    code, found = command("--no-suggest", script, "--spec", spec, *flags)
    assert code == 0, found
    taken = {}
    for role in found["roles"]:
        assert role["spare"] >= SPARE * role["usable"], role["role"]
        assert role["faults"] == {}
        inside = [w for w in role["host syncs"] if w["phase"] in (FORWARD_BACKWARD, FINALIZE)]
        assert [w for w in inside if not w["place"].startswith(KNOWN_HOST_SYNCS)] == []
        name = role["role"]["name"].partition(", ")[0]
        taken[name] = [role["peak"] / 1e9, role["reserved"] / 1e9]
    assert taken.keys() == stated.keys()
    skip_other_torch(spec)
    for role, figures_of_role in stated.items():
        assert taken[role] == pytest.approx(figures_of_role, rel=TOLERANCE, abs=ROUNDING), role
    if spec == "torch":
        header = pytest.approx(figures(found["memory"]), rel=TOLERANCE, abs=ROUNDING)
        assert figures(script.read_text()) == header
        modelled = [] if found["pipeline"] is None else [100 * found["pipeline"]["bubble"]]
        assert waiting(script.read_text()) == pytest.approx(modelled, abs=0.1)


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda script: script.stem)
def test_its_header_states_room_to_spare(script: Path) -> None:
    reserved, usable, held, *parts = figures(script.read_text())
    assert reserved <= (1 - SPARE) * usable
    assert sum(parts) == pytest.approx(held, abs=0.3)
    assert held <= reserved


def test_full_fine_tuning_of_the_largest_model_waits_little() -> None:
    stated = {s.stem: waiting(s.read_text()) for s in SCRIPTS if "235b" in s.stem}
    assert max(stated["sft_235b_a22b"] + stated["pretrain_235b_a22b"]) <= 12


def paragraphs(path: Path) -> list[str]:
    """Return the paragraphs of a page, or of a script's header, each on one line."""
    text = re.sub(r"^# ?", "", path.read_text(), flags=re.MULTILINE)
    return [" ".join(paragraph.split()) for paragraph in text.split("\n\n")]


def hiding(path: Path) -> list[float]:
    """Return the seconds of a step that a text states where it names ``EP_OVERLAP=1``."""
    (text,) = (text for text in paragraphs(path) if "EP_OVERLAP=1" in text and " s " in text)
    return [float(seconds) for seconds in re.findall(r"([\d.]+) s\b", text)]


SFT_30B = ROOT / "launch" / "sft_30b_a3b.sh"


@pytest.mark.slow
def test_the_step_that_hides_the_exchange_is_as_its_header_says(
    command: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    modelled = []
    for hides in ("1", "0"):
        monkeypatch.setenv("EP_OVERLAP", hides)
        code, found = command("--no-suggest", SFT_30B)
        assert code == 0, found
        modelled.append(found["step"]["seconds"])
    assert hiding(SFT_30B)[:2] == pytest.approx(modelled, abs=0.15)


def test_a_guide_says_of_that_step_what_its_header_says() -> None:
    assert len(hiding(SFT_30B)) >= 2
    assert hiding(ROOT / "docs" / "rehearse.md") == hiding(SFT_30B)[:2]


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda script: script.stem)
def test_a_header_that_praises_the_overlap_says_for_which_launches(script: Path) -> None:
    """The default constants of ``rehearse`` have a slower host than those of the comparison."""
    praised = [text for text in paragraphs(script) if "TFLOP/s" in text]
    assert all(re.search(r"\b8 us\b", text) for text in praised)
