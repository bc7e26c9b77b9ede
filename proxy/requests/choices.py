"""The choices of one request (`n`): as many flows, which share media, deadline and one end."""

from __future__ import annotations

import time
from dataclasses import dataclass, field, replace

from triptych.errors import RequestError
from triptych.proxy.call.chat import ChatCall, Delta, Done, Output, Started
from triptych.proxy.requests.flow import Flow
from triptych.proxy.requests.outbox import Outbox
from triptych.types import Usage


@dataclass(slots=True)
class Choices:
    """`flows` are in order of their index; all their output comes to `outbox`."""

    flows: list[Flow]
    outbox: Outbox
    status: int = 499
    started: float = field(default_factory=time.monotonic)

    @property
    def first(self) -> Flow:
        """The flow that what they share is made for."""
        return self.flows[0]

    def share_split(self) -> None:
        """Gives every choice what the first one was bound to and split into."""
        for flow in self.flows[1:]:
            flow.binding, flow.split = self.first.binding, self.first.split

    @property
    def first_token(self) -> float | None:
        return min((flow.first_token for flow in self.flows if flow.first_token is not None), default=None)

    @property
    def prompt_tokens(self) -> int:
        return max(len(flow.lifecycle.prompt_token_ids or ()) for flow in self.flows)

    @property
    def completion_tokens(self) -> int:
        return sum(len(flow.lifecycle.output_token_ids) for flow in self.flows)


def make_choices(call: ChatCall, order: int, deadline: float) -> Choices:
    """One flow for every answer that the call wants."""
    shared = Outbox()
    if call.n == 1:
        return Choices([Flow(call, order, deadline, shared)], shared)
    tally = _Tally(call.n)
    flows = []
    for index in range(call.n):
        own = replace(call, sampling=replace(call.sampling, choice=index))
        flows.append(Flow(own, order, deadline, ChoiceOutbox(shared, tally, index)))
    return Choices(flows, shared)


class _Tally:
    """How many choices are still open, and what those that have ended used."""

    def __init__(self, choices: int) -> None:
        self.open = choices
        self.begun = False
        self._completion_tokens = 0
        self._cached_tokens: int | None = None

    def ended(self, usage: Usage) -> Usage:
        """Usage so far: the prompt counts once, and as cached only what every choice found cached."""
        self.open -= 1
        self._completion_tokens += usage.completion_tokens
        cached = self._cached_tokens
        self._cached_tokens = usage.cached_tokens if cached is None else min(cached, usage.cached_tokens)
        return Usage(usage.prompt_tokens, self._completion_tokens, self._cached_tokens)


class ChoiceOutbox(Outbox):
    """What one choice puts out goes to the request's outbox, with the choice's index."""

    __slots__ = ("_index", "_shared", "_tally")

    def __init__(self, shared: Outbox, tally: _Tally, index: int) -> None:
        super().__init__()
        self._shared = shared
        self._tally = tally
        self._index = index

    def put(self, output: Output) -> None:
        tally = self._tally
        if isinstance(output, Delta):
            self._shared.put(Delta(output.text, output.token_ids, output.logprobs, self._index))
        elif isinstance(output, Done):
            usage = tally.ended(output.usage)
            done = Done(output.reason, usage, output.timings, self._index, final=tally.open == 0)
            self._shared.put(done)
        elif isinstance(output, Started) and not tally.begun:
            tally.begun = True
            self._shared.put(output)

    def fail(self, error: RequestError) -> None:
        self._shared.fail(error)
