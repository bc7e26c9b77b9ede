"""Port of whatever watches the calls of one proxy."""

from __future__ import annotations

from typing import Protocol

from triptych.errors import RequestError
from triptych.proxy.requests.request import Choices


class CallObserver(Protocol):
    """Observer of calls: two short events for each, none for a token."""

    def opened(self, choices: Choices) -> None:
        """A call is admitted. A `timeline` given to its first choice now notes its moments."""

    def closed(self, choices: Choices, failure: RequestError | None) -> None:
        """A call has ended; `failure`: with this error."""
