"""One request at the door, over HTTP or gRPC, as everything that it passes finds it."""

from __future__ import annotations

from contextvars import ContextVar
from dataclasses import dataclass


@dataclass(slots=True)
class Arrival:
    """`route` labels metrics; `counted`: a call that came of the request counts it at its end."""

    route: str
    counted: bool = False


#: The request that is being served; None outside of any.
CURRENT_ARRIVAL: ContextVar[Arrival | None] = ContextVar("arrival", default=None)
