"""A run names what it does not use of its command line."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from mcore_qwen3vl.training.arguments.unused import unused_data_flags
from tests.training.arguments.commands import parsed


def test_what_no_rank_uses_is_named(dense: Path) -> None:
    data = ("--data-path", "a.jsonl", "--shuffle-buffer", "7")
    valid = ("--valid-data-path", "0.3", "a.jsonl", "0.7", "b.jsonl")
    settings = parsed(dense, *data, *valid).settings
    named = unused_data_flags(settings, {"shuffle_buffer", "valid_data_path"})
    assert [item.name for item in named] == ["--shuffle-buffer", "weight"]
    loop = replace(settings.loop, train_samples=10, global_batch_size=4, valid_data_path=None)
    (rest,) = unused_data_flags(replace(settings, loop=loop), set())
    assert rest.name == "the last 2 of --train-samples"
    tars = parsed(dense, "--data-path", "tars", "--shuffle-buffer", "7")
    assert unused_data_flags(tars.settings, {"shuffle_buffer"}) == []
