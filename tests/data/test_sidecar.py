"""What a loss reads beside the data comes with its record, or leaves the record out."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import pytest

from mcore_qwen3vl.config import Architecture
from mcore_qwen3vl.data import DataConfig, Loader, Source, load_processor
from mcore_qwen3vl.data.records.reading import BadSample
from mcore_qwen3vl.data.sidecar import OpenSidecar, Sidecar
from mcore_qwen3vl.errors import BadInput
from mcore_qwen3vl.tiny.records import write_half_images


class Numbers(OpenSidecar):
    """It has each record's number, and nothing for the third record."""

    def require(self, number: int, plans: Sequence[Any]) -> None:
        self.look_up(number, plans)

    def look_up(self, number: int, plans: Sequence[Any]) -> int:
        if number == 2:
            raise BadSample("it has no number")
        return number


@dataclass(frozen=True)
class NumberFile(Sidecar):
    uncut = "the number is that of a whole record"

    def open(self, paths: Sequence[Path], tokenizer: Any, vocab_size: int) -> list[Numbers]:
        return [Numbers() for _ in paths]


def test_a_record_that_is_missing_in_it_leaves_no_gap_in_a_pack(
    dense: Path, tmp_path: Path
) -> None:
    data = write_half_images(tmp_path / "data", 5, tokens=100, image_side=4, token_pixels=8)
    config = DataConfig(
        256, packing=True, shuffle=False, max_bad_fraction=1.0, sidecar=NumberFile()
    )
    loader = Loader(
        [Source(data)], Architecture.from_hf(dense), load_processor(dense), config, num_workers=0
    )
    packs = [{int(name.rpartition(":")[2]) for name in batch.names} for batch in islice(loader, 2)]
    assert [len(pack) for pack in packs] == [2, 2]
    assert set.union(*packs) == {1, 2, 4, 5}


def test_a_record_is_not_cut_where_it_says_so() -> None:
    with pytest.raises(BadInput, match="the number is that of a whole record"):
        DataConfig(256, overlong="truncate", sidecar=NumberFile())
