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
#: Digits that the audio demo writes down at once.
LONGEST = 8
_LOW = (697.0, 770.0, 852.0, 941.0)  # Hz, rows of the keypad
_HIGH = (1209.0, 1336.0, 1477.0)  # Hz, its columns
_KEYPAD = ("123", "456", "789", " 0 ")
_RAMP = 0.004  # seconds from nothing to full loudness

FloatArray = npt.NDArray[np.float32]


@dataclass(frozen=True)
class Tone:
    """One digit, from `start` to `end` in seconds."""

    digit: str
    start: float
    end: float


def pitches(digit: str) -> tuple[float, float]:
    """The digit's two frequencies in Hz. ValueError for what is no digit."""
    if len(digit) != 1 or digit not in DIGITS:
        raise ValueError(f"{digit!r} is no digit: give one of {DIGITS}")
    row = next(row for row, line in enumerate(_KEYPAD) if digit in line)
    return _LOW[row], _HIGH[_KEYPAD[row].index(digit)]


def dial(digits: str, *, tone: float = 0.15, gap: float = 0.1, lead: float = 0.4) -> tuple[Tone, ...]:
    """Even dialling: `lead` seconds of nothing, then each digit `tone` seconds long, `gap` between."""
    starts = [lead + index * (tone + gap) for index in range(len(digits))]
    return tuple(Tone(digit, start, start + tone) for digit, start in zip(digits, starts, strict=True))


def play(
    tones: Sequence[Tone], seconds: float, *, pitch: float = 1.0, low: float = 0.5, high: float = 0.5
) -> FloatArray:
    """float32 [samples] in -1..1: the tones, and nothing between.

    `pitch` multiplies every frequency; `low` and `high` are the amplitudes of the two pitches.
    """
    out = np.zeros(round(seconds * RATE), dtype=np.float32)
    for tone in tones:
        first, last = round(tone.start * RATE), min(round(tone.end * RATE), len(out))
        turns = np.arange(last - first, dtype=np.float32) * np.float32(2 * np.pi * pitch / RATE)
        below, above = pitches(tone.digit)
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
    tones = dial(digits)
    return wav(play(tones, tones[-1].end + 0.4 if tones else 0.8))
