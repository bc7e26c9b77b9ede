"""The blocking client. It tries again while a cluster is starting or full."""

from __future__ import annotations

import time
from collections.abc import Generator, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Self, Unpack

import httpx2

from triptych.client.answers import (
    Answer,
    Chunk,
    Completion,
    Transcript,
    answer_of,
    chunk_of,
    completion_of,
    transcript_of,
)
from triptych.client.endpoint import DEFAULT_URL, Body, Endpoint, checked, content_of, field_of, json_object
from triptych.client.options import (
    ChatOptions,
    CompletionOptions,
    File,
    JsonObject,
    Messages,
    Prompt,
    SpeechOptions,
    TranscriptOptions,
)
from triptych.client.wire import (
    CHAT,
    COMPLETIONS,
    TRANSCRIPTIONS,
    TRANSLATIONS,
    EventLines,
    audio_form,
    chat_body,
    completion_body,
    detokenize_body,
    pause,
    tokenize_body,
)
from triptych.errors import RequestError


class Client:
    """A blocking client of one cluster. All methods raise triptych.errors.

    `timeout` is the longest silence, in seconds. A request is sent again, up to `retries` times, while the
    cluster is full or cannot be reached.

    `messages` is a question, with `files` beside it, or OpenAI's list of messages. `options` are fields of
    the request by their OpenAI names, such as `max_tokens`. An empty `model` means the only one served.
    """

    def __init__(
        self, url: str = DEFAULT_URL, *, api_key: str = "", timeout: float = 300.0, retries: int = 2
    ) -> None:
        self._endpoint = Endpoint(url, api_key, timeout)
        self._retries = retries
        self._http = httpx2.Client(**self._endpoint.options)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        self._http.close()

    def ask(
        self, question: str, files: Iterable[File] = (), *, model: str = "", **options: Unpack[ChatOptions]
    ) -> str:
        """The answer's text to a question about files: paths, bytes or URLs."""
        return self.chat(question, files=files, model=model, **options).text

    def chat(
        self,
        messages: Messages,
        *,
        files: Iterable[File] = (),
        model: str = "",
        **options: Unpack[ChatOptions],
    ) -> Answer:
        """The whole answer."""
        return answer_of(self._call("POST", CHAT, chat_body(messages, files, model, options)))

    def stream(
        self,
        messages: Messages,
        *,
        files: Iterable[File] = (),
        model: str = "",
        **options: Unpack[ChatOptions],
    ) -> Generator[Chunk, None, None]:
        """The answer in pieces as they come. Closing the generator cancels the request."""
        body = chat_body(messages, files, model, options, stream=True)
        events = EventLines()
        with self._open_stream(body) as reply:
            try:
                for line in reply.iter_lines():
                    if (event := events.parse(line)) is not None:
                        yield chunk_of(event)
            except httpx2.TransportError as error:
                raise self._endpoint.error_of(error) from error
        events.check_end()

    def complete(
        self,
        prompt: Prompt | None = None,
        *,
        encoder_prompt: Prompt | None = None,
        decoder_prompt: Prompt | None = None,
        audio: File | None = None,
        image: File | None = None,
        model: str = "",
        **options: Unpack[CompletionOptions],
    ) -> Completion:
        """What follows a raw prompt: a text, token ids, or {"prompt": …} / {"prompt_token_ids": […]}.

        Of encoder-decoder models `prompt` alone is the encoder's; or say both prompts; with `audio` (a path
        or bytes) or `image` (also a URL) `prompt` is the decoder's.
        """
        body = completion_body(prompt, encoder_prompt, decoder_prompt, audio, image, model, options)
        return completion_of(self._call("POST", COMPLETIONS, body))

    def transcribe(self, file: File, *, model: str = "", **options: Unpack[TranscriptOptions]) -> Transcript:
        """An audio file (a path or bytes) transcribed."""
        form = audio_form(file, model, options)
        return transcript_of(self._call("POST", TRANSCRIPTIONS, form))

    def translate(self, file: File, *, model: str = "", **options: Unpack[TranscriptOptions]) -> Transcript:
        """An audio file transcribed into English."""
        form = audio_form(file, model, options)
        return transcript_of(self._call("POST", TRANSLATIONS, form))

    def transcribe_to(
        self,
        file: File,
        form: str,
        *,
        translate: bool = False,
        model: str = "",
        **options: Unpack[SpeechOptions],
    ) -> str:
        """An audio file as text of this form: "text", "srt", "vtt", "json" or "verbose_json"."""
        body = audio_form(file, model, options, form)
        return self._reply("POST", TRANSLATIONS if translate else TRANSCRIPTIONS, body).text

    def models(self) -> list[str]:
        """Names that `model` takes."""
        return [model["id"] for model in field_of(self._call("GET", "/v1/models"), "data")]

    def tokenize(self, prompt: Messages, *, model: str = "") -> list[int]:
        """The token ids of a text, or of messages as the chat template renders them."""
        return list(field_of(self._call("POST", "/tokenize", tokenize_body(prompt, model)), "tokens"))

    def detokenize(self, tokens: Sequence[int], *, model: str = "") -> str:
        """The text of token ids."""
        return str(field_of(self._call("POST", "/detokenize", detokenize_body(tokens, model)), "prompt"))

    def _call(self, method: str, path: str, body: Body = None) -> JsonObject:
        return json_object(self._reply(method, path, body))

    def _reply(self, method: str, path: str, body: Body) -> httpx2.Response:
        """The first successful reply; a full or unreachable cluster is tried again."""
        attempt = 0
        while True:
            attempt += 1
            try:
                return checked(self._send(method, path, body))
            except RequestError as error:
                self._wait(error, attempt)

    def _send(self, method: str, path: str, body: Body) -> httpx2.Response:
        try:
            return self._http.request(method, path, **content_of(body))
        except httpx2.TransportError as error:
            raise self._endpoint.error_of(error) from error

    @contextmanager
    def _open_stream(self, body: JsonObject) -> Iterator[httpx2.Response]:
        """The open reply to a chat request; tried again as `_reply` does."""
        attempt = 0
        while True:
            attempt += 1
            request = self._http.build_request("POST", CHAT, json=body)
            try:
                reply = self._send_stream(request)
                break
            except RequestError as error:
                self._wait(error, attempt)
        try:
            yield reply
        finally:
            reply.close()

    def _send_stream(self, request: httpx2.Request) -> httpx2.Response:
        try:
            reply = self._http.send(request, stream=True)
            if reply.status_code >= 400:
                reply.read()
        except httpx2.TransportError as error:
            raise self._endpoint.error_of(error) from error
        checked(reply)
        return reply

    def _wait(self, error: RequestError, attempt: int) -> None:
        """Sleeps before the next try, or raises the error."""
        seconds = pause(error, attempt, self._retries)
        if seconds is None:
            raise error
        time.sleep(seconds)
