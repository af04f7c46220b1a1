"""For mkdocs: a copy of the sources in which Sphinx roles are cross-references.

So a role in a docstring that leads nowhere fails the build.
"""

import re
import shutil
from pathlib import Path

ROOT = Path(__file__).parents[1]
TARGET = ROOT / "build" / "api"
ROLE = re.compile(r":(?:attr|class|data|func|meth|mod):`~?([^`]+)`")


def on_startup(command, dirty):  # mkdocs calls it with these keywords
    """Fill ``build/api``, before the handler of docstrings looks for it."""
    shutil.rmtree(TARGET, ignore_errors=True)
    sources = ROOT / "mcore_qwen3vl"
    shutil.copytree(sources, TARGET / sources.name, ignore=shutil.ignore_patterns("__pycache__"))
    for file in TARGET.rglob("*.py"):
        file.write_text(ROLE.sub(_reference, file.read_text(encoding="utf-8")), "utf-8")


def _reference(role):
    name = role[1]
    return f"[`{name}`][]" if name.startswith("mcore_qwen3vl.") else f"`{name}`"
