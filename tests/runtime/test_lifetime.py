"""Processes and folders end with the process that they were made for, however it ends."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from tests.leftovers import ENDINGS, run_and_end

PARENT = """
import multiprocessing, pathlib, sys, tempfile, time
from mcore_qwen3vl.runtime.lifetime import end_with_parent, scratch_folder

def work(folder):
    end_with_parent()
    (folder / f"here-{multiprocessing.current_process().name}").touch()
    time.sleep(600)

if __name__ == "__main__":
    with scratch_folder() as folder:
        children = []
        for method in ("fork", "spawn"):
            context = multiprocessing.get_context(method)
            children.append(context.Process(target=work, args=(folder,), daemon=True))
            children[-1].start()
        while len(list(folder.iterdir())) < 2:
            time.sleep(0.01)
        pathlib.Path(sys.argv[1]).touch()
        if sys.argv[2] != "success":
            time.sleep(600)
        for child in children:
            child.kill()
            child.join()
"""


@pytest.mark.parametrize("ending", ENDINGS)
def test_children_and_scratch_folder_go_with_the_parent(ending: str, tmp_path: Path) -> None:
    program, started = tmp_path / "program.py", tmp_path / "started"
    program.write_text(PARENT)
    command = [sys.executable, program, started, ending]
    left = run_and_end(command, tmp_path, ending, processes=3, ready=lambda _: started.exists())
    assert left.anything == []
    assert (left.exit_code == 0) == (ending == "success"), left.printed
