"""Oracles of what a run exports: of its loss, its tensors, and the commands that read it."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

from mcore_qwen3vl.layout import Layout
from mcore_qwen3vl.runtime.launch import run_layout
from mcore_qwen3vl.verification.search import plain
from mcore_qwen3vl.verification.search.case import Case
from mcore_qwen3vl.verification.search.comparing import (
    LIMITS,
    ByDesign,
    agree,
    compute_plainly,
    cuts_records,
    image_budget,
    is_half,
    validations,
)
from mcore_qwen3vl.verification.search.data_files import picture
from mcore_qwen3vl.verification.search.running import Bench, Outcome

MTP_IS_COPIED = ByDesign(
    "the layers of MTP are in no checkpoint: an export and a conversion copy them from the model",
    ("conversion.md", "without it, a note says that `mtp.*` is missing"),
)
_PROMPT = "What is red?"
_PICTURE = "40x24-7.png"
_NEW_TOKENS = 5


def export(case: Case, outcome: Outcome, bench: Bench) -> str | None:
    """The export, loaded by transformers with its defaults, gives the logged validation."""
    if (
        not (case.validates and outcome.finished)
        or case.has("--task")
        or case.has("--mtp-num-layers")
    ):
        return None
    if case.value("--loss", "cross_entropy") != "cross_entropy":
        return None
    if case.has("--eval-iters") or is_half(case) or cuts_records(case):
        return None
    by_step, models = validations(outcome), _models_of(case, outcome)
    validation = by_step[max(by_step)] if by_step else {}
    logged = validation.get("validation lm loss")
    if logged is None or models is None:
        return f"it logged the validation {logged} and exported {models}"
    if validation.get("validation over-long samples"):
        return None  # it leaves them out, and does not name them
    records = [record for record in case.parsed if "bad" not in record]
    model, adapter = models
    of_images = image_budget(case)
    found = compute_plainly(
        bench, plain.mean_loss, model, records, outcome.media, adapter, of_images
    )
    if found is None:
        return None
    if not agree(logged, found, LIMITS["loss"]):
        return f"the log has the validation {logged}, and transformers {found} of the export"
    return ""


def converted_end(case: Case, outcome: Outcome, bench: Bench) -> str | None:
    """The last checkpoint, converted offline, has the tensors of the run's export."""
    if not (case.validates and outcome.finished) or case.trains_adapter:
        return None
    saved, exported = (sorted((outcome.folder / name).glob("iter_*")) for name in ("save", "hf"))
    if not saved or not exported:
        return f"it saved {len(saved)} checkpoints and exported {len(exported)} models"
    config = None if case.has("--task") else outcome.named_model  # its config has no task's head
    (text,) = run_layout(
        _compare_conversion, 1, config, saved[-1], exported[-1], timeout=bench.timeout
    )
    return text


def _compare_conversion(config: Path | None, saved: Path, exported: Path) -> str:
    """Return how the tensors of a checkpoint's conversion differ from those of an export."""
    from mcore_qwen3vl.converters.convert import mcore_to_hf

    mine = saved.parent / "converted"
    mcore_to_hf(saved, mine, hf_config=config)
    a, b = plain.load_tensors(mine), plain.load_tensors(exported)
    if config is None:  # MTP_IS_COPIED
        b = {name: tensor for name, tensor in b.items() if not name.startswith("mtp.")}
    if a.keys() != b.keys():
        return f"only one of conversion and export has {sorted(a.keys() ^ b.keys())[:5]}"
    wrong = [name for name in a if a[name].dtype != b[name].dtype or not a[name].equal(b[name])]
    return f"{len(wrong)} tensors of conversion and export differ: {wrong[:5]}" if wrong else ""


def scores(case: Case, outcome: Outcome, bench: Bench) -> str | None:
    """``score`` gives each record the log-probability that transformers computes."""
    if case.behind != "score" or (models := _models_of(case, outcome)) is None:
        return None
    records = [record for record in case.parsed if "bad" not in record]
    data, out = (outcome.folder / name for name in ("scored.jsonl", "scores.jsonl"))
    data.write_text("".join(f"{json.dumps(record)}\n" for record in records), "utf-8")
    words = ["score", *_words_of(models), str(data), "--out", str(out), "--max-bad-fraction", "0"]
    bench.call([*words, "--cpu", *_layout_words(case)])
    model, adapter = models
    theirs = compute_plainly(bench, plain.log_probabilities, model, records, outcome.media, adapter)
    if theirs is None:
        return None
    scored = [json.loads(line) for line in out.read_text("utf-8").splitlines()]
    if len(scored) != len(records):
        return f"score has {len(scored)} lines of {len(records)} records"
    for line, other in zip(scored, theirs, strict=True):
        of_pair = [line[side] for side in ("chosen", "rejected") if side in line]
        found = [one.get("log_prob") for one in of_pair or [line]]
        if not all(agree(a, b, LIMITS["loss"]) for a, b in zip(found, other, strict=True)):
            return f"score has the log-probabilities {found} in {line}, and transformers {other}"
    return ""


def answers(case: Case, outcome: Outcome, bench: Bench) -> str | None:
    """``generate`` answers with the tokens that transformers' greedy search finds."""
    if case.behind != "generate" or (models := _models_of(case, outcome)) is None:
        return None
    words = ["generate", *_words_of(models), "--prompt", _PROMPT, "--temperature", "0", "--json"]
    words += ["--max-new-tokens", str(_NEW_TOKENS), "--cpu"]
    image = None
    if case.has_vision:
        image = outcome.folder / _PICTURE
        image.write_bytes(picture(_PICTURE))
        words += ["--image", str(image)]
    printed = bench.call([*words, *_layout_words(case, without=("cp", "vpp"))])
    (answer,) = json.loads(printed)["answers"]
    model, adapter = models
    theirs = compute_plainly(bench, plain.answer, model, _PROMPT, _NEW_TOKENS, adapter, image)
    if answer["token_ids"] != theirs:
        return f"generate answers {answer['token_ids']}, and transformers {theirs}"
    return ""


def merge(case: Case, outcome: Outcome, bench: Bench) -> str | None:
    """``lora merge`` writes the tensors that PEFT computes."""
    models = _models_of(case, outcome) if case.validates else None
    if models is None or models[1] is None:
        return None
    merged = outcome.folder / "merged"
    bench.call(["lora", "merge", *map(str, models), str(merged)])
    wrong = compute_plainly(bench, plain.unlike_merged, *models, merged)
    return f"lora merge and PEFT differ in {wrong[:5]}" if wrong else ""


def _models_of(case: Case, outcome: Outcome) -> tuple[Path, Path | None] | None:
    """Return the exported model and no adapter, or the model and its exported adapter.

    A run that failed, or trains something else than a language model, has none.
    """
    folders = sorted((outcome.folder / "hf").glob("iter_*"))
    if not folders or not outcome.finished or case.has("--task") or is_half(case):
        return None
    return (outcome.model, folders[-1]) if case.trains_adapter else (folders[-1], None)


def _words_of(models: tuple[Path, Path | None]) -> list[str]:
    model, adapter = models
    return [str(model), *(["--lora", str(adapter)] if adapter else [])]


def _layout_words(case: Case, without: tuple[str, ...] = ()) -> list[str]:
    """Return the flags of a case's layout for the commands that read a model.

    Ranks of a size that a command does not take are replicas, as experts need as many ranks.
    """
    layout = Layout.parse(case.layout)
    if "cp" in without:
        layout = replace(layout, cp=1, dp=layout.dp * layout.cp)
    sizes = {name: getattr(layout, name) for name in ("tp", "pp", "vpp", "ep", "etp", "cp", "dp")}
    words = [w for n, size in sizes.items() if n not in without for w in (f"--{n}", str(size))]
    return [*words, "--sp" if layout.sp else "--no-sp"]
