"""Requests that are all asked at once, and what their clients have seen of them so far."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, Self

from support.data.traffic import Answer, ask
from support.waiting import within


class StageMissed(AssertionError):
    """The requests were through a stage before it was seen: on a busy machine, moments take longer."""


class Streams:
    """Every case once for each salt; the salts make prompts and pictures new to the cluster.

    `asker` sends a case, `ask` of `support.data.traffic` or one that takes the same words. Leaving the
    `async with` cancels what is still under way.
    """

    def __init__(
        self,
        url: str,
        cases: Sequence[Any],
        tokens: int,
        salts: Sequence[str],
        asker: Callable[..., Awaitable[Any]] = ask,
    ) -> None:
        self._url = url
        self._asked = [(case, salt) for salt in salts for case in cases]
        self._tokens = tokens
        self.answers = [Answer() for _ in self._asked]
        self._asker = asker
        self._tasks: list[asyncio.Future[Any]] = []

    async def __aenter__(self) -> Self:
        self._tasks = [
            asyncio.ensure_future(self._asker(self._url, case, self._tokens, into=answer, cache_salt=salt))
            for (case, salt), answer in zip(self._asked, self.answers, strict=True)
        ]
        return self

    async def __aexit__(self, *_: object) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    @property
    def pictured(self) -> int:
        """Requests with something to encode: none of them ends while all encoders are stopped."""
        return sum(case.encoded for case, _ in self._asked)

    @property
    def in_the_middle(self) -> int:
        """Streams of those that have shown a token and not their last one."""
        return sum(
            case.encoded and 0 < len(answer.token_ids) < self._tokens
            for (case, _), answer in zip(self._asked, self.answers, strict=True)
        )

    @property
    def ended(self) -> bool:
        """Whether every request has ended."""
        return all(task.done() for task in self._tasks)

    def assert_under_way(self, what: str) -> None:
        """What is waited for can still come: no request has failed, and not all have ended."""
        ended = [task for task in self._tasks if task.done()]
        for task in ended:
            if error := task.exception():
                raise AssertionError(f"a request failed while the test waited for: {what}") from error
        if len(ended) == len(self._tasks):
            raise StageMissed(f"all requests ended before: {what}")

    async def all(self) -> list[Answer]:
        """The whole answers, in the order of the cases, salt after salt; the first failure is raised."""
        await within("all streams to end", asyncio.gather(*self._tasks))
        return self.answers
