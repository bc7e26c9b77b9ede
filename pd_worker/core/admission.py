"""Admission of requests, in turns between tenants and within limits, with their items' bytes reserved."""

from __future__ import annotations

import bisect
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Generic, Protocol, TypeVar

from triptych.base.config import format_size
from triptych.base.errors import ConfigError, ContextTooLong, InvalidRequest, RequestError
from triptych.base.types import MMFeature
from triptych.pd_worker.core.request import EngineRequest, OwnOrder
from triptych.pd_worker.core.tenant_turns import TenantTurns


class HasOrder(Protocol):
    """A request in a queue."""

    @property
    def own_order(self) -> OwnOrder: ...

    @property
    def tenant(self) -> str: ...


R = TypeVar("R", bound=HasOrder)


def own_order_of(request: HasOrder) -> OwnOrder:
    return request.own_order


def distinct_bytes(features: Iterable[MMFeature]) -> dict[str, int]:
    """Bytes of every distinct item, by mm_hash."""
    return {feature.mm_hash: feature.plan.nbytes for feature in features}


class Admission:
    """Reservations of bytes by key; requests that share an item share its reservation."""

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self._reserved = 0
        self._nbytes: dict[str, int] = {}
        self._holders: dict[str, set[str]] = {}
        self._keys: dict[str, set[str]] = {}

    @property
    def reserved(self) -> int:
        """Bytes reserved."""
        return self._reserved

    def check(self, features: Iterable[MMFeature]) -> None:
        """InvalidRequest when the items could never be resident together."""
        sizes = distinct_bytes(features)
        total = sum(sizes.values())
        if total > self.capacity:
            parts = " + ".join(format_size(nbytes) for nbytes in sizes.values())
            raise InvalidRequest(
                f"the request's {len(sizes)} different items need {parts} = {format_size(total)} of "
                f"embeddings, but --encoder-cache-memory is {format_size(self.capacity)}: "
                "send fewer or smaller items, or raise --encoder-cache-memory",
                param="messages",
            )

    def reserve(self, request_id: str, sizes: Mapping[str, int]) -> bool:
        """Reserves all of `sizes` (bytes by key) or nothing; what the request has already costs nothing."""
        new = sum(nbytes for key, nbytes in sizes.items() if key not in self._nbytes)
        if self._reserved + new > self.capacity:
            return False
        self._reserved += new
        for key, nbytes in sizes.items():
            self._nbytes.setdefault(key, nbytes)
            self._holders.setdefault(key, set()).add(request_id)
            self._keys.setdefault(request_id, set()).add(key)
        return True

    def holds(self, request_id: str, key: str) -> bool:
        """Whether the request has a reservation of the key."""
        return key in self._keys.get(request_id, ())

    def holds_any(self, request_id: str) -> bool:
        """Whether the request has any reservation."""
        return request_id in self._keys

    def release(self, request_id: str, key: str) -> None:
        """Drops the request's reservation of the key. Idempotent."""
        keys = self._keys.get(request_id)
        if keys is None or key not in keys:
            return
        keys.discard(key)
        if not keys:
            del self._keys[request_id]
        holders = self._holders[key]
        holders.discard(request_id)
        if not holders:
            del self._holders[key]
            self._reserved -= self._nbytes.pop(key)

    def release_request(self, request_id: str) -> None:
        """Drops all reservations of the request. Idempotent."""
        for key in list(self._keys.get(request_id, ())):
            self.release(request_id, key)


class OrderedRequests(Generic[R]):
    """Requests sorted by `key`, each once. Not to be changed in an iteration other than `one_by_one`."""

    def __init__(self, key: Callable[[R], Any] = own_order_of) -> None:
        self._key = key
        self._requests: list[R] = []

    def __len__(self) -> int:
        return len(self._requests)

    def __iter__(self) -> Iterator[R]:
        return iter(self._requests)

    def one_by_one(self) -> Iterator[R]:
        """In order; each is looked up when it is asked for, so that requests may be added and discarded."""
        index = 0
        while index < len(self._requests):
            request = self._requests[index]
            yield request
            index = bisect.bisect_right(self._requests, self._key(request), key=self._key)

    @property
    def first(self) -> R | None:
        return self._requests[0] if self._requests else None

    def add(self, request: R) -> None:
        """Idempotent."""
        index = bisect.bisect_left(self._requests, self._key(request), key=self._key)
        if index == len(self._requests) or self._requests[index] is not request:
            self._requests.insert(index, request)

    def discard(self, request: R) -> None:
        """Idempotent."""
        index = bisect.bisect_left(self._requests, self._key(request), key=self._key)
        if index < len(self._requests) and self._requests[index] is request:
            del self._requests[index]

    def after(self, request: R | None) -> R | None:
        """The first one behind `request`, which may have left; None: the first of all."""
        index = (
            0 if request is None else bisect.bisect_right(self._requests, self._key(request), key=self._key)
        )
        return self._requests[index] if index < len(self._requests) else None


class RequestsInTurns(Generic[R]):
    """Requests in turns between tenants, by `own_order` inside one."""

    def __init__(self, turns: TenantTurns) -> None:
        self._turns = turns
        self._tenants: dict[str, OrderedRequests[R]] = {}
        #: There was no room for it: its tenant's turn stays.
        self._held: R | None = None

    def __len__(self) -> int:
        return sum(map(len, self._tenants.values()))

    @property
    def tenants(self) -> Collection[str]:
        """Those that have a request here."""
        return self._tenants.keys()

    def add(self, request: R) -> None:
        """Idempotent."""
        if (requests := self._tenants.get(request.tenant)) is None:
            requests = self._tenants[request.tenant] = OrderedRequests()
        requests.add(request)

    def discard(self, request: R) -> None:
        """Idempotent."""
        if self._held is request:
            self._held = None
        if (requests := self._tenants.get(request.tenant)) is not None:
            requests.discard(request)
            if not requests:
                del self._tenants[request.tenant]

    def hold(self, request: R) -> None:
        """There is no room for the request: others never take it for ever, since its tenant stays next."""
        self._held = request

    def first_of(self, tenant: str) -> R | None:
        return self._tenants[tenant].first if tenant in self._tenants else None

    @property
    def first(self) -> R | None:
        """The next one of all."""
        tenants = self._tenants
        return tenants[self._next(tenants)].first if tenants else None

    def one_by_one(self) -> Iterator[R]:
        """Each once, but those of a tenant that rests; the next one is chosen when it is asked for, so that
        requests may come and go."""
        last: dict[str, R] = {}
        done = {self._turns.resting}
        while left := [tenant for tenant in self._tenants if tenant not in done]:
            tenant = self._next(left)
            if (request := self._tenants[tenant].after(last.get(tenant))) is None:
                done.add(tenant)
                continue
            last[tenant] = request
            yield request

    def _next(self, tenants: Collection[str]) -> str:
        if len(tenants) == 1:
            return next(iter(tenants))
        return self._turns.next(tenants, None if self._held is None else self._held.tenant)


class AdmissionQueue(Generic[R]):
    """Requests that wait to be admitted, in turns between tenants and by `own_order` inside one.

    Those with items wait for all such requests before them, so that small ones never starve a large one: its
    tenant's turn stays. Those without wait for none of these.
    """

    def __init__(self, turns: TenantTurns | None = None) -> None:
        self._turns = turns or TenantTurns()
        self._with_items = RequestsInTurns[R](self._turns)
        self._without = RequestsInTurns[R](self._turns)

    def add(self, request: R, *, has_items: bool) -> None:
        (self._with_items if has_items else self._without).add(request)

    def discard(self, request: R) -> None:
        """Idempotent."""
        self._with_items.discard(request)
        self._without.discard(request)

    def admit(self, take: Callable[[R], bool]) -> Iterator[tuple[R, RequestError | None]]:
        """Removes the requests that `take` admits, or refuses by a RequestError: these, and their errors."""
        blocked = False
        while (request := self._first(with_items=not blocked)) is not None:
            error: RequestError | None = None
            try:
                if not take(request):
                    if request is self._without.first:
                        return
                    self._with_items.hold(request)
                    blocked = True
                    continue
            except RequestError as refusal:
                error = refusal
            self.discard(request)
            yield request, error

    def _first(self, *, with_items: bool) -> R | None:
        plain, first = self._without.first, self._with_items.first if with_items else None
        if plain is None or first is None:
            return plain or first
        if plain.tenant == first.tenant:
            return min(plain, first, key=own_order_of)
        return plain if self._turns.next((plain.tenant, first.tenant)) == plain.tenant else first


@dataclass(frozen=True, slots=True)
class SchedulerLimits:
    """The limits of PDConfig; `max_num_batched_tokens` is the token budget of a step."""

    max_num_seqs: int
    max_num_batched_tokens: int
    max_model_len: int

    def __post_init__(self) -> None:
        if self.max_num_batched_tokens < 2:
            raise ConfigError(
                f"--max-num-batched-tokens {self.max_num_batched_tokens} leaves no token for prompts while "
                "text decodes: give 2 or more, or 0 for the device's own"
            )

    @property
    def prefill_cap(self) -> int:
        """Prefill tokens of a step while text decodes: half the budget, so that tokens keep coming."""
        return self.max_num_batched_tokens // 2

    @property
    def least_prefill(self) -> int:
        """Prefill tokens that every step may have, even where it takes long and other tenants wait: fewer
        would leave a device partly idle."""
        return max(1, self.max_num_batched_tokens // 4)

    @property
    def fewest_overlap_tokens(self) -> int:
        """Prompt tokens of waiting requests for which alone a step is made."""
        return self.max_num_batched_tokens // 16


@dataclass(frozen=True, slots=True)
class CrossLimits:
    """Limits of an encoder-decoder model: rows of `width` elements, at most `max_rows` (None: no limit).

    A request's cross table and its own blocks have to fit `num_blocks` of `block_size` tokens together.
    """

    width: int
    max_rows: int | None
    num_blocks: int
    block_size: int


def check_request(request: EngineRequest, limits: SchedulerLimits, cross: CrossLimits | None) -> None:
    """Raises InvalidRequest for a request that can never run; `cross` is None for a decoder-only model."""
    num_prompt = len(request.prompt_token_ids)
    num_tokens = num_prompt + len(request.output_token_ids)
    max_new_tokens = limits.max_model_len - num_tokens
    # A resumed request may be at the limit: then only the end of its output is still to be sent.
    if max_new_tokens < 0 or (
        max_new_tokens == 0 and request.output.finished is None and request.pooling is None
    ):
        raise ContextTooLong(
            f"the prompt has {num_tokens} tokens, but the model takes "
            f"{limits.max_model_len} with the output: shorten messages or send fewer images",
            param="messages",
        )
    if cross is not None:
        _check_cross(request, limits, cross)
        return
    for feature in request.features:
        _check_placement(feature, num_prompt, limits)
    for first, last in request.both_ways:
        if last - first > limits.max_num_batched_tokens:
            raise InvalidRequest(
                f"{last - first} tokens of the prompt at once are above --max-num-batched-tokens "
                f"{limits.max_num_batched_tokens}: shorten the prompt, or raise it",
                param="messages",
            )


def _check_placement(feature: MMFeature, num_prompt: int, limits: SchedulerLimits) -> None:
    placement = feature.placement
    if placement.length == 0 or placement.end > num_prompt:
        raise InvalidRequest("an item's placeholder lies outside the prompt", param="messages")
    if placement.num_embeds() != feature.plan.rows:
        raise InvalidRequest(
            f"an item has {feature.plan.rows} embeddings for {placement.num_embeds()} placeholders",
            param="messages",
        )
    if placement.atomic and placement.length > limits.max_num_batched_tokens:
        raise InvalidRequest(
            f"an item takes {placement.length} tokens at once, above --max-num-batched-tokens "
            f"{limits.max_num_batched_tokens}: send a smaller item, or raise it",
            param="messages",
        )


def _check_cross(request: EngineRequest, limits: SchedulerLimits, cross: CrossLimits) -> None:
    feature = request.cross
    if feature is None or len(request.features) != 1 or feature.placement.offset != 0:
        raise InvalidRequest(
            f"an encoder-decoder model takes exactly one encoder prompt, not {len(request.features)}: "
            "send one text or one audio file",
            param="encoder_prompt",
        )
    plan = feature.plan
    if plan.width != cross.width or plan.rows < 1:
        raise InvalidRequest(
            f"the encoder's output has {plan.rows} rows of {plan.width}, but this model takes rows of "
            f"{cross.width}",
            param="encoder_prompt",
        )
    if cross.max_rows is not None and plan.rows > cross.max_rows:
        raise InvalidRequest(
            f"the encoder prompt has {plan.rows} positions, but the model takes {cross.max_rows}: shorten it",
            param="encoder_prompt",
        )
    longest = min(limits.max_model_len, request.num_prompt_tokens + request.sampling.max_tokens)
    need = -(-plan.rows // cross.block_size) - (-longest // cross.block_size)
    if need > cross.num_blocks:
        raise InvalidRequest(
            f"{plan.rows} encoder positions and {longest} tokens need {need} KV blocks, but --kv-memory "
            f"holds {cross.num_blocks}: shorten the encoder prompt, ask for fewer tokens or raise it",
            param="encoder_prompt",
        )
