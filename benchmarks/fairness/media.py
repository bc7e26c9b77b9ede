"""Media that are small to send and long to decode, within all limits of an encoder worker."""

from __future__ import annotations

import functools
import io
import random
import struct
import zlib
from fractions import Fraction

import av
import numpy as np


def _chunk(name: bytes, data: bytes) -> bytes:
    return struct.pack(">I", len(data)) + name + data + struct.pack(">I", zlib.crc32(name + data))


def _png(width: int, height: int, colour: int, rows: bytes, level: int) -> bytes:
    header = struct.pack(">IIBBBBB", width, height, 8, colour, 0, 0, 0)
    parts = (
        _chunk(b"IHDR", header),
        _chunk(b"IDAT", zlib.compress(rows, level)),
        _chunk(b"IEND", b""),
    )
    return b"\x89PNG\r\n\x1a\n" + b"".join(parts)


def noise_png(width: int, height: int, seed: object) -> bytes:
    """A picture of noise: each seed gives another one."""
    source = random.Random(str(seed))
    rows = b"".join(b"\0" + source.randbytes(3 * width) for _ in range(height))
    return _png(width, height, 2, rows, 1)


@functools.cache
def tall_png(rows: int) -> bytes:
    """A grey picture of one column: each of its rows is a call of the decoder."""
    return _png(1, rows, 0, bytes(2 * rows), 9)


@functools.cache
def long_webm(frames: int, width: int = 1280, height: int = 720, rate: int = 120) -> bytes:
    """A key frame, then one frame that changes nothing again and again: the last needs all before it."""
    source, result = io.BytesIO(), io.BytesIO()
    pixels = np.zeros((height, width, 3), np.uint8)
    pixels[: height // 2, :, 0] = 200
    with av.open(source, "w", format="webm") as file:
        stream = file.add_stream("libvpx", rate=rate)
        stream.width, stream.height, stream.pix_fmt = width, height, "yuv420p"
        stream.codec_context.time_base = Fraction(1, rate)
        for index in range(4):
            frame = av.VideoFrame.from_ndarray(pixels, format="rgb24")
            frame.pts, frame.time_base = index, Fraction(1, rate)
            file.mux(stream.encode(frame))
        file.mux(stream.encode())
    with av.open(io.BytesIO(source.getvalue()), "r") as first, av.open(result, "w", format="webm") as second:
        stream = second.add_stream_from_template(first.streams.video[0])
        packets = [bytes(packet) for packet in first.demux(video=0) if packet.size]
        for index in range(frames):
            packet = av.Packet(packets[0] if index == 0 else packets[-1])
            packet.pts = packet.dts = index
            packet.time_base, packet.is_keyframe, packet.stream = Fraction(1, rate), index == 0, stream
            second.mux(packet)
    return result.getvalue()


@functools.cache
def wide_flac(seconds: int, channels: int = 8, rate: int = 192_000) -> bytes:
    """Silence in as many samples a second as are allowed."""
    result = io.BytesIO()
    with av.open(result, "w", format="flac") as file:
        stream = file.add_stream("flac", rate=rate)
        stream.codec_context.layout = "7.1" if channels == 8 else "stereo"
        stream.codec_context.format = "s16"
        frame = av.AudioFrame.from_ndarray(
            np.zeros((1, rate * channels), np.int16), format="s16", layout=stream.codec_context.layout.name
        )
        frame.sample_rate = rate
        for _ in range(seconds):
            frame.pts = None
            file.mux(stream.encode(frame))
        file.mux(stream.encode())
    return result.getvalue()
