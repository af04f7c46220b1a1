"""A data worker's death is one message, and its files lie below a temporary folder."""

from __future__ import annotations

import gc
import multiprocessing
import tempfile
from itertools import islice
from pathlib import Path

import pytest
from torch.utils.data.dataloader import _MultiProcessingDataLoaderIter

from mcore_qwen3vl.errors import BadInput
from mcore_qwen3vl.runtime.launch import run_layout
from mcore_qwen3vl.runtime.lifetime import scratch_folder
from tests.data.loaders import MakeLoader


@pytest.mark.parametrize("noticed", [True, False], ids=["noticed", "not noticed yet"])
def test_a_worker_that_is_killed_is_one_message(
    make: MakeLoader, records: Path, noticed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is one message also if the reader first tries to fetch batches from the dead process."""
    loader = make(records, num_workers=1)
    next(loader)
    (worker,) = multiprocessing.active_children()
    if not noticed:
        handler = "torch.utils.data._utils.signal_handling._error_if_any_worker_fails"
        monkeypatch.setattr(handler, lambda: None)
        monkeypatch.setattr(worker, "is_alive", lambda: True)
        (reading,) = (
            one
            for one in gc.get_objects()
            if isinstance(one, _MultiProcessingDataLoaderIter) and worker in one._workers
        )
        assert reading._worker_result_queue._reader.poll(60)  # it has read ahead
    worker.kill()
    worker.join()
    with pytest.raises(BadInput, match=r"^A data worker died: .*lower --num-workers"):
        list(islice(loader, 20))


@pytest.mark.usefixtures("impatient")
def test_workers_hand_over_batches_below_a_temporary_folder_of_a_long_name(
    make: MakeLoader, records: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The folder's name is the longest possible: paths of sockets have at most 107 bytes."""
    with scratch_folder() as short:
        longest = 107 - len("/pymp-12345678/listener-12345678")
        folder = short / ("x" * (longest - len(f"{short}/")))
        folder.mkdir()
        monkeypatch.setattr(tempfile, "tempdir", str(folder))

        def names_of_one_batch() -> list[str]:
            multiprocessing.current_process().daemon = False  # daemons may not start workers
            return list(next(make(records, num_workers=1)).names)

        (names,) = run_layout(names_of_one_batch, 1, timeout=60)
        assert names
