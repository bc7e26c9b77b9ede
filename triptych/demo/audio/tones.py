"""Dial tones (DTMF): each digit is two pitches at once. Imports numpy alone."""

from __future__ import annotations

import io
import wave
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

RATE = 16_000  # samples a second
DIGITS = "0123456789"
_LOW = (697.0, 770.0, 852.0, 941.0)  # Hz, rows of the keypad
_HIGH = (1209.0, 1336.0, 1477.0)  # Hz, its columns
_KEYPAD = ("123", "456", "789", " 0 ")
_RAMP = 0.004  # seconds from nothing to full loudness

FloatArray = npt.NDArray[np.float32]


@dataclass(frozen=True)
class Key:
    """One digit, from `start` to `end` in seconds."""

    digit: str
    start: float
    end: float


def pitches(digit: str) -> tuple[float, float]:
    """The digit's two frequencies in Hz. ValueError for what is no digit."""
    if len(digit) != 1 or digit not in DIGITS:
        raise ValueError(f"{digit!r} is no digit: give one of {DIGITS}")
    row = next(row for row, keys in enumerate(_KEYPAD) if digit in keys)
    return _LOW[row], _HIGH[_KEYPAD[row].index(digit)]


def dial(digits: str, *, tone: float = 0.15, gap: float = 0.1, lead: float = 0.4) -> tuple[Key, ...]:
    """Even dialling: `lead` seconds of nothing, then each digit `tone` seconds long, `gap` between."""
    starts = [lead + index * (tone + gap) for index in range(len(digits))]
    return tuple(Key(digit, start, start + tone) for digit, start in zip(digits, starts, strict=True))


def tones(
    keys: Sequence[Key], seconds: float, *, pitch: float = 1.0, low: float = 0.5, high: float = 0.5
) -> FloatArray:
    """float32 [samples] in -1..1: the keys' tones and nothing between.

    `pitch` multiplies every frequency; `low` and `high` are the amplitudes of the two pitches.
    """
    out = np.zeros(round(seconds * RATE), dtype=np.float32)
    for key in keys:
        first, last = round(key.start * RATE), min(round(key.end * RATE), len(out))
        turns = np.arange(last - first, dtype=np.float32) * np.float32(2 * np.pi * pitch / RATE)
        below, above = pitches(key.digit)
        shape = np.minimum(1.0, np.arange(last - first, dtype=np.float32) / (_RAMP * RATE))
        sound = low * np.sin(turns * np.float32(below)) + high * np.sin(turns * np.float32(above))
        out[first:last] = sound * shape * shape[::-1]
    return out


def wav(waveform: FloatArray) -> bytes:
    """A WAV file of 16 bits a sample, one channel."""
    samples = np.clip(np.rint(waveform * 32767), -32768, 32767).astype("<i2")
    out = io.BytesIO()
    with wave.open(out, "wb") as file:
        file.setnchannels(1)
        file.setsampwidth(2)
        file.setframerate(RATE)
        file.writeframes(samples.tobytes())
    return out.getvalue()


def tones_file(digits: str) -> bytes:
    """A WAV file of the digits dialled evenly, with a pause before and after. ValueError as in `pitches`."""
    keys = dial(digits)
    return wav(tones(keys, keys[-1].end + 0.4 if keys else 0.8))
