"""The program that decodes one file, in a process of its own that its parent may kill at any time.

Reads the file from a descriptor. Of a video it prints the index as a line of JSON, reads the indices of the
frames that are asked for as another one, and writes these, upright in RGB, as raw bytes. Of a sound it prints
the rate, and writes its samples. It is run by its path, isolated: it imports nothing of this project.
"""

from __future__ import annotations

import json
import os
import resource
import sys
from collections.abc import Iterator
from typing import Any, BinaryIO

import av
import numpy as np

#: Codecs that untrusted bytes may reach, of the hundreds that FFmpeg has.
CODECS = frozenset({"h264", "hevc", "vp8", "vp9", "av1", "libdav1d", "mpeg4", "mjpeg", "gif"})
#: The same of sound.
SOUND_CODECS = frozenset({"aac", "alac", "flac", "mp3", "mp3float", "opus", "libopus", "vorbis", "libvorbis"})
#: Address space of this process.
_MEMORY = 3 << 30
_SHOW_FRAME = 0x10


class ClipRefused(Exception):
    """What is wrong with the file, for its sender: nothing where it is damaged; `large` above a limit."""

    def __init__(self, message: str = "", *, large: bool = False) -> None:
        super().__init__(message)
        self.large = large


def clip_format(head: bytes) -> str | None:
    """FFmpeg's name of the container that the first bytes are of; None for all others."""
    if head[4:8] == b"ftyp" or head[4:8] in (b"moov", b"mdat", b"wide", b"free", b"skip"):
        return "mov"
    if head[:4] == b"\x1a\x45\xdf\xa3":
        return "matroska"
    return "gif" if head[:6] in (b"GIF87a", b"GIF89a") else None


class Reader:
    """One video of `file`, within `limits` by name: seconds, frames and pixels of a frame."""

    def __init__(self, file: BinaryIO, limits: dict[str, float]) -> None:
        self._limits = limits
        name = clip_format(file.read(16))
        if name is None:
            raise ClipRefused("not an MP4, MOV, WebM or GIF file; send one of these formats")
        self._file, self._name = file, name
        self._turns = 0
        #: The times of all frames in order, and of those that decoding may begin at; empty where not known.
        self._times: list[int] = []
        self._keys: list[int] = []

    def index(self) -> dict[str, float]:
        """Counts the frames without decoding them: headers say anything."""
        frames, seconds = 0, 0.0
        times: set[int] = set()
        with self._opened() as container:
            stream = self._stream(container)
            rate = float(stream.average_rate or stream.guessed_rate or 0)
            base = float(stream.time_base or 0)
            vp8 = stream.codec_context.codec.name == "vp8"
            for packet in container.demux(stream):
                # VP8 keeps frames in packets of their own that are only referred to.
                if packet.size == 0 or packet.is_discard or (vp8 and not bytes(packet)[0] & _SHOW_FRAME):
                    continue
                frames += 1
                self._check("frames", frames)
                if packet.pts is not None:
                    times.add(packet.pts)
                    self._keys += [packet.pts] * packet.is_keyframe
                seconds = max(seconds, ((packet.pts or 0) + (packet.duration or 0)) * base)
                self._check("seconds", seconds)
            if not frames:
                raise ClipRefused("the file has no frames; send one with a picture in it")
            rate = rate or (frames / seconds if seconds else 1.0)
            self._check("seconds", frames / rate)
            first = next(container_frames(self._opened()), None)
        if first is None:
            raise ClipRefused
        if len(times) == frames and self._name != "gif":
            self._times = sorted(times)
        self._check("pixels", first.width * first.height)
        self._turns = (int(first.rotation) // 90) % 4
        size = (first.height, first.width) if self._turns % 2 else (first.width, first.height)
        return {"frames": frames, "fps": rate, "width": size[0], "height": size[1]}

    def frames(self, indices: list[int], size: tuple[int, int]) -> Iterator[np.ndarray]:
        """Those of these ascending indices; a file that ends before the last one is refused."""
        remaining = iter(indices)
        target = next(remaining, None)
        for index, frame in self._numbered(target or 0):
            if target is None:
                return
            if index < target:
                continue
            picture = np.rot90(frame.to_ndarray(format="rgb24"), self._turns)
            if picture.shape[:2] != (size[1], size[0]):
                raise ClipRefused("its frames change their size; convert it to one size")
            while target == index:
                yield np.ascontiguousarray(picture)
                target = next(remaining, None)
        if target is not None:
            raise ClipRefused

    def _numbered(self, first: int) -> Iterator[tuple[int, Any]]:
        """Frames with their numbers, from a key frame before `first` on where the file can be sought."""
        times = self._times
        if first < len(times) and (key := max((at for at in self._keys if at <= times[first]), default=0)):
            numbers = {at: number for number, at in enumerate(times)}
            container = self._opened()
            container.seek(key, stream=container.streams.video[0])
            begun = False
            for frame in container_frames(container):
                number = numbers.get(frame.pts, -1)
                if not begun and (number > first or frame.is_corrupt):
                    break  # it depends on frames before the key frame
                begun = begun or number >= first
                yield number, frame
            if begun:
                return
        yield from enumerate(container_frames(self._opened()))

    def _opened(self) -> Any:
        self._file.seek(0)
        # Named, so that no playlist is read as one; errors are never passed over.
        return av.open(self._file, format=self._name, metadata_errors="ignore")

    def _stream(self, container: Any) -> Any:
        if not container.streams.video:
            raise ClipRefused("the file has no video; send one with a picture in it")
        stream = container.streams.video[0]
        context = stream.codec_context
        if context is None or context.codec.name not in CODECS:
            raise ClipRefused("its codec is not supported: convert it to H.264, HEVC, VP8, VP9 or AV1")
        if context.width < 1 or context.height < 1:
            raise ClipRefused("it has no pixels; send one with width and height above 0")
        self._check("pixels", context.width * context.height)
        return stream

    def _check(self, name: str, value: float) -> None:
        if value > (limit := self._limits[name]):
            what = "pixels in a frame" if name == "pixels" else name
            raise ClipRefused(
                f"it has more than the {limit:g} {what} allowed; send a smaller one", large=True
            )


def samples(file: BinaryIO, limits: dict[str, float]) -> Iterator[tuple[int, np.ndarray]]:
    """The rate, and the mean of the channels in float32, of each frame of the file's first sound."""
    name = clip_format(file.read(16))
    if name not in ("mov", "matroska"):
        raise ClipRefused("not an M4A, MP4 or WebM file; send one of these formats")
    file.seek(0)
    container: Any
    with av.open(file, format=name, metadata_errors="ignore") as container:
        if not container.streams.audio:
            raise ClipRefused("the file has no sound; send one with an audio track")
        context = container.streams.audio[0].codec_context
        if context is None or context.codec.name not in SOUND_CODECS:
            raise ClipRefused("its codec is not supported: convert it to AAC, Opus, FLAC or MP3")
        context.thread_count = 1
        rate, channels = int(context.sample_rate), int(context.channels)
        if not 1 <= channels <= limits["channels"] or not limits["min_rate"] <= rate <= limits["max_rate"]:
            raise ClipRefused(f"it has {channels} channels at {rate} Hz; convert it to two at 48000")
        plain, count = av.AudioResampler(format="fltp"), 0
        for frame in container.decode(container.streams.audio[0]):
            for part in plain.resample(frame):
                count += part.samples
                if part.sample_rate != rate:
                    raise ClipRefused
                if count > limits["seconds"] * rate:
                    raise ClipRefused(f"longer than {limits['seconds']:g} s; send a shorter file", large=True)
                yield rate, part.to_ndarray().mean(axis=0, dtype=np.float32)


def container_frames(container: Any) -> Iterator[Any]:
    """The decoded frames in their order; closes the container."""
    with container:
        stream = container.streams.video[0]
        # The parent has its threads for other items.
        stream.codec_context.thread_count = 1
        yield from container.decode(stream)


def write_frames(file: BinaryIO, limits: dict[str, float], out: BinaryIO) -> None:
    """The index, and the frames that are then asked for."""
    reader = Reader(file, limits)
    index = reader.index()
    out.write(json.dumps(index).encode() + b"\n")
    out.flush()
    indices = json.loads(sys.stdin.readline() or "[]")
    for picture in reader.frames(indices, (int(index["width"]), int(index["height"]))):
        out.write(b"F")
        out.write(picture.data)
    out.write(b"\n")


def write_sound(file: BinaryIO, limits: dict[str, float], out: BinaryIO) -> None:
    """The rate, and the samples, each frame's behind its length."""
    begun = False
    for rate, part in samples(file, limits):
        if not begun:
            out.write(json.dumps({"rate": rate}).encode() + b"\n")
            begun = True
        out.write(b"F" + len(part).to_bytes(4, "little"))
        out.write(np.ascontiguousarray(part).data)
    if not begun:
        raise ClipRefused("the file has no samples; send one with audio in it")
    out.write(b"\n{}\n")


def main(descriptor: int, limits: dict[str, float]) -> None:
    """One conversation with the parent; the last line of a refused file has `error`."""
    out = sys.stdout.buffer
    try:
        with os.fdopen(descriptor, "rb") as file:
            (write_sound if "channels" in limits else write_frames)(file, limits, out)
    except ClipRefused as error:
        answer: dict[str, object] = {"error": str(error), "large": error.large}
        out.write(json.dumps(answer).encode() + b"\n")
    except (av.FFmpegError, MemoryError, ValueError, OverflowError) as error:
        answer = {"error": "", "cause": type(error).__name__}
        out.write(json.dumps(answer).encode() + b"\n")
    out.flush()


if __name__ == "__main__":
    av.logging.set_level(None)
    resource.setrlimit(resource.RLIMIT_AS, (_MEMORY, _MEMORY))
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    main(int(sys.argv[1]), json.loads(sys.argv[2]))
