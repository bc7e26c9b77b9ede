"""Requests in the engine, the state of their execution, and their table by id and deadline."""

from __future__ import annotations

import enum
import heapq
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

from triptych.base.errors import RequestError
from triptych.base.log import log_fields
from triptych.base.types import FinishReason, KeptKV, MMFeature, ReasoningMarkers, TimestampTokens
from triptych.pd_worker.core.items.item import ItemStatus, ItemTable, ItemUse
from triptych.pd_worker.core.kv_cache.block_pool import PrefixChain

if TYPE_CHECKING:
    import numpy as np
    import torch

    from triptych.models.base import LogitsRule
    from triptych.pd_worker.core.sampling import Pooling, ResolvedSampling


#: Sort key: resumed attempts first, then by arrival, then by id.
RequestOrder = tuple[bool, float, str]
#: The same among a tenant's own requests, with their priority before their arrival.
OwnOrder = tuple[bool, int, float, str]
#: (proxy id, request id): each proxy draws request ids of its own.
RequestKey = tuple[str, str]


class TextOutput(Protocol):
    """Detokenizer of one request, which also decides when the output ends."""

    #: Set from the start when the resumed tokens ended the output already.
    finished: FinishReason | None
    #: The stop string that has ended the output, if one has.
    stop_sequence: str

    def append(self, token_id: int) -> tuple[str, FinishReason | None]:
        """The text that `token_id` completes, and the reason when it is the last token."""
        ...

    def flush(self) -> str:
        """Text held back until now; called once, when the request ends."""
        ...


class TokenMask(Protocol):
    """Constraint on the output of one request, such as a JSON schema."""

    @property
    def error(self) -> RequestError | None:
        """Set once the output does not match the constraint."""
        ...

    def allowed(self, output_ids: Sequence[int]) -> np.ndarray[tuple[int, ...], np.dtype[np.bool_]] | None:
        """The allowed next token ids, bool [ids of the tokenizer]; None after an error."""
        ...


@dataclass(eq=False, slots=True)
class EngineRequest:
    """One attempt at one request. Only output, output_token_ids, grammar, cached_tokens, and what is used up
    of a hand-over change after submission.

    `arrival` and `deadline` are seconds of `time.monotonic`. `positions` is int64 on CPU,
    [position_rows, len(prompt_token_ids)]; an output token at index i of the whole sequence has position
    i + position_delta in every row. `ready` are the mm_hashes that are stored already, `unencoded` those that
    nobody encodes unless they are reported missing. `prefix_root` roots the KV prefix chain.
    `output_token_ids` starts with the `resumed_tokens` tokens of earlier attempts.
    """

    request_id: str
    attempt: int
    proxy_id: str
    arrival: float
    deadline: float
    prompt_token_ids: Sequence[int]
    features: tuple[MMFeature, ...]
    ready: frozenset[str]
    positions: torch.Tensor
    position_delta: int
    sampling: ResolvedSampling
    prefix_root: bytes
    output: TextOutput
    output_token_ids: list[int] = field(default_factory=list)
    resumed_tokens: int = 0
    #: Its earlier attempt goes on, at a prefill worker, until this one has a token: it goes before nobody.
    planned: bool = False
    #: Another worker may take it over once its prompt is computed.
    may_hand_over: bool = False
    #: What the prefill worker of a planned one has left for this attempt.
    kv: KeptKV | None = None
    #: Prompt tokens that the prefix cache gave before the prompt was computed, be it by another attempt; None
    #: until that is known.
    cached_tokens: int | None = None
    unencoded: frozenset[str] = frozenset()
    #: Prompt tokens [start, end) that attend to one another, beside those of atomic placements.
    both_ways: tuple[tuple[int, int], ...] = ()
    #: Further inputs of the decoder, [prompt tokens, ...] each.
    inputs: Mapping[str, torch.Tensor] = field(default_factory=dict)
    #: How it is pooled: then nothing is sampled, and it ends with its prompt. None: it generates.
    pooling: Pooling | None = None
    #: Constrains the output; None for free text.
    grammar: TokenMask | None = None
    #: What the checkpoint or the task forbids or forces, in this order.
    logits_rules: tuple[LogitsRule, ...] = ()
    #: The text encoder's prompt, reported with the admission.
    encoder_prompt_token_ids: tuple[int, ...] = ()
    #: The model's timestamp tokens, where the request asked for timestamps.
    timestamps: TimestampTokens | None = None
    #: What tells the reasoning in the output's text; None where it has none.
    reasoning: ReasoningMarkers | None = None
    #: How its model writes tool calls; see `Admitted.tool_format` in pd.proto.
    tool_format: str = ""
    #: The digest of its tenant; empty where no keys are in use.
    tenant: str = ""
    #: Among its tenant's requests the lower one goes first.
    priority: int = 0
    #: The client's own name of the request, not unique: for logs.
    label: str = ""
    #: The engine's name of the LoRA adapter that computes it; empty: the model alone.
    adapter: str = ""
    #: The trace that it is recorded in, for logs; empty where it is in none.
    trace_id: str = ""
    _distinct: tuple[int, ...] | None = field(default=None, init=False, repr=False)

    @property
    def key(self) -> RequestKey:
        return (self.proxy_id, self.request_id)

    @property
    def name(self) -> str:
        """The client's label and the request id, as the logs of all processes show them."""
        return f"{self.label} ({self.request_id})" if self.label else self.request_id

    @property
    def log_extra(self) -> dict[str, object]:
        """The fields of log records about the request."""
        return log_fields(
            request_id=self.request_id, label=self.label, attempt=self.attempt, trace_id=self.trace_id
        )

    @property
    def num_prompt_tokens(self) -> int:
        return len(self.prompt_token_ids)

    @property
    def num_tokens(self) -> int:
        """Prompt and output tokens known so far."""
        return len(self.prompt_token_ids) + len(self.output_token_ids)

    @property
    def distinct_prompt_ids(self) -> tuple[int, ...]:
        """The prompt's token ids, each once: all that penalties need of it."""
        if self._distinct is None:
            self._distinct = tuple(sorted(set(self.prompt_token_ids)))
        return self._distinct

    @property
    def cross(self) -> MMFeature | None:
        """The item that an encoder-decoder model attends to."""
        return next((feature for feature in self.features if feature.placement.length == 0), None)


class RequestStatus(enum.Enum):
    """The stage of a request in the scheduler."""

    #: Not admitted: waits until the bytes of all its items can be reserved.
    WAITING_ADMISSION = enum.auto()
    #: Admitted; waits for embeddings, a slot or blocks.
    WAITING_ITEMS = enum.auto()
    #: In the running batch.
    RUNNING = enum.auto()
    #: Without blocks: is recomputed from its first token, or swapped in from host memory.
    PREEMPTED = enum.auto()
    #: Without blocks, and in no queue: its proxy wants no output now.
    PAUSED = enum.auto()
    FINISHED = enum.auto()


@dataclass(slots=True)
class PooledRows:
    """Of a request's first `count` tokens: the sum, or the first, of the hidden states, or all vectors."""

    value: torch.Tensor
    count: int


@dataclass(eq=False, slots=True)
class RequestState:
    """State of a request's execution; only the scheduler changes it."""

    request: EngineRequest
    #: Digests of the request's KV blocks.
    chain: PrefixChain
    #: Identifies the attempt inside this worker; the id in caches and the connector.
    request_id: str = field(init=False)
    #: Its place among all requests, and that among its tenant's in every queue.
    order: RequestOrder = field(init=False)
    own_order: OwnOrder = field(init=False)
    key: RequestKey = field(init=False)
    tenant: str = field(init=False)
    priority: int = field(init=False)
    features: tuple[MMFeature, ...] = field(init=False)
    num_prompt_tokens: int = field(init=False)
    #: Prompt tokens [start, end) that attend to one another: no chunk ends inside them.
    spans: tuple[tuple[int, int], ...] = field(init=False)
    #: The request's own list.
    output_token_ids: list[int] = field(init=False)
    #: The item that an encoder-decoder model attends to.
    cross: MMFeature | None = field(init=False)
    #: The use of the item of each feature; features with one mm_hash share it.
    items: tuple[ItemUse, ...] = field(init=False)
    #: How many of its features are not consumed.
    unconsumed: int = field(init=False)
    status: RequestStatus = RequestStatus.WAITING_ADMISSION
    #: Tokens whose keys and values are in blocks, acknowledged steps only.
    num_computed_tokens: int = 0
    #: The model runner's: what it has pooled of the request's chunks.
    pooled_rows: PooledRows | None = None
    #: Its proxy wants no output now.
    paused: bool = False
    preemptions: int = 0
    #: Its part of the seconds of the steps that prefilled it.
    work_seconds: float = 0.0
    #: The step that copies its tokens back from host memory.
    restored_in: int = 0
    admitted_at: float | None = None
    #: When the last of its items became resident.
    items_at: float | None = None
    first_scheduled_at: float | None = None
    first_token_at: float | None = None
    last_token_at: float | None = None

    def __post_init__(self) -> None:
        request = self.request
        self.request_id = f"{request.proxy_id}/{request.request_id}/{request.attempt}"
        new = request.attempt == 1 or request.planned
        self.order = (new, request.arrival, self.request_id)
        self.own_order = (new, request.priority, request.arrival, self.request_id)
        self.key, self.features, self.cross = request.key, request.features, request.cross
        self.tenant, self.priority = request.tenant, request.priority
        self.num_prompt_tokens = len(request.prompt_token_ids)
        places = (feature.placement for feature in request.features)
        self.spans = (*request.both_ways, *((p.offset, p.end) for p in places if p.atomic))
        self.output_token_ids = request.output_token_ids
        self.unconsumed = len(self.features)
        uses: dict[str, ItemUse] = {}
        for index, feature in enumerate(self.features):
            if (key := feature.mm_hash) not in uses:
                known = ItemStatus.UNENCODED if key in request.unencoded else ItemStatus.PENDING
                uses[key] = ItemUse(feature.plan, ItemStatus.STORED if key in request.ready else known)
            uses[key].unconsumed.add(index)
        self.items = tuple(uses[feature.mm_hash] for feature in self.features)

    def before_span(self, end: int) -> int:
        """The end of a chunk that would end at `end`: the start of the span that it would cut."""
        return min((first for first, last in self.spans if first < end < last), default=end)

    @property
    def num_tokens(self) -> int:
        return self.num_prompt_tokens + len(self.output_token_ids)

    @property
    def admitted(self) -> bool:
        """The bytes of its items are reserved."""
        status = self.status
        return status not in (RequestStatus.WAITING_ADMISSION, RequestStatus.PAUSED, RequestStatus.FINISHED)

    def is_consumed(self, index: int) -> bool:
        """The item's last row is consumed, or a prefix hit covers it."""
        return index not in self.items[index].unconsumed

    @property
    def is_decoding(self) -> bool:
        """Only the newest output token is left to compute."""
        return 0 < len(self.output_token_ids) == self.num_computed_tokens - self.num_prompt_tokens + 1


#: Entries of finished requests, beyond half of all, that are kept before they are removed.
_FINISHED = 64


class RequestTable:
    """Requests that have not finished, in the order in which they were added."""

    def __init__(self, items: ItemTable) -> None:
        self._states: dict[RequestKey, RequestState] = {}
        self._items = items
        self._deadlines: list[tuple[float, int, RequestState]] = []
        self._added = 0
        #: Finished requests that `_deadlines` still has.
        self._finished = 0

    def __iter__(self) -> Iterator[RequestState]:
        return iter(list(self._states.values()))

    @property
    def num_deadlines(self) -> int:
        """Entries ordered by deadline, those of finished requests that are not removed yet included."""
        return len(self._deadlines)

    def get(self, key: RequestKey) -> RequestState | None:
        return self._states.get(key)

    def add(self, state: RequestState) -> None:
        self._states[state.key] = state
        for use in state.items:
            self._items.add(use.plan.mm_hash).uses[state.key] = use
        self._added += 1
        heapq.heappush(self._deadlines, (state.request.deadline, self._added, state))

    def remove(self, state: RequestState) -> None:
        """Removes a request whose status has become FINISHED."""
        del self._states[state.key]
        for use in state.items:
            item = self._items.get(use.plan.mm_hash)
            item.uses.pop(state.key, None)
            self._items.drop_unused(item)
        self._finished += 1
        if 2 * self._finished > _FINISHED + len(self._deadlines):
            self._deadlines = [
                entry for entry in self._deadlines if entry[2].status is not RequestStatus.FINISHED
            ]
            heapq.heapify(self._deadlines)
            self._finished = 0

    def with_item(self, mm_hash: str) -> list[RequestState]:
        """The requests with this item."""
        return [self._states[key] for key in self._items.get(mm_hash).uses]

    def next_deadline(self) -> float | None:
        """The earliest deadline of a request that has not finished."""
        heap = self._deadlines
        while heap and heap[0][2].status is RequestStatus.FINISHED:
            heapq.heappop(heap)
            self._finished -= 1
        return heap[0][0] if heap else None

    def pop_late(self, now: float) -> list[RequestState]:
        """Requests whose deadline has passed; the caller finishes them."""
        late: list[RequestState] = []
        while (deadline := self.next_deadline()) is not None and deadline <= now:
            late.append(heapq.heappop(self._deadlines)[2])
            self._finished -= 1  # `remove` counts it, but its entry has gone already.
        return late
