# Made from async_client.py by `make client`: change that one.
"""A client of one cluster. It tries again while the cluster is starting or full."""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextlib import closing
from typing import Self, Unpack

import httpx2

from triptych.apps.client import answers, endpoint, fields, wire
from triptych.base.errors import RequestError


class Client:
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
        self._http = httpx2.Client(**self._endpoint.options)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        self._http.close()

    def ask(
        self,
        question: str,
        files: fields.Files = (),
        *,
        model: str = "",
        **options: Unpack[fields.ChatFields],
    ) -> str:
        """The answer's text to a question about files: paths, URLs, bytes or PIL pictures, one or a list."""
        answer = self.chat(question, files=files, model=model, **options)
        return answer.text

    def chat(
        self,
        messages: fields.Messages,
        *,
        files: fields.Files = (),
        model: str = "",
        **options: Unpack[fields.ChatFields],
    ) -> answers.Answer:
        """The whole answer."""
        body = endpoint.at_once(wire.chat_body, messages, files, model, options)
        return answers.answer_of(self._call(wire.CHAT, body))

    def stream(
        self,
        messages: fields.Messages,
        *,
        files: fields.Files = (),
        model: str = "",
        **options: Unpack[fields.ChatFields],
    ) -> answers.Chunks:
        """The answer in pieces as they come. Closing the generator cancels the request."""
        body = endpoint.at_once(wire.chat_body, messages, files, model, options, stream=True)
        events = wire.EventLines()
        with closing(self._reply(wire.CHAT, body, stream=True)) as reply:
            try:
                for data in reply.iter_bytes():
                    for event in events.feed(data):
                        yield answers.chunk_of(event)
            except httpx2.TransportError as error:
                raise self._endpoint.error_of(error) from error
        events.check_end()

    def complete(
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
        body = endpoint.at_once(
            wire.completion_body, prompt, encoder_prompt, decoder_prompt, audio, image, model, options
        )
        return answers.completion_of(self._call(wire.COMPLETIONS, body))

    def embed(
        self,
        inputs: fields.Prompt | fields.Messages,
        *,
        files: fields.Files = (),
        model: str = "",
        **options: Unpack[fields.EmbeddingFields],
    ) -> answers.Vectors:
        """A vector for each input: texts or token ids, or one of messages, or of a text with `files`."""
        body = endpoint.at_once(wire.embedding_body, inputs, files, model, options)
        return answers.embeddings_of(self._call(wire.EMBEDDINGS, body))

    def embed_tokens(
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
        body = endpoint.at_once(wire.pooling_body, inputs, files, model, options)
        return answers.token_vectors_of(self._call(wire.POOLING, body))

    def rerank(
        self,
        query: fields.Content,
        documents: Sequence[fields.Content],
        *,
        model: str = "",
        **options: Unpack[fields.RerankFields],
    ) -> answers.Ranking:
        """The documents by their relevance to the query: texts, or objects such as {"image": URL}."""
        body = endpoint.at_once(wire.rerank_body, query, documents, model, options)
        return answers.ranking_of(self._call(wire.RERANK, body))

    def transcribe(
        self, file: fields.AudioFile, *, model: str = "", **options: Unpack[fields.TranscriptFields]
    ) -> answers.Transcript:
        """An audio file (a path or bytes) transcribed."""
        form = endpoint.at_once(wire.audio_form, file, model, options)
        return answers.transcript_of(self._call(wire.TRANSCRIPTIONS, form))

    def translate(
        self, file: fields.AudioFile, *, model: str = "", **options: Unpack[fields.TranscriptFields]
    ) -> answers.Transcript:
        """An audio file transcribed into English."""
        form = endpoint.at_once(wire.audio_form, file, model, options)
        return answers.transcript_of(self._call(wire.TRANSLATIONS, form))

    def transcribe_to(
        self,
        file: fields.AudioFile,
        form: str,
        *,
        translate: bool = False,
        model: str = "",
        **options: Unpack[fields.SpeechFields],
    ) -> str:
        """An audio file as text of this form: "text", "srt", "vtt", "json" or "verbose_json"."""
        body = endpoint.at_once(wire.audio_form, file, model, options, form)
        reply = self._reply(wire.TRANSLATIONS if translate else wire.TRANSCRIPTIONS, body)
        return reply.text

    def models(self) -> list[str]:
        """Names that `model` takes."""
        return [model["id"] for model in endpoint.field_of(self._call("/v1/models"), "data")]

    def cluster(self) -> fields.JsonObject:
        """The cluster as one of its proxies sees it now, as GET /cluster answers."""
        return self._call("/cluster")

    def tokenize(self, prompt: fields.Messages, *, model: str = "") -> list[int]:
        """The token ids of a text, or of messages as the chat template renders them."""
        return list(endpoint.field_of(self._call("/tokenize", wire.tokenize_body(prompt, model)), "tokens"))

    def detokenize(self, tokens: Sequence[int], *, model: str = "") -> str:
        """The text of token ids."""
        return str(
            endpoint.field_of(self._call("/detokenize", wire.detokenize_body(tokens, model)), "prompt")
        )

    def _call(self, path: str, body: endpoint.Body = None) -> fields.JsonObject:
        return endpoint.json_object(self._reply(path, body))

    def _reply(self, path: str, body: endpoint.Body, *, stream: bool = False) -> httpx2.Response:
        """The first successful reply, open with `stream`; a full or unreachable cluster is tried again."""
        attempt = 0
        while True:
            attempt += 1
            try:
                return self._send(path, body, stream)
            except RequestError as error:
                if (seconds := wire.pause(error, attempt, self._retries)) is None:
                    raise
                time.sleep(seconds)

    def _send(self, path: str, body: endpoint.Body, stream: bool) -> httpx2.Response:
        request = self._http.build_request(
            "GET" if body is None else "POST", path, **endpoint.content_of(body)
        )
        try:
            reply = self._http.send(request, stream=stream)
            if reply.status_code >= 400:
                reply.read()
        except httpx2.TransportError as error:
            raise self._endpoint.error_of(error) from error
        return endpoint.checked(reply)
