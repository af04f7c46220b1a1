"""The pages of the documentation, with their fenced blocks, links and commands."""

from __future__ import annotations

import re
import shlex
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
README = ROOT / "README.md"
PAGES = [
    README,
    ROOT / "CONTRIBUTING.md",
    ROOT / "CHANGELOG.md",
    *sorted(ROOT.glob("docs/**/*.md")),
]

_FENCE = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)


@dataclass(frozen=True)
class Block:
    """One fenced block."""

    page: str
    language: str  # empty where none is named
    text: str


def blocks(page: Path, *languages: str) -> list[Block]:
    """Return the fenced blocks of a page in order, only those of `languages` if any are given."""
    found = [Block(page.name, *match.groups()) for match in _FENCE.finditer(page.read_text())]
    return [block for block in found if not languages or block.language in languages]


def prose(page: Path) -> str:
    """Return a page without its fenced blocks."""
    return _FENCE.sub("", page.read_text())


def links(page: Path) -> list[str]:
    """Return the targets of the links in the prose."""
    return re.findall(r"\]\(([^)\s]+)\)", prose(page))


def anchors(page: Path) -> set[str]:
    """Return the anchors that ``page.md#...`` may name: those that GitHub and mkdocs write alike.

    mkdocs makes one hyphen of several, as after the ``--`` of a flag.
    """
    headings = re.findall(r"^#+ (.+)$", prose(page), re.MULTILINE)
    found = {
        re.sub(r"[^\w\- ]", "", heading).strip().lower().replace(" ", "-") for heading in headings
    }
    return {anchor for anchor in found if "--" not in anchor}


def commands(page: Path) -> list[list[str]]:
    """Return the words after each ``mcore-qwen3vl`` of a page, in blocks and in prose."""
    lines = [line for block in blocks(page) for line in joined(block.text).splitlines()]
    lines += re.findall(r"`([^`]+)`", prose(page).replace("\n", " "))
    found = []
    for line in lines:
        at = re.search(r"(?:^|[\s|;])mcore-qwen3vl ", line)
        if at:
            found.append(_words(line[at.end() :]))
    return found


def joined(text: str) -> str:
    """Join continued lines, a YAML string's included."""
    text = re.sub(r"\\\n\s*", " ", text)
    return re.sub(r"\n\s+(--)", r" \1", text)


def _words(text: str) -> list[str]:
    """Split shell words up to a comment or a redirection, without the brackets of optional ones."""
    text = text.replace("'", "") if text.count("'") % 2 else text
    words = shlex.split(text.replace("[", " ").replace("]", " "), comments=True)
    end = next((i for i, word in enumerate(words) if word in ("|", ">", "<<", "&&")), len(words))
    return words[:end]
