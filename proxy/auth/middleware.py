"""Authentication by API key, for both ways in, and the ASGI middleware that asks for it over HTTP."""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from functools import partial
from typing import Protocol

from starlette.types import ASGIApp, Receive, Scope, Send

from triptych.base.errors import RateLimited, Unauthorized
from triptych.base.metrics import ProxyMetrics
from triptych.proxy.auth.keys import Principal
from triptych.proxy.auth.limits import PrincipalLimits
from triptych.proxy.http.connections import needs_key
from triptych.proxy.http.delivery import CONNECTION, Connection
from triptych.proxy.http.refusals import refuse
from triptych.proxy.quotas.current_call import in_call
from triptych.proxy.turns.loop_turns import LoopTurns

logger = logging.getLogger(__name__)

_SCHEME = "bearer "
#: Where the scope of a request names its principal.
_PRINCIPAL = "triptych.principal"
#: Where it has the question whether its key still is that principal's.
_HOLDS = "triptych.key_holds"


class KeyFinder(Protocol):
    """The principals of keys; a `KeyRing`."""

    def find(self, key: bytes) -> Principal | None: ...


class Authenticator:
    """Keys, their limits, and the count of refusals; one for HTTP and gRPC."""

    def __init__(self, keys: KeyFinder, limits: PrincipalLimits, metrics: ProxyMetrics) -> None:
        self._keys = keys
        self._limits = limits
        self._metrics = metrics
        self._turns = LoopTurns()

    def principal(self, authorization: bytes) -> Principal:
        """The principal of the header's key; Unauthorized when it is not valid."""
        scheme, key = _parts(authorization)
        if scheme.lower() != _SCHEME.encode() or not key:
            self._metrics.refusals.labels("api_key").inc()
            raise Unauthorized("no API key was given: send the header Authorization: Bearer YOUR_KEY")
        principal = self._keys.find(key)
        if principal is None:
            self._metrics.refusals.labels("api_key").inc()
            raise Unauthorized("the API key is not valid here: ask this server's operator for one")
        return principal

    def holds(self, authorization: bytes, principal: Principal) -> bool:
        """Whether the header's key is still this principal's: a reply may outlive it."""
        return self._keys.find(_parts(authorization)[1]) == principal

    @asynccontextmanager
    async def admit(self, principal: Principal) -> AsyncIterator[None]:
        """One request from its first byte to the end of its reply; RateLimited above the key's limits.

        It begins in its key's turn: of a hundred that one key sends at once, most begin after another key's.
        """
        await self._turns.turn(principal.id)
        with self._refusals_counted(principal):
            async with self._limits.admit(principal):
                yield

    async def count(self, principal: Principal) -> None:
        """One request that generates nothing counts in the minute only; RateLimited above the key's limit."""
        await self._turns.turn(principal.id)
        with self._refusals_counted(principal):
            await self._limits.count_request(principal)

    @contextmanager
    def _refusals_counted(self, principal: Principal) -> Iterator[None]:
        try:
            yield
        except RateLimited as error:
            limit = error.message.partition(":")[0]
            self._metrics.refusals.labels(limit).inc()
            logger.info("a request of %s was refused: %s", principal.id, limit)
            raise


class AuthMiddleware:
    """ASGI middleware: every path but those of probes and of the page needs a key, whose requests count."""

    def __init__(self, app: ASGIApp, authenticator: Authenticator) -> None:
        self._app = app
        self._authenticator = authenticator

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            raise RuntimeError(f"the middleware serves HTTP, not {scope['type']} connections")
        if not needs_key(scope["path"]):
            connection: Connection | None = scope.get(CONNECTION)
            # No key's name begins so; one address has a share of what keys have.
            with in_call(holder="@" if connection is None else f"@{connection.holder}"):
                await self._app(scope, receive, send)
            return
        try:
            authorization = _authorization(scope)
            principal = self._authenticator.principal(authorization)
            scope[_PRINCIPAL] = principal
            scope[_HOLDS] = partial(self._authenticator.holds, authorization, principal)
            if scope["method"] != "POST":
                await self._authenticator.count(principal)
                with in_call(holder=principal.id, models=principal.models):
                    await self._app(scope, receive, send)
                return
            # Left when the application has returned: after the reply's last byte, or the client's end.
            async with self._authenticator.admit(principal):
                await self._app(scope, receive, send)
        except (Unauthorized, RateLimited) as error:
            await refuse(error, scope, receive, send)


def principal_of(scope: Scope) -> str:
    """The id of the principal that has sent a request; empty where no keys are in use."""
    principal: Principal | None = scope.get(_PRINCIPAL)
    return "" if principal is None else principal.id


def sees_all(scope: Scope) -> bool:
    """Whether the sender of a request may see those of every tenant: an operator, or anyone without keys."""
    principal: Principal | None = scope.get(_PRINCIPAL)
    return principal is None or principal.operator


def key_holds(scope: Scope) -> bool:
    """Whether the key that a request came with is still what it was; true where no keys are in use."""
    holds: Callable[[], bool] | None = scope.get(_HOLDS)
    return holds is None or holds()


def _parts(authorization: bytes) -> tuple[bytes, bytes]:
    """The scheme, with its blank, and the key of the header's value."""
    return authorization[: len(_SCHEME)], authorization[len(_SCHEME) :].strip()


def _authorization(scope: Scope) -> bytes:
    """The header's value, or Anthropic's `x-api-key`; empty when there is none, or when two contradict."""
    values = {value for name, value in scope["headers"] if name == b"authorization"}
    values |= {b"Bearer " + value for name, value in scope["headers"] if name == b"x-api-key" and value}
    return bytes(values.pop()) if len(values) == 1 else b""
