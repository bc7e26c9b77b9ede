"""Video files, made by PyAV: of every container and codec that is decoded, and hostile ones."""

from __future__ import annotations

import io
import struct
from collections.abc import Callable, Sequence
from fractions import Fraction
from typing import Any

import av
import numpy as np

#: Containers with their codecs, as `make_clip` takes them.
KINDS = (
    ("mp4", "libx264", "yuv420p"),
    ("mov", "libx264", "yuv420p"),
    ("mp4", "mpeg4", "yuv420p"),
    ("mp4", "libx265", "yuv420p"),
    ("webm", "libvpx", "yuv420p"),
    ("webm", "libvpx-vp9", "yuv420p"),
    ("gif", "gif", "rgb8"),
)


def moving(index: int, width: int, height: int) -> np.ndarray:
    """A frame [height, width, 3] with waves that move: every index is another picture."""
    y, x = np.mgrid[0:height, 0:width]
    waves = [127 + 127 * np.sin(0.11 * x * (i + 1) + 0.07 * y + 0.5 * index + i) for i in range(3)]
    return np.stack(waves, -1).astype(np.uint8)


def make_clip(
    container: str = "mp4",
    codec: str = "libx264",
    pixels: str = "yuv420p",
    *,
    frames: int = 24,
    size: tuple[int, int] = (64, 48),
    rate: int = 8,
    times: Sequence[int] | None = None,
    sound: bool = False,
    options: dict[str, str] | None = None,
    draw: Callable[[int, int, int], np.ndarray] = moving,
    **settings: Any,
) -> bytes:
    """A file of moving waves; `times` are the frames' times in units of 1 / rate, for a variable rate."""
    data = io.BytesIO()
    quiet = {"x265-params": "log-level=none"} if codec == "libx265" else {}
    with av.open(data, "w", format=container, options=options) as file:
        stream: Any = file.add_stream(codec, rate=rate, options=quiet)
        stream.width, stream.height, stream.pix_fmt = *size, pixels
        stream.codec_context.time_base = Fraction(1, rate)
        for name, value in settings.items():
            setattr(stream.codec_context, name, value)
        tone: Any = file.add_stream("aac", rate=8000) if sound else None
        for index in range(frames):
            frame = av.VideoFrame.from_ndarray(draw(index, *size), format="rgb24")
            frame.pts, frame.time_base = (times or range(frames))[index], Fraction(1, rate)
            file.mux(stream.encode(frame))
        file.mux(stream.encode())
        if tone is not None:
            for _ in range(8):
                silence = av.AudioFrame.from_ndarray(np.zeros((1, 1024), np.float32), "fltp", "mono")
                silence.sample_rate = 8000
                file.mux(tone.encode(silence))
            file.mux(tone.encode())
    return data.getvalue()


def turned(clip: bytes) -> bytes:
    """An MP4 that is shown turned by a quarter, as telephones write it: by its track's matrix."""
    at = clip.index(b"tkhd") + 4 + 40
    matrix = struct.pack(">9i", 0, 1 << 16, 0, -(1 << 16), 0, 0, 0, 0, 1 << 30)
    return clip[:at] + matrix + clip[at + 36 :]


def sound_only() -> bytes:
    """An MP4 with sound and no picture."""
    data = io.BytesIO()
    with av.open(data, "w", format="mp4") as file:
        tone: Any = file.add_stream("aac", rate=8000)
        for _ in range(8):
            silence = av.AudioFrame.from_ndarray(np.zeros((1, 1024), np.float32), "fltp", "mono")
            silence.sample_rate = 8000
            file.mux(tone.encode(silence))
        file.mux(tone.encode())
    return data.getvalue()


def without_frames() -> bytes:
    """An MP4 whose track has no packet: a fragmented one without its fragments."""
    whole = make_clip(options={"movflags": "empty_moov+frag_keyframe"})
    return whole[: whole.index(b"moof") - 4]


def huge_header() -> bytes:
    """An MP4 whose media box says that it has 10 GB."""
    clip = make_clip()
    at = clip.index(b"mdat") - 4
    box = struct.pack(">I4sQ", 1, b"mdat", 10 << 30)
    return clip[:at] + box + clip[at + 8 :]


def endless() -> bytes:
    """A GIF of one pixel with more than 100,000 frames: the blocks of its frames, repeated."""
    gif = make_clip("gif", "gif", "rgb8", size=(1, 1), frames=3)
    at = gif.index(b"\x21\xf9")
    return gif[:at] + gif[at:-1] * 34_000 + gif[-1:]


def changing_size() -> bytes:
    """A WebM whose stream goes on with pictures of another size."""
    data = io.BytesIO()
    with av.open(data, "w", format="webm") as file:
        stream: Any = file.add_stream("libvpx", rate=8)
        stream.width, stream.height, stream.pix_fmt = 64, 48, "yuv420p"
        stream.codec_context.time_base = Fraction(1, 8)
        clock = 0
        for size in ((64, 48), (96, 64)):
            other: Any = av.CodecContext.create("libvpx", "w")
            other.width, other.height, other.pix_fmt, other.time_base = *size, "yuv420p", Fraction(1, 8)
            frames = [av.VideoFrame.from_ndarray(moving(n, *size), format="rgb24") for n in range(8)]
            for frame in frames:
                frame.pts, frame.time_base = clock, Fraction(1, 8)
                clock += 1
            for packet in [p for frame in frames for p in other.encode(frame)] + other.encode():
                packet.stream = stream
                file.mux(packet)
    return data.getvalue()


def with_hidden_frame() -> bytes:
    """A VP8 clip of 24 packets, one of which is only referred to."""
    data = io.BytesIO()
    whole: Any
    with av.open(io.BytesIO(make_clip("webm", "libvpx"))) as whole, av.open(data, "w", format="webm") as file:
        stream = file.add_stream_from_template(whole.streams.video[0])
        packets = [packet for packet in whole.demux(video=0) if packet.size]
        for number, packet in enumerate(packets):
            content = bytearray(bytes(packet))
            if number == 5:
                content[0] &= ~0x10
            copy = av.Packet(bytes(content))
            copy.pts, copy.dts, copy.time_base = packet.pts, packet.dts, packet.time_base
            copy.is_keyframe, copy.stream = packet.is_keyframe, stream
            file.mux(copy)
    return data.getvalue()
