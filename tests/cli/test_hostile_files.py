"""No command runs code or opens a network address because a file asks for it."""

from __future__ import annotations

import argparse
import io
import json
import os
import pickle
import shutil
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from threading import Thread
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed import checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException

from mcore_qwen3vl.cli import main
from mcore_qwen3vl.converters.convert import hf_to_mcore
from mcore_qwen3vl.converters.torch_pickle import guard_reads
from mcore_qwen3vl.data.indexes import index_beside
from mcore_qwen3vl.errors import BadInput
from mcore_qwen3vl.layout import Layout
from mcore_qwen3vl.runtime.launch import run_layout
from mcore_qwen3vl.settings.run import CheckpointSettings
from mcore_qwen3vl.training.checkpoints import data_state
from mcore_qwen3vl.training.checkpoints.load_errors import explain_load_errors
from mcore_qwen3vl.training.checkpoints.resume import agree_on_older_iteration
from mcore_qwen3vl.training.contract.record import RunRecord
from mcore_qwen3vl.verification.curves import Job
from tests.command import exit_code
from tests.converters.checkpoints import Call
from tests.data.conftest import write_tar

PROMPT = ("--prompt", "Hello", "--max-new-tokens", "1")

# {run}: a poisoned Megatron checkpoint; {hf}: a poisoned Hugging Face one; {good}: the sound
# original; {data}: records; {out}: a place to write.
READERS_OF_METADATA = {
    "generate": ("generate", "{run}", "--cpu", *PROMPT),
    "score": ("score", "{run}", "{data}", "--cpu", "--out", "{out}"),
    "trace": ("verify", "trace", "{good}", "{run}"),
    "tensors": ("verify", "tensors", "{good}", "{run}"),
    "inspect": ("inspect", "{run}", "--tensors"),
    "export": ("convert", "mcore-to-hf", "{run}", "{out}"),
}
READERS_OF_THE_PROCESSOR = {
    "generate": ("generate", "{hf}", "--cpu", *PROMPT),
    "score": ("score", "{hf}", "{data}", "--cpu", "--out", "{out}"),
    "trace": ("verify", "trace", "{hf}", "--prompt", "Hello"),
    "check": ("data", "check", "{data}", "--hf-model", "{hf}"),
}
READERS_OF_DATA = {
    "check": ("data", "check", "{data}", "--hf-model", "{good}"),
    "show": ("data", "show", "{data}", "1", "--hf-model", "{good}", "--out", "{out}"),
}
TRAINING = {
    "resume": ("--load", "{run}"),
    "a step by name": ("--load", "{run}", "--ckpt-step", "3"),
    "the base of LoRA": ("--pretrained-checkpoint", "{run}", "--lora-rank", "2"),
}


@pytest.fixture
def places(dense: Path, tmp_path: Path) -> dict[str, Path]:
    """Return paths of poisoned checkpoints; their code, if run, makes the file `marker`."""
    found = {
        "good": dense,
        "data": tmp_path / "few.jsonl",
        "marker": tmp_path / "marker",
        "run": tmp_path / "run",
        "hf": tmp_path / "hf",
        "out": tmp_path / "out",
    }
    messages = [{"role": "user", "content": "2 + 2?"}, {"role": "assistant", "content": "4"}]
    found["data"].write_text(json.dumps({"messages": messages}) + "\n")
    hf_to_mcore(dense, tmp_path / "converted")
    shutil.copytree(tmp_path / "converted" / "release", found["run"] / "iter_0000003")
    shutil.copytree(tmp_path / "converted" / "hf", found["run"] / "hf")
    (found["run"] / "latest_checkpointed_iteration.txt").write_text("3")
    poison = pickle.dumps(Call(Path.touch, found["marker"]))
    (found["run"] / "iter_0000003" / ".metadata").write_bytes(poison)
    _with_own_processor(dense, found["hf"], found["marker"])
    return found


def _with_own_processor(checkpoint: Path, target: Path, marker: Path) -> None:
    shutil.copytree(checkpoint, target)
    (target / "processing_evil.py").write_text(
        f"import pathlib\npathlib.Path({str(marker)!r}).touch()\n"
        "from transformers import ProcessorMixin\n"
        "class EvilProcessor(ProcessorMixin):\n    pass\n"
    )
    own = {
        "processor_class": "EvilProcessor",
        "auto_map": {"AutoProcessor": "processing_evil.EvilProcessor"},
    }
    for name in ("processor_config.json", "preprocessor_config.json", "tokenizer_config.json"):
        file = target / name
        if file.exists():
            file.write_text(json.dumps({**json.loads(file.read_text()), **own}))


def refused(words: Iterable[str], places: dict[str, Path], capsys: Any) -> str:
    """Run a command that must refuse its files, and run no code of theirs; return its message."""
    assert exit_code(*(word.format(**places) for word in words)) == 2
    assert not places["marker"].exists()
    message: str = capsys.readouterr().err
    return message


@pytest.mark.parametrize("name", READERS_OF_METADATA)
def test_metadata(name: str, places: dict[str, Path], capsys: Any) -> None:
    message = refused(READERS_OF_METADATA[name], places, capsys)
    assert ".metadata asks for" in message
    assert "Traceback" not in message


@pytest.mark.parametrize("name", READERS_OF_THE_PROCESSOR)
def test_processor(
    name: str, places: dict[str, Path], capsys: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("builtins.input", lambda *_: "y")  # transformers may ask
    assert "custom code" in refused(READERS_OF_THE_PROCESSOR[name], places, capsys)


@pytest.mark.parametrize("name", ["generate", "check"])
def test_chat_template(name: str, dense: Path, places: dict[str, Path], capsys: Any) -> None:
    shutil.copytree(dense, places["hf"], dirs_exist_ok=True)  # without the other poison
    code = f"cycler.__init__.__globals__.os.mkdir({str(places['marker'])!r})"
    (places["hf"] / "chat_template.jinja").write_text(f"{{{{ {code} }}}}")
    assert exit_code(*(word.format(**places) for word in READERS_OF_THE_PROCESSOR[name]))
    assert not places["marker"].exists()
    said = capsys.readouterr()
    assert "attribute '__init__' of 'type' object is unsafe" in " ".join(
        (said.out + said.err).split()
    )


@pytest.mark.parametrize("name", TRAINING)
def test_training(name: str, places: dict[str, Path]) -> None:
    with pytest.raises(BadInput, match="asks for"):
        run_layout(_trainer(resuming(name, places)), Layout().world_size)
    assert not places["marker"].exists()


def resuming(name: str, places: dict[str, Path]) -> list[str]:
    """Return the arguments of a run that starts from the checkpoint as `TRAINING` says."""
    flags = tuple(word.format(**places) for word in TRAINING[name])
    argv = Job(places["good"], places["data"], steps=5, batch=1, flags=flags).argv
    at = argv.index("--load-hf")
    del argv[at : at + 2]
    return argv


ENERGON = "__module__: megatron.energon\n"


def _function(folder: Path) -> tuple[Path, str]:
    file = folder / "function.yaml"
    file.write_text(f"__module__: os\n__function__: mkdir\npath: {folder / 'marker'}\n")
    return file, "function.yaml:1"


def _nested(folder: Path) -> tuple[Path, str]:
    """Write one of energon's own classes with an argument that another module would compute."""
    file = folder / "nested.yaml"
    call = f"{{__module__: os, __function__: mkdir, path: {folder / 'marker'}}}"
    file.write_text(
        f"{ENERGON}__class__: MetadatasetV2\nsplits:\n  train:\n    path: few.jsonl\n"
        f"    subflavors:\n      flavor: {call}\n"
    )
    return file, "nested.yaml:7"


def _own_loader(folder: Path) -> tuple[Path, str]:
    """Write a WebDataset with a Python file beside it."""
    shards = folder / "shards"
    write_tar(shards / "0.tar", [("0.txt", b"a")])
    index_beside(shards)
    (shards / ".nv-meta" / "evil.py").write_text(
        f"import pathlib\npathlib.Path({str(folder / 'marker')!r}).touch()\n"
        "def load(sample):\n    return {'text': sample['txt']}\n"
        "def keep(part):\n    return True\n"
    )
    (shards / ".nv-meta" / "dataset.yaml").write_text(
        f"{ENERGON}__class__: TextWebdataset\n"
        "sample_loader: evil.py:load\npart_filter: evil.py:keep\n"
    )
    return shards, "dataset.yaml:3"


def _leaf(folder: Path) -> tuple[Path, str]:
    """Write a sound metadataset of such a WebDataset."""
    _, where = _own_loader(folder)
    file = folder / "leaf.yaml"
    file.write_text(f"{ENERGON}__class__: MetadatasetV2\nsplits:\n  train:\n    path: shards\n")
    return file, where


CODE_IN_DATA = (_function, _nested, _own_loader, _leaf)


@pytest.mark.parametrize("hostile", CODE_IN_DATA)
@pytest.mark.parametrize("name", READERS_OF_DATA)
def test_data_that_names_code(
    name: str, hostile: Callable[[Path], tuple[Path, str]], places: dict[str, Path], capsys: Any
) -> None:
    places["data"], where = hostile(places["marker"].parent)
    message = refused(READERS_OF_DATA[name], places, capsys)
    assert f"{where} names code" in message
    assert "--trust-data" in message
    with suppress(Exception, SystemExit):  # only whether the code runs matters here
        main([*(word.format(**places) for word in READERS_OF_DATA[name]), "--trust-data"])
    assert places["marker"].exists()


def test_training_on_data_that_names_code(places: dict[str, Path]) -> None:
    data, where = _leaf(places["marker"].parent)
    argv = Job(places["good"], data, steps=1, batch=1).argv
    with pytest.raises(BadInput, match=f"{where} names code"):
        run_layout(_trainer(argv), Layout().world_size)
    assert not places["marker"].exists()


@pytest.fixture
def calls() -> Iterator[list[str]]:
    """Yield a server's address, followed by the paths that it was asked for."""
    found = []

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            found.append(self.path)
            self.send_error(404)

    with HTTPServer(("127.0.0.1", 0), Handler) as server:
        found.append(f"http://127.0.0.1:{server.server_port}")
        Thread(target=server.serve_forever, daemon=True).start()
        yield found
        server.shutdown()


@pytest.mark.parametrize("name", ["check", "show", "score", "generate"])
def test_playlist(name: str, places: dict[str, Path], calls: list[str]) -> None:
    playlist = places["data"].with_name("clip.m3u8")
    playlist.write_text(
        f"#EXTM3U\n#EXT-X-TARGETDURATION:9\n#EXTINF:9,\n{calls[0]}/1.ts\n#EXT-X-ENDLIST\n"
    )
    messages = [{"role": "user", "content": "<video>?"}, {"role": "assistant", "content": "4"}]
    record = {"messages": messages, "videos": [playlist.name]}
    places["data"].write_text(json.dumps(record) + "\n")
    places["hf"] = places["good"]
    commands = {**READERS_OF_THE_PROCESSOR, **READERS_OF_DATA}
    words = [word.format(**places) for word in commands[name]]
    if name == "generate":
        words += ["--video", str(playlist)]
    assert exit_code(*words)
    assert calls[1:] == []


def test_a_saved_data_state_that_names_code(places: dict[str, Path]) -> None:
    file = places["data"].with_name("rank_00000.pt")
    torch.save({"loader": Call(Path.touch, places["marker"])}, file)
    with pytest.raises(BadInput, match=r"rank_00000\.pt asks for \S+") as refused:
        data_state._read_state(file)
    assert "weights_only" not in str(refused.value)
    file.write_bytes(file.read_bytes()[:99])
    with pytest.raises(BadInput, match="cut short or damaged"):
        data_state._read_state(file)
    assert not places["marker"].exists()


UNSOUND = (
    7,
    {},
    {"world_size": [], "num_workers": 0},
    {"world_size": 0, "num_workers": 0},
    {"world_size": 1, "num_workers": 0, "rows": 10**300},
    {"world_size": 1, "num_workers": 0, "end": -1},
)


@pytest.mark.parametrize("state", UNSOUND, ids=str)
def test_a_saved_data_state_that_no_loader_wrote(state: Any, tmp_path: Path) -> None:
    torch.save(state, tmp_path / "rank_00000.pt")
    with pytest.raises(BadInput, match="holds no position in the data that this version wrote"):
        data_state._read_state(tmp_path / "rank_00000.pt")


@pytest.mark.parametrize("content", [b"junk" * 100, b"", b"PK\3\4", b"\x80\2."])
def test_a_saved_data_state_that_is_no_archive(content: bytes, tmp_path: Path) -> None:
    (tmp_path / "rank_00000.pt").write_bytes(content)
    with pytest.raises(BadInput, match=r"rank_00000\.pt is (cut short or )?damaged"):
        data_state._read_state(tmp_path / "rank_00000.pt")


def test_a_pipe_as_a_saved_data_state(tmp_path: Path) -> None:
    folder = data_state.folder_of(tmp_path, 3)
    folder.mkdir(parents=True)
    os.mkfifo(folder / "run.json")
    for read in (data_state.first_state_of, RunRecord.of_checkpoint):
        os.close(os.open(folder / "rank_00000.pt", os.O_CREAT))
        with pytest.raises(BadInput, match=r"run\.json is a pipe"):
            read(tmp_path, 3)


def test_an_object_of_a_checkpoint_that_names_code(places: dict[str, Path]) -> None:
    """It is refused, without torch's advice to switch its restricted reader off."""
    guard_reads()
    folder = places["data"].with_name("objects")
    dcp.save({"rng": Call(Path.touch, places["marker"])}, checkpoint_id=folder, no_dist=True)
    run = explain_load_errors(CheckpointSettings(load="run"))
    with pytest.raises(BadInput, match="asks for") as refusal, run:
        dcp.load({"rng": None}, checkpoint_id=folder, no_dist=True)
    assert "weights_only" not in str(refusal.value)
    assert not places["marker"].exists()


def test_a_file_of_earlier_megatrons_that_names_code(places: dict[str, Path]) -> None:
    """Resuming reads it and refuses it; what reads weights alone does not open it."""
    with_file("common.pt", zipped({"args": Call(Path.touch, places["marker"])}), places)
    with pytest.raises(BadInput, match="asks for") as refusal:
        run_layout(_trainer(resuming("resume", places)), Layout().world_size)
    assert "weights_only" not in str(refusal.value)
    assert exit_code(*(word.format(**places) for word in READERS_OF_METADATA["generate"])) == 0
    assert not places["marker"].exists()


@pytest.mark.parametrize(
    "content",
    ["[]", "[" * 200_000, '{"sharded_backend": 5}', "{}", "NaN", '{"a": ' + "9" * 6000 + "}"],
)
def test_a_foreign_metadata_json(content: str, places: dict[str, Path]) -> None:
    with_file("metadata.json", content.encode(), places)
    with pytest.raises(BadInput, match=r"metadata\.json (names the format|cannot be|holds)"):
        run_layout(_trainer(resuming("resume", places)), Layout().world_size)


@pytest.mark.parametrize("flag", ["load", "pretrained_checkpoint"])
def test_weights_to_begin_from_with_a_damaged_metadata(
    flag: str, dense: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Megatron would load it with other shapes, and took 17 GB for one changed byte."""
    hf_to_mcore(dense, tmp_path / "run")
    file = tmp_path / "run" / "release" / ".metadata"
    file.write_bytes(file.read_bytes().replace(b"visual.blocks.1", b"vi\xd0ual.blocks.1", 1))
    monkeypatch.setattr(dist, "get_rank", lambda: 0)
    monkeypatch.setattr(dist, "broadcast_object_list", lambda *_, **__: None)
    start = CheckpointSettings(**{flag: str(tmp_path / "run")})
    with pytest.raises(BadInput, match=r"run cannot be read: .*\.metadata is not readable"):
        agree_on_older_iteration(start, argparse.Namespace(), fallback=False)


FAILURES = (
    TypeError("a\nb"),
    KeyError(7),
    EOFError(),
    CheckpointException("x", {0: (RuntimeError("Missing key"), None)}),  # type: ignore[dict-item]
)


@pytest.mark.parametrize("error", FAILURES, ids=lambda error: type(error).__name__)
def test_what_megatron_raises_for_content_is_one_error(error: BaseException) -> None:
    run = explain_load_errors(CheckpointSettings(load="run"))
    with pytest.raises(BadInput, match=r"The checkpoint in run cannot be loaded: [A-Z]"), run:
        raise error


def zipped(value: Any) -> bytes:
    torch.save(value, stream := io.BytesIO())
    return stream.getvalue()


def with_file(name: str, content: bytes, places: dict[str, Path]) -> None:
    """Replace the poisoned checkpoint by a sound one in which one file has `content`."""
    shutil.rmtree(places["run"])
    hf_to_mcore(places["good"], places["run"])
    (places["run"] / "release").rename(places["run"] / "iter_0000003")
    (places["run"] / "latest_checkpointed_iteration.txt").write_text("3")
    (places["run"] / "iter_0000003" / name).write_bytes(content)


def _trainer(argv: list[str]) -> Callable[[], int]:
    def train() -> int:
        from mcore_qwen3vl.training.arguments.command_line import CommandLine
        from mcore_qwen3vl.training.run import main as run

        return run(CommandLine(argv))

    return train
