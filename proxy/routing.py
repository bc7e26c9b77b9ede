"""Routing: which worker gets what, as pure functions, and the rule of work that may have ended workers."""

from __future__ import annotations

from array import array
from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

from xxhash import xxh3_64_intdigest

from triptych.base.hashing import rendezvous
from triptych.registry.matching import BOTH, DECODE, PREFILL

#: Workers that may be lost with the same work present; at the last of them it is alone.
MAX_LOSSES = 3
#: Output tokens of its own, alone, after which a suspect request is cleared.
CLEARING_TOKENS = 8
K = TypeVar("K", bound=Hashable)

#: Share of KV blocks in use above which a worker takes no request over.
FULL = 0.9
#: Share of a worker's sequences by which a prefix match may outweigh load.
PREFIX_SLACK = 0.25


@dataclass(frozen=True, slots=True)
class EncoderLoad:
    """An encoder that may take a job now: seconds until it would have done all its work and then the job."""

    address: str
    work: float


@dataclass(frozen=True, slots=True)
class PDLoad:
    """A PD worker that may take a request now."""

    address: str
    in_flight: int
    max_num_seqs: int
    #: "prefill", "decode" or "both".
    role: str = BOTH
    #: What the worker says of itself: its requests, those of other proxies too, and its KV blocks in use.
    requests: int = 0
    kv_usage: float = 0.0

    @property
    def has_place(self) -> bool:
        """Whether one more request would begin there at once."""
        return max(self.in_flight, self.requests) < self.max_num_seqs and self.kv_usage < FULL


def choose_encoder(encoders: Iterable[EncoderLoad], mm_hash: str, work: float) -> str | None:
    """The one that is first to have done the job; among those closer than half of the job's `work`, the one
    that this key belongs to."""
    loads = list(encoders)
    if not loads:
        return None
    min_work = min(load.work for load in loads)
    near = [load.address for load in loads if load.work <= min_work + work / 2]
    return max(near, key=lambda address: rendezvous(mm_hash, address))


def role_for(*, begun: bool, prompt_tokens: int, threshold: int) -> str:
    """The role for a request: decode where it has output, or a prompt shorter than the threshold."""
    return DECODE if begun or prompt_tokens < threshold else PREFILL


def of_role(workers: Sequence[PDLoad], role: str) -> Sequence[PDLoad]:
    """The workers that take requests for `role`; all of them where none does."""
    return [load for load in workers if load.role in (role, BOTH)] or workers


class PrefixAffinity:
    """A hash table of the PD worker that has last prefilled each prefix.

    It has a fixed number of slots, and its memory from the start: a proxy's memory does not grow while
    the table fills up. A prefix replaces the one in its slot.
    """

    def __init__(self, slots: int = 32768) -> None:
        #: The 64-bit hash of the digest in each slot; another digest with that hash costs one cache miss.
        self._hashes = array("Q", bytes(8 * slots))
        self._owners: list[str | None] = [None] * slots

    def record(self, chain: Sequence[str], address: str) -> None:
        for digest in chain:
            code = xxh3_64_intdigest(digest.encode())
            slot = code % len(self._owners)
            self._hashes[slot], self._owners[slot] = code, address

    def owner(self, chain: Sequence[str], among: Iterable[str]) -> str | None:
        """The worker of `among` that holds the longest known prefix."""
        allowed = set(among)
        for digest in reversed(chain):
            code = xxh3_64_intdigest(digest.encode())
            slot = code % len(self._owners)
            if self._hashes[slot] == code and (address := self._owners[slot]) in allowed:
                return address
        return None

    def depth(self, chain: Sequence[str], address: str) -> int:
        """How many prefixes of the chain the worker has prefilled, as far as is known: the longest counts."""
        for count in range(len(chain), 0, -1):
            if self.owner(chain[count - 1 : count], (address,)) is not None:
                return count
        return 0


def choose_pd(workers: Sequence[PDLoad], chain: Sequence[str], affinity: PrefixAffinity) -> str | None:
    """The owner of the longest known prefix unless it is much busier than the least busy worker."""
    if len(workers) < 2:
        return workers[0].address if workers else None
    minimum = min(workers, key=lambda load: (load.in_flight / load.max_num_seqs, _tie(chain, load.address)))
    owner = affinity.owner(chain, (load.address for load in workers))
    for load in workers:
        if load.address == owner and load.in_flight <= minimum.in_flight + PREFIX_SLACK * load.max_num_seqs:
            return load.address
    return minimum.address


def _tie(chain: Sequence[str], address: str) -> int:
    return -rendezvous(chain[-1] if chain else "", address)


@dataclass(frozen=True, slots=True)
class _Loss:
    address: str
    incarnation: str
    final: bool


class LossRecord:
    """The workers that ended with one piece of work in them, since it last succeeded.

    Present at two losses it is a suspect, which runs alone; the worker that is then lost is its fault. What
    shares a worker with others is never blamed.
    """

    __slots__ = ("_losses",)

    def __init__(self) -> None:
        self._losses: tuple[_Loss, ...] = ()

    def __len__(self) -> int:
        return len(self._losses)

    @property
    def suspect(self) -> bool:
        """Whether the work may only run alone."""
        return len(self._losses) >= MAX_LOSSES - 1

    @property
    def addresses(self) -> set[str]:
        """Where workers were lost."""
        return {loss.address for loss in self._losses}

    def add(self, address: str, incarnation: str = "", *, alone: bool, final: bool = True) -> bool:
        """Whether this loss is the work's fault. `final`: nothing seen later can show that the process lived
        on undisturbed."""
        before = self._losses if alone else self._losses[-(MAX_LOSSES - 2) :]
        self._losses = (*before, _Loss(address, incarnation, final))
        return alone

    def withdraw(self, incarnation: str) -> None:
        """The process never ended, only its connection was lost: the work is not suspected for that."""
        self._losses = tuple(loss for loss in self._losses if loss.final or loss.incarnation != incarnation)


@dataclass(slots=True)
class _Trial(Generic[K]):
    work: K
    group: Hashable
    #: Whether the worker holds nothing else.
    alone: bool = False
    #: Output tokens that clear the work.
    clearing_at: int = 0


class Suspects(Generic[K]):
    """The work of one pool that was on workers when they ended, and the workers that suspects have to
    themselves.

    A suspect runs alone on its worker; there it is cleared, or is the reason for the loss. Those of one
    `group`, as requests for one model, take turns; without a group they need not.
    """

    def __init__(self) -> None:
        self._losses: dict[K, LossRecord] = {}
        #: By the worker's address.
        self._trials: dict[str, _Trial[K]] = {}
        #: Where the last suspect of each group ran.
        self._last: dict[Hashable, str] = {}

    def __bool__(self) -> bool:
        """Whether any work has been on a worker that was lost."""
        return bool(self._losses)

    @property
    def apart(self) -> frozenset[str]:
        """Addresses of workers that take no other work."""
        return frozenset(self._trials)

    @property
    def on_trial(self) -> list[K]:
        """What has, or is being given, a worker of its own."""
        return [trial.work for trial in self._trials.values()]

    def admits(self, address: str, work: K) -> bool:
        """Whether the worker is not kept for other work."""
        trial = self._trials.get(address)
        return trial is None or trial.work == work

    def losses(self, work: K) -> int:
        """Workers that ended with the work in them."""
        return len(self._losses.get(work, ()))

    def suspect(self, work: K) -> bool:
        """Whether the work may only run alone."""
        record = self._losses.get(work)
        return record is not None and record.suspect

    def lost(self, address: str, incarnation: str, works: Iterable[K], *, final: bool) -> list[K]:
        """A worker is lost with this work. Returns what ended it: it was alone there."""
        guilty = []
        trial = self._trials.get(address)
        for work in works:
            alone = trial is not None and trial.work == work and trial.alone
            record = self._losses.setdefault(work, LossRecord())
            if record.add(address, incarnation, alone=alone, final=final):
                guilty.append(work)
        for work in guilty:
            self.forget(work)
        return guilty

    def returned(self, incarnation: str) -> None:
        """The process never ended, only its connection was lost: nothing is suspected for that."""
        for work, record in list(self._losses.items()):
            record.withdraw(incarnation)
            if not record:
                del self._losses[work]

    def place(self, work: K, group: Hashable, workers: Sequence[PDLoad]) -> str | None:
        """The worker to keep for a suspect; None while another of its group is tried, or none can take it."""
        free = [worker for worker in workers if worker.address not in self._trials]
        if not free or (group and any(trial.group == group for trial in self._trials.values())):
            return None
        record, last = self._losses.get(work), self._last.get(group)
        known = set() if record is None else record.addresses
        best = min(free, key=lambda w: (w.address in known, w.address != last, w.in_flight, w.address))
        self._trials[best.address] = _Trial(work, group)
        if group:
            self._last[group] = best.address
        return best.address

    def begin(self, work: K, address: str) -> None:
        """The suspect begins at a worker that holds nothing else."""
        self.retreat(work)
        self._trials[address] = _Trial(work, None, alone=True)

    def alone(self, work: K, tokens: int) -> None:
        """Its worker holds nothing else; `tokens`: output tokens that it has already."""
        if trial := self._trial(work):
            trial.alone, trial.clearing_at = True, tokens + CLEARING_TOKENS

    def progress(self, work: K, tokens: int) -> bool:
        """It has this many output tokens. Whether that cleared it: its losses count no more."""
        trial = self._trial(work)
        if trial is None or not trial.alone or tokens < trial.clearing_at:
            return False
        self.forget(work)
        return True

    def retreat(self, work: K) -> bool:
        """Its try is over without a loss: it stays a suspect. Whether it had a worker of its own."""
        for address, trial in list(self._trials.items()):
            if trial.work == work:
                del self._trials[address]
                return True
        return False

    def forget(self, work: K) -> bool:
        """It has ended, or is cleared. Whether it had a worker of its own."""
        self._losses.pop(work, None)
        return self.retreat(work)

    def _trial(self, work: K) -> _Trial[K] | None:
        return next((trial for trial in self._trials.values() if trial.work == work), None)
