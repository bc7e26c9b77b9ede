"""Channels that are connected: a call fails at once where a try to connect has taken a tenth of a second."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from grpc import aio

from support.waiting import within
from triptych.base.rpc.channels import make_channel


@asynccontextmanager
async def connected_channel(address: str, *given: Any) -> AsyncIterator[aio.Channel]:
    """As `make_channel`; a busy machine may take several tries."""
    async with make_channel(address, *given) as channel:
        await within(f"a connection to {address}", channel.channel_ready())
        yield channel
