"""The clients: one that waits, one for asyncio. Both try again while a cluster is starting or full."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, AsyncIterator, Generator, Iterable, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from typing import Any, Self

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
from triptych.client.messages import File, Messages
from triptych.client.wire import (
    AudioForm,
    EventLines,
    audio_form,
    chat_body,
    completion_body,
    error_of,
    pause,
    tokenize_body,
)
from triptych.errors import DeadlineExceeded, InternalError, InvalidRequest, RequestError, Unavailable

CHAT = "/v1/chat/completions"
COMPLETIONS = "/v1/completions"
TRANSCRIPTIONS = "/v1/audio/transcriptions"
TRANSLATIONS = "/v1/audio/translations"
DEFAULT_URL = "http://127.0.0.1:8000"


Body = dict[str, Any] | AudioForm | None


def _content(body: Body) -> dict[str, Any]:
    """What httpx calls it."""
    return {"data": body.fields, "files": body.files} if isinstance(body, AudioForm) else {"json": body}


class _Settings:
    """Where the cluster is and how long to be patient."""

    def __init__(self, url: str, api_key: str, timeout: float, retries: int) -> None:
        if not url.lower().startswith(("http://", "https://")):
            raise InvalidRequest(f"{url!r} is no address of a cluster: write http://host:port", param="url")
        self.url = url.rstrip("/").removesuffix("/v1")
        self.retries = retries
        self.options: dict[str, Any] = {
            "base_url": self.url,
            "headers": {"Authorization": f"Bearer {api_key}"} if api_key else {},
            "timeout": httpx2.Timeout(timeout, connect=10.0),
        }

    def failed(self, error: httpx2.TransportError) -> RequestError:
        """What a connection that failed means; silence is not tried again, the answer may be on its way."""
        if isinstance(error, httpx2.ReadTimeout):
            return DeadlineExceeded(f"{self.url} has been silent for too long")
        return Unavailable(f"nobody answers at {self.url} ({error or type(error).__name__})")


def _checked(reply: httpx2.Response) -> httpx2.Response:
    """The reply; raises what one with an error status says. Its body has been read."""
    if reply.status_code >= 400:
        raise error_of(reply.status_code, reply.content, reply.headers.get("retry-after"))
    return reply


def _object(reply: httpx2.Response) -> dict[str, Any]:
    try:
        value = reply.json()
    except ValueError:
        value = None
    if not isinstance(value, dict):
        raise InternalError("the server's reply is no JSON object")
    return value


def _field(reply: dict[str, Any], name: str) -> Any:
    if name not in reply:
        raise InternalError(f"the server's reply has no {name}")
    return reply[name]


class Client:
    """Asks a cluster. `timeout` is the longest silence, in seconds; all methods raise triptych.errors.

    `messages` is a question, with `files` beside it, or OpenAI's list of messages. `options` are fields of
    the request, such as `max_tokens`, `temperature` or `tools`. An empty `model` means the only one served.
    A request is sent again, up to `retries` times, while the cluster is full or not there.
    """

    def __init__(
        self, url: str = DEFAULT_URL, *, api_key: str = "", timeout: float = 300.0, retries: int = 2
    ) -> None:
        self._settings = _Settings(url, api_key, timeout, retries)
        self._http = httpx2.Client(**self._settings.options)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        self._http.close()

    def ask(self, question: str, files: Iterable[File] = (), *, model: str = "", **options: Any) -> str:
        """The answer's text to a question about files: paths, bytes or URLs."""
        return self.chat(question, files=files, model=model, **options).text

    def chat(
        self, messages: Messages, *, files: Iterable[File] = (), model: str = "", **options: Any
    ) -> Answer:
        """The whole answer."""
        return answer_of(self._call("POST", CHAT, chat_body(messages, files, model, options)))

    def stream(
        self, messages: Messages, *, files: Iterable[File] = (), model: str = "", **options: Any
    ) -> Generator[Chunk, None, None]:
        """The answer in pieces as they come. Closing the generator cancels the request."""
        body = chat_body(messages, files, model, options) | {"stream": True}
        events = EventLines()
        with self._opened(body) as reply:
            try:
                for line in reply.iter_lines():
                    if (event := events.take(line)) is not None:
                        yield chunk_of(event)
            except httpx2.TransportError as error:
                raise self._settings.failed(error) from error
        events.check_end()

    def complete(
        self,
        prompt: Any = None,
        *,
        encoder_prompt: Any = None,
        decoder_prompt: Any = None,
        audio: File | None = None,
        image: File | None = None,
        model: str = "",
        **options: Any,
    ) -> Completion:
        """What follows a raw prompt: a text, token ids, or {"prompt": …} / {"prompt_token_ids": […]}.

        Of encoder-decoder models `prompt` alone is the encoder's; or say both prompts; with `audio` (a path
        or bytes) or `image` (also a URL) `prompt` is the decoder's.
        """
        body = completion_body(prompt, encoder_prompt, decoder_prompt, audio, image, model, options)
        return completion_of(self._call("POST", COMPLETIONS, body))

    def transcribe(self, file: File, *, model: str = "", **options: Any) -> Transcript:
        """An audio file (a path or bytes) written down. `options`: language, prompt, temperature …"""
        form = audio_form(file, model, options)
        return transcript_of(self._call("POST", TRANSCRIPTIONS, form))

    def translate(self, file: File, *, model: str = "", **options: Any) -> Transcript:
        """The same in English."""
        form = audio_form(file, model, options)
        return transcript_of(self._call("POST", TRANSLATIONS, form))

    def transcribe_to(
        self, file: File, form: str, *, translate: bool = False, model: str = "", **options: Any
    ) -> str:
        """An audio file as text of this form: "text", "srt", "vtt", "json" or "verbose_json"."""
        body = audio_form(file, model, options | {"response_format": form})
        return self._reply("POST", TRANSLATIONS if translate else TRANSCRIPTIONS, body).text

    def models(self) -> list[str]:
        """Names that `model` takes."""
        return [model["id"] for model in _field(self._call("GET", "/v1/models"), "data")]

    def tokenize(self, prompt: Messages, *, model: str = "") -> list[int]:
        """The token ids of a text, or of messages as the chat template renders them."""
        return list(_field(self._call("POST", "/tokenize", tokenize_body(prompt, model)), "tokens"))

    def detokenize(self, tokens: Sequence[int], *, model: str = "") -> str:
        """The text of token ids."""
        body = {"tokens": list(tokens)} | ({"model": model} if model else {})
        return str(_field(self._call("POST", "/detokenize", body), "prompt"))

    def _call(self, method: str, path: str, body: Body = None) -> dict[str, Any]:
        return _object(self._reply(method, path, body))

    def _reply(self, method: str, path: str, body: Body) -> httpx2.Response:
        """The reply that says yes; tried again while it makes sense."""
        attempt = 0
        while True:
            attempt += 1
            try:
                return _checked(self._send(method, path, body))
            except RequestError as error:
                self._wait(error, attempt)

    def _send(self, method: str, path: str, body: Body) -> httpx2.Response:
        try:
            return self._http.request(method, path, **_content(body))
        except httpx2.TransportError as error:
            raise self._settings.failed(error) from error

    @contextmanager
    def _opened(self, body: dict[str, Any]) -> Iterator[httpx2.Response]:
        """A streamed reply that has begun well."""
        attempt = 0
        while True:
            attempt += 1
            request = self._http.build_request("POST", CHAT, json=body)
            try:
                reply = self._begun(request)
                break
            except RequestError as error:
                self._wait(error, attempt)
        try:
            yield reply
        finally:
            reply.close()

    def _begun(self, request: httpx2.Request) -> httpx2.Response:
        try:
            reply = self._http.send(request, stream=True)
            if reply.status_code >= 400:
                reply.read()
        except httpx2.TransportError as error:
            raise self._settings.failed(error) from error
        _checked(reply)
        return reply

    def _wait(self, error: RequestError, attempt: int) -> None:
        """Sleeps before the next try, or raises the error."""
        seconds = pause(error, attempt, self._settings.retries)
        if seconds is None:
            raise error
        time.sleep(seconds)


class AsyncClient:
    """`Client` for asyncio: the same methods, awaited; `stream` is iterated with `async for`."""

    def __init__(
        self, url: str = DEFAULT_URL, *, api_key: str = "", timeout: float = 300.0, retries: int = 2
    ) -> None:
        self._settings = _Settings(url, api_key, timeout, retries)
        self._http = httpx2.AsyncClient(**self._settings.options)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def close(self) -> None:
        await self._http.aclose()

    async def ask(self, question: str, files: Iterable[File] = (), *, model: str = "", **options: Any) -> str:
        """The answer's text to a question about files: paths, bytes or URLs."""
        return (await self.chat(question, files=files, model=model, **options)).text

    async def chat(
        self, messages: Messages, *, files: Iterable[File] = (), model: str = "", **options: Any
    ) -> Answer:
        """The whole answer. Files are read in a thread."""
        body = await asyncio.to_thread(chat_body, messages, files, model, options)
        return answer_of(await self._call("POST", CHAT, body))

    async def stream(
        self, messages: Messages, *, files: Iterable[File] = (), model: str = "", **options: Any
    ) -> AsyncGenerator[Chunk, None]:
        """The answer in pieces as they come. Closing the generator cancels the request."""
        body = await asyncio.to_thread(chat_body, messages, files, model, options | {"stream": True})
        events = EventLines()
        async with self._opened(body) as reply:
            try:
                async for line in reply.aiter_lines():
                    if (event := events.take(line)) is not None:
                        yield chunk_of(event)
            except httpx2.TransportError as error:
                raise self._settings.failed(error) from error
        events.check_end()

    async def complete(
        self,
        prompt: Any = None,
        *,
        encoder_prompt: Any = None,
        decoder_prompt: Any = None,
        audio: File | None = None,
        image: File | None = None,
        model: str = "",
        **options: Any,
    ) -> Completion:
        """What follows a raw prompt: a text, token ids, or {"prompt": …} / {"prompt_token_ids": […]}.

        Of encoder-decoder models `prompt` alone is the encoder's; or say both prompts; with `audio` (a path
        or bytes) or `image` (also a URL) `prompt` is the decoder's.
        """
        body = await asyncio.to_thread(
            completion_body, prompt, encoder_prompt, decoder_prompt, audio, image, model, options
        )
        return completion_of(await self._call("POST", COMPLETIONS, body))

    async def transcribe(self, file: File, *, model: str = "", **options: Any) -> Transcript:
        """An audio file (a path or bytes) written down. `options`: language, prompt, temperature …"""
        form = await asyncio.to_thread(audio_form, file, model, options)
        return transcript_of(await self._call("POST", TRANSCRIPTIONS, form))

    async def translate(self, file: File, *, model: str = "", **options: Any) -> Transcript:
        """The same in English."""
        form = await asyncio.to_thread(audio_form, file, model, options)
        return transcript_of(await self._call("POST", TRANSLATIONS, form))

    async def transcribe_to(
        self, file: File, form: str, *, translate: bool = False, model: str = "", **options: Any
    ) -> str:
        """An audio file as text of this form: "text", "srt", "vtt", "json" or "verbose_json"."""
        body = await asyncio.to_thread(audio_form, file, model, options | {"response_format": form})
        return (await self._reply("POST", TRANSLATIONS if translate else TRANSCRIPTIONS, body)).text

    async def models(self) -> list[str]:
        """Names that `model` takes."""
        return [model["id"] for model in _field(await self._call("GET", "/v1/models"), "data")]

    async def tokenize(self, prompt: Messages, *, model: str = "") -> list[int]:
        """The token ids of a text, or of messages as the chat template renders them."""
        return list(_field(await self._call("POST", "/tokenize", tokenize_body(prompt, model)), "tokens"))

    async def detokenize(self, tokens: Sequence[int], *, model: str = "") -> str:
        """The text of token ids."""
        body = {"tokens": list(tokens)} | ({"model": model} if model else {})
        return str(_field(await self._call("POST", "/detokenize", body), "prompt"))

    async def _call(self, method: str, path: str, body: Body = None) -> dict[str, Any]:
        return _object(await self._reply(method, path, body))

    async def _reply(self, method: str, path: str, body: Body) -> httpx2.Response:
        """The reply that says yes; tried again while it makes sense."""
        attempt = 0
        while True:
            attempt += 1
            try:
                return _checked(await self._send(method, path, body))
            except RequestError as error:
                await self._wait(error, attempt)

    async def _send(self, method: str, path: str, body: Body) -> httpx2.Response:
        try:
            return await self._http.request(method, path, **_content(body))
        except httpx2.TransportError as error:
            raise self._settings.failed(error) from error

    @asynccontextmanager
    async def _opened(self, body: dict[str, Any]) -> AsyncIterator[httpx2.Response]:
        """A streamed reply that has begun well."""
        attempt = 0
        while True:
            attempt += 1
            request = self._http.build_request("POST", CHAT, json=body)
            try:
                reply = await self._begun(request)
                break
            except RequestError as error:
                await self._wait(error, attempt)
        try:
            yield reply
        finally:
            await reply.aclose()

    async def _begun(self, request: httpx2.Request) -> httpx2.Response:
        try:
            reply = await self._http.send(request, stream=True)
            if reply.status_code >= 400:
                await reply.aread()
        except httpx2.TransportError as error:
            raise self._settings.failed(error) from error
        _checked(reply)
        return reply

    async def _wait(self, error: RequestError, attempt: int) -> None:
        """Sleeps before the next try, or raises the error."""
        seconds = pause(error, attempt, self._settings.retries)
        if seconds is None:
            raise error
        await asyncio.sleep(seconds)
