"""POST /v1/completions."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import aclosing
from functools import partial

from triptych.base.delta import Delta
from triptych.base.errors import InvalidRequest
from triptych.base.types import PositionLogprobs, Usage
from triptych.proxy.call.chat import Admitted, ChatCall, Done, Output, Timings
from triptych.proxy.call.pooled import first_error
from triptych.proxy.http.endpoint import HttpReply
from triptych.proxy.http.json_body import DONE, event, to_json
from triptych.proxy.openai.chat.endpoint import CallEndpoint, Json, finite_logprob, timings_body, usage_body
from triptych.proxy.openai.completions.request import (
    CompletionBody,
    CompletionReplyOptions,
    CompletionRequest,
    parse_completion,
)
from triptych.proxy.parsing.parse import Parse
from triptych.proxy.quotas.current_call import current_call


class CompletionBook:
    """The state that both kinds of reply share: usage over all prompts, and each choice's place in its text.

    Choice `c` of prompt `p` has the index `p * n + c`.
    """

    def __init__(
        self, request_id: str, model: str, options: CompletionReplyOptions, echoes: Sequence[str]
    ) -> None:
        self.options = options
        self.head: Json = {
            "id": f"cmpl-{request_id}",
            "object": "text_completion",
            "created": int(time.time()),
            "model": model,
        }
        self.started = [Admitted() for _ in options.prompts]
        self.usage = Usage(0, 0, 0)
        self.timings: Timings | None = None
        self.open = len(options.prompts)
        self._echoes = echoes
        self._offsets = [len(self.echo(index)) for index in range(len(options.prompts) * options.n)]

    def echo(self, index: int) -> str:
        """The prompt's text where it is to be repeated."""
        return self._echoes[index // self.options.n] if self.options.echo else ""

    def prompt_fields(self, prompt: int) -> Json:
        """Both prompts of an encoder-decoder model, with their texts where given; of others the token ids
        where they were asked for."""
        started = self.started[prompt]
        fields: Json = {"prompt_token_ids": [*started.prompt_token_ids]}
        if not (self.options.encoder or started.encoder_prompt_token_ids):
            return fields if self.options.return_token_ids else {}
        fields["encoder_prompt_token_ids"] = [*started.encoder_prompt_token_ids]
        given = self.options.prompts[prompt]
        if self.options.encoder is None:
            return fields | ({"encoder_prompt": given} if isinstance(given, str) else {})
        if isinstance(self.options.encoder.source, str):
            fields["encoder_prompt"] = self.options.encoder.source
        return fields | ({"decoder_prompt": given} if isinstance(given, str) else {})

    def logprobs(self, index: int, delta: Delta) -> Json | None:
        """The legacy shape of a piece's log-probabilities; offsets count characters of the whole text."""
        if self.options.logprobs is None:
            return None
        tokens = [position.chosen.text for position in delta.logprobs]
        offsets, at = [], self._offsets[index]
        for text in tokens:
            offsets.append(at)
            at += len(text)
        self._offsets[index] = at
        return {
            "tokens": tokens,
            "token_logprobs": [finite_logprob(position.chosen.logprob) for position in delta.logprobs],
            "top_logprobs": [_top(position) for position in delta.logprobs],
            "text_offset": offsets,
        }

    def ended(self, done: Done) -> None:
        """A call's last choice is done."""
        usage = self.usage
        self.usage = Usage(
            usage.prompt_tokens + done.usage.prompt_tokens,
            usage.completion_tokens + done.usage.completion_tokens,
            usage.cached_tokens + done.usage.cached_tokens,
        )
        self.timings = done.timings
        self.open -= 1

    def timings_field(self) -> Json:
        """Stages of the prompt that ended last."""
        if not self.options.timings or self.timings is None:
            return {}
        return {"triptych_timings": timings_body(self.timings)}


class CompletionStream:
    """The chunks of one streamed reply."""

    def __init__(self, book: CompletionBook) -> None:
        self._book = book
        self._begun = [False] * (len(book.options.prompts) * book.options.n)
        self._usage: Json = {"usage": None} if book.options.include_usage else {}

    def render(self, prompt: int, outputs: Sequence[Output]) -> bytes:
        """The events of a batch of one prompt's outputs; empty when it has nothing to show yet."""
        return b"".join([self._one(prompt, output) for output in outputs])

    def _one(self, prompt: int, output: Output) -> bytes:
        book = self._book
        if isinstance(output, Admitted):
            book.started[prompt] = output
            return b""
        index = prompt * book.options.n + output.choice
        first = b"" if self._begun[index] else self._first(prompt, index)
        if isinstance(output, Done):
            return first + self._last(index, output)
        if not (output.text or output.logprobs or book.options.return_token_ids):
            return first
        return first + self._event([self._choice(index, output.text, output)], {})

    def _first(self, prompt: int, index: int) -> bytes:
        """The chunk in front of a choice's output, where the prompt is to be repeated in it."""
        self._begun[index] = True
        book = self._book
        fields = book.prompt_fields(prompt)
        if fields or book.options.echo:
            return self._event([self._choice(index, book.echo(index), Delta("", ())) | fields], {})
        return b""

    def _last(self, index: int, done: Done) -> bytes:
        book = self._book
        if done.final:
            book.ended(done)
        over = done.final and book.open == 0
        choice = self._choice(index, "", Delta("", ()), done.reason.value)
        end = self._event([choice], book.timings_field() if over else {})
        if over and book.options.include_usage:
            end += self._event([], {"usage": usage_body(book.usage)})
        return end + (DONE if over else b"")

    def _choice(self, index: int, text: str, delta: Delta, reason: str | None = None) -> Json:
        logprobs = self._book.logprobs(index, delta) if delta.logprobs else None
        choice: Json = {"index": index, "text": text, "logprobs": logprobs, "finish_reason": reason}
        if self._book.options.return_token_ids:
            choice["token_ids"] = delta.token_ids
        return choice

    def _event(self, choices: list[Json], extra: Json) -> bytes:
        return event({**self._book.head, "choices": choices, **self._usage, **extra})


class CompletionReply:
    """A reply that is sent in one piece: collects outputs of all prompts."""

    def __init__(self, book: CompletionBook) -> None:
        self._book = book
        count = len(book.options.prompts) * book.options.n
        self._texts = [[book.echo(index)] for index in range(count)]
        self._token_ids: list[list[int]] = [[] for _ in range(count)]
        self._logprobs: list[list[PositionLogprobs]] = [[] for _ in range(count)]
        self._reasons = [""] * count

    def add(self, prompt: int, outputs: Sequence[Output]) -> None:
        for output in outputs:
            if isinstance(output, Admitted):
                self._book.started[prompt] = output
                continue
            index = prompt * self._book.options.n + output.choice
            if isinstance(output, Delta):
                self._texts[index].append(output.text)
                self._token_ids[index] += output.token_ids
                self._logprobs[index] += output.logprobs
                continue
            self._reasons[index] = output.reason.value
            if output.final:
                self._book.ended(output)

    def body(self) -> bytes:
        """The JSON reply; only after the last prompt's end."""
        book = self._book
        assert book.open == 0
        choices = [self._choice(index) for index in range(len(self._texts))]
        usage = usage_body(book.usage)
        return to_json({**book.head, "choices": choices, "usage": usage, **book.timings_field()})

    def _choice(self, index: int) -> Json:
        book = self._book
        choice: Json = {
            "index": index,
            "text": "".join(self._texts[index]),
            "logprobs": book.logprobs(index, Delta("", (), self._logprobs[index])),
            "finish_reason": self._reasons[index],
        }
        if book.options.return_token_ids:
            choice["token_ids"] = self._token_ids[index]
        return choice | book.prompt_fields(index // book.options.n)


def _top(position: PositionLogprobs) -> dict[str, float]:
    """The likeliest tokens by their text, and the chosen one; of equal texts the likelier one counts."""
    top: dict[str, float] = {}
    for token in (*position.top, position.chosen):
        top.setdefault(token.text, finite_logprob(token.logprob))
    return top


#: The index of a prompt's call, and its outputs.
PromptOutputs = tuple[int, list[Output]]


class CompletionsEndpoint(CallEndpoint[CompletionRequest]):
    """OpenAI's legacy completions: prompts that no chat template touches."""

    operation = "text_completion"
    body = CompletionBody

    def parse(self, request_id: str, content_type: bytes = b"") -> Parse[CompletionRequest]:
        timeout, choices = self.limits.timeout, self.limits.max_choices
        return Parse(parse_completion, {"request_id": request_id, "timeout": timeout, "max_choices": choices})

    async def answer(self, request: CompletionRequest, reply: HttpReply) -> None:
        model = self.dispatcher.resolve_model(request.calls[0].model)
        book = CompletionBook(request.request_id, model, request.options, await self._echoes(request, model))
        async with aclosing(
            all_together(partial(self.dispatcher.chat, context=current_call()), request.calls)
        ) as batches:
            if not request.options.stream:
                whole = CompletionReply(book)
                async for prompt, outputs in batches:
                    whole.add(prompt, outputs)
                await reply.whole(whole.body())
                return
            stream = CompletionStream(book)
            await reply.stream(batches, lambda batch: (stream.render(*batch), book.open == 0))

    async def _echoes(self, request: CompletionRequest, model: str) -> list[str]:
        """The prompts' texts, where they are to be repeated; those of ids are asked for, one by one."""
        if not request.options.echo:
            return []
        prompts = request.options.prompts
        texts = {at: prompt for at, prompt in enumerate(prompts) if isinstance(prompt, str)}
        ids = {at: prompt or () for at, prompt in enumerate(prompts) if not isinstance(prompt, str)}
        if ids:
            async with self.dispatcher.admission.query():
                try:
                    told = [await self.queries.detokenize(model, each) for each in ids.values()]
                except InvalidRequest as error:
                    raise InvalidRequest(f"prompt: {error.message}", param="prompt") from None
            texts |= zip(ids, told, strict=True)
        return [texts[at] for at in range(len(prompts))]


async def all_together(
    chat: Callable[[ChatCall], AsyncGenerator[list[Output], None]], calls: Sequence[ChatCall]
) -> AsyncGenerator[PromptOutputs, None]:
    """(index of the call, its outputs), in the order in which they come; ends when all calls have.

    The first error of any call is raised and ends the others, and so does closing the iterator.
    """
    if len(calls) == 1:
        async with aclosing(chat(calls[0])) as batches:
            async for outputs in batches:
                yield 0, outputs
        return
    # Small: a call whose reader is slow waits with its own outbox, not here.
    queue: asyncio.Queue[PromptOutputs | None] = asyncio.Queue(len(calls))

    async def pump(index: int, call: ChatCall) -> None:
        async with aclosing(chat(call)) as batches:
            async for outputs in batches:
                await queue.put((index, outputs))

    async def pump_all() -> None:
        async with asyncio.TaskGroup() as group:
            for index, call in enumerate(calls):
                group.create_task(pump(index, call))
        await queue.put(None)

    task = asyncio.create_task(pump_all())
    try:
        while (batch := await _next(queue, task)) is not None:
            yield batch
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


async def _next(queue: asyncio.Queue[PromptOutputs | None], task: asyncio.Task[None]) -> PromptOutputs | None:
    """The next batch; raises the first error of the calls."""
    waiting = asyncio.create_task(queue.get())
    try:
        await asyncio.wait((waiting, task), return_when=asyncio.FIRST_COMPLETED)
        if waiting.done():
            return waiting.result()
        if task.done() and (error := task.exception()) is not None:
            raise first_error(error)
        return await waiting
    finally:
        waiting.cancel()
