"""The check of a store: every server is asked, measured and judged."""

from __future__ import annotations

from collections.abc import Awaitable

from triptych.config import MIB
from triptych.ec_connector.access.check import findings as judge
from triptych.ec_connector.access.check import measures
from triptych.ec_connector.access.check.findings import Finding, Judgement, Verdict
from triptych.ec_connector.store.bulk import BulkError
from triptych.ec_connector.store.control import StoreRefused, StoreUnavailable
from triptych.ec_connector.store.embedding_store import EmbeddingStore
from triptych.ec_connector.store.topology.location import parse_store
from triptych.ec_connector.store.topology.server import Server
from triptych.errors import ConfigError

_TIMEOUT = 5.0
_DENIED: Judgement = (
    Verdict.UNKNOWN,
    "this user may not ask",
    "log in as an administrator to have it checked",
)


async def check_store(url: str, nbytes: int) -> list[Finding]:
    """The findings about the store of --store; bandwidth is measured with one value of up to `nbytes`.

    With 0 nothing is written, and neither bandwidth nor epoch is looked at. ConfigError for an address that
    is none.
    """
    store = EmbeddingStore(parse_store(url), _TIMEOUT)
    try:
        return await _StoreCheck(store).run(nbytes)
    finally:
        await store.close()


class _StoreCheck:
    """The check of one store."""

    def __init__(self, store: EmbeddingStore) -> None:
        self._store = store
        self._findings: list[Finding] = []

    async def run(self, nbytes: int) -> list[Finding]:
        topology, label = self._store.topology, self._store.label
        try:
            await topology.connect()
        except StoreUnavailable as error:
            # The message says what helps.
            return [Finding(label, "reach", Verdict.FAILURE, str(error))]
        parts = topology.servers()
        for each in parts:
            await self._server(each.server)
        if len(parts) != 1 or parts[0].part < 1:
            await self._try(label, "slots", _done(judge.judge_parts([each.part for each in parts])))
        if nbytes:
            await self._try(label, "bandwidth", self._bandwidth(nbytes))
            await self._try(label, "epoch", self._epoch())
        return self._findings

    async def _server(self, server: Server) -> None:
        address, label = server.address, server.address.label
        await self._try(label, "version", self._of_section(server, "server", judge.judge_version))
        await self._try(label, "role", self._of_section(server, "replication", judge.judge_role))
        await self._try(label, "policy", self._policy(server))
        await self._try(label, "memory", self._memory(server))
        await self._try(label, "disk", self._of_section(server, "persistence", judge.judge_persistence))
        await self._try(label, "latency", self._latency(server))
        if not address.path:
            await self._try(label, "TLS", self._tls(server))
        await self._try(label, "login", self._login(server))

    async def _try(self, label: str, subject: str, work: Awaitable[Judgement]) -> None:
        """Adds a finding; a check that cannot be made is one, too."""
        try:
            judgement = await work
        except StoreRefused:
            judgement = _DENIED
        except (StoreUnavailable, BulkError, OSError, TimeoutError, ConfigError) as error:
            judgement = (Verdict.FAILURE, str(error) or "no answer in time", "")
        self._findings.append(Finding(label, subject, *judgement))

    async def _of_section(self, server: Server, section: str, judgement: judge.OfSection) -> Judgement:
        return judgement(await server.info(section))

    async def _policy(self, server: Server) -> Judgement:
        return judge.judge_policy(await server.memory())

    async def _memory(self, server: Server) -> Judgement:
        return judge.judge_memory(await server.memory(), await server.info("memory"))

    async def _latency(self, server: Server) -> Judgement:
        return judge.judge_latency(await measures.latency(server))

    async def _tls(self, server: Server) -> Judgement:
        if server.address.tls is not None:
            return judge.judge_expiry(await measures.days_left(server.address))
        return judge.judge_plain(server.address.host)

    async def _login(self, server: Server) -> Judgement:
        return judge.judge_login(await measures.is_open(server.address))

    async def _bandwidth(self, nbytes: int) -> Judgement:
        """With at most a hundredth of the store's memory, so that little is evicted for it."""
        memory = await self._store.memory()
        most = max(MIB, memory.max_bytes // 100) if memory.max_bytes else nbytes
        return judge.judge_bandwidth(
            *await measures.bandwidth(self._store.topology, max(1, min(nbytes, most)))
        )

    async def _epoch(self) -> Judgement:
        return Verdict.FINE, await self._store.epoch(), ""


async def _done(judgement: Judgement) -> Judgement:
    return judgement
