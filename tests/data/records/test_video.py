"""Seeking gives the same frames as decoding everything, for every kind of stream."""

from __future__ import annotations

import time
from fractions import Fraction
from pathlib import Path
from unittest import mock

import av
import numpy as np
import pytest

from mcore_qwen3vl.data.records import video
from mcore_qwen3vl.data.records.media import Media, MediaFolder
from mcore_qwen3vl.data.records.reading import BadSample, record_limit
from mcore_qwen3vl.data.records.video import is_uneven, load_frames, probe_video
from tests.data.conftest import write_video


def write(
    path: Path,
    codec: str,
    *,
    frames: int = 120,
    uneven: bool = False,
    **options: str,
) -> Media:
    """Write a video whose frames all differ; `uneven` ones are shown for unequal times."""
    with av.open(str(path), "w") as container:
        stream = container.add_stream(codec, rate=25, options=options)
        stream.height, stream.width, stream.pix_fmt = 48, 64, "yuv420p"
        stream.codec_context.time_base = Fraction(1, 1000)
        time = 0
        for index in range(frames):
            picture = np.zeros((48, 64, 3), np.uint8)
            picture[:, : index % 64] = 2 * index % 256
            picture[index % 48] = 255 - index % 256
            frame = av.VideoFrame.from_ndarray(picture, format="rgb24")
            frame.pts, frame.time_base = time, Fraction(1, 1000)
            time += 40 + (index * 37 % 90 if uneven else 0)
            container.mux(stream.encode(frame))
        container.mux(stream.encode())
    return Media("video", path, path.name)


def with_display(
    media: Media, *, rotation: int | None = None, matrix: list[int] | None = None
) -> Media:
    """Write the packets of a video into another, and how players show it, which is returned.

    A `rotation` is counter-clockwise. The frames are not encoded again, which x264 does not always
    do to the same bits.
    """
    path = Path(str(media.content)).with_name("shown.mp4")
    with av.open(str(media.content)) as source, av.open(str(path), "w") as target:
        stream = target.add_stream_from_template(source.streams.video[0])
        if rotation is not None:
            stream.set_display_rotation(rotation)
        if matrix is not None:
            stream.set_display_matrix(matrix)
        for packet in source.demux(video=0):
            if packet.size:
                packet.stream = stream
                target.mux(packet)
    return Media("video", path, path.name)


CASES = {
    "b frames": ("a.mp4", "libx264", {"g": "24", "bf": "3"}),
    "open groups": ("a.mkv", "libx264", {"g": "24", "bf": "3", "x264-params": "open-gop=1"}),
    "one key frame": ("a.mp4", "libx264", {"g": "1000"}),
    "only key frames": ("a.mp4", "libx264", {"g": "1"}),
    "mpeg4": ("a.mp4", "mpeg4", {"g": "12", "bf": "2"}),
    "vp9": ("a.webm", "libvpx-vp9", {"g": "30", "cpu-used": "8", "deadline": "realtime"}),
}
INDICES = ([0, 30, 60, 90, 119], [3, 3, 57, 58, 119], [119], [23, 24, 25, 48, 49])


@pytest.mark.parametrize("uneven", [False, True])
@pytest.mark.parametrize("case", CASES)
def test_seeking_gives_the_frames_of_decoding_everything(
    case: str, uneven: bool, tmp_path: Path
) -> None:
    name, codec, options = CASES[case]
    media = write(tmp_path / name, codec, uneven=uneven, **options)
    every = load_frames(media, np.arange(120))
    assert len(np.unique(every.reshape(120, -1), axis=0)) == 120
    for indices in INDICES:
        wanted = sorted(set(indices))
        sought = video._decode_by_seeking(media, wanted)
        assert sought is not None
        assert all(np.array_equal(sought[index], every[index]) for index in wanted), indices
        assert np.array_equal(load_frames(media, np.array(indices)), every[indices])


@pytest.mark.parametrize(
    ("name", "codec", "frames"),
    [
        ("a.ts", "libx264", 60),
        ("a.mpg", "mpeg2video", 60),
        ("a.wmv", "wmv2", 60),
        ("a.mkv", "libx264", 2),
    ],
)
def test_frames_are_counted_where_a_duration_is_stated_and_no_count(
    name: str, codec: str, frames: int, tmp_path: Path
) -> None:
    with av.open(str(tmp_path / name), "w") as container:
        stream = container.add_stream(codec, rate=25)
        stream.width, stream.height, stream.pix_fmt = 64, 48, "yuv420p"
        for index in range(frames):
            picture = np.full((48, 64, 3), 4 * index, np.uint8)
            container.mux(stream.encode(av.VideoFrame.from_ndarray(picture, format="rgb24")))
        container.mux(stream.encode())
    with av.open(str(tmp_path / name)) as container:
        (stream,) = container.streams.video
        assert (stream.frames, stream.duration is None) == (0, False)
        every = [frame.to_ndarray(format="rgb24") for frame in container.decode(stream)]
    media = Media("video", tmp_path / name, name)
    assert probe_video(media).total_num_frames == len(every) == frames
    wanted = np.array([0, frames // 2, frames - 1])
    assert np.array_equal(load_frames(media, wanted), np.stack(every)[wanted])


@pytest.mark.parametrize("name", ["b frames", "mpeg4", "vp9"])
def test_a_variable_frame_rate_is_noticed(name: str, tmp_path: Path) -> None:
    file, codec, options = CASES[name]
    for uneven in (False, True):
        media = write(tmp_path / file, codec, uneven=uneven, **options)
        assert is_uneven(media) is uneven


def test_few_frames_of_a_long_video_are_not_reached_by_decoding_all(tmp_path: Path) -> None:
    media = write(tmp_path / "a.mp4", "libx264", frames=600, g="25")
    decoded = []
    decode_at = video._decode_at

    def counting(container, wanted, keys):  # type: ignore[no-untyped-def]
        def decode(stream):  # type: ignore[no-untyped-def]
            for frame in container.decode(stream):
                decoded.append(frame.pts)
                yield frame

        counted = mock.Mock(streams=container.streams, seek=container.seek, decode=decode)
        return decode_at(counted, wanted, keys)

    with mock.patch.object(video, "_decode_at", counting):
        load_frames(media, np.array([10, 300, 599]))
    assert 3 <= len(decoded) <= 3 * 26


def test_the_stream_that_players_show_is_read(tmp_path: Path) -> None:
    """A preview comes before it in the file."""
    write(tmp_path / "a.mkv", "libx264", frames=20)
    write(tmp_path / "preview.mkv", "mpeg4", frames=4)
    with (
        av.open(str(tmp_path / "preview.mkv")) as preview,
        av.open(str(tmp_path / "a.mkv")) as main,
        av.open(str(tmp_path / "both.mkv"), "w") as both,
    ):
        sources = [preview, main]
        streams = [both.add_stream_from_template(one.streams.video[0]) for one in sources]
        streams[0].disposition, streams[1].disposition = 0, av.stream.Disposition.default
        for source, stream in zip(sources, streams, strict=True):
            for packet in source.demux(video=0):
                if packet.size:
                    packet.stream = stream
                    both.mux(packet)
    alone = Media("video", tmp_path / "a.mkv", "a.mkv")
    media = Media("video", tmp_path / "both.mkv", "both.mkv")
    assert probe_video(media).total_num_frames == 20
    for wanted in ([3, 17], range(20)):
        assert np.array_equal(
            load_frames(media, np.array(wanted)), load_frames(alone, np.array(wanted))
        )


def test_a_video_without_times_is_decoded_in_order(tmp_path: Path) -> None:
    """Raw H.264 is such a video: it has no times to seek to."""
    media = write(tmp_path / "a.mp4", "libx264", g="24")
    with av.open(str(tmp_path / "a.mp4")) as source, av.open(str(tmp_path / "a.h264"), "w") as raw:
        stream = raw.add_stream_from_template(source.streams.video[0])
        for packet in source.demux(video=0):
            if packet.size:
                packet.stream = stream
                raw.mux(packet)
    bare = Media("video", tmp_path / "a.h264", "a.h264")
    expected = load_frames(media, np.arange(120))[[5, 60, 110]]
    assert np.array_equal(load_frames(bare, np.array([5, 60, 110])), expected)


def test_a_video_cut_short_says_so_by_either_way(tmp_path: Path) -> None:
    media = write(tmp_path / "a.mkv", "libx264", g="24")
    assert isinstance(media.content, Path)
    whole = media.content.read_bytes()
    (tmp_path / "cut.mkv").write_bytes(whole[: len(whole) // 2])
    cut = Media("video", tmp_path / "cut.mkv", "cut.mkv")
    for indices in ([5, 118], range(119)):
        with pytest.raises(BadSample, match=r"cut\.mkv (holds|cannot be decoded)"):
            load_frames(cut, np.array(indices))


def test_decoding_stops_when_time_is_up(tmp_path: Path) -> None:
    media = write(tmp_path / "a.mp4", "libx264", g="24")

    def decode_for_a_minute(indices: np.ndarray) -> None:
        """Decode again and again: a fast machine may decode the video once before time is up, and
        FFmpeg's callback may swallow the first interruption."""
        until = time.monotonic() + 60
        while time.monotonic() < until:
            load_frames(media, indices)

    for indices in ([5, 118], range(119)):
        with pytest.raises(BadSample, match=r"takes more than 0\.01 s"), record_limit(0.01):
            decode_for_a_minute(np.array(indices))


PIXEL_16 = 1 << 16  # 1 in the first two columns of a display matrix


@pytest.mark.parametrize("columns", [1, -1])
@pytest.mark.parametrize("rows", [1, -1])
@pytest.mark.parametrize("sideways", [False, True])
def test_frames_are_turned_and_mirrored_as_players_show_them(
    sideways: bool, rows: int, columns: int, tmp_path: Path
) -> None:
    """A display matrix maps the place (x, y) of a pixel to (a x + c y, b x + d y)."""
    a, b, c, d = (0, rows, columns, 0) if sideways else (columns, 0, 0, rows)
    matrix = [a * PIXEL_16, b * PIXEL_16, 0, c * PIXEL_16, d * PIXEL_16, 0, 0, 0, 1 << 30]
    plain = write(tmp_path / "plain.mp4", "libx264", frames=40, g="10")
    stored = load_frames(plain, np.arange(40))
    held = with_display(plain, matrix=matrix)
    metadata = probe_video(held)
    shown = np.empty((40, metadata.height, metadata.width, 3), np.uint8)
    ys, xs = np.mgrid[:48, :64]
    new_y, new_x = b * xs + d * ys, a * xs + c * ys
    shown[:, new_y - new_y.min(), new_x - new_x.min()] = stored
    for indices in (np.arange(40), np.array([3, 39])):  # in order, and sought
        assert np.array_equal(load_frames(held, indices), shown[indices])


def test_a_quarter_turn_is_that_of_pyav(tmp_path: Path) -> None:
    plain = write(tmp_path / "plain.mp4", "libx264", frames=4)
    turned = with_display(plain, rotation=90)
    with av.open(str(turned.content)) as container:
        degrees = next(container.decode(video=0)).rotation
    assert degrees == 90  # counter-clockwise
    expected = np.rot90(load_frames(plain, np.arange(4)), 1, (1, 2))
    assert np.array_equal(load_frames(turned, np.arange(4)), expected)


@pytest.mark.parametrize("suffix", ["mp4", "webm"])
def test_video_is_probed_and_decoded(suffix: str, tmp_path: Path) -> None:
    path = write_video(tmp_path / f"a.{suffix}", frames=13, height=32, width=48, fps=10)
    media = MediaFolder(tmp_path, {}).resolve("video", path.name)
    metadata = probe_video(media)
    assert (metadata.total_num_frames, metadata.height, metadata.width) == (13, 32, 48)
    assert metadata.fps == pytest.approx(10)
    every = load_frames(media, np.arange(13))
    assert every.shape == (13, 32, 48, 3)
    assert np.array_equal(load_frames(media, np.array([2, 7, 7, 12])), every[[2, 7, 7, 12]])
    with pytest.raises(BadSample, match="holds 13 of the 14 frames"):
        load_frames(media, np.arange(14))
