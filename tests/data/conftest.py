"""A tiny processor and synthetic media, made once a session, and loaders over real files."""

from __future__ import annotations

import io
import json
import tarfile
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import av
import numpy as np
import pytest
from PIL import Image

from mcore_qwen3vl.config import Architecture
from mcore_qwen3vl.data import DataConfig, Loader, Source, load_processor
from mcore_qwen3vl.tiny import tiny_config, write_processor
from tests.data.loaders import IN_ORDER, MakeLoader


@pytest.fixture(scope="session")
def architecture() -> Architecture:
    return Architecture.from_hf(tiny_config())


@pytest.fixture(scope="session")
def processor_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("processor")
    write_processor(path, tiny_config()["vision_config"])
    (path / "config.json").write_text(json.dumps(tiny_config()))
    return path


@pytest.fixture
def processor(processor_dir: Path) -> Any:
    """Load a fresh processor for each test, because loaders change its budgets."""
    return load_processor(processor_dir)


def write_png(path: Path, height: int, width: int, seed: int = 0, **options: Any) -> Path:
    pixels = np.random.default_rng(seed).integers(0, 256, (height, width, 3), np.uint8)
    Image.fromarray(pixels).save(path, **options)
    return path


def write_video(path: Path, frames: int, height: int, width: int, fps: int = 10) -> Path:
    codec = "libvpx" if path.suffix == ".webm" else "mpeg4"
    with av.open(str(path), "w") as container:
        stream = container.add_stream(codec, rate=fps)
        stream.height, stream.width, stream.pix_fmt = height, width, "yuv420p"
        for index in range(frames):
            picture = np.full((height, width, 3), 12 * index % 256, np.uint8)
            picture[:, : width // 2] = 255 - 9 * index % 256
            for packet in stream.encode(av.VideoFrame.from_ndarray(picture, format="rgb24")):
                container.mux(packet)
        for packet in stream.encode():
            container.mux(packet)
    return path


def write_tar(path: Path, members: Iterable[tuple[str, bytes]]) -> Path:
    """Write members, given as (name, content), in this order; make the folder of the tar."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with tarfile.open(path, "w") as tar:
        for name, content in members:
            info = tarfile.TarInfo(name)
            info.size = len(content)
            tar.addfile(info, io.BytesIO(content))
    return path


@pytest.fixture(scope="session")
def media(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Make a folder of images of distinct shapes and two videos."""
    folder = tmp_path_factory.mktemp("media")
    for index, (height, width) in enumerate([(24, 40), (50, 31), (64, 64), (17, 90)]):
        write_png(folder / f"{index}.png", height, width, seed=index)
    write_video(folder / "clip.mp4", frames=23, height=32, width=48)
    write_video(folder / "short.mp4", frames=7, height=48, width=32)
    return folder


WriteJsonl = Callable[..., Path]


@pytest.fixture
def write_jsonl(media: Path, tmp_path: Path) -> WriteJsonl:
    """Return a function that writes records to a JSONL beside a link to the media."""
    (tmp_path / "media").symlink_to(media)

    def write(records: list[Any], name: str = "data.jsonl") -> Path:
        path = tmp_path / name
        lines = [r if isinstance(r, str) else json.dumps(r) for r in records]
        path.write_text("\n".join(lines) + "\n", encoding="utf-8")
        return path

    return write


def question(index: int, *, image: bool = True, words: int = 3) -> dict[str, Any]:
    """Make a record whose text and length depend on its index."""
    text = f"sample {index} " + "word " * words
    if not image:
        return chat(("user", text), ("assistant", f"answer {index}"))
    record = chat(("user", "<image>" + text), ("assistant", f"answer {index}"))
    return {**record, "images": [f"media/{index % 4}.png"]}


def chat(*turns: tuple[str, Any]) -> dict[str, Any]:
    return {"messages": [{"role": role, "content": content} for role, content in turns]}


@pytest.fixture
def make(architecture: Architecture, processor_dir: Path) -> MakeLoader:
    def make_loader(
        *sources: Source | Path, config: DataConfig = IN_ORDER, **options: Any
    ) -> Loader:
        named = [one if isinstance(one, Source) else Source(one) for one in sources]
        processor = load_processor(processor_dir)
        return Loader(named, architecture, processor, config, **{"num_workers": 0, **options})

    return make_loader


@pytest.fixture
def records(write_jsonl: WriteJsonl) -> Path:
    mixed = [question(i, image=i % 3 > 0, words=i) for i in range(40)]
    mixed.append({**chat(("user", "<video>?"), ("assistant", "a")), "videos": ["media/clip.mp4"]})
    return write_jsonl(mixed)


@pytest.fixture
def written(tmp_path: Path, media: Path) -> Callable[[str], Path]:
    """Return a function that writes the records of `WRITERS` as a kind of file."""
    from tests.data.writers import WRITERS  # datasets, which is slow to import

    (tmp_path / "media").symlink_to(media)
    return lambda name: WRITERS[name](tmp_path, media)
