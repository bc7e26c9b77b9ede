"""Audio preprocessing: files to log-mel features, computed once per file."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Protocol

import numpy as np
import torch
from transformers import WhisperFeatureExtractor

from triptych.base.errors import ConfigError
from triptych.base.types import JsonObject
from triptych.models.checkpoint.folder import read_json

_REMEDY = "give MODEL=/folder with preprocessor_config.json"


class AudioFile(Protocol):
    """An audio file, decoded on demand."""

    @property
    def digest(self) -> str:
        """Of the file's bytes."""
        ...

    def waveform(self, rate: int) -> np.ndarray:
        """float32 [samples] at `rate` per second, mono. InvalidRequest for what is no audio."""
        ...


@dataclass(frozen=True, slots=True)
class Silence:
    """An `AudioFile` of silence."""

    seconds: float = 0.5
    digest: str = "silence"

    def waveform(self, rate: int) -> np.ndarray:
        return np.zeros(int(rate * self.seconds), dtype=np.float32)


class Features:
    """The checkpoint's feature extractor, for whole files. Dithering is refused: it draws random numbers."""

    def __init__(self, path: Path) -> None:
        settings = read_json(path / "preprocessor_config.json")
        if settings is None:
            settings = (read_json(path / "processor_config.json") or {}).get("feature_extractor")
        if not settings:
            raise ConfigError(f"MODEL={path} has no feature extractor: {_REMEDY}")
        kind = settings.get("feature_extractor_type", "WhisperFeatureExtractor")
        if kind != "WhisperFeatureExtractor":
            raise ConfigError(f"MODEL={path} wants {kind}: only WhisperFeatureExtractor is known")
        try:
            self._extractor = WhisperFeatureExtractor.from_dict(settings)
        except (ValueError, KeyError, TypeError) as error:
            raise ConfigError(f"MODEL={path}: its feature extractor cannot be loaded: {error}") from error
        if self._extractor.dither:
            raise ConfigError(f"MODEL={path} dithers its audio: set dither to 0 in preprocessor_config.json")
        self.rate = int(self._extractor.sampling_rate)
        self.hop = int(self._extractor.hop_length)
        #: Frames that the tower takes at once.
        self.window = int(self._extractor.nb_max_frames)

    @property
    def config(self) -> JsonObject:
        """All that decides the features, with what decodes and resamples."""
        settings = dict(self._extractor.to_dict())
        for name in ("mel_filters", "processor_class", "_name_or_path"):
            settings.pop(name, None)
        return {"settings": settings, **{name: version(name) for name in ("soundfile", "soxr")}}

    def __call__(self, waveform: np.ndarray) -> torch.Tensor:
        """[mels, frames] of a whole file: up to a window padded with silence first, longer ones as they are.

        The floor is set by the loudest frame of all, so that a file cut first would have other features.
        """
        whole = {"truncation": False, "padding": "longest"}
        options: JsonObject = whole if len(waveform) > self._extractor.n_samples else {}
        out = self._extractor(waveform, sampling_rate=self.rate, return_tensors="pt", **options)
        features: torch.Tensor = out["input_features"][0]
        return features

    def real_frames(self, waveform: np.ndarray) -> int:
        """Frames of the file itself, at least one."""
        return max(1, len(waveform) // self.hop)


class FeatureCache:
    """An LRU cache of features by file digest, up to `capacity` bytes; the newest always stays.

    Callable from several threads: a file asked for twice at once is computed once.
    """

    def __init__(self, capacity: int) -> None:
        self._capacity = capacity
        self._entries: OrderedDict[str, tuple[torch.Tensor, int]] = OrderedDict()
        self._working: dict[str, threading.Lock] = {}
        self._lock = threading.Lock()

    def get(self, digest: str, compute: Callable[[], tuple[torch.Tensor, int]]) -> tuple[torch.Tensor, int]:
        """(features, real frames) of a file; `compute`'s errors are raised and not kept."""
        with self._lock:
            turn = self._working.setdefault(digest, threading.Lock())
        with turn:
            with self._lock:
                if digest in self._entries:
                    self._entries.move_to_end(digest)
                    return self._entries[digest]
            try:
                entry = compute()
            finally:
                with self._lock:
                    self._working.pop(digest, None)
            with self._lock:
                self._entries[digest] = entry
                while len(self._entries) > 1 and self.nbytes > self._capacity:
                    self._entries.popitem(last=False)
            return entry

    @property
    def nbytes(self) -> int:
        """Bytes of all features held."""
        return sum(tensor.numel() * tensor.element_size() for tensor, _ in self._entries.values())
