"""Loads from encoder workers and the store into host copies, in a thread beside vLLM's scheduler."""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Mapping

from triptych.base.hashing import stored_as
from triptych.base.log import log_fields, short
from triptych.base.source_tickets import SourceTickets
from triptych.base.types import INT8, EmbeddingSource, ItemPlan
from triptych.ec_connector.base import DirectTransfer
from triptych.ec_connector.connectors.direct_path import DirectLoads
from triptych.ec_connector.connectors.store_client import StoreClient
from triptych.integrations.vllm.host_copies import HostCopies, HostCopy
from triptych.integrations.vllm.options import ConnectorOptions
from triptych.integrations.vllm.park_table import LoadOutcome, LoadReport
from triptych.store.bulk import LoadResult, Missing, scattered
from triptych.store.control import StoreUnavailable
from triptych.store.embedding_store import EmbeddingStore

logger = logging.getLogger(__name__)

#: Loads that run at once; the others wait for one of them.
_CONCURRENT = 16
#: Seconds after which a load is given up, whatever the store does.
_TIMEOUT = 30.0


#: An item's plan, and where an encoder worker serves it.
Served = tuple[ItemPlan, EmbeddingSource]


class CopyLoader:
    """The loads of one scheduler. `row_width` is the only one that the model takes.

    It connects at the first load: a store that is down fails loads, not the engine's start.
    """

    def __init__(self, options: ConnectorOptions, copies: HostCopies, row_width: int) -> None:
        #: The rows of both forms.
        self._namespaces = (*options.namespaces, *(stored_as(name, INT8) for name in options.namespaces))
        self._copies = copies
        self._row_width = row_width
        self._client = StoreClient(options.store)
        self._slots = asyncio.Semaphore(_CONCURRENT)
        self._reports: deque[LoadReport] = deque()
        self._tickets = SourceTickets(options.token) if options.token else None
        self._direct = DirectLoads(DirectTransfer(token=options.token, tls=options.tls))
        #: What encoder workers serve, by identifier and by the live request that says so. The scheduler's.
        self._served: dict[str, dict[str, Served]] = {}
        self._noted: dict[str, list[str]] = {}

    def note(self, request_id: str, params: object) -> None:
        """What a call says of its items: where encoder workers serve them, if its tickets are right."""
        if self._tickets is None or request_id in self._noted or not isinstance(params, Mapping):
            return
        self._noted[request_id] = []
        for identifier, entry in params.items():
            served = self._tickets.read(identifier, entry, request_id)
            if served is not None and served[0].namespace in self._namespaces:
                self._noted[request_id].append(identifier)
                self._served.setdefault(identifier, {})[request_id] = served

    def forget(self, request_id: str) -> None:
        """The request has ended. Idempotent."""
        for identifier in self._noted.pop(request_id, ()):
            holders = self._served[identifier]
            del holders[request_id]
            if not holders:
                del self._served[identifier]

    def start(self, identifier: str) -> None:
        """Starts a load; never blocks. One report follows."""
        # The last one: the encoder worker of an earlier one may have ended.
        served = next(reversed(self._served.get(identifier, {}).values()), None)
        try:
            self._client.submit(self._load(identifier, served))
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
            self._client.close(self._disconnect)
            self._copies.close()

    async def _disconnect(self) -> None:
        self._direct.close()

    async def _load(self, identifier: str, served: Served | None) -> None:
        try:
            async with asyncio.timeout(_TIMEOUT), self._slots:
                report = await self._from_encoder(served) if served is not None else None
                if report is None:
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

    async def _from_encoder(self, served: Served) -> LoadReport | None:
        """The item as its encoder worker serves it; None where that does not, or not any more."""
        plan, source = served
        copy = self._allocated(plan)
        if isinstance(copy, LoadReport):
            return copy
        result: LoadResult = Missing("it was broken off")
        try:
            result, path = await self._direct.load(plan, source, scattered(copy.memory))
        finally:
            if isinstance(result, Missing):
                self._copies.free(copy)
        if isinstance(result, Missing):
            return None
        logger.debug("%s by %s", short(plan.mm_hash), path, extra=log_fields(mm_hash=plan.mm_hash))
        return LoadReport(plan.mm_hash, LoadOutcome.COPIED, copy)

    async def _loaded(self, identifier: str) -> LoadReport:
        store = await self._client.store()
        plan = await self._plan_of(store, identifier)
        if plan is None:
            return self._absent(identifier, "the store has no usable value of it")
        copy = self._allocated(plan)
        return copy if isinstance(copy, LoadReport) else await self._received(store, plan, copy)

    def _allocated(self, plan: ItemPlan) -> HostCopy | LoadReport:
        """Memory for the item, or why there is none."""
        identifier = plan.mm_hash
        if plan.width != self._row_width:
            return self._absent(
                identifier, f"its rows are {plan.width} wide, the model takes {self._row_width}"
            )
        copy = self._copies.allocate(plan)
        if isinstance(copy, int):
            reason = f"host copies are full ({self._copies.limit} bytes): raise host_memory_bytes"
            return LoadReport(identifier, LoadOutcome.NO_SPACE, None, reason, copy, plan.nbytes)
        return copy

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
