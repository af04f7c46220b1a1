"""What a path is: every form that is known, and which of two forms counts."""

from __future__ import annotations

import json
import pickle
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest

from mcore_qwen3vl.converters.identify import (
    CHECKPOINT_CONFIG,
    FORMATS,
    RELEASE,
    RULES,
    TRACKER,
    CheckpointPlace,
    PathKind,
    folder_name,
    identify,
    read_tracker,
)
from mcore_qwen3vl.errors import BadInput

Files = dict[str, str]
"""Contents of files, by their path below the folder."""


def run(newest: int | str, folder: str, weights: str = ".metadata") -> Files:
    return {TRACKER: str(newest), f"{folder}/{weights}": ""}


WEIGHTS = {"model.safetensors": "", "config.json": "{}"}
SHARDS = {"model.safetensors.index.json": "{}", "config.json": "{}"}
ADAPTER = {"adapter_config.json": "{}", "adapter_model.safetensors": ""}
RUN = {**run(2, "iter_0000002"), "iter_0000001/.metadata": "", "hf/config.json": "{}"}
CONVERTED = {**run(RELEASE, "release"), "hf/config.json": "{}"}
LEGACY = run(RELEASE, "release", "mp_rank_00/model_optim_rng.pt")
BRIDGE = {
    **run(2, "iter_0000002"),
    **{f"iter_0000002/hf/{name}": text for name, text in WEIGHTS.items()},
}
SWIFT = {**run(2, "iter_0000002"), **WEIGHTS}
SWIFT_ADAPTER = {**run(2, "iter_0000002"), **ADAPTER}
MODEL = "global_step_20/actor/model"
VERL_OLD = {TRACKER: "20", "global_step_20/actor/dist_ckpt/.metadata": ""}
VERL_HF = {f"{MODEL}/huggingface/{name}": text for name, text in WEIGHTS.items()}
VERL = {TRACKER: "20", f"{MODEL}/dist_ckpt/.metadata": "", f"{MODEL}/huggingface/config.json": "{}"}


@dataclass(frozen=True)
class Example:
    """A path below a folder with `files`, and what :func:`identify` says of it.

    `folder` and `hf` are below that folder too; without `folder` it is the path itself.
    """

    form: str
    files: Files
    path: str = ""
    folder: str | None = None
    hf: str | None = None
    iteration: int | str | None = None
    format: str | None = None


def below(folder: str, files: Files) -> Files:
    return {f"{folder}/{name}": text for name, text in files.items()}


TORCH_DIST, TORCH = "torch_dist", "torch"
STEP_OF_VERL, RUN_FORM = "a step of VERL's", "a run, or a conversion"
DIST_CKPT = f"{MODEL}/dist_ckpt"
EXAMPLES = {
    "nothing": Example("nothing", {}, "absent"),
    "file": Example("a file", {"config.json": "{}"}, "config.json", hf="config.json"),
    "adapter": Example("an adapter", ADAPTER),
    "adapter of a classifier": Example("an adapter", {**ADAPTER, "config.json": "{}"}, hf=""),
    "adapter beside weights": Example("an adapter beside weights", ADAPTER | WEIGHTS, hf=""),
    "ms-swift's adapter": Example("an adapter", SWIFT_ADAPTER),
    "its iteration": Example(
        "an iteration of an adapter's run", SWIFT_ADAPTER, "iter_0000002", folder=""
    ),
    "run": Example(RUN_FORM, RUN, "", "iter_0000002", "hf", 2, TORCH_DIST),
    "older iteration": Example(
        "an iteration", RUN, "iter_0000001", None, "hf", 1, TORCH_DIST
    ),
    "converted": Example(RUN_FORM, CONVERTED, "", RELEASE, "hf", RELEASE, TORCH_DIST),
    "release": Example("an iteration", CONVERTED, RELEASE, None, "hf", RELEASE, TORCH_DIST),
    "legacy": Example(RUN_FORM, LEGACY, "", RELEASE, None, RELEASE, TORCH),
    "legacy release": Example("an iteration", LEGACY, RELEASE, None, None, RELEASE, TORCH),
    "Bridge's run": Example(
        RUN_FORM, BRIDGE, "", "iter_0000002", "iter_0000002/hf", 2, TORCH_DIST
    ),
    "export inside a run": Example(
        "Hugging Face weights", BRIDGE, "iter_0000002/hf", hf="iter_0000002/hf"
    ),
    "ms-swift's run": Example(
        "a run of ms-swift's",
        {**below("checkpoint-2", SWIFT), **below("checkpoint-10", SWIFT), "checkpoint-11/a": ""},
        folder="checkpoint-10",
        hf="checkpoint-10",
    ),
    "ms-swift's checkpoint": Example(RUN_FORM, SWIFT, "", "iter_0000002", "", 2, TORCH_DIST),
    "ms-swift's iteration": Example(
        "an iteration", SWIFT, "iter_0000002", None, "", 2, TORCH_DIST
    ),
    "ms-swift's without Megatron": Example(
        "Hugging Face weights", {**WEIGHTS, TRACKER: "2", "iter_0000002/common.pt": ""}, hf=""
    ),
    "VERL's run": Example(
        STEP_OF_VERL, VERL, "", DIST_CKPT, f"{MODEL}/huggingface", None, TORCH_DIST
    ),
    "VERL's step": Example(
        STEP_OF_VERL, VERL, "global_step_20", DIST_CKPT, f"{MODEL}/huggingface", None, TORCH_DIST
    ),
    "VERL's actor": Example(
        STEP_OF_VERL, VERL, f"{MODEL}/..", f"{MODEL}/../model/dist_ckpt",
        f"{MODEL}/../model/huggingface", None, TORCH_DIST,
    ),
    "VERL's model": Example(
        STEP_OF_VERL, VERL, MODEL, DIST_CKPT, f"{MODEL}/huggingface", None, TORCH_DIST
    ),
    "VERL's dist_ckpt": Example(
        "an iteration", VERL, DIST_CKPT, None, f"{MODEL}/huggingface", None, TORCH_DIST
    ),
    "VERL before 0.9": Example(
        STEP_OF_VERL, VERL_OLD, "", "global_step_20/actor/dist_ckpt", None, None, TORCH_DIST
    ),
    "VERL's Hugging Face weights": Example(
        "a step of VERL's without Megatron's weights",
        {**VERL_HF, TRACKER: "20"}, "", f"{MODEL}/huggingface", f"{MODEL}/huggingface",
    ),
    "weights in one file": Example("Hugging Face weights", WEIGHTS, hf=""),
    "weights in shards": Example("Hugging Face weights", SHARDS, hf=""),
    "weights above an hf folder": Example(
        "Hugging Face weights", WEIGHTS | {"hf/config.json": "{}"}, hf=""
    ),
    "snapshot": Example(
        "Hugging Face weights", below("models--a--b/snapshots/0c1", WEIGHTS),
        "models--a--b/snapshots/0c1", hf="models--a--b/snapshots/0c1",
    ),
    "config": Example("a config", {"config.json": "{}", "pytorch_model.bin": ""}, hf=""),
    "folder beside an hf folder": Example(
        "something else", {"hf/config.json": "{}", "other/a.txt": ""}, "other"
    ),
    "step without a number": Example(
        "something else", {"global_step_None/actor/dist_ckpt/.metadata": ""}
    ),
    "exports of a run": Example("something else", below("iter_0000002", WEIGHTS)),
    "run before its first checkpoint": Example("something else", {"hf/config.json": "{}"}, hf="hf"),
    "half-written iteration": Example(
        "something else", {**RUN, "iter_0000003/__0_0.distcp": ""}, "iter_0000003", None, "hf", 3,
    ),
    "optimizer's state alone": Example(
        "something else", {"iter_0000002/optimizer.pt": ""}, "iter_0000002", iteration=2
    ),
    "tracker without its iteration": Example(
        RUN_FORM, {TRACKER: "7"}, "", "iter_0000007", None, 7, TORCH_DIST
    ),
}  # fmt: skip


def made(files: Files, folder: Path) -> Path:
    for name, text in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
    return folder


@pytest.mark.parametrize("name", EXAMPLES)
def test_a_path_has_its_form(tmp_path: Path, name: str) -> None:
    example = EXAMPLES[name]
    root = made(example.files, tmp_path)
    place = identify(root / example.path)
    folder = example.path if example.folder is None else example.folder
    hf = None if example.hf is None else root / example.hf
    assert (place.form, place.folder, place.hf) == (example.form, root / folder, hf)
    assert (place.iteration, place.format, place.flaw) == (example.iteration, example.format, "")
    assert pickle.loads(pickle.dumps(place)) == place  # ranks on GPUs are started with it


def test_every_rule_has_an_example() -> None:
    examples = {example.form for example in EXAMPLES.values()} | {"a hub id"}
    assert [rule.form for rule in RULES if rule.form not in examples] == []
    assert {example.format for example in EXAMPLES.values()} == {None, *FORMATS}


def test_a_hub_id_is_no_path_that_exists(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for source in ("owner/name", "owner/name@v1.0"):
        assert identify(source).kind is PathKind.HUB_ID
    for path in ("./owner/name", "owner/name/", "owner", str(tmp_path / "name")):
        assert identify(path).kind is PathKind.MISSING
    made(below("owner/name", WEIGHTS), tmp_path)
    assert identify("owner/name").kind is PathKind.HUGGINGFACE


HF_FORM, CONFIG_FORM = "Hugging Face weights", "a config"
VERL_HF_FORM = "a step of VERL's without Megatron's weights"


@pytest.mark.parametrize(
    ("files", "forms"),
    [
        (ADAPTER | RUN, ("an adapter", RUN_FORM)),
        (ADAPTER | WEIGHTS, ("an adapter beside weights", "an adapter", HF_FORM, CONFIG_FORM)),
        (RUN | {".metadata": ""}, ("an iteration", RUN_FORM)),
        (VERL | WEIGHTS, (STEP_OF_VERL, HF_FORM, VERL_HF_FORM, CONFIG_FORM)),
        (SWIFT, (RUN_FORM, HF_FORM, CONFIG_FORM)),
        (WEIGHTS | below("huggingface", WEIGHTS), (HF_FORM, VERL_HF_FORM, CONFIG_FORM)),
        (WEIGHTS | below("checkpoint-2", SWIFT), (HF_FORM, "a run of ms-swift's", CONFIG_FORM)),
    ],
)
def test_of_several_forms_the_first_rule_counts(
    tmp_path: Path, files: Files, forms: tuple[str, ...]
) -> None:
    root = made(files, tmp_path)
    fitting = [rule.form for rule in RULES[:-1] if rule.find(root) is not None]
    assert fitting == list(forms)
    assert identify(root).form == forms[0]


def refused(tmp_path: Path, files: Files, require: Callable[[CheckpointPlace], object]) -> str:
    with pytest.raises(BadInput) as error:
        require(identify(made(files, tmp_path)))
    assert "\n" not in str(error.value)
    return str(error.value)


@pytest.mark.parametrize("rule", [r for r in RULES if r.refusal], ids=lambda rule: rule.form)
def test_what_is_no_whole_checkpoint_names_the_remedy(tmp_path: Path, rule: object) -> None:
    example = next(e for e in EXAMPLES.values() if e.form == getattr(rule, "form", None))
    path = made(example.files, tmp_path) / example.path
    for require in (
        CheckpointPlace.require_whole,
        CheckpointPlace.require_megatron,
        CheckpointPlace.require_huggingface,
    ):
        with pytest.raises(BadInput, match=f"{identify(path).folder}") as error:
            require(identify(path))
        assert str(path) in str(error.value)
        assert "{" not in str(error.value)


def test_a_flaw_of_the_tracker_is_told_when_the_weights_are_wanted(tmp_path: Path) -> None:
    said = refused(tmp_path / "a", {**RUN, TRACKER: "soon"}, CheckpointPlace.weights)
    assert "says 'soon'; a number or 'release' is expected" in said
    said = refused(
        tmp_path / "b", {**WEIGHTS, TRACKER: "soon"}, CheckpointPlace.require_huggingface
    )
    assert "says 'soon'" in said
    said = refused(tmp_path / "c", {**RUN, TRACKER: "7"}, CheckpointPlace.weights)
    assert "names iter_0000007, but" in said
    assert "does not exist. Name another iteration's folder" in said


def test_an_empty_tracker_names_the_newest_iteration_whose_save_ended(tmp_path: Path) -> None:
    """Megatron empties the tracker before it writes it, and may be killed between the two."""
    run = made({TRACKER: "", "iter_0000005/.metadata": ""}, tmp_path / "run")
    assert "says ''; a number" in identify(run).flaw
    for step in (3, 4):
        (run / folder_name(step)).mkdir()
        for name in (".metadata", CHECKPOINT_CONFIG):
            (run / folder_name(step) / name).write_text("{}")
    (run / folder_name(4) / CHECKPOINT_CONFIG).write_text("")
    assert identify(run).iteration == read_tracker(run) == 3
    made({"iter_0000007/mp_rank_00/model_optim_rng.pt": ""}, run)
    assert read_tracker(run) == 7  # the older format has no file that is written last


def test_something_else_names_a_checkpoint_in_it(tmp_path: Path) -> None:
    exports = {**below("iter_0000002", WEIGHTS), **below("iter_0000010", WEIGHTS)}
    said = refused(tmp_path / "a", exports, CheckpointPlace.require_whole)
    assert said.endswith(f"Name a checkpoint in it, such as {tmp_path}/a/iter_0000010.")
    said = refused(tmp_path / "b", {"letters/a.txt": ""}, CheckpointPlace.require_megatron)
    assert "is neither a Hugging Face checkpoint, nor a Megatron-Core one" in said
    for path in ("a/iter_0000002/config.json", "absent"):
        with pytest.raises(BadInput, match="is not a directory"):
            identify(tmp_path / path).require_huggingface()


def test_it_imports_no_torch_and_opens_no_weights(tmp_path: Path) -> None:
    """`train` asks it before it answers a typo, and every rank of a run does."""
    for name, files in {"hf": WEIGHTS, "run": RUN, "legacy": LEGACY, "verl": VERL}.items():
        for file in made(files, tmp_path / name).rglob("*"):
            if file.is_file() and file.name != TRACKER:
                file.chmod(0)
    program = (
        "import builtins, io, sys\n"
        "from mcore_qwen3vl.converters.identify import identify\n"
        "opened = []\n"
        "sys.addaudithook(lambda e, a: opened.append(str(a[0])) if e == 'open' else None)\n"
        f"kinds = [identify(f'{tmp_path}/{{n}}').kind for n in ('hf', 'run', 'legacy', 'verl')]\n"
        "import json\n"
        "print(json.dumps([kinds, [f for f in opened if not f.endswith('.py')], "
        "'torch' in sys.modules]))"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    kinds, opened, torch = json.loads(done.stdout)
    assert kinds == ["huggingface", "megatron", "megatron", "megatron"]
    assert {Path(file).name for file in opened if file.startswith(str(tmp_path))} == {TRACKER}
    assert not torch


def test_what_a_forced_write_may_replace_is_no_run_with_a_wrong_tracker(tmp_path: Path) -> None:
    made({**RUN, TRACKER: "garbage"}, tmp_path)
    assert not identify(tmp_path).is_checkpoint


def test_a_missing_iteration_is_told_before_a_missing_config(tmp_path: Path) -> None:
    made({TRACKER: "7"}, tmp_path)
    with pytest.raises(BadInput, match=r"names iter_0000007, but .* does not exist"):
        identify(tmp_path).config()
