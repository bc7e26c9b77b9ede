"""The agreement of all proxies on the rules of a pool: whose are in force while they are changed."""

from __future__ import annotations

from typing import Protocol

from triptych.base.scaling import ScalingRules, SharedRules


class RulesBoard(Protocol):
    """The scaling board's part that keeps the rules."""

    async def agree(
        self, pool: str, own: ScalingRules, expected: int | None, term: float, *, newest: bool = False
    ) -> SharedRules: ...


class RulesAgreement:
    """One proxy's part in the agreement.

    The proxy's own rules go onto the board when it starts, as the newest. They replace another proxy's later
    only when no proxy that was started with those has been there for `term` seconds.
    """

    def __init__(self, pool: str, own: ScalingRules, term: float) -> None:
        self._pool = pool
        self._own = own
        self._term = term
        self._shared: SharedRules | None = None
        #: Since when the shared rules have had no supporter, by this proxy's clock.
        self._unsupported: float | None = None

    async def poll(self, board: RulesBoard, now: float) -> ScalingRules | None:
        """The rules to decide by now; None where this version cannot read them, so that others decide."""
        shared, since = self._shared, self._unsupported
        abandoned = shared is not None and since is not None and now - since >= self._term
        shared = self._shared = await board.agree(
            self._pool,
            self._own,
            shared.generation if shared is not None and abandoned else None,
            self._term,
            newest=shared is None,
        )
        if shared.supported:
            self._unsupported = None
        elif self._unsupported is None:
            self._unsupported = now
        return shared.rules
