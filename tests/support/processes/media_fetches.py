"""A media fetcher with a spool of its own, and a resolver with prepared answers."""

from __future__ import annotations

import socket
import ssl
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Any

import pytest

from support.data.media import content, kept_bytes
from support.processes.web import PNG
from triptych.base.config import ProxyConfig
from triptych.base.errors import RequestError
from triptych.base.metrics import ProxyMetrics
from triptych.proxy.media.connection import LookUpHost, MediaConnections, look_up_host, parse_rules
from triptych.proxy.media.fetcher import FetchLimits, MediaFetcher
from triptych.proxy.media.source import IMAGES, ImagePart, MediaKind, WebUrl
from triptych.proxy.media.spool import MediaSpool
from triptych.proxy.quotas.table import QuotaTable, quota_specs

LOOPBACK = "127.0.0.0/8"


LARGE = PNG + bytes(3 << 20)


class Names:
    """A resolver with answers in order, the last one repeated; it notes what it was asked."""

    def __init__(self, *answers: Sequence[str]) -> None:
        self.answers = list(answers)
        self.asked: list[str] = []

    def __call__(self, host: str, port: int) -> list[tuple[Any, ...]]:
        self.asked.append(host)
        addresses = self.answers.pop(0) if len(self.answers) > 1 else self.answers[0]
        if not addresses:
            raise socket.gaierror(-2, "Name or service not known")
        return [
            (socket.AF_INET6 if ":" in a else socket.AF_INET, socket.SOCK_STREAM, 6, "", (a, port))
            for a in addresses
        ]


class Fetching:
    """A fetcher with a spool of its own."""

    def __init__(
        self,
        *,
        networks: str = LOOPBACK,
        hosts: str = "",
        names: LookUpHost = look_up_host,
        tls: ssl.SSLContext | bool = True,
        memory: int = 1 << 30,
        disk: int = 1 << 30,
        **limits: Any,
    ) -> None:
        self.metrics = ProxyMetrics()
        at_once = limits.pop("at_once", 64)
        config = ProxyConfig(media_memory=memory, media_disk=disk, media_fetches=at_once)
        self.quotas = QuotaTable(quota_specs(config))
        self.spool = MediaSpool(self.metrics, self.quotas)
        rules = parse_rules(hosts, networks)
        connections = MediaConnections(rules, self.quotas["look-ups"], look_up=names, tls=tls)
        places = self.quotas["fetches"]
        self.fetcher = MediaFetcher(connections, self.spool, self.metrics, FetchLimits(**limits), places)

    async def get(self, url: str, kind: MediaKind = IMAGES) -> bytes:
        source = ImagePart.of_url(url, "field").source
        assert isinstance(source, WebUrl)
        media = await self.fetcher.fetch(source, "field", kind)
        try:
            return await content(media)
        finally:
            media.release()

    def count(self, result: str) -> float:
        value = self.metrics.registry.get_sample_value("triptych_media_fetches_total", {"result": result})
        return value or 0.0


@asynccontextmanager
async def fetching(**options: Any) -> AsyncIterator[Fetching]:
    """Afterwards nothing may be left in the spool."""
    it = Fetching(**options)
    try:
        yield it
        assert kept_bytes(it.spool) == 0
    finally:
        it.fetcher.close()
        it.spool.close()


async def refusal(it: Fetching, url: str, kind: MediaKind = IMAGES) -> RequestError:
    with pytest.raises(RequestError) as caught:
        await it.get(url, kind)
    assert caught.value.param == "field"
    assert caught.value.message.startswith("field: ")
    return caught.value
