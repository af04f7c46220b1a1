"""The budgets of a data set meet those of the run."""

from __future__ import annotations

import copy
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from mcore_qwen3vl.data.config import DataConfig, MediaLimits, Source
from mcore_qwen3vl.data.encoding.preparation import Preparation
from mcore_qwen3vl.errors import BadInput

OF_RUN = MediaLimits(
    image_min_pixels=2304, image_max_tokens=64, video_min_pixels=4608, video_max_pixels=36864
)


def processor_of(processor: Any, limits: MediaLimits) -> Any:
    """Return the processor of a data set with these budgets, in a run with `OF_RUN`."""
    config = DataConfig(512, media_limits=OF_RUN)
    preparation = Preparation(copy.deepcopy(processor), config, [Source(Path("a"), limits=limits)])
    return preparation._planners[0]._processor


@pytest.mark.parametrize(
    ("limits", "images", "videos"),
    [
        (MediaLimits(), (2304, 64 * 64), (4608, 36864)),
        # A most of either unit takes the place of the run's, of either unit.
        (MediaLimits(image_max_pixels=40000), (2304, 40000), (4608, 36864)),
        (MediaLimits(video_max_tokens=50), (2304, 64 * 64), (4608, 50 * 128)),
        (MediaLimits(image_min_pixels=300), (300, 64 * 64), (4608, 36864)),
        (MediaLimits(image_min_pixels=300, image_max_pixels=400), (300, 400), (4608, 36864)),
    ],
)
def test_a_data_sets_budgets_take_the_place_of_the_runs(
    limits: MediaLimits, images: tuple[int, int], videos: tuple[int, int], processor: Any
) -> None:
    given = processor_of(processor, limits)
    for size, expected in zip(
        (given.image_processor.size, given.video_processor.size), (images, videos), strict=True
    ):
        assert (size["shortest_edge"], size["longest_edge"]) == expected


def test_a_least_that_the_runs_most_lowers_is_not_lowered_for_a_data_set(processor: Any) -> None:
    config = DataConfig(512, media_limits=MediaLimits(image_max_pixels=256, video_max_frames=1))
    limits = MediaLimits(image_max_pixels=40000, video_max_frames=64)
    alone, loaded = copy.deepcopy(processor), copy.deepcopy(processor)
    limits.apply(alone)
    preparation = Preparation(loaded, config, [Source(Path("a"), limits=limits)])
    given = preparation._planners[0]._processor
    assert given.image_processor.size == alone.image_processor.size
    assert given.video_processor.min_frames == alone.video_processor.min_frames > 1
    assert loaded.image_processor.size["longest_edge"] == 256  # the run's


@pytest.mark.parametrize("kind", ["image", "video"])
def test_a_most_below_the_runs_fewest_is_refused(kind: str, processor: Any) -> None:
    """It would lower what the command line says, and say nothing."""
    below = replace(MediaLimits(), **{f"{kind}_max_pixels": 1024})
    with pytest.raises(BadInput, match=f"The data set a: The {kind} budget is empty: at least"):
        processor_of(processor, below)
