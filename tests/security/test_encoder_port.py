"""What nobody but a forger sends to an encoder worker's port: refused, and no other job is touched."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from support.data.checkpoints import build_checkpoint
from support.data.pictures import picture
from support.engine.encoder_bench import Bench, Job, bench, png
from triptych.models.base import EncoderSide
from triptych.models.registry import load_encoder
from triptych.protos import encoder_pb2
from triptych.store import keys
from triptych.store.embedding_store import EmbeddingStore

GAUGES = ("jobs", "queue_items", "planned_items", "inflight", "leases_held")


@pytest.fixture(scope="module")
def encoder() -> Iterator[EncoderSide]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield load_encoder(build_checkpoint("qwen3_vl"), device=torch.device("cpu"), dtype=torch.float32)
    torch.set_num_threads(threads)


def _media(seed: int) -> bytes:
    return png(picture(seed, 64, 64))


#: The change to an honest job, and the field that the refusal names.
FORGED: list[tuple[str, dict[str, Any], str]] = [
    ("a key of other media", {"mm_hash": "0" * 64}, "mm_hash"),
    ("a key that is none", {"mm_hash": "x" * (1 << 20)}, "mm_hash"),
    ("a key that is a path", {"mm_hash": "../" * 21 + "x"}, "mm_hash"),
    ("another tenant's salt", {"salt": "\0005:alice"}, "mm_hash"),
    ("a salt of a megabyte", {"salt": "x" * (1 << 20)}, "salt"),
    ("another namespace", {"namespace": "f" * 64}, "namespace"),
    ("no namespace", {"namespace": ""}, "namespace"),
    ("another modality", {"modality": "text"}, "modality"),
    ("no media", {"media_bytes": 0}, "media_bytes"),
    ("media without end", {"media_bytes": 2**63}, "media_bytes"),
    ("fewer media than come", {"media_bytes": 5}, "media_bytes"),
    ("options that were not hashed", {"processor_options": '{"max_pixels": 4096}'}, "mm_hash"),
    ("options that are no object", {"processor_options": "[]"}, "processor_options"),
    ("options of a megabyte", {"processor_options": '{"a": "' + "x" * (1 << 20) + '"}'}, "processor_options"),
    ("options nested without end", {"processor_options": '{"a":' * 9000}, "processor_options"),
    ("numbers without end", {"processor_options": '{"a": ' + "9" * 400 + "}"}, "processor_options"),
    ("no time", {"timeout": 0.0}, "timeout"),
    ("time that is no number", {"timeout": float("nan")}, "timeout"),
    ("a job id of a megabyte", {"job_id": "x" * (1 << 20)}, "job_id"),
    ("a request id of a megabyte", {"request_id": "x" * (1 << 20)}, "request_id"),
    ("a lease of a megabyte", {"failed_lease_token": "x" * (1 << 20)}, "failed_lease_token"),
    ("a digest that is none", {"damaged_digest": "*"}, "damaged_digest"),
]


#: Those that only the media show to be false.
NEED_MEDIA = {
    "a key of other media",
    "another tenant's salt",
    "fewer media than come",
    "options that were not hashed",
}


async def _failed(job: Job, *, media: bool) -> encoder_pb2.JobFailed:
    """The job's failure. Nothing is sent into a stream that has ended already."""
    await job.start()
    if media:
        await job.send_media()
    event = await job.event()
    assert event.WhichOneof("body") == "failed", event
    return event.failed


async def _unharmed(b: Bench, store: EmbeddingStore, seed: int) -> None:
    """An honest job is encoded; then nothing is held, and the store has no lease left."""
    event = await (await Job(b, _media(seed)).planned()).finished()
    assert event.WhichOneof("body") == "ready", event
    for name in GAUGES:
        await b.until(f"triptych_encoder_{name}", 0)
    async with asyncio.timeout(45):
        while await store.control.execute("HKEYS", keys.LEASES):
            await asyncio.sleep(0.01)


async def test_every_forged_job_is_refused_with_its_field_while_an_honest_one_waits(
    encoder, store, store_url
):
    async with bench(encoder, store, store_url) as b:
        beside = await Job(b, _media(1)).planned()
        for number, (name, changes, param) in enumerate(FORGED):
            job = Job(b, _media(100 + number), changes=changes)
            failed = await _failed(job, media=name in NEED_MEDIA)
            assert (failed.error.param, failed.retryable) == (param, False), (name, failed)
            assert len(failed.error.message) < 1000, name
        assert (await beside.finished()).WhichOneof("body") == "ready"
        stored = await store.control.execute("KEYS", keys.EMBEDDING + "*")
        assert [key.decode() for key in stored] == [keys.embedding(beside.key)]
        await _unharmed(b, store, 2)


async def test_time_without_end_is_cut_to_the_longest_of_a_job(encoder, store, store_url):
    async with bench(encoder, store, store_url) as b:
        job = await Job(b, _media(1), changes={"timeout": float("inf")}).planned()
        assert (await job.finished()).WhichOneof("body") == "ready"
        await _unharmed(b, store, 2)


def _sends(**fields: Any) -> Callable[[Job], Any]:
    return lambda job: job.call.write(encoder_pb2.EncodeRequest(**fields))


FRAMES: dict[str, Callable[[Job], Any]] = {
    "job": Job.start,
    "run": Job.run,
    "media": Job.send_media,
    "nothing": _sends(),
    "empty": _sends(media=b""),
    "too-large": _sends(media=b"x" * (1 << 20)),
    "beginning": _sends(media=b"\x89PNG"),
    "end": lambda job: job.call.done_writing(),
}


@pytest.mark.parametrize(
    "order",
    [
        "job job",
        "run",
        "media",
        "nothing",
        "job empty",
        "job too-large",
        "job media media",
        "job beginning end",
    ],
)
async def test_frames_in_an_order_that_nobody_sends_end_their_own_stream_only(
    encoder, store, store_url, order
):
    async with bench(encoder, store, store_url) as b:
        beside = await Job(b, _media(1)).planned()
        job = Job(b, _media(2))
        for frame in order.split():
            await FRAMES[frame](job)
        event = await job.event()
        if event.WhichOneof("body") == "planned":
            event = await job.event()
        assert event.WhichOneof("body") == "failed", event
        assert event.failed.error.code != "internal_error"
        assert (await beside.finished()).WhichOneof("body") == "ready"
        await _unharmed(b, store, 3)


async def test_a_false_digest_and_a_false_lease_replace_nothing(encoder, store, store_url):
    async with bench(encoder, store, store_url) as b:
        media = _media(1)
        first = await Job(b, media).planned()
        assert (await first.finished()).WhichOneof("body") == "ready"
        before = await store.control.execute("GET", keys.embedding(first.key))
        changes = {"damaged_digest": "0" * 40, "failed_lease_token": "guess", "re_encode": True}
        again = Job(b, media, changes=changes)
        await again.start()
        await again.send_media()
        event = await again.event()
        if event.WhichOneof("body") == "planned":
            event = await again.finished()
        assert event.WhichOneof("body") == "ready"
        assert await store.control.execute("GET", keys.embedding(first.key)) == before
        await _unharmed(b, store, 2)
