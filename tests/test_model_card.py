"""A model card says what an export is made of, loads with the hub's library, and names no path."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
from huggingface_hub import ModelCard

from mcore_qwen3vl import model_card
from mcore_qwen3vl.converters.mapping.forms import CLASSIFIER, HEADLESS, HeadForm
from mcore_qwen3vl.layout import Layout
from mcore_qwen3vl.runtime.launch import run_layout
from mcore_qwen3vl.tiny import write_tiny_checkpoint
from mcore_qwen3vl.verification.curves import Job, run_rank, train
from tests.command import exit_code

OF_BASE = "---\nlicense: apache-2.0\nlicense_link: https://x.org/L\npipeline_tag: {}\n---\n# Base\n"


@pytest.fixture
def base(dense: Path, tmp_path: Path) -> Path:
    """Return a model as the Hugging Face cache has it, with its card."""
    folder = tmp_path / "models--Acme--Tiny-VL" / "snapshots" / "abc123"
    shutil.copytree(dense, folder)
    (folder / "README.md").write_text(OF_BASE.format("image-text-to-text"))
    return folder


def card_in(folder: Path, *private: Path) -> ModelCard:
    """Load a card as the hub does, after a look for paths of this machine."""
    file = folder / "README.md"
    text = file.read_text(encoding="utf-8")
    for path in (*private, Path.home(), Path.cwd()):
        assert str(path) not in text
    assert str(ModelCard(text)) == text
    return ModelCard.load(file)


def test_a_run_and_the_conversion_of_its_checkpoint_write_the_same_card(
    base: Path, data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    proof = tmp_path / "proof"
    words = ["verify", "roundtrip", str(base), "--report", str(proof)]
    monkeypatch.setattr("sys.argv", ["mcore-qwen3vl", *words])  # as the certificate quotes them
    assert exit_code(*words) == 0
    job = Job(base, data, Layout(dp=2), steps=2, flags=("--save", str(tmp_path / "run")))
    export, quoted = tmp_path / "export", ("--certificate", str(proof / "report.json"))
    train(job, tmp_path, "--save-hf", str(export), "--model-card", *quoted)
    card = card_in(export / "iter_0000002", tmp_path, data)
    assert card.data.to_dict() == {
        "base_model": "Acme/Tiny-VL",
        "base_model_relation": "finetune",
        "datasets": [data.name],
        "library_name": "transformers",
        "license": "apache-2.0",
        "license_link": "https://x.org/L",
        "pipeline_tag": "image-text-to-text",
        "tags": ["mcore-qwen3vl", "megatron-core"],
    }
    for words in (
        "| steps done | 2 |",
        "| learning rate | `--lr 0.001` |",
        "`--clip-grad",
        "`verify roundtrip`: All 141 comparisons hold.",
        "of `Acme/Tiny-VL`, SHA-256: `model.safetensors` ",
        "| megatron-core | 0.19",
    ):
        assert words in card.text
    convert = ("convert", "mcore-to-hf", tmp_path / "run")
    assert exit_code(*convert, tmp_path / "again", "--model-card", *quoted) == 0
    assert (tmp_path / "again" / "README.md").read_text() == str(card)
    assert exit_code(*convert, tmp_path / "plain") == 0  # the base's own card is copied
    assert ModelCard.load(tmp_path / "plain" / "README.md").text.strip() == "# Base"


def test_a_run_that_goes_on_without_naming_its_base_still_names_it_in_the_card(
    base: Path, data: Path, tmp_path: Path
) -> None:
    job = Job(base, data, steps=1, batch=1, flags=("--save", str(tmp_path / "run")))
    train(job, tmp_path)
    words = replace(job, steps=2).argv
    start = words.index("--load-hf")
    del words[start : start + 2]
    words += ["--save-hf", str(tmp_path / "e"), "--model-card"]
    run_layout(run_rank, 1, words, tmp_path / "output.txt")
    card = card_in(tmp_path / "e" / "iter_0000002", tmp_path)
    assert card.data.base_model == "Acme/Tiny-VL"
    assert "| steps done | 2 |" in card.text


def test_the_card_of_an_adapter_says_that_it_is_one(base: Path, data: Path, tmp_path: Path) -> None:
    flags = ("--lora-rank", "4", "--lora-target", "q_proj", "v_proj")
    job = Job(base, data, steps=1, batch=1, flags=flags)
    train(job, tmp_path, "--save-hf", str(tmp_path / "export"), "--model-card")
    adapter = tmp_path / "export" / "iter_0000001"
    assert (adapter / "adapter_model.safetensors").exists()
    card = card_in(adapter, tmp_path)
    assert card.data.base_model == "Acme/Tiny-VL"
    assert card.data.base_model_relation == "adapter"
    assert card.data.library_name == "peft"
    assert "lora" in card.data.tags
    assert "rank 4 and alpha 8, on `q_proj, v_proj`" in card.text


def test_a_conversion_names_its_source_and_a_folder_is_not_taken_for_a_hub_id(
    base: Path, dense: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for source, name, noted in ((base, "Acme/Tiny-VL", False), (dense, None, True)):
        mcore, out = tmp_path / f"mcore-{noted}", tmp_path / f"out-{noted}"
        assert exit_code("convert", "hf-to-mcore", source, mcore) == 0
        capsys.readouterr()
        assert exit_code("convert", "mcore-to-hf", mcore, out, "--model-card") == 0
        assert ("has no base_model in its header" in capsys.readouterr().out) == noted
        card = card_in(out, tmp_path, dense)
        assert card.data.base_model == name
        assert card.data.datasets is None
        assert f"`{dense.name}`" in card.text or name
        assert "## Training" not in card.text


def test_parts_write_the_card_and_one_without_it_is_refused(
    base: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert exit_code("convert", "hf-to-mcore", base, tmp_path / "mcore") == 0
    convert = ("convert", "mcore-to-hf", tmp_path / "mcore", tmp_path / "out")
    assert exit_code(*convert, "--part", "0/2", "--model-card") == 0
    capsys.readouterr()
    assert exit_code(*convert, "--part", "1/2") == 2
    assert "--model-card" in capsys.readouterr().err
    assert exit_code(*convert, "--part", "1/2", "--model-card") == 0
    assert card_in(tmp_path / "out", tmp_path).data.base_model == "Acme/Tiny-VL"


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        (("--certificate", "{proof}"), "add --model-card"),
        (("--model-card", "--certificate", "{proof}"), "its findings say otherwise"),
        (("--model-card", "--certificate", "{gone}"), "cannot be read"),
    ],
)
@pytest.mark.parametrize("command", ["train", "convert"])
def test_a_certificate_that_cannot_be_quoted_is_refused(
    dense: Path, data: Path, tmp_path: Path, command: str, flags: tuple[str, ...], says: str,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    proof, export = tmp_path / "report.json", tmp_path / "export"
    finding = {"part": "p", "name": "n", "ok": True, "relative_error": 1e-3, "tolerance": 1e-5}
    held = {"format": 2, "title": "t", "ok": True, "verdict": "All 1 comparisons hold.",
            "findings": [finding], "environment": {}, "command": "mcore-qwen3vl verify tensors",
            "certificate": {"format": 1, "code": "0", "inputs": []}}  # fmt: skip
    proof.write_text(json.dumps(held))
    given = [flag.format(proof=proof, gone=tmp_path / "gone") for flag in flags]
    if command == "train":
        words = ["train", *Job(dense, data, steps=1, batch=1).argv, "--save-hf", export]
    else:
        assert exit_code("convert", "hf-to-mcore", dense, tmp_path / "mcore") == 0
        words = ["convert", "mcore-to-hf", tmp_path / "mcore", export]
    capsys.readouterr()
    assert exit_code(*words, *given) == 2
    assert says in capsys.readouterr().err
    assert not export.exists()


def test_a_card_without_an_export_is_refused(
    dense: Path, data: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert exit_code("train", *Job(dense, data, steps=1).argv, "--model-card") == 2
    assert "add --save-hf DIR" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("kind", "of_base", "tag"),
    [
        ("language model", "image-text-to-text", "image-text-to-text"),
        ("language model", None, "image-text-to-text"),
        (HEADLESS, "image-text-to-text", "feature-extraction"),
        (HEADLESS, "sentence-similarity", "sentence-similarity"),
        (CLASSIFIER, "image-text-to-text", "text-classification"),
        (CLASSIFIER, "text-ranking", "text-ranking"),
    ],
)
def test_the_pipeline_tag_is_that_of_the_head(
    base: Path, kind: str, of_base: str | None, tag: str
) -> None:
    if of_base is None:
        (base / "README.md").unlink()
    else:
        (base / "README.md").write_text(OF_BASE.format(of_base))
    content = model_card.model_card(base="A/b", config=base, head=HeadForm(kind))
    assert ModelCard(content.decode()).data.pipeline_tag == tag


def test_a_language_model_alone_is_one_of_texts(tmp_path: Path) -> None:
    folder = write_tiny_checkpoint(tmp_path, family="qwen3.5", text_only=True)
    content = model_card.model_card(base=None, config=folder, head=HeadForm())
    assert ModelCard(content.decode()).data.pipeline_tag == "text-generation"


@pytest.mark.parametrize("text", ["---\nlicense: [\n---\n", "---\n- a\n---\n", "\0", "license: x"])
def test_a_card_of_the_base_that_cannot_be_read_gives_no_licence(base: Path, text: str) -> None:
    (base / "README.md").write_text(text)
    content = model_card.model_card(base="A/b", config=base, head=HeadForm())
    assert ModelCard(content.decode()).data.license is None


def test_files_and_folders_of_settings_are_called_by_their_last_name(base: Path) -> None:
    rows = {
        "data sets": {"names": ["a|b`.jsonl", "Acme/chats"]},
        "mixture": {"shares": [0.25, 0.75]},
        "loss": {"loss": "/home/me/losses.py:mine"},
        "reading of records": {"preprocess": "../hooks.py:clean", "train_on": "a/b"},
        "settings of the loss": {"teacher": str(base), "reference_model": "Acme/Other"},
    }
    content = model_card.model_card(
        base=None, config=base, head=HeadForm(), training=model_card.Training(rows, 7)
    )
    card = ModelCard(content.decode())
    assert card.data.datasets == ["Acme/chats"]
    assert "- `a\\|b'.jsonl`, 25.000%\n- `Acme/chats`, 75.000%" in card.text
    assert "| loss | `--loss losses.py:mine` |" in card.text
    assert "| reading of records | `--preprocess hooks.py:clean` `--train-on a/b` |" in card.text
    assert f"`--teacher {base.name}` `--reference-model Acme/Other`" in card.text


def test_settings_of_a_loss_of_another_package_are_in_it(base: Path) -> None:
    rows = {
        "data sets": {"names": ["a.jsonl"]},
        "settings of the loss": {"gamma": 3.0, "prices": "/home/me/prices.json", "off": None},
    }
    content = model_card.model_card(
        base=None, config=base, head=HeadForm(), training=model_card.Training(rows, 7)
    )
    card = ModelCard(content.decode())
    assert "| settings of the loss | `--gamma 3.0` `--prices prices.json` |" in card.text


@pytest.mark.parametrize(
    "rows", [{}, {"batch": {"global_batch_size": 2}}, {"data sets": {"names": []}}]
)
def test_a_record_of_an_earlier_version_without_data_sets_makes_a_card(
    base: Path, rows: dict[str, dict[str, object]]
) -> None:
    content = model_card.model_card(
        base=None, config=base, head=HeadForm(), training=model_card.Training(rows, 7)
    )
    card = ModelCard(content.decode())
    assert card.data.datasets is None
    assert "| steps done | 7 |" in card.text
    assert "## Data" not in card.text
