"""The program that decodes one file, in a process of its own that its parent may kill at any time.

Reads the file from a descriptor. Of a video it prints the index as a line of JSON; then, for each line with
indices of frames, it writes these, upright in RGB, as raw bytes. Of a sound it prints the rate, and writes
its samples. It is run by its path, isolated: it imports nothing of this project.
"""

from __future__ import annotations

import bisect
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
#: Nanoseconds of decoding for each pixel of a frame, by codec, and of each frame, where `slowness` is 1.
PIXEL = {"hevc": 6.0, "av1": 7.0, "libdav1d": 7.0, "vp9": 5.0, "mjpeg": 8.0}
_PIXEL, _FRAME = 4.0, 30_000.0
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
        self._codec, self._pixels = "", 0
        #: The times of all frames in order; empty where not known.
        self._times: list[int] = []
        self._numbers: dict[int, int] = {}
        #: The numbers of the frames that decoding may begin at, ascending, the first one among them.
        self._keys: list[int] = [0]
        #: The decoder under way, the number of the frame that it gave last, and that frame.
        self._decoder: Iterator[tuple[int, Any]] | None = None
        self._number = -1
        self._frame: Any = None

    def index(self) -> dict[str, float]:
        """Counts the frames without decoding them: headers say anything."""
        frames, seconds = 0, 0.0
        times: set[int] = set()
        keys: list[int] = []
        with self._opened() as container:
            stream = self._stream(container)
            rate = float(stream.average_rate or stream.guessed_rate or 0)
            base = float(stream.time_base or 0)
            self._codec = stream.codec_context.codec.name
            vp8 = self._codec == "vp8"
            for packet in container.demux(stream):
                # VP8 keeps frames in packets of their own that are only referred to.
                if packet.size == 0 or packet.is_discard or (vp8 and not bytes(packet)[0] & _SHOW_FRAME):
                    continue
                frames += 1
                self._check("frames", frames)
                if packet.pts is not None:
                    times.add(packet.pts)
                    keys += [packet.pts] * packet.is_keyframe
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
            self._numbers = {at: number for number, at in enumerate(self._times)}
            self._keys = sorted({0, *(self._numbers[at] for at in keys)})
        self._pixels = first.width * first.height
        self._check("pixels", self._pixels)
        self._turns = (int(first.rotation) // 90) % 4
        size = (first.height, first.width) if self._turns % 2 else (first.width, first.height)
        return {"frames": frames, "fps": rate, "width": size[0], "height": size[1]}

    def seconds(self, indices: list[int]) -> float:
        """What these ascending frames take to decode, those before them from a key frame on included."""
        frames, reached = 0, -1
        for index in indices:
            if index > reached:
                frames += index - max(reached, self._key(index) - 1)
                reached = index
        each = self._pixels * PIXEL.get(self._codec, _PIXEL) + _FRAME
        return frames * each * 1e-9 * self._limits.get("slowness", 1.0)

    def frames(self, indices: list[int], size: tuple[int, int]) -> Iterator[np.ndarray]:
        """Those of these ascending indices; a file that ends before the last one is refused.

        Goes on where the last call has ended, if that is not behind the first index.
        """
        limit = self._limits.get("decode_seconds", 0.0)
        if limit and (seconds := self.seconds(indices)) > limit:
            raise ClipRefused(
                f"to decode the frames that are sampled takes about {seconds:.0f} s, more than "
                f"the {limit:g} s allowed; send a smaller or shorter one, sample fewer frames, give it a key "
                "frame every few seconds, or have --max-decode-seconds of the encoder workers raised",
                large=True,
            )
        for index in indices:
            if index != self._number or self._frame is None:
                self._frame = self._reach(index)
            picture = np.rot90(self._frame.to_ndarray(format="rgb24"), self._turns)
            if picture.shape[:2] != (size[1], size[0]):
                raise ClipRefused("its frames change their size; convert it to one size")
            yield np.ascontiguousarray(picture)

    def _key(self, index: int) -> int:
        """The number of the last frame up to `index` that decoding may begin at."""
        return self._keys[max(0, bisect.bisect_right(self._keys, index) - 1)]

    def _reach(self, index: int) -> Any:
        """The frame of this number, from where the decoder is or from the key frame before it."""
        key = self._key(index)
        if self._decoder is None or index <= self._number or key > self._number + 1:
            if key > 0:
                if (frame := self._advance(self._sought(key), index)) is not None:
                    return frame
                # Its frames depend on some before their key frame: it is decoded from the start.
                self._keys = [0]
            self._decoder, self._number = None, -1
        decoder = self._decoder or enumerate(container_frames(self._opened()))
        if (frame := self._advance(decoder, index)) is None:
            raise ClipRefused
        return frame

    def _advance(self, decoder: Iterator[tuple[int, Any]], index: int) -> Any:
        """The decoder's frame of this number, which goes on from there; None where it has no such frame."""
        for number, frame in decoder:
            if number == index:
                self._decoder, self._number = decoder, number
                return frame
            if number > index:
                break
        return None

    def _sought(self, key: int) -> Iterator[tuple[int, Any]]:
        """Frames with their numbers from this key frame on; it ends at one that is not whole or known."""
        container = self._opened()
        container.seek(self._times[key], stream=container.streams.video[0])
        for frame in container_frames(container):
            number = self._numbers.get(frame.pts)
            if number is None or frame.is_corrupt:
                return
            yield number, frame

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
    """The index, and the frames that are then asked for, again and again."""
    reader = Reader(file, limits)
    index = reader.index()
    out.write(json.dumps(index).encode() + b"\n")
    out.flush()
    for line in sys.stdin:
        for picture in reader.frames(json.loads(line), (int(index["width"]), int(index["height"]))):
            out.write(b"F")
            out.write(picture.data)
        out.flush()


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
    given = json.loads(sys.argv[2])
    resource.setrlimit(resource.RLIMIT_CPU, (given["cpu_seconds"], given["cpu_seconds"] + 1))
    main(int(sys.argv[1]), given)
