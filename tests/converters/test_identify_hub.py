"""Hub ids are resolved in a cache laid out like huggingface_hub's, and by a simulated hub."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock

import huggingface_hub
import pytest
from huggingface_hub import constants, errors

from mcore_qwen3vl.converters import identify
from mcore_qwen3vl.errors import BadInput
from tests.command import exit_code, without_version
from tests.converters.checkpoints import load

Tiny = Callable[[str], Path]
COMMIT = "0123456789abcdef0123456789abcdef01234567"
OTHER = "f" * 40
REPO = "Owner/Qwen3-VL-Tiny"


def fill_cache(cache: Path, checkpoint: Path, commit: str = COMMIT, ref: str = "main") -> Path:
    """Write ``blobs/`` with the files, ``snapshots/COMMIT/`` with links to them, and ``refs/``."""
    folder = cache / f"models--{REPO.replace('/', '--')}"
    snapshot = folder / "snapshots" / commit
    for file in (file for file in checkpoint.rglob("*") if file.is_file()):
        blob = folder / "blobs" / f"{commit[:4]}{file.name.replace('.', '')}"
        blob.parent.mkdir(parents=True, exist_ok=True)
        blob.write_bytes(file.read_bytes())
        link = snapshot / file.relative_to(checkpoint)
        link.parent.mkdir(parents=True, exist_ok=True)
        link.symlink_to(os.path.relpath(blob, link.parent))
    (folder / "refs").mkdir(exist_ok=True)
    (folder / "refs" / ref).write_text(commit)
    return snapshot


@pytest.fixture
def cache(tiny: Tiny, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return a cache that holds the case ``bf16-sharded``, with the hub offline."""
    path = tmp_path / "cache"
    fill_cache(path, tiny("bf16-sharded"))
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(path))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    return path


def test_commands_take_a_hub_id(cache: Path, tiny: Tiny, tmp_path: Path) -> None:
    assert exit_code("convert", "hf-to-mcore", REPO, tmp_path / "mcore") == 0
    assert exit_code("verify", "tensors", tiny("bf16-sharded"), tmp_path / "mcore") == 0
    assert exit_code("verify", "tensors", f"{REPO}@main", tmp_path / "mcore") == 0
    assert exit_code("verify", "roundtrip", f"{REPO}@{COMMIT}") == 0
    assert exit_code("inspect", REPO) == 0
    back = tmp_path / "back"
    assert exit_code("convert", "mcore-to-hf", tmp_path / "mcore", back, "--hf-config", REPO) == 0
    assert set(load(back)) == set(load(tiny("bf16-sharded")))
    source = json.loads((tmp_path / "mcore" / "manifest.json").read_text())["source"]
    assert (source["hub_id"], source["revision"]) == (REPO, COMMIT)
    assert "path" not in source


def test_revisions(cache: Path, tiny: Tiny) -> None:
    other = fill_cache(cache, tiny("dense"), OTHER, "v2")
    assert identify.resolve(REPO) == identify.resolve(f"{REPO}@{COMMIT}") != other
    assert identify.resolve(f"{REPO}@v2") == identify.resolve(f"{REPO}@{OTHER}") == other


def test_a_local_path_wins(cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / REPO).mkdir(parents=True)
    assert identify.resolve(REPO) == Path(REPO)


@pytest.mark.parametrize("name", ["/absent/model", "./absent/model", "absent", "a/b/c", "../a"])
def test_other_paths_are_left_alone(cache: Path, name: str) -> None:
    assert identify.resolve(name) == Path(name)


def test_offline_and_not_in_the_cache(cache: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name in ("Owner/Another", f"{REPO}@v3"):
        assert exit_code("inspect", name) == 2
        message = capsys.readouterr().err.replace("\n", " ")
        assert "is not a local path" in message
        assert "HF_HUB_OFFLINE is set" in message
        assert "hf download" in message


def test_no_network(tmp_path: Path) -> None:
    command = [sys.executable, "-c", "from mcore_qwen3vl.cli import main; main()", "inspect", REPO]
    environment = {**os.environ, "HF_HUB_CACHE": str(tmp_path), "HF_ENDPOINT": "http://127.0.0.1:1"}
    environment.pop("HF_HUB_OFFLINE", None)
    found = subprocess.run(command, env=environment, check=False, capture_output=True, text=True)
    assert found.returncode == 2
    assert without_version(found.stderr) == (
        f"error: {REPO} is not a local path, and as a Hugging Face hub id: the hub cannot be "
        f"reached, and the cache {tmp_path} does not hold all of it. Run `hf download {REPO}` "
        "where the hub can be reached.\n"
    )


def test_cached_without_its_weights(cache: Path) -> None:
    for link in (cache / "models--Owner--Qwen3-VL-Tiny" / "snapshots" / COMMIT).glob("*.safet*"):
        link.unlink()
    with pytest.raises(BadInput, match="without its safetensors weights"):
        identify.resolve(REPO)
    assert (identify.resolve(REPO, weights=False) / "config.json").is_file()


def test_a_shard_missing_from_the_cache_is_named(
    cache: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shard = sorted(identify.resolve(REPO).glob("model-*.safetensors"))[1]
    shard.resolve().unlink()  # this removes the blob, so the link dangles
    assert exit_code("convert", "hf-to-mcore", REPO, tmp_path / "mcore") == 2
    assert f"in {shard.name}, which does not exist" in capsys.readouterr().err
    assert not (tmp_path / "mcore").exists()


def test_the_environment_is_obeyed(cache: Path) -> None:
    work = f"from mcore_qwen3vl.converters.identify import resolve; print(resolve({REPO!r}))"
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "HF_HUB_CACHE": str(cache)}
    found = subprocess.run(
        [sys.executable, "-c", work], env=environment, check=True, capture_output=True, text=True
    )
    assert found.stdout.strip() == str(identify.resolve(REPO))


@pytest.mark.parametrize(("weights", "fetched"), [(True, 1), (False, 0)])
def test_only_what_is_needed_is_fetched(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, weights: bool, fetched: int
) -> None:
    asked: dict[str, Any] = {}

    def download(repo: str, **options: Any) -> str:
        asked.update(options, repo=repo)
        (tmp_path / "model.safetensors").touch()
        return str(tmp_path)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    assert identify.resolve("Qwen/Qwen3-VL-2B-Instruct@main", weights=weights) == tmp_path
    assert (asked["repo"], asked["revision"]) == ("Qwen/Qwen3-VL-2B-Instruct", "main")
    wanted = ["config.json", "tokenizer.json", "merges.txt", "chat_template.jinja"]
    wanted += ["model.safetensors.index.json", "model-00001-of-00002.safetensors"]
    unwanted = ["pytorch_model.bin", "model.gguf", "consolidated.00.pth", "a.onnx", "README.md"]
    kept = huggingface_hub.utils.filter_repo_objects(
        [*wanted, *unwanted], allow_patterns=asked["allow_patterns"]
    )
    assert list(kept) == wanted[: 5 + fetched]


def http(kind: type[errors.HfHubHTTPError]) -> Exception:
    return kind("no", response=MagicMock())


@pytest.mark.parametrize(
    ("error", "message"),
    [
        (http(errors.RepositoryNotFoundError), "no such repository, or it is private"),
        (http(errors.GatedRepoError), "terms must be accepted"),
        (http(errors.RevisionNotFoundError), "at v9 is .* has no revision v9"),
        (errors.LocalEntryNotFoundError("no connection"), "the hub cannot be reached"),
        (OSError("disk full"), "disk full"),
    ],
)
def test_what_goes_wrong_is_said(
    monkeypatch: pytest.MonkeyPatch, error: Exception, message: str
) -> None:
    def download(*_: Any, **__: Any) -> str:
        raise error

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    with pytest.raises(BadInput, match=message):
        identify.resolve(f"{REPO}@v9")
