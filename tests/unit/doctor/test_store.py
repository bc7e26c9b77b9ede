"""A store that does not answer, and registered workers whom nobody reaches."""

from __future__ import annotations

from triptych.apps.doctor.finding import CheckOutcome
from triptych.apps.doctor.store import check_store, check_workers
from triptych.base.types import WorkerInfo


async def test_a_store_that_is_away_is_one_finding_without_its_password():
    ((heading, (result,)),) = await check_store("redis://:hidden-password@127.0.0.1:1/0")
    assert result.verdict is CheckOutcome.FAIL and "hidden-password" not in heading + result.found
    assert "start the store" in result.found


async def test_a_worker_that_nobody_reaches_is_named():
    infos = [
        WorkerInfo(address, "pd", "i", "k" * 64, "m", (), {}, "image")
        for address in ("127.0.0.1:1", "[::1]:1", "nonsense", "127.0.0.1:99999999")
    ]
    findings = await check_workers(infos, seconds=2.0)
    assert {finding.verdict for finding in findings} == {CheckOutcome.FAIL}
    assert all(info.address in finding.found for info, finding in zip(infos, findings, strict=True))
