"""Requests of keys begin in turns by key, at both doors."""

from __future__ import annotations

import asyncio
from contextlib import AsyncExitStack
from typing import Any

import pytest

from triptych.base.metrics import ProxyMetrics
from triptych.proxy.auth.keys import KeyLimits, Principal
from triptych.proxy.auth.limits import PrincipalLimits
from triptych.proxy.auth.middleware import Authenticator
from triptych.proxy.turns.loop_turns import BURST

MANY = 4 * BURST


@pytest.mark.parametrize("answered", [True, False])
async def test_a_key_that_comes_with_many_requests_at_once_lets_another_one_begin(answered):
    keys: Any = None
    authenticator = Authenticator(keys, PrincipalLimits(), ProxyMetrics())
    begun: list[str] = []

    async with AsyncExitStack() as stack:

        async def begin(name: str) -> None:
            if answered:
                await stack.enter_async_context(authenticator.admit(Principal(name, KeyLimits())))
            else:
                await authenticator.count(Principal(name, KeyLimits()))
            begun.append(name)

        async with asyncio.TaskGroup() as group:
            for _ in range(MANY):
                group.create_task(begin("alice"))
            group.create_task(begin("bob"))
    assert begun.index("bob") < BURST + 10
    assert len(begun) == MANY + 1
