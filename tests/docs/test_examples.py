"""The examples of README and docs run exactly as printed."""

from __future__ import annotations

import contextlib
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from safetensors.torch import load_file

from mcore_qwen3vl.data.records.documents import Document
from mcore_qwen3vl.data.records.media import MediaFolder
from mcore_qwen3vl.data.records.messages import Conversation
from mcore_qwen3vl.data.records.parse import parse_record
from mcore_qwen3vl.data.records.tasks import parse_retrieval
from mcore_qwen3vl.layout import Layout
from mcore_qwen3vl.published_configs import PUBLISHED
from mcore_qwen3vl.runtime.launch import run_layout
from mcore_qwen3vl.tiny import write_tiny_checkpoint
from mcore_qwen3vl.training.arguments.parser import validate
from tests.docs.markdown import README, ROOT, blocks, commands
from tests.turns import slow

DOCS = ROOT / "docs"
ENVIRONMENT = {
    **os.environ,
    "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
    "OMP_NUM_THREADS": "1",
    "HF_HUB_OFFLINE": "1",
}


def run(command: list[str], folder: Path) -> str:
    """Run a command that must succeed in a clean process, and return its standard output."""
    return _run(command, folder).stdout


def _run(command: list[str], folder: Path) -> subprocess.CompletedProcess[str]:
    done = subprocess.run(command, cwd=folder, env=ENVIRONMENT, capture_output=True, text=True)
    assert done.returncode == 0, f"{command}\n{done.stdout}\n{done.stderr}"
    return done


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [1, 2])
def test_python_example(tmp_path, ranks):
    """It prints the losses, and none of the libraries' advice, in a user's own process too."""
    example = python_example(Layout(tp=ranks, sp=ranks > 1))
    (tmp_path / "program.py").write_text(example)
    write_tiny_checkpoint(tmp_path / "model")  # the same as `mcore-qwen3vl tiny model`
    torchrun = ["-m", "torch.distributed.run", "--nproc-per-node", str(ranks), "--standalone"]
    done = _run([sys.executable, *torchrun[: 5 * (ranks > 1)], "program.py"], tmp_path)
    assert done.stderr == ""
    losses = [float(loss) for loss in re.findall(r"loss ([\d.]+)", done.stdout)]
    assert len(losses) == done.stdout.count("\n") == 3 * ranks
    assert losses == sorted(losses, reverse=True)
    assert (tmp_path / "tuned" / "model.safetensors").exists()
    assert (tmp_path / "tuned" / "tokenizer.json").exists()


def python_example(layout: Layout) -> str:
    """Return the program of the page with `layout` for its own."""
    example, _ = blocks(DOCS / "python.md", "python")
    text = example.text.replace("layout = Layout()", f"layout = {layout!r}")
    assert f"layout = {layout!r}" in text
    return text


def _printed(layout: Layout, folder: Path) -> list[list[str]]:
    """Return what each rank of the page's program prints under `layout`."""
    text = python_example(layout)
    text = text.replace("torch.distributed.destroy_process_group()", "")  # run_layout does it

    def on_rank() -> list[str]:
        printed = []
        exec(text, {"print": printed.append})
        return printed

    write_tiny_checkpoint(folder / "model")
    with contextlib.chdir(folder):
        return run_layout(on_rank, layout.world_size)


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    """Return what the page's program prints without a layout."""
    return _printed(Layout(), tmp_path_factory.mktemp("alone"))[0]


@pytest.mark.parametrize(
    "layout", [Layout(tp=2, sp=True), *slow(Layout(cp=2), Layout(dp=2))], ids=str
)
def test_python_example_under_a_layout(layout, alone, tmp_path):
    """The losses are those of one process, and saving finds no copies that differ."""
    # With CP, all of the answer's tokens are on the first rank.
    other = ["loss 0.000"] * 3 if layout.cp > 1 else alone
    assert _printed(layout, tmp_path) == [alone, other]
    assert (tmp_path / "tuned" / "model.safetensors").exists()


def test_python_example_that_starts_its_ranks(tmp_path):
    """Each of the two has a part of the parameters."""
    _, example = blocks(DOCS / "python.md", "python")
    write_tiny_checkpoint(tmp_path / "model")
    printed = []
    with contextlib.chdir(tmp_path):
        exec(example.text, {"__name__": "__main__", "print": printed.append})
    ((first, second),) = printed
    whole = sum(t.numel() for t in load_file(tmp_path / "model" / "model.safetensors").values())
    assert max(first, second) < whole < first + second


@pytest.mark.parametrize("moe", [False, True], ids=["dense", "moe"])
def test_the_walk_of_one_prompt_holds_at_each_of_its_steps(moe, tmp_path):
    """The program compares what each step gives with Hugging Face's, and prints its shape."""
    page = DOCS / "design.md"
    (walk,) = blocks(page, "python")
    (shown,) = (b.text for b in blocks(page, "text") if b.text.startswith("tokens (B, S)"))
    text = walk.text.replace("torch.distributed.destroy_process_group()", "")  # run_layout does it

    def on_rank() -> list[str]:
        printed = []
        exec(text, {"print": lambda *words: printed.append(" ".join(map(str, words)))})
        return printed

    write_tiny_checkpoint(tmp_path / "model", moe=moe)
    with contextlib.chdir(tmp_path):
        (printed,) = run_layout(on_rank, 1)
    assert len(printed) == len(shown.splitlines())
    assert moe or printed == shown.splitlines()


def test_train_commands_pass_megatrons_validation(monkeypatch, tmp_path):
    """The shortest passes on one GPU, one on the 8 of its layout, and one with Qwen3.5."""
    monkeypatch.setattr("torch.cuda.get_device_capability", lambda device=None: (9, 0))
    monkeypatch.setattr("megatron.training.arguments.get_device_arch_version", lambda: 9)
    monkeypatch.setenv("CUDA_DEVICE_MAX_CONNECTIONS", "1")
    page = commands(DOCS / "training.md")
    least, whole, further = (words[1:] for words in page if words[:2] == ["train", "--hf-model"])
    values = {"HF_DIR": str(PUBLISHED / "8b.json"), "run": str(tmp_path / "run")}
    args = validate([values.get(word, word) for word in least], 1).args
    assert (args.lr, args.seq_length, args.pad_to_longest) == (1e-5, 8192, True)
    args = validate([values.get(word, word) for word in whole], 8).args
    assert (args.data_parallel_size, args.seq_length, args.spec) == (2, 8192, ["te"])
    values["HF_DIR"] = str(PUBLISHED / "qwen3.5_27b.json")
    settings = validate([values.get(word, word) for word in further], 1).settings
    assert (settings.loop.mtp_num_layers, settings.loop.mtp_loss_scaling_factor) == (1, 0.1)


@pytest.mark.slow  # a minute of starting commands
def test_the_readmes_four_tasks(tmp_path):
    """They run as printed, in order, in an empty directory; the answer is the page's."""
    tasks = blocks(README, "bash")
    assert len(tasks) == 4
    printed = [run(["bash", "-euo", "pipefail", "-c", task.text], tmp_path) for task in tasks]
    assert "All 271 comparisons hold" in printed[1]
    assert f"`{printed[-1].strip()}`" in README.read_text()


@pytest.mark.slow  # over a minute of starting commands
def test_tutorial(tmp_path):
    """Every shell block runs, in order, in an empty directory; the answers are the page's."""
    shell = blocks(DOCS / "tutorial.md", "bash", "sh", "console")
    assert len(shell) >= 6
    printed = [run(["bash", "-euo", "pipefail", "-c", block.text], tmp_path) for block in shell]
    answers = [block.text for block in blocks(DOCS / "tutorial.md", "text")]
    assert [p for p, b in zip(printed, shell, strict=True) if "generate" in b.text] == answers
    assert len(answers) == 2


def test_every_data_record_is_one(tmp_path):
    records = [
        json.loads(text)
        for block in blocks(DOCS / "data.md", "json")
        for text in _objects(block.text)
    ]
    parsed = [parse_record(record, MediaFolder(tmp_path, {})) for record in records]
    kinds = [type(one) for one in parsed]
    assert (kinds.count(Conversation), kinds.count(Document)) == (8, 5)
    page = blocks(DOCS / "embedding.md", "json")
    retrieval = [json.loads(text) for block in page for text in _objects(block.text)]
    texts = [set(parse_retrieval(record, MediaFolder(tmp_path, {}))) for record in retrieval]
    assert [len(one) for one in texts] == [4, 2, 3]


def _objects(text: str) -> list[str]:
    """Split a block into JSON objects: one over several lines, or one a line."""
    try:
        json.loads(text)
    except json.JSONDecodeError:
        return text.splitlines()
    return [text]


def test_conversion_example(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    write_tiny_checkpoint("model")
    (example,) = blocks(DOCS / "conversion.md", "python")
    exec(example.text, {})
    assert (tmp_path / "model-again" / "model.safetensors").exists()


def test_the_mapping_on_the_conversion_page_is_what_inspect_prints(tmp_path):
    from mcore_qwen3vl.converters.describe import inspect_path
    from mcore_qwen3vl.converters.mapping.lines import mapping_lines

    checkpoint = write_tiny_checkpoint(tmp_path / "model", moe=True)
    lines = {line.mcore: line for line in mapping_lines(inspect_path(checkpoint).mapping())}
    (shown,) = (b for b in blocks(DOCS / "conversion.md", "text") if "linear_qkv" in b.text)
    rows = [row for row in shown.text.splitlines() if "layers.{0..3}." not in row]
    assert len(rows) == 6
    for row in rows:
        cells = re.split(r"\s{2,}", row.strip())
        line = lines[cells[1]]
        assert "x".join(map(str, line.shape)) == cells[2]
        assert line.transform in cells
        stacked = "x".join(map(str, line.stacked))
        assert not stacked or stacked in cells
        parts = f" in {line.tp_parts} parts" if line.tp_parts > 1 else ""
        assert not line.cut_by or cells[-1] == f"{line.cut_by}: axis {line.tp_axis}{parts}"
