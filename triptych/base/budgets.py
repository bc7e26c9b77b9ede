"""SharedBudget: one bound of a worker or the store that many requests share; docs/limits.md shows them all.

The proxy's are quotas (`triptych/proxy/quotas/table.py`). Each service declares its own beside its code, and
`tests/security/fairness/test_budgets.py` finds what is declared nowhere.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

#: How tenants share it. `turns`: what waits is served by least service between them, in its own order inside.
#: `share`: one tenant has at most a part of it. `proxy`: proxies hold work back by turns between keys, and
#: the worker takes what comes. `order`: by arrival, whoever asks.
Sharing = Literal["turns", "share", "proxy", "order"]


@dataclass(frozen=True, slots=True)
class SharedBudget:
    """`of` is what it counts; `value` its size, where that is not a flag's default alone."""

    name: str
    of: str
    value: str
    sharing: Sharing
    above: str
    #: The flag that sets the size; empty where it is fixed.
    flag: str = ""
    #: Calls that make the bound, as "file: callable".
    made: tuple[str, ...] = ()
