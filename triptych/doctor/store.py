"""The store: what `triptych store check` finds without writing, its clocks, and the registered workers."""

from __future__ import annotations

import asyncio
import time

from triptych.doctor.finding import CheckOutcome, CheckResult, fail, note, ok
from triptych.ec_connector.access.check.findings import Finding, Verdict
from triptych.ec_connector.access.check.run import check_store
from triptych.ec_connector.registry.registry import Registry
from triptych.ec_connector.store.control import StoreRefused, StoreUnavailable
from triptych.ec_connector.store.embedding_store import EmbeddingStore
from triptych.ec_connector.store.topology.location import parse_store
from triptych.ec_connector.store.topology.server import Server
from triptych.types import WorkerInfo

#: Certificates, logs and metrics of machines are compared by their clocks.
MOST_SKEW_SECONDS = 2.0
_SECONDS = 10.0
_OUTCOMES = {
    Verdict.FINE: CheckOutcome.OK,
    Verdict.WARNING: CheckOutcome.NOTE,
    Verdict.FAILURE: CheckOutcome.FAIL,
}


def result_of(finding: Finding) -> CheckResult | None:
    """The doctor's line of a finding; None for what this login may not ask, or is not there to be judged."""
    if finding.verdict not in _OUTCOMES:
        return None
    found = f"{finding.server}: {finding.found}" if finding.subject in ("version", "reach") else finding.found
    return CheckResult(finding.subject, found, _OUTCOMES[finding.verdict], finding.remedy)


def check_clock(skew: float) -> CheckResult:
    """Whether a server's clock, `skew` seconds ahead of this machine's, is near enough."""
    shown = f"{skew:+.3f} s against this machine"
    if abs(skew) <= MOST_SKEW_SECONDS:
        return ok("clock", shown)
    return fail("clock", shown, "synchronise both machines' clocks by NTP (chrony, systemd-timesyncd)")


async def look_at_store(url: str) -> list[CheckResult]:
    """The findings on the store at this address, and on the workers that are registered in it."""
    findings = [result for finding in await check_store(url, 0) if (result := result_of(finding))]
    store = EmbeddingStore(parse_store(url), _SECONDS)
    try:
        async with asyncio.timeout(_SECONDS):
            await store.topology.connect()
            return findings + await _clocks(store) + await _workers(store)
    except (StoreUnavailable, TimeoutError, OSError) as error:
        if any(finding.verdict is CheckOutcome.FAIL for finding in findings):
            return findings
        return [*findings, fail("store", str(error) or "no answer in time", "look at its log and its load")]
    finally:
        await store.close()


async def _clocks(store: EmbeddingStore) -> list[CheckResult]:
    findings = []
    for part in store.topology.servers():
        try:
            findings.append(check_clock(await _skew(part.server)))
        except StoreRefused as error:
            findings.append(
                note("clock", str(error), "its user may not ask for INFO: use the administrator's")
            )
    return findings


async def _skew(server: Server) -> float:
    """Seconds that the server's clock is ahead; 0 where it does not say."""
    before = time.time()
    # No TIME: a service's user may ask for INFO alone.
    info = await server.info("server")
    middle = (before + time.time()) / 2
    return int(info["server_time_usec"]) / 1e6 - middle if "server_time_usec" in info else 0.0


async def _workers(store: EmbeddingStore) -> list[CheckResult]:
    try:
        workers = await Registry(store).workers()
    except StoreRefused as error:
        return [note("workers", str(error), "its user may not read the registry: use the administrator's")]
    return await check_workers(workers)


async def check_workers(workers: list[WorkerInfo], seconds: float = 3.0) -> list[CheckResult]:
    """Whether each registered worker's address can be reached from here."""
    return list(await asyncio.gather(*(_reached(info, seconds) for info in workers)))


async def _reached(info: WorkerInfo, seconds: float) -> CheckResult:
    host, _, port = info.address.rpartition(":")
    name = f"{info.pool} {info.address} ({info.model})"
    try:
        async with asyncio.timeout(seconds):
            _, writer = await asyncio.open_connection(host.strip("[]"), int(port))
            writer.close()
    except (OSError, ValueError, OverflowError, TimeoutError) as error:
        why = str(error) or f"no answer within {seconds:g} s"
        return fail("worker", f"{name}: {why}", "see its log, --advertise, and firewalls between")
    return ok("worker", f"{name} is reached")
