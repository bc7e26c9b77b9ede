"""Queues of encoder jobs, filed by what they wait for, the best of each first."""

from __future__ import annotations

import heapq
from collections.abc import Hashable, Iterable
from typing import Generic, TypeVar

from triptych.proxy.encoders.job import EncoderJob, Rank

K = TypeVar("K", bound=Hashable)

#: Entries that are out of date may make up this many, and as many as the others, before they are swept out.
_STALE_ENTRIES = 64


class JobQueue:
    """Jobs by rank, the best first. A job that is pushed again moves to its new rank."""

    __slots__ = ("_heap", "_tickets", "_turn")

    def __init__(self) -> None:
        #: (rank, ticket, job): out of date unless the ticket is the job's latest.
        self._heap: list[tuple[Rank, int, EncoderJob]] = []
        self._tickets: dict[EncoderJob, int] = {}
        self._turn = 0

    def __len__(self) -> int:
        return len(self._tickets)

    def push(self, job: EncoderJob, rank: Rank) -> None:
        self._turn += 1
        self._tickets[job] = self._turn
        heapq.heappush(self._heap, (rank, self._turn, job))
        if len(self._heap) > _STALE_ENTRIES + 2 * len(self._tickets):
            self._heap = [entry for entry in self._heap if self._tickets.get(entry[2]) == entry[1]]
            heapq.heapify(self._heap)

    def discard(self, job: EncoderJob) -> None:
        self._tickets.pop(job, None)

    def first(self) -> tuple[Rank, EncoderJob] | None:
        """The best job with its rank; it stays."""
        heap = self._heap
        while heap and self._tickets.get(heap[0][2]) != heap[0][1]:
            heapq.heappop(heap)
        return (heap[0][0], heap[0][2]) if heap else None

    def jobs(self) -> list[EncoderJob]:
        return list(self._tickets)


class JobFiles(Generic[K]):
    """Queues of jobs by a key that says what they wait for; a job is in one of them at most."""

    def __init__(self) -> None:
        self._queues: dict[K, JobQueue] = {}
        self._keys: dict[EncoderJob, K] = {}

    def __len__(self) -> int:
        return len(self._keys)

    def file(self, job: EncoderJob, key: K, rank: Rank) -> None:
        """Puts the job under `key`, at this rank."""
        if self._keys.get(job, key) != key:
            self.discard(job)
        self._keys[job] = key
        self._queues.setdefault(key, JobQueue()).push(job, rank)

    def renew(self, job: EncoderJob, rank: Rank) -> None:
        """Moves the job to this rank; nothing where it is not filed."""
        if job in self._keys:
            self._queues[self._keys[job]].push(job, rank)

    def discard(self, job: EncoderJob) -> None:
        """Idempotent."""
        if job in self._keys:
            key = self._keys.pop(job)
            queue = self._queues[key]
            queue.discard(job)
            if not queue:
                del self._queues[key]

    def all_keys(self) -> list[K]:
        """Those that some job is filed under."""
        return list(self._queues)

    def jobs(self, key: K) -> list[EncoderJob]:
        queue = self._queues.get(key)
        return [] if queue is None else queue.jobs()

    def walk(self, keys: Iterable[K]) -> Walk:
        """The jobs under `keys`, best first."""
        return Walk(self._queues[key] for key in keys)


class Walk:
    """Several queues as one. What keeps the first job of a queue back keeps all behind it back.

    Between two questions jobs may leave the queues, but none may enter.
    """

    def __init__(self, queues: Iterable[JobQueue]) -> None:
        self._heads: list[tuple[Rank, int, JobQueue]] = []
        for index, queue in enumerate(queues):
            if (first := queue.first()) is not None:
                self._heads.append((first[0], index, queue))
        heapq.heapify(self._heads)

    def first(self) -> EncoderJob | None:
        """The best job of all."""
        while self._heads:
            rank, index, queue = self._heads[0]
            head = queue.first()
            if head is None:
                heapq.heappop(self._heads)
            elif head[0] != rank:
                heapq.heapreplace(self._heads, (head[0], index, queue))
            else:
                return head[1]
        return None

    def skip(self) -> None:
        """Leaves the queue of the best job out from now on."""
        heapq.heappop(self._heads)
