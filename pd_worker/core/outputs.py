"""What a step schedules and what it gives: scheduler output, runner output, and figures for metrics."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

import msgspec

from triptych.base.errors import RequestError
from triptych.ec_connector.base import ECConnectorMetadata, ECConnectorOutput
from triptych.pd_worker.core.kv_cache.kv_cache_manager import BlockCopy
from triptych.pd_worker.core.kv_cache.state_slots import StateCopy
from triptych.pd_worker.core.request import RequestState


@dataclass(frozen=True, slots=True)
class GatheredRows:
    """Rows [first, first + count) of an item go to batch tokens [at, at + count) of its request's chunk.

    `at` counts from the chunk's first token.
    """

    mm_hash: str
    first: int
    count: int
    at: int


class ScheduledChunk(msgspec.Struct, frozen=True, eq=False):
    """One request's share of a step: tokens [start, start + count) of prompt plus output.

    A Struct, since a step makes one per request, and a dataclass takes three times as long to construct.
    """

    state: RequestState
    start: int
    count: int
    #: The request's block table, long enough for the chunk.
    block_ids: tuple[int, ...]
    #: Encoder rows that the chunk consumes.
    rows: tuple[GatheredRows, ...]
    #: The chunk reaches the last known token: a token is sampled from its logits, or they are a score.
    samples: bool
    #: The cross table, and the encoder rows in it; empty for decoder-only models.
    cross_blocks: tuple[int, ...] = ()
    cross_length: int = 0
    #: The request waits for items: only the prefix cache keeps what the chunk computes.
    overlap: bool = False
    #: The request's state slot, all zeros before the first token; -1 without recurrent layers.
    slot: int = -1
    #: Where in the chunk the state is kept, ascending, and the slot that gets a copy of it there.
    snapshots: tuple[tuple[int, int], ...] = ()
    #: The chunk reaches the end of a request that is pooled.
    pools: bool = False

    @property
    def end(self) -> int:
        return self.start + self.count

    @property
    def kept_at(self) -> list[int]:
        """The numbers of tokens at which the state is kept."""
        return [at for at, _ in self.snapshots]


@dataclass(frozen=True, slots=True)
class Projection:
    """The `rows` rows of an item become cross keys and values in `block_ids`, in the rows' order."""

    mm_hash: str
    rows: int
    block_ids: tuple[int, ...]


class SchedulerOutput(msgspec.Struct):
    """Input of the model runner for one step."""

    #: Counts from 1; metadata and results of a step carry it.
    step: int
    #: When it was scheduled.
    at: float = 0.0
    #: Decodes first, then prefill chunks, those of waiting requests last; the order of the batch.
    chunks: list[ScheduledChunk] = []
    #: Copies of preempted requests' blocks to host memory, before anything is written.
    swap_out: list[BlockCopy] = []
    #: Copies from host memory, after that and before the chunks are computed.
    swap_in: list[BlockCopy] = []
    #: The copies of the states of these requests, from slots to host slots and back.
    states_out: list[StateCopy] = []
    states_in: list[StateCopy] = []
    #: Copies of snapshots to the slots of requests that go on from them, before the chunks are computed.
    states_restored: list[StateCopy] = []
    #: Keys of the cross tables among them.
    restored: list[str] = []
    #: Cross tables to write before the chunks are computed; none of the chunks reads them.
    projections: list[Projection] = []
    #: mm_hashes that the runner drops from the encoder cache before anything else in the step.
    evicted: list[str] = []
    #: Requests that gave their blocks up in this step.
    preempted: list[RequestState] = []
    #: How many of them did so for a tenant without any in the batch.
    gave_way: int = 0
    #: Requests that start in this step.
    starts: int = 0
    #: Prompt tokens looked up in the prefix cache, and found there, by requests that started in this step.
    prefix_queried: int = 0
    prefix_hit: int = 0
    #: This step's work of the connector's worker role.
    ec_connector_metadata: ECConnectorMetadata | None = None

    @property
    def written_tables(self) -> list[str]:
        """Keys of the cross tables that this step writes."""
        return [*(projection.mm_hash for projection in self.projections), *self.restored]

    def computable(self, *, swapped_in: bool) -> list[ScheduledChunk]:
        """The chunks that can be computed: without those whose copies from host memory have failed."""
        if swapped_in or not self.swap_in:
            return self.chunks
        keys = set(self.restored)
        return [
            chunk
            for chunk in self.chunks
            if chunk.state.restored_in != self.step
            and not any(feature.mm_hash in keys for feature in chunk.state.features)
        ]

    def share_seconds(self, now: float) -> None:
        """Adds the step's seconds to the requests that it prefills, by their tokens among all of the step."""
        if not self.chunks or self.chunks[-1].state.is_decoding:
            return
        each = max(now - self.at, 0.0) / sum(chunk.count for chunk in self.chunks)
        for chunk in self.chunks:
            if not chunk.state.is_decoding:
                chunk.state.work_seconds += each * chunk.count

    @property
    def rows(self) -> int:
        """Rows of the step: tokens of its chunks, and items' rows of its projections."""
        return sum(chunk.count for chunk in self.chunks) + sum(one.rows for one in self.projections)

    @property
    def prompt_rows(self) -> int:
        """Prompt tokens of the step: those of chunks of several tokens, as one of a single token costs no
        more than a decode."""
        return sum(chunk.count for chunk in self.chunks if chunk.count > 1)

    def rows_of_tenants(self) -> Counter[str]:
        """Tokens of its chunks, by tenant."""
        rows = Counter[str]()
        for chunk in self.chunks:
            rows[chunk.state.tenant] += chunk.count
        return rows

    @property
    def computes(self) -> bool:
        """The step has work for the decoder."""
        return bool(self.chunks or self.projections or self.swap_out or self.swap_in)


@dataclass(frozen=True, slots=True)
class RawLogprobs:
    """Log-probabilities of one output position as (token id, logprob): the chosen token, the likeliest."""

    chosen: tuple[int, float]
    top: tuple[tuple[int, float], ...]


class ModelRunnerOutput(msgspec.Struct):
    """Output of the model runner for one step, with the connector's finished transfers."""

    #: The step's copies to host memory are complete, or there were none: only then may the blocks be read.
    swapped_out: bool = False
    #: The same for copies from host memory. Otherwise chunks that need them are not computed.
    swapped_in: bool = False
    #: One token for every chunk that is computed and samples, in the chunks' order; 0 for a score.
    sampled: list[int] = []
    #: By index into `sampled`: log-probabilities where wanted, and errors of requests without a token.
    logprobs: dict[int, RawLogprobs] = {}
    errors: dict[int, RequestError] = {}
    #: By index of a computed chunk that pools: the vector or score as little-endian float32.
    pooled: dict[int, bytes] = {}
    #: Items whose cross tables could not be made.
    unprojected: frozenset[str] = frozenset()
    #: Indices of computed chunks with NaN or infinite values: nothing of them is left in the KV cache.
    non_finite: frozenset[int] = frozenset()
    #: Digest of the batch, where several ranks compute it: theirs are equal.
    batch_digest: int = 0
    #: The chunks were computed as a replay of a decode graph.
    graphed: bool = False
    #: Why the model could not run: the batch's requests end with it, the transfers count all the same.
    error: Exception | None = None
    #: Fetched, loaded and failed items since the last step.
    ec_connector_output: ECConnectorOutput = msgspec.field(default_factory=ECConnectorOutput)

    @property
    def moved_items(self) -> bool:
        """Whether an embedding arrived, reached the encoder cache, or failed."""
        moved = self.ec_connector_output
        return bool(moved.fetched or moved.loaded or moved.failed)


@dataclass(slots=True)
class ItemStats:
    """Current gauges of embeddings, and counts of where items were found since the last report."""

    cross_tables: int = 0
    encoder_cache_bytes: int = 0
    encoder_cache_references: int = 0
    reserved_bytes: int = 0
    resident: int = 0
    fetched: int = 0
    missing: int = 0
    #: Requests that gave their room up.
    put_off: int = 0
    load_seconds: list[float] = field(default_factory=list)
    load_bytes: int = 0
    #: Loads by their paths.
    loads: Counter[str] = field(default_factory=Counter)


@dataclass(slots=True)
class OverlapStats:
    """Counts of prefill before all items are there: requests, tokens, tokens that were evicted before use."""

    requests: int = 0
    tokens: int = 0
    lost_tokens: int = 0


@dataclass(slots=True)
class Latencies:
    """Latencies in seconds since the last report: to the first token, between tokens, of whole requests."""

    first_token: list[float] = field(default_factory=list)
    between_tokens: list[float] = field(default_factory=list)
    whole: list[float] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class SchedulerStats:
    """Current gauges, and counts and latencies since the last report."""

    num_running: int
    num_waiting: int
    item_pressure: float
    kv_blocks: int
    kv_blocks_used: int
    host_blocks_used: int
    state_slots_used: int
    state_snapshots: int
    #: Tenants with requests that wait, and none that runs.
    tenants_waiting: int
    items: ItemStats
    overlap: OverlapStats
    latencies: Latencies
