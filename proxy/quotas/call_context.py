"""The context of one call of a client: for whom it is, and what the way in knows of its reply.

The ways in make it while a request comes in, and hand it to the dispatcher.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from triptych.base.tracing.server_span import ServerSpan
from triptych.proxy.quotas.quota import Hold


@dataclass(slots=True)
class Arrival:
    """`route` labels metrics; `counted`: a call that came of the request counts it at its end."""

    route: str
    counted: bool = False


class CallSession(Protocol):
    """The limits of the key that a call is made with."""

    @property
    def tenant(self) -> str: ...

    async def begin(self, answers: int) -> None: ...

    def end(self, answers: int) -> None: ...

    def charge(self, tokens: int) -> None: ...


class CallDelivery(Protocol):
    """What a reply holds until its client has it."""

    @property
    def unsent(self) -> int: ...

    @property
    def taken(self) -> int: ...

    def keep(self, hold: Hold) -> None: ...

    def at_end(self, callback: Callable[[], None]) -> None: ...

    def cover(self, nbytes: int) -> None: ...


@dataclass(frozen=True, slots=True)
class CallContext:
    """`holder` is the principal's id, empty where no keys are in use; `models` are the names that it may use,
    None: all. The others are None where nothing is known, as of a call that nobody sent."""

    holder: str = ""
    models: frozenset[str] | None = None
    session: CallSession | None = None
    arrival: Arrival | None = None
    delivery: CallDelivery | None = None
    span: ServerSpan | None = None


#: The context of a call that nobody sent.
NOBODY = CallContext()
