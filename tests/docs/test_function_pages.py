"""The examples of the functions' pages run as printed, on one rank and under TP 2.

test_examples.py runs the program of docs/python.md.
"""

from __future__ import annotations

import contextlib
import re

import pytest
from safetensors.torch import load_file

from benchmarks.python_examples import PAGES, program_of, write_files
from mcore_qwen3vl import Layout, load_processor
from mcore_qwen3vl.runtime.launch import run_layout

LAYOUTS = [Layout(), Layout(tp=2, sp=True)]
ON_ALL_RANKS = ("load_model", "save_model", "load_processor", "prepare_batch", "generate")
IN_ONE_PROCESS = ("convert", "score", "verify")


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    folder = tmp_path_factory.mktemp("examples")
    write_files(folder)
    return folder


def printed_by(page, layout, folder, ranks):
    """Return what the page's program prints, on each rank."""
    program = program_of(f"api/{page}", repr(layout))

    def on_rank():
        lines = []
        exec(
            program,
            {
                "__name__": "__main__",
                "print": lambda *words: lines.append(" ".join(map(str, words))),
            },
        )
        return lines

    with contextlib.chdir(folder):
        return run_layout(on_rank, ranks) if ranks else on_rank()


def test_every_page_has_a_test():
    pages = {page.removeprefix("api/") for page in PAGES} - {"python"}
    assert pages == {*ON_ALL_RANKS, *IN_ONE_PROCESS}


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_load_model(files, layout):
    counts = [
        int(re.sub(r"\D", "", line))
        for (line,) in printed_by("load_model", layout, files, layout.tp)
    ]
    whole = sum(t.numel() for t in load_file(files / "model" / "model.safetensors").values())
    assert sum(counts) == whole if layout.tp == 1 else max(counts) < whole < sum(counts)


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_save_model(files, layout, tmp_path):
    (tmp_path / "converted").symlink_to(files / "converted")
    printed_by("save_model", layout, tmp_path, layout.tp)
    saved = load_file(tmp_path / "exported" / "model.safetensors")
    there = load_file(files / "model" / "model.safetensors")
    assert saved.keys() == there.keys()
    assert all(saved[name].equal(tensor) for name, tensor in there.items())
    assert (tmp_path / "exported" / "tokenizer.json").exists()


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
@pytest.mark.parametrize("page", ["load_processor", "prepare_batch", "generate"])
def test_what_every_rank_prints(files, page, layout):
    """All ranks print the same, and as under any other layout, but for the padding of SP."""
    ranks = printed_by(page, layout, files, layout.tp)
    assert ranks == [ranks[0]] * layout.tp
    (line,) = ranks[0]
    if page == "prepare_batch":
        answer = load_processor(files / "model").tokenizer("Red.<|im_end|>")["input_ids"]
        assert line.startswith(f"{len(answer)} of ")
    elif page == "generate":
        assert ranks[0] == printed_by(page, Layout(), files, 1)[0]
    else:
        assert re.fullmatch(r"\[\d+(, \d+)*\]", line)


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_convert(files, layout, tmp_path):
    """What the example writes can be loaded under the layout."""
    (tmp_path / "model").symlink_to(files / "model")
    (line,) = printed_by("convert", layout, tmp_path, 0)
    assert re.fullmatch(r"True \d+ Megatron-Core tensors", line)
    (tmp_path / "model").unlink()
    (tmp_path / "converted-again").rename(tmp_path / "model")
    assert printed_by("load_model", layout, tmp_path, layout.tp) == printed_by(
        "load_model", layout, files, layout.tp
    )


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_score(files, layout):
    (line,) = printed_by("score", layout, files, 0)
    (files / "scores.jsonl").unlink()
    count, perplexity = re.fullmatch(r"(\d) records, perplexity ([\d.]+)", line).groups()
    assert count == "2"
    # Random weights, so about as many as there are words.
    assert 200 < float(perplexity) < 600


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_verify(files, layout):
    tensors, computed = printed_by("verify", layout, files, 0)
    assert tensors == "True"
    assert re.fullmatch(r"True All \d+ comparisons hold\.", computed)
