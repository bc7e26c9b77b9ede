"""Streams of messages into the real encoder service: each ends with an answer and leaves nothing."""

from __future__ import annotations

import asyncio
import json
import math
import random
from collections.abc import AsyncIterator, Iterator

import pytest
import torch

from support.data.checkpoints import build_checkpoint
from support.data.pictures import picture
from support.engine.encoder_bench import NAMESPACE, Bench, bench, png
from support.hostile.fuzzing import Fuzzer, messages, mutate, random_json, random_message, randoms
from triptych.base.errors import InvalidRequest
from triptych.base.hashing import mm_hash
from triptych.models.base import EncoderSide
from triptych.models.registry import load_encoder
from triptych.protos import common_pb2, encoder_pb2
from triptych.protos.convert import error_from_proto, plan_from_proto
from triptych.store.embedding_store import EmbeddingStore

PICTURES = [png(picture(seed, 32, 32)) for seed in (1, 2)]


@pytest.fixture(scope="module")
def encoder() -> Iterator[EncoderSide]:
    torch.set_num_threads(1)
    yield load_encoder(build_checkpoint("qwen3_vl"), device=torch.device("cpu"), dtype=torch.float32)


OPTIONS = ("min_pixels", "max_pixels", "size", "do_resize", "patch_size")


def stream_of(rng: random.Random) -> list[encoder_pb2.EncodeRequest]:
    """Random messages, or a job whose key fits its media, with something wrong in it."""
    anything = [random_message(encoder_pb2.EncodeRequest, rng, {}) for _ in range(rng.randrange(4))]
    if rng.random() < 0.2:
        return anything
    media, options = rng.choice(PICTURES), ""
    if rng.random() < 0.4:
        media = mutate(media, rng, PICTURES) or b"x"
    if rng.random() < 0.5:
        names = [rng.choice(OPTIONS) for _ in range(rng.randrange(3))]
        options = json.dumps({name: random_json(rng) for name in names} if names else random_json(rng))
    sent = good_stream(media, options)
    changed = random_message(encoder_pb2.EncodeJob, rng, {})
    for field in changed.DESCRIPTOR.fields:
        if rng.random() < 0.03:
            setattr(sent[0].job, field.name, getattr(changed, field.name))
    if rng.random() < 0.3:
        rest = sent[1:] * 2 + anything
        rng.shuffle(rest)
        sent = [sent[0], *rest][: rng.randrange(1, 6)]
    return sent


def good_stream(media: bytes, options: str = "") -> list[encoder_pb2.EncodeRequest]:
    job = encoder_pb2.EncodeJob(
        job_id="job",
        mm_hash=key_of(media, options),
        namespace=NAMESPACE,
        modality="image",
        processor_options=options,
        media_bytes=len(media),
        timeout=5.0,
    )
    frames = [encoder_pb2.EncodeRequest(media=media), encoder_pb2.EncodeRequest(run=encoder_pb2.RunJob())]
    return [encoder_pb2.EncodeRequest(job=job), *frames]


def key_of(media: bytes, options: str) -> str:
    try:
        values = json.loads(options or "{}")
        return mm_hash(media, namespace=NAMESPACE, modality="image", processor_options=values)
    except Exception:
        return "0" * 64


async def answer(
    b: Bench, sent: list[encoder_pb2.EncodeRequest], hold: bool
) -> list[encoder_pb2.EncodeEvent]:
    """The stream's events. `hold`: the sender stays, as the proxy does, until the answer has come."""
    over = asyncio.Event()

    async def requests() -> AsyncIterator[encoder_pb2.EncodeRequest]:
        for message in sent:
            yield message
            await asyncio.sleep(0)
        if hold:
            await over.wait()

    events: list[encoder_pb2.EncodeEvent] = []
    async with asyncio.timeout(15):
        async for event in b.worker.servicer.Encode(requests(), None):
            events.append(event)
    over.set()
    return events


def test_every_stream_ends_with_an_answer_and_leaves_nothing(encoder, store_url, fuzzer, caplog):
    with asyncio.Runner() as runner:
        store = runner.run(EmbeddingStore.connect(store_url))
        opened = bench(encoder, store, store_url, max_image_pixels=1 << 14)
        b = runner.run(opened.__aenter__())

        def check(sent: list[encoder_pb2.EncodeRequest]) -> None:
            events = runner.run(answer(b, sent, hold=False))
            assert events[-1].WhichOneof("body") in ("ready", "failed")
            failed = events[-1].failed
            assert failed.error.code != "internal_error", failed

        fuzzer.run("Encode streams", randoms().map(stream_of), check, 60)
        assert not [record for record in caplog.records if record.exc_info]
        assert len(b.worker.jobs) == 0
        runner.run(b.until("triptych_encoder_leases_held", 0))
        good = runner.run(answer(b, good_stream(PICTURES[0]), hold=True))
        assert good[-1].WhichOneof("body") == "ready"
        runner.run(opened.__aexit__(None, None, None))
        runner.run(store.close())


def test_what_an_encoder_says_is_a_plan_and_an_error_or_refused(fuzzer: Fuzzer) -> None:
    known = {"dtype": ["float32", "bfloat16", "int8"], "mm_hash": ["a" * 64, "x"]}

    def plan(message: common_pb2.ItemPlan) -> None:
        try:
            assert plan_from_proto(message).nbytes >= 0
        except InvalidRequest as refused:
            assert refused.message

    def error(message: common_pb2.Error) -> None:
        raised = error_from_proto(message)
        assert raised.message
        assert raised.retry_after is None or math.isfinite(raised.retry_after), raised

    fuzzer.run("plans to the proxy", messages(common_pb2.ItemPlan, known), plan, 60)
    fuzzer.run("errors to the proxy", messages(common_pb2.Error), error, 60)
