"""Plans of items that requests have had lately, and the items that a PD worker may hold already."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Collection, Sequence

from triptych.base.types import ItemPlan
from triptych.proxy.splitter import SplitItem

#: Plans that are kept, a plan with stretches for as many more: about 2.5 MiB. The keys and values of so many
#: pictures are more than what PD workers hold.
KEPT_PLANS = 4096


class KnownPlans:
    """A table of plans by mm_hash, which decides all of a plan; least recently used out first."""

    def __init__(self, capacity: int = KEPT_PLANS) -> None:
        self._capacity = capacity
        self._plans: OrderedDict[str, ItemPlan] = OrderedDict()
        self._size = 0

    def __len__(self) -> int:
        return len(self._plans)

    def add(self, plan: ItemPlan) -> None:
        """The plan is the most recently used one now."""
        self._drop(plan.mm_hash)
        self._plans[plan.mm_hash] = plan
        self._size += _size(plan)
        while self._size > self._capacity:
            self._drop(next(iter(self._plans)))

    def get(self, mm_hash: str) -> ItemPlan | None:
        return self._plans.get(mm_hash)

    def _drop(self, mm_hash: str) -> None:
        plan = self._plans.pop(mm_hash, None)
        if plan is not None:
            self._size -= _size(plan)


def expected_plans(
    items: Sequence[SplitItem], missing: Collection[str], known: KnownPlans, prefixes: int
) -> dict[str, ItemPlan]:
    """Plans of those `missing` items that a PD worker need not have encoded again, as far as is known.

    It has had the first `prefixes` prefixes of the request's chain; every slot of the item lies in them.
    """
    beyond = {item.mm_hash for item in items if item.prefix >= prefixes}
    plans = {key: known.get(key) for key in missing if key not in beyond}
    return {key: plan for key, plan in plans.items() if plan is not None}


def _size(plan: ItemPlan) -> int:
    return 1 + len(plan.runs or ())
