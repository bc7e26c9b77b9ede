"""State slots of recurrent layers: one per running request, and snapshots at block boundaries of prompts."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

#: A snapshot cuts its chunk in two: with fewer blocks before it, computing them costs less.
_FEWEST_BLOCKS = 4
#: Of a prompt's last items so many have a snapshot behind them, those but the last so many blocks apart.
_MOST_ITEMS, _ITEM_BLOCKS = 4, 16


@dataclass(frozen=True, slots=True)
class StateCopy:
    """Copy of one slot, all recurrent layers."""

    source: int
    target: int


@dataclass(frozen=True, slots=True)
class _Held:
    """A request's slot, and the numbers of tokens at which its prompt's state is kept."""

    slot: int
    boundaries: tuple[int, ...]


class StateSlots:
    """`num_slots` slots of requests, then `num_snapshots` snapshots, as indices into one tensor.

    A snapshot is found by the digest of the block that ends where it was taken: ABSENT --begin--> WRITING
    --commit--> READY --eviction--> ABSENT. What is WRITING at the end of its step is ABSENT again. The least
    recently used gives way, and each goes with its block.
    """

    def __init__(self, num_slots: int, num_snapshots: int = 0, *, keeps_end: bool = False) -> None:
        """`keeps_end`: other workers go on where this one's prompts end."""
        self.num_slots = num_slots
        self.keeps_end = keeps_end
        self.num_snapshots = num_snapshots
        self._ready: OrderedDict[bytes, int] = OrderedDict()
        self._changes: set[bytes] = set()
        self.reset()

    def reset(self) -> None:
        """Frees all slots and forgets all snapshots."""
        self._changes.update(self._ready)
        # The last is taken first.
        self._free = list(reversed(range(self.num_slots)))
        self._held: dict[str, _Held] = {}
        self._blank = list(reversed(range(self.num_slots, self.num_slots + self.num_snapshots)))
        self._ready.clear()
        self._writing: dict[bytes, int] = {}

    @property
    def num_used(self) -> int:
        return self.num_slots - len(self._free)

    @property
    def snapshots_used(self) -> int:
        return len(self._ready)

    def acquire(self, request_id: str, boundaries: Sequence[int] = ()) -> bool:
        """A slot for a request without one; False, and nothing changed, when none is free.

        At `boundaries`, ascending, the state of its prompt is kept.
        """
        assert request_id not in self._held, "a request has one slot"
        if not self._free:
            return False
        self._held[request_id] = _Held(self._free.pop(), tuple(boundaries))
        return True

    def slot(self, request_id: str) -> int:
        return self._held[request_id].slot

    def release(self, request_id: str) -> None:
        """Idempotent."""
        if (held := self._held.pop(request_id, None)) is not None:
            self._free.append(held.slot)

    def kept_in(self, request_id: str, start: int, end: int) -> list[int]:
        """Where the state of a chunk of tokens [start, end) is to be kept, ascending."""
        return [at for at in self._held[request_id].boundaries if start < at <= end]

    def longest(self, digests: Sequence[bytes]) -> int:
        """How many of these blocks of one prefix there are up to the last that ends at a snapshot."""
        return next((count for count in range(len(digests), 0, -1) if digests[count - 1] in self._ready), 0)

    def restore(self, digest: bytes) -> int:
        """The index of a snapshot that is READY, to be read before anything of this step is written."""
        self._ready.move_to_end(digest)
        return self._ready[digest]

    def begin(self, digest: bytes) -> int | None:
        """An index for a new snapshot, written after its chunk; None where there is one, or none can be."""
        if digest in self._ready or digest in self._writing or not (self._blank or self._ready):
            return None
        if not self._blank:
            self._evict(next(iter(self._ready)))
        self._writing[digest] = index = self._blank.pop()
        return index

    def commit(self, digest: bytes) -> None:
        """The snapshot's chunk is computed."""
        if (index := self._writing.pop(digest, None)) is not None:
            self._ready[digest] = index
            self._changes.add(digest)

    def end_step(self) -> None:
        """Snapshots that were not committed are not written."""
        self._blank.extend(self._writing.values())
        self._writing.clear()

    def drop(self, digests: Iterable[bytes]) -> None:
        """Snapshots of these blocks, where there are any, go with them."""
        for digest in digests:
            if digest in self._ready:
                self._evict(digest)

    def drain_changes(self) -> set[bytes]:
        """Digests of snapshots that came or went since the last call."""
        changes, self._changes = self._changes, set()
        return changes

    def _evict(self, digest: bytes) -> None:
        self._blank.append(self._ready.pop(digest))
        self._changes.add(digest)


def boundaries_of(
    num_prompt: int,
    block_size: int,
    computed: int,
    shared: int,
    item_ends: Sequence[int] = (),
    *,
    keeps_end: bool = False,
) -> tuple[int, ...]:
    """Where to keep the state of a prompt of which `computed` tokens are there, and blocks of `shared`.

    At the last full block, which an equal prompt goes on from; where it parts from one computed before, since
    others may begin alike; and behind items, at the last block that ends in them, where another question
    about them goes on. The last item's takes the place of a prompt's end that is near, unless the worker
    `keeps_end` for others: a picture with a short question is cut no further.
    """
    last = (num_prompt - 1) // block_size * block_size
    fewest = computed + _FEWEST_BLOCKS * block_size
    found = {at for at in (min(shared, last), last) if at >= fewest}
    ends = sorted({min(end // block_size * block_size, last) for end in item_ends})
    if ends and ends[-1] >= fewest:
        if not keeps_end and 0 < last - ends[-1] < _FEWEST_BLOCKS * block_size:
            found.discard(last)
        found.add(ends[-1])
    apart = _ITEM_BLOCKS * block_size
    for at in reversed(ends[-_MOST_ITEMS:-1]):
        if at >= computed + apart and all(abs(at - other) >= apart for other in found):
            found.add(at)
    return tuple(sorted(found))
