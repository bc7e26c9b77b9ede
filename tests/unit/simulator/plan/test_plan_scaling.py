"""The scaling curve and its bottlenecks, against shares computed by hand."""

from __future__ import annotations

from dataclasses import replace

import pytest

from support.simulated import COSTS, LIMITS, MODEL
from triptych.goodput.load.workload import Workload
from triptych.goodput.measure.slo import Slo
from triptych.simulator.cluster.shape import on_devices
from triptych.simulator.costs.costs import ProxyCosts
from triptych.simulator.plan.estimate import Estimate
from triptych.simulator.plan.question import PlannedDevice, Question
from triptych.simulator.plan.ratios import Served
from triptych.simulator.plan.scaling import (
    BEAT,
    BEATS,
    LOOK,
    LOOK_PROXY,
    LOOK_PROXY_WORKER,
    LOOK_WORKER,
    MESSAGE,
    SHARE,
    Traffic,
    bottlenecks,
    curve,
    proxies_needed,
    proxy_share,
    registry_share,
    store_share,
    tokens_per_message,
    traffic_of,
)

SLO = Slo((("tpot", 1000.0),))
#: A PD worker serves 10 requests per second, an encoder as many.
FOUND = Estimate(encoder=10, pd_worker=10, replica=5, step=0.01, work=0.05)
#: 2 ms of a proxy and no messages; 10 MB saved and 20 loaded at 1 GB/s.
PLAIN = Traffic(2e-3, 0.0, 100, 10e6, 20e6, 50, save_rate=1e9, load_rate=1e9)


def test_tokens_of_a_message_become_fewer_with_more_proxies() -> None:
    assert tokens_per_message(50, 1) == 50
    # Two sequences on two proxies: with both they meet half of the time, 2 / (2 x 3/4).
    assert tokens_per_message(2, 2) == pytest.approx(4 / 3)
    found = [tokens_per_message(50, proxies) for proxies in (1, 2, 8, 64, 1000)]
    assert found == sorted(found, reverse=True)
    assert 1 <= found[-1] < 1.03
    assert tokens_per_message(0.1, 10) == 1


def test_a_proxy_is_full_of_requests_messages_and_looks() -> None:
    looks = 2 * (LOOK_PROXY + 10 * LOOK_PROXY_WORKER)
    assert proxy_share(PLAIN, 100, 10, 1) == pytest.approx(100 * 2e-3 + looks)
    assert proxy_share(PLAIN, 100, 10, 2) == pytest.approx(50 * 2e-3 + looks)
    # 100 tokens, 50 in a message: two messages a request.
    talking = replace(PLAIN, message=1e-4)
    assert proxy_share(talking, 100, 10, 1) == pytest.approx(100 * (2e-3 + 2e-4) + looks)


def test_proxies_are_the_fewest_within_their_share() -> None:
    for rate in (1, 300, 351, 10_000):
        for traffic in (PLAIN, replace(PLAIN, message=1e-4)):
            count = proxies_needed(traffic, rate, 20)
            assert proxy_share(traffic, rate, 20, count) <= SHARE
            assert count == 1 or proxy_share(traffic, rate, 20, count - 1) > SHARE
    # Looking at so many workers takes all of it, however many proxies there are.
    assert proxies_needed(PLAIN, 1, 60_000) == 0


def test_a_store_is_full_of_saves_and_loads() -> None:
    assert store_share(PLAIN, 20) == pytest.approx(0.6)
    assert store_share(replace(PLAIN, saved=0.0, load_rate=2e9), 20) == pytest.approx(0.2)


def test_a_registry_is_full_of_heartbeats_and_looks() -> None:
    assert registry_share(1, 0) == pytest.approx(BEATS * BEAT)
    looks = 2 * (LOOK + 1000 * LOOK_WORKER)
    assert registry_share(1000, 10) == pytest.approx(1000 * BEATS * BEAT + 10 * looks)


def test_bottlenecks_come_in_the_order_in_which_they_are_met() -> None:
    # N workers serve 5 N: the store is full at 0.7 / 0.03 = 23.3/s, a proxy at 350/s but for its looks.
    found = bottlenecks(FOUND, 1.0, PLAIN)
    assert [one.part for one in found] == ["store", "proxy", "registry"]
    assert found[0].workers == 6 and found[0].rate == 30
    assert found[1].workers is not None and 69 <= found[1].workers <= 70
    assert found[2].workers is None or found[2].workers > 400


def test_texts_never_fill_the_store() -> None:
    texts = replace(PLAIN, saved=0.0, loaded=0.0)
    by_part = {one.part: one for one in bottlenecks(FOUND, 1.0, texts, 300)}
    assert by_part["store"].workers is None
    assert by_part["proxy"].workers is not None


def test_the_curve_goes_to_a_thousand_workers_and_never_down() -> None:
    points = curve(FOUND, 0.8, PLAIN)
    assert points[-1].workers == 1000 and points[-1].rate == pytest.approx(0.8 * 5000)
    assert points[-1].shape == "500E500PD"
    for name in ("rate", "proxies", "one_proxy", "store_bytes_per_second"):
        values = [getattr(point, name) for point in points]
        assert values == sorted(values)
    assert points[0].store_bytes_per_second == pytest.approx(points[0].rate * 30e6)


def traffic(token: float) -> Traffic:
    """Of two pictures and 100 tokens out; a proxy takes 5 ms for a request, its tokens at `token` each."""
    load = Workload(50, 100, ((2, 1.0),), ((320, 320, 1.0),), 0.5)
    costs = replace(COSTS, proxy=ProxyCosts(5e-3 - 100 * token, 0.0, token))
    asked = Question(load, "", SLO, PlannedDevice("", costs, MODEL, LIMITS))
    served = Served(on_devices(1, 1), 10.0, (4.0,))
    return traffic_of(asked, replace(FOUND, step=0.1, work=0.05), served)


def test_a_message_is_taken_out_of_what_a_token_was_measured_at() -> None:
    found = traffic(16e-6)
    assert found.proxy_seconds == pytest.approx(5e-3 - 100 * MESSAGE / 8)
    # 400 patches are 100 rows of 1024 bytes.
    assert (found.saved, found.loaded) == (102400, 204800)
    # As measured, eight tokens in a message, it is what it was.
    assert found.proxy_seconds + 100 / 8 * found.message == pytest.approx(5e-3)
    # A proxy that is faster than that machine's spends no more on messages than on tokens.
    assert traffic(1e-6).message == pytest.approx(8e-6)
    # 4 requests a second of 100 steps; a step of 0.1 s in an idle worker lasts 0.1 / (1 - 4 x 0.05) there.
    assert found.sequences == pytest.approx(4 * 100 * 0.1 / 0.8)
