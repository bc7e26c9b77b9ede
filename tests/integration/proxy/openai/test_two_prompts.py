"""POST /v1/completions of encoder-decoder models, with the openai package and scripted workers."""

from __future__ import annotations

import base64
from typing import Any

import pytest
from openai import BadRequestError

from support.fakes.fake_workers import MODEL, NAMESPACE, whole_text
from support.fakes.proxy_fakes import FakeCluster
from triptych.base.errors import InvalidRequest
from triptych.base.hashing import mm_hash
from triptych.protos.convert import error_to_proto
from triptych.store.embedding_store import EmbeddingStore

WAV = b"RIFF\x00\x00\x00\x00WAVEfmt and so on"
PNG = b"\x89PNG\r\n\x1a\n and so on"
AUDIO = {"audio": {"data": base64.b64encode(WAV).decode(), "format": "wav"}}


def ids_bytes(*ids: int) -> bytes:
    return b"".join(token.to_bytes(4, "little") for token in ids)


async def _complete(cluster: FakeCluster, prompt: Any = None, **fields: Any) -> Any:
    """The reply; without a prompt the field is null, which the server takes as absent."""
    fields = {"return_token_ids": True, **fields}
    return await cluster.client.completions.create(
        model=MODEL, prompt=prompt, max_tokens=3, extra_body=fields
    )


async def test_a_single_text_is_the_encoders(store: EmbeddingStore) -> None:
    async with FakeCluster(store, modality="text") as cluster:
        reply = await _complete(cluster, "Hi")
        assert reply.choices[0].text == whole_text(3)
        assert reply.choices[0].encoder_prompt_token_ids == [ord("H"), ord("i")]
        assert reply.choices[0].encoder_prompt == "Hi"
        assert reply.choices[0].prompt_token_ids == [1, 2, 3]
        job, encoder = cluster.jobs[0], cluster.encoders[0]
        assert (job.modality, job.processor_options, encoder.media) == ("text", "", [b"Hi"])
        assert job.mm_hash == mm_hash(b"Hi", namespace=NAMESPACE, modality="text")
        submit = cluster.pd_workers[0].submits[0]
        assert (submit.encoder_prompt.text, submit.messages) == ("Hi", b"")
        assert not submit.HasField("prompt") and not submit.HasField("transcription")
        slot = submit.items[0]
        assert (slot.plan.modality, slot.plan.length, slot.plan.mm_hash) == ("text", 0, job.mm_hash)
        await cluster.at_rest()


FORMS = [
    ("Hi", b"Hi", "Hi"),
    ([5, 6], ids_bytes(5, 6), None),
    ({"prompt": "Hi"}, b"Hi", "Hi"),
    ({"prompt_token_ids": [5, 6]}, ids_bytes(5, 6), None),
    ({"prompt_tokens": [5, 6]}, ids_bytes(5, 6), None),
]


@pytest.mark.parametrize("encoder", FORMS, ids=["text", "ids", "TextPrompt", "TokensPrompt", "tokens"])
async def test_both_prompts_come_in_every_form(store: EmbeddingStore, encoder: Any) -> None:
    given, media, text = encoder
    async with FakeCluster(store, modality="text") as cluster:
        for decoder, _, decoder_text in FORMS:
            reply = await _complete(cluster, encoder_prompt=given, decoder_prompt=decoder)
            submit = cluster.pd_workers[0].submits[-1]
            if decoder_text:
                assert submit.prompt.text == decoder_text == reply.choices[0].decoder_prompt
            else:
                assert list(submit.prompt.token_ids.ids) == [5, 6]
            assert submit.encoder_prompt.text == (text or "")
        assert cluster.encoders[0].media == [media], "one item, encoded once"
        await cluster.at_rest()


async def test_audio_is_the_encoders_and_text_the_decoders(store: EmbeddingStore) -> None:
    async with FakeCluster(store, modality="audio") as cluster:
        await _complete(cluster, "The rain", multi_modal_data=AUDIO)
        await _complete(cluster, [2, 0, 171, 5, 2], multi_modal_data=AUDIO)
        await _complete(cluster, multi_modal_data=AUDIO)
        await _complete(cluster, decoder_prompt=[7], encoder_prompt={"multi_modal_data": AUDIO})
        text, ids, default, explicit = cluster.pd_workers[0].submits
        assert text.prompt.text == "The rain" and list(ids.prompt.token_ids.ids) == [2, 0, 171, 5, 2]
        assert not default.HasField("prompt") and list(explicit.prompt.token_ids.ids) == [7]
        assert ids.prompt.unmodified and not explicit.prompt.unmodified
        assert not any(submit.HasField("encoder_prompt") for submit in cluster.pd_workers[0].submits)
        assert cluster.encoders[0].media == [WAV]
        assert cluster.jobs[0].mm_hash == mm_hash(WAV, namespace=NAMESPACE, modality="audio")
        assert text.items[0].plan.grid_thw == [0, 400, 400]
        await cluster.at_rest()


async def test_a_picture_is_the_encoders_in_every_form(store: EmbeddingStore) -> None:
    content = base64.b64encode(PNG).decode()
    url = f"data:image/png;base64,{content}"
    async with FakeCluster(store, modality="image", encoder_decoder=True) as cluster:
        for image in ({"data": content}, {"url": url}, url):
            reply = await _complete(cluster, multi_modal_data={"image": image})
            assert reply.choices[0].text == whole_text(3)
        data = {"image": url}
        await _complete(cluster, "The", multi_modal_data=data)
        await _complete(cluster, {"prompt": "The", "multi_modal_data": data})
        await _complete(cluster, encoder_prompt={"multi_modal_data": data}, decoder_prompt=[7])
        default, *_, text, one_object, ids = cluster.pd_workers[0].submits
        assert one_object.prompt == text.prompt
        assert not default.HasField("prompt") and not default.HasField("encoder_prompt")
        assert text.prompt.text == "The" and list(ids.prompt.token_ids.ids) == [7]
        assert cluster.encoders[0].media == [PNG], "one item, encoded once"
        assert cluster.jobs[0].mm_hash == mm_hash(PNG, namespace=NAMESPACE, modality="image")
        slot = text.items[0]
        assert (slot.plan.modality, slot.plan.length) == ("image", 0)
        await cluster.at_rest()


REFUSED_BY_PICTURES: list[tuple[dict[str, Any], str]] = [
    ({"prompt": "x"}, "prompt"),
    ({"encoder_prompt": "x"}, "encoder_prompt"),
    ({"multi_modal_data": AUDIO}, "multi_modal_data.audio"),
    ({"multi_modal_data": {"image": {}}}, "multi_modal_data.image"),
    (
        {"prompt": {"prompt": "x", "multi_modal_data": {"image": {"data": "?"}}}},
        "prompt.multi_modal_data.image.data",
    ),
    ({"prompt": {"multi_modal_data": AUDIO}, "decoder_prompt": "x"}, "prompt.multi_modal_data"),
    ({"prompt": {"prompt_tokens": [1], "prompt_token_ids": [1]}}, "prompt"),
    ({"multi_modal_data": {"image": 5}}, "multi_modal_data.image"),
    ({"multi_modal_data": {"image": {"data": "?"}}}, "multi_modal_data.image.data"),
    ({"multi_modal_data": {"image": {"url": "ftp://x/y.png"}}}, "multi_modal_data.image.url"),
    ({"multi_modal_data": {"image": "data:text/plain;base64,QQ=="}}, "multi_modal_data.image"),
    ({"multi_modal_data": {"image": {"url": "http://127.0.0.1:1/a.png"}}}, "multi_modal_data.image.url"),
    ({"multi_modal_data": {"image": "data:image/png;base64,QQ==", **AUDIO}}, "multi_modal_data"),
]


async def test_what_a_model_of_pictures_cannot_take_is_refused_by_field(store: EmbeddingStore) -> None:
    async with FakeCluster(store, modality="image", encoder_decoder=True) as cluster:
        for fields, param in REFUSED_BY_PICTURES:
            prompt = fields.get("prompt")
            with pytest.raises(BadRequestError) as refused:
                await _complete(cluster, prompt, **{k: v for k, v in fields.items() if k != "prompt"})
            assert refused.value.param == param, fields
        with pytest.raises(
            BadRequestError, match=r"multi_modal_data\.image in POST /v1/completions"
        ) as refused:
            await cluster.ask([{"role": "user", "content": "Hi"}])
        assert refused.value.param == "messages"
        assert not cluster.jobs and not cluster.pd_workers[0].submits
        await cluster.at_rest()


async def test_a_decoder_only_model_refuses_an_encoders_prompt(cluster: FakeCluster) -> None:
    for fields, param in (
        ({"encoder_prompt": "x"}, "encoder_prompt"),
        ({"multi_modal_data": AUDIO}, "multi_modal_data.audio"),
        ({"multi_modal_data": {"image": "data:image/png;base64,QQ=="}}, "multi_modal_data.image"),
    ):
        with pytest.raises(BadRequestError) as refused:
            await _complete(cluster, **fields)
        assert refused.value.param == param


async def test_a_speech_model_refuses_text_for_its_encoder_and_conversations(store: EmbeddingStore) -> None:
    async with FakeCluster(store, modality="audio") as cluster:
        for prompt, fields, param in (
            ("x", {}, "prompt"),
            (None, {"encoder_prompt": "x"}, "encoder_prompt"),
            (None, {"multi_modal_data": {"audio": {"data": "?"}}}, "multi_modal_data.audio"),
        ):
            with pytest.raises(BadRequestError) as refused:
                await _complete(cluster, prompt, **fields)
            assert refused.value.param == param
        with pytest.raises(BadRequestError) as refused:
            await cluster.ask([{"role": "user", "content": "Hi"}])
        assert refused.value.param == "messages"
        await cluster.at_rest()


async def test_a_workers_complaint_about_the_decoders_prompt_names_the_clients_field(store):
    async with FakeCluster(store, modality="text") as cluster:
        for fields, param in (
            ({"encoder_prompt": "a", "decoder_prompt": [9]}, "decoder_prompt"),
            ({"prompt": "a"}, "prompt"),
        ):
            cluster.pd_workers[0].refusals = [
                error_to_proto(InvalidRequest("it is too long", param="prompt"))
            ]
            prompt = fields.pop("prompt", None)
            with pytest.raises(BadRequestError, match="it is too long") as refused:
                await _complete(cluster, prompt, **fields)
            assert refused.value.param == param
        await cluster.at_rest()


async def test_a_streamed_reply_reports_both_prompts_first(store: EmbeddingStore) -> None:
    async with FakeCluster(store, modality="text") as cluster:
        chunks = await cluster.client.completions.create(model=MODEL, prompt="Hi", max_tokens=2, stream=True)
        first, *rest = [chunk async for chunk in chunks]
        assert first.choices[0].encoder_prompt_token_ids == [72, 105]
        assert first.choices[0].prompt_token_ids == [1, 2, 3]
        assert "".join(chunk.choices[0].text for chunk in rest) == whole_text(2)
