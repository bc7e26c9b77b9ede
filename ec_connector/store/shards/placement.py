"""The placement of items on shards: by rendezvous of the mm_hash, on the next shard while one is down."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence

from triptych.ec_connector.store.control import StoreUnavailable
from triptych.ec_connector.store.shards.shard import Shard
from triptych.hashing import rendezvous

logger = logging.getLogger(__name__)

#: Shards that an item is looked for on: its own, and the one that stands in for it.
_CANDIDATES = 2
#: Seconds between two tries to reach a shard that is down.
_PROBE_SECONDS = 1.0


def placed(names: Sequence[str], mm_hash: str) -> list[int]:
    """The indices of the shards in the order in which they hold the item, whatever their order."""
    return sorted(range(len(names)), key=lambda index: rendezvous(mm_hash, names[index]), reverse=True)


class ShardPlacement:
    """The shards by name, and which of them are down; a task for each of these probes it."""

    def __init__(self, names: Sequence[str], shards: Sequence[Shard]) -> None:
        self._names = list(names)
        self._shards = list(shards)
        self._probes: dict[Shard, asyncio.Task[None]] = {}

    def candidates(self, mm_hash: str) -> list[Shard]:
        """Where the item is looked for, and written to the first: its shard unless that is down, and the
        next one, which has what was written while the first was down. Never empty."""
        ordered = [self._shards[index] for index in placed(self._names, mm_hash)]
        return [shard for shard in ordered if shard not in self._probes][:_CANDIDATES] or ordered[:1]

    def next_candidate(self, mm_hash: str, tried: Sequence[Shard]) -> Shard | None:
        """The first shard where the item may be that was not tried."""
        return next((shard for shard in self.candidates(mm_hash) if shard not in tried), None)

    def is_down(self, shard: Shard) -> bool:
        """Whether the shard was not reached, and has not been since."""
        return shard in self._probes

    def failed(self, shard: Shard, error: StoreUnavailable) -> None:
        """The shard could not be reached: it is not used until a probe reaches it."""
        if shard in self._probes or len(self._shards) == 1:
            return
        logger.warning("items of a shard go to others until it answers again: %s", error)
        self._probes[shard] = asyncio.create_task(self._probe(shard), name=f"probe {shard.label}")

    async def _probe(self, shard: Shard) -> None:
        while True:
            await asyncio.sleep(_PROBE_SECONDS)
            try:
                await shard.topology.connect()
            except StoreUnavailable:
                continue
            except Exception:
                logger.exception("the probe of store %s failed", shard.label)
                continue
            logger.info("store %s answers again", shard.label)
            del self._probes[shard]
            return

    async def close(self) -> None:
        """Ends the probes."""
        probes = list(self._probes.values())
        for probe in probes:
            probe.cancel()
        await asyncio.gather(*probes, return_exceptions=True)
