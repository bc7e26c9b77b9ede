"""Clients that repeat nothing: whatever is not a whole answer with status 200 is a loss."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from typing import Any

import openai

from support.chaos.soak import TOKENS, Clients
from support.data.oracle import OracleResult
from support.data.traffic import Case, ask_with, client_of


class StrictClients(Clients):
    """A closed loop of clients of one address. Every second one keeps its connection, as gateways do.

    Half of the requests repeat what is cached, half are new to the cluster.
    """

    def __init__(self, url: str, cases: Sequence[Case], reference: Sequence[OracleResult]) -> None:
        super().__init__(url, cases, reference, seed=7)
        #: When each answer came, and the seconds that it took.
        self.answers: list[tuple[float, float]] = []
        self._started = 0

    async def _one(self) -> None:
        keeps = self._started % 2 == 0
        self._started += 1
        client = client_of(self._url)
        try:
            while not self._ending.is_set():
                await self._ask(client, self._random.randrange(len(self._cases)))
                if not keeps:
                    await client.close()
                    client = client_of(self._url)
                # A gap in which a kept connection is idle, and may be closed.
                await asyncio.sleep(self._random.uniform(0.0, 0.2))
        finally:
            await client.close()

    async def _ask(self, client: openai.AsyncOpenAI, number: int) -> None:
        salt: dict[str, Any] = {}
        if self._random.random() < 0.5:
            salt["cache_salt"] = f"{self._random.random()}"
        began = time.monotonic()
        try:
            answer = await ask_with(client, self._cases[number], TOKENS, **salt)
        except (openai.APIError, AssertionError) as error:
            said = f"{error!r} by {error.__cause__!r} after {time.monotonic() - began:.1f} s"
            self.tally.lost.append(f"case {number}: {said}"[:400])
            await asyncio.sleep(0.2)
            return
        now = time.monotonic()
        self.answers.append((now, now - began))
        self._judge(number, answer.token_ids)
