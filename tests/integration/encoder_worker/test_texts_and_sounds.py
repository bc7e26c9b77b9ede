"""Jobs of encoders that read or hear, through the same worker and store as those that see."""

from __future__ import annotations

import asyncio

import numpy as np
import pytest
import torch

from support.data.checkpoints import build_checkpoint
from support.data.sounds import audio_file, sound
from support.encdec.oracle import audio_inputs, encoder_rows, text_inputs
from support.engine.encoder_bench import Job, bench, stored_rows
from triptych.encoder_worker.media.audio import AudioLimits, decode_audio
from triptych.models.base import EncoderSide
from triptych.models.registry import load_encoder
from triptych.store.embedding_store import EmbeddingStore

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def reader() -> EncoderSide:
    return load_encoder(build_checkpoint("t5"), device=CPU, dtype=torch.float32)


@pytest.fixture(scope="module")
def listener() -> EncoderSide:
    return load_encoder(build_checkpoint("whisper", variant="small"), device=CPU, dtype=torch.float32)


async def stored(store: EmbeddingStore, job: Job) -> torch.Tensor:
    plan, rows = await stored_rows(store, job)
    assert (plan.modality, plan.length) == (job.modality, 0)
    return rows


async def test_texts_of_mixed_lengths_in_one_batch_are_stored_as_transformers_encodes_them(
    reader: EncoderSide, store: EmbeddingStore, store_url: str
) -> None:
    texts = ["One.", "A somewhat longer text, as it happens.", "word " * 50]
    async with bench(reader, store, store_url) as b:
        jobs = [await Job(b, text.encode(), modality="text").planned() for text in texts]
        events = await asyncio.gather(*(job.finished() for job in jobs))
        assert {event.WhichOneof("body") for event in events} == {"ready"}
        path = build_checkpoint("t5")
        for text, job in zip(texts, jobs, strict=True):
            wanted = encoder_rows(path, text_inputs(path, text))
            torch.testing.assert_close(await stored(store, job), wanted, atol=1e-5, rtol=0)


async def test_windows_of_a_file_are_items_of_their_own(listener, store, store_url):
    rate, path = 44_100, build_checkpoint("whisper", variant="small")
    data = audio_file(sound(4.5, seed=7, rate=rate), rate, "FLAC")
    waveform = decode_audio(data, 16_000, AudioLimits())
    features = audio_inputs(path, waveform)["input_features"]
    async with bench(listener, store, store_url) as b:
        for start in (0, 170):
            options = {"start_frame": start} if start else {}
            job = await Job(b, data, options=options, modality="audio").planned()
            assert (await job.finished()).WhichOneof("body") == "ready"
            wanted = encoder_rows(path, {"input_features": features[:, :, start : start + 200]})
            torch.testing.assert_close(await stored(store, job), wanted, atol=1e-5, rtol=0)


@pytest.mark.parametrize(
    ("data", "options", "param"),
    [
        (b"no sound at all", {}, "audio"),
        (audio_file(np.zeros(0, dtype=np.float32), 16_000, "WAV"), {}, "audio"),
        (audio_file(sound(1.0), 16_000, "WAV"), {"start_frame": 5000}, "mm_processor_kwargs.start_frame"),
        (audio_file(sound(9.0), 16_000, "WAV"), {}, "audio"),
    ],
)
async def test_what_is_no_sound_of_this_worker_fails_with_the_field(
    listener: EncoderSide,
    store: EmbeddingStore,
    store_url: str,
    data: bytes,
    options: dict[str, object],
    param: str,
) -> None:
    async with bench(listener, store, store_url, max_audio_seconds=5.0) as b:
        job = await Job(b, data, options=options, modality="audio").start()
        await job.send_media()
        event = await job.last()
        assert event.WhichOneof("body") == "failed"
        assert not event.failed.retryable
        assert event.failed.error.param == param


@pytest.mark.parametrize("data", [b"\xff\xfe", " ".join(["word"] * 5000).encode()])
async def test_what_is_no_text_of_this_encoder_fails_with_the_field(reader, store, store_url, data):
    async with bench(reader, store, store_url) as b:
        job = await Job(b, data, modality="text").start()
        await job.send_media()
        event = await job.last()
        assert event.failed.error.param == "encoder_prompt"
