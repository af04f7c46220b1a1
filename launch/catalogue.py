"""What ``mcore-qwen3vl launch list`` names: the scripts beside this file, and how one is found."""

from __future__ import annotations

from pathlib import Path

FOLDER = Path(__file__).parent
"""This folder; in an installed package, the copy there."""

_KINDS = ("sft_*.sh", "pretrain_*.sh", "lora_*.sh", "dpo_*.sh", "*.yaml")


def scripts() -> dict[str, Path]:
    """Return the scripts for users and the configurations for VERL and clusters, by name."""
    files = (script for kind in _KINDS for script in sorted(FOLDER.glob(kind)))
    return {script.stem: script for script in files}


def find(name: str) -> Path | None:
    """Return the script or configuration of this name, with its suffix or without.

    Names of sizes have dots, as in ``qwen3.5``, so only these two suffixes are taken off.
    """
    return scripts().get(name.removesuffix(".sh").removesuffix(".yaml"))
