"""Digits from the audio demo in this process, or from a server with an OpenAI-compatible API."""

from __future__ import annotations

import json
import secrets
import urllib.request
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from triptych.apps.launch.model_path import AUDIO_DEMO_MODEL
from triptych.demo.tones import RATE, FloatArray, wav

MODEL_ID = "demo-audio"
_BATCH = 32


@dataclass(frozen=True)
class Timed:
    """What was written with times: all text, and the first segment with text in seconds, if there is one."""

    text: str
    start: float | None
    end: float | None


class Listener(Protocol):
    def plain(self, sounds: Sequence[FloatArray]) -> list[str]:
        """Texts written without times."""
        ...

    def timed(self, sounds: Sequence[FloatArray]) -> list[Timed]: ...


def _timed(text: str, segments: Sequence[tuple[float, float, str]]) -> Timed:
    said = [(start, end) for start, end, words in segments if words.strip()]
    start, end = said[0] if said else (None, None)
    return Timed(text.strip(), start, end)


class InProcess:
    """transformers' `generate` with the stored weights widened to fp32, greedy."""

    def __init__(self, folder: Path = AUDIO_DEMO_MODEL) -> None:
        import torch
        from transformers import AutoTokenizer, WhisperFeatureExtractor, WhisperForConditionalGeneration

        self._torch = torch
        self._tokenizer = AutoTokenizer.from_pretrained(folder)
        self._extractor = WhisperFeatureExtractor.from_pretrained(folder)
        self._model = WhisperForConditionalGeneration.from_pretrained(folder, dtype=torch.float32)
        self._model.eval()

    def _generate(self, sounds: Sequence[FloatArray], **options: Any) -> Any:
        # As the 16-bit file that a server gets.
        heard = [np.rint(waveform * 32767) / np.float32(32768) for waveform in sounds]
        features = self._extractor(heard, sampling_rate=RATE, return_tensors="pt")["input_features"]
        mask = self._torch.ones(features.shape[0], features.shape[2], dtype=self._torch.long)
        with self._torch.no_grad():
            return self._model.generate(features, attention_mask=mask, **options)

    def plain(self, sounds: Sequence[FloatArray]) -> list[str]:
        texts: list[str] = []
        for first in range(0, len(sounds), _BATCH):
            out = self._generate(sounds[first : first + _BATCH])
            texts += self._tokenizer.batch_decode(out, skip_special_tokens=True)
        return [text.strip() for text in texts]

    def timed(self, sounds: Sequence[FloatArray]) -> list[Timed]:
        out: list[Timed] = []
        for first in range(0, len(sounds), _BATCH):
            made = self._generate(
                sounds[first : first + _BATCH], return_timestamps=True, return_segments=True
            )
            for segments in made["segments"]:
                found = [(float(s["start"]), float(s["end"]), self._text(s["tokens"])) for s in segments]
                out.append(_timed("".join(text for _, _, text in found), found))
        return out

    def _text(self, ids: Any) -> str:
        return str(self._tokenizer.decode(ids, skip_special_tokens=True))


class Http:
    """POST /v1/audio/transcriptions, some files at a time."""

    def __init__(self, url: str, model: str = MODEL_ID, concurrency: int = 4) -> None:
        self._url, self._model = url.rstrip("/") + "/v1/audio/transcriptions", model
        self._concurrency = concurrency

    def _post(self, waveform: FloatArray, response_format: str) -> dict[str, Any]:
        boundary = secrets.token_hex(16)
        fields = {"model": self._model, "response_format": response_format}
        head = "".join(
            f'--{boundary}\r\nContent-Disposition: form-data; name="{name}"\r\n\r\n{value}\r\n'
            for name, value in fields.items()
        )
        file = f'--{boundary}\r\nContent-Disposition: form-data; name="file"; filename="tones.wav"\r\n\r\n'
        body = head.encode() + file.encode() + wav(waveform) + f"\r\n--{boundary}--\r\n".encode()
        kind = {"Content-Type": f"multipart/form-data; boundary={boundary}"}
        with urllib.request.urlopen(urllib.request.Request(self._url, body, kind), timeout=120) as reply:
            answer: dict[str, Any] = json.load(reply)
        return answer

    def plain(self, sounds: Sequence[FloatArray]) -> list[str]:
        with ThreadPoolExecutor(self._concurrency) as pool:
            return [reply["text"].strip() for reply in pool.map(lambda s: self._post(s, "json"), sounds)]

    def timed(self, sounds: Sequence[FloatArray]) -> list[Timed]:
        with ThreadPoolExecutor(self._concurrency) as pool:
            replies = list(pool.map(lambda s: self._post(s, "verbose_json"), sounds))
        return [
            _timed(reply["text"], [(s["start"], s["end"], s["text"]) for s in reply["segments"]])
            for reply in replies
        ]
