"""Decoder processes: one for all parts of a video, ended with its last holder, its death told apart."""

from __future__ import annotations

import io
import logging
import os
import resource
import signal
import subprocess
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
from PIL import Image

from support.data.sounds import audio_file, sound
from support.videos.clips import KINDS, make_clip
from triptych.base.errors import InvalidRequest, TooLarge
from triptych.encoder_worker.media import clip_decoder, decoder_process
from triptych.encoder_worker.media.audio import AudioLimits, SamplesProcess, decode_audio
from triptych.encoder_worker.media.formats import decode_image
from triptych.encoder_worker.media.preparer import PictureProcess
from triptych.encoder_worker.media.shared_clips import ClipHold, ClipPart, SharedClips
from triptych.encoder_worker.media.video import MediaClip, VideoLimits
from triptych.encoder_worker.media.work import Abandoned, DecodeWork


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> list[subprocess.Popen[bytes]]:
    """The decoder processes that are started, which are real ones."""
    real, processes = decoder_process.subprocess.Popen, list[Any]()

    def popen(*given: Any, **more: Any) -> Any:
        processes.append(real(*given, **more))
        return processes[-1]

    monkeypatch.setattr(decoder_process.subprocess, "Popen", popen)
    return processes


@pytest.fixture
def stuck(monkeypatch: pytest.MonkeyPatch) -> list[subprocess.Popen[bytes]]:
    """The same, of a program that says nothing until it is killed."""
    real, processes = decoder_process.subprocess.Popen, list[Any]()
    sleeper = [decoder_process.sys.executable, "-c", "import time; time.sleep(600)"]

    def popen(*_: Any, **more: Any) -> Any:
        processes.append(real(sleeper, **more))
        return processes[-1]

    monkeypatch.setattr(decoder_process.subprocess, "Popen", popen)
    return processes


@pytest.fixture
def clips() -> Iterator[SharedClips]:
    with ThreadPoolExecutor(2) as pool:
        yield SharedClips(VideoLimits(), pool.submit)


def part(hold: ClipHold, work: DecodeWork | None = None) -> ClipPart:
    return ClipPart(hold.clip, work or DecodeWork())


def ended(process: subprocess.Popen[bytes]) -> bool:
    process.wait(10)
    return process.returncode is not None


def test_one_decode_serves_all_segments_of_a_file(started: list[Any], clips: SharedClips) -> None:
    """Nine segments of 30 frames, from the file's only key frame; asked for as they come."""
    data = make_clip("webm", "libvpx", frames=270, gop_size=1000)
    whole = make_frames(data, range(270))
    holds = [clips.hold("file", data) for _ in range(9)]
    with ThreadPoolExecutor(2) as pool:
        asked = [pool.submit(part(hold).frames, range(30 * i, 30 * i + 30)) for i, hold in enumerate(holds)]
        for i, frames in enumerate(asked):
            assert np.array_equal(frames.result(), whole[30 * i : 30 * i + 30])
    assert len(started) == 2  # that of `make_frames`, and one
    for hold in holds[:-1]:
        hold.release()
        hold.release()
    assert started[1].poll() is None
    holds[-1].release()
    assert ended(started[1])


def make_frames(data: bytes, indices: range) -> np.ndarray:
    with MediaClip(data, VideoLimits()) as clip:
        return clip.frames(indices)


def test_a_decoder_goes_on_where_it_is_and_decodes_each_frame_once(monkeypatch: pytest.MonkeyPatch) -> None:
    reader, decoded = counted(make_clip("webm", "libvpx", frames=60, gop_size=1000), monkeypatch)
    for first in range(0, 60, 10):
        list(reader.frames([*range(first, first + 10)], (64, 48)))
    assert len(decoded) == 60
    list(reader.frames([5], (64, 48)))
    assert len(decoded) == 66


def counted(data: bytes, monkeypatch: pytest.MonkeyPatch) -> tuple[clip_decoder.Reader, list[object]]:
    """A reader whose decoded frames are counted."""
    plain, decoded = clip_decoder.container_frames, list[object]()
    monkeypatch.setattr(
        clip_decoder, "container_frames", lambda file: (decoded.append(0) or frame for frame in plain(file))
    )
    reader = clip_decoder.Reader(io.BytesIO(data), {"seconds": 600, "frames": 1000, "pixels": 1e6})
    reader.index()
    decoded.clear()
    return reader, decoded


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: f"{kind[1]}.{kind[0]}")
def test_sparse_frames_are_decoded_from_their_key_frames_to_the_same_bits(kind, monkeypatch):
    data = make_clip(*kind, frames=64, gop_size=8)
    wanted = [0, 3, 21, 22, 47, 63]
    whole = make_frames(data, range(64))
    reader, decoded = counted(data, monkeypatch)
    assert np.array_equal(np.stack(list(reader.frames(wanted, (64, 48)))), whole[wanted])
    if kind[1] not in ("gif", "libx265"):
        assert len(decoded) < 48


def test_segments_that_come_in_any_order_have_their_own_frames(clips: SharedClips) -> None:
    data = make_clip("webm", "libvpx", frames=60, gop_size=1000)
    whole, hold = make_frames(data, range(60)), clips.hold("file", data)
    with ThreadPoolExecutor(6) as pool:
        asked = {at: pool.submit(part(hold).frames, range(at, at + 10)) for at in (20, 50, 0, 10, 40, 30)}
        for at, frames in asked.items():
            assert np.array_equal(frames.result(), whole[at : at + 10])
    hold.release()


def test_of_two_holders_one_leaves_and_the_decode_goes_on(started: list[Any], clips: SharedClips) -> None:
    data, work = make_clip(), DecodeWork()
    leaving, staying = clips.hold("file", data), clips.hold("file", data)
    assert part(leaving, work).info.frames == 24
    work.cancel()
    leaving.release()
    with pytest.raises(Abandoned):
        part(leaving, work).frames([1])
    assert part(staying).frames([1]).shape == (1, 48, 64, 3)
    assert len(started) == 1
    staying.release()
    assert ended(started[0])


def test_the_same_file_of_another_tenant_has_a_decoder_of_its_own(started: list[Any], clips: SharedClips):
    data = make_clip()
    holds = [clips.hold(key, data) for key in ("salt of alice", "salt of bob")]
    for hold in holds:
        assert part(hold).info.frames == 24
    assert len(started) == 2
    for hold in holds:
        hold.release()
    assert all(map(ended, started))


def in_thread(call: Callable[[], object], work: DecodeWork) -> tuple[threading.Thread, list[BaseException]]:
    """The call's error, once it has ended; it has asked a process that says nothing, which `work` ends."""
    errors: list[BaseException] = []

    def run() -> None:
        try:
            call()
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    while not work._ends:
        thread.join(0.01)
    return thread, errors


def test_a_decode_ends_with_its_last_holder_in_the_middle_of_a_question(stuck, clips):
    first, second = clips.hold("file", make_clip()), clips.hold("file", make_clip())
    work = DecodeWork()
    thread, errors = in_thread(lambda: part(first, work).info, first.clip._work)
    work.cancel()
    first.release()
    assert stuck[0].poll() is None
    second.release()
    thread.join(10)
    assert [type(error) for error in errors] == [Abandoned]
    assert ended(stuck[0])


@pytest.mark.parametrize("kind", ["picture", "sound", "video"])
def test_work_that_is_cancelled_kills_its_process(stuck: list[Any], kind: str) -> None:
    work = DecodeWork()

    def decode() -> None:
        if kind == "picture":
            with PictureProcess(b"x", 100, work) as picture:
                picture.picture()
        elif kind == "sound":
            with SamplesProcess(b"x", 16_000, AudioLimits(), work) as sound:
                sound.waveform()
        else:
            with MediaClip(b"x", VideoLimits(), work) as clip:
                clip.frames([0])

    thread, errors = in_thread(decode, work)
    work.cancel()
    thread.join(10)
    assert [type(error) for error in errors] == [Abandoned]
    assert ended(stuck[0])
    with pytest.raises(Abandoned):
        decode()
    assert len(stuck) == 1


@pytest.mark.parametrize("kind", ["picture", "sound"])
def test_pictures_and_sounds_have_a_deadline(stuck: list[Any], kind: str) -> None:
    work = DecodeWork(limit=0.05)
    with pytest.raises(TooLarge, match=r"not decoded within the 0.05 s allowed.*--max-decode-seconds"):
        if kind == "picture":
            with PictureProcess(b"x", 100, work) as picture:
                picture.picture()
        else:
            with SamplesProcess(b"x", 16_000, AudioLimits(decode_seconds=0.05), work) as sound:
                sound.waveform()
    assert ended(stuck[0])


def test_a_decoder_that_computes_for_ever_ends_by_its_cpu_time(started: list[Any], clips: SharedClips):
    """The kernel's signal for it, which is sent here."""
    with MediaClip(make_clip(), VideoLimits()) as clip:
        assert clip.info.frames == 24
        (process,) = started
        assert resource.prlimit(process.pid, resource.RLIMIT_CPU)[0] == 2 * VideoLimits().decode_seconds
        os.kill(process.pid, signal.SIGXCPU)
        with pytest.raises(TooLarge, match="not decoded within the 30 s allowed"):
            clip.frames([0])


def test_a_decoder_that_dies_is_told_apart_from_a_damaged_file(started: list[Any], caplog) -> None:
    with MediaClip(make_clip(), VideoLimits()) as clip, caplog.at_level(logging.INFO):
        assert clip.info.frames == 24
        started[0].kill()
        with pytest.raises(InvalidRequest, match="ended by SIGKILL.*or send another") as caught:
            clip.frames([0])
    assert caught.value.param == "video"
    assert "SIGKILL" in caplog.text


def test_after_a_death_the_next_segment_has_a_new_decoder(started: list[Any], clips: SharedClips) -> None:
    hold = clips.hold("file", make_clip())
    assert part(hold).info.frames == 24
    started[0].kill()
    with pytest.raises(InvalidRequest, match="SIGKILL"):
        part(hold).frames([0])
    assert part(hold).frames([3]).shape == (1, 48, 64, 3)
    hold.release()
    assert all(map(ended, started))


def test_a_file_that_came_to_its_deadline_is_not_decoded_again(stuck: list[Any]) -> None:
    with ThreadPoolExecutor(1) as pool:
        hold = SharedClips(VideoLimits(decode_seconds=0.05), pool.submit).hold("file", make_clip())
        for _ in range(3):
            with pytest.raises(TooLarge, match="not decoded within"):
                part(hold).info  # noqa: B018 - it asks the process
        hold.release()
    assert len(stuck) == 1


def test_a_video_is_refused_by_its_index_before_it_is_decoded(monkeypatch: pytest.MonkeyPatch) -> None:
    """By frames up to the last sampled one from the key frame before it on, times their pixels."""
    few = make_clip("webm", "libvpx", frames=240, gop_size=1000)
    many = make_clip("webm", "libvpx", frames=240, gop_size=8)
    # 240 frames of 64x48 take 10 ms here by the estimate, 8 of them a third of a millisecond.
    for data, refused in ((few, True), (many, False)):
        reader, decoded = counted(data, monkeypatch)
        reader._limits |= {"decode_seconds": 0.005, "slowness": 1.0}
        if refused:
            with pytest.raises(clip_decoder.ClipRefused, match="takes about .* the 0.005 s") as caught:
                list(reader.frames([3, 239], (64, 48)))
            assert caught.value.large and "--max-decode-seconds" in str(caught.value)
            assert not decoded
            assert len(list(reader.frames([3], (64, 48)))) == 1
        else:
            assert len(list(reader.frames([3, 239], (64, 48)))) == 2


def test_estimates_of_a_video_follow_the_machine_and_the_codec(monkeypatch: pytest.MonkeyPatch) -> None:
    reader, _ = counted(make_clip("webm", "libvpx", frames=30, gop_size=1000), monkeypatch)
    usual = reader.seconds([29])
    assert usual == pytest.approx(30 * (64 * 48 * 4.0 + 30_000) * 1e-9)
    reader._limits["slowness"] = 2.0
    assert reader.seconds([0, 29]) == pytest.approx(2 * usual)


@pytest.mark.parametrize("mode", ["RGB", "L", "RGBA", "P"])
def test_a_picture_of_a_process_has_the_bits_of_a_thread(mode: str) -> None:
    noise = np.random.default_rng(0).integers(0, 256, (40, 60, 3), dtype=np.uint8)
    for kind in ("PNG", "JPEG") if mode in ("RGB", "L") else ("PNG",):
        file = io.BytesIO()
        Image.fromarray(noise).convert(mode).save(file, kind)
        with PictureProcess(file.getvalue(), 10_000, DecodeWork()) as process:
            taken = np.asarray(process.picture())
        assert np.array_equal(taken, np.asarray(decode_image(file.getvalue(), max_pixels=10_000)))


def test_a_picture_that_a_process_refuses_has_the_error_of_a_thread() -> None:
    for data, limit in ((b"no picture", 100), (_png(60, 40)[:200], 10_000), (_png(60, 40), 100)):
        errors = []
        with pytest.raises(InvalidRequest) as caught:
            decode_image(data, max_pixels=limit)
        errors.append(caught.value)
        with PictureProcess(data, limit, DecodeWork()) as process, pytest.raises(InvalidRequest) as caught:
            process.picture()
        errors.append(caught.value)
        assert {(type(error), error.message, error.param) for error in errors} == {
            (type(errors[0]), errors[0].message, "image")
        }


def _png(width: int, height: int) -> bytes:
    file = io.BytesIO()
    noise = np.random.default_rng(0).integers(0, 256, (height, width, 3), dtype=np.uint8)
    Image.fromarray(noise).save(file, "PNG")
    return file.getvalue()


@pytest.mark.parametrize("kind", ["FLAC", "MP3"])
def test_a_sound_of_a_process_has_the_bits_of_a_thread(kind: str) -> None:
    data, limits = audio_file(sound(2.0), 44_100, kind), AudioLimits()
    with SamplesProcess(data, 16_000, limits, DecodeWork()) as process:
        assert np.array_equal(process.waveform(), decode_audio(data, 16_000, limits))
    damaged = SamplesProcess(data[:90], 16_000, limits, DecodeWork())
    with damaged, pytest.raises(InvalidRequest, match="^audio: ") as caught:
        damaged.waveform()
    assert caught.value.param == "audio"
