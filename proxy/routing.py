"""Which worker takes what: pure choices from a snapshot."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from xxhash import xxh3_64_intdigest

#: Share of a worker's sequences by which a prefix match may outweigh load.
PREFIX_SLACK = 0.25
#: Seconds that any item is expected to take, whatever the fit says of small ones.
LEAST_WORK = 1e-4


@dataclass(frozen=True, slots=True)
class EncoderLoad:
    """An encoder that may take a job now, with its outstanding work in seconds."""

    address: str
    work: float


@dataclass(frozen=True, slots=True)
class PDLoad:
    """A PD worker that may take a request now."""

    address: str
    in_flight: int
    max_num_seqs: int


def rendezvous(key: str, address: str) -> int:
    """The weight of `address` for `key`: the highest one wins, whatever other workers come or go."""
    return int(xxh3_64_intdigest(f"{key}|{address}".encode()))


def choose_encoder(encoders: Iterable[EncoderLoad], mm_hash: str, work: float) -> str | None:
    """Least outstanding work; among those closer than half a job, the one that this key belongs to."""
    loads = list(encoders)
    if not loads:
        return None
    least = min(load.work for load in loads)
    near = [load.address for load in loads if load.work <= least + work / 2]
    return max(near, key=lambda address: rendezvous(mm_hash, address))


class PrefixAffinity:
    """Which PD worker has last prefilled a prefix; bounded, least recently used go first."""

    def __init__(self, capacity: int = 8192) -> None:
        self._capacity = capacity
        self._owners: OrderedDict[str, str] = OrderedDict()

    def record(self, chain: Sequence[str], address: str) -> None:
        for digest in chain:
            self._owners[digest] = address
            self._owners.move_to_end(digest)
        while len(self._owners) > self._capacity:
            self._owners.popitem(last=False)

    def owner(self, chain: Sequence[str], among: Iterable[str]) -> str | None:
        """The worker of `among` that holds the longest known prefix."""
        allowed = set(among)
        for digest in reversed(chain):
            if (address := self._owners.get(digest)) in allowed:
                return address
        return None


def choose_pd(workers: Sequence[PDLoad], chain: Sequence[str], affinity: PrefixAffinity) -> str | None:
    """The owner of the longest known prefix unless it is much busier than the least busy worker."""
    if not workers:
        return None
    least = min(workers, key=lambda load: (load.in_flight / load.max_num_seqs, _tie(chain, load.address)))
    owner = affinity.owner(chain, (load.address for load in workers))
    for load in workers:
        if load.address == owner and load.in_flight <= least.in_flight + PREFIX_SLACK * load.max_num_seqs:
            return load.address
    return least.address


def _tie(chain: Sequence[str], address: str) -> int:
    return -rendezvous(chain[-1] if chain else "", address)


class WorkModel:
    """Seconds of an encoder job, learnt as a + b·patches from what the towers report."""

    def __init__(self, decay: float = 0.98) -> None:
        self._decay = decay
        self._n = self._x = self._y = self._xx = self._xy = 0.0

    def learn(self, patches: int, seconds: float) -> None:
        x = float(patches)
        for name, value in (("_n", 1.0), ("_x", x), ("_y", seconds), ("_xx", x * x), ("_xy", x * seconds)):
            setattr(self, name, getattr(self, name) * self._decay + value)

    def work(self, patches: int | None) -> float:
        """Seconds expected of an item; of an average one when its patches are not known yet."""
        if self._n == 0:
            return 1.0
        mean_x, mean_y, slope = self._fit()
        if patches is None or slope == 0.0:
            return max(mean_y, LEAST_WORK)
        return max(mean_y + slope * (patches - mean_x), LEAST_WORK)

    def total(self, unknown: int, known: int, patches: int) -> float:
        """Seconds expected of `unknown` items without a plan and of `known` ones with `patches` together."""
        if self._n == 0:
            return float(unknown + known)
        mean_x, mean_y, slope = self._fit()
        planned = known * mean_y + slope * (patches - known * mean_x)
        return unknown * max(mean_y, LEAST_WORK) + max(planned, known * LEAST_WORK)

    def _fit(self) -> tuple[float, float, float]:
        """Patches and seconds of an average item, and the seconds of a patch more."""
        mean_x, mean_y = self._x / self._n, self._y / self._n
        spread = self._xx / self._n - mean_x * mean_x
        if spread <= 1e-9 * max(mean_x * mean_x, 1.0):
            return mean_x, mean_y, 0.0
        return mean_x, mean_y, max((self._xy / self._n - mean_x * mean_y) / spread, 0.0)
