"""Every flag of a run belongs to a row of the contract, or says why to none; the docs have it."""

from __future__ import annotations

import argparse
from collections import defaultdict
from functools import cache
from pathlib import Path

import pytest
from megatron.training.arguments import add_megatron_arguments

from mcore_qwen3vl.training.arguments.megatron_flags import Sorting
from mcore_qwen3vl.training.arguments.settings import add_arguments
from mcore_qwen3vl.training.contract import table
from mcore_qwen3vl.training.contract.table import ROWS, owner_of, reasons_for_no_row

PAGE = Path(__file__).parents[3] / "docs" / "resume.md"


@cache
def reaching() -> dict[str, list[str]]:
    """Return our flags, and those of Megatron's that reach a run, by their ``dest`` names."""
    ours, theirs = (argparse.ArgumentParser(allow_abbrev=False) for _ in range(2))
    add_arguments(ours)
    add_megatron_arguments(theirs)
    known, found = Sorting.for_installed().reaching, defaultdict[str, list[str]](list)
    for action in ours._actions:
        found[action.dest] += action.option_strings
    for action in theirs._actions:
        if known & {*action.option_strings}:
            found[action.dest] += action.option_strings
    del found["help"]
    return found


def test_every_flag_that_reaches_a_run_has_a_row_or_a_reason_for_none() -> None:
    named = [name for row in ROWS for name in row.flags] + list(reasons_for_no_row())
    assert sorted(named) == sorted(set(named)), "a flag has two owners"
    assert sorted(reaching().keys() - set(named)) == []
    owned = {name for row in ROWS for name in row.flags}
    assert sorted(owned - reaching().keys()) == [], "no such flag reaches a run"


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.name)
def test_messages_name_flags_as_the_parser_does(row: table.ContractRow) -> None:
    for name in row.flags:
        assert table.name_of_flag(name) in reaching()[name]


def test_a_setting_is_said_as_the_command_line_has_it() -> None:
    assert table.spell("shuffle", False) == "--no-shuffle"
    assert table.spell("shuffle", True) == "no --no-shuffle"
    assert table.spell("packing", True) == "--packing"
    assert table.spell("packing", False) == "no --packing"
    assert table.spell("freeze", ["vision", "aligner"]) == "--freeze vision aligner"
    assert table.spell("lr", 1e-3) == "--lr 0.001"


def test_the_owner_of_a_flag_is_found_by_its_name() -> None:
    owner = owner_of("adam_beta1")
    assert owner is not None
    assert owner.name == "hyperparameters"
    assert owner_of("log_interval") is None


def test_the_page_has_the_table_as_the_code_makes_it() -> None:
    _, _, rest = PAGE.read_text(encoding="utf-8").partition("<!-- the table of the code -->\n")
    written, _, _ = rest.partition("\n\n")
    assert written == table.markdown(), "write it: python -m mcore_qwen3vl.training.contract.table"


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.name)
def test_a_row_says_what_happens_in_the_words_of_the_page(row: table.ContractRow) -> None:
    assert row.rule.text.startswith(("allowed", "refused", "kept", "`--override"))
