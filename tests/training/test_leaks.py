"""A long run with images, videos, data workers and checkpoints holds no more than a short one."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import psutil
import pytest

from mcore_qwen3vl.runtime.launch import run_layout
from mcore_qwen3vl.tiny.records import write_image_qa
from mcore_qwen3vl.training.logs import metrics
from mcore_qwen3vl.verification import curves
from mcore_qwen3vl.verification.curves import Job
from tests.data.conftest import write_video

WARM, STEPS, INTERVAL = 200, 400, 20
BYTES_A_STEP = 30_000
"""Memory that a process may grow by in a step, about three times what was measured."""
FILES = 40
"""Open files by which two moments may differ: batches on their way from the data workers."""


def measured_rank(*args: Any) -> None:
    """Run a rank that adds to each entry of its log what its processes hold."""
    write = metrics.append_json

    def append(file: str, numbers: dict[str, Any]) -> None:
        rank = psutil.Process()
        processes = [rank, *rank.children(recursive=True)]
        workers = [p for p in processes if p is rank or p.name() == "pt_data_worker"]
        held = [(p.memory_info().rss, p.num_fds()) for p in workers]
        write(file, numbers)
        with Path(f"{file}.held").open("a") as out:  # the log has numbers alone
            print(json.dumps({"iteration": numbers["iteration"], "held": held}), file=out)

    metrics.append_json = append  # type: ignore[assignment]
    curves.run_rank(*args)


@pytest.mark.slow
def test_memory_and_open_files_do_not_grow(dense: Path, tmp_path: Path) -> None:
    data = write_image_qa(tmp_path, 36)
    clip = write_video(tmp_path / "clip.mp4", frames=12, height=32, width=48)
    content = [{"type": "video", "video": clip.name}, {"type": "text", "text": "What?"}]
    answer = {"role": "assistant", "content": "A clip."}
    record = {"messages": [{"role": "user", "content": content}, answer]}
    with data.open("a") as lines:
        lines.write(f"{json.dumps(record)}\n" * 4)
    log = tmp_path / "log.jsonl"
    flags = (
        "--num-workers", "2", "--log-interval", str(INTERVAL), "--log-json", str(log),
        "--save", str(tmp_path / "save"), "--save-interval", str(WARM // 2),
    )  # fmt: skip
    job = Job(dense, data, steps=STEPS, batch=1, seq_length=256, packing=True, flags=flags)
    curves.import_for_ranks()
    run_layout(measured_rank, 1, job.argv, tmp_path / "output.txt", timeout=900)
    entries = [json.loads(line) for line in Path(f"{log}.held").read_text().splitlines()]
    early = [entry["held"] for entry in entries if WARM // 2 < entry["iteration"] <= WARM]
    late = [entry["held"] for entry in entries if entry["iteration"] > STEPS - WARM // 2]
    assert len(early) == len(late) == WARM // 2 // INTERVAL
    assert {len(held) for held in (*early, *late)} == {3}  # the rank and its two data workers
    for process in range(3):
        (memory, files), (memory_then, files_then) = (
            [max(held[process][kind] for held in moments) for kind in (0, 1)]
            for moments in (early, late)
        )
        assert memory_then - memory < BYTES_A_STEP * (STEPS - WARM)
        assert files_then - files < FILES
