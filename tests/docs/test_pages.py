"""All links, commands, flags, files, targets and modules that the pages name exist."""

from __future__ import annotations

import argparse
import ast
import re
from importlib.util import find_spec
from runpy import run_path
from typing import Any

import pytest
import typer
import yaml

import mcore_qwen3vl
from mcore_qwen3vl.cli import app
from mcore_qwen3vl.data.records.hooks import GROUP as HOOKS
from mcore_qwen3vl.files import package_modules
from mcore_qwen3vl.losses.registry import GROUP as FAMILIES
from mcore_qwen3vl.losses.tokens import GROUP as LOSSES
from mcore_qwen3vl.simulated_gpu.__main__ import make_parser
from mcore_qwen3vl.training.arguments.settings import add_arguments
from mcore_qwen3vl.verification.search import search
from tests.docs.markdown import PAGES, README, ROOT, anchors, blocks, commands, links, prose

NAMES = [str(page.relative_to(ROOT)) for page in PAGES]
each_page = pytest.mark.parametrize("page", PAGES, ids=NAMES)

# Flags of other programs that the pages name.
FOREIGN = {
    "pip": {"--dry-run", "--no-build-isolation", "--no-deps"},
    "megatron-core": {"--ckpt-format"},
    "gpt_hybrid_conversion": {"--direction"},
    "launch": {"--dry-run"},
    "lmms-eval": {"--gen_kwargs", "--include_path", "--model_args"},
    "sbatch": {
        *("--array", "--dependency", "--exclusive", "--gpus-per-node", "--nodes"),
        *("--requeue", "--signal", "--time"),
    },
    "srun": {"--kill-on-bad-exit"},
    "verification.curves": {"--resume"},
    "figures": {"--page"},
    "numerics": {"--quick"},
    "parity-2b": {"--formula", "--layers", "--layouts", "--planted"},
    "gpu-check": {"--minutes", "--only", "--patience"},
    "launch_memory": {"--published"},
}
SOURCES = ("", "mcore_qwen3vl/", "mcore_qwen3vl/model/", "docs/")
"""Folders that a path on a page may be relative to."""


@pytest.fixture(scope="module")
def training_flags() -> set[str]:
    """Return Megatron's flags and ours."""
    from megatron.training.arguments import add_megatron_arguments

    parser = argparse.ArgumentParser(allow_abbrev=False)
    add_arguments(add_megatron_arguments(parser))
    return set(parser._option_string_actions)


def flags_of(command: Any) -> set[str]:
    found = {flag for p in command.params for flag in (*p.opts, *p.secondary_opts)}
    return {*found, "--help"}


def every_command(command: Any) -> list[Any]:
    inner = getattr(command, "commands", {}).values()
    return [command, *(found for one in inner for found in every_command(one))]


@each_page
def test_yaml_can_be_read(page):
    for block in blocks(page, "yaml", "yml"):
        yaml.safe_load(block.text)


def test_readme_is_short():
    assert len(README.read_text().splitlines()) <= 160


@each_page
def test_links_lead_somewhere(page):
    for link in links(page):
        if link.startswith("http"):
            continue
        path, _, anchor = link.partition("#")
        target = page.parent / path if path else page
        assert target.exists(), link
        around = (
            ROOT / "docs" if page.is_relative_to(ROOT / "docs") else ROOT
        )  # make docs has no other
        assert target.resolve().is_relative_to(around), link
        assert not anchor or anchor in anchors(target), link


@each_page
def test_commands_and_their_flags_exist(page, training_flags):
    for words in commands(page):
        command, rest = typer.main.get_command(app), list(words)
        while hasattr(command, "commands") and rest and not rest[0].startswith("-"):
            assert rest[0] in command.commands, words
            command = command.commands[rest.pop(0)]
        forwards = command.name in ("train", "rehearse")
        known = flags_of(command) | (training_flags if forwards else set())
        given = {word.partition("=")[0] for word in rest if word.startswith("--")}
        assert given <= known, words


@each_page
def test_flags_in_prose_exist(page, training_flags):
    known = {flag for one in every_command(typer.main.get_command(app)) for flag in flags_of(one)}
    others = (make_parser(), search.make_parser())
    known |= training_flags.union(
        *FOREIGN.values(), *(one._option_string_actions for one in others)
    )
    named = set(re.findall(r"(?<![\w-])--[a-z][a-z0-9_-]+", prose(page)))
    assert named <= known, sorted(named - known)


@each_page
def test_files_targets_and_modules_exist(page):
    text = page.read_text()
    for path in re.findall(r"(?<![\w./-])(?:[\w-]+/)+[\w-]+\.(?:py|sh|toml|yml)\b", text):
        if not path.startswith((".github", "github/")):
            assert any((ROOT / folder / path).exists() for folder in SOURCES), path
    for name in re.findall(r"`(test_\w+\.py)`", text):
        assert list((ROOT / "tests").rglob(name)), name
    targets = re.findall(r"^([a-z0-9-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE)
    for target in re.findall(r"(?:^|`)make ([a-z0-9-]+)", text, re.MULTILINE):
        assert target in targets, target
    for module in re.findall(r"python -m ([\w.]+)", text):
        assert module in ("pytest", "verl.trainer.main_ppo") or find_spec(module), module
    for module in re.findall(r"`(mcore_qwen3vl(?:\.\w+)+)`", prose(page)):
        assert module in (LOSSES, FAMILIES, HOOKS) or _importable(module), module


def test_the_design_page_says_where_to_look():
    page = (ROOT / "docs" / "design.md").read_text()
    table = page.partition("## Where to look\n")[2].partition("\n## ")[0]
    rows = re.findall(r"`([\w/]+\.py)`: (`[\w.]+`(?:(?:, | and )`\w+`)*)", table)
    assert len(rows) >= 70
    for path, names in rows:
        tree = ast.parse((ROOT / "mcore_qwen3vl" / path).read_text())
        there = _defined(tree.body)
        for name in re.findall(r"[\w.]+", names.replace(" and ", " ")):
            assert name in there, f"{path}: {name}"


def test_the_design_page_names_what_runs_only_on_a_gpu():
    page = (ROOT / "docs" / "design.md").read_text()
    table = page.partition("### What runs only on a GPU\n")[2].partition("\n## ")[0]
    asks = re.compile(r"is_cuda|cuda\.is_available|\.type == \"cuda\"")
    asking = {path for path, file in package_modules().items() if asks.search(file.read_text())}
    # The simulated GPU, and what measures on it, have no other branch.
    asking = {path for path in asking if not path.startswith(("simulated_gpu/", "rehearsal/"))}
    assert set(re.findall(r"`([\w/]+\.py)`", table)) == asking


def _defined(body: list[ast.stmt]) -> set[str]:
    """Return the names that a module defines, and the methods of its classes as ``Class.name``."""
    found = set()
    for node in body:
        if isinstance(node, ast.Assign | ast.AnnAssign):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            found |= {target.id for target in targets if isinstance(target, ast.Name)}
        elif isinstance(node, ast.ClassDef):
            found |= {node.name, *(f"{node.name}.{name}" for name in _defined(node.body))}
        elif isinstance(node, ast.FunctionDef):
            found.add(node.name)
    return found


def _importable(name: str) -> bool:
    """Return whether `name` is a module, or something in one; parents are imported."""
    parent, _, last = name.rpartition(".")
    try:
        return find_spec(name) is not None
    except ModuleNotFoundError:  # the parent is a module, not a package
        return hasattr(__import__(parent, fromlist=[last]), last)


def test_the_api_reference_has_every_package():
    shown = {
        name.removeprefix("::: ")
        for page in ROOT.glob("docs/api/*.md")
        for name in page.read_text().splitlines()
        if name.startswith("::: ")
    }
    packages = {f"mcore_qwen3vl.{p.parent.name}" for p in ROOT.glob("mcore_qwen3vl/*/__init__.py")}
    parts = [init.parent for init in ROOT.glob("converters/*/__init__.py")]
    parts += [file for file in ROOT.glob("converters/*.py") if file.stem != "__init__"]
    packages |= {f"mcore_qwen3vl.converters.{part.stem}" for part in parts}
    unshown = {"cli", "converters", "launch"}  # the parts of `converters` are shown
    assert packages - shown == {f"mcore_qwen3vl.{name}" for name in unshown}


def test_the_api_reference_has_every_function_of_the_package():
    """A function has a page of its own, with an example above its description."""
    functions = [name for name in mcore_qwen3vl.__all__ if name[0].islower()]
    assert len(functions) == 9
    for name in functions:
        page = ROOT / "docs" / "api" / f"{name}.md"
        home = getattr(mcore_qwen3vl, name).__module__
        example, _, reference = page.read_text().partition("\n::: ")
        assert reference.splitlines()[0] == f"{home}.{name}"
        assert "```python\n" in example or name == "reduce_gradients"


def test_references_in_docstrings_lead_into_the_reference():
    """As the site's build asks: the build needs packages that the tests do not install."""
    role = run_path(str(ROOT / "docs" / "hooks.py"))["ROLE"]
    shown = {
        line.removeprefix("::: ")
        for page in ROOT.glob("docs/api/*.md")
        for line in page.read_text().splitlines()
        if line.startswith("::: ")
    }
    sources = [*ROOT.glob("mcore_qwen3vl/**/*.py"), *ROOT.glob("converters/**/*.py")]
    targets = {target for source in sources for target in role.findall(source.read_text())}
    ours = [target for target in targets if target.startswith("mcore_qwen3vl.")]
    lost = [target for target in ours if not _is_below(target, shown)]
    assert not lost, sorted(lost)


def _is_below(name: str, packages: set[str]) -> bool:
    return any(f"{name}.".startswith(f"{package}.") for package in packages)


def test_the_readme_names_every_page():
    named = {link.partition("#")[0] for link in links(README)}
    pages = {str(page.relative_to(ROOT)) for page in ROOT.glob("docs/*.md")}
    assert pages - named == {"docs/index.md"}  # the site's own front page


MEASUREMENTS = sorted(ROOT.glob("docs/measurements/*.md"))


@pytest.mark.parametrize("page", MEASUREMENTS, ids=lambda page: page.stem)
def test_measurements_say_when_where_and_by_which_command(page):
    stated = dict(re.findall(r"^\| (\w+) \| (.+) \|$", page.read_text(), re.MULTILINE))
    assert re.search(r"20\d\d-\d\d-\d\d", stated["date"])
    assert {"commit", "versions"} <= stated.keys()
    assert stated.keys() & {"machine", "card"}
    assert re.search(r"`[^`]*(make|python|mcore-qwen3vl) [^`]+`", stated["command"])


def test_measurements_are_named_by_a_guide():
    guides = [page for page in PAGES if page.parent != MEASUREMENTS[0].parent]
    named = {(p.parent / link.partition("#")[0]).resolve() for p in guides for link in links(p)}
    assert set(MEASUREMENTS) <= named


def test_the_page_of_proofs_names_commands():
    page = ROOT / "docs" / "verification.md"
    table = page.read_text().partition("## What is proven\n")[2].partition("\n## ")[0]
    rows = [line for line in table.splitlines() if line.startswith("|")][2:]
    assert len(rows) >= 8
    for row in rows:
        assert re.search(r"`(make|python|pytest|mcore-qwen3vl) [^`]+` \|$", row), row
    assert not blocks(page, "python")
