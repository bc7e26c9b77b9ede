"""Frames of video files as PyAV itself gives them, and files that want to cost much or are none."""

from __future__ import annotations

import io
import logging
import resource

import av
import numpy as np
import pytest

from support.videos.clips import (
    KINDS,
    changing_size,
    endless,
    huge_header,
    make_clip,
    sound_only,
    turned,
    with_hidden_frame,
    without_frames,
)
from triptych.base.errors import InvalidRequest, TooLarge
from triptych.encoder_worker.media import clip_decoder, decoder_process
from triptych.encoder_worker.media.video import MediaClip, VideoLimits

DAMAGED = "truncated or damaged"


def by_pyav(data: bytes) -> list[np.ndarray]:
    with av.open(io.BytesIO(data)) as file:
        return [frame.to_ndarray(format="rgb24") for frame in file.decode(video=0)]


def refusal(data: bytes, limits: VideoLimits | None = None, indices: tuple[int, ...] = (0, 1)) -> str:
    with pytest.raises(InvalidRequest) as caught, MediaClip(data, limits or VideoLimits()) as clip:
        clip.frames(indices)
    assert caught.value.param == "video"
    assert isinstance(caught.value, TooLarge) == (limits is not None)
    return caught.value.message


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: f"{kind[1]}.{kind[0]}")
def test_the_frames_that_are_asked_for_are_those_of_pyav(kind: tuple[str, str, str]) -> None:
    data = make_clip(*kind)
    frames = by_pyav(data)
    with MediaClip(data, VideoLimits()) as clip:
        assert (clip.info.frames, clip.info.width, clip.info.height) == (len(frames), 64, 48)
        # A GIF counts in hundredths of a second.
        assert clip.info.fps == pytest.approx(8, rel=0.05)
        taken = clip.frames([0, 5, 5, 23])
    assert np.array_equal(taken, np.stack([frames[index] for index in (0, 5, 5, 23)]))


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: f"{kind[1]}.{kind[0]}")
def test_a_late_part_is_decoded_from_its_key_frame_to_the_same_bits(kind, monkeypatch):
    data = make_clip(*kind, frames=40, gop_size=8)
    frames, decoded = by_pyav(data), list[object]()
    plain = clip_decoder.container_frames
    monkeypatch.setattr(
        clip_decoder, "container_frames", lambda file: (decoded.append(0) or frame for frame in plain(file))
    )
    reader = clip_decoder.Reader(io.BytesIO(data), {"seconds": 600, "frames": 1000, "pixels": 1e6})
    reader.index()
    decoded.clear()
    for first in (9, 24, 33):
        taken = list(reader.frames([first, first + 3], (64, 48)))
        assert np.array_equal(np.stack(taken), np.stack([frames[first], frames[first + 3]]))
    if kind[1] not in ("gif", "libx265"):
        assert len(decoded) < 3 * 16


def test_a_turned_clip_is_upright() -> None:
    data = make_clip()
    with MediaClip(turned(data), VideoLimits()) as clip:
        assert (clip.info.width, clip.info.height) == (48, 64)
        (frame,) = clip.frames([3])
    # The matrix of a telephone held upright: what was left is above.
    assert np.array_equal(frame, np.rot90(by_pyav(data)[3], -1))


def test_a_clip_of_variable_rate_is_counted_by_frames() -> None:
    data = make_clip(times=[0, 1, 2, 3, 40, 41, 42, 80], frames=8)
    with MediaClip(data, VideoLimits()) as clip:
        assert clip.info.frames == 8
        assert clip.frames(range(8)).shape == (8, 48, 64, 3)


def test_a_clip_in_hdr_is_read_as_pyav_reads_it() -> None:
    settings = {"color_primaries": 9, "color_trc": 16, "colorspace": 9}
    data = make_clip("mp4", "libx265", "yuv420p10le", **settings)
    with MediaClip(data, VideoLimits()) as clip:
        assert np.array_equal(clip.frames([2, 9]), np.stack([by_pyav(data)[2], by_pyav(data)[9]]))


def test_sound_beside_the_picture_changes_nothing() -> None:
    plain, loud = make_clip(), make_clip(sound=True)
    for data in (plain, loud):
        with MediaClip(data, VideoLimits()) as clip:
            assert np.array_equal(clip.frames([7]), np.stack([by_pyav(plain)[7]]))


def test_a_box_of_ten_gigabytes_is_damage_not_memory() -> None:
    data = huge_header()
    with MediaClip(data, VideoLimits()) as clip:
        try:
            assert np.array_equal(clip.frames([0]), np.stack(by_pyav(make_clip())[:1]))
        except InvalidRequest as error:
            assert DAMAGED in error.message


def test_files_without_a_picture_are_refused_by_name() -> None:
    assert "has no video" in refusal(sound_only())
    assert "no frames" in refusal(without_frames())
    for data in (b"x", b"#EXTM3U\nfile:///etc/passwd", b"ffconcat version 1.0\nfile /etc/passwd", bytes(64)):
        assert "not an MP4, MOV, WebM or GIF file" in refusal(data)


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: f"{kind[1]}.{kind[0]}")
def test_a_truncated_file_gives_its_frames_or_is_refused(kind: tuple[str, str, str]) -> None:
    data = make_clip(*kind)
    for cut in (len(data) // 8, len(data) // 2, len(data) - 40):
        with MediaClip(data[:cut], VideoLimits()) as clip:
            try:
                assert clip.frames([0]).shape == (1, 48, 64, 3)
            except InvalidRequest as error:
                assert error.param == "video"
                assert DAMAGED in error.message or "no frames" in error.message


def test_flipped_bytes_end_in_frames_or_a_refusal() -> None:
    data, rng = make_clip(), np.random.default_rng(5)
    for _ in range(12):
        damaged = bytearray(data)
        for at in rng.integers(40, len(data), 20):
            damaged[at] = int(rng.integers(256))
        with MediaClip(bytes(damaged), VideoLimits()) as clip:
            try:
                clip.frames([0, 20])
            except InvalidRequest as error:
                assert error.param == "video"


def test_frames_that_are_never_shown_are_not_counted() -> None:
    data = with_hidden_frame()
    assert len(by_pyav(data)) == 23
    with MediaClip(data, VideoLimits()) as clip:
        assert clip.info.frames == 23
        assert np.array_equal(clip.frames([22]), np.stack(by_pyav(data)[22:]))


def test_the_decoder_has_a_bound_of_memory_and_ends_there() -> None:
    with MediaClip(make_clip(size=(640, 480)), VideoLimits()) as clip:
        assert clip.info.frames == 24
        process = clip._process.pid
        assert resource.prlimit(process, resource.RLIMIT_AS)[1] == 3 << 30
        resource.prlimit(process, resource.RLIMIT_AS, (1 << 20, 3 << 30))
        with pytest.raises(InvalidRequest, match=DAMAGED):
            clip.frames(range(24))


def test_a_picture_beyond_all_bounds_is_refused_by_its_header() -> None:
    gif = bytearray(make_clip("gif", "gif", "rgb8"))
    gif[6:10] = b"\x80\x3e\x80\x3e"
    assert "pixels in a frame allowed" in refusal(bytes(gif), VideoLimits(frames=1000))


def test_each_limit_is_named() -> None:
    data = make_clip()
    assert "2 seconds allowed" in refusal(data, VideoLimits(seconds=2))
    assert "10 frames allowed" in refusal(data, VideoLimits(frames=10))
    assert "1000 pixels in a frame allowed" in refusal(data, VideoLimits(frame_pixels=1000))
    few = VideoLimits(sampled_pixels=6000)
    assert "2 frames of 64x48 are more than the 6000 pixels" in refusal(data, few)


def test_a_hundred_thousand_frames_of_one_pixel_are_too_many_before_they_are_decoded() -> None:
    many = endless()
    assert "more than the 1000 frames" in refusal(many, VideoLimits(frames=1000))


def test_a_stream_that_changes_its_size_is_refused() -> None:
    assert "frames change their size" in refusal(changing_size(), indices=(0, 12))


def test_decoding_is_killed_at_its_deadline(monkeypatch: pytest.MonkeyPatch) -> None:
    sleeper = [decoder_process.sys.executable, "-c", "import time; time.sleep(600)"]
    real = decoder_process.subprocess.Popen
    processes = []

    def stuck(*_: object, **given: object) -> object:
        processes.append(real(sleeper, **given))  # type: ignore[call-overload]
        return processes[-1]

    monkeypatch.setattr(decoder_process.subprocess, "Popen", stuck)
    assert "not decoded within the 0.2 s allowed" in refusal(make_clip(), VideoLimits(decode_seconds=0.2))
    assert processes[0].poll() is not None


def test_without_pyav_a_video_is_refused_with_the_remedy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(decoder_process.importlib.util, "find_spec", lambda _: None)
    assert "install triptych[video]" in refusal(b"")


def test_refusals_never_repeat_the_decoders_words(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO):
        message = refusal(make_clip()[:60])
    assert not any(word in message for word in ("Errno", "avcodec", "0x"))
