"""Calls over gRPC: chats, and requests with two prompts."""

from __future__ import annotations

import asyncio
import base64
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import grpc
import pytest
from click.testing import CliRunner
from grpc import aio

import triptych
from support.channels import connected_channel
from support.fakes.fake_workers import END_TOKEN, FIRST_TIME, whole_text
from support.fakes.proxy_fakes import FakeCluster
from support.hostile.malformed import tool
from triptych.apps.cli.app import app
from triptych.base.errors import InvalidRequest
from triptych.protos import common_pb2, proxy_pb2, proxy_pb2_grpc
from triptych.store.embedding_store import EmbeddingStore

HELLO = proxy_pb2.ChatMessage(role="user", parts=[proxy_pb2.ChatPart(text="hello")])
CALL = ["I look. ", '<tool_call>{"name": "look", ', '"arguments": {}}</tool_call>']
Sampling = common_pb2.SamplingParams


async def chat(cluster: FakeCluster, **fields: Any) -> list[proxy_pb2.ChatEvent]:
    request = proxy_pb2.ChatRequest(**{"messages": [HELLO], "sampling": Sampling(max_tokens=8), **fields})
    async with connected_channel(f"127.0.0.1:{cluster.grpc_port}") as channel:
        stub: Any = proxy_pb2_grpc.ProxyServiceStub(channel)
        return [event async for event in stub.Chat(request, timeout=20.0)]


async def test_calls_are_found_and_answered(cluster: FakeCluster) -> None:
    worker = cluster.pd_workers[0]
    worker.script = CALL
    tools = proxy_pb2.ChatTools(tools=json.dumps([tool("look")]))
    events = await chat(cluster, tools=tools)
    assert "".join(event.text for event in events) == "I look."
    (call,) = [call for event in events for call in event.tool_calls]
    assert (call.index, call.name, call.arguments) == (0, "look", "{}")
    assert events[-1].finish.reason == "tool_calls"
    made = proxy_pb2.ChatMessage(role="assistant", tool_calls=[call])
    answer = proxy_pb2.ChatMessage(role="tool", tool_call_id=call.id, parts=[proxy_pb2.ChatPart(text="blue")])
    await chat(cluster, tools=tools, messages=[HELLO, made, answer])
    sent = json.loads(worker.submits[-1].messages)
    assert sent[1]["tool_calls"] == [
        {"id": call.id, "type": "function", "function": {"name": "look", "arguments": {}}}
    ]
    assert sent[2] == {"role": "tool", "content": "blue", "tool_call_id": call.id}


REFUSED_CHATS: list[tuple[dict[str, Any], str]] = [
    ({"n": 17}, "n must be"),
    ({"sampling": Sampling(choice=1)}, "sampling.choice"),
    ({"sampling": Sampling(logprobs=21)}, "logprobs"),
    ({"sampling": Sampling(bad_words=[" "])}, "bad_words"),
    ({"sampling": Sampling(logit_bias={3: 101})}, "logit_bias"),
    ({"sampling": Sampling(output_format={"json_schema": "{"})}, "output_format.json_schema"),
    ({"sampling": Sampling(output_format={"choices": {}})}, "output_format.choices"),
    ({"tools": proxy_pb2.ChatTools(tools="{}")}, "tools"),
    ({"tools": proxy_pb2.ChatTools(choice="required")}, "tool_choice"),
    ({"tools": proxy_pb2.ChatTools(tools=json.dumps([tool("f")]), function="g")}, "tool_choice"),
    ({"chat_template_kwargs": "[]"}, "chat_template_kwargs"),
    ({"continue_final_message": True}, "continue_final_message"),
    ({"messages": [proxy_pb2.ChatMessage(role="robot")]}, "messages[0].role"),
    (
        {
            "messages": [
                proxy_pb2.ChatMessage(
                    role="assistant", tool_calls=[proxy_pb2.ToolCall(name="f", arguments="[]")]
                )
            ]
        },
        "messages[0].tool_calls[0].arguments",
    ),
]


async def test_what_cannot_be_is_refused_by_name(cluster: FakeCluster) -> None:
    for fields, named in REFUSED_CHATS:
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await chat(cluster, **fields)
        assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
        assert named in (caught.value.details() or "")
    assert not cluster.pd_workers[0].submits


WAV = b"RIFF\x00\x00\x00\x00WAVEfmt and so on"
PNG = b"\x89PNG\r\n\x1a\n and so on"
IDS = common_pb2.TokenIds(ids=[5, 6])
SAMPLING = common_pb2.SamplingParams(max_tokens=3)


async def _generate(cluster: FakeCluster, **fields: Any) -> list[proxy_pb2.ChatEvent]:
    async with aio.insecure_channel(f"127.0.0.1:{cluster.grpc_port}") as channel:
        stub: Any = proxy_pb2_grpc.ProxyServiceStub(channel)
        request = proxy_pb2.GenerateRequest(sampling=SAMPLING, return_token_ids=True, **fields)
        return [event async for event in stub.Generate(request, timeout=20)]


async def test_text_and_ids_reach_their_sides_and_are_reported(store: EmbeddingStore) -> None:
    async with FakeCluster(store, modality="text") as cluster:
        events = await _generate(cluster, encoder_text="Hi", decoder_token_ids=IDS)
        assert "".join(event.text for event in events) == whole_text(3)
        assert list(events[0].encoder_prompt_token_ids) == [72, 105]
        assert list(events[0].prompt_token_ids) == [1, 2, 3]
        assert events[-1].finish.reason == "length"
        await _generate(cluster, encoder_token_ids=IDS, decoder_text="Hi")
        first, second = cluster.pd_workers[0].submits
        assert (first.encoder_prompt.text, list(first.prompt.token_ids.ids)) == ("Hi", [5, 6])
        assert (list(second.encoder_prompt.token_ids.ids), second.prompt.text) == ([5, 6], "Hi")
        await cluster.at_rest()


async def test_a_picture_comes_as_a_file_or_as_a_url(store: EmbeddingStore) -> None:
    url = "data:image/png;base64," + base64.b64encode(PNG).decode()
    async with FakeCluster(store, modality="image", encoder_decoder=True) as cluster:
        await _generate(cluster, image=PNG)
        await _generate(cluster, image_url=url, decoder_text="The")
        assert cluster.encoders[0].media == [PNG]
        assert cluster.pd_workers[0].submits[1].prompt.text == "The"
        async with triptych.AsyncClient(f"http://127.0.0.1:{cluster.port}") as client:
            for image in (PNG, url):
                assert (await client.complete(image=image, max_tokens=3)).text == whole_text(3)
            with pytest.raises(InvalidRequest, match="exclude each other"):
                await client.complete(image=PNG, audio=WAV)
        assert cluster.encoders[0].media == [PNG]
        await cluster.at_rest()


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({}, "encoder"),
    ({"encoder_text": ""}, "encoder_text"),
    ({"encoder_token_ids": common_pb2.TokenIds()}, "encoder_token_ids"),
    ({"encoder_text": "x", "decoder_text": ""}, "decoder_text"),
    ({"encoder_text": "x", "transcription": common_pb2.Transcription()}, "transcription"),
    (
        {"audio": WAV, "decoder_text": "x", "transcription": common_pb2.Transcription(task="translate")},
        "transcription",
    ),
    ({"audio": WAV}, "audio"),
    ({"encoder_text": "x", "n": 99}, "n"),
    ({"image_url": "ftp://x/y.png"}, "image_url"),
    ({"encoder_text": "x", "mm_processor_kwargs": '{"form": "token_ids"}'}, "mm_processor_kwargs"),
]


async def test_bad_fields_end_the_call_by_name(store: EmbeddingStore) -> None:
    async with FakeCluster(store, modality="text") as cluster:
        for fields, name in REFUSED:
            with pytest.raises(aio.AioRpcError) as refused:
                await _generate(cluster, **fields)
            assert refused.value.code() is grpc.StatusCode.INVALID_ARGUMENT
            assert name in (refused.value.details() or "")
        await cluster.at_rest()


async def with_client(cluster: FakeCluster, use: Callable[[triptych.Client], Any]) -> Any:
    def run() -> Any:
        with triptych.Client(f"http://127.0.0.1:{cluster.port}") as client:
            return use(client)

    return await asyncio.to_thread(run)


async def test_the_client_writes_a_file_down(store: EmbeddingStore, tmp_path: Path) -> None:
    path = tmp_path / "speech.wav"
    path.write_bytes(WAV)
    answer = [FIRST_TIME, 72, 105, FIRST_TIME + 100, END_TOKEN]
    async with FakeCluster(store, modality="audio") as cluster:
        pd = cluster.pd_workers[0]
        pd.answers = [answer, answer]
        done = await with_client(cluster, lambda client: client.transcribe(path, language="en"))
        assert (done.text, done.language, done.duration) == ("Hi", "en", 4.0)
        assert [(it.start, it.end, it.text) for it in done.segments] == [(0.0, 2.0, "Hi")]
        async with triptych.AsyncClient(f"http://127.0.0.1:{cluster.port}") as client:
            pd.answers = [[4000], answer]
            assert (await client.translate(WAV)).language == "de"
            assert (await client.complete(audio=WAV, prompt="The", max_tokens=3)).text == whole_text(3)
            with pytest.raises(InvalidRequest, match="language"):
                await client.transcribe(WAV, language="x" * 50)
            pd.answers = [answer]
            srt = await client.transcribe_to(WAV, "srt", language="en")
            assert srt == "1\n00:00:00,000 --> 00:00:02,000\nHi\n\n"
        pd.answers = [[4000], answer]
        command = ["transcribe", str(path), "--format", "vtt", "--translate"]
        address = ["--url", f"http://127.0.0.1:{cluster.port}"]
        shown = await asyncio.to_thread(CliRunner().invoke, app, [*command, *address])
        assert shown.output == "WEBVTT\n\n00:00:00.000 --> 00:00:02.000\nHi\n"
        tasks = [submit.transcription.task for submit in pd.submits]
        assert tasks == ["transcribe", "", "translate", "", "transcribe", "", "translate"]
        assert pd.submits[3].prompt.text == "The"
        await cluster.at_rest()
