"""A second proxy beside the first, on the same store and workers."""

from __future__ import annotations

import asyncio

import pytest

from support.chaos.rest import assert_at_rest
from support.chaos.stages import closed_gate, hold, stopped
from support.data.oracle import assert_exact
from support.data.traffic import STREAM_TOKENS, ask, ask_all
from support.probing import probe
from support.processes.cluster import PATIENCE, free_port, scrape, wait_for

pytestmark = pytest.mark.timeout(300)


@pytest.fixture(scope="module")
def second(shared_cluster):
    """The second proxy's process, with its `url`."""
    port = free_port()
    process = shared_cluster.add_worker("proxy", "--port", str(port), "--grpc-port", str(free_port()))
    process.url = f"http://127.0.0.1:{port}"
    wait_for("the second proxy", lambda: probe(port, "/ready")["code"] == 200)
    yield process
    process.kill()
    process.wait(PATIENCE)


async def test_a_picture_that_two_proxies_ask_for_goes_through_the_tower_once(
    shared_cluster, second, cases, reference
):
    cluster = shared_cluster
    index = next(i for i, case in enumerate(cases) if len(case.images) == 1)
    before = cluster.total("encoder", "triptych_encoder_tower_items_total")
    with closed_gate(cluster):
        asked = [
            asyncio.create_task(ask(url, cases[index], STREAM_TOKENS, cache_salt="two proxies"))
            for url in (cluster.url, second.url)
        ]
        # Neither finds the picture in the store.
        for url in (cluster.url, second.url):
            await hold("a waiting item", lambda url=url: scrape(f"{url}/metrics")["triptych_waiting_items"])
    for answer in await asyncio.gather(*asked):
        assert_exact([reference[index]], [answer.token_ids])
    assert cluster.total("encoder", "triptych_encoder_tower_items_total") == before + 1
    await asyncio.to_thread(assert_at_rest, cluster)


async def test_what_a_killed_proxy_had_under_way_is_freed_and_the_others_streams_go_on(
    shared_cluster, second, cases, reference
):
    cluster = shared_cluster
    chosen = [index for index, case in enumerate(cases) if case.images][:16]
    some, in_flight = [cases[index] for index in chosen], "triptych_requests_in_flight"
    before = cluster.total("pd", "vllm:generation_tokens_total")
    with closed_gate(cluster):
        doomed = [asyncio.create_task(ask(second.url, case, 350, cache_salt="doomed")) for case in some]
        whole = asyncio.create_task(ask_all(cluster.url, some, STREAM_TOKENS, cache_salt="whole"))
        for url in (cluster.url, second.url):
            await hold("all requests", lambda url=url: scrape(f"{url}/metrics")[in_flight] == len(some))
    # Of both; a doomed stream alone has more.
    await hold("streams", lambda: cluster.total("pd", "vllm:generation_tokens_total") > before + 300)
    with stopped(cluster, "pd"):
        assert scrape(f"{second.url}/metrics")[in_flight]
        second.kill()
    assert_exact([reference[index] for index in chosen], [answer.token_ids for answer in await whole])
    ends = await asyncio.gather(*doomed, return_exceptions=True)
    assert any(isinstance(end, Exception) for end in ends)
    await asyncio.to_thread(assert_at_rest, cluster)
