"""Places of client connections: a quota by address, with some to spare for refusals."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from triptych.base.errors import Unavailable
from triptych.proxy.http.peers import TrustedProxies
from triptych.proxy.quotas.quota import Hold, Quota, QuotaExceeded

BUSY = Unavailable("too many connections to this proxy; try again later", retry_after=5.0)


@dataclass(slots=True)
class Place:
    """One connection's place. `hold` None: it is beyond the quota, and gets a 503."""

    places: ConnectionPlaces
    hold: Hold | None
    #: It comes from an HTTP gateway, which tells the client with each request.
    of_gateway: bool
    closed: bool = False

    @property
    def served(self) -> bool:
        return self.hold is not None

    def close(self) -> None:
        """Gives it back. Closing twice is harmless."""
        if self.hold is not None:
            self.hold.close()
        elif not self.closed:
            self.places.refused -= 1
        self.closed = True


@dataclass(slots=True)
class ConnectionPlaces:
    """The quota "connections"; up to `spare` connections beyond it get a 503, further ones are closed."""

    quota: Quota
    spare: int
    trusted: TrustedProxies = field(default_factory=TrustedProxies)
    refused: int = 0

    def has_header(self, peer: str) -> bool:
        """Whether a connection from there begins with a header of the PROXY protocol."""
        return self.trusted.proxy_protocol and self.trusted.trusts(peer)

    def take(self, address: str) -> Place | None:
        """A place for a connection; None: there is not even one for a refusal."""
        of_gateway = not self.trusted.proxy_protocol and self.trusted.trusts(address)
        try:
            return Place(self, self.quota.hold(self.trusted.holder(address), 1), of_gateway)
        except QuotaExceeded:
            if self.refused >= self.spare:
                return None
            self.refused += 1
            return Place(self, None, of_gateway)

    def move(self, place: Place, headers: Iterable[tuple[bytes, bytes]]) -> bool:
        """Counts a gateway's connection as one of the client of its next request; False above its share."""
        forwarded = b",".join(value for name, value in headers if name == b"x-forwarded-for")
        holder = self.trusted.forwarded(forwarded)
        if place.hold is None or place.hold.holder == holder:
            return place.served
        place.hold.close()
        try:
            place.hold = self.quota.hold(holder, 1)
        except QuotaExceeded:
            place.hold = self.quota.hold("", 1)  # it has just become free
            return False
        return True
