"""What a server of the store says of itself, judged by plain values."""

from __future__ import annotations

from dataclasses import replace

import pytest

from triptych.config import GIB, MIB
from triptych.doctor.finding import CheckOutcome
from triptych.doctor.store import StoreState, check_server, check_workers, look_at_store
from triptych.types import WorkerInfo

WELL = StoreState("redis://10.0.0.5:6379/0", "7.0.15", "volatile-lru", 8 * GIB, GIB, 3, 0.0004, 0.01)


def _verdicts(state: StoreState) -> dict[str, CheckOutcome]:
    return {finding.check: finding.verdict for finding in check_server(state)}


def test_a_store_that_is_well_fails_nothing():
    assert set(_verdicts(WELL).values()) == {CheckOutcome.OK}


@pytest.mark.parametrize(
    ("check", "state", "verdict"),
    [
        ("version", replace(WELL, version="5.0.14"), CheckOutcome.FAIL),
        ("policy", replace(WELL, policy="noeviction"), CheckOutcome.FAIL),
        ("policy", replace(WELL, policy="allkeys-lru"), CheckOutcome.FAIL),
        ("maxmemory", replace(WELL, max_bytes=0), CheckOutcome.FAIL),
        ("maxmemory", replace(WELL, max_bytes=MIB), CheckOutcome.FAIL),
        ("persistence", replace(WELL, persistent=True), CheckOutcome.NOTE),
        ("latency", replace(WELL, latency=0.02), CheckOutcome.NOTE),
        ("latency", replace(WELL, latency=0.2), CheckOutcome.FAIL),
        ("clock", replace(WELL, skew=-30.0), CheckOutcome.FAIL),
        ("clock", replace(WELL, skew=30.0), CheckOutcome.FAIL),
    ],
)
def test_what_is_wrong_is_found_with_its_remedy(check, state, verdict):
    verdicts = _verdicts(state)
    assert verdicts.pop(check) is verdict
    assert set(verdicts.values()) == {CheckOutcome.OK}
    (finding,) = [finding for finding in check_server(state) if finding.check == check]
    assert finding.remedy


async def test_a_store_that_is_away_is_one_finding_without_its_password():
    (finding,) = await look_at_store("redis://:hidden-password@127.0.0.1:1/0")
    assert finding.verdict is CheckOutcome.FAIL and "hidden-password" not in finding.found


async def test_a_worker_that_nobody_reaches_is_named():
    infos = [
        WorkerInfo(address, "pd", "i", "k" * 64, "m", (), {}, "image")
        for address in ("127.0.0.1:1", "[::1]:1", "nonsense", "127.0.0.1:99999999")
    ]
    findings = await check_workers(infos, seconds=2.0)
    assert {finding.verdict for finding in findings} == {CheckOutcome.FAIL}
    assert all(info.address in finding.found for info, finding in zip(infos, findings, strict=True))
