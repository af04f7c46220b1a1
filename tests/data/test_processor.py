"""Settings of a processor are used as Hugging Face uses them, refused, or named as not used."""

from __future__ import annotations

import json
import math
from dataclasses import astuple
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers.video_utils import VideoMetadata

from mcore_qwen3vl.config import Architecture
from mcore_qwen3vl.data import DataConfig, Loader, MediaLimits, Source, load_processor
from mcore_qwen3vl.data.inspection import check_data
from mcore_qwen3vl.data.processor import configs_with_budgets, unused_of_processor
from mcore_qwen3vl.errors import BadInput
from mcore_qwen3vl.tiny import tiny_config, write_processor
from tests.command import exit_code
from tests.data.conftest import WriteJsonl, question

SECTIONS = ("image_processor", "video_processor")
FILES = ("preprocessor_config.json", "video_preprocessor_config.json")
NAN, INFINITE = math.nan, math.inf


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Make a folder of a processor and a config, for a test to change."""
    write_processor(tmp_path / "model", tiny_config()["vision_config"])
    (tmp_path / "model" / "config.json").write_text(json.dumps(tiny_config()))
    return tmp_path / "model"


def change(folder: Path, section: str, **settings: Any) -> None:
    file = folder / "processor_config.json"
    content = json.loads(file.read_text())
    content[section] |= settings
    file.write_text(json.dumps(content))


def divide(folder: Path) -> None:
    """Give each section a file of its own, as published checkpoints do."""
    file = folder / "processor_config.json"
    content = json.loads(file.read_text())
    for section, name in zip(SECTIONS, FILES, strict=True):
        (folder / name).write_text(json.dumps(content.pop(section)))
    file.unlink()


REFUSED: list[tuple[str, dict[str, Any], str]] = [
    *(
        (section, {"image_std": std}, rf"{section}: image_std is .* three numbers above 0")
        for section in SECTIONS
        for std in ([0, 0, 0], [0.5, NAN, 0.5], [0.5, -0.5, 0.5], [0.5, 0.5], 0.5, None)
    ),
    *(
        ("image_processor", {"image_mean": mean}, "image_mean is .* list of three numbers")
        for mean in ([NAN, 0, 0], [INFINITE, 0, 0], [0.5] * 4, "0.5")
    ),
    *(
        ("video_processor", {"rescale_factor": factor}, "rescale_factor is .* a number above 0")
        for factor in (0, -1, NAN, INFINITE, "1/255")
    ),
    ("image_processor", {"do_resize": False}, "do_resize is false"),
    ("image_processor", {"do_rescale": "no"}, "do_rescale is 'no'; it must be true or false"),
    ("image_processor", {"resample": 9}, "resample is 9"),
    ("image_processor", {"patch_size": 0}, "patch_size is 0; it must be a number from 1"),
    ("video_processor", {"merge_size": 2.5}, "merge_size is 2.5"),
    ("image_processor", {"size": {"height": 32, "width": 32}}, "shortest_edge None"),
    (
        "image_processor",
        {"size": {"shortest_edge": 512, "longest_edge": 256}},
        "shortest_edge 512 and longest_edge 256",
    ),
    ("image_processor", {"max_pixels": 1}, "longest_edge 1;"),
    (
        "video_processor",
        {"num_frames": 6},
        "num_frames is 6 and fps is 2, and transf",
    ),
    ("video_processor", {"num_frames": 0, "fps": None}, "num_frames is 0"),
    ("video_processor", {"fps": 0}, "fps is 0; it must be a number above 0, or null"),
    ("video_processor", {"fps": NAN}, "fps is nan"),
    ("video_processor", {"max_frames": 0}, "max_frames is 0"),
    (
        "video_processor",
        {"video_processor_type": "Qwen2VLVideoProcessor"},
        "a Qwen2VLVideoProcessor is not supported; Qwen3VLVideoProcessor is",
    ),
]


@pytest.mark.parametrize(("section", "settings", "message"), REFUSED, ids=str)
def test_settings_that_cannot_be_used_are_refused(
    section: str, settings: dict[str, Any], message: str, folder: Path
) -> None:
    change(folder, section, **settings)
    with pytest.raises(BadInput, match=message):
        load_processor(folder)


def test_fields_that_nothing_uses_are_named(folder: Path) -> None:
    assert unused_of_processor(folder) == []
    change(folder, "image_processor", image_max_tokens=7, do_convert_rgb=False, crop_size=None)
    change(folder, "video_processor", max_pixels=9, do_pad=True, do_center_crop=False, min_fps=1)
    size = {"shortest_edge": 256, "longest_edge": 8192, "max_pixels": 4}
    change(folder, "video_processor", size=size)
    (folder / FILES[1]).write_text("{}")
    content = json.loads((folder / "processor_config.json").read_text())
    (folder / "processor_config.json").write_text(json.dumps(content | {"audio_processor": {}}))
    image, video = (f"processor_config.json, {section}" for section in SECTIONS)
    assert sorted(astuple(one)[:2] for one in unused_of_processor(folder)) == sorted(
        [
            ("processor_config.json", "audio_processor"),
            (FILES[1], "all of it"),
            (image, "do_convert_rgb"),
            (image, "image_max_tokens"),
            (video, "max_pixels"),
            (video, "do_pad"),
            (video, "min_fps"),
            (f"{video}, size", "max_pixels"),
        ]
    )


def test_a_folder_that_is_named_like_a_config_is_none(tmp_path: Path) -> None:
    (tmp_path / "processor_config.json").mkdir()  # a pipe too, but that would block a failing test
    assert unused_of_processor(tmp_path) == []


def test_nothing_is_said_of_published_configs(folder: Path) -> None:
    """They are those of Qwen3-VL-8B-Instruct, and what transformers 4.57 saves for it."""
    common = {
        "size": {"longest_edge": 16777216, "shortest_edge": 65536},
        "patch_size": 16,
        "temporal_patch_size": 2,
        "merge_size": 2,
        "image_mean": [0.5, 0.5, 0.5],
        "image_std": [0.5, 0.5, 0.5],
        "processor_class": "Qwen3VLProcessor",
    }
    saved = dict.fromkeys(("crop_size", "device", "do_center_crop", "do_pad", "pad_size"))
    saved |= {"data_format": "channels_first", "default_to_square": True, "resample": 3}
    (folder / "processor_config.json").unlink()
    kinds: tuple[dict[str, str], ...] = ({"image_processor_type": "Qwen2VLImageProcessorFast"}, {})
    for extra in ({}, saved):
        for name, kind in zip(FILES, kinds, strict=True):
            (folder / name).write_text(json.dumps({**common, **kind, **extra}))
        assert unused_of_processor(folder) == []


@pytest.mark.parametrize("section", SECTIONS)
@pytest.mark.parametrize("name", ["patch_size", "merge_size", "temporal_patch_size"])
def test_another_models_processor_is_refused_before_data_are_read(
    section: str, name: str, folder: Path, architecture: Architecture, tmp_path: Path
) -> None:
    change(folder, section, **{name: 3})
    processor, config = load_processor(folder), DataConfig(seq_length=64)
    message = rf"The {section.replace('_', ' ')} has {name} 3, and the model takes"
    with pytest.raises(BadInput, match=message):
        check_data(tmp_path / "none.jsonl", processor, config, architecture=architecture)
    with pytest.raises(BadInput, match=message):
        Loader([Source(tmp_path / "none.jsonl")], architecture, processor, config, num_workers=0)


def test_data_check_names_what_is_not_used(
    folder: Path, write_jsonl: WriteJsonl, capsys: pytest.CaptureFixture[str]
) -> None:
    change(folder, "image_processor", image_max_tokens=7)
    words = ["data", "check", str(write_jsonl([question(0)])), "--hf-model", str(folder)]
    assert exit_code(*words, "--json") == 0
    where = "processor_config.json, image_processor"
    named = {"where": where, "name": "image_max_tokens", "why": "", "samples": []}
    assert json.loads(capsys.readouterr().out)["unused"] == [named]
    assert exit_code(*words) == 0
    assert f"not used of {where}" in capsys.readouterr().out


BUDGETS = [
    MediaLimits(image_max_pixels=1024, video_max_frames=4),
    MediaLimits(image_min_pixels=2048, image_max_tokens=33, video_max_pixels=2048),
    MediaLimits(video_fps=1.5, video_min_pixels=300, video_max_tokens=9),
]
CHOICES: list[dict[str, Any]] = [
    {},
    {"num_frames": 6, "fps": None},
    {"do_sample_frames": False},
    {"min_frames": 9},
]


@pytest.mark.parametrize("settings", CHOICES, ids=str)
@pytest.mark.parametrize("limits", BUDGETS, ids=str)
@pytest.mark.parametrize("divided", [False, True])
def test_a_processor_written_with_budgets_is_the_one_of_training(
    divided: bool, limits: MediaLimits, settings: dict[str, Any], folder: Path
) -> None:
    change(folder, "video_processor", **settings)
    change(folder, "image_processor", min_pixels=300, max_pixels=3000)
    if divided:
        divide(folder)
    trained = load_processor(folder)
    limits.apply(trained)
    for name, content in configs_with_budgets(folder, limits).items():
        (folder / name).write_bytes(content)
    served = load_processor(folder)
    rng = np.random.default_rng(0)
    image = rng.integers(0, 256, (64, 96, 3), np.uint8)
    frames = torch.from_numpy(rng.integers(0, 256, (40, 3, 64, 96), np.uint8))
    grids = []
    for processor in (trained, served):
        metadata = VideoMetadata(total_num_frames=40, fps=10.0)
        grids.append(
            (
                processor.image_processor(images=[image])["image_grid_thw"].tolist(),
                processor.video_processor(videos=[frames], video_metadata=[metadata])[
                    "video_grid_thw"
                ].tolist(),
            )
        )
    assert grids[0] == grids[1]
    if limits.video_max_frames is not None:
        assert grids[0][1][0][0] == limits.video_max_frames // 2
    assert configs_with_budgets(folder, MediaLimits()) == {}
