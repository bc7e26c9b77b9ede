"""Saves of KV blocks as prompts are computed, off the engine's thread but for one copy in memory."""

from __future__ import annotations

import asyncio
import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from functools import partial

import torch

from triptych.base.errors import TriptychError
from triptych.base.metrics import PDMetrics
from triptych.base.types import ItemPlan
from triptych.pd_worker.core.kv_cache.kv_cache_manager import KVCacheManager
from triptych.pd_worker.core.outputs import ScheduledChunk, SchedulerOutput
from triptych.pd_worker.core.request import EngineRequest
from triptych.pd_worker.kv_sharing.cost_rule import CostRule
from triptych.pd_worker.kv_sharing.kv_copier import KVCopier
from triptych.pd_worker.kv_sharing.stored_kv import Group, StoredKV
from triptych.pd_worker.kv_sharing.transfers import KVTransfers, SavedValue
from triptych.store.keys import EMBEDDING_TTL

#: Values that are taken to be stored, and for how many seconds, until they are looked for again.
_KNOWN, _KNOWN_SECONDS = 1 << 16, 60.0
#: Seconds after its prompt is complete in which a request's blocks are saved, or are taken as not saved.
SAVE_SECONDS = 2.0


class BlockSaves:
    """The saves of one engine, whose thread calls; `note` is called from any.

    What the queue has no room for is not saved: a block less is a miss elsewhere.
    """

    #: Hears of a request, from any thread: its prompt is complete, and its blocks are stored, or cannot be,
    #: or are not yet after SAVE_SECONDS. Of one that was preempted meanwhile it may hear twice.
    on_stored: Callable[[EngineRequest], None] | None = None

    def __init__(
        self,
        form: StoredKV,
        kv: KVCacheManager,
        copier: KVCopier,
        transfers: KVTransfers,
        rule: CostRule,
        metrics: PDMetrics,
    ) -> None:
        self._form = form
        self._kv = kv
        self._copier = copier
        self._transfers = transfers
        self._rule = rule
        self._metrics = metrics
        #: Keys of values that are stored, by when that was known, the earliest first.
        self._known: OrderedDict[bytes, float] = OrderedDict()
        #: Saves that have not ended, by the digest of the group's last block.
        self._saving: dict[bytes, Future[bool]] = {}

    def note(self, digest: bytes) -> None:
        """The group that ends with this block is stored."""
        self._known[digest] = time.monotonic()
        while len(self._known) > _KNOWN:
            self._known.popitem(last=False)

    def computed(self, output: SchedulerOutput) -> None:
        """Saves what the step, whose result is applied, has added to prompts."""
        for chunk in output.chunks:
            prompt = chunk.state.num_prompt_tokens
            if chunk.start >= prompt or chunk.overlap or chunk.pools:
                continue
            self._save_chunk(chunk, min(chunk.end, prompt) // self._form.block_size)
            if chunk.end >= prompt and self.on_stored is not None:
                self._tell(chunk)

    def _groups(self, chunk: ScheduledChunk, blocks: int) -> list[Group]:
        """The groups that are complete, of the first `blocks` blocks: all of them where the prompt is."""
        whole = chunk.end >= chunk.state.num_prompt_tokens
        if not whole:
            blocks -= blocks % self._form.group_blocks
        return self._form.groups(chunk.state.chain.digests(blocks))

    def _save_chunk(self, chunk: ScheduledChunk, blocks: int) -> None:
        if not self._rule.pays:
            return
        tenant = chunk.state.tenant
        for group in self._groups(chunk, blocks):
            if self._is_known(group.digest):
                continue
            found = [self._kv.pool.find(digest) for digest in self._digests(chunk, group)]
            held = [block for block in found if block is not None]
            if len(held) < len(found):
                return  # evicted in the same step, or not finite
            if not self._transfers.has_room(group.plan.nbytes):
                self._metrics.shared_kv_dropped.inc(group.plan.rows)
                return
            self._save(group.digest, group.plan, partial(self._copier.take, held), tenant, group.plan.rows)
        for at in chunk.kept_at:
            self._save_state(chunk, at, tenant)

    def _digests(self, chunk: ScheduledChunk, group: Group) -> Sequence[bytes]:
        return chunk.state.chain.digests(group.end, group.start)

    def _save_state(self, chunk: ScheduledChunk, at: int, tenant: str) -> None:
        """The snapshot that the chunk has left after `at` tokens, of a model with recurrent layers."""
        states = self._kv.states
        assert states is not None
        digest = chunk.state.chain.digests(at // self._form.block_size)[-1]
        key, plan = b"state" + digest, self._form.state(digest)
        if states.longest([digest]) and not self._is_known(key) and self._transfers.has_room(plan.nbytes):
            self._save(key, plan, partial(self._copier.take_state, states.restore(digest)), tenant, 0)

    def _is_known(self, key: bytes) -> bool:
        if key in self._saving:
            return True
        at = self._known.get(key)
        return at is not None and time.monotonic() < at + _KNOWN_SECONDS

    def _save(
        self,
        key: bytes,
        plan: ItemPlan,
        take: Callable[[], tuple[torch.Tensor, Callable[[], None] | None]],
        tenant: str,
        tokens: int,
    ) -> None:
        try:
            body, wait = take()
        except (RuntimeError, MemoryError) as error:
            # No memory for a copy is no reason to end requests: torch says it by RuntimeError. A device that
            # is lost for good fails the next step.
            self._metrics.shared_kv_dropped.inc(tokens)
            self._transfers.failed(error)
            return
        begun = time.monotonic()
        try:
            saving = self._transfers.save(SavedValue(plan, body, wait), tenant, EMBEDDING_TTL)
        except TriptychError:
            return  # this worker stops
        self._saving[key] = saving

        def ended(future: Future[bool]) -> None:
            self._saving.pop(key, None)
            if future.cancelled() or future.exception() is not None or not future.result():
                self._metrics.shared_kv_dropped.inc(tokens)
                return
            self.note(key)
            self._metrics.shared_kv_saved.inc(tokens)
            self._metrics.shared_kv_saved_bytes.inc(plan.nbytes)
            self._rule.moved(tokens, time.monotonic() - begun)

        saving.add_done_callback(ended)

    def _tell(self, chunk: ScheduledChunk) -> None:
        """Calls `on_stored` for the chunk's request once its saves have ended."""
        chain, blocks = chunk.state.chain, chunk.state.num_prompt_tokens // self._form.block_size
        keys = [group.digest for group in self._form.groups(chain.digests(blocks))]
        if self._form.state_bytes:
            keys += [b"state" + digest for digest in chain.digests(blocks)]
        saves = [saving for key in keys if (saving := self._saving.get(key)) is not None]
        request = chunk.state.request
        try:
            self._transfers.start(self._tell_after(saves, request))
        except TriptychError:
            return  # this worker stops

    async def _tell_after(self, saves: Sequence[Future[bool]], request: EngineRequest) -> None:
        if saves:
            await asyncio.wait([asyncio.wrap_future(saving) for saving in saves], timeout=SAVE_SECONDS)
        if self.on_stored is not None:
            self.on_stored(request)
