"""Encoder-decoder models through HTTP, proxy, encoder worker, store and PD worker: what transformers says.

BART, T5, Whisper and TrOCR share one store and one proxy; their namespaces keep them apart.
"""

from __future__ import annotations

import asyncio
import base64
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest
import torch
from openai import BadRequestError

import triptych
from support.data.pictures import picture
from support.data.sounds import audio_file, sound
from support.data.traffic import client_of
from support.encdec.oracle import audio_inputs, greedy, image_inputs, model_of, text_inputs, tokenizer_of
from support.processes.cluster import data_url
from support.processes.families import FamilyCluster
from triptych.protos import common_pb2, proxy_pb2, proxy_pb2_grpc

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

FAMILIES = ("bart", "t5", "whisper", "trocr")
TEXTS = (
    "The rain in Spain",
    "x",
    "A red circle beside a blue square, and nothing else in the picture",
    "Hi you",
)
TOKENS = 40


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[FamilyCluster]:
    first, *others = FAMILIES
    served = FamilyCluster(tmp_path_factory.mktemp("encdec"), {}).start(first)
    try:
        for family in others:
            served.checkpoint(family)
        yield served
    finally:
        served.cluster.stop()


@pytest.mark.parametrize("family", ["bart", "t5"])
async def test_texts_at_once_are_answered_as_by_generate(served: FamilyCluster, family: str) -> None:
    path = served.checkpoint(family)
    fields = {"return_token_ids": True, "ignore_eos": False}
    async with client_of(served.cluster.url) as client:
        replies = await asyncio.gather(
            *(
                client.completions.create(model=family, prompt=text, max_tokens=TOKENS, extra_body=fields)
                for text in TEXTS
            )
        )
    forced = model_of(path).generation_config.forced_eos_token_id
    said: set[int] = set()
    for text, reply in zip(TEXTS, replies, strict=True):
        choice: Any = reply.choices[0]
        expected = greedy(
            path,
            text_inputs(path, text),
            max_new_tokens=TOKENS,
            decoder_ids=list(choice.prompt_token_ids),
            ignore_eos=False,
            forced_eos_token_id=forced,
        )
        assert list(choice.token_ids) == expected.token_ids
        assert choice.encoder_prompt_token_ids == text_inputs(path, text)["input_ids"][0].tolist()
        said |= set(choice.token_ids)
    assert len(said) >= 20


async def test_pictures_are_answered_as_by_generate_over_http_grpc_and_the_client(
    served: FamilyCluster,
) -> None:
    path = served.checkpoint("trocr")
    pictures = [picture(seed, 70 + 9 * seed, 40) for seed in range(3)]
    urls = [data_url(image) for image in pictures]
    async with client_of(served.cluster.url) as client:
        replies = await asyncio.gather(
            *(
                client.completions.create(
                    model="trocr",
                    prompt=None,  # type: ignore[arg-type]
                    max_tokens=TOKENS,
                    extra_body={"multi_modal_data": {"image": {"url": url}}, "return_token_ids": True},
                )
                for url in urls
            )
        )
        with pytest.raises(BadRequestError, match="multi_modal_data.image") as refused:
            await client.chat.completions.create(model="trocr", messages=[{"role": "user", "content": "x"}])
        assert refused.value.param == "messages"
        with pytest.raises(BadRequestError, match="knows no conversations"):
            words = {"model": "trocr", "messages": [{"role": "user", "content": "x"}]}
            await client.post(f"{served.cluster.url}/tokenize", body=words, cast_to=object)
    said: set[int] = set()
    for image, reply in zip(pictures, replies, strict=True):
        choice: Any = reply.choices[0]
        expected = greedy(path, image_inputs(path, image), max_new_tokens=TOKENS, ignore_eos=False)
        assert (list(choice.prompt_token_ids), list(choice.token_ids)) == (
            expected.prompt_token_ids,
            expected.token_ids,
        )
        said |= set(choice.token_ids)
    assert len(said) >= 20
    first: Any = replies[0].choices[0]
    async with triptych.AsyncClient(served.cluster.url) as own:
        again = await own.complete(image=urls[0], model="trocr", max_tokens=TOKENS)
    assert (again.token_ids, again.text) == (tuple(first.token_ids), first.text)
    async with grpc.aio.insecure_channel(served.cluster.grpc_address) as channel:
        stub: Any = proxy_pb2_grpc.ProxyServiceStub(channel)
        request = proxy_pb2.GenerateRequest(
            model="trocr",
            image=base64.b64decode(urls[0].partition(",")[2]),
            sampling=common_pb2.SamplingParams(max_tokens=TOKENS),
            return_token_ids=True,
        )
        events = [event async for event in stub.Generate(request, timeout=60)]
    assert [token for event in events for token in event.token_ids] == list(first.token_ids)
    assert served.cluster.total("encoder", "triptych_encoder_tower_items_total") >= len(pictures)


@torch.no_grad()
def heard(path: Path, waveform: Any, **options: Any) -> Any:
    return model_of(path).generate(**audio_inputs(path, waveform), num_beams=1, **options)


async def test_three_tasks_on_one_file_are_those_of_generate_and_encode_once(served: FamilyCluster) -> None:
    path, total = served.checkpoint("whisper"), served.cluster.total
    waveform = sound(12, seed=3)
    wav = audio_file(waveform, 16_000, "WAV", subtype="FLOAT")
    items, projections = (
        total("encoder", "triptych_encoder_tower_items_total"),
        total("pd", "triptych_pd_projections_total"),
    )
    async with client_of(served.cluster.url) as client:
        create: Any = client.audio.transcriptions.create
        file = ("a.wav", wav)
        english, german, detected = await asyncio.gather(
            create(model="whisper", file=file, language="en"),
            create(model="whisper", file=file, language="de"),
            create(model="whisper", file=file, response_format="verbose_json"),
        )
    tokenizer = tokenizer_of(path)
    for reply, language in ((english, "en"), (german, "de")):
        ids = heard(path, waveform, language=language, task="transcribe")[0]
        assert reply.text == tokenizer.decode(ids, skip_special_tokens=True).strip()
    features = audio_inputs(path, waveform)["input_features"]
    token = model_of(path).detect_language(features)[0].item()
    assert f"<|{detected.language}|>" == tokenizer.decode([token])
    # Later windows of the file, where its last segment ends early, are items of their own.
    later = len({segment.seek for segment in detected.segments} - {0})
    assert total("encoder", "triptych_encoder_tower_items_total") == items + 1 + later
    assert total("pd", "triptych_pd_projections_total") == projections + 1 + later


async def test_a_long_file_has_the_segments_of_generate(served: FamilyCluster) -> None:
    path = served.checkpoint("whisper")
    waveform = sound(75, seed=5)
    options = {"language": "en", "task": "transcribe", "return_timestamps": True, "return_segments": True}
    segments = heard(path, waveform, **options)["segments"][0]
    async with client_of(served.cluster.url) as client:
        create: Any = client.audio.transcriptions.create
        file = ("a.flac", audio_file(waveform, 16_000, "WAV", subtype="FLOAT"))
        reply = await create(model="whisper", file=file, language="en", response_format="verbose_json")
        plain = await create(model="whisper", file=file, language="en")
    expected = [
        (round(float(it["start"]), 2), round(float(it["end"]), 2), it["tokens"].tolist()) for it in segments
    ]
    assert [(it.start, it.end, it.tokens) for it in reply.segments] == expected
    assert len({it.seek for it in reply.segments}) >= 2
    assert plain.text == reply.text
    assert (reply.duration, plain.usage.seconds) == (75.0, 75)
