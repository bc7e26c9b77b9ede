"""Reservation of a PD worker for one request, which may have ended other workers."""

from __future__ import annotations

from dataclasses import dataclass

#: How long the worker stays reserved for a request that has not arrived, in seconds.
ARRIVAL_SECONDS = 15.0


@dataclass(slots=True)
class _Claim:
    key: tuple[str, str]
    tokens: int
    until: float
    arrived: bool = False


class Isolation:
    """Reservation of the worker. A request's key is (proxy id, request id); `now` in seconds.

    `produced`: new output tokens of the request with the reservation, None where it is not running here.
    """

    def __init__(self) -> None:
        self._claim: _Claim | None = None

    @property
    def key(self) -> tuple[str, str] | None:
        """The request that the worker is reserved for, or was last."""
        return None if self._claim is None else self._claim.key

    def claim(self, key: tuple[str, str], tokens: int, produced: int | None, now: float) -> bool:
        """Reserves the worker for the request. False while another proxy has the reservation."""
        if self._holds(produced, now) and self._claim is not None and self._claim.key[0] != key[0]:
            return False
        self._claim = _Claim(key, tokens, now + ARRIVAL_SECONDS)
        return True

    def admits(self, key: tuple[str, str], produced: int | None, now: float) -> bool:
        """Whether the request may be submitted; it counts as submitted from then on."""
        if not self._holds(produced, now) or self._claim is None:
            return True
        if self._claim.key != key:
            return False
        self._claim.arrived = True
        return True

    def free(self, key: tuple[str, str]) -> None:
        """Ends the reservation: the request was cancelled or will not be submitted."""
        if self.key == key:
            self._claim = None

    def _holds(self, produced: int | None, now: float) -> bool:
        claim = self._claim
        if claim is None:
            return False
        waits = produced is None and not claim.arrived and now < claim.until
        held = waits or (produced is not None and produced < claim.tokens)
        if not held:
            self._claim = None
        return held
