"""For whom the running code works: set at the door, read where a request is admitted.

It follows the task of a request and every task and thread that asyncio starts for it.
"""

from __future__ import annotations

from contextvars import ContextVar
from dataclasses import dataclass

from triptych.proxy.auth.keys import Principal


@dataclass(slots=True)
class Session:
    """One call of a principal. `tokens`: prompt and output tokens that it has used."""

    principal: Principal
    tokens: int = 0

    @property
    def tenant(self) -> str:
        return self.principal.id

    def charge(self, tokens: int) -> None:
        self.tokens += tokens


CURRENT: ContextVar[Session | None] = ContextVar("session", default=None)
