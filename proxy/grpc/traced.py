"""Server spans of gRPC calls that generate."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import grpc
from grpc import aio

from triptych.base.errors import RequestError
from triptych.base.tracing import attributes as names
from triptych.base.tracing.context import context_of
from triptych.base.tracing.server_span import CURRENT_SPAN, ServerSpan
from triptych.base.tracing.tracer import Tracer

_OPERATIONS = {"Chat": "chat", "Generate": "generate_content"}


@asynccontextmanager
async def traced_call(
    tracer: Tracer | None, method: str, context: aio.ServicerContext[Any, Any]
) -> AsyncIterator[None]:
    """The span of one call with a streamed reply, which what it calls finds in CURRENT_SPAN.

    Nothing without a tracer, and for a method that does not generate.
    """
    service, _, name = method.lstrip("/").rpartition("/")
    operation = _OPERATIONS.get(name)
    if tracer is None or operation is None:
        yield
        return
    parent = context_of(context.invocation_metadata() or ())
    known = {names.RPC_SYSTEM: "grpc", names.RPC_SERVICE: service, names.RPC_METHOD: name}
    span = ServerSpan(tracer, parent, operation, dict(known))
    CURRENT_SPAN.set(span)
    try:
        yield
    except RequestError as error:
        span.failed(error.code)
        _end(span, error.grpc_status)
        raise
    except (GeneratorExit, asyncio.CancelledError):
        span.broken("client_closed")
        _end(span, "CANCELLED")
        raise
    except BaseException:
        _end(span, "INTERNAL")
        raise
    else:
        _end(span, "OK")
    finally:
        CURRENT_SPAN.set(None)


def _end(span: ServerSpan, status: str) -> None:
    number = int(grpc.StatusCode[status].value[0])
    span.rpc_status(number, status)
    span.end()
