"""A store that does not answer, its judgements, and registered workers whom nobody reaches."""

from __future__ import annotations

import pytest

from triptych.apps.doctor import store as judge
from triptych.apps.doctor.finding import CheckOutcome
from triptych.apps.doctor.store import check_store, check_workers
from triptych.base.config import GIB, MIB
from triptych.base.types import WorkerInfo
from triptych.store.bulk import StoreMemory


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


OK, NOTE, FAIL = CheckOutcome.OK, CheckOutcome.NOTE, CheckOutcome.FAIL


def memory(policy: str = "volatile-lru", *, most: int = GIB, used: int = MIB) -> StoreMemory:
    return StoreMemory(max_bytes=most, used_bytes=used, policy=policy)


JUDGED = {
    "a new Valkey": (judge.judge_version({"valkey_version": "9.1.2", "redis_version": "7.2.4"}), OK, ""),
    "Redis 7": (judge.judge_version({"redis_version": "7.0.15"}), OK, ""),
    "Redis 6": (judge.judge_version({"redis_version": "6.2.7"}), NOTE, "Redis 7"),
    "no version": (judge.judge_version({}), NOTE, "Redis 7"),
    "the right policy": (judge.judge_policy(memory()), OK, ""),
    "a policy that evicts all": (judge.judge_policy(memory("allkeys-lfu")), FAIL, "volatile-lru"),
    "a policy that evicts nothing": (judge.judge_policy(memory("noeviction")), FAIL, "volatile-lru"),
    "another policy": (judge.judge_policy(memory("volatile-ttl")), NOTE, "volatile-lru"),
    "a limit": (judge.judge_memory(memory(), {}), OK, ""),
    "no limit": (judge.judge_memory(memory(most=0), {}), FAIL, "maxmemory"),
    "a limit above the machine": (
        judge.judge_memory(memory(most=4 * GIB), {"total_system_memory": str(4 * GIB)}),
        NOTE,
        "below 3.0 GiB",
    ),
    "values on disk": (judge.judge_persistence({"aof_enabled": "1"}), NOTE, "appendonly no"),
    "a replica": (judge.judge_role({"role": "slave", "master_host": "h"}), FAIL, "primary"),
    "a primary": (judge.judge_role({"role": "master"}), OK, ""),
    "a near server": (judge.judge_latency([0.0001, 0.0002, 0.3]), OK, ""),
    "a far server": (judge.judge_latency([0.02, 0.03, 0.03]), NOTE, "zone"),
    "a fast network": (judge.judge_bandwidth(1e9, 2e9), OK, ""),
    "a slow network": (judge.judge_bandwidth(1e9, 1e7), NOTE, "Redis Cluster"),
    "a user that may only write": (judge.judge_bandwidth(1e9, None), OK, ""),
    "a user that may neither": (judge.judge_bandwidth(None, None), NOTE, "administrator"),
    "a certificate that ends soon": (judge.judge_expiry(3.0), NOTE, "renew"),
    "a certificate that lasts": (judge.judge_expiry(90.0), OK, ""),
    "plain text over a network": (judge.judge_plain("10.0.0.1"), NOTE, "rediss://"),
    "plain text on this machine": (judge.judge_plain("127.0.0.1"), OK, ""),
    "no login": (judge.judge_login(True), NOTE, "triptych store acl"),
    "slots without a server": (judge.judge_parts([0.5, 0.3]), FAIL, "redis-cli"),
    "no server at all": (judge.judge_parts([]), FAIL, "redis-cli"),
    "all slots": (judge.judge_parts([0.5, 0.3, 0.2]), OK, ""),
    "a clock that is nearly the same": (judge.judge_clock(0.1), OK, ""),
    "a clock that is behind": (judge.judge_clock(-30.0), FAIL, "NTP"),
    "a clock that is ahead": (judge.judge_clock(30.0), FAIL, "NTP"),
}


@pytest.mark.parametrize("what", JUDGED)
def test_what_is_not_fine_says_what_helps(what: str) -> None:
    result, verdict, helps = JUDGED[what]
    assert result.verdict is verdict
    assert result.found
    assert helps in result.remedy
    assert bool(result.remedy) == (verdict is not OK)
