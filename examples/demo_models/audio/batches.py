"""From recordings to batches: the feature extractor's work done fast, and what the model shall write."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch.nn import functional
from transformers import WhisperTokenizer

from examples.demo_models.audio.checkpoint import make_extractor
from examples.demo_models.audio.recordings import WINDOW_SECONDS, Recording, random_recording, sound
from examples.demo_models.audio.tokens import END, NO_TIMES, START, STEP_SECONDS
from triptych.demo.tones import DIGITS, LONGEST, RATE

IGNORED = -100
_FRAMES_A_SECOND = 100
_AFTER = 0.04  # seconds from the last tone's end to the timestamp: the rest of the file has none of it
_NOTHING_PART, _REST_PART = 0.04, 0.08  # of the recordings: no digits; only what follows them


class LogMel:
    """Whisper's features of several waveforms, as transformers makes them of each."""

    def __init__(self) -> None:
        extractor = make_extractor()
        self._window = torch.hann_window(extractor.n_fft)
        self._size, self._hop = extractor.n_fft, extractor.hop_length
        self._filters = torch.from_numpy(np.asarray(extractor.mel_filters, dtype=np.float32)).T.contiguous()

    def __call__(self, waveforms: torch.Tensor) -> torch.Tensor:
        """[batch, samples] to [batch, mels, frames]."""
        spectrum = torch.stft(waveforms, self._size, self._hop, window=self._window, return_complex=True)
        power = torch.view_as_real(spectrum[..., :-1]).square().sum(-1)
        logs = torch.clamp(self._filters @ power, min=1e-10).log10()
        floor = logs.amax(dim=(1, 2), keepdim=True) - 8.0
        return (torch.maximum(logs, floor) + 4.0) / 4.0


@dataclass
class Batch:
    features: torch.Tensor  # [batch, mels, frames]
    ids: torch.Tensor  # [batch, length]
    labels: torch.Tensor  # [batch, length]: the next token where it is learnt, else IGNORED
    digit: torch.Tensor  # [batch, rows]: of the tone at a row, 10 where there is none
    count: torch.Tensor  # [batch, rows]: tones begun so far


def step_of(seconds: float) -> int:
    """The nearest timestamp, counted from 0.00."""
    return min(max(round(seconds / STEP_SECONDS), 0), round(WINDOW_SECONDS / STEP_SECONDS))


def end_step(recording: Recording) -> int:
    """The timestamp behind the last tone."""
    return step_of(math.ceil((recording.tones[-1].end + _AFTER) / STEP_SECONDS) * STEP_SECONDS)


class Writer:
    """What the model shall write of a recording.

    The closing timestamp is said twice, as Whisper does where another segment may follow: the server reads a
    segment's own beginning only where one is closed like this.
    """

    def __init__(self, tokenizer: WhisperTokenizer) -> None:
        self._start, self._end, self._none = (
            int(tokenizer.convert_tokens_to_ids(token)) for token in (START, END, NO_TIMES)
        )
        self._digits = {digit: int(tokenizer.convert_tokens_to_ids(digit)) for digit in DIGITS}

    def write(self, recording: Recording, *, timed: bool) -> tuple[list[int], list[int]]:
        """Token ids, and the labels of each next token."""
        digits = [self._digits[digit] for digit in recording.digits]
        if not timed:
            ids = [self._start, self._none, *digits, self._end]
            return ids[:-1], [IGNORED, *ids[2:]]
        times = (
            [self._none + 1 + step for step in (step_of(recording.tones[0].start), end_step(recording))]
            if digits
            else []
        )
        said = [times[0], *digits, times[1], times[1]] if digits else [self._none + 1]
        ids = [self._start, *said, self._end]
        return ids[:-1], ids[1:]


def row_labels(recording: Recording, rows: int) -> tuple[torch.Tensor, torch.Tensor]:
    """[rows] each: the digit that sounds at a row's time (10: none), and the tones begun until then."""
    digit = torch.full((rows,), len(DIGITS))
    count = torch.zeros(rows, dtype=torch.long)
    for tone in recording.tones:
        first, last = math.ceil(tone.start * 50), math.floor(tone.end * 50)
        digit[first : last + 1] = int(tone.digit)
        count[first:] += 1
    return digit, count


def random_recordings(
    random: np.random.Generator, size: int, seconds: float, longest: int
) -> list[Recording]:
    """Recordings of up to `longest` digits, the long ones more often, in `seconds`; some of none."""
    weights = np.arange(1, longest + 1) + 2.0
    lengths = random.choice(np.arange(1, longest + 1), size, p=weights / weights.sum())
    lengths[random.random(size) < _NOTHING_PART] = 0
    return [random_recording(random, int(length), room=seconds - 0.1) for length in lengths]


def training_batch(
    random: np.random.Generator, writer: Writer, log_mel: LogMel, size: int, seconds: float, longest: int
) -> Batch:
    """`size` recordings in windows of `seconds`, which may be shorter than the model's."""
    recordings = random_recordings(random, size, seconds, min(longest, LONGEST))
    frames = round(seconds * _FRAMES_A_SECOND)
    waveforms = np.zeros((size, round(seconds * RATE)), dtype=np.float32)
    for row, recording in enumerate(recordings):
        heard = sound(recording)
        waveforms[row, : len(heard)] = heard
    features = log_mel(torch.from_numpy(waveforms))
    for row, recording in enumerate(recordings):
        if recording.tones and random.random() < _REST_PART:
            recordings[row] = replace(recording, tones=())
            features[row] = rest_of(features[row], recording)
    return collate(recordings, features[:, :, :frames], writer, (random.random(size) < 0.5).tolist())


def rest_of(features: torch.Tensor, recording: Recording) -> torch.Tensor:
    """The window that the server makes of what follows the recording: [mels, frames], padded with zeros."""
    start = 2 * end_step(recording)
    return functional.pad(features[:, start:], (0, min(start, features.shape[1])))


def collate(
    recordings: Sequence[Recording], features: torch.Tensor, writer: Writer, timed: Sequence[bool]
) -> Batch:
    written = [
        writer.write(recording, timed=bool(own)) for recording, own in zip(recordings, timed, strict=True)
    ]
    length = max(len(ids) for ids, _ in written)
    rows = [row_labels(recording, features.shape[2] // 2) for recording in recordings]
    return Batch(
        features=features,
        ids=torch.tensor([ids + [0] * (length - len(ids)) for ids, _ in written]),
        labels=torch.tensor([own + [IGNORED] * (length - len(own)) for _, own in written]),
        digit=torch.stack([digit for digit, _ in rows]),
        count=torch.stack([count for _, count in rows]),
    )
