"""The store as the doctor sees it: findings of the store's check, its clock, the workers' addresses."""

from __future__ import annotations

import pytest

from triptych.doctor.finding import CheckOutcome, CheckResult
from triptych.doctor.store import check_clock, check_workers, look_at_store, result_of
from triptych.ec_connector.access.check.findings import Finding, Verdict
from triptych.types import WorkerInfo


@pytest.mark.parametrize("skew", [-30.0, 30.0])
def test_a_clock_that_is_off_fails_with_its_remedy(skew: float):
    assert check_clock(0.1).verdict is CheckOutcome.OK
    result = check_clock(skew)
    assert result.verdict is CheckOutcome.FAIL and result.remedy


def test_findings_of_the_stores_check_are_the_doctors_lines():
    label = "redis://10.0.0.5:6379/0"
    failure = Finding(label, "policy", Verdict.FAILURE, "noeviction", "set it")
    assert result_of(failure) == CheckResult("policy", "noeviction", CheckOutcome.FAIL, "set it")
    version = result_of(Finding(label, "version", Verdict.FINE, "Redis 7.0"))
    assert version is not None and version.found == f"{label}: Redis 7.0"
    warning = result_of(Finding(label, "latency", Verdict.WARNING, "20 ms", "nearer"))
    assert warning is not None and warning.verdict is CheckOutcome.NOTE
    assert result_of(Finding(label, "version", Verdict.UNKNOWN, "this user may not ask")) is None


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
