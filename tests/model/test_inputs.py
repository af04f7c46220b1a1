"""Images and videos are prepared on the host, and each rank has its share of the tokens."""

from __future__ import annotations

import pickle
from dataclasses import replace
from typing import Any

import pytest
import torch

from mcore_qwen3vl.errors import BadInput
from mcore_qwen3vl.model.inputs import (
    PixelScale,
    length_multiple,
    local_positions,
    require_right_padding,
    visual_inputs,
)
from tests.model.visual_batches import ARCHITECTURE, batch

DIM = ARCHITECTURE.vision.patch_dim
IMAGE, VIDEO = ARCHITECTURE.image_token_id, ARCHITECTURE.video_token_id


def prompt(images: int = 0, videos: int = 0) -> torch.Tensor:
    return torch.tensor([[1, 2] + [IMAGE] * images + [3] + [VIDEO] * videos + [4]])


def pixels(patches: int, grid: list[Any], dim: int = DIM) -> dict[str, torch.Tensor]:
    """Return the arguments of images, whose grid need not fit."""
    return {"pixel_values": torch.zeros(patches, dim), "image_grid_thw": torch.tensor(grid)}


def test_features_are_matched_with_their_placeholders():
    mixed = batch(
        [("image", 1, 4, 2), ("video", 2, 2, 4), ("image", 1, 2, 6)], [("video", 1, 2, 2)]
    )
    visual = mixed.visual
    tokens = mixed.input_ids.flatten()
    assert visual is not None
    assert tokens[visual.token_index].tolist() == [IMAGE] * (2 + 3) + [VIDEO] * (4 + 1)
    assert visual.token_index[:5].equal(torch.nonzero(tokens == IMAGE).squeeze(1))
    assert visual.grid_thw.tolist() == [[1, 4, 2], [1, 2, 6], [2, 2, 4], [1, 2, 2]]
    assert visual.frame_patches.tolist() == [8, 12, 8, 8, 4]
    assert len(visual.pixel_values) == 8 + 12 + 16 + 4


def test_text_alone_has_no_visual_inputs():
    assert visual_inputs(ARCHITECTURE, prompt()) is None


def test_picklable_and_moved_without_its_host_part():
    visual = batch([("image", 1, 4, 2)]).visual
    copy = pickle.loads(pickle.dumps(visual))
    assert copy.pixel_values.equal(visual.pixel_values)
    moved = visual.to("meta")
    assert moved.pixel_values.is_meta
    assert moved.interpolation_weights.is_meta
    assert moved.grid_thw.device.type == moved.token_index.device.type == "cpu"
    pickle.dumps(visual_inputs)


@pytest.mark.parametrize(
    ("ids", "arguments", "says"),
    [
        (
            *(prompt(), pixels(24, [[1, 4, 6]])),
            r"1 image\(s\) with 6 features came with a prompt that holds no image placeholder",
        ),
        (
            *(prompt(images=5), pixels(24, [[1, 4, 6]])),
            r"5 image placeholders, but its 1 image\(s\) give 6 features",
        ),
        (prompt(images=6), {}, "6 image placeholders, but no image came with it"),
        (prompt(videos=8), pixels(32, [[1, 4, 8]]), "holds no image placeholder"),
        (
            *(prompt(images=14), pixels(56, [[1, 4, 6], [2, 4, 4]])),
            "gives image 1 2 frames; pass it as a video",
        ),
        (
            *(prompt(images=6), pixels(23, [[1, 4, 6]])),
            r"23 image patches were given, but image_grid_thw \[\[1, 4, 6\]\] describes 24",
        ),
        (
            *(prompt(images=6), pixels(24, [[1, 4, 6]], DIM + 1)),
            rf"shape \(24, {DIM + 1}\); \(patches, {DIM}\) is needed",
        ),
        (prompt(images=6), pixels(24, [[1, 3, 8]]), "multiples of spatial_merge_size 2"),
        (*(prompt(images=6), pixels(24, [4, 6])), r"shape \(2,\); \(number, 3\) is needed"),
        (
            prompt(videos=6),
            {"pixel_values_videos": torch.zeros(24, DIM)},
            "video pixels came without video grid_thw",
        ),
    ],
)
def test_what_does_not_fit_is_refused(ids, arguments, says):
    with pytest.raises(BadInput, match=says):
        visual_inputs(ARCHITECTURE, ids, **arguments)


def test_bytes_need_their_scale_and_normalised_pixels_have_none():
    grid = torch.tensor([[1, 4, 6]])
    pixels = torch.arange(24 * DIM).remainder(256).reshape(24, DIM).to(torch.uint8)
    scale = PixelScale(torch.full([DIM], 127.5), torch.full([DIM], 63.75))
    with pytest.raises(BadInput, match=r"uint8 without a pixel_scale: bytes need one"):
        visual_inputs(ARCHITECTURE, prompt(images=6), pixels, grid)
    visual = visual_inputs(ARCHITECTURE, prompt(images=6), pixels.float(), grid)
    with pytest.raises(BadInput, match=r"float32 with a pixel_scale"):
        replace(visual, pixel_scale=scale)
    scaled = replace(visual, pixel_values=pixels, pixel_scale=scale)
    assert torch.equal(scale.apply(scaled.pixel_values), (pixels.float() - 127.5) / 63.75)


CP_2 = [{"cp_size": 2, "cp_rank": rank} for rank in range(2)]
TP_3 = [{"tp_size": 3, "tp_rank": rank, "sequence_parallel": True} for rank in range(3)]
PACK = torch.tensor([0, 4, 4, 12], dtype=torch.int32)


@pytest.mark.parametrize(
    ("length", "ranks", "expected"),
    [
        (5, [{"cp_size": 1, "cp_rank": 0}], [[0, 1, 2, 3, 4]]),
        (12, CP_2, [[0, 1, 2, 9, 10, 11], [3, 4, 5, 6, 7, 8]]),
        (
            *(12, [one | {"cu_seqlens": PACK} for one in CP_2]),
            [[0, 3, 4, 5, 10, 11], [1, 2, 6, 7, 8, 9]],
        ),
        (12, [CP_2[1] | one for one in TP_3], [[3, 4], [5, 6], [7, 8]]),
        (7, [{"cp_size": 1, "cp_rank": 0, "tp_size": 2, "tp_rank": 1}], [[*range(7)]]),
    ],
    ids=[
        "without CP and SP a rank holds everything",
        "CP pairs a chunk from the start with one from the end",
        "CP cuts each sample of a pack",
        "SP cuts what CP left",
        "TP without SP holds all",
    ],
)
def test_the_positions_of_a_rank(
    length: int, ranks: list[dict[str, Any]], expected: list[list[int]]
) -> None:
    assert [local_positions(length, **rank).tolist() for rank in ranks] == expected


@pytest.mark.parametrize(("cp", "tp", "expected"), [(1, 1, 1), (1, 4, 4), (2, 1, 4), (2, 3, 12)])
def test_length_multiple_is_the_smallest_that_divides(cp: int, tp: int, expected: int) -> None:
    multiple = length_multiple(cp, tp)
    assert multiple == expected
    local_positions(multiple, cp_size=cp, cp_rank=0, tp_size=tp, sequence_parallel=True)


def test_only_padding_on_the_right_passes_without_a_mask() -> None:
    padding = torch.tensor([[False, False, True], [False, False, False]])
    require_right_padding(padding)
    with pytest.raises(BadInput, match="padding on the right only"):
        require_right_padding(padding.flip(1))
