"""Sound made on the spot."""

from __future__ import annotations

import io
from typing import Any

import numpy as np
import soundfile


def sound(seconds: float, *, seed: int = 0, rate: int = 16_000) -> np.ndarray:
    """Noise whose loudness changes ten times a second, float32 [samples]."""
    random = np.random.default_rng(seed)
    samples = int(seconds * rate)
    loudness = np.repeat(random.random(int(seconds * 10) + 1), rate // 10 + 1)[:samples]
    return (0.3 * random.standard_normal(samples) * loudness).astype(np.float32)


def tone(seconds: float, hertz: float, *, rate: int = 16_000) -> np.ndarray:
    """One pitch, float32 [samples]."""
    return (0.4 * np.sin(2 * np.pi * hertz * np.arange(int(seconds * rate)) / rate)).astype(np.float32)


class Sound:
    """An `AudioFile` of a waveform at the model's rate; `decoded` counts how often it was asked for."""

    def __init__(self, waveform: np.ndarray) -> None:
        self._waveform = waveform
        self.digest = str(hash(waveform.tobytes()))
        self.decoded = 0

    def waveform(self, rate: int) -> np.ndarray:
        self.decoded += 1
        return self._waveform


def audio_file(waveform: np.ndarray, rate: int, kind: str, **options: Any) -> bytes:
    """A file of `kind` (WAV, FLAC, OGG, MP3) with float32 samples [n] or [n, channels]."""
    out = io.BytesIO()
    soundfile.write(out, waveform, rate, format=kind, **options)
    return out.getvalue()
