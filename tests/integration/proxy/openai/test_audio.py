"""The audio endpoints with the openai package as client and scripted workers."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator
from typing import Any

import pytest
from openai import APIStatusError, BadRequestError

from support.fakes.fake_workers import END_TOKEN, FIRST_TIME, MODEL, NAMESPACE
from support.fakes.proxy_fakes import FakeCluster
from support.waiting import until
from triptych.base.hashing import mm_hash
from triptych.protos import common_pb2
from triptych.store.embedding_store import EmbeddingStore

WAV = b"RIFF\x00\x00\x00\x00WAVEfmt and so on"
GERMAN = 4000
#: Texts of the tokens of an answer without times.
PLAIN = [" H", "i", ""]
HI = [ord(letter) for letter in " Hi"]
YO = [ord(letter) for letter in " Yo"]


@pytest.fixture
async def cluster(store: EmbeddingStore) -> AsyncIterator[FakeCluster]:
    async with FakeCluster(store, modality="audio") as cluster:
        yield cluster
        await cluster.at_rest()


def at(seconds: float) -> int:
    return FIRST_TIME + round(seconds / 0.02)


async def _write_down(cluster: FakeCluster, **fields: Any) -> Any:
    fields = {"file": ("speech.wav", WAV), "model": MODEL, "language": "en", **fields}
    return await cluster.client.audio.transcriptions.create(
        **{name: value for name, value in fields.items() if value is not None}
    )


async def test_a_short_file_is_one_item_and_one_request(cluster: FakeCluster) -> None:
    cluster.pd_workers[0].script = PLAIN
    reply = await _write_down(cluster, prompt="Names: Ann", temperature=0.5)
    assert reply.text == "Hi"
    assert (reply.usage.type, reply.usage.seconds) == ("duration", 4)
    (submit,) = cluster.pd_workers[0].submits
    task = submit.transcription
    assert (task.language, task.task, task.prompt) == ("en", "transcribe", "Names: Ann")
    assert not task.timestamps and not submit.HasField("prompt")
    assert submit.sampling.temperature == 0.5 and not submit.sampling.HasField("max_tokens")
    (job,) = cluster.jobs
    assert (job.modality, job.processor_options) == ("audio", "")
    assert job.mm_hash == mm_hash(WAV, namespace=NAMESPACE, modality="audio")
    assert cluster.encoders[0].media == [WAV]


async def test_a_language_that_is_not_said_is_heard_first(cluster: FakeCluster) -> None:
    cluster.pd_workers[0].answers = [[GERMAN], [at(0), *HI, at(2), END_TOKEN]]
    reply = await _write_down(cluster, language=None, response_format="verbose_json")
    assert (reply.language, reply.text, reply.duration) == ("de", "Hi", 4.0)
    detection, writing = cluster.pd_workers[0].submits
    assert detection.transcription.detect_language and detection.sampling.max_tokens == 1
    assert writing.transcription.language == "de" and writing.transcription.timestamps
    assert len(cluster.jobs) == 1, "the file is encoded once"


async def test_segments_come_in_every_format(cluster: FakeCluster) -> None:
    answer = [at(0.5), *HI, at(2), at(2), *YO, at(3.5), END_TOKEN]
    pd = cluster.pd_workers[0]
    pd.answers = [answer[:], [at(0), *YO, at(1.5), END_TOKEN]]
    reply = await _write_down(cluster, response_format="verbose_json", timestamp_granularities=["segment"])
    shown = [(it.start, it.end, it.text, it.seek) for it in reply.segments]
    assert shown == [(0.5, 2.0, " Hi", 0), (2.0, 3.5, " Yo", 200)]
    assert reply.segments[0].tokens == answer[:6]
    assert reply.segments[0].avg_logprob == -0.5
    assert (reply.task, reply.language, reply.text) == ("transcribe", "en", "Hi Yo")
    pd.answers = [[at(0.5), *HI, at(2), END_TOKEN]]
    srt = await _write_down(cluster, response_format="srt")
    assert srt == "1\n00:00:00,000 --> 00:00:02,000\nHi\n\n"
    pd.answers = [[at(0.5), *HI, at(2), END_TOKEN]]
    vtt = await _write_down(cluster, response_format="vtt")
    assert vtt == "WEBVTT\n\n00:00:00.000 --> 00:00:02.000\nHi\n\n"
    pd.script = PLAIN
    assert await _write_down(cluster, response_format="text") == "Hi\n"


async def test_a_stream_brings_the_text_as_it_comes(cluster: FakeCluster) -> None:
    cluster.pd_workers[0].script = PLAIN
    events = [event async for event in await _write_down(cluster, stream=True)]
    assert [event.type for event in events] == ["transcript.text.delta"] * 2 + ["transcript.text.done"]
    assert "".join(event.delta for event in events[:-1]) == events[-1].text == "Hi"


async def test_a_long_file_goes_on_where_the_last_segment_ended(cluster: FakeCluster) -> None:
    windows = [
        [at(0), *HI, at(12), at(12), *YO, at(28), at(28), 90, END_TOKEN],
        [at(0), *HI, at(9), at(9), *YO, at(20), END_TOKEN],
        [at(0), *YO, at(5), END_TOKEN],
    ]
    cluster.encoders[0].frames = 6500
    pd = cluster.pd_workers[0]
    # Without times at first: nobody knows how long the file is before its first plan.
    pd.answers = windows[:]
    events = [event async for event in await _write_down(cluster, stream=True, prompt="Ann")]
    assert [event.delta for event in events[:-1]] == ["Hi Yo", " Hi Yo", " Yo"]
    assert events[-1].text == "Hi Yo Hi Yo Yo"
    plain, *rest = pd.submits
    assert not plain.transcription.timestamps
    assert [submit.items[0].plan.grid_thw[0] for submit in rest] == [0, 2800, 5800]
    assert [submit.transcription.prompt for submit in rest] == ["Ann", "", ""]
    options = [job.processor_options for job in cluster.jobs]
    assert options == ["", '{"start_frame":2800}', '{"start_frame":5800}']
    assert cluster.encoders[0].media == [WAV] * 3


async def test_a_worker_that_dies_costs_the_window_and_not_the_file(store: EmbeddingStore) -> None:
    async with FakeCluster(store, modality="audio", pd_workers=2) as cluster:
        cluster.encoders[0].frames = 5000
        first = [at(0), *HI, at(28), at(28), END_TOKEN]
        second = [at(0), *YO, *YO, at(9), END_TOKEN]
        for pd in cluster.pd_workers:
            pd.windows, pd.pause_at = {0: first, 2800: second}, 7  # which only the second window reaches
        asked = asyncio.create_task(_write_down(cluster, response_format="verbose_json"))
        await until(lambda: any(not pd.gate.is_set() for pd in cluster.pd_workers), "the second window")
        owner = next(pd for pd in cluster.pd_workers if not pd.gate.is_set())
        other = next(pd for pd in cluster.pd_workers if pd is not owner)
        other.pause_at = None
        await owner.kill()
        reply = await asked
        assert [it.text for it in reply.segments] == [" Hi", " Yo Yo"]
        await cluster.at_rest()


REFUSED = [
    ({"file": ("a.wav", b"")}, "file"),
    ({"response_format": "diarized_json"}, "response_format"),
    ({"stream": True, "response_format": "srt"}, "stream"),
    ({"response_format": "verbose_json", "timestamp_granularities": ["word"]}, "timestamp_granularities"),
    ({"timestamp_granularities": ["segment"]}, "timestamp_granularities"),
    ({"temperature": 7}, "temperature"),
    ({"include": ["logprobs"]}, "include"),
    ({"language": "x" * 50}, "language"),
    ({"prompt": "x" * (40 << 10)}, "prompt"),
    ({"extra_body": {"cache_salt": "x" * 300}}, "cache_salt"),
    ({"extra_body": {"seed": "one"}}, "seed"),
]


async def test_bad_fields_are_refused_by_name(cluster: FakeCluster) -> None:
    for fields, param in REFUSED:
        with pytest.raises(BadRequestError) as refused:
            await _write_down(cluster, **fields)
        assert refused.value.param == param, fields
    with pytest.raises(APIStatusError) as missing:
        await _write_down(cluster, model="other")
    assert (missing.value.status_code, missing.value.param) == (404, "model")
    with pytest.raises(APIStatusError) as large:
        await _write_down(cluster, file=("a.wav", b"x" * (2 << 20)))
    assert (large.value.status_code, large.value.param) == (413, "body")
    assert not cluster.jobs


@pytest.mark.parametrize("english_only", [False, True])
async def test_the_question_for_the_language_is_no_request_of_its_own(store, caplog, english_only):
    async with FakeCluster(store, modality="audio", live=True) as cluster:
        pd, writing = cluster.pd_workers[0], [at(0), *HI, at(2), END_TOKEN]
        pd.answers = [writing] if english_only else [[GERMAN], writing]
        if english_only:
            pd.refusals = [
                common_pb2.Error(code="invalid_request_error", message="English", param="detect_language")
            ]
        with caplog.at_level(logging.INFO):
            reply = await _write_down(cluster, language=None, response_format="verbose_json")
        assert reply.language == ("en" if english_only else "de")
        [counted] = [s for f in cluster.metrics.requests.collect() for s in f.samples]
        assert counted.labels == {"status": "200", "route": "/v1/audio/transcriptions"}
        assert counted.value == 1
        ended = [line for line in caplog.messages if ": status " in line]
        assert len(ended) == 1 and "#language" not in ended[0] and "status 200" in ended[0]
        assert cluster.metrics.duration.collect()[0].samples[-2].value == 1


async def test_a_failed_question_for_the_language_fails_the_one_request(cluster: FakeCluster) -> None:
    cluster.pd_workers[0].refusals = [common_pb2.Error(code="invalid_request_error", message="no")]
    with pytest.raises(BadRequestError):
        await _write_down(cluster, language=None)
    [counted] = [s for f in cluster.metrics.requests.collect() for s in f.samples]
    assert counted.labels == {"status": "400", "route": "/v1/audio/transcriptions"}
