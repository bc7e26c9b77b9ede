"""The judgements of a check, from what servers say of themselves."""

from __future__ import annotations

import pytest

from triptych.config import GIB, MIB
from triptych.ec_connector.access.check import findings as judge
from triptych.ec_connector.access.check.findings import Finding, Judgement, Verdict
from triptych.ec_connector.store.results import StoreMemory

FINE, WARNING, FAILURE, UNKNOWN = Verdict.FINE, Verdict.WARNING, Verdict.FAILURE, Verdict.UNKNOWN


def memory(policy: str = "volatile-lru", *, most: int = GIB, used: int = MIB) -> StoreMemory:
    return StoreMemory(max_bytes=most, used_bytes=used, policy=policy)


JUDGED = {
    "a new Valkey": (judge.judge_version({"valkey_version": "9.1.2", "redis_version": "7.2.4"}), FINE, ""),
    "Redis 7": (judge.judge_version({"redis_version": "7.0.15"}), FINE, ""),
    "Redis 6": (judge.judge_version({"redis_version": "6.2.7"}), WARNING, "Redis 7"),
    "no version": (judge.judge_version({}), UNKNOWN, ""),
    "the right policy": (judge.judge_policy(memory()), FINE, ""),
    "a policy that evicts all": (judge.judge_policy(memory("allkeys-lfu")), FAILURE, "volatile-lru"),
    "a policy that evicts nothing": (judge.judge_policy(memory("noeviction")), FAILURE, "volatile-lru"),
    "another policy": (judge.judge_policy(memory("volatile-ttl")), WARNING, "volatile-lru"),
    "a limit": (judge.judge_memory(memory(), {}), FINE, ""),
    "no limit": (judge.judge_memory(memory(most=0), {}), FAILURE, "maxmemory"),
    "a limit above the machine": (
        judge.judge_memory(memory(most=4 * GIB), {"total_system_memory": str(4 * GIB)}),
        WARNING,
        "below 3.0 GiB",
    ),
    "values on disk": (judge.judge_persistence({"aof_enabled": "1"}), WARNING, "appendonly no"),
    "a replica": (judge.judge_role({"role": "slave", "master_host": "h"}), FAILURE, "primary"),
    "a primary": (judge.judge_role({"role": "master"}), FINE, ""),
    "a near server": (judge.judge_latency([0.0001, 0.0002, 0.3]), FINE, ""),
    "a far server": (judge.judge_latency([0.02, 0.03, 0.03]), WARNING, "zone"),
    "a fast network": (judge.judge_bandwidth(1e9, 2e9), FINE, ""),
    "a slow network": (judge.judge_bandwidth(1e9, 1e7), WARNING, "Redis Cluster"),
    "a user that may only write": (judge.judge_bandwidth(1e9, None), FINE, ""),
    "a user that may neither": (judge.judge_bandwidth(None, None), UNKNOWN, ""),
    "a certificate that ends soon": (judge.judge_expiry(3.0), WARNING, "renew"),
    "a certificate that lasts": (judge.judge_expiry(90.0), FINE, ""),
    "plain text over a network": (judge.judge_plain("10.0.0.1"), WARNING, "rediss://"),
    "plain text on this machine": (judge.judge_plain("127.0.0.1"), FINE, ""),
    "no login": (judge.judge_login(True), WARNING, "triptych store acl"),
    "slots without a server": (judge.judge_parts([0.5, 0.3]), FAILURE, "redis-cli"),
    "no server at all": (judge.judge_parts([]), FAILURE, "redis-cli"),
    "all slots": (judge.judge_parts([0.5, 0.3, 0.2]), FINE, ""),
}


@pytest.mark.parametrize("what", JUDGED)
def test_what_is_not_fine_says_what_helps(what: str) -> None:
    judgement: Judgement
    judgement, verdict, helps = JUDGED[what]
    assert judgement[0] is verdict
    assert judgement[1]
    assert helps in judgement[2]
    assert bool(judgement[2]) == (verdict in (WARNING, FAILURE))


def test_only_failures_fail_the_command() -> None:
    fine, warned = Finding("s", "a", FINE, "x"), Finding("s", "b", WARNING, "y", "do z")
    assert judge.exit_code([fine, warned]) == 0
    assert judge.exit_code([fine, warned, Finding("s", "c", FAILURE, "w")]) == 1


def test_the_table_names_a_server_once_and_the_remedy_below_its_finding() -> None:
    findings = [Finding("s", "policy", FINE, "x"), Finding("s", "tls", WARNING, "y", "do z")]
    assert judge.table(findings).splitlines() == [
        "s",
        "  ok       policy  x",
        "  warning  tls     y",
        "                   -> do z",
    ]
