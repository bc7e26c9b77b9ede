"""Sound files that PyAV makes: of every container and codec that is decoded, and hostile ones."""

from __future__ import annotations

import io
from fractions import Fraction
from typing import Any

import av
import numpy as np

from support.data.sounds import sound

#: Containers with their codecs and rates.
KINDS = (
    ("ipod", "aac", 44_100),
    ("mp4", "aac", 16_000),
    ("mp4", "alac", 48_000),
    ("webm", "libopus", 48_000),
    ("matroska", "flac", 32_000),
)


def encoded(container: str, codec: str, rate: int, waveform: np.ndarray, *, layout: str = "mono") -> bytes:
    """A file of float32 samples [n] in each of the layout's channels."""
    data = io.BytesIO()
    with av.open(data, "w", format=container) as file:
        stream: Any = file.add_stream(codec, rate=rate)
        stream.layout = layout
        plane = np.ascontiguousarray(np.tile(waveform, (stream.codec_context.channels, 1)))
        frame = av.AudioFrame.from_ndarray(plane, "fltp", layout)
        frame.sample_rate, frame.pts = rate, 0
        file.mux(stream.encode(frame))
        file.mux(stream.encode())
    return data.getvalue()


def spoken(container: str = "webm", codec: str = "libopus", rate: int = 48_000) -> bytes:
    """A second."""
    return encoded(container, codec, rate, sound(1.0, seed=3, rate=rate))


def hours(count: int) -> bytes:
    """That many hours of silence as Opus in WebM: the packets of one minute, repeated."""
    data, minute = io.BytesIO(), np.zeros((1, 48_000 * 60), np.float32)
    with av.open(data, "w", format="webm") as file:
        stream: Any = file.add_stream("libopus", rate=48_000, options={"frame_duration": "120"})
        stream.layout = "mono"
        frame = av.AudioFrame.from_ndarray(minute, "fltp", "mono")
        frame.sample_rate, frame.pts = 48_000, 0
        packets = [bytes(packet) for packet in stream.encode(frame)]
        for number in range(count * 60):
            for at, content in enumerate(packets):
                packet = av.Packet(content)
                packet.stream, packet.time_base = stream, Fraction(1, 1000)
                packet.pts = packet.dts = 120 * (number * len(packets) + at)
                file.mux(packet)
    return data.getvalue()
