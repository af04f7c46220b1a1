"""What records say of their images and videos has the effect that HF's processor gives it."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from transformers.video_utils import VideoMetadata, read_video_pyav

from mcore_qwen3vl.data.encoding.pixels import PixelLoader
from mcore_qwen3vl.data.records import tasks
from mcore_qwen3vl.data.records.media import MediaFolder, MediaOptions
from mcore_qwen3vl.data.records.parse import parse_record
from mcore_qwen3vl.data.records.reading import PLAIN, BadSample
from tests.data.conftest import chat, write_png
from tests.data.encoding.test_planning import assert_pixels_are_hf_s, planned

FRAMES = [f"f{index}.png" for index in range(5)]


@pytest.fixture(scope="module")
def folder(media: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Make a folder of five frames, an image of another size, and a video of 23 frames at 10/s."""
    path = tmp_path_factory.mktemp("options")
    for index, name in enumerate(FRAMES):
        write_png(path / name, 40, 48, seed=index)
    write_png(path / "wide.png", 64, 96, seed=9)
    (path / "clip.mp4").symlink_to(media / "clip.mp4")
    return path


def about(*parts: dict[str, Any], **record: Any) -> dict[str, Any]:
    content = [*parts, {"type": "text", "text": "what?"}]
    return {**chat(("user", content), ("assistant", "this")), **record}


def video(reference: Any, **said: Any) -> dict[str, Any]:
    return {"type": "video", "video": reference, **said}


def listed(folder: Path) -> np.ndarray:
    return np.stack([np.asarray(Image.open(folder / name)) for name in FRAMES])


def clip(folder: Path) -> np.ndarray:
    every = lambda metadata, **_: np.arange(metadata.total_num_frames)  # noqa: E731
    return read_video_pyav(str(folder / "clip.mp4"), every)[0]


def equals(
    processor: Any,
    record: dict[str, Any],
    folder: Path,
    frames: np.ndarray,
    indices: list[int],
    fps: float,
    **options: Any,
) -> None:
    """Check tokens and pixels against HF's processor on the same frames.

    Args:
        processor: HF's processor.
        record: the record to read.
        folder: folder of its media.
        frames: frames that HF's processor gets, (F, height, width, 3).
        indices: place of each of them in the whole video.
        fps: frames a second of the whole video.
        options: further arguments of HF's video processor.
    """
    plan, parsed = planned(processor, record, folder)
    metadata = VideoMetadata(total_num_frames=100, fps=fps, frames_indices=indices)
    expected = processor(
        text=[processor.apply_chat_template(parsed.messages, tokenize=False)],
        videos=[torch.from_numpy(np.ascontiguousarray(frames)).permute(0, 3, 1, 2)],
        video_metadata=[metadata],
        do_sample_frames=False,
        return_tensors="pt",
        **options,
    )
    assert plan.input_ids.tolist() == expected["input_ids"][0].tolist()
    assert_pixels_are_hf_s(PixelLoader(processor), plan, expected, torch.uint8)


LISTED: dict[str, tuple[dict[str, Any], list[int], float]] = {
    "a list": (about(video(FRAMES)), [0, 1, 2, 3, 4], 2.0),
    "a list in videos": (
        {**chat(("user", "<video>what?"), ("assistant", "this")), "videos": [FRAMES]},
        [0, 1, 2, 3, 4],
        2.0,
    ),
    "fps": (about(video(FRAMES, fps=4)), [0, 1, 2, 3, 4], 4.0),
    "sample_fps of the record": (about(video(FRAMES), sample_fps=0.5), [0, 1, 2, 3, 4], 0.5),
    "the part's before the record's": (about(video(FRAMES, fps=8), fps=1), [0, 1, 2, 3, 4], 8.0),
    "frames": (about(video({"frames": FRAMES, "fps": 3})), [0, 1, 2, 3, 4], 3.0),
    "raw_fps": (about(video(FRAMES, sample_fps=1, raw_fps=5)), [0, 1, 2, 3, 4], 5.0),
    "frames_indices": (
        about(video(FRAMES, sample_fps=2, raw_fps=30, frames_indices=[0, 30, 200, 300, 301])),
        [0, 30, 200, 300, 301],
        30.0,
    ),
    "timestamps": (
        about(video(FRAMES, timestamps=[0, 0.5, 3, 7.2, 8])),
        [0, 5, 30, 72, 80],
        10.0,
    ),
}


@pytest.mark.parametrize("name", LISTED)
def test_listed_frames(name: str, processor: Any, folder: Path) -> None:
    record, indices, fps = LISTED[name]
    equals(processor, record, folder, listed(folder), indices, fps)


@pytest.mark.parametrize(
    ("said", "first", "count", "rate"),
    [
        ({"fps": 5}, 0, 23, 5),
        ({"video_start": 0.5, "video_end": 1.5}, 5, 11, None),
        ({"start": 1.1}, 11, 12, None),
        ({"end": 1.95, "fps": 4}, 0, 20, 4),
    ],
)
def test_clips_and_rates_of_files(
    said: dict[str, Any], first: int, count: int, rate: float | None, processor: Any, folder: Path
) -> None:
    part = VideoMetadata(total_num_frames=count, fps=10.0)
    chosen = first + processor.video_processor.sample_frames(part, fps=rate)
    record = about(video("clip.mp4", **said))
    equals(processor, record, folder, clip(folder)[chosen], chosen.tolist(), 10.0)


def smart_nframes(said: dict[str, int], total: int, rate: float) -> int:
    """Return the number of frames as ``qwen_vl_utils`` does, from ``nframes`` or frame bounds."""
    if "nframes" in said:
        return round(said["nframes"] / 2) * 2
    least = math.ceil(said.get("min_frames", 2) / 2) * 2
    most = math.floor(said.get("max_frames", 768) / 2) * 2
    return int(min(max(total / 10 * rate, least), most, total))


@pytest.mark.parametrize(
    "said",
    [
        {"nframes": 4},
        {"nframes": 7},
        {"nframes": 6, "video_start": 0.5},
        {"max_frames": 3},
        {"min_frames": 9},
        {"fps": 8, "max_frames": 8},
        {"fps": 1, "min_frames": 6, "video_end": 1.9},
    ],
)
def test_numbers_of_frames(said: dict[str, Any], processor: Any, folder: Path) -> None:
    first = 5 if "video_start" in said else 0
    count = (20 if "video_end" in said else 23) - first
    chosen = torch.linspace(
        first, first + count - 1, smart_nframes(said, count, said.get("fps", 2))
    )
    indices = chosen.round().long().tolist()
    for record in (about(video("clip.mp4", **said)), about(video("clip.mp4"), **said)):
        if record.keys() & {"video_start", "video_end"}:
            continue  # a clip is said of each video
        equals(processor, record, folder, clip(folder)[indices], indices, 10.0)


@pytest.mark.parametrize(
    ("said", "low", "high"),  # pixels of all four frames
    [
        ({"total_pixels": 1024}, 256, 2048),
        ({"total_pixels": 100}, 200, 200),
        ({"total_pixels": 1024, "max_pixels": 400}, 256, 1600),
        ({"total_pixels": 1024, "min_pixels": 640}, 2560, 672 * 4),
    ],
)
def test_total_pixels_count_the_frames_of_a_patch_once(
    said: dict[str, Any], low: int, high: int, processor: Any, folder: Path
) -> None:
    indices = [0, 7, 15, 22]
    record = about(video("clip.mp4", nframes=4, **said))
    size = {"shortest_edge": low, "longest_edge": high}
    equals(processor, record, folder, clip(folder)[indices], indices, 10.0, size=size)


SAMPLING: list[dict[str, Any]] = [
    {"num_frames": 6, "fps": None},
    {"num_frames": 40, "fps": None},  # more than the video has
    {"fps": None},
    {"fps": None, "max_frames": 9},
    {"fps": None, "min_frames": 30},
    {"fps": 0.3},
    {"fps": 3.7, "min_frames": 5, "max_frames": 7},
    {"fps": 30},
    {"do_sample_frames": False},
    {"do_sample_frames": False, "num_frames": 6},
]


@pytest.mark.parametrize("settings", SAMPLING, ids=str)
def test_frames_are_those_that_the_processor_would_sample(
    settings: dict[str, Any], processor: Any, folder: Path
) -> None:
    """HF's processor samples the decoded video itself, with its own settings."""
    for name, value in settings.items():
        setattr(processor.video_processor, name, value)
    plan, parsed = planned(processor, about(video("clip.mp4")), folder)
    expected = processor(
        text=[processor.apply_chat_template(parsed.messages, tokenize=False)],
        videos=[torch.from_numpy(clip(folder)).permute(0, 3, 1, 2)],
        video_metadata=[
            VideoMetadata(total_num_frames=23, fps=10.0, frames_indices=list(range(23)))
        ],
        return_tensors="pt",
    )
    assert plan.input_ids.tolist() == expected["input_ids"][0].tolist()
    assert_pixels_are_hf_s(PixelLoader(processor), plan, expected, torch.uint8)


def test_pixels_of_each_frame(processor: Any, folder: Path) -> None:
    size = {"shortest_edge": 8 * 8 * 5, "longest_edge": 24 * 24 * 5}
    record = about(video(FRAMES, min_pixels=64, max_pixels=576))
    equals(processor, record, folder, listed(folder), [0, 1, 2, 3, 4], 2.0, size=size)


MESSAGES = [{"role": "user", "content": "<image>a"}, {"role": "assistant", "content": "b"}]
OF_A_RECORD: dict[str, Callable[[Any, MediaFolder], Any]] = {
    "messages": lambda of, at: parse_record({"messages": MESSAGES, "images": ["i"], **of}, at),
    "caption": lambda of, at: parse_record({"text": "a", "images": ["i"], **of}, at),
    "tags": lambda of, at: parse_record({"text": "a<image>", "images": ["i"], **of}, at),
    "texts": lambda of, at: parse_record({"texts": [None, "a"], "images": ["i", None], **of}, at),
    "chosen": lambda of, at: tasks.parse_pair(
        {"messages": MESSAGES[:1], "images": ["i"], "chosen": "b", "rejected": "c", **of}, at
    )["chosen"],
    "label": lambda of, at: tasks.parse_labelled(
        {"messages": MESSAGES, "images": ["i"], "label": True, **of}, at
    ),
    "query": lambda of, at: tasks.parse_retrieval(
        {"query": {"image": "i", "text": "a"}, "positive": "b", **of}, at
    )["query"],
    "image of a query": lambda of, at: tasks.parse_retrieval(
        {"query": "<image>a", "image": "i", "positive": "b", **of}, at
    )["query"],
    "negative": lambda of, at: tasks.parse_retrieval(
        {"query": "q", "positive": "p", "negatives": [{"image": "i", "text": "a"}], **of}, at
    )["negative 0"],
    "class": lambda of, at: tasks.parse_classification(
        {"image": "i", "text": "a", "label": 1, **of}, at, PLAIN, None
    ),
}


@pytest.mark.parametrize("form", OF_A_RECORD)
def test_pixels_of_a_record_are_those_of_its_media_in_every_form(form: str) -> None:
    folder = MediaFolder(Path(), {"i": b"an image"})
    of_record = {"max_pixels": 256, "min_pixels": 64}
    (image,) = OF_A_RECORD[form](of_record, folder).media
    assert (image.options.min_pixels, image.options.max_pixels) == (64, 256)
    (image,) = OF_A_RECORD[form]({}, folder).media
    assert image.options == MediaOptions()


def test_pixels_of_images(processor: Any, folder: Path) -> None:
    """Each image has its own limits; those of the record hold for parts that have none."""
    limits = [{"min_pixels": 64, "max_pixels": 1024}, {}, {"min_pixels": 2304, "max_pixels": 2400}]
    parts = [{"type": "image", "image": "wide.png", **limit} for limit in limits]
    plan, parsed = planned(processor, about(*parts, max_pixels=4096), folder)
    image = Image.open(folder / "wide.png")
    usual = processor.image_processor.size["shortest_edge"]
    sizes = [(64, 1024), (usual, 4096), (2304, 2400)]
    for item, (low, high) in zip(plan.media, sizes, strict=True):
        size = {"shortest_edge": low, "longest_edge": high}
        expected = processor.image_processor(images=[image], size=size, return_tensors="pt")
        pixels = PixelLoader(processor)
        found = pixels.load([item])
        assert torch.equal(found.image_grid_thw, expected["image_grid_thw"])
        assert pixels.scale is not None
        assert torch.equal(pixels.scale.apply(found.pixel_values), expected["pixel_values"])
    assert len({item.patches for item in plan.media}) == len(parsed.media)
    together = PixelLoader(processor).load(plan.media)  # three sizes, in order
    assert together.image_grid_thw.prod(1).tolist() == [item.patches for item in plan.media]


FLAWS: dict[str, tuple[dict[str, Any], str]] = {
    "fps": (video("clip.mp4", fps=0), r"video's fps is 0; a number above 0"),
    "text": (video("clip.mp4", fps="2"), r"video's fps is '2'"),
    "clip": (video("clip.mp4", start=5), r"from 5 to 2\.3 s holds none of its 23 frames"),
    "backwards": (video("clip.mp4", start=2, end=1), r"from 2 to 1 s holds none"),
    "clip of a list": (video(FRAMES, video_start=1), r"start and end are for video files"),
    "timestamps of a file": (video("clip.mp4", timestamps=[1]), r"for a list of frames"),
    "too few timestamps": (video(FRAMES, timestamps=[1, 2]), r"has 2 timestamps"),
    "unordered": (video(FRAMES, timestamps=[1, 2, 0, 4, 5]), r"do not ascend"),
    "indices of no rate": (video(FRAMES, frames_indices=[1]), r"frames_indices need raw_fps"),
    "indices of a file": (
        video("clip.mp4", frames_indices=[1], raw_fps=3),
        r"frames_indices is given for a video",
    ),
    "too few indices": (video(FRAMES, frames_indices=[1], raw_fps=3), r"has 1 frames_indices"),
    "no timestamps": (video(FRAMES, timestamps=3), r"a list with the second of each frame"),
    "a frame that is missing": (video(["f0.png", "none.png"]), r"none\.png: No such file"),
    "sizes": (video([*FRAMES, "wide.png"]), r"wide\.png has 64 x 96 pixels and the first 40 x 48"),
    "limits": (
        video(FRAMES, min_pixels=99, max_pixels=98),
        r"min_pixels 99 is above max_pixels 98",
    ),
    "nframes": (video("clip.mp4", nframes=24), r"nframes is 24; from 2 to 23 are possible"),
    "nframes and fps": (video("clip.mp4", nframes=2, fps=2), r"nframes is given with fps"),
    "nframes of a list": (video(FRAMES, nframes=2), r"nframes is for video files"),
    "raw_fps of a file": (video("clip.mp4", raw_fps=2), r"raw_fps is given for a video file"),
    "one frame": (video("clip.mp4", end=0), r"clip\.mp4: 1 frame of its 23 would be used, and the"),
    "a list of one": (video(FRAMES[:1]), r"1 frame of its 1 would be used"),
    "negative": (video("clip.mp4", end=-1), r"video's end is -1; a number of at least 0"),
}


@pytest.mark.parametrize("name", FLAWS)
def test_flaws_are_named(name: str, processor: Any, folder: Path) -> None:
    part, message = FLAWS[name]
    with pytest.raises(BadSample, match=message):
        PixelLoader(processor).load(planned(processor, about(part), folder)[0].media)
