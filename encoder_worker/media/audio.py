"""Audio files to mono waveforms: known formats only, block by block, within limits."""

from __future__ import annotations

import contextlib
import functools
import io
import logging
import math
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import soundfile
import soxr
from blake3 import blake3

from triptych.base.errors import InvalidRequest, TooLarge
from triptych.encoder_worker.media.cost import sound_seconds
from triptych.encoder_worker.media.decoder_process import DecoderProcess, package_root
from triptych.encoder_worker.media.work import CHEAP_SECONDS, DecodeWork

logger = logging.getLogger(__name__)

#: Containers that may be decoded, of the two dozen that libsndfile knows: untrusted bytes reach no others.
FORMATS = ("WAV", "WAVEX", "FLAC", "OGG", "MP3", "MPEG")
_LOSSLESS = ("WAV", "WAVEX", "FLAC")
_NAMES = "WAV, FLAC, MP3, Ogg (Vorbis, Opus), M4A or WebM"
_CHANNELS = 8
_RATES = (1000, 192_000)
#: Largest sample; 1 is full scale, but some tools write the range of integers into floats.
_LOUDEST = float(1 << 32)
#: Frames decoded at a time.
_BLOCK = 1 << 16
#: Host memory that a second takes until its features are computed, and bytes of a file that a second has at
#: the least, where no header says how long it is.
_BYTES_PER_SECOND, _LEAST_BYTES = 512 << 10, 2000
#: CPU seconds after which a thread gives a file up whose header says that it is decoded in `CHEAP_SECONDS`.
_LIAR_SECONDS = 8 * CHEAP_SECONDS


@dataclass(frozen=True)
class AudioLimits:
    """Limits of one decoded file."""

    seconds: float = 1800.0
    decode_seconds: float = 30.0


class MediaAudio:
    """One item's file; see `triptych.models.audio.AudioFile`. TooHeavy for one that is no `work` of a thread.

    The header is read at once: other files' features are not waited for by work that cannot be ended.
    """

    def __init__(self, data: bytes, limits: AudioLimits, work: DecodeWork | None = None) -> None:
        self._data = data
        self._limits = limits
        self._work = work
        self._nbytes = 0
        #: libsndfile decodes it, in a process if that takes long.
        self._long = False
        if work is not None:
            self._expect(work)

    def _expect(self, work: DecodeWork) -> None:
        seconds, self._long, took = self._limits.seconds, False, CHEAP_SECONDS * 2
        if is_audio(self._data):
            header = sound_header(self._data, self._limits)
            seconds = min(seconds, header.frames / header.rate)
            took = sound_seconds(
                int(seconds * header.rate), header.channels, len(self._data), lossy=header.lossy
            )
            self._long = took > CHEAP_SECONDS
        elif is_container(self._data):
            # Nobody knows its length; this is what sound has at the least.
            seconds = min(seconds, len(self._data) / _LEAST_BYTES)
        else:
            return
        work.expect("audio", took, 0)
        self._nbytes = int(seconds * _BYTES_PER_SECOND)

    @functools.cached_property
    def digest(self) -> str:
        return blake3(self._data).hexdigest()

    def waveform(self, rate: int) -> np.ndarray:
        work = self._work
        if work is None:
            return decode_audio(self._data, rate, self._limits)
        work.check()
        work.hold(self._nbytes)
        if self._long:
            with SamplesProcess(self._data, rate, self._limits, work) as process:
                return process.waveform()
        return decode_audio(self._data, rate, self._limits, work)


def decode_audio(data: bytes, rate: int, limits: AudioLimits, work: DecodeWork | None = None) -> np.ndarray:
    """float32 [samples] at `rate`: the mean of the channels, resampled by soxr's high quality.

    TooLarge beyond the limits; InvalidRequest(param "audio") for unknown formats, for files without a
    sample and for damaged ones. The messages never repeat the decoder's.
    """
    if is_container(data):
        with SoundProcess(data, limits, work) as process, process.question(work):
            parts = list(_resampled(process.blocks(), process.rate, rate))
    elif is_audio(data):
        # The header said that it takes no time: what does nevertheless is not what it says.
        longest = _LIAR_SECONDS if work is not None and not work.heavy else math.inf
        parts = _decoded(data, rate, limits, longest)
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

    def __init__(self, data: bytes, limits: AudioLimits, work: DecodeWork | None = None) -> None:
        given = {"seconds": limits.seconds, "channels": _CHANNELS, "min_rate": _RATES[0]}
        super().__init__(data, {**given, "max_rate": _RATES[1]}, limits.decode_seconds, work)

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


class SamplesProcess(DecoderProcess):
    """The waveform of a file that libsndfile takes long to decode. To be closed."""

    noun: ClassVar[str] = "audio"
    format: ClassVar[str] = "WAV"
    program: ClassVar[str] = "media_decoder.py"
    needs: ClassVar[tuple[str, str]] = ("soundfile", "triptych")

    def __init__(self, data: bytes, rate: int, limits: AudioLimits, work: DecodeWork) -> None:
        self._work = work
        given = {"rate": rate, "seconds": limits.seconds, "root": package_root()}
        super().__init__(data, given, limits.decode_seconds, work)

    def waveform(self) -> np.ndarray:
        with self.question(self._work):
            waveform = np.empty(int(self.line("samples")["samples"]), dtype=np.float32)
            if not self.read_into(waveform.data.cast("B")):
                raise self.refused()
        return waveform


@dataclass(frozen=True, slots=True)
class SoundHeader:
    """What the header of a file says, as libsndfile reads it; `frames` may be far too many."""

    frames: int
    channels: int
    rate: int
    #: Its codec is none of PCM and FLAC.
    lossy: bool


def sound_header(data: bytes, limits: AudioLimits) -> SoundHeader:
    """That of a file that `is_audio`; the errors of `decode_audio`."""
    with _opened(data) as file:
        _check(file, limits)
        return SoundHeader(file.frames, file.channels, file.samplerate, file.format not in _LOSSLESS)


@contextlib.contextmanager
def _opened(data: bytes) -> Iterator[soundfile.SoundFile]:
    try:
        with soundfile.SoundFile(io.BytesIO(data)) as file:
            yield file
    except InvalidRequest:
        raise
    except Exception as error:  # libsndfile's errors, and numpy's for impossible headers
        logger.info("audio could not be decoded (%s)", type(error).__name__)
        raise _refused("the file is truncated or damaged and cannot be decoded") from None


def _decoded(data: bytes, rate: int, limits: AudioLimits, longest: float) -> list[np.ndarray]:
    with _opened(data) as file:
        _check(file, limits)
        return list(_resampled(_blocks(file, limits, longest), file.samplerate, rate))


def _blocks(file: soundfile.SoundFile, limits: AudioLimits, longest: float) -> Iterator[np.ndarray]:
    """Mono, block by block, so that a small file of endless length is stopped at the limit."""
    seen, limit = 0, int(limits.seconds * file.samplerate)
    end = time.thread_time() + longest
    while len(block := file.read(_BLOCK, dtype="float32", always_2d=True)):
        seen += len(block)
        if seen > limit:
            raise _too_long(limits)
        if time.thread_time() > end:
            raise _refused("the file has more in it than its header says; convert it to WAV again")
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
