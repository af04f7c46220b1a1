"""A video's size and its sampled frames, read without decoding all the other frames."""

from __future__ import annotations

import copy
import math
from bisect import bisect_right
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
from transformers.video_utils import VideoMetadata

from mcore_qwen3vl.console import counted
from mcore_qwen3vl.data.records.media import Media, MediaOptions, image_size, load_image
from mcore_qwen3vl.data.records.reading import BadSample

_SPARSE = 3
"""Seeking is faster than decoding in order if at most one frame in this many is sampled."""

LISTED_FPS = 2.0
"""Frames a second of a list of frames that does not say it. Source: ``sample_fps`` of
``qwen_vl_utils``."""


@contextmanager
def _open_video(media: Media) -> Iterator[Any]:
    """Open a container; raise BadSample if it, or the code in the block, cannot decode it."""
    import av  # here, because most data have no videos

    try:
        # FFmpeg would open the files and network addresses that a playlist names.
        with (
            media.open() as stream,
            av.open(stream, options={"protocol_whitelist": ""}) as container,
        ):
            if _main_stream(container) is None:
                raise BadSample(f"video {media.name} has no video stream.")
            yield container
    except (av.error.FFmpegError, OSError) as error:
        raise BadSample(f"video {media.name} cannot be decoded: {error}.") from error


def _main_stream(container: Any) -> Any:
    """Return the video stream that players and torchcodec show; None if there is none.

    A file may have others: a cover picture, a second camera, a preview.
    """
    return container.streams.best("video")


def probe_video(media: Media) -> VideoMetadata:
    """Read frame count, frame rate and size from the container, or from a list of frames.

    The metadata of a list of frames have ``frames_indices`` too, since none is left out.
    """
    if isinstance(media.content, tuple):
        return _probe_listed(media.content, media.options)
    with _open_video(media) as container:
        stream = _main_stream(container)
        if not stream.average_rate:
            raise BadSample(f"video {media.name} states no frame rate.")
        count = _count_frames(container, stream)
        fps = float(stream.average_rate)
        height, width = stream.height, stream.width
        if _read_display(stream).sideways:
            height, width = width, height
        return VideoMetadata(
            total_num_frames=count,
            fps=fps,
            duration=count / fps,
            video_backend="pyav",
            height=height,
            width=width,
        )


def _count_frames(container: Any, stream: Any) -> int:
    """Return how many frames of a video are shown.

    Some containers (WebM, MPEG-TS) do not state the count, which is 0 then. The count of an MP4
    includes frames that its edit list leaves out: a phone makes such a list when it trims a video.
    Then packets are counted, as torchcodec does.
    """
    stated = stream.frames
    if stream.duration is not None:
        shown = round(stream.duration * stream.time_base * stream.average_rate)
        stated = stated if stated <= shown else 0
    if stated:
        return int(stated)
    return sum(packet.size > 0 and not packet.is_discard for packet in container.demux(stream))


def is_uneven(media: Media) -> bool:
    """Return whether a frame of a file is shown at another time than its mean rate gives.

    Like HF's processor, training takes the times from that rate, to tenths of a second. All packets
    are read for this, and none is decoded.
    """
    if isinstance(media.content, tuple):
        return False
    with _open_video(media) as container:
        stream = _main_stream(container)
        packets = (
            packet for packet in container.demux(stream) if packet.size and not packet.is_discard
        )
        times = [packet.pts for packet in packets]
        if None in times or len(times) < 2 or not stream.average_rate:
            return False
        seconds = (np.sort(times) - min(times)) * float(stream.time_base)
        off = np.abs(seconds - np.arange(len(times)) / float(stream.average_rate)).max()
        return bool(off > 0.1)


@dataclass(frozen=True)
class _Display:
    """How a player shows frames: rows and columns swapped, then each in one direction."""

    sideways: bool = False
    rows: int = 1  # -1: from the last to the first
    columns: int = 1

    def __call__(self, frame: np.ndarray) -> np.ndarray:
        upright = frame.swapaxes(0, 1) if self.sideways else frame
        return upright[:: self.rows, :: self.columns]


def _read_display(stream: Any) -> _Display:
    """Read the container's display matrix, by which phones say that a frame lies on its side.

    Other angles than multiples of 90 degrees are rounded to one, as by torchcodec.
    """
    matrix = stream.codec_context.coded_side_data.get("display_matrix")
    if matrix is None:
        return _Display()
    # FFmpeg's libavutil/display.h: x' = a x + c y and y' = b x + d y.
    a, b, _, c, d = np.frombuffer(matrix, np.int32, 5).tolist()
    sideways = abs(b) > abs(a)
    down, right = (b, c) if sideways else (d, a)
    return _Display(sideways, -1 if down < 0 else 1, -1 if right < 0 else 1)


def _probe_listed(frames: tuple[Media, ...], options: MediaOptions) -> VideoMetadata:
    height, width = image_size(frames[0])
    # HF divides the indices by the rate to get seconds, so at 1 frame a second they are seconds.
    times = options.timestamps or options.frames_indices
    fps = options.raw_fps or options.fps or LISTED_FPS
    if options.timestamps is not None:
        fps = 1.0
    return VideoMetadata(
        total_num_frames=len(frames),
        fps=fps,
        duration=len(frames) / fps,
        video_backend="images",
        height=height,
        width=width,
        frames_indices=np.arange(len(frames)) if times is None else np.array(times),
    )


def sample_frames(media: Media, metadata: VideoMetadata, processor: Any) -> np.ndarray:
    """Choose the frames to decode: all of a list, or as HF's processor does in a file's clip.

    Returns:
        (F,) indices among all frames of the file; `metadata` is what :func:`probe_video` gave of
        it.

    Raises:
        BadSample: the clip is empty, or there are fewer frames than a patch covers.
    """
    indices = metadata.frames_indices
    if indices is None:
        indices = _sample_clip(media, metadata, processor)
    if len(indices) < (fewest := processor.temporal_patch_size):
        raise BadSample(
            f"video {media.name}: {counted(len(indices), 'frame')} of its "
            f"{metadata.total_num_frames} would be used, and the model needs at least {fewest}. "
            "Give a single frame as an image."
        )
    return np.asarray(indices)


def _sample_clip(media: Media, metadata: VideoMetadata, processor: Any) -> np.ndarray:
    """Choose frames between the start and the end that the record gives, by their index."""
    options, most = media.options, metadata.total_num_frames - 1
    # A time that is a frame's own, but for rounding, is that frame.
    first = 0 if options.start is None else math.ceil(options.start * metadata.fps - 1e-6)
    last = most if options.end is None else min(math.floor(options.end * metadata.fps + 1e-6), most)
    if first > last:
        raise BadSample(
            f"video {media.name}: its clip from {options.start or 0:g} to "
            f"{metadata.duration if options.end is None else options.end:g} s holds none of its "
            f"{metadata.total_num_frames} frames, of {metadata.duration:g} s."
        )
    clip = VideoMetadata(total_num_frames=last - first + 1, fps=metadata.fps)
    return first + _choose_frames(media, clip, processor)


def _choose_frames(media: Media, clip: VideoMetadata, processor: Any) -> np.ndarray:
    """Choose frames of a clip: as the record says, or else with the settings of the processor."""
    options, factor = media.options, processor.temporal_patch_size
    total = clip.total_num_frames
    if options.frames is not None:
        count = round(options.frames / factor) * factor
        if not factor <= count <= total:
            raise BadSample(
                f"video {media.name}: nframes is {options.frames:g}; from {factor} to {total} are "
                "possible."
            )
        return np.linspace(0, total - 1, count).round().astype(int)
    if (options.fps, options.min_frames, options.max_frames) != (None, None, None):
        limited = copy.copy(processor)
        # Bounds are rounded to whole patches, as `qwen_vl_utils` does.
        if options.min_frames is not None:
            limited.min_frames = math.ceil(options.min_frames / factor) * factor
        if options.max_frames is not None:
            limited.max_frames = math.floor(options.max_frames / factor) * factor
        rate = options.fps or processor.fps or LISTED_FPS
        return np.asarray(limited.sample_frames(clip, fps=rate))
    if not processor.do_sample_frames:
        return np.arange(total)
    return np.asarray(
        processor.sample_frames(clip, num_frames=processor.num_frames, fps=processor.fps)
    )


def load_frames(media: Media, indices: np.ndarray) -> np.ndarray:
    """Decode the frames at `indices` (ascending, repeats allowed).

    If the frames are far apart, the decoder seeks the key frame before each.

    Returns:
        (F, height, width, 3) uint8 RGB.
    """
    if isinstance(media.content, tuple):
        return _load_listed(media.content, media.name)
    wanted = sorted(set(indices.tolist()))
    frames: dict[int, np.ndarray] | None = None
    if wanted and wanted[-1] + 1 > _SPARSE * len(wanted):
        frames = _decode_by_seeking(media, wanted)
    if frames is None or len(frames) < len(wanted):  # a transport stream has no index to seek by
        frames = _decode_in_order(media, wanted)
    if len(frames) < len(wanted):
        raise BadSample(
            f"video {media.name} holds {len(frames)} of the {len(wanted)} frames to sample; it is "
            "cut short."
        )
    return np.stack([frames[index] for index in indices.tolist()])


def _load_listed(frames: tuple[Media, ...], name: str) -> np.ndarray:
    """Decode all frames of a list, which must have one size."""
    height, width = image_size(frames[0])
    for frame in frames[1:]:
        if (size := image_size(frame)) != (height, width):
            raise BadSample(
                f"video {name}: frame {frame.name} has {size[0]} x {size[1]} pixels and the "
                f"first {height} x {width}. Resize them alike."
            )
    return np.stack([np.asarray(load_image(frame)) for frame in frames])


def _decode_in_order(media: Media, wanted: list[int]) -> dict[int, np.ndarray]:
    """Decode frames from the first on, and keep the wanted ones by their index."""
    frames: dict[int, np.ndarray] = {}
    left = set(wanted)
    with _open_video(media) as container:
        stream = _main_stream(container)
        to_rgb = _rgb_converter(stream)
        stream.codec_context.thread_count = 1
        for index, frame in enumerate(container.decode(stream)):
            if index in left:
                frames[index] = to_rgb(frame)
            if len(frames) == len(left):
                break
    return frames


def _decode_by_seeking(media: Media, wanted: list[int]) -> dict[int, np.ndarray] | None:
    """Decode the wanted frames by seeking; None if the packets do not tell which frame is which."""
    with _open_video(media) as container:
        stream = _main_stream(container)
        stream.codec_context.thread_count = 1
        times, keys = [], []
        for packet in container.demux(stream):
            if packet.size and not packet.is_discard:
                if packet.pts is None or packet.is_corrupt:
                    return None
                times.append(packet.pts)
                if packet.is_keyframe:
                    keys.append(packet.pts)
        times.sort()
        keys.sort()
        if len(set(times)) < len(times) or not keys or wanted[-1] >= len(times):
            return None
        return _decode_at(container, {i: times[i] for i in wanted}, keys)


def _decode_at(
    container: Any, wanted: dict[int, int], keys: list[int]
) -> dict[int, np.ndarray] | None:
    """Decode frames by their times; None if a frame is not where its packet says.

    Args:
        wanted: times of the frames, by their index, ascending.
        keys: times of the key frames, ascending.
    """
    stream = _main_stream(container)
    to_rgb = _rgb_converter(stream)
    frames: dict[int, np.ndarray] = {}
    decoded: Iterator[Any] = iter(())
    last = None  # time of the last decoded frame
    for index, time in wanted.items():
        place = bisect_right(keys, time) - 1
        if place < 0:
            return None
        if last is None or last < keys[place]:
            container.seek(keys[place], stream=stream, backward=True)
            decoded = container.decode(stream)
        for frame in decoded:
            last = frame.pts
            if last is None or last > time:
                return None
            if last == time:
                frames[index] = to_rgb(frame)
                break
    return frames


def _rgb_converter(stream: Any) -> Callable[[Any], np.ndarray]:
    """Return a converter of the stream's frames to RGB, as players show them, that uses one thread.

    PyAV's shared converter keeps threads that do not survive the fork of a data worker: the worker
    would wait for them forever.
    """
    from av.video.reformatter import VideoReformatter

    reformat, upright = VideoReformatter().reformat, _read_display(stream)
    return lambda frame: upright(reformat(frame, format="rgb24", threads=1).to_ndarray())
