"""What a server of the store says of itself, judged by plain values."""

from __future__ import annotations

from dataclasses import replace

import pytest

from triptych.config import GIB, MIB
from triptych.doctor.finding import Verdict
from triptych.doctor.store import StoreState, check_server, check_workers, look_at_store
from triptych.types import WorkerInfo

WELL = StoreState("redis://10.0.0.5:6379/0", "7.0.15", "volatile-lru", 8 * GIB, GIB, 3, 0.0004, 0.01)


def _verdicts(state: StoreState) -> dict[str, Verdict]:
    return {finding.check: finding.verdict for finding in check_server(state)}


def test_a_store_that_is_well_fails_nothing():
    assert set(_verdicts(WELL).values()) == {Verdict.OK}


@pytest.mark.parametrize(
    ("check", "state", "verdict"),
    [
        ("version", replace(WELL, version="5.0.14"), Verdict.FAIL),
        ("policy", replace(WELL, policy="noeviction"), Verdict.FAIL),
        ("policy", replace(WELL, policy="allkeys-lru"), Verdict.FAIL),
        ("maxmemory", replace(WELL, max_bytes=0), Verdict.FAIL),
        ("maxmemory", replace(WELL, max_bytes=MIB), Verdict.FAIL),
        ("persistence", replace(WELL, persistent=True), Verdict.NOTE),
        ("latency", replace(WELL, latency=0.02), Verdict.NOTE),
        ("latency", replace(WELL, latency=0.2), Verdict.FAIL),
        ("clock", replace(WELL, skew=-30.0), Verdict.FAIL),
        ("clock", replace(WELL, skew=30.0), Verdict.FAIL),
    ],
)
def test_what_is_wrong_is_found_with_its_remedy(check, state, verdict):
    verdicts = _verdicts(state)
    assert verdicts.pop(check) is verdict
    assert set(verdicts.values()) == {Verdict.OK}
    (finding,) = [finding for finding in check_server(state) if finding.check == check]
    assert finding.remedy


async def test_a_store_that_is_away_is_one_finding_without_its_password():
    (finding,) = await look_at_store("redis://:hidden-password@127.0.0.1:1/0")
    assert finding.verdict is Verdict.FAIL and "hidden-password" not in finding.found


async def test_a_worker_that_nobody_reaches_is_named():
    infos = [
        WorkerInfo(address, "pd", "i", "k" * 64, "m", (), {}, "image")
        for address in ("127.0.0.1:1", "[::1]:1", "nonsense", "127.0.0.1:99999999")
    ]
    findings = await check_workers(infos, seconds=2.0)
    assert {finding.verdict for finding in findings} == {Verdict.FAIL}
    assert all(info.address in finding.found for info, finding in zip(infos, findings, strict=True))
