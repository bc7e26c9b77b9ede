"""The steps that a decode benchmark times."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import pytest

from benchmarks.micro import engine_decode
from benchmarks.micro.engine_decode import engine_round, prefill_steps


class Scripted:
    """A scheduler of requests of `tokens` tokens each that prefills one prompt a step."""

    def __init__(self, tokens: int) -> None:
        self._tokens = tokens
        self.waiting: list[Any] = []
        self.running: list[Any] = []

    @property
    def num_running(self) -> int:
        return len(self.running)

    @property
    def num_waiting(self) -> int:
        return len(self.waiting)

    def check(self, request: object) -> None:
        """Every request fits."""

    def add(self, request: object, now: float) -> None:
        self.waiting.append(request)

    def step(self) -> None:
        if self.waiting:
            self.running.append(self.waiting.pop(0))
        for request in self.running:
            request.output_token_ids.append(0)
        self.running = [one for one in self.running if len(one.output_token_ids) < self._tokens]


@pytest.mark.parametrize(("tokens", "counted"), [(10, 3 * 7), (4, 3), (3, 0)])
def test_only_steps_in_which_all_requests_decode_are_timed(
    monkeypatch: pytest.MonkeyPatch, tokens: int, counted: int
) -> None:
    scheduler, found = Scripted(tokens), []
    monkeypatch.setattr(engine_decode, "engine_step", lambda _engine: scheduler.step())
    monkeypatch.setattr(engine_decode.StepTimer, "speed", lambda _timer, tokens: found.append(tokens))
    requests = [SimpleNamespace(output_token_ids=[]) for _ in range(3)]
    engine_round(cast(Any, SimpleNamespace(scheduler=scheduler)), cast(Any, requests))
    assert found == [counted]
    assert [len(request.output_token_ids) for request in requests] == [tokens] * 3


@pytest.mark.parametrize(
    ("count", "length", "budget", "steps"), [(1, 100, 512, 1), (16, 480, 512, 16), (16, 100, 2048, 1)]
)
def test_prompts_take_as_many_steps_as_their_tokens_fill(
    count: int, length: int, budget: int, steps: int
) -> None:
    assert prefill_steps(count, length, budget) == steps
