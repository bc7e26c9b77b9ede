"""A look-up of several items on all shards that may have them."""

from __future__ import annotations

from collections.abc import Sequence

from triptych.ec_connector.store.control import StoreRefused, StoreUnavailable
from triptych.ec_connector.store.shards.placement import ShardPlacement
from triptych.ec_connector.store.shards.shard import Shard
from triptych.ec_connector.store.topology.topology import all_of
from triptych.types import ItemPlan


class Search:
    """The items of one look-up, each looked for on one shard after the other until it is found."""

    def __init__(self, placement: ShardPlacement, keys: Sequence[tuple[str, str]]) -> None:
        self.plans: list[ItemPlan | None] = [None] * len(keys)
        self._placement = placement
        self._keys = keys
        self._tried: list[list[Shard]] = [[] for _ in keys]
        #: Items that a shard has answered for.
        self._answered: set[int] = set()
        self._failures: list[StoreUnavailable] = []

    async def run(self) -> list[ItemPlan | None]:
        """The plans; StoreUnavailable when no shard answers for one of the items."""
        left = list(range(len(self._keys)))
        while groups := self._groups(left):
            await all_of(self._ask(shard, items) for shard, items in groups.items())
            left = [index for items in groups.values() for index in items if self.plans[index] is None]
        if len(self._answered) < len(self._keys):
            raise self._failures[-1]
        return self.plans

    def _groups(self, items: Sequence[int]) -> dict[Shard, list[int]]:
        """The items by the shard that they are looked for on next; without those tried everywhere."""
        groups: dict[Shard, list[int]] = {}
        for index in items:
            shard = self._placement.next_candidate(self._keys[index][0], self._tried[index])
            if shard is not None:
                groups.setdefault(shard, []).append(index)
        return groups

    async def _ask(self, shard: Shard, items: Sequence[int]) -> None:
        for index in items:
            self._tried[index].append(shard)
        try:
            plans = await shard.look_up([self._keys[index] for index in items])
        except StoreRefused:
            raise
        except StoreUnavailable as error:
            self._placement.failed(shard, error)
            self._failures.append(error)
            return
        for index, plan in zip(items, plans, strict=True):
            self.plans[index] = plan
        self._answered.update(items)
