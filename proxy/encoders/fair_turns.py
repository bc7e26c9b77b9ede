"""Turns of tenants, by fair queueing: whose encoder job, or whose request, is next."""

from __future__ import annotations

import math
from dataclasses import dataclass

#: Seconds of slack that later work has to have less to go before earlier work: estimates are no better.
SLACK_MARGIN = 1.0
#: Later work of its tenant that may go before any one piece of work.
MAX_OVERTAKEN = 64
#: Earlier work of its tenant that a piece of work may pass as it comes: each costs the loop microseconds.
MAX_PASSED = 256


@dataclass(eq=False, slots=True)
class Turn:
    """One turn of a tenant. Its holder, an item or a request, has `work` seconds left at its encoders."""

    tenant: str = ""
    holder: str = ""
    number: int = 0
    #: The lowest of those that wait for it.
    priority: float = math.inf
    deadline: float = math.inf
    work: float = 0.0
    #: Later work that has gone before it.
    overtaken: int = 0
    #: It is drawn, and its work has not begun.
    waits: bool = False

    def passes(self, other: Turn) -> bool:
        """Whether it has a lower priority; of equals, less slack, and not by its work alone: with one timeout
        for all nothing changes."""
        if self.priority != other.priority:
            return self.priority < other.priority
        slack, others = self.deadline - self.work, other.deadline - other.work
        urgent = self.deadline < other.deadline and slack + SLACK_MARGIN < others
        return urgent and other.overtaken < MAX_OVERTAKEN


class FairTurns:
    """Fair queueing by tenant: new work comes after one turn of each other tenant, whatever they have queued.

    A tenant's turns are the same whatever its priorities and deadlines: what goes before takes the turn of
    its own tenant's other work, which moves one turn back, by deadlines MAX_OVERTAKEN times at most. Without
    either work keeps its order.
    """

    def __init__(self) -> None:
        #: The last turn that each tenant has drawn, where it is not over.
        self._drawn: dict[str, int] = {}
        self._now = 0
        #: Turns whose work has not begun, by tenant, in order.
        self._waiting: dict[str, list[Turn]] = {}

    def draw(self, tenant: str, holder: str = "") -> Turn:
        """The tenant's next turn; `hurry` moves it forward."""
        number = max(self._drawn.get(tenant, 0), self._now) + 1
        self._drawn[tenant] = number
        turn = Turn(tenant, holder, number, waits=True)
        self._waiting.setdefault(tenant, []).append(turn)
        return turn

    def hurry(self, turn: Turn, deadline: float, work: float = 0.0, priority: int = 0) -> list[Turn]:
        """One that waits for the holder has to end by `deadline`. Returns the other turns that have moved."""
        moved: list[Turn] = []
        if deadline >= turn.deadline and priority >= turn.priority:
            return moved
        if deadline < turn.deadline:
            turn.deadline, turn.work = deadline, work
        turn.priority = min(turn.priority, priority)
        waiting = self._waiting[turn.tenant] if turn.waits else []
        place = next((place for place in reversed(range(len(waiting))) if waiting[place] is turn), 0)
        while place > 0 and len(moved) < MAX_PASSED and turn.passes(before := waiting[place - 1]):
            turn.number, before.number = before.number, turn.number
            before.overtaken += turn.priority == before.priority
            waiting[place - 1 : place + 1] = turn, before
            moved.append(before)
            place -= 1
        return moved

    def begin(self, number: int, *turns: Turn | None) -> None:
        """Work of this number begins, which these turns wait for."""
        for turn in turns:
            self.drop(turn)
        if number > self._now:
            self._now = number
            if len(self._drawn) > 64:
                self._drawn = {tenant: drawn for tenant, drawn in self._drawn.items() if drawn > number}

    def drop(self, turn: Turn | None) -> None:
        """The turn's work has begun or is over: the turn moves no more. Idempotent."""
        if turn is not None and turn.waits:
            turn.waits = False
            waiting = self._waiting[turn.tenant]
            waiting.remove(turn)
            if not waiting:
                del self._waiting[turn.tenant]
