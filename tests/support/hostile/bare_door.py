"""Both doors of a proxy with nothing behind them: a request that was parsed finds no worker."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from typing import Any

import grpc

from support.hostile.large_messages import FORM
from triptych.base.config import ProxyConfig
from triptych.base.errors import Unavailable
from triptych.base.metrics import ProxyMetrics
from triptych.protos import proxy_pb2, proxy_pb2_grpc
from triptych.proxy.grpc.admission import GrpcAdmission
from triptych.proxy.grpc.server import ProxyServicer, parses_of
from triptych.proxy.http.refusals import Refusals
from triptych.proxy.openai.app import ENDPOINTS
from triptych.proxy.openai.chat.endpoint import ApiLimits
from triptych.proxy.parsing.parsers import Parsers
from triptych.proxy.quotas.table import QuotaTable, quota_specs

(_SERVICE,) = proxy_pb2.DESCRIPTOR.services_by_name.values()
CALLS = frozenset(_SERVICE.methods_by_name)


class BareDoor:
    """`parsed` counts what went through; `post` and `call` return a status."""

    def __init__(self) -> None:
        self.quotas = QuotaTable(quota_specs(ProxyConfig()))
        self.parsers = Parsers(self.quotas["parser"], self.quotas["parser-processes"])
        self.parsed = 0
        dispatcher: Any = self
        limits = ApiLimits()
        self.endpoints = {path: make(dispatcher, dispatcher, limits) for path, make in ENDPOINTS.items()}
        self.calls: dict[str, Any] = {}
        registrar: Any = self
        proxy_pb2_grpc.add_ProxyServiceServicer_to_server(ProxyServicer(dispatcher, registrar), registrar)
        parses = parses_of(max_images=16, timeout=9.0, max_choices=16)
        refusals = Refusals(ProxyMetrics(), None)
        self.admission = GrpcAdmission(self.quotas, None, refusals, self.parsers, parses)

    # What the servicer and the endpoints ask of a dispatcher and a pool.
    def resolve_model(self, name: str) -> str:
        self.parsed += 1
        raise Unavailable("nobody is here")

    def task(self, name: str) -> str:
        self.resolve_model(name)
        return "embed"

    async def chat(self, call: Any, context: Any) -> AsyncIterator[Any]:
        self.resolve_model("")
        yield

    def models(self, allowed: Any = None) -> list[str]:
        self.parsed += 1
        return []

    def adapters(self, allowed: Any = None) -> list[str]:
        return []

    # What gRPC's generated code asks of a server.
    def add_generic_rpc_handlers(self, handlers: Any) -> None:
        pass

    def add_registered_method_handlers(self, service: str, handlers: dict[str, Any]) -> None:
        self.calls |= handlers

    async def post(self, path: str, raw: bytes) -> int:
        pieces = [raw[at : at + (256 << 10)] for at in range(0, len(raw) or 1, 256 << 10)]
        sent: list[Any] = []

        async def receive() -> Any:
            if not pieces:
                await asyncio.Event().wait()
            return {"type": "http.request", "body": pieces.pop(0), "more_body": bool(pieces)}

        async def send(message: Any) -> None:
            sent.append(message)

        headers = [(b"content-type", FORM.encode())] if "audio" in path else []
        scope = {"type": "http", "method": "POST", "path": path, "headers": headers}
        await self.endpoints[path](scope, receive, send)
        status: int = sent[0]["status"]
        return status

    async def call(self, name: str, raw: bytes) -> int:
        details: Any = Details(f"/{_SERVICE.full_name}/{name}")
        handler = await self.admission.intercept_service(self._handler, details)
        context = Context(raw)
        method = handler.stream_stream or handler.stream_unary
        with contextlib.suppress(grpc.RpcError):
            await method(None, context)
        return context.status

    async def _handler(self, details: Any) -> Any:
        return self.calls[details.method.rpartition("/")[2]]


class Details:
    """Of a call, what an interceptor gets."""

    invocation_metadata = ()

    def __init__(self, method: str) -> None:
        self.method = method


class Context:
    """A call's context that has one message."""

    def __init__(self, raw: bytes) -> None:
        self._raw = raw
        self.status = 0

    async def read(self) -> bytes:
        return self._raw

    async def write(self, reply: Any) -> None:
        pass

    def peer(self) -> str:
        return "ipv4:127.0.0.1:1"

    def set_trailing_metadata(self, metadata: Any) -> None:
        pass

    async def abort(self, code: Any, details: str) -> None:
        self.status = code.value[0]
        raise grpc.RpcError
