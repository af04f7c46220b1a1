"""The command line has the right exit codes, messages and JSON; failures leave nothing behind."""

from __future__ import annotations

import json
import shutil
import signal
import subprocess
import sys
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file

from mcore_qwen3vl import __version__
from mcore_qwen3vl.config import Architecture
from mcore_qwen3vl.demos import DemoStep
from mcore_qwen3vl.tiny import write_tiny_checkpoint
from mcore_qwen3vl.tiny.records import write_image_qa
from tests.command import exit_code, without_version


def test_both_ways_and_compare(checkpoint, tmp_path, capsys):
    assert exit_code("convert", "hf-to-mcore", checkpoint, tmp_path / "mcore") == 0
    capsys.readouterr()
    assert exit_code("convert", "mcore-to-hf", tmp_path / "mcore", tmp_path / "back", "--json") == 0
    summary = json.loads(capsys.readouterr().out)
    assert summary["direction"] == "mcore-to-hf"
    assert summary["expert_layout"] == "published"
    assert exit_code("verify", "tensors", checkpoint, tmp_path / "back") == 0
    folder = tmp_path / "report"
    assert (
        exit_code("verify", "tensors", tmp_path / "mcore", tmp_path / "back", "--report", folder)
        == 0
    )
    assert "All 140 comparisons hold." in capsys.readouterr().out
    parts = json.loads((folder / "report.json").read_text())["parts"]
    assert [(p["part"], p["compared"], p["failed"]) for p in parts] == [
        ("tensors", 134, 0),
        ("files", 6, 0),
    ]
    assert "PASSED" in (folder / "report.html").read_text()


def test_roundtrip_writes_its_findings(checkpoint, tmp_path, capsys):
    report = tmp_path / "report"
    assert exit_code("verify", "roundtrip", checkpoint, "--report", report) == 0
    found = json.loads((report / "report.json").read_text())
    assert found["ok"] is True
    assert sum(finding["part"] == "tensors" for finding in found["findings"]) == 134
    assert "99 Megatron-Core tensors" in found["environment"]["there"]
    assert "134 Hugging Face tensors" in found["environment"]["back"]
    assert "as Hugging Face" in found["environment"]["tensors"]
    assert "equal" in capsys.readouterr().out


@pytest.mark.usefixtures("impatient")
@pytest.mark.parametrize(
    ("command", "words"),
    [("parity", ("--batches", "text", "--no-gradients")), ("trace", ("--batch", "text"))],
)
def test_too_little_time_is_exit_code_3(command, words, dense, capsys):
    assert exit_code("verify", command, dense, *words, "--timeout", 0.01) == 3
    message = capsys.readouterr().err.splitlines()[-1]
    assert "rank 0 did not finish within 0.01 s, so the result is unknown" in message
    assert "Pass a larger --timeout" in message
    details = Path(message.rpartition("Details: ")[2])
    assert details.read_text().startswith("rank 0 did not finish")
    details.unlink()


def test_a_difference_is_exit_code_1(checkpoint, tmp_path, capsys):
    other = write_tiny_checkpoint(tmp_path / "other", moe=True, seed=1)
    assert exit_code("verify", "tensors", checkpoint, other) == 1
    printed = capsys.readouterr()
    assert "134 of 140 comparisons failed" in printed.out
    assert "and 114 more" in printed.out
    assert printed.err == ""  # the verdict is printed once
    assert exit_code("verify", "tensors", checkpoint, other, "--json") == 1
    printed = capsys.readouterr()
    assert json.loads(printed.out)["verdict"] == "134 of 140 comparisons failed."
    assert printed.err == ""


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["inspect", "gone"], "gone does not exist"),
        (["inspect", "gone", "--tabel"], "No such option: --tabel"),
        (["verify", "tensors"], "Missing argument 'A'"),
        (["inspect", ".", "--workers", "many"], "Invalid value for '--workers'"),
    ],
)
def test_under_json_an_error_is_json_alone(words, said, capsys):
    assert exit_code(*words, "--json") == 2
    printed = capsys.readouterr()
    found = json.loads(printed.out)
    assert found["exit_code"] == 2
    assert said in found["error"]
    assert printed.err == ""


def test_a_path_that_is_not_there_is_refused_without_torch(dense):
    code = (
        "import sys, mcore_qwen3vl.cli as cli\n"
        "for words in sys.argv[1:]:\n"
        "    try: cli.main(words.split())\n"
        "    except SystemExit as left: print(left.code, 'torch' in sys.modules)"
    )
    commands = (
        "generate gone --prompt hi --cpu",
        f"generate {dense} --lora gone --prompt hi --cpu",
        f"score gone {__file__} --cpu",
        f"score {dense} gone --cpu",
        f"data check gone --hf-model {dense}",
        f"data check {__file__} --hf-model gone",
        f"data show gone 1 --hf-model {dense}",
        "verify parity gone",
    )
    done = subprocess.run([sys.executable, "-c", code, *commands], capture_output=True, text=True)
    assert done.stdout.splitlines() == ["2 False"] * len(commands)
    errors = without_version(done.stderr).splitlines()
    assert [line.count("gone does not exist") for line in errors] == [1] * len(commands)


def test_a_misspelt_flag_of_a_rehearsal_is_refused_without_torch():
    code = (
        "import sys, mcore_qwen3vl.cli as cli\n"
        "try: cli.main(['rehearse', 'sft_2b', '--frooze', 'x'])\n"
        "except SystemExit as left: print(left.code, 'torch' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    # With a Megatron whose flags may be others than those listed, its own parser decides.
    untested = without_version(done.stderr) != done.stderr
    assert (done.stdout, done.stderr.count("--frooze")) == (f"2 {untested}\n", 1)


def test_version_and_short_help(capsys):
    assert exit_code("--version") == 0
    assert capsys.readouterr().out == f"mcore-qwen3vl {__version__}\n"
    assert exit_code("verify", "-h") == 0
    assert "roundtrip" in capsys.readouterr().out


def test_the_module_is_the_command():
    done = subprocess.run(
        [sys.executable, "-m", "mcore_qwen3vl", "--version"], capture_output=True, text=True
    )
    assert (done.returncode, done.stdout) == (0, f"mcore-qwen3vl {__version__}\n")


def test_dry_run_writes_nothing(checkpoint, tmp_path, capsys):
    dst = tmp_path / "mcore"
    assert exit_code("convert", "hf-to-mcore", checkpoint, dst, "--dry-run", "--json") == 0
    plan = json.loads(capsys.readouterr().out)
    step = next(s for s in plan["steps"] if "experts.linear_fc1" in s["target"])
    assert step["sources"] == ["model.language_model.layers.0.mlp.experts.gate_up_proj"]
    assert (step["shape"], step["nbytes"]) == ([12, 72, 48], 12 * 72 * 48 * 4)
    assert exit_code("convert", "hf-to-mcore", checkpoint, dst, "--dry-run") == 0
    assert "Nothing was written" in capsys.readouterr().out
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    "arguments",
    [
        ("convert", "hf-to-mcore", "absent", "dst"),
        ("convert", "mcore-to-hf", "absent", "dst"),
        ("verify", "roundtrip", "absent"),
        ("verify", "tensors", "absent", "absent"),
        ("inspect", "absent"),
        ("convert", "hf-to-mcore", "src", "dst", "--dtype", "int8"),
        ("convert", "nowhere"),
    ],
)
def test_bad_input_and_usage_are_exit_code_2(arguments, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert exit_code(*arguments) == 2
    message = capsys.readouterr().err
    assert message
    assert "Traceback" not in message
    assert list(tmp_path.iterdir()) == []


def test_a_work_directory_that_is_not_there_is_named(checkpoint, tmp_path, capsys):
    assert exit_code("verify", "roundtrip", checkpoint, "--work-dir", tmp_path / "nowhere") == 2
    assert "--work-dir" in capsys.readouterr().err


@pytest.fixture(scope="module")
def converted(checkpoint, tmp_path_factory):
    path = tmp_path_factory.mktemp("converted") / "mcore"
    assert exit_code("convert", "hf-to-mcore", checkpoint, path) == 0
    return path


@pytest.mark.parametrize(
    ("command", "message"),
    [
        ("convert hf-to-mcore MCORE dst", "`mcore-qwen3vl convert mcore-to-hf` makes one of it"),
        ("convert mcore-to-hf HF dst", "`mcore-qwen3vl convert hf-to-mcore` makes one of it"),
        ("verify roundtrip MCORE", "a Megatron-Core checkpoint, but a Hugging Face one is needed"),
        ("verify parity MCORE", "a Megatron-Core checkpoint, but a Hugging Face one is needed"),
        ("verify trace MCORE", "a Megatron-Core checkpoint, but a Hugging Face one is needed"),
        ("verify trace HF HF", "a Hugging Face checkpoint, but a Megatron-Core one is needed"),
    ],
)
def test_a_checkpoint_of_the_other_kind(
    command, message, checkpoint, converted, tmp_path, capsys, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    capsys.readouterr()
    paths = {"HF": checkpoint, "MCORE": converted}
    assert exit_code(*(paths.get(word, word) for word in command.split())) == 2
    assert message in " ".join(capsys.readouterr().err.split())
    assert list(tmp_path.iterdir()) == []


@pytest.mark.usefixtures("interruptible")
def test_interrupted_conversion_says_how_to_go_on(checkpoint, tmp_path, capsys, monkeypatch):
    @contextmanager
    def interrupting(title, *, quiet):
        yield lambda done, total, name: signal.raise_signal(signal.SIGINT)

    with monkeypatch.context() as patch:
        patch.setattr("mcore_qwen3vl.console.byte_progress", interrupting)
        assert exit_code("convert", "hf-to-mcore", checkpoint, tmp_path / "mcore") == 130
    assert "interrupted: run the same command to continue" in capsys.readouterr().err
    assert not (tmp_path / "mcore").exists()
    assert exit_code("convert", "hf-to-mcore", checkpoint, tmp_path / "mcore") == 0


def test_without_a_gpu_it_is_one_line(checkpoint, capsys, monkeypatch):
    monkeypatch.setattr("torch.cuda.device_count", lambda: 0)
    flags = ("--hf-model", checkpoint, "--data-path", checkpoint, "--train-iters", 3)
    assert exit_code("train", *flags) == 2
    assert capsys.readouterr().err == (
        "error: There is no GPU here: add --cpu to train on the CPU.\n"
    )
    assert exit_code("verify", "parity", checkpoint, "--device", "cuda") == 2
    assert capsys.readouterr().err == (
        "error: There is no GPU here for --device cuda: run on the CPU (verify: --device cpu).\n"
    )


def test_parity_names_the_weights_that_are_nan(dense, tmp_path, capsys):
    broken = tmp_path / "broken"
    shutil.copytree(dense, broken)
    name = "model.language_model.layers.1.mlp.down_proj.weight"
    tensors = load_file(broken / "model.safetensors")
    tensors[name][2, 3] = float("nan")
    save_file(tensors, broken / "model.safetensors", {"format": "pt"})
    assert exit_code("verify", "parity", broken, "--batches", "text", "--no-gradients") == 2
    assert f"broken: 1 tensor has NaN or infinite values: {name}." in capsys.readouterr().err


def test_help_about_a_word_names_the_command(capsys):
    assert exit_code("train", "--help", "lr") == 0
    printed = capsys.readouterr().out
    assert printed.startswith("usage: mcore-qwen3vl train [--processes N] --hf-model DIR")
    assert "--lr-decay-style" in printed


def test_a_layout_that_does_not_fit_starts_no_rank(checkpoint, capsys, monkeypatch):
    monkeypatch.setattr("torch.distributed.run.run", pytest.fail)
    given = ("--hf-model", checkpoint, "--data-path", checkpoint, "--train-iters", 3)
    command = ("train", "--cpu", *given)
    assert exit_code("verify", "parity", checkpoint, "--tp", "3") == 2
    wanted = capsys.readouterr().err
    uneven = ("--pp", 2, "--decoder-first-pipeline-num-layers", 9)
    assert exit_code("verify", "parity", checkpoint, *uneven) == 2
    assert "pp2+first9: 4 decoder layers leave -5" in capsys.readouterr().err
    assert exit_code(*command, "--tensor-model-parallel-size", "3") == 2
    assert capsys.readouterr().err == wanted
    assert exit_code(*command, "--processes", "3", "--context-parallel-size", "2") == 2
    assert "The world size is 3, which TP 1 x PP 1 x CP 2 = 2 does not" in capsys.readouterr().err
    assert exit_code(*command, "--tensor-model-parallel-size", "two") == 2
    assert "--tensor-model-parallel-size: invalid int value: 'two'" in capsys.readouterr().err
    assert exit_code("train", "--cpu", "--data-path", "x") == 2
    assert "--hf-model" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("command", "code"),
    [
        ("convert hf-to-mcore HF dst", 0),
        ("data check DATA --hf-model HF", 2),
        ("train --cpu --hf-model HF --data-path DATA --train-iters 3", 2),
        ("generate HF --cpu --prompt Hello", 2),
    ],
)
def test_missing_tokenizer_files_are_named(command, code, checkpoint, data, tmp_path, capsys):
    bare = tmp_path / "bare"
    shutil.copytree(checkpoint, bare, ignore=lambda *_: ["tokenizer.json", "chat_template.jinja"])
    paths = {"HF": bare, "DATA": data, "dst": tmp_path / "mcore"}
    assert exit_code(*(paths.get(word, word) for word in command.split())) == code
    printed = capsys.readouterr()
    said = " ".join((printed.out if code == 0 else printed.err).split())
    assert f"There is no tokenizer and no chat template in {bare}," in said
    assert "copy tokenizer.json, chat_template.jinja, tokenizer_config.json of the mod" in said


def test_existing_target_needs_force(checkpoint, tmp_path, capsys):
    dst = tmp_path / "mcore"
    assert exit_code("convert", "hf-to-mcore", checkpoint, dst) == 0
    before = {f: f.read_bytes() for f in dst.rglob("*") if f.is_file()}
    assert exit_code("convert", "hf-to-mcore", checkpoint, dst) == 2
    assert "exists. Remove it, choose another directory, or add --force" in capsys.readouterr().err
    assert {f: f.read_bytes() for f in dst.rglob("*") if f.is_file()} == before
    assert exit_code("convert", "hf-to-mcore", checkpoint, dst, "--force") == 0


def test_help_and_lists_do_not_wait_for_torch():
    code = (
        "import sys, mcore_qwen3vl.cli as cli\n"
        "for words in sys.argv[1:]:\n"
        "    try: cli.main(words.split())\n"
        "    except SystemExit as left:\n"
        "        print(left.code, *{'torch'} & set(sys.modules), file=sys.stderr)"
    )
    groups = ("", "inspect", "generate", "rehearse", "convert", "lora", "verify", "data", "launch")
    commands = (*(f"{group} --help" for group in groups), "train --help", "launch list")
    done = subprocess.run([sys.executable, "-c", code, *commands], capture_output=True, text=True)
    assert done.stderr.splitlines() == ["0"] * len(commands)


def test_commands_on_checkpoints_import_no_more_than_they_need(checkpoint, converted, tmp_path):
    """Each of these libraries takes as long to import as what such a command does."""
    code = (
        "import sys, mcore_qwen3vl.cli as cli\n"
        "heavy = 'transformers', 'torchvision', 'megatron', 'sympy', 'peft', 'matplotlib', "
        "'torch._dynamo', 'torch.distributed.checkpoint'\n"
        "for words in sys.argv[1:]:\n"
        "    try: cli.main(words.split())\n"
        "    except SystemExit as left:\n"
        "        loaded = [name for name in heavy if name in sys.modules]\n"
        "        print(left.code, *loaded, file=sys.stderr)"
    )
    commands = (
        f"inspect {checkpoint}",
        f"inspect {converted} --table",
        f"inspect --hf-config {checkpoint}",
        f"verify tensors {checkpoint} {converted}",
        f"verify manifest {converted}",
        f"convert mcore-to-hf {converted} {tmp_path / 'back'}",
    )
    done = subprocess.run([sys.executable, "-c", code, *commands], capture_output=True, text=True)
    codes = [line for line in done.stderr.splitlines() if line[:1].isdigit() and line[1:2] in " "]
    assert codes == ["0"] * len(commands), done.stderr


def test_tiny_writes_a_checkpoint_and_nothing_over_another(tmp_path, capsys):
    assert exit_code("tiny", tmp_path / "moe", "--moe") == 0
    assert exit_code("verify", "roundtrip", tmp_path / "moe") == 0
    before = (tmp_path / "moe" / "config.json").read_bytes()
    assert exit_code("tiny", tmp_path / "moe") == 2
    assert (tmp_path / "moe" / "config.json").read_bytes() == before
    assert "name another one" in capsys.readouterr().err


def test_tiny_writes_sizes_that_can_be_served(tmp_path):
    assert exit_code("tiny", tmp_path / "dense", "--servable") == 0
    architecture = Architecture.from_hf(tmp_path / "dense")
    assert (architecture.head_dim, architecture.hidden_size) == (64, 96)
    assert exit_code("tiny", tmp_path / "hybrid", "--servable", "--family", "qwen3.5") == 0
    net = Architecture.from_hf(tmp_path / "hybrid").delta_net
    assert (net.key_head_dim, net.value_head_dim) == (64, 64)


def test_under_json_small_commands_print_json_alone(checkpoint, tmp_path, capsys, monkeypatch):
    def found(*words):
        assert exit_code(*words, "--json") == 0
        printed = capsys.readouterr()
        assert printed.err == ""
        return json.loads(printed.out)

    data = write_image_qa(tmp_path / "data", 2)
    page = tmp_path / "page.html"
    sample = found("data", "show", data, 1, "--hf-model", checkpoint, "--out", page)
    assert sample["sample"] == f"{data}:1"
    assert 0 < sample["trained"] < sample["tokens"]
    assert (sample["media"], sample["out"]) == ({"image": 1}, str(page))
    tiny = tmp_path / "tiny"
    assert found("tiny", tiny) == {
        "out": str(tiny),
        "family": "qwen3-vl",
        "kind": "dense",
        "text_only": False,
        "seed": 0,
    }
    scripts = {one["name"]: one for one in found("launch", "list")}
    assert scripts["sft_8b"]["file"] == "sft_8b.sh"
    assert scripts["sft_8b"]["what"].startswith("Qwen3-VL-8B, full fine-tuning")
    copied = found("launch", "copy", tmp_path / "scripts")
    assert copied == {"out": str(tmp_path / "scripts"), "scripts": list(scripts)}
    steps = [DemoStep("one", "2 tensors", 0.5, ok=True)]
    monkeypatch.setattr("mcore_qwen3vl.demos.convert_demo", lambda **_: steps)
    assert found("demo") == {"ok": True, "steps": [asdict(steps[0])]}
