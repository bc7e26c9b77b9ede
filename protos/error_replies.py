"""What a worker's calls answer when they raise: the `error` of their reply, or gRPC's status."""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import aclosing
from typing import Any

import grpc
from google.protobuf.descriptor_pool import Default
from google.protobuf.message_factory import GetMessageClass
from grpc import aio

from triptych.base.errors import InternalError, RequestError
from triptych.protos.convert import error_to_proto

logger = logging.getLogger(__name__)

#: Other services, as gRPC's health, answer errors themselves.
_OURS = "/triptych."
#: The method has set the status itself; of one that this release lacks, the generated code has.
_ANSWERED = (aio.AbortError, NotImplementedError)
Context = aio.ServicerContext[Any, Any]


class ErrorReplies(aio.ServerInterceptor):
    """A server interceptor: a RequestError that a method raises is its reply's `error` where it has one reply
    with such a field, else the call's status. Others are logged, and internal errors.

    Calls with streams both ways answer errors themselves.
    """

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[Any]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> Any:
        handler = await continuation(handler_call_details)
        method = handler_call_details.method
        if handler is None or not method.startswith(_OURS):
            return handler
        if handler.request_streaming and handler.response_streaming:
            return handler
        coded = {
            "request_deserializer": handler.request_deserializer,
            "response_serializer": handler.response_serializer,
        }
        if handler.response_streaming:

            async def stream(request: object, context: Context) -> AsyncIterator[Any]:
                try:
                    async with aclosing(handler.unary_stream(request, context)) as replies:
                        async for reply in replies:
                            yield reply
                except _ANSWERED:
                    raise
                except Exception as error:
                    await _abort(context, _known(method, error))

            return grpc.unary_stream_rpc_method_handler(stream, **coded)
        replying, call = _replying(method), handler.stream_unary or handler.unary_unary

        async def one(request: object, context: Context) -> Any:
            try:
                return await call(request, context)
            except _ANSWERED:
                raise
            except Exception as error:
                known = _known(method, error)
            if replying is not None:
                return replying(error=error_to_proto(known))
            await _abort(context, known)

        made = grpc.stream_unary_rpc_method_handler if handler.request_streaming else None
        return (made or grpc.unary_unary_rpc_method_handler)(one, **coded)


def _replying(method: str) -> Callable[..., Any] | None:
    """The class of the method's reply where that has an `error`."""
    try:
        reply = Default().FindMethodByName(method.strip("/").replace("/", ".")).output_type
    except KeyError:
        return None
    return GetMessageClass(reply) if "error" in reply.fields_by_name else None


def _known(method: str, error: Exception) -> RequestError:
    if isinstance(error, RequestError):
        return error
    logger.error("%s failed", method.rpartition("/")[2], exc_info=error)
    return InternalError("an unexpected error in the worker")


async def _abort(context: Context, error: RequestError) -> None:
    await context.abort(grpc.StatusCode[error.grpc_status], error.message)
