"""One step's orders from the scheduler role to the worker role, as msgpack between processes."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import astuple, dataclass, replace
from typing import Self

import msgpack

from triptych.base.types import ItemPlan
from triptych.ec_connector.base import ECConnectorMetadata

_LAYOUT = 1


@dataclass(frozen=True, slots=True)
class LoadId:
    """The id of one load, and of the host copy that it makes: `generation` counts the loads of all keys."""

    mm_hash: str
    generation: int


@dataclass(frozen=True, slots=True)
class Fetch:
    """An order to get an item from the store into a host copy."""

    plan: ItemPlan
    generation: int

    @property
    def load_id(self) -> LoadId:
        return LoadId(self.plan.mm_hash, self.generation)


@dataclass(frozen=True)
class TransferMetadata(ECConnectorMetadata):
    """A step's orders: first `drops` of host copies, then `fetches`, then `moves` into the encoder cache."""

    step: int
    fetches: tuple[Fetch, ...] = ()
    moves: tuple[LoadId, ...] = ()
    drops: tuple[LoadId, ...] = ()

    def loads(self) -> Iterable[tuple[str, int]]:
        ids = (*(fetch.load_id for fetch in self.fetches), *self.moves)
        return tuple((load.mm_hash, load.generation) for load in ids)

    def without_loads(self) -> Self:
        return replace(self, fetches=(), moves=())

    def to_bytes(self) -> bytes:
        return bytes(
            msgpack.packb(
                (
                    _LAYOUT,
                    self.step,
                    [(astuple(fetch.plan), fetch.generation) for fetch in self.fetches],
                    [astuple(load) for load in self.moves],
                    [astuple(load) for load in self.drops],
                )
            )
        )

    @classmethod
    def from_bytes(cls, raw: bytes) -> Self:
        """The metadata that `to_bytes` made; ValueError for other bytes."""
        layout, step, fetches, moves, drops = msgpack.unpackb(raw, use_list=False, strict_map_key=True)
        if layout != _LAYOUT:
            raise ValueError(f"connector metadata has layout {layout}, not {_LAYOUT}")
        return cls(
            step=step,
            fetches=tuple(Fetch(ItemPlan(*plan), generation) for plan, generation in fetches),
            moves=tuple(LoadId(*load) for load in moves),
            drops=tuple(LoadId(*load) for load in drops),
        )
