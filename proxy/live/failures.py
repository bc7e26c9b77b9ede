"""Failures that an operator should see, in plain words with their remedy: the last 32 different ones."""

from __future__ import annotations

import re
from dataclasses import dataclass

from triptych.errors import RequestError
from triptych.proxy.live.objects import FailureRow

MOST_FAILURES = 32
#: Kinds of refusals, in a log of their own: they push no failures out.
MAX_REFUSALS = 8
_ERROR_ID = re.compile(r"error id ([0-9a-f]{8,32})")
#: What a failed request's error says, as a part of it: words and remedy of our own. Its text is not shown: it
#: may name a field of a tenant's request.
_KNOWN = (
    ("no encoder worker", "no encoder worker could be reached in time", "start encoder workers of its model"),
    ("no PD worker", "no PD worker could be reached in time", "start PD workers of its model"),
    (
        "no embedding store",
        "the embedding store could not be reached in time",
        "start the store, or mend the network between it and the proxy",
    ),
    (
        "the store keeps losing",
        "the store loses embeddings before they are used",
        "give the store more memory (maxmemory), or start more PD workers",
    ),
    ("its media did not arrive", "media could not be fetched in time", "see whether their hosts answer"),
    ("request's media did not", "media could not be fetched in time", "see whether their hosts answer"),
    (
        "PD workers ended while",
        "it ended several PD workers, and is not tried again",
        "search the log for the error id; the workers' logs say how they ended",
    ),
    ("this proxy is stopping", "this proxy is stopping", "send requests to another proxy"),
    ("the proxy is stopping", "this proxy is stopping", "send requests to another proxy"),
)
_BY_STATUS = {
    500: ("an internal error", "search the logs of the proxy and the workers for errors at this time"),
    503: ("something that it needs is not there", "see which workers and whether the store are up"),
    504: ("its timeout is over", "see whether queues grow: start workers, or raise --request-timeout"),
}
_REFUSED = {
    401: "give these clients a valid API key",
    404: "compare the model and the path that clients name with GET /v1/models and /docs",
}
_REASON = "see what their clients send; the answers name the field and the remedy"
_OTHER = ("an error", "search the proxy's log for errors at this time")


@dataclass(slots=True)
class _Failure:
    time: float
    remedy: str
    count: int = 1


class FailureLog:
    """The failures, newest last; equal ones are one entry with a count."""

    def __init__(self, limit: int = MOST_FAILURES) -> None:
        self._limit = limit
        self._entries: dict[tuple[str, str], _Failure] = {}

    def add(self, time: float, what: str, remedy: str, where: str = "") -> None:
        before = self._entries.pop((what, where), None)
        self._entries[what, where] = _Failure(time, remedy, before.count + 1 if before else 1)
        while len(self._entries) > self._limit:
            del self._entries[next(iter(self._entries))]

    def add_request(self, time: float, error: RequestError) -> None:
        """A request that failed with a 5xx."""
        what, remedy = described(error)
        self.add(time, f"a request failed with {error.status}: {what}", remedy)

    def add_refusal(self, time: float, status: int, route: str) -> None:
        """A request that was refused before it was a call."""
        to = "other paths" if route == "other" else route
        self.add(time, f"requests to {to} are refused with {status}", _REFUSED.get(status, _REASON))

    def read(self) -> list[FailureRow]:
        """Newest first."""
        return [
            FailureRow(round(entry.time, 3), what, entry.remedy, where, entry.count)
            for (what, where), entry in reversed(self._entries.items())
        ]


def described(error: RequestError) -> tuple[str, str]:
    """A server's error in our own words, with what helps; only an error id is taken from its text."""
    known = (words[1:] for words in _KNOWN if words[0] in error.message)
    what, remedy = next(known, _BY_STATUS.get(error.status, _OTHER))
    found = _ERROR_ID.search(error.message)
    return (f"{what} (error id {found[1]})" if found else what), remedy
