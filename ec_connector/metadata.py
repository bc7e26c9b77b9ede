"""One step's orders from the scheduler role to the worker role, as msgpack between processes."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import astuple, dataclass, replace
from typing import Any, Self

import msgpack

from triptych.ec_connector.base import ECConnectorMetadata
from triptych.types import ItemPlan

_LAYOUT = 1


@dataclass(frozen=True, slots=True)
class Fetch:
    """Get the item from the store into a host copy. `generation` counts the loads of all keys."""

    plan: ItemPlan
    generation: int


@dataclass(frozen=True, slots=True)
class HostCopy:
    """The host copy that load `generation` of this key made, or is making."""

    mm_hash: str
    generation: int


@dataclass(frozen=True)
class TransferMetadata(ECConnectorMetadata):
    """`drops` come first, then `fetches`, then `moves` of landed host copies into the encoder cache."""

    step: int
    fetches: tuple[Fetch, ...] = ()
    moves: tuple[HostCopy, ...] = ()
    drops: tuple[HostCopy, ...] = ()

    def loads(self) -> Iterable[tuple[str, int]]:
        fetches = ((fetch.plan.mm_hash, fetch.generation) for fetch in self.fetches)
        return (*fetches, *((copy.mm_hash, copy.generation) for copy in self.moves))

    def without_loads(self) -> Self:
        return replace(self, fetches=(), moves=())

    def to_bytes(self) -> bytes:
        return bytes(
            msgpack.packb(
                (
                    _LAYOUT,
                    self.step,
                    [(astuple(fetch.plan), fetch.generation) for fetch in self.fetches],
                    [astuple(copy) for copy in self.moves],
                    [astuple(copy) for copy in self.drops],
                )
            )
        )

    @classmethod
    def from_bytes(cls, raw: bytes) -> Self:
        """ValueError for bytes that `to_bytes` has not made."""
        layout, step, fetches, moves, drops = msgpack.unpackb(raw, use_list=False, strict_map_key=True)
        if layout != _LAYOUT:
            raise ValueError(f"connector metadata has layout {layout}, not {_LAYOUT}")
        return cls(
            step=step,
            fetches=tuple(Fetch(ItemPlan(*plan), generation) for plan, generation in fetches),
            moves=_copies(moves),
            drops=_copies(drops),
        )


def _copies(rows: Sequence[Any]) -> tuple[HostCopy, ...]:
    return tuple(HostCopy(*row) for row in rows)
