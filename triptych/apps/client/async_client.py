"""A client of one cluster. It tries again while the cluster is starting or full."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from contextlib import aclosing
from typing import Self, Unpack

import httpx2

from triptych.apps.client import answers, endpoint, fields, wire
from triptych.base.errors import RequestError


class AsyncClient:
    """A client of one cluster, for asyncio as `AsyncClient`, blocking as `Client`: the same methods.

    All methods raise triptych.base.errors. `timeout` is the longest silence, in seconds. A request is sent
    again, up to `retries` times, while the cluster is full or cannot be reached. `ca_file` holds the CA
    certificates (PEM) of an https:// cluster, where the system does not know them.

    `messages` is a question, with `files` beside it, or OpenAI's list of messages. `options` are fields of
    the request by their OpenAI names, such as `max_tokens`. An empty `model` means the only one served.
    """

    def __init__(
        self,
        url: str = endpoint.DEFAULT_URL,
        *,
        api_key: str = "",
        timeout: float = 300.0,
        retries: int = 2,
        ca_file: str = "",
    ) -> None:
        self._endpoint = endpoint.Endpoint(url, api_key, timeout, ca_file)
        self._retries = retries
        self._http = httpx2.AsyncClient(**self._endpoint.options)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def close(self) -> None:
        await self._http.aclose()

    async def ask(
        self,
        question: str,
        files: fields.Files = (),
        *,
        model: str = "",
        **options: Unpack[fields.ChatFields],
    ) -> str:
        """The answer's text to a question about files: paths, URLs, bytes or PIL pictures, one or a list."""
        answer = await self.chat(question, files=files, model=model, **options)
        return answer.text

    async def chat(
        self,
        messages: fields.Messages,
        *,
        files: fields.Files = (),
        model: str = "",
        **options: Unpack[fields.ChatFields],
    ) -> answers.Answer:
        """The whole answer."""
        body = await endpoint.in_thread(wire.chat_body, messages, files, model, options)
        return answers.answer_of(await self._call(wire.CHAT, body))

    async def stream(
        self,
        messages: fields.Messages,
        *,
        files: fields.Files = (),
        model: str = "",
        **options: Unpack[fields.ChatFields],
    ) -> answers.AsyncChunks:
        """The answer in pieces as they come. Closing the generator cancels the request."""
        body = await endpoint.in_thread(wire.chat_body, messages, files, model, options, stream=True)
        events = wire.EventLines()
        async with aclosing(await self._reply(wire.CHAT, body, stream=True)) as reply:
            try:
                async for data in reply.aiter_bytes():
                    for event in events.feed(data):
                        yield answers.chunk_of(event)
            except httpx2.TransportError as error:
                raise self._endpoint.error_of(error) from error
        events.check_end()

    async def complete(
        self,
        prompt: fields.Prompt | None = None,
        *,
        encoder_prompt: fields.Prompt | None = None,
        decoder_prompt: fields.Prompt | None = None,
        audio: fields.AudioFile | None = None,
        image: fields.File | None = None,
        model: str = "",
        **options: Unpack[fields.CompletionFields],
    ) -> answers.Completion:
        """What follows a raw prompt: a text, token ids, or {"prompt": …} / {"prompt_token_ids": […]}.

        Of encoder-decoder models `prompt` alone is the encoder's; or say both prompts; with `audio` (a path
        or bytes) or `image` (also a URL) `prompt` is the decoder's.
        """
        body = await endpoint.in_thread(
            wire.completion_body, prompt, encoder_prompt, decoder_prompt, audio, image, model, options
        )
        return answers.completion_of(await self._call(wire.COMPLETIONS, body))

    async def embed(
        self,
        inputs: fields.Prompt | fields.Messages,
        *,
        files: fields.Files = (),
        model: str = "",
        **options: Unpack[fields.EmbeddingFields],
    ) -> answers.Vectors:
        """A vector for each input: texts or token ids, or one of messages, or of a text with `files`."""
        body = await endpoint.in_thread(wire.embedding_body, inputs, files, model, options)
        return answers.embeddings_of(await self._call(wire.EMBEDDINGS, body))

    async def embed_tokens(
        self,
        inputs: fields.Prompt | fields.Messages,
        *,
        files: fields.Files = (),
        model: str = "",
        **options: Unpack[fields.TokenVectorFields],
    ) -> answers.TokenVectors:
        """As `embed`, a vector for each token, by a late-interaction model.

        A query is a message of that role: `[{"role": "query", "content": "…"}]`.
        """
        body = await endpoint.in_thread(wire.pooling_body, inputs, files, model, options)
        return answers.token_vectors_of(await self._call(wire.POOLING, body))

    async def rerank(
        self,
        query: fields.Content,
        documents: Sequence[fields.Content],
        *,
        model: str = "",
        **options: Unpack[fields.RerankFields],
    ) -> answers.Ranking:
        """The documents by their relevance to the query: texts, or objects such as {"image": URL}."""
        body = await endpoint.in_thread(wire.rerank_body, query, documents, model, options)
        return answers.ranking_of(await self._call(wire.RERANK, body))

    async def transcribe(
        self, file: fields.AudioFile, *, model: str = "", **options: Unpack[fields.TranscriptFields]
    ) -> answers.Transcript:
        """An audio file (a path or bytes) transcribed."""
        form = await endpoint.in_thread(wire.audio_form, file, model, options)
        return answers.transcript_of(await self._call(wire.TRANSCRIPTIONS, form))

    async def translate(
        self, file: fields.AudioFile, *, model: str = "", **options: Unpack[fields.TranscriptFields]
    ) -> answers.Transcript:
        """An audio file transcribed into English."""
        form = await endpoint.in_thread(wire.audio_form, file, model, options)
        return answers.transcript_of(await self._call(wire.TRANSLATIONS, form))

    async def transcribe_to(
        self,
        file: fields.AudioFile,
        form: str,
        *,
        translate: bool = False,
        model: str = "",
        **options: Unpack[fields.SpeechFields],
    ) -> str:
        """An audio file as text of this form: "text", "srt", "vtt", "json" or "verbose_json"."""
        body = await endpoint.in_thread(wire.audio_form, file, model, options, form)
        reply = await self._reply(wire.TRANSLATIONS if translate else wire.TRANSCRIPTIONS, body)
        return reply.text

    async def models(self) -> list[str]:
        """Names that `model` takes."""
        return [model["id"] for model in endpoint.field_of(await self._call("/v1/models"), "data")]

    async def cluster(self) -> fields.JsonObject:
        """The cluster as one of its proxies sees it now, as GET /cluster answers."""
        return await self._call("/cluster")

    async def tokenize(self, prompt: fields.Messages, *, model: str = "") -> list[int]:
        """The token ids of a text, or of messages as the chat template renders them."""
        return list(
            endpoint.field_of(await self._call("/tokenize", wire.tokenize_body(prompt, model)), "tokens")
        )

    async def detokenize(self, tokens: Sequence[int], *, model: str = "") -> str:
        """The text of token ids."""
        return str(
            endpoint.field_of(await self._call("/detokenize", wire.detokenize_body(tokens, model)), "prompt")
        )

    async def _call(self, path: str, body: endpoint.Body = None) -> fields.JsonObject:
        return endpoint.json_object(await self._reply(path, body))

    async def _reply(self, path: str, body: endpoint.Body, *, stream: bool = False) -> httpx2.Response:
        """The first successful reply, open with `stream`; a full or unreachable cluster is tried again."""
        attempt = 0
        while True:
            attempt += 1
            try:
                return await self._send(path, body, stream)
            except RequestError as error:
                if (seconds := wire.pause(error, attempt, self._retries)) is None:
                    raise
                await asyncio.sleep(seconds)

    async def _send(self, path: str, body: endpoint.Body, stream: bool) -> httpx2.Response:
        request = self._http.build_request(
            "GET" if body is None else "POST", path, **endpoint.content_of(body)
        )
        try:
            reply = await self._http.send(request, stream=stream)
            if reply.status_code >= 400:
                await reply.aread()
        except httpx2.TransportError as error:
            raise self._endpoint.error_of(error) from error
        return endpoint.checked(reply)
