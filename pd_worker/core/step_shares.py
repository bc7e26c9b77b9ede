"""StepShares: one tenant's crowd sits out while others begin, and its steps are short. Pure values."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection, Iterable

from triptych.pd_worker.core.request import RequestState

#: Rows of one step from which on a tenant is a crowd, if it has most of the step's.
CROWD_ROWS = 16
#: Output tokens up to which a request begins: what is small ends with them, and a stream is seen to run.
FIRST_TOKENS = 4
#: Seconds from which a step is long where others come and go: whoever comes meanwhile waits for its end.
LONG_SECONDS = 0.02
#: Requests that may start in one step, however long that makes it.
LEAST_STARTS = 8
#: Seconds for which a tenant that was here counts as one that comes and goes.
RECENT_SECONDS = 10.0


class StepLimit:
    """A limit of what a step may have of something, so that no step takes long for it.

    It is set while several tenants are here, and follows how long steps have taken. It is `least` or more.
    """

    def __init__(self, least: int) -> None:
        self._least = least
        self.count = math.inf

    def set(self) -> None:
        """Several tenants are here: the limit is the lowest one, as nobody knows yet how long more takes."""
        self.count = self._least

    def lift(self) -> None:
        """One tenant is here alone: there is no limit."""
        self.count = math.inf

    def adapt(self, count: int, seconds: float) -> None:
        """Follows a step that had `count`, and took `seconds`."""
        if seconds > LONG_SECONDS:
            if count > self._least:
                self.count = max(self._least, int(count * LONG_SECONDS / seconds))
        elif count >= self.count:
            self.count += max(self._least // 8, 1) if 2 * seconds > LONG_SECONDS else self.count // 2


class StepShares:
    """What one tenant's crowd owes to the others: as many seconds as its last step has taken.

    A request of somebody else would have to wait for a step of the crowd with each of its tokens, and the
    crowd may make these as long as it likes. So the steps in which others begin are theirs alone, for as many
    seconds. Whoever streams longer shares all steps: together they cost hardly more than alone.
    """

    def __init__(self, least_rows: int) -> None:
        """`least_rows` of prompts may be in one step, however long that makes it."""
        self._tenant: str | None = None
        self._seconds = 0.0
        self._several_until = -math.inf
        self._last: str | None = None
        #: Requests that may start in the next step, and rows of prompts in it.
        self.starts, self.rows = StepLimit(LEAST_STARTS), StepLimit(least_rows)

    def came(self, tenant: str, now: float) -> None:
        """A request of the tenant has come."""
        if self._last is not None and tenant != self._last:
            self.several(now)
        self._last = tenant

    def several(self, now: float) -> None:
        """More than one tenant has requests here, or has had some lately."""
        if now >= self._several_until:
            self.starts.set()
            self.rows.set()
        self._several_until = now + RECENT_SECONDS

    def ended(self, starts: int, rows: int, seconds: float, now: float) -> None:
        """A step has ended in which so many requests have started, with so many rows of prompts."""
        if now >= self._several_until:
            self.starts.lift()
            self.rows.lift()
        else:
            self.starts.adapt(starts, seconds)
            self.rows.adapt(rows, seconds)

    def resting(self, startable: Collection[str], running: Iterable[RequestState]) -> str | None:
        """The tenant that sits the next step out: it owes, and requests of others could start or begin."""
        if (tenant := self._tenant) is None:
            return None
        begins = any(one.tenant != tenant and len(one.output_token_ids) < FIRST_TOKENS for one in running)
        return tenant if begins or any(other != tenant for other in startable) else None

    def computed(self, rows: Counter[str], seconds: float) -> None:
        """A step has ended: the rows that each tenant had in it, and the seconds that it took."""
        if self._tenant is not None and self._tenant not in rows:
            self._seconds -= seconds
            if self._seconds <= 0:
                self._tenant = None
            return
        [(crowd, most)] = rows.most_common(1) or [("", 0)]
        is_crowd = most >= CROWD_ROWS and 2 * most > rows.total()
        self._tenant, self._seconds = (crowd, seconds) if is_crowd else (None, 0.0)
