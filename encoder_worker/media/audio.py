"""Audio files to mono waveforms: known formats only, block by block, within limits."""

from __future__ import annotations

import functools
import io
import logging
from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import soundfile
import soxr
from blake3 import blake3

from triptych.base.errors import InvalidRequest, TooLarge
from triptych.encoder_worker.media.decoder_process import DecoderProcess

logger = logging.getLogger(__name__)

#: Containers that may be decoded, of the two dozen that libsndfile knows: untrusted bytes reach no others.
FORMATS = ("WAV", "WAVEX", "FLAC", "OGG", "MP3", "MPEG")
_NAMES = "WAV, FLAC, MP3, Ogg (Vorbis, Opus), M4A or WebM"
_CHANNELS = 8
_RATES = (1000, 192_000)
#: Largest sample; 1 is full scale, but some tools write the range of integers into floats.
_LOUDEST = float(1 << 32)
#: Frames decoded at a time.
_BLOCK = 1 << 16


@dataclass(frozen=True)
class AudioLimits:
    """Limits of one decoded file."""

    seconds: float = 1800.0
    decode_seconds: float = 120.0


class MediaAudio:
    """One item's file; see `triptych.models.audio.AudioFile`."""

    def __init__(self, data: bytes, limits: AudioLimits) -> None:
        self._data = data
        self._limits = limits

    @functools.cached_property
    def digest(self) -> str:
        return blake3(self._data).hexdigest()

    def waveform(self, rate: int) -> np.ndarray:
        return decode_audio(self._data, rate, self._limits)


def decode_audio(data: bytes, rate: int, limits: AudioLimits) -> np.ndarray:
    """float32 [samples] at `rate`: the mean of the channels, resampled by soxr's high quality.

    TooLarge beyond the limits; InvalidRequest(param "audio") for unknown formats, for files without a
    sample and for damaged ones. The messages never repeat the decoder's.
    """
    if is_container(data):
        with SoundProcess(data, limits) as process:
            parts = list(_resampled(process.blocks(), process.rate, rate))
    elif is_audio(data):
        parts = _decoded(data, rate, limits)
    else:
        raise _refused(f"not a {_NAMES} file; send one of these formats")
    waveform = np.concatenate(parts) if parts else np.zeros(0, dtype=np.float32)
    if not len(waveform):
        raise _refused("the file has no samples; send one with audio in it")
    if not np.isfinite(waveform).all():
        raise _refused("the file has samples that are NaN or infinite; send one with finite samples")
    if np.abs(waveform).max() > _LOUDEST:
        raise _refused("the file has samples far beyond full scale, which is 1; scale them down")
    return waveform


def is_audio(data: bytes) -> bool:
    """Whether the first bytes are of a format that libsndfile decodes here."""
    return (
        (data[:4] in (b"RIFF", b"RF64") and data[8:12] == b"WAVE")
        or data[:4] in (b"fLaC", b"OggS")
        or data[:3] == b"ID3"
        or (len(data) > 1 and data[0] == 0xFF and data[1] & 0xE0 == 0xE0)
    )


def is_container(data: bytes) -> bool:
    """Whether they are of one that PyAV decodes: MP4 (M4A) or WebM."""
    return data[4:8] == b"ftyp" or data[:4] == b"\x1a\x45\xdf\xa3"


class SoundProcess(DecoderProcess):
    """The samples of an M4A or WebM file, decoded by a process. To be closed."""

    noun: ClassVar[str] = "audio"
    format: ClassVar[str] = "M4A"

    def __init__(self, data: bytes, limits: AudioLimits) -> None:
        given = {"seconds": limits.seconds, "channels": _CHANNELS}
        super().__init__(data, {**given, "min_rate": _RATES[0], "max_rate": _RATES[1]}, limits.decode_seconds)

    @functools.cached_property
    def rate(self) -> int:
        return int(self.line("rate")["rate"])

    def blocks(self) -> Iterator[np.ndarray]:
        """Mono, float32."""
        while (mark := self.stdout.read(1)) == b"F":
            nbytes = 4 * int.from_bytes(self.stdout.read(4), "little")
            content = self.stdout.read(nbytes)
            if len(content) != nbytes:
                raise self.refused()
            yield np.frombuffer(content, dtype=np.float32)
        if mark != b"\n":
            raise self.refused(mark)


def _decoded(data: bytes, rate: int, limits: AudioLimits) -> list[np.ndarray]:
    try:
        with soundfile.SoundFile(io.BytesIO(data)) as file:
            _check(file, limits)
            return list(_resampled(_blocks(file, limits), file.samplerate, rate))
    except InvalidRequest:
        raise
    except Exception as error:  # libsndfile's errors, and numpy's for impossible headers
        logger.info("audio could not be decoded (%s)", type(error).__name__)
        raise _refused("the file is truncated or damaged and cannot be decoded") from None


def _blocks(file: soundfile.SoundFile, limits: AudioLimits) -> Iterator[np.ndarray]:
    """Mono, block by block, so that a small file of endless length is stopped at the limit."""
    seen, limit = 0, int(limits.seconds * file.samplerate)
    while len(block := file.read(_BLOCK, dtype="float32", always_2d=True)):
        seen += len(block)
        if seen > limit:
            raise _too_long(limits)
        yield block[:, 0] if block.shape[1] == 1 else block.mean(axis=1, dtype=np.float32)


def _resampled(blocks: Iterator[np.ndarray], given: int, rate: int) -> Iterator[np.ndarray]:
    stream = None if given == rate else soxr.ResampleStream(given, rate, 1, "float32")
    for block in blocks:
        yield block if stream is None else stream.resample_chunk(np.ascontiguousarray(block))
    if stream is not None:
        yield stream.resample_chunk(np.zeros(0, dtype=np.float32), last=True)


def _check(file: soundfile.SoundFile, limits: AudioLimits) -> None:
    """Checks the header before anything is decoded."""
    if file.format not in FORMATS:
        raise _refused(f"not a {_NAMES} file; send one of these formats")
    if not 1 <= file.channels <= _CHANNELS:
        raise _refused(f"{file.channels} channels; send at most {_CHANNELS}")
    if not _RATES[0] <= file.samplerate <= _RATES[1]:
        raise _refused(f"{file.samplerate} samples a second; send {_RATES[0]} to {_RATES[1]}")
    if file.frames < 1 << 62 and file.frames > limits.seconds * file.samplerate:
        raise _too_long(limits)


def _too_long(limits: AudioLimits) -> TooLarge:
    return TooLarge(f"audio: longer than {limits.seconds:g} s; send a shorter file", param="audio")


def _refused(why: str) -> InvalidRequest:
    return InvalidRequest(f"audio: {why}", param="audio")
