"""Random messages and media for an encoder worker."""

from __future__ import annotations

import asyncio
import io
import json
import math
import random
import re
import warnings
from collections.abc import AsyncIterator

import pytest
import torch
from hypothesis import strategies as st
from PIL import Image

from support.data.checkpoints import build_checkpoint
from support.data.pictures import picture
from support.engine.encoder_bench import NAMESPACE, Bench, bench, png
from support.hostile.fuzzing import (
    Fuzzer,
    json_values,
    messages,
    mutate,
    mutated,
    random_json,
    random_message,
    randoms,
)
from triptych.base.errors import InvalidRequest
from triptych.base.hashing import mm_hash
from triptych.encoder_worker.media.formats import FORMATS
from triptych.encoder_worker.media.preparer import Preparer, VerifiedMedia
from triptych.encoder_worker.media.work import DecodeWork, TooHeavy
from triptych.models.base import EncoderSide
from triptych.models.registry import load_encoder
from triptych.protos import common_pb2, encoder_pb2
from triptych.protos.convert import error_from_proto, plan_from_proto
from triptych.store.embedding_store import EmbeddingStore

PICTURES = [png(picture(seed, 32, 32)) for seed in (1, 2)]


@pytest.fixture(scope="module")
def encoder() -> EncoderSide:
    return load_encoder(build_checkpoint("qwen3_vl"), device=torch.device("cpu"), dtype=torch.float32)


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


MAX_PIXELS = 1 << 16


def files() -> list[bytes]:
    """A small file of every format and of several modes, with EXIF, palettes, alpha and frames."""
    image = picture(1, 24, 16)
    exif = Image.Exif()
    exif[0x0112] = 6
    made = []
    for format in FORMATS:
        for mode in ("RGB", "RGBA", "P", "L", "1", "CMYK", "I;16"):
            for options in ({}, {"exif": exif}, {"save_all": True, "append_images": [image]}):
                out = io.BytesIO()
                try:
                    image.convert(mode).save(out, format, **options)
                except (OSError, ValueError, TypeError, KeyError, RuntimeError):
                    continue
                made.append(out.getvalue())
    return sorted(set(made))


@pytest.fixture(scope="module", params=["qwen3_vl", "llava"])
def media_encoder(request: pytest.FixtureRequest) -> EncoderSide:
    return load_encoder(build_checkpoint(request.param), device=torch.device("cpu"), dtype=torch.float32)


def prepared(preparer: Preparer, media: bytes, options: dict[str, object]) -> None:
    """Passes, or is refused in words without the decoder's own."""
    try:
        # Outside of tests a warning is no error.
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            try:
                item = preparer._prepare(VerifiedMedia(media, options), DecodeWork(heavy=False), None)
            except TooHeavy:
                item = preparer._prepare(VerifiedMedia(media, options), DecodeWork(), None)
        assert item.rows > 0
        assert item.nbytes < 1 << 26
    except InvalidRequest as refused:
        assert not re.search(r"\b0x[0-9a-f]{6}", refused.message), refused.message
        assert len(refused.message) < 500, refused.message


def test_mutated_pictures_become_pixels_or_a_refusal(media_encoder: EncoderSide, fuzzer: Fuzzer) -> None:
    preparer = Preparer(media_encoder, max_pixels=MAX_PIXELS, threads=1)
    originals = files()
    assert len(originals) > 20
    fuzzer.run("media bytes", mutated(originals), lambda media: prepared(preparer, media, {}), 80)
    preparer.close()


def test_any_options_become_pixels_or_a_refusal(media_encoder: EncoderSide, fuzzer: Fuzzer) -> None:
    preparer = Preparer(media_encoder, max_pixels=MAX_PIXELS, threads=1)
    names = ["size", "min_pixels", "max_pixels", "do_resize", "resample", "image_mean", "do_center_crop"]
    names += ["patch_size", "merge_size", "crop_size", "return_tensors", "images", "device", "do_normalize"]
    sizes = st.fixed_dictionaries(
        {},
        optional={
            name: st.sampled_from([0, -1, 1, 28, 300, 1 << 20, 1 << 40, 1.5, "x", None, True])
            for name in ("shortest_edge", "longest_edge", "height", "width", "max_pixels")
        },
    )
    options = st.dictionaries(st.sampled_from(names) | st.text(max_size=5), sizes | json_values(), max_size=3)
    media = files()[0]
    fuzzer.run("processor options", options, lambda some: prepared(preparer, media, some), 40)
    preparer.close()
