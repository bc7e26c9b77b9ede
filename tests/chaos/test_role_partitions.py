"""Prefill and decode workers cut off from each other, or from the store that has the KV: nothing is lost.

Each process is in a network namespace of its own. A machine without namespaces fails these tests.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Iterator

import pytest

from support.data.checkpoints import build_checkpoint
from support.netns.network import Network, run_as_root
from support.netns.split_cluster import HOSTS, TEXTS, Clients, Question, Reply, SplitCluster, fresh, wrong
from support.waiting import until

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

PREFILL, DECODE, PROXY = "pd-0", "pd-1", "proxy-0"
TOKENS = 60
_FRESH = iter([fresh(number) for number in range(10_000)])


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SplitCluster]:
    """With one worker of each role, to which every request is handed over."""
    model, folder = build_checkpoint("qwen3_vl"), tmp_path_factory.mktemp("roles")
    words = ("--request-timeout", "60", "--store-wait", "30", "--prefill-threshold", "0")
    roles = {PREFILL: "prefill", DECODE: "decode"}
    with Network(HOSTS) as network, SplitCluster(network, model, folder, *words, roles=roles) as cluster:
        yield cluster


def handed_over(cluster: SplitCluster) -> float:
    return cluster.samples(PROXY).get("triptych_hand_overs_total", 0.0)


def questions() -> list[Question]:
    return [*TEXTS, *(next(_FRESH) for _ in range(6))]


async def ask(clients: Clients, asked: list[Question], salt: str) -> list[Reply]:
    return list(
        await asyncio.gather(
            *(clients.ask(PROXY, each, max_tokens=TOKENS, cache_salt=salt) for each in asked)
        )
    )


@pytest.mark.parametrize("cut", [(PREFILL, DECODE), ("store", PREFILL), ("store", DECODE)], ids="-".join)
@pytest.mark.parametrize("both", [True, False], ids=["both ways", "one way"])
async def test_what_is_asked_before_and_during_a_cut_is_answered_while_it_stands(
    cluster: SplitCluster, cut: tuple[str, str], both: bool
) -> None:
    asked, later, salt = questions(), questions(), f"{cut} {both}"
    before = handed_over(cluster)
    async with Clients(cluster) as clients:
        with cluster.network.healed():
            under_way = asyncio.create_task(ask(clients, asked, salt))
            await until(lambda: handed_over(cluster) > before, "a hand-over")
            cluster.network.cut(*cut, both=both)
            got = [*await under_way, *await ask(clients, later, salt)]
        right = await ask(clients, [*asked, *later], f"{salt} again")
    assert wrong(got, right) == []
    assert {len(reply.token_ids) for reply in right} == {TOKENS}
    assert cluster.samples(PROXY).get("triptych_resumes_total", 0.0) == 0, "a cut that has a way around it"


async def test_kv_goes_through_the_store_while_the_two_do_not_reach_each_other(cluster: SplitCluster) -> None:
    loaded = "triptych_pd_shared_kv_loaded_tokens_total"
    before = cluster.samples(DECODE).get(loaded, 0.0)
    async with Clients(cluster) as clients:
        with cluster.network.healed():
            cluster.network.cut(PREFILL, DECODE)
            got = await ask(clients, questions(), "by the store")
    assert [reply.status for reply in got] == [200] * len(got)
    assert cluster.samples(DECODE)[loaded] > before


if os.geteuid() != 0:
    # An ordinary user has no namespaces, but may be root of a user namespace: there all of this runs.
    for name in [name for name in globals() if name.startswith("test_")]:
        del globals()[name]

    def test_role_partitions_as_root_of_a_user_namespace() -> None:
        done = run_as_root("-m", "pytest", __file__, "-n", "0", "-q")
        assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-1000:]
