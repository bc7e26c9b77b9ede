"""Random recordings: what is dialled, how fast, how loud, in how much noise."""

from __future__ import annotations

import math
import zlib
from dataclasses import dataclass

import numpy as np

from triptych.demo.tones import DIGITS, RATE, FloatArray, Tone, play

WINDOW_SECONDS = 5
_HELD_OUT_PART = 10  # one string of so many is never trained on
_SHORTEST_GAP = 0.05  # seconds


@dataclass(frozen=True)
class Recording:
    """`snr` is the tones' power over the noise's in dB, None for no noise at all."""

    tones: tuple[Tone, ...]
    seconds: float
    snr: float | None
    coloured: bool
    level: float
    pitch: float
    twist: float  # dB, high over low
    seed: int

    @property
    def digits(self) -> str:
        return "".join(tone.digit for tone in self.tones)


def held_out(digits: str) -> bool:
    """Whether a string of digits is kept from training."""
    return zlib.crc32(digits.encode()) % _HELD_OUT_PART == 0


def random_digits(random: np.random.Generator, length: int, *, kept_out: bool) -> str:
    """Every second string or so has digits that follow each other, which are the hardest."""
    while True:
        ids = random.integers(0, 10, length)
        for index in range(1, length):
            if random.random() < 0.12:
                ids[index] = ids[index - 1]
        digits = "".join(DIGITS[k] for k in ids)
        # Strings too short to be tested are trained whole.
        if length < 3 or held_out(digits) == kept_out:
            return digits


def _cadence(random: np.random.Generator, digits: str, room: float) -> tuple[Tone, ...]:
    """Keys of uneven length with uneven gaps, in `room` seconds."""
    tone, gap = random.uniform(0.07, 0.24), random.uniform(_SHORTEST_GAP, 0.24)
    lengths = tone * random.uniform(0.85, 1.2, len(digits))
    gaps = np.maximum(gap * random.uniform(0.8, 1.3, len(digits)), _SHORTEST_GAP)
    if len(digits) > 1 and random.random() < 0.2:
        gaps[random.integers(0, len(digits) - 1)] += random.uniform(0.1, 0.5)
    rest = float(lengths.sum() + gaps[:-1].sum())
    # Some begin at once, and some late: else the last times of a window would hardly be learnt.
    latest = random.choice((0.0, 1.0, max(room - rest, 1.0)), p=(0.05, 0.65, 0.3))
    lead = random.uniform(0.0, latest)
    whole = lead + rest
    if whole > room:
        shrink = room / whole
        lead, lengths, gaps = lead * shrink, lengths * shrink, gaps * shrink
    tones, at = [], lead
    for digit, length, pause in zip(digits, lengths.tolist(), gaps.tolist(), strict=True):
        tones.append(Tone(digit, at, at + length))
        at += length + pause
    return tuple(tones)


def random_recording(
    random: np.random.Generator,
    length: int,
    *,
    kept_out: bool = False,
    room: float = WINDOW_SECONDS - 0.1,
    snr: float | None | str = "any",
) -> Recording:
    """`length` digits that end within `room` seconds; by default, `snr` is one of 5 to 40 dB, or None."""
    digits = random_digits(random, length, kept_out=kept_out)
    tones = _cadence(random, digits, room)
    end = tones[-1].end if tones else 0.0
    seconds = min(end + random.uniform(0.02, 1.2), room) if tones else random.uniform(0.2, room)
    if isinstance(snr, str):
        snr = None if random.random() < 0.2 else float(random.uniform(5, 40))
    return Recording(
        tones=tones,
        seconds=max(seconds, end),
        snr=snr,
        coloured=bool(random.random() < 0.3),
        level=float(10 ** random.uniform(-1.7, -0.05)),
        pitch=float(random.uniform(0.985, 1.015)),
        twist=float(random.uniform(-4, 4)),
        seed=int(random.integers(1 << 31)),
    )


def _noise(random: np.random.Generator, samples: int, coloured: bool) -> FloatArray:
    """Of power 1; coloured noise falls by 6 dB an octave from 200 Hz on."""
    white = random.standard_normal(samples, dtype=np.float32)
    if not coloured:
        return white
    spectrum = np.fft.rfft(white)
    hertz = np.fft.rfftfreq(samples, 1 / RATE)
    out = np.fft.irfft(spectrum / np.sqrt(1 + (hertz / 200) ** 2), samples).astype(np.float32)
    return out / np.float32(np.sqrt(np.mean(out**2)) + 1e-9)


def sound(recording: Recording) -> FloatArray:
    """float32 [samples] at 16 kHz in -1..1; the same recording always sounds the same."""
    random = np.random.default_rng(recording.seed)
    low, high = 10 ** (-recording.twist / 40), 10 ** (recording.twist / 40)
    out = play(recording.tones, recording.seconds, pitch=recording.pitch, low=low / 2, high=high / 2)
    if recording.snr is not None:
        power = (low**2 + high**2) / 8
        noise = _noise(random, len(out), recording.coloured)
        out = out + noise * np.float32(math.sqrt(power * 10 ** (-recording.snr / 10)))
    peak = float(np.abs(out).max()) if len(out) else 0.0
    return out * np.float32(recording.level / peak) if peak else out
