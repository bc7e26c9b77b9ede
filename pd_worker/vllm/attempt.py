"""One call of vLLM for a request: its stream of tokens, as events of the request."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from triptych.base.errors import RequestError
from triptych.base.types import FinishReason, JsonObject
from triptych.pd_worker.core import request_events
from triptych.pd_worker.core.outputs import RawLogprobs
from triptych.pd_worker.core.request import RequestState
from triptych.pd_worker.core.request_events import EngineEvent, OutputProcessor
from triptych.pd_worker.vllm.calls import DirectItems, call_of
from triptych.pd_worker.vllm.http.client import VLLMClient
from triptych.pd_worker.vllm.http.replies import (
    EngineError,
    EngineGarbage,
    EngineUnreachable,
    StreamChoice,
    StreamChunk,
    check_tokens,
)


class Diverged(Exception):
    """A token that came again is another one than before."""


class Replay:
    """The tokens that are known already, and are to come first."""

    def __init__(self, known: Sequence[int]) -> None:
        self._known = tuple(known)
        self._seen = 0

    def is_new(self, token_id: int) -> bool:
        """Whether the next token of the stream is a new one. Diverged where it is not the one expected."""
        if self._seen >= len(self._known):
            return True
        if token_id != self._known[self._seen]:
            raise Diverged(f"output token {self._seen} is {token_id}, and was {self._known[self._seen]}")
        self._seen += 1
        return False


#: What a call is given whose blocks are kept for another server.
KEEP: JsonObject = {"do_remote_decode": True, "do_remote_prefill": False}
#: How long the usage is waited for, after the last token.
_USAGE_SECONDS = 1.0


@dataclass(frozen=True, slots=True)
class StreamPorts:
    """What an attempt uses; `progress` is called for every answer of vLLM."""

    client: VLLMClient
    outputs: OutputProcessor
    emit: Callable[[list[EngineEvent]], None]
    progress: Callable[[], None]
    vocab_size: int
    #: Where its connector reads items besides the store, if it can.
    direct: DirectItems | None = None
    #: Whether vLLM decodes speculatively now.
    speculates: Callable[[], bool] = lambda: False
    #: What vLLM calls pictures of this class.
    image_kind: str = "image"


class Attempt:
    """A stream of vLLM that continues a request; with `replay` from its prompt on.

    `on_first` is called with the first token, when vLLM has all items.
    """

    def __init__(
        self, state: RequestState, ports: StreamPorts, on_first: Callable[[], None], *, replay: bool
    ) -> None:
        self._state = state
        self._ports = ports
        self._on_first = on_first
        self._call = call_of(
            state.request,
            replay=replay,
            direct=ports.direct,
            speculates=ports.speculates(),
            image_kind=ports.image_kind,
        )
        self._replay = Replay(tuple(state.output_token_ids) if replay else ())
        #: vLLM's prefix cache has all that this worker's own earlier call has computed, or has read.
        own = len(state.output_token_ids) > state.request.resumed_tokens
        told = state.request.resumed_tokens > 0 and state.request.cached_tokens is not None
        self._counts_cached = not own and not told
        self._first = True
        self._engine_done = False
        self._ended: FinishReason | None = None
        self._error: RequestError | None = None

    @property
    def end(self) -> tuple[FinishReason, RequestError | None] | None:
        """Why the output has ended; None of one that goes on."""
        return None if self._ended is None else (self._ended, self._error)

    async def first(self) -> JsonObject | None:
        """The first token alone, and where vLLM keeps the prompt's KV meanwhile; None where it does not.

        What follows is another attempt's, and of its prefix cache. EngineError.
        """
        sampling = {**self._call.sampling_params, "max_tokens": 1}
        sampling["min_tokens"] = min(1, sampling["min_tokens"])
        answer = await self._ports.client.whole(
            replace(self._call, sampling_params=sampling, kv_transfer_params=KEEP)
        )
        for choice in answer.choices:
            if choice.finish_reason == "length":
                choice.finish_reason = None
        self._take(answer)
        return answer.kv_transfer_params

    async def run(self) -> tuple[FinishReason, RequestError | None]:
        """Why the output has ended. EngineError where the call failed before, Diverged for another replay."""
        loop = asyncio.get_running_loop()
        try:
            async with asyncio.timeout(None) as patience, self._ports.client.generate(self._call) as chunks:
                async for chunk in chunks:
                    self._take(chunk)
                    if self._ended is not None and not self._engine_done:
                        break
                    if self._engine_done and patience.when() is None:
                        patience.reschedule(loop.time() + _USAGE_SECONDS)
        except TimeoutError:
            if not patience.expired():
                raise
        except EngineError:
            if self._ended is None:
                raise
        if self._ended is None:
            raise EngineUnreachable("the stream ended without a finish_reason")
        return self._ended, self._error

    def _take(self, chunk: StreamChunk) -> None:
        self._ports.progress()
        check_tokens(chunk, self._ports.vocab_size)
        if self._counts_cached and chunk.usage is not None:
            request = self._state.request
            request.cached_tokens = max(request.cached_tokens or 0, chunk.cached_tokens)
        for choice in chunk.choices:
            self._take_choice(choice)

    def _take_choice(self, choice: StreamChoice) -> None:
        logprobs = self._logprobs(choice)
        for index, token_id in enumerate(choice.token_ids or ()):
            if self._ended is not None:
                break
            if self._first:
                self._first = False
                self._on_first()
            if self._replay.is_new(token_id):
                self._append(token_id, logprobs, index)
        if choice.finish_reason is not None:
            self._engine_done = True
            self._end(choice.finish_reason)

    def _logprobs(self, choice: StreamChoice) -> list[RawLogprobs]:
        """One per token where the request asked for them."""
        maximum = self._state.request.sampling.logprobs
        if maximum is None:
            return []
        content = (choice.logprobs and choice.logprobs.content) or []
        if len(content) != len(choice.token_ids or ()):
            raise EngineGarbage("tokens without their log-probabilities")
        return [one.raw(maximum) for one in content]

    def _append(self, token_id: int, logprobs: list[RawLogprobs], index: int) -> None:
        raw = logprobs[index] if logprobs else None
        event, self._ended, self._error = self._ports.outputs.append(
            self._state, token_id, raw, time.monotonic()
        )
        if event is not None:
            self._ports.emit([event])

    def _end(self, reason: str) -> None:
        """vLLM has ended the output, in nearly all cases at the token at which it ends here, too."""
        if self._ended is not None:
            return
        if reason == "abort":
            raise EngineUnreachable("vLLM has aborted the request")
        if text := self._state.request.output.flush():
            self._ports.emit([request_events.new_tokens(self._state, (), text)])
        self._ended = FinishReason.LENGTH if reason == "length" else FinishReason.STOP
