"""A model of a server's eviction: samples of keys, and a pool of the best candidates, as Redis and Valkey do.

Each eviction samples five keys. The best sixteen seen so far are kept, with the score that they had when they
were seen; the best of them is evicted if it is still there.
"""

from __future__ import annotations

import random
from bisect import insort
from collections.abc import Callable

_SAMPLES = 5
_POOL = 16
#: Seconds of the clock by which a server remembers when a key was last used.
LRU_CLOCK = 1.0


class EvictingServer:
    """Keys with a size and a time of expiry in `capacity` bytes. `policy`: volatile-lru or volatile-ttl."""

    def __init__(self, capacity: int, policy: str, seed: int = 0) -> None:
        self.used = 0
        self.evicted = 0
        self._capacity = capacity
        self._draw = random.Random(seed)
        self._sizes: dict[int, int] = {}
        self._expiry: dict[int, float] = {}
        self._last: dict[int, float] = {}
        #: All keys, and the place of each, so that one is drawn at once.
        self._keys: list[int] = []
        self._places: dict[int, int] = {}
        self._pool: list[tuple[float, int]] = []
        self._score: Callable[[int, float], float] = {
            "volatile-lru": lambda key, now: now // LRU_CLOCK - self._last[key] // LRU_CLOCK,
            "volatile-ttl": lambda key, now: -self._expiry[key],
        }[policy]

    def look_up(self, key: int, now: float, ttl: float) -> bool:
        """Whether the key is there; its time of expiry begins anew."""
        if key not in self._sizes:
            return False
        if self._expiry[key] <= now:
            self._delete(key)
            return False
        self._last[key], self._expiry[key] = now, now + ttl
        return True

    def save(self, key: int, nbytes: int, now: float, ttl: float) -> None:
        """Sets the key; evicts others before it while there is too little room, as a server does."""
        while self.used > self._capacity and self._keys:
            self._evict(now)
        self._places[key] = len(self._keys)
        self._keys.append(key)
        self._sizes[key], self._last[key], self._expiry[key] = nbytes, now, now + ttl
        self.used += nbytes

    def _evict(self, now: float) -> None:
        while True:
            self._sample(now)
            while self._pool:
                _, key = self._pool.pop()
                if key in self._sizes:
                    self._delete(key)
                    self.evicted += 1
                    return

    def _sample(self, now: float) -> None:
        known = {key for _, key in self._pool}
        for _ in range(_SAMPLES):
            key = self._keys[self._draw.randrange(len(self._keys))]
            if key in known:
                continue
            known.add(key)
            insort(self._pool, (self._score(key, now), key))
        # The worst are dropped.
        del self._pool[: max(0, len(self._pool) - _POOL)]

    def _delete(self, key: int) -> None:
        place, last = self._places.pop(key), self._keys.pop()
        if last != key:
            self._keys[place], self._places[last] = last, place
        self.used -= self._sizes.pop(key)
        del self._last[key], self._expiry[key]
