"""Run the examples of docs/python.md and of the functions' pages on this machine's device.

Each page's program runs in a process of its own, in one folder with a tiny checkpoint, its
conversion and a data set. The result is a line of JSON: the device, and what each program printed.
``make gpu-check`` has it as a part. A program that fails ends the run with its error.
"""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from pathlib import Path

import torch

ROOT = Path(__file__).parents[1]
PAGES = (
    *("python", "api/load_model", "api/save_model", "api/load_processor", "api/prepare_batch"),
    *("api/generate", "api/convert", "api/score", "api/verify"),
)
"""The pages of docs, in the order in which their programs can run."""


def program_of(page: str, layout: str = "Layout()") -> str:
    """Return the first Python program of a page, under another layout than its own."""
    text = (ROOT / "docs" / f"{page}.md").read_text(encoding="utf-8")
    program = re.search(r"^```python\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)
    assert program is not None, page
    return program[1].replace("Layout()", layout)


def write_files(folder: Path) -> None:
    """Write what the programs read: ``model``, ``converted`` and ``data.jsonl``."""
    from mcore_qwen3vl import convert
    from mcore_qwen3vl.tiny import write_tiny_checkpoint

    write_tiny_checkpoint(folder / "model")
    convert(folder / "model", folder / "converted")
    turns = [{"role": "user", "content": "1 + 1?"}, {"role": "assistant", "content": "2"}]
    record = json.dumps({"messages": turns})
    (folder / "data.jsonl").write_text(f"{record}\n{record}\n", encoding="utf-8")


def main(folder: Path, *python: str) -> None:
    """Run the programs with an interpreter and its options; `folder` is replaced."""
    shutil.rmtree(folder, ignore_errors=True)  # an earlier run's
    folder.mkdir(parents=True)
    write_files(folder)
    printed = {}
    for page in PAGES:
        (folder / "program.py").write_text(program_of(page), encoding="utf-8")
        command = [*(python or (sys.executable,)), "program.py"]
        done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
        if done.returncode:
            sys.exit(f"docs/{page}.md:\n{done.stderr}")
        printed[page] = done.stdout.splitlines()
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else "CPU"
    print(json.dumps({"device": device, **printed}))


if __name__ == "__main__":
    main(Path(sys.argv[1]), *sys.argv[2:])
