"""The EC connector's interface: an abstract class for each of its two roles.

The scheduler role decides and never blocks: it answers from its table of loads. The worker role moves
bytes between the encoder cache and the store. One `ECConnectorMetadata` per engine step goes from the
scheduler role to the worker role, one `ECConnectorOutput` comes back.

A key's life in the scheduler role's table, while some request holds it:

    UNKNOWN --item_ready--> LOADING --fetched--> HIT --update_state_after_alloc--> (encoder cache)
                              ^  \\--failed--> MISS --item_missing_reported--> UNKNOWN (then item_ready)
"""

from __future__ import annotations

import enum
import os
import threading
from abc import ABC, abstractmethod
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable, Iterator, MutableMapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Protocol, Self

from triptych.base.config.tls import TlsFiles, internal_tls
from triptych.base.config.worker import WorkerConfig
from triptych.base.tracing.context import Producers
from triptych.base.types import EmbeddingSource, ItemPlan, MMFeature

if TYPE_CHECKING:
    import torch


#: Values of `ec_role`: what an engine does with the store.
EC_ROLES = ("both", "producer", "consumer")


class ECConnectorRole(enum.IntEnum):
    SCHEDULER = 0
    WORKER = 1


class Presence(enum.Enum):
    """The state of one item's embedding, as the scheduler role knows it."""

    #: Not known to be stored.
    UNKNOWN = enum.auto()
    #: A load is under way, or the item is being encoded again.
    LOADING = enum.auto()
    #: There is a host copy, which stays until its last holder releases it.
    HIT = enum.auto()
    #: A load that began after the key's ready mark found nothing usable.
    MISS = enum.auto()


class HasFeatures(Protocol):
    """The part of an engine's request that a connector reads."""

    @property
    def request_id(self) -> str: ...

    @property
    def features(self) -> Sequence[MMFeature]: ...


@dataclass(frozen=True, slots=True)
class EncoderOutput:
    """An item's encoder output: `data` is [plan.rows, plan.columns] of plan.dtype, contiguous.

    `tenant` is the digest of whom it is saved for; empty for nobody.
    """

    plan: ItemPlan
    data: torch.Tensor
    tenant: str = ""


#: The worker's map from mm_hash to encoder output; the scheduler alone decides what enters and leaves it.
EncoderCacheMap = MutableMapping[str, EncoderOutput]


class OutputCache(MutableMapping[str, EncoderOutput]):
    """An LRU cache from mm_hash to encoder output, safe between threads.

    A flushed store can be filled again from it, without the tower. Pinned entries (a save is running) stay
    even above `max_bytes`.
    """

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._entries: OrderedDict[str, EncoderOutput] = OrderedDict()
        self._pinned: Counter[str] = Counter()
        self._nbytes = 0
        self._lock = threading.Lock()

    @property
    def nbytes(self) -> int:
        """Bytes of all outputs held."""
        return self._nbytes

    def __getitem__(self, mm_hash: str) -> EncoderOutput:
        with self._lock:
            self._entries.move_to_end(mm_hash)
            return self._entries[mm_hash]

    def __setitem__(self, mm_hash: str, output: EncoderOutput) -> None:
        with self._lock:
            self._discard(mm_hash)
            self._entries[mm_hash] = output
            self._nbytes += output.plan.nbytes
            self._trim()

    def __delitem__(self, mm_hash: str) -> None:
        with self._lock:
            if not self._discard(mm_hash):
                raise KeyError(mm_hash)

    def __iter__(self) -> Iterator[str]:
        with self._lock:
            return iter(list(self._entries))

    def __len__(self) -> int:
        return len(self._entries)

    def pin(self, mm_hash: str) -> None:
        """Pins the entry until as many calls of `unpin`."""
        with self._lock:
            self._pinned[mm_hash] += 1

    def unpin(self, mm_hash: str) -> None:
        """Reverts one `pin`."""
        with self._lock:
            self._pinned[mm_hash] -= 1
            if self._pinned[mm_hash] <= 0:
                del self._pinned[mm_hash]
            self._trim()

    def _discard(self, mm_hash: str) -> bool:
        output = self._entries.pop(mm_hash, None)
        if output is None:
            return False
        self._nbytes -= output.plan.nbytes
        return True

    def _trim(self) -> None:
        for mm_hash in list(self._entries):
            if self._nbytes <= self._max_bytes:
                return
            if mm_hash not in self._pinned:
                self._discard(mm_hash)


@dataclass(frozen=True, slots=True)
class FailedLoad:
    """A load that found no usable value.

    `damaged_digest` is the SHA-1 in hex of the first 4 KiB as received, empty when there was no value;
    `reason` is for logs. `unreachable`: the store gave no answer, so nothing is known of the value.
    `no_memory`: the device had none for it; its host copy stays.
    """

    mm_hash: str
    reason: str
    damaged_digest: str = ""
    unreachable: bool = False
    no_memory: bool = False


class ECConnectorMetadata(ABC):
    """One step's orders from the scheduler role to the worker role; crosses processes as msgpack."""

    step: int

    def loads(self) -> Iterable[tuple[str, int]]:
        """(mm_hash, generation) of each load in it: all fail if the transfers cannot be started."""
        return ()

    def without_loads(self) -> Self:
        """The part that frees memory, for metadata whose loads could not be started. Safe to repeat."""
        return self

    @abstractmethod
    def to_bytes(self) -> bytes: ...

    @classmethod
    @abstractmethod
    def from_bytes(cls, raw: bytes) -> Self: ...


@dataclass(slots=True)
class ECConnectorOutput:
    """What the worker role has finished since the last call. A missing key is a result, not an error."""

    #: Keys whose save has landed in the store.
    saved: list[str] = field(default_factory=list)
    #: Keys whose host copy has arrived, with the seconds it took.
    fetched: dict[str, float] = field(default_factory=dict)
    #: The path of each of these: "store", "shm" or "peer".
    paths: dict[str, str] = field(default_factory=dict)
    #: Keys that can be read from this process, and where.
    offered: dict[str, EmbeddingSource] = field(default_factory=dict)
    #: Keys that are now in the encoder cache.
    loaded: list[str] = field(default_factory=list)
    #: Loads that found no usable value.
    failed: list[FailedLoad] = field(default_factory=list)
    #: Saves that did not land, with the reason.
    unsaved: dict[str, str] = field(default_factory=dict)
    #: Which load of its key a report in `fetched`, `loaded` or `failed` is about; absent: the current one.
    generations: dict[str, int] = field(default_factory=dict)

    @property
    def missing(self) -> list[FailedLoad]:
        """The failed loads whose value the store has not."""
        return [failure for failure in self.failed if not (failure.unreachable or failure.no_memory)]


class SourceTable:
    """Where the latest embeddings can be read besides the store, by mm_hash; safe between threads."""

    def __init__(self, capacity: int = 8192) -> None:
        self._capacity = capacity
        self._lock = threading.Lock()
        self._sources: OrderedDict[str, EmbeddingSource] = OrderedDict()

    def note(self, mm_hash: str, source: EmbeddingSource | None) -> None:
        """The embedding's source; None: it has none, as far as is known."""
        with self._lock:
            self._sources.pop(mm_hash, None)
            if source is not None:
                self._sources[mm_hash] = source
            if len(self._sources) > self._capacity:
                self._sources.popitem(last=False)

    def get(self, mm_hash: str) -> EmbeddingSource | None:
        with self._lock:
            return self._sources.get(mm_hash)


@dataclass(eq=False, slots=True)
class DirectTransfer:
    """The paths from encoder to PD workers besides the store.

    A producer serves up to `memory` bytes, over shared memory and, where `host` is set, a data port that
    others reach at `advertise`. A consumer reads from what `sources` names. `reaches_store` says whether the
    store answers this process: nobody waits for one that does not.
    """

    memory: int = 0
    host: str = ""
    port: int = 0
    advertise: str = ""
    token: str = field(default="", repr=False)
    tls: TlsFiles | None = None
    sources: SourceTable = field(default_factory=SourceTable)
    reaches_store: Callable[[], bool] = lambda: True

    @classmethod
    def of(cls, config: WorkerConfig) -> DirectTransfer | None:
        """What every worker has; None with --ec-transfer store, or where the system has no memory files."""
        if config.ec_transfer == "store" or not hasattr(os, "memfd_create"):
            return None
        return cls(token=config.internal_token, tls=internal_tls(config))


@dataclass(frozen=True, slots=True)
class ECTransferConfig:
    """A connector's configuration: which one, and where its store is.

    `connector` is a registered name or `module.path:Name`. A server's address is `store_url`; a store in
    this process is the object `store`, which the caller owns. `host_buffer_bytes` bounds the host copies
    of a consumer. `ec_role`: a "producer" never loads, a "consumer" never saves, "both" is for engines that
    have both sides; ValueError for another. `producers` are the spans that computed the items, where this
    process has traces: saves take them from there, loads put them there. `direct` None: by the store only.
    """

    connector: str = "redis"
    store_url: str = field(default="", repr=False)
    model_key: str = ""
    namespace: str = ""
    device: str = "cpu"
    host_buffer_bytes: int = 1 << 30
    load_timeout: float = 30.0
    save_timeout: float = 30.0
    ttl: float = 3600.0
    ec_role: str = "both"
    store: object | None = field(default=None, repr=False)
    producers: Producers | None = field(default=None, repr=False, compare=False)
    direct: DirectTransfer | None = field(default=None, compare=False)

    def __post_init__(self) -> None:
        if self.ec_role not in EC_ROLES:
            raise ValueError(f"ec_role {self.ec_role!r}: use one of {', '.join(EC_ROLES)}")

    @property
    def is_producer(self) -> bool:
        """Whether embeddings may be saved."""
        return self.ec_role != "consumer"

    @property
    def is_consumer(self) -> bool:
        """Whether embeddings may be loaded."""
        return self.ec_role != "producer"

    def traced(self) -> ECTransferConfig:
        """The same, with a table of producing spans; this one where it has one already."""
        return self if self.producers is not None else replace(self, producers=Producers())


class ECConnectorBase(ABC):
    """The base of both roles: `role`, `config`, and the step's `metadata`."""

    role: ECConnectorRole

    def __init__(self, config: ECTransferConfig) -> None:
        self.config = config
        self.metadata: ECConnectorMetadata | None = None

    @abstractmethod
    def shutdown(self) -> None:
        """Ends transfers and closes connections. Idempotent."""


class ECConnectorScheduler(ECConnectorBase):
    """The role that decides, in the engine's thread; no method blocks or raises for a missing key."""

    role = ECConnectorRole.SCHEDULER

    @abstractmethod
    def add_request(self, request: HasFeatures) -> None:
        """The request holds its items' keys from now on, until `release` or `request_finished`."""

    @abstractmethod
    def item_ready(self, mm_hash: str) -> None:
        """The key's ready mark: its embedding is stored. Starts a load unless there is a host copy or a load.

        A producer starts none.
        """

    @abstractmethod
    def item_missing_reported(self, mm_hash: str) -> None:
        """The MISS has been reported to the proxy; the key is LOADING until its next ready mark."""

    @abstractmethod
    def plan_of(self, mm_hash: str) -> ItemPlan | None:
        """The plan by which the key is being loaded; None when no request holds it."""

    @abstractmethod
    def has_caches(self, request: HasFeatures) -> list[Presence]:
        """One answer per item of the request, in order, from the table of loads."""

    @abstractmethod
    def update_state_after_alloc(self, request: HasFeatures, index: int) -> None:
        """Item `index` has room in the encoder cache: its host copy goes there in this step.

        Ignored unless the item is a HIT; a key is recorded once per step.
        """

    @abstractmethod
    def release(self, request_id: str, mm_hash: str) -> None:
        """The request has consumed the item's last row. The last holder's release drops the host copy."""

    @abstractmethod
    def build_connector_meta(self, scheduler_output: object) -> ECConnectorMetadata:
        """This step's work for the worker role; drains it. Does not change `scheduler_output`."""

    @abstractmethod
    def update_connector_output(self, output: ECConnectorOutput) -> None:
        """Applies the worker role's reports. Late ones, of a key's earlier load, are ignored."""

    @abstractmethod
    def request_finished(self, request: HasFeatures) -> None:
        """Releases all keys of the request. Idempotent."""


class ECConnectorWorker(ECConnectorBase):
    """The role that moves bytes; called from the engine's thread, its transfers run beside it."""

    role = ECConnectorRole.WORKER

    def __init__(self, config: ECTransferConfig, on_progress: Callable[[], None] | None = None) -> None:
        """`on_progress` is called, from any thread, whenever `get_finished` has something new."""
        super().__init__(config)
        self.on_progress = on_progress or (lambda: None)

    @abstractmethod
    def start_load_caches(self, metadata: ECConnectorMetadata, encoder_cache: EncoderCacheMap) -> None:
        """Starts the step's fetches and moves landed host copies into `encoder_cache`. Does not wait.

        An item whose fetch or move fails is reported as failed, alone; so are a producer's fetches. An entry
        is in `encoder_cache` only once it is whole.
        """

    @abstractmethod
    def save_caches(self, encoder_cache: EncoderCacheMap, mm_hash: str, damaged_digest: str = "") -> None:
        """Starts the save of one entry, keeping its tensor alive until it has landed.

        `damaged_digest` names a damaged value in the store that this one replaces. A consumer's entry is
        reported as unsaved.
        """

    def serve(self, output: EncoderOutput) -> bool | None:
        """Makes an output readable from this process, before its save, and says whether it is finite.

        None where it is not served, so that nothing is known; one that is not finite is not served either.
        """
        return None

    @abstractmethod
    def get_finished(self) -> ECConnectorOutput:
        """Drains what has finished; for the thread that starts loads. A missing key is no error."""
