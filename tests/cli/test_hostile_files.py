"""No command runs the code that a checkpoint's files ask for."""

from __future__ import annotations

import json
import pickle
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from mcore_qwen3vl.cli import main
from mcore_qwen3vl.converters.convert import hf_to_mcore
from mcore_qwen3vl.errors import BadInput
from mcore_qwen3vl.layout import Layout
from mcore_qwen3vl.runtime.launch import run_layout
from mcore_qwen3vl.verify.curves.job import Job

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
TRAINING = {
    "resume": ("--load", "{run}"),
    "a step by name": ("--load", "{run}", "--ckpt-step", "3"),
    "the base of LoRA": ("--pretrained-checkpoint", "{run}", "--lora-rank", "2"),
}


class Code:
    """What a pickle can do to whoever trusts it."""

    def __init__(self, marker: Path) -> None:
        self.marker = marker

    def __reduce__(self) -> Any:
        return Path.touch, (self.marker,)


@pytest.fixture
def places(dense: Path, tmp_path: Path) -> dict[str, Path]:
    """Poisoned checkpoints; whoever runs their code makes the file `marker`."""
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
    poison = pickle.dumps(Code(found["marker"]))
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


@pytest.mark.parametrize("name", READERS_OF_METADATA)
def test_metadata(name: str, places: dict[str, Path], capsys: Any) -> None:
    words = [word.format(**places) for word in READERS_OF_METADATA[name]]
    with pytest.raises(SystemExit) as stopped:
        main(words)
    assert not places["marker"].exists()
    assert stopped.value.code == 2
    message = capsys.readouterr().err
    assert ".metadata asks for" in message
    assert "Traceback" not in message


@pytest.mark.parametrize("name", READERS_OF_THE_PROCESSOR)
def test_processor(
    name: str, places: dict[str, Path], capsys: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("builtins.input", lambda *_: "y")  # transformers may ask
    words = [word.format(**places) for word in READERS_OF_THE_PROCESSOR[name]]
    with pytest.raises(SystemExit) as stopped:
        main(words)
    assert not places["marker"].exists()
    assert stopped.value.code == 2
    assert "custom code" in capsys.readouterr().err


@pytest.mark.parametrize("name", TRAINING)
def test_training(name: str, places: dict[str, Path]) -> None:
    flags = tuple(word.format(**places) for word in TRAINING[name])
    job = Job(places["good"], places["data"], steps=5, batch=1, flags=flags)
    argv = job.argv
    at = argv.index("--load-hf")
    del argv[at : at + 2]
    with pytest.raises(BadInput, match="asks for"):
        run_layout(_trainer(argv), Layout().world_size)
    assert not places["marker"].exists()


def _trainer(argv: list[str]) -> Callable[[], int]:
    def train() -> int:
        from mcore_qwen3vl.training.run import main as run

        return run(argv)

    return train
