"""A foreign checkpoint of VERL's engine runs no code, in whichever of its objects the code lies."""

from __future__ import annotations

import io
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("verl", reason="make test-verl makes an environment that has VERL")

from torch.distributed.checkpoint import filesystem
from torch.distributed.checkpoint import metadata as dcp
from torch.distributed.checkpoint.api import CheckpointException

from mcore_qwen3vl.converters.torch_pickle import METADATA, with_checksum, without_checksum
from mcore_qwen3vl.errors import BadInput
from tests.converters.checkpoints import Call
from tests.verl.engines import build, exported, same


def poison(folder: Path, key: str, marker: Path) -> bool:
    """Replace the objects of a ``torch_dist`` folder named `key`, if there are any, by a call."""
    file = folder / METADATA
    index = pickle.loads(without_checksum(file.read_bytes()))
    torch.save(Call(Path.touch, marker), stream := io.BytesIO())
    (folder / "evil.distcp").write_bytes(stream.getvalue())
    found = [name for name in index.state_dict_metadata if name.startswith(key)]
    for name in found:
        index.state_dict_metadata[name] = dcp.BytesStorageMetadata()
        place = filesystem._StorageInfo("evil.distcp", 0, len(stream.getvalue()))
        stored = {at: where for at, where in index.storage_data.items() if at.fqn != name}
        index.storage_data = {**stored, dcp.MetadataIndex(name): place}
    file.write_bytes(with_checksum(pickle.dumps(index, protocol=2)))
    return bool(found)


def load_poisoned(path: Path, key: str, folder: Path) -> tuple[bool, str]:
    """Return whether a sound checkpoint loads as it was saved, and what is said of a poisoned."""
    contents = {"save_contents": ["model", "optimizer", "extra"]}
    contents["load_contents"] = contents["save_contents"]
    engine = build(path, checkpoint=contents)
    engine.save_checkpoint(str(folder / "step"), global_step=1)
    before = exported(engine)
    engine.load_checkpoint(str(folder / "step"), del_local_after_load=False)
    sound = len(same(exported(engine), before)) == len(before)
    saved = [file.parent for file in (folder / "step").rglob(METADATA)]
    if key:
        poisoned = [poison(place, key, folder / "marker") for place in saved]
        assert any(poisoned)
    else:
        for place in saved:
            (place / METADATA).write_bytes(pickle.dumps(Call(Path.touch, folder / "marker")))
    try:
        engine.load_checkpoint(str(folder / "step"), del_local_after_load=False)
    except CheckpointException as error:  # no Exception
        return sound, str(error)
    except BadInput as error:
        return sound, str(error)
    return sound, ""


@pytest.mark.parametrize("key", ["common_state", "rng_state", ""])
def test_code_in_a_checkpoint(key: str, case: Any, on_ranks: Any, tmp_path: Path) -> None:
    ((sound, said),) = on_ranks(1, load_poisoned, case("dense").path, key, tmp_path)
    assert sound
    assert not (tmp_path / "marker").exists()
    assert "asks for" in said
    assert "weights_only" not in said
