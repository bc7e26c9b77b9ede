"""Loads from the store into host copies, in an event loop of a thread beside vLLM's scheduler."""

from __future__ import annotations

import asyncio
import logging
from collections import deque

from triptych.base.log import log_fields, short
from triptych.base.types import ItemPlan
from triptych.ec_connector.connectors.store_client import StoreClient
from triptych.integrations.vllm.host_copies import HostCopies, HostCopy
from triptych.integrations.vllm.options import ConnectorOptions
from triptych.integrations.vllm.park_table import LoadOutcome, LoadReport
from triptych.store.bulk import Missing
from triptych.store.control import StoreUnavailable
from triptych.store.embedding_store import EmbeddingStore

logger = logging.getLogger(__name__)

#: Loads that run at once; the others wait for one of them.
_CONCURRENT = 16
#: Seconds after which a load is given up, whatever the store does.
_TIMEOUT = 30.0


class CopyLoader:
    """The loads of one scheduler. `row_width` is the only one that the model takes.

    It connects at the first load: a store that is down fails loads, not the engine's start.
    """

    def __init__(self, options: ConnectorOptions, copies: HostCopies, row_width: int) -> None:
        self._namespaces = options.namespaces
        self._copies = copies
        self._row_width = row_width
        self._client = StoreClient(options.store)
        self._slots = asyncio.Semaphore(_CONCURRENT)
        self._reports: deque[LoadReport] = deque()

    def start(self, identifier: str) -> None:
        """Starts a load; never blocks. One report follows."""
        try:
            self._client.submit(self._load(identifier))
        except StoreUnavailable as error:
            self._reports.append(LoadReport(identifier, LoadOutcome.ABSENT, reason=str(error)))

    def reports(self) -> list[LoadReport]:
        """Drains the reports of the loads that have ended."""
        drained = []
        while self._reports:
            drained.append(self._reports.popleft())
        return drained

    def drop(self, copy: HostCopy) -> None:
        """Frees a copy."""
        self._copies.free(copy)

    def close(self) -> None:
        """Ends the loads and the thread, and removes all copies. Idempotent."""
        if not self._client.closed:
            self._client.closed = True
            self._client.close()
            self._copies.close()

    async def _load(self, identifier: str) -> None:
        try:
            async with asyncio.timeout(_TIMEOUT), self._slots:
                report = await self._loaded(identifier)
        except StoreUnavailable as error:
            report = self._absent(identifier, str(error))
        except TimeoutError:
            report = self._absent(identifier, f"the store has not sent it within {_TIMEOUT:g} s")
        except (OSError, MemoryError) as error:
            report = self._absent(
                identifier, f"no memory for its host copy ({error}): raise the size of /dev/shm"
            )
            logger.warning("load of %s: %s", short(identifier), report.reason)
        except Exception as error:
            logger.exception("load of %s failed", short(identifier), extra=log_fields(mm_hash=identifier))
            report = self._absent(identifier, f"unexpected: {error!r}")
        self._reports.append(report)

    async def _loaded(self, identifier: str) -> LoadReport:
        store = await self._client.store()
        plan = await self._plan_of(store, identifier)
        if plan is None:
            return self._absent(identifier, "the store has no usable value of it")
        if plan.width != self._row_width:
            return self._absent(
                identifier, f"its rows are {plan.width} wide, the model takes {self._row_width}"
            )
        copy = self._copies.allocate(plan)
        if isinstance(copy, int):
            reason = f"host copies are full ({self._copies.limit} bytes): raise host_memory_bytes"
            return LoadReport(identifier, LoadOutcome.NO_SPACE, None, reason, copy, plan.nbytes)
        return await self._received(store, plan, copy)

    async def _plan_of(self, store: EmbeddingStore, identifier: str) -> ItemPlan | None:
        """The plan of the stored value, whichever namespace it is of; its TTL is renewed."""
        plans = await store.look_up([(identifier, namespace) for namespace in self._namespaces])
        return next((plan for plan in plans if plan is not None), None)

    async def _received(self, store: EmbeddingStore, plan: ItemPlan, copy: HostCopy) -> LoadReport:
        kept = False
        try:
            result = await store.load(plan, lambda nbytes: copy.memory)
            if isinstance(result, Missing):
                logger.warning(
                    "load of %s: %s",
                    short(plan.mm_hash),
                    result.reason,
                    extra=log_fields(mm_hash=plan.mm_hash),
                )
                if result.damaged_digest:
                    # Else every encoder would find it "already stored", and encode it no more.
                    await store.drop_damaged(plan.mm_hash, result.damaged_digest)
                return self._absent(plan.mm_hash, f"its stored value is unusable: {result.reason}")
            kept = True
            return LoadReport(plan.mm_hash, LoadOutcome.COPIED, copy)
        finally:
            if not kept:
                self._copies.free(copy)

    @staticmethod
    def _absent(identifier: str, reason: str) -> LoadReport:
        return LoadReport(identifier, LoadOutcome.ABSENT, reason=reason)
