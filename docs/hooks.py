"""For mkdocs: the sources as they are installed, so that the API reference has the right names.

``converters/`` lies beside ``mcore_qwen3vl/`` and is installed inside it. Sphinx roles in
docstrings become cross-references, so that one that leads nowhere fails the build.
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
    for source, name in (("mcore_qwen3vl", ""), ("converters", "converters")):
        for file in (ROOT / source).rglob("*.py"):
            copy = TARGET / "mcore_qwen3vl" / name / file.relative_to(ROOT / source)
            copy.parent.mkdir(parents=True, exist_ok=True)
            copy.write_text(ROLE.sub(_reference, file.read_text(encoding="utf-8")), "utf-8")


def _reference(role):
    name = role[1]
    return f"[`{name}`][]" if name.startswith("mcore_qwen3vl.") else f"`{name}`"
