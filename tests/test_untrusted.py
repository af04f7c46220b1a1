"""Untrusted files that are devices, links to elsewhere, or nested too deeply are refused."""

from __future__ import annotations

import json
import os
import pickle
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from mcore_qwen3vl.converters.adapters import config as adapter_config
from mcore_qwen3vl.converters.adapters.config import AdapterConfig, apply_with_peft
from mcore_qwen3vl.converters.convert import hf_to_mcore, mcore_to_hf
from mcore_qwen3vl.converters.legacy import open_ranks
from mcore_qwen3vl.converters.torch_pickle import without_checksum
from mcore_qwen3vl.data import indexes
from mcore_qwen3vl.data import processor as processor_module
from mcore_qwen3vl.data.config import parse_sources
from mcore_qwen3vl.data.encoding.rendering import Renderer
from mcore_qwen3vl.data.processor import load_processor
from mcore_qwen3vl.data.readers.json_arrays import write_index
from mcore_qwen3vl.data.readers.tables import TableReader
from mcore_qwen3vl.data.records.reading import record_limit
from mcore_qwen3vl.data.scores import facts_file_of, file_digest, scores_file_of
from mcore_qwen3vl.errors import BadInput
from mcore_qwen3vl.generation.prompts import process_conversations
from mcore_qwen3vl.json_and_yaml import parse_json
from mcore_qwen3vl.losses.reference_file import References
from mcore_qwen3vl.scoring.records import Output
from mcore_qwen3vl.training.arguments.checks import check_early
from mcore_qwen3vl.training.arguments.command_line import CommandLine
from mcore_qwen3vl.training.checkpoints.damage import find_damage
from mcore_qwen3vl.writer_lock import only_writer
from tests.command import exit_code

DEEP = "[" * 100_000 + "]" * 100_000


def _endless(file: Path) -> None:
    file.unlink(missing_ok=True)
    file.symlink_to("/dev/zero")


def _pipe(file: Path) -> None:
    file.unlink(missing_ok=True)
    os.mkfifo(file)


@pytest.mark.parametrize("put", [_endless, _pipe])
@pytest.mark.parametrize(
    "name",
    ["config.json", "model.safetensors", "model.safetensors.index.json", "tokenizer_config.json"],
)
def test_no_file_in_a_hugging_face_checkpoint(
    name: str, put: Callable[[Path], None], dense: Path, tmp_path: Path
) -> None:
    folder = shutil.copytree(dense, tmp_path / "hf")
    put(folder / name)
    with record_limit(5), pytest.raises(BadInput, match=f"{name} is a pipe, a socket or a device"):
        hf_to_mcore(folder, tmp_path / "out")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("put", [_endless, _pipe])
@pytest.mark.parametrize("name", [".metadata", "metadata.json", "__0_0.distcp"])
def test_no_file_in_a_megatron_checkpoint(
    name: str, put: Callable[[Path], None], dense: Path, tmp_path: Path
) -> None:
    hf_to_mcore(dense, tmp_path / "mcore")
    iteration = tmp_path / "mcore" / "release"
    put(iteration / name)
    said = f"{name} is a pipe, a socket or a device"
    with record_limit(5):
        with pytest.raises(BadInput, match=said):
            mcore_to_hf(tmp_path / "mcore", tmp_path / "out")
        assert find_damage(iteration)  # a resumed run calls this


def test_no_file_for_megatron_in_a_checkpoint_to_begin_from(dense: Path, tmp_path: Path) -> None:
    hf_to_mcore(dense, tmp_path / "mcore")
    data = tmp_path / "a.jsonl"
    data.touch()
    run = ["--hf-model", str(dense), "--train-iters", "1", "--data-path", str(data), "--cpu"]
    for place in ("common.pt", "mp_rank_00/model_optim_rng.pt"):  # read before ours are
        file = tmp_path / "mcore" / "release" / place
        file.parent.mkdir(exist_ok=True)
        _pipe(file)
        with pytest.raises(BadInput, match=f"{file} is a pipe, a socket or a device"):
            check_early(CommandLine([*run, "--pretrained-checkpoint", str(tmp_path / "mcore")]))
        file.unlink()


@pytest.mark.parametrize("flag", ["--save", "--save-hf", "--tensorboard-dir"])
def test_no_link_in_a_circle_to_write_to(flag: str, dense: Path, tmp_path: Path) -> None:
    (tmp_path / "data.jsonl").touch()
    (tmp_path / "loop").symlink_to("loop")
    run = ["--hf-model", str(dense), "--train-iters", "1", "--cpu", flag, str(tmp_path / "loop")]
    run += ["--data-path", str(tmp_path / "data.jsonl")]
    with pytest.raises(BadInput, match=f"{flag} .*loop is not a folder"):
        check_early(CommandLine(run))


def test_data_of_no_bytes(dense: Path, tmp_path: Path) -> None:
    hf_to_mcore(dense, tmp_path / "mcore")
    index = tmp_path / "mcore" / "release" / ".metadata"
    content = pickle.loads(without_checksum(index.read_bytes()))
    for place in content.storage_data.values():
        place.length = 0
    index.write_bytes(pickle.dumps(content))
    with pytest.raises(BadInput, match=r"\.metadata gives it no bytes"):
        mcore_to_hf(tmp_path / "mcore", tmp_path / "out")


@pytest.mark.parametrize("dtype", [torch.complex64, torch.int8])
def test_a_dtype_that_no_tensor_of_a_model_has(
    dtype: torch.dtype, dense: Path, tmp_path: Path
) -> None:
    hf_to_mcore(dense, tmp_path / "mcore")
    index = tmp_path / "mcore" / "release" / ".metadata"
    content = pickle.loads(without_checksum(index.read_bytes()))
    for place in content.state_dict_metadata.values():
        if hasattr(place, "properties"):
            place.properties.dtype = dtype
    index.write_bytes(pickle.dumps(content))
    name = str(dtype).removeprefix("torch.")
    with pytest.raises(BadInput, match=rf"is {name}, which no tensor of a model is"):
        mcore_to_hf(tmp_path / "mcore", tmp_path / "out")
    assert not list(tmp_path.glob(".out*"))


def _with_holes(file: Path) -> None:
    with file.open("wb") as opened:
        opened.truncate(2**43)


@pytest.mark.parametrize("name", ["config.json", "tokenizer.json", "chat_template.jinja"])
def test_no_text_that_fills_the_memory(name: str, dense: Path, tmp_path: Path) -> None:
    folder = shutil.copytree(dense, tmp_path / "hf")
    _with_holes(folder / name)
    for read in (load_processor, lambda path: hf_to_mcore(path, tmp_path / "out")):
        with pytest.raises(BadInput, match=rf"{name} has 8,796,093,022,208 bytes, which no such"):
            read(folder)


def test_no_text_of_a_megatron_checkpoint_that_fills_the_memory(
    dense: Path, tmp_path: Path
) -> None:
    hf_to_mcore(dense, tmp_path / "mcore")
    tracker = tmp_path / "mcore" / "latest_checkpointed_iteration.txt"
    _with_holes(tracker)
    with pytest.raises(BadInput, match="a number or 'release' is expected"):
        mcore_to_hf(tmp_path / "mcore", tmp_path / "out")
    tracker.write_text("release")
    _with_holes(tmp_path / "mcore" / "release" / "metadata.json")
    with pytest.raises(BadInput, match=r"metadata.json has 8,796,093,022,208 bytes"):
        mcore_to_hf(tmp_path / "mcore", tmp_path / "out")


@pytest.mark.parametrize("name", ["", "tree", "journal", "lock", "replaced"])
def test_no_link_where_a_conversion_works(name: str, dense: Path, tmp_path: Path) -> None:
    """A downloaded folder may hold the remains of a conversion, which lead elsewhere."""
    work, kept = tmp_path / ".out.incomplete", tmp_path / "kept"
    if name == "journal":
        kept.write_text("kept")
    else:
        kept.mkdir()
    (work / name).parent.mkdir(exist_ok=True)
    (work / name).symlink_to(kept)
    with pytest.raises(BadInput, match=f"{work / name} is a link to {kept}, which this command"):
        hf_to_mcore(dense, tmp_path / "out")
    assert kept.read_text() == "kept" if name == "journal" else not list(kept.iterdir())


@pytest.mark.parametrize("end", [".partial", ".partial.json"])
def test_no_link_where_scores_are_written(end: str, tmp_path: Path) -> None:
    (tmp_path / f"out.jsonl{end}").symlink_to(tmp_path / "elsewhere")
    output = Output(tmp_path / "out.jsonl", {}, 1)
    with pytest.raises(BadInput, match=f"{end} is a link to"):
        output.check(force=True)


def test_no_link_as_a_lock(tmp_path: Path) -> None:
    kept = tmp_path / "kept"
    kept.write_text("kept")
    (tmp_path / "out.lock").symlink_to(kept)
    with pytest.raises(BadInput, match=r"out.lock is a link to"), only_writer(tmp_path / "out"):
        pass
    assert kept.read_text() == "kept"


def test_no_file_in_a_legacy_checkpoint(tmp_path: Path) -> None:
    (tmp_path / "mp_rank_00").mkdir()
    _pipe(tmp_path / "mp_rank_00" / "model_optim_rng.pt")
    with record_limit(5), pytest.raises(BadInput, match="is a pipe"):
        open_ranks(tmp_path)


def test_no_link_in_a_circle(dense: Path, tmp_path: Path) -> None:
    folder = shutil.copytree(dense, tmp_path / "hf")
    (folder / "tokenizer.json").unlink()
    (folder / "tokenizer.json").symlink_to("tokenizer.json")
    with pytest.raises(BadInput, match=r"tokenizer\.json cannot be looked at: Too many levels"):
        hf_to_mcore(folder, tmp_path / "out")


def test_a_name_that_no_file_can_have_is_damage(dense: Path, tmp_path: Path) -> None:
    hf_to_mcore(dense, tmp_path / "mcore")
    index = tmp_path / "mcore" / "release" / ".metadata"
    content = pickle.loads(without_checksum(index.read_bytes()))
    for place in content.storage_data.values():
        place.relative_path += "a" * 300
    index.write_bytes(pickle.dumps(content))
    damage = find_damage(index.parent)
    assert damage is not None
    assert damage.endswith("cannot be read: File name too long")


@pytest.mark.parametrize("count", [10**12, -1, "3", True])
@pytest.mark.parametrize("section", [None, "text_config", "vision_config"])
def test_labels_without_end(count: Any, section: str | None, dense: Path, tmp_path: Path) -> None:
    """Transformers would make a name for each, until the memory is full."""
    folder = shutil.copytree(dense, tmp_path / "hf")
    config = json.loads((folder / "config.json").read_text())
    (config[section] if section else config)["num_labels"] = count
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(BadInput, match=r"num_labels in config\.json is"):
        load_processor(folder)


ENDLESS = (
    "{% for a in range(99999) %}{% for b in range(99999) %}{% for c in range(99999) %}"
    "{% endfor %}{% endfor %}{% endfor %}"
)


@pytest.mark.parametrize("wants", ["", "messages|length == 1"], ids=["always", "for a prompt"])
def test_a_chat_template_that_never_ends(
    wants: str, dense: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(processor_module, "_TEMPLATE_SECONDS", 0.2)
    folder = shutil.copytree(dense, tmp_path / "hf")
    template = f"{{% if {wants} %}}{ENDLESS}{{% endif %}}" if wants else ENDLESS
    (folder / "chat_template.jinja").write_text(template)
    said = r"chat template is still rendering after 0\.2 s"
    if wants:
        turn = [{"role": "user", "content": "?"}]
        with pytest.raises(BadInput, match=said):
            process_conversations(load_processor(folder), [turn])
    else:
        with pytest.raises(BadInput, match=said):
            load_processor(folder)


@pytest.mark.parametrize(
    ("template", "said"),
    [
        (f"{{{{ {'(' * 3000}1{')' * 3000} }}}}", "cannot render this prompt: RecursionError"),
        ("{% if 1 %}" * 2000, "cannot render this prompt"),
        ("{{ messages.x }}", "renders nothing of this prompt"),
    ],
    ids=["expression", "statement", "nothing"],
)
def test_a_chat_template_that_cannot_be_used(
    template: str, said: str, dense: Path, tmp_path: Path
) -> None:
    folder = shutil.copytree(dense, tmp_path / "hf")
    (folder / "chat_template.jinja").write_text(template)
    processor = load_processor(folder)
    with pytest.raises(BadInput, match=said):
        process_conversations(processor, [[{"role": "user", "content": "?"}]])
    Renderer(processor)  # which `data check` makes before it reads records


def test_a_pattern_of_an_adapter_that_never_ends(
    dense: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(adapter_config, "_PEFT_SECONDS", 2.0)
    lora = AdapterConfig.from_dict(
        {
            "peft_type": "LORA",
            "r": 2,
            "lora_alpha": 4,
            "target_modules": "(([a-z_.0-9]+)+)+!",
            "task_type": None,
        }
    )
    with pytest.raises(BadInput, match="a pattern in it may never end"):
        apply_with_peft(lora, dense)


def test_links_within_the_cache_of_the_hub_and_of_weights_are_followed(
    dense: Path, tmp_path: Path
) -> None:
    snapshot = tmp_path / "models--a--b" / "snapshots" / "0a1b"
    snapshot.mkdir(parents=True)
    (snapshot.parents[1] / "blobs").mkdir()
    for number, file in enumerate(sorted(dense.iterdir())):
        shutil.copyfile(file, snapshot.parents[1] / "blobs" / str(number))
        (snapshot / file.name).symlink_to(f"../../blobs/{number}")
    (snapshot / "model.safetensors").unlink()
    (snapshot / "model.safetensors").symlink_to(dense / "model.safetensors")
    hf_to_mcore(snapshot, tmp_path / "out")
    copied = tmp_path / "out" / "hf" / "tokenizer.json"
    assert copied.read_bytes() == (dense / "tokenizer.json").read_bytes()


def test_what_a_link_out_of_the_model_names_is_not_copied(dense: Path, tmp_path: Path) -> None:
    folder = shutil.copytree(dense, tmp_path / "hf")
    (tmp_path / "secret").write_text("{}")
    (folder / "generation_config.json").unlink()
    (folder / "generation_config.json").symlink_to(tmp_path / "secret")
    said = r"generation_config\.json is a link to .*secret, outside of the model"
    with pytest.raises(BadInput, match=said):
        hf_to_mcore(folder, tmp_path / "out")
    run = ["--hf-model", str(folder), "--train-iters", "1", "--data-path", str(dense), "--cpu"]
    check_early(CommandLine(run))
    for place in ("--save", "--save-hf"):
        with pytest.raises(BadInput, match=said):
            check_early(CommandLine([*run, place, str(tmp_path / "saved")]))


def _json_array(folder: Path) -> None:
    (folder / "a.json").write_text(f"[{{}}, {DEEP}]")
    write_index(folder / "a.json", folder / "a.json")


def _dataset(folder: Path) -> None:
    (folder / "dataset_dict.json").write_text(DEEP)
    TableReader(folder)


def _mixture(folder: Path) -> None:
    (folder / "a.yaml").write_text(f"datasets: {DEEP}")
    parse_sources([str(folder / "a.yaml")])


def _scores(folder: Path) -> None:
    data = folder / "a.jsonl"
    data.write_text("{}\n")
    facts_file_of(scores_file_of(data)).write_text(DEEP)
    scores_file_of(data).write_text(DEEP)
    with pytest.raises(BadInput, match="nested too deeply"):
        References(data)
    facts = {"settings": {"data": file_digest(data), "temperature": 1}}
    facts_file_of(scores_file_of(data)).write_text(json.dumps(facts))
    References(data)


@pytest.mark.parametrize("read", [_json_array, _dataset, _mixture, _scores])
def test_deep_json(read: Callable[[Path], None], tmp_path: Path) -> None:
    with pytest.raises(BadInput, match=r"nested too deeply|maximum recursion depth"):
        read(tmp_path)


def test_deep_records_are_bad_samples(
    dense: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    deep = ('{"messages": ' + DEEP + "}", json.dumps({"messages": DEEP}))
    (tmp_path / "a.jsonl").write_text("".join(f"{one}\n" for one in deep))
    assert exit_code("data", "check", tmp_path / "a.jsonl", "--hf-model", dense) == 1
    said = " ".join(capsys.readouterr().out.split())
    assert said.count("nested too deeply") == 2


def test_parse_json() -> None:
    assert parse_json(b'{"a": [1]}') == {"a": [1]}
    with pytest.raises(ValueError, match="nested too deeply"):
        parse_json(DEEP)


ALIASES = "".join(
    f"x{level}: &x{level} [{', '.join([f'*x{level - 1}'] * 9)}]\n" for level in range(1, 12)
)


@pytest.mark.parametrize("key", ["epochs", "weight", "path", "unknown"])
def test_aliases_that_stand_for_billions(key: str, tmp_path: Path) -> None:
    """A message that printed the value would never end."""
    entry = {"path": "a.jsonl", key: "*x11"}
    listed = ", ".join(f"{name}: {value}" for name, value in entry.items())
    file = tmp_path / "mixture.yaml"
    file.write_text(f"x0: &x0 [a]\n{ALIASES}datasets: [{{{listed}}}]\n")
    with pytest.raises(BadInput, match="its aliases stand for more than 1,000,000 values"):
        parse_sources([str(file)])
    file.write_text("datasets: &a [*a]\n")
    with pytest.raises(BadInput, match="it contains itself"):
        parse_sources([str(file)])
    file.write_text(f"datasets: [{{path: a.jsonl, weight: {hex(10**5000)}}}]")
    with pytest.raises(BadInput, match="an integer of hundreds of digits"):
        parse_sources([str(file)])


def test_names_of_shards_without_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(indexes, "_MOST_SHARDS", 1000)
    meta = tmp_path / ".nv-meta"
    meta.mkdir()
    (meta / "dataset.yaml").write_text("")
    (meta / "split.yaml").write_text("split_parts: {train: ['{0..99999999999}.tar']}")
    with pytest.raises(BadInput, match="names more than 1,000 tars"):
        indexes.tars_of_splits(tmp_path)
