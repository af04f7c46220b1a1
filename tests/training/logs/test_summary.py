"""A run prints a summary of its choices and keeps Megatron's log."""

from __future__ import annotations

import json
import re
import shutil
from dataclasses import replace
from pathlib import Path

from mcore_qwen3vl.config import Architecture
from mcore_qwen3vl.layout import Layout
from mcore_qwen3vl.published_configs import PUBLISHED
from mcore_qwen3vl.tiny import write_tiny_checkpoint
from mcore_qwen3vl.training.arguments.parser import validate
from mcore_qwen3vl.training.checkpoints.companions import changed_files, save_companions
from mcore_qwen3vl.training.folders import log_file
from mcore_qwen3vl.training.logs.summary import summary
from mcore_qwen3vl.verification.curves import Job, train


def test_a_run_is_quiet_and_keeps_megatrons_log(dense: Path, data: Path, tmp_path: Path) -> None:
    """The first rank prints the summary, and the last one, which has the loss, the progress."""
    save, valid = tmp_path / "save", ("--valid-data-path", str(data))
    job = Job(
        dense, data, Layout.parse("pp2"), steps=4, batch=1, seq_length=256,
        flags=("--save", str(save), "--save-hf", str(tmp_path / "hf"), *valid, "--eval-iters", "1",
               "--eval-interval", "2", "--log-interval", "2"),
    )  # fmt: skip
    log = train(job, tmp_path / "run")
    assert [entry["iteration"] for entry in log] == [2, 4]
    lines = (tmp_path / "run" / "output.txt").read_text().splitlines()
    names = ("model", "weights", "layout", "precision", "data", "validation")
    names += ("schedule", "memory", "writes")
    assert tuple(line.split()[0] for line in lines[:9]) == names
    steps = [line for line in lines if line.startswith("step ")]
    assert [line.split()[1] for line in steps if "/" in line.split()[1]] == ["1/4", "2/4", "4/4"]
    assert f"loss {log[0]['lm loss']:.4f}  grad norm" in steps[1]
    assert "s/step" in steps[1]
    assert "step 4: saved to " + str(save) in steps
    assert f"step 4: exported to {tmp_path}/hf/iter_0000004" in steps
    assert sum("validation lm loss" in line for line in steps) >= 2
    assert lines[-1].startswith("done: step 4, 0:")
    assert len(lines) < 25
    first, last = (log_file(save, rank).read_text() for rank in range(2))
    assert "tensor_model_parallel_size" in first
    assert "iteration        4/       4" in last
    text = (tmp_path / "run" / "log.jsonl").read_text()
    assert {"iteration", "validation lm loss"} in [set(json.loads(x)) for x in text.splitlines()]

    index = save / "iter_0000004" / ".metadata"
    written = index.stat().st_mtime_ns
    shutil.rmtree(tmp_path / "hf")
    assert train(job, tmp_path / "again") == []
    assert (tmp_path / "hf" / "iter_0000004" / "config.json").exists()
    assert index.stat().st_mtime_ns == written
    assert f"nothing left to do: {save} has all of its steps" in (
        (tmp_path / "again" / "output.txt").read_text().splitlines()
    )


def rows(model: Path, *flags: str, world_size: int = 1) -> dict[str, str]:
    base = ["--hf-model", str(model), "--data-path", "a.jsonl", "--train-iters", "7"]
    settings = validate([*base, *flags], world_size).settings
    explicit = {flag[2:].replace("-", "_") for flag in [*base, *flags] if flag.startswith("--")}
    return dict(summary(settings, Architecture.from_hf(model), explicit))


def test_the_summary_says_what_was_chosen(dense: Path, tmp_path: Path) -> None:
    found = rows(dense, "--cpu")
    assert found["weights"].startswith("random: --load-hf DIR starts from")
    assert found["layout"] == "single on 1 rank on the CPU, layer spec torch"
    assert found["precision"].startswith("fp32")
    assert "padded to the longest of a batch, at most 4096" in found["data"]
    assert found["memory"].startswith("not estimated")
    assert "validation" not in found
    valid = ("--valid-data-path", "b.jsonl")
    found = rows(dense, "--cpu", *valid, "--eval-iters", "3", "--early-stop-patience", "2")
    assert found["validation"] == (
        "b.jsonl; the first 3 batches, 1 samples at a time, every 1000 steps; the run ends after "
        "2 without a lower loss"
    )
    assert "b.jsonl; all of it, 1 samples" in rows(dense, "--cpu", *valid)["validation"]
    never = rows(dense, "--cpu", *valid, "--eval-iters", "0")["validation"]
    assert never == "b.jsonl, which is never read: --eval-iters 0"
    assert found["writes"] == "no checkpoint (--save DIR); Megatron's own log is not kept " + (
        "(--verbose: here)"
    )
    assert "--lr 1e-05" in found["defaults"]
    flags = ("--bf16", "--use-distributed-optimizer", "--packing", "--seq-length", "8192")
    found = rows(PUBLISHED / "2b.json", "--cpu", *flags, "--save", str(tmp_path), world_size=4)
    assert found["model"].startswith("Qwen3-VL of 2.13B parameters (dense; 28 decoder layers, 24")
    assert found["precision"] == "bf16, master weights and optimizer fp32"
    assert "a GPU (weights 4.3, gradients 8.5," in found["memory"]
    assert f"Megatron's own log to {tmp_path}/logs" in found["writes"]
    assert "packed into sequences of 8192 tokens; global batch 4 = DP 4 x 1" in found["data"]


def test_the_summary_says_what_is_exported(dense: Path) -> None:
    """Any flag that asks for LoRA makes the export an adapter."""
    asked = ("--cpu", "--load-hf", str(dense), "--save-hf", "out")
    for flags in (("--lora-rank", "4"), ("--lora-target", "all")):
        assert rows(dense, *asked, *flags)["writes"].startswith("PEFT adapters to out")
    found = rows(dense, *asked)
    assert found["writes"].startswith("Hugging Face checkpoints to out")
    assert "processor" not in found["writes"]
    budgets = ("--image-max-pixels", "1024", "--video-fps", "1.5")
    said = "the processor beside them has --image-max-pixels 1024, --video-fps 1.5"
    assert said in rows(dense, *asked, *budgets)["writes"]
    found = rows(dense, *asked, *budgets, "--lora-rank", "4")
    assert f"{said}; an adapter has no processor" in found["writes"]


def test_the_summary_says_if_an_export_lacks_the_further_layer(tmp_path: Path) -> None:
    """A config names mtp.*, and --hf-model may be the ``hf`` folder of a Megatron checkpoint."""
    model, bare = write_tiny_checkpoint(tmp_path / "model", family="qwen3.5"), tmp_path / "hf"
    shutil.copytree(model, bare, ignore=shutil.ignore_patterns("*.safetensors"))
    asked = ("--cpu", "--save-hf", "out")
    said = f"Hugging Face checkpoints to out without mtp.*, .* of which {bare} has no weights"
    assert re.match(said, rows(bare, *asked)["writes"])
    assert "mtp" not in rows(model, *asked)["writes"]
    assert "mtp" not in rows(bare, "--cpu")["writes"]
    lora = ("--load-hf", str(model), "--lora-rank", "4")
    assert "mtp" not in rows(bare, *asked, *lora)["writes"]


def test_a_trained_model_stops_at_the_end_of_a_turn(dense: Path, tmp_path: Path) -> None:
    """A base model's config ends answers with another token than its template ends turns with."""
    base, save = shutil.copytree(dense, tmp_path / "base"), tmp_path / "save"
    generation = json.loads((base / "generation_config.json").read_text())
    end, document = generation["eos_token_id"]
    (base / "generation_config.json").write_text(
        json.dumps({**generation, "eos_token_id": document})
    )
    asked = ("--load-hf", str(base), "--save-hf", str(tmp_path / "out"), "--save", str(save))
    said = f"eos_token_id of {base} lacks <|im_end|> ({end}), which ends the template's turns: "
    assert f"{said}it is added beside them" in rows(base, "--cpu", *asked)["writes"]
    assert f"{said}add it there" in rows(base, "--cpu", *asked, "--lora-rank", "4")["writes"]
    assert "eos_token_id" not in rows(base, "--cpu", *asked, "--task", "reranker")["writes"]
    assert "eos_token_id" not in rows(dense, "--cpu", *asked)["writes"]
    flags = ("--hf-model", str(base), "--data-path", "a.jsonl", "--train-iters", "7", *asked)
    settings = validate(["--cpu", *flags], 1).settings
    save_companions(settings)
    written = json.loads((save / "hf" / "generation_config.json").read_text())
    assert written == {**generation, "eos_token_id": [document, end]}
    beside = save / "hf"
    (beside / "tokenizer.json").unlink()
    (beside / "of_another.json").write_text("{}")
    save_companions(settings)
    assert (beside / "tokenizer.json").exists()
    assert not (beside / "of_another.json").exists()
    assert (save / "hf.replaced-1" / "of_another.json").exists()
    save_companions(settings)  # nothing differs
    assert sorted(place.name for place in save.iterdir()) == ["hf", "hf.replaced-1"]
    (file,) = changed_files(settings).items()
    assert file == ("generation_config.json", (save / "hf" / file[0]).read_bytes())
    other = replace(settings, model=replace(settings.model, hf_model=str(dense)))
    assert changed_files(other) == {}
    config = json.loads((base / "config.json").read_text())
    config["text_config"]["eos_token_id"] = document
    (base / "config.json").write_text(json.dumps(config))
    (base / "generation_config.json").unlink()
    assert f"{said}add it there" in rows(base, "--cpu", *asked)["writes"]


def test_the_summary_says_what_pairs_are_compared_with(dense: Path) -> None:
    assert not {"trains", "loss", "reference"} & set(rows(dense, "--cpu"))
    found = rows(dense, "--cpu", "--loss", "dpo", "--dpo-beta", "0.3", "--rpo-alpha", "1")
    assert found["loss"] == "DPO (sigmoid), beta 0.3, chosen answer's own loss x 1"
    assert found["reference"].startswith("NAME.scores.jsonl beside each NAME.jsonl")
    found = rows(dense, "--cpu", "--loss", "dpo", "--lora-rank", "4")
    assert found["reference"] == "the model with its adapter switched off"
    found = rows(dense, "--cpu", "--loss", "orpo", "--lora-rank", "4")
    assert found["loss"] == "ORPO, beta 0.1, chosen answer's own loss x 1"
    assert found["reference"] == "none: the loss has no reference"
    assert rows(dense, "--cpu", "--loss", "simpo")["loss"] == "SimPO, beta 2, gamma 1"
    found = rows(dense, "--cpu", "--loss", "kto", "--lora-rank", "4", "--packing")
    assert found["loss"] == "KTO, beta 0.1, desirable x 1, undesirable x 1"
    assert found["reference"] == "the model with its adapter switched off"


def test_the_summary_says_how_a_teacher_is_distilled(dense: Path) -> None:
    flags = ("--distill-divergence", "jsd", "--distill-alpha", "0.25")
    found = rows(dense, "--cpu", "--loss", "distill", *flags)
    assert found["loss"] == "distillation, jsd, beta 0.5, temperature 1, cross entropy x 0.25"
    assert found["teacher"] == "NAME.topk.arrow beside each NAME.jsonl of the data"
    assert "frozen" not in found


def test_the_summary_says_which_second_model_there_is(dense: Path, moe: Path) -> None:
    found = rows(dense, "--cpu", "--loss", "distill", "--teacher", str(moe))
    assert found["teacher"] == "a frozen model in memory, its 64 likeliest tokens"
    assert found["frozen"].startswith("Qwen3-VL of ")
    assert found["frozen"].endswith(f"(MoE, 12 experts; 4 decoder layers, 5 vision blocks), {moe}")
    flags = ("--load-hf", "BASE", "--bf16", "--use-distributed-optimizer", "--packing")
    eight = ("--hf-model", str(PUBLISHED / "8b.json"), "--cpu", *flags, "--loss", "kto")
    found = rows(PUBLISHED / "8b.json", *eight, "--seq-length", "8192")
    assert found["reference"] == "a frozen model in memory"
    assert found["frozen"].startswith("Qwen3-VL of 8.77B parameters (dense; 36 decoder layers")
    assert "a GPU (weights 35.1, gradients 35.1," in found["memory"]
