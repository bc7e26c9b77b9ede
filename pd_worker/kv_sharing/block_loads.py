"""Loads of KV blocks for requests that are not scheduled yet: looked for, written and freed as if idle."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial

import torch

from triptych.base.errors import TriptychError
from triptych.base.metrics import PDMetrics
from triptych.pd_worker.core.kv_cache.block_pool import PrefixChain
from triptych.pd_worker.core.kv_cache.kv_cache_manager import KVCacheManager
from triptych.pd_worker.core.request import EngineRequest, RequestKey
from triptych.pd_worker.kv_sharing.cost_rule import CostRule
from triptych.pd_worker.kv_sharing.kv_copier import KVCopier
from triptych.pd_worker.kv_sharing.stored_kv import Group, StoredKV
from triptych.pd_worker.kv_sharing.transfers import KVTransfers

logger = logging.getLogger(__name__)

#: Fewer are computed sooner than they are asked for.
LEAST_BLOCKS = 2
#: The longest prefixes that a snapshot of recurrent layers is looked for at.
_STATES_LOOKED_UP = 256

#: Queues a call for the engine's thread, where no step is computed meanwhile.
OnEngine = Callable[[Callable[[], None]], None]


@dataclass(slots=True)
class _Look:
    """A request that waits for its blocks, which are put in from the first one on."""

    request: EngineRequest
    digests: list[bytes] = field(default_factory=list)
    #: There was no room for a group: what comes behind it is of no use.
    full: bool = False
    #: The key of the first group that it loads.
    lead: str = ""


class BlockLoads:
    """The requests of one engine that wait for blocks.

    `begin` is called from any thread, `arrived` and `drop` from the engine's. `spare` are the blocks that
    running requests will need soon, `stored` hears of groups that were found.
    """

    def __init__(
        self,
        form: StoredKV,
        kv: KVCacheManager,
        copier: KVCopier,
        transfers: KVTransfers,
        rule: CostRule,
        metrics: PDMetrics,
        *,
        spare: Callable[[], int],
        stored: Callable[[bytes], None],
    ) -> None:
        self._form = form
        self._kv = kv
        self._copier = copier
        self._transfers = transfers
        self._rule = rule
        self._metrics = metrics
        self._spare = spare
        self._stored = stored
        self._waiting: dict[tuple[RequestKey, int], _Look] = {}
        #: When looks that load end, by their first group. Belongs to the transfers' loop.
        self._leading: dict[str, asyncio.Event] = {}

    def begin(self, request: EngineRequest, on_engine: OnEngine, add: Callable[[], None]) -> bool:
        """Looks for the request's blocks, and calls `add` from another thread when all that come are there.

        False, and `add` is not called, where nothing is looked for.
        """
        # Of the prompt, as they are saved. Its last token may have to be computed all the same; the block
        # that it fills ends the group that was saved with it.
        blocks = request.num_prompt_tokens // self._form.block_size
        if request.pooling is not None or blocks < LEAST_BLOCKS:
            return False
        if self._transfers.away or not self._rule.tries():
            return False
        look = self._waiting[request.key, request.attempt] = _Look(request)
        try:
            self._transfers.start(self._run(look, blocks, on_engine, add))
        except TriptychError:
            self._waiting.pop((request.key, request.attempt), None)
            return False
        return True

    def arrived(self, request: EngineRequest) -> bool:
        """Whether the request still waits, and is to be added now."""
        look = self._waiting.pop((request.key, request.attempt), None)
        if look is None:
            return False
        # The end of a prefix is evicted first, as of prefixes that were computed here.
        pool = self._kv.pool
        for digest in reversed(look.digests):
            if (block := pool.find(digest)) is not None:
                pool.add_reference(block)
                pool.release([block])
        return True

    def drop(self, request_ids: Iterable[str] | None, proxy_id: str = "") -> list[EngineRequest]:
        """Those of the requests that wait, which they do not any more; None: all."""
        ids = None if request_ids is None else {(proxy_id, each) for each in request_ids}
        keys = [key for key in list(self._waiting) if ids is None or key[0] in ids]
        return [look.request for key in keys if (look := self._waiting.pop(key, None)) is not None]

    async def _run(self, look: _Look, blocks: int, on_engine: OnEngine, add: Callable[[], None]) -> None:
        begun, tokens = time.monotonic(), blocks * self._form.block_size
        try:
            async with asyncio.timeout(self._rule.patience(tokens)):
                await self._fetch(look, blocks, on_engine)
        except TimeoutError:
            self._metrics.shared_kv_late.inc()
        except TriptychError as error:
            self._transfers.failed(error)
        except Exception:
            logger.exception("the blocks of a request could not be loaded: it is computed")
        finally:
            self._metrics.shared_kv_wait.observe(time.monotonic() - begun)
            add()
            # Behind all that was put in.
            on_engine(partial(self._transfers.call_soon, partial(self._end_lead, look)))

    async def _fetch(self, look: _Look, blocks: int, on_engine: OnEngine) -> None:
        request, size = look.request, self._form.block_size
        chain = PrefixChain(
            request.prefix_root,
            request.prompt_token_ids,
            request.output_token_ids,
            request.features,
            size,
            request.both_ways,
        )
        digests = chain.digests(blocks)
        while True:
            first = self._cached(digests)
            end = min(blocks, first + max(0, self._kv.pool.num_free - self._spare()))
            if end - first < LEAST_BLOCKS:
                return
            lead = self._form.groups(digests[:end], first)[0].plan.mm_hash
            if (ended := self._leading.get(lead)) is None:
                break
            # Another request loads the same: choices of one prompt come at once.
            await ended.wait()
        look.lead = lead
        self._leading[lead] = asyncio.Event()
        self._metrics.shared_kv_looked_up.inc((end - first) * size)
        begun = time.monotonic()
        groups = await self._find(digests[:end], first, request.tenant)
        state_at = groups[-1].end if groups else 0
        if self._form.state_bytes and groups:
            state_at = await self._find_state(digests[:state_at])
        if state_at <= first:
            return
        await self._load(look, digests, [group for group in groups if group.start < state_at], on_engine)
        if self._form.state_bytes:
            await self._load_state(look, digests[state_at - 1], on_engine)
        self._rule.moved((state_at - first) * size, time.monotonic() - begun)

    def _cached(self, digests: Sequence[bytes]) -> int:
        """How many of these blocks are of use here. Called from another thread than the engine's: what is
        there now may be gone when it is needed."""
        find = self._kv.pool.find
        count = next((i for i, digest in enumerate(digests) if find(digest) is None), len(digests))
        return count if self._kv.states is None else self._kv.states.longest(digests[:count])

    def _end_lead(self, look: _Look) -> None:
        """The look's groups are put in, or will not be: those that wait for them go on."""
        if look.lead and (ended := self._leading.pop(look.lead, None)) is not None:
            ended.set()

    async def _find(self, digests: Sequence[bytes], first: int, tenant: str) -> list[Group]:
        """The stored groups from block `first` on, as far as there is no gap."""
        groups = self._form.groups(digests, first)
        count = await self._transfers.find([group.plan for group in groups], tenant)
        found = groups[:count]
        for lacking in groups[count : count + 1]:
            shorter = self._form.shorter(digests, lacking)
            index = await self._transfers.first_of([each.plan for each in shorter], len(shorter))
            found += [] if index is None else [shorter[index]]
        return [group for group in found if group.end > first]

    async def _find_state(self, digests: Sequence[bytes]) -> int:
        """The most of these blocks that end at a stored state; 0: there is none."""
        plans = [self._form.state(digest) for digest in reversed(digests)]
        index = await self._transfers.first_of(plans, _STATES_LOOKED_UP)
        return 0 if index is None else len(digests) - index

    async def _load(
        self, look: _Look, digests: Sequence[bytes], groups: Sequence[Group], on_engine: OnEngine
    ) -> None:
        """All groups at once, in order to the engine: up to the first that is gone."""
        loads = [asyncio.ensure_future(self._transfers.load(group.plan)) for group in groups]
        taken = 0
        try:
            for group, load in zip(groups, loads, strict=True):
                if (body := await load) is None:
                    # What is behind it is of no use, but may be damaged too: deleted, it is saved again.
                    await asyncio.wait(loads)
                    return
                taken += 1
                on_engine(partial(self._put, look, digests[group.start : group.end], body))
        finally:
            for load in loads[taken:]:
                load.cancel()
            for left in await asyncio.gather(*loads[taken:], return_exceptions=True):
                if isinstance(left, torch.Tensor):
                    self._transfers.release(len(left))

    async def _load_state(self, look: _Look, digest: bytes, on_engine: OnEngine) -> None:
        if (body := await self._transfers.load(self._form.state(digest))) is not None:
            on_engine(partial(self._put_state, look, digest, body))

    def _put(self, look: _Look, digests: Sequence[bytes], body: torch.Tensor) -> None:
        """Writes the blocks that are not cached here; on the engine's thread."""
        self._metrics.shared_kv_loaded_bytes.inc(len(body))
        try:
            pool, request = self._kv.pool, look.request
            if look.full or (request.key, request.attempt) not in self._waiting:
                return
            there = [pool.find(digest) for digest in digests]
            new = [index for index, block in enumerate(there) if block is None]
            held = [block for block in there if block is not None]
            # Held, they are not what gives way to the new ones.
            for block in held:
                pool.add_reference(block)
            try:
                # Those that were put in before are free, too, and stay.
                look.full = len(look.digests) + len(new) + self._spare() > pool.num_free
                if new and not look.full:
                    self._write([digests[index] for index in new], body.view(len(digests), -1), new)
            finally:
                pool.release(reversed(held))
            if not look.full:
                look.digests += digests
                self._stored(digests[-1])
        finally:
            self._transfers.release(len(body))

    def _write(self, digests: Sequence[bytes], rows: torch.Tensor, which: Sequence[int]) -> None:
        pool = self._kv.pool
        blocks = pool.allocate(len(which))
        try:
            self._copier.put(blocks, rows, which)
            pool.label(blocks, digests)
        finally:
            pool.release(reversed(blocks))
        self._metrics.shared_kv_loaded.inc(len(blocks) * self._form.block_size)

    def _put_state(self, look: _Look, digest: bytes, body: torch.Tensor) -> None:
        """Writes the snapshot where this block ends; on the engine's thread."""
        try:
            states, request = self._kv.states, look.request
            if look.full or (request.key, request.attempt) not in self._waiting:
                return
            if states is None or self._kv.pool.find(digest) is None or (slot := states.begin(digest)) is None:
                return
            self._copier.put_state(slot, body)
            states.commit(digest)
        finally:
            self._transfers.release(len(body))
