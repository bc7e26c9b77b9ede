"""Simulations whose answer is known without one, and what holds for every one."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace

import pytest

from support.simulated import COSTS, LIMITS, MIX, MODEL, PICTURE, RPC, TEXT, run
from triptych.base.config import EncoderConfig, ProxyConfig
from triptych.base.errors import ConfigError
from triptych_bench.goodput.load.workload import Picture, PlannedRequest, Workload, plan_requests
from triptych_bench.simulator.cluster.context import Simulation
from triptych_bench.simulator.cluster.requests import JPEG_BYTES
from triptych_bench.simulator.cluster.shape import ClusterShape, colocated, on_devices
from triptych_bench.simulator.costs.costs import chunk_context
from triptych_bench.simulator.run import simulate

PIXELS = 320 * 320
PATCHES, ROWS = 400, 100
MEDIA = round(JPEG_BYTES["noise"] * PIXELS)
#: Tokens before a picture.


def picture_request(seed: int, output_tokens: int = 1) -> PlannedRequest:
    return PlannedRequest(seed, 50, output_tokens, (Picture(seed, 320, 320),))


def prefill(tokens: int, start: int = 0) -> float:
    return COSTS.pd.step_seconds(tokens, 0, 0, chunk_context(start, tokens))


def test_a_lone_picture_takes_the_sum_of_its_stages() -> None:
    [record] = run(on_devices(1, 1), [picture_request(1)], [0.0]).records
    nbytes = ROWS * MODEL.row_bytes
    prompt = 50 + ROWS + MODEL.prompt_overhead_tokens + MODEL.item_overhead_tokens
    stages = (
        COSTS.proxy.request + COSTS.proxy.item + COSTS.proxy.media_byte * MEDIA,
        COSTS.encoder.prepare(PIXELS),
        COSTS.encoder.tower(1, PATCHES),
        COSTS.encoder.save(nbytes),
        COSTS.pd.load(nbytes),
        # The few tokens before the embedding get no step of their own while it moves.
        prefill(prompt),
        COSTS.proxy.token,
    )
    # To the store and back: the proxy's look-up and its epoch, the encoder's two, its lease. To the encoder:
    # the job, the permission; back: planned, ready. To the PD worker: the notice; back: the token. That it
    # takes the request is beside the tower: alone an item does not wait for its admission.
    messages = 5 * 2 + 4 + 2
    assert record.ttft == pytest.approx(sum(stages) + messages * RPC)
    assert record.caches == ("encoded",)
    assert record.stages["encode"] == pytest.approx(stages[2])
    assert record.stages["save"] == pytest.approx(stages[3])


@pytest.mark.slow
def test_waiting_for_the_tower_is_that_of_a_queue_with_equal_service_times() -> None:
    """M/D/1: the mean wait is ρ·S / 2(1 − ρ)."""
    service, load = 0.05, 0.6
    encoder = replace(
        COSTS.encoder,
        prepare_item=0.0,
        prepare_pixel=0.0,
        tower_batch=service,
        tower_item=0.0,
        tower_patch=0.0,
    )
    quick = replace(COSTS.pd, step=1e-6, prefill_token=1e-9, prefill_context=0.0, take_request=0.0)
    costs = replace(
        COSTS, encoder=encoder, pd=quick, proxy=replace(COSTS.proxy, request=0.0, media_byte=0.0, item=0.0)
    )
    one_by_one = replace(
        LIMITS, encoder=EncoderConfig(encoder_batch_patches=1, plan_credit=1000, tower_credit=1000)
    )
    requests = [picture_request(seed) for seed in range(1200)]
    costs = replace(costs, rpc=1e-6)
    records = run(on_devices(1, 1), requests, limits=one_by_one, costs=costs, rate=load / service).records
    ttfts = [record.ttft for record in records]
    wait = sum(ttfts) / len(ttfts) - min(ttfts)
    assert wait == pytest.approx(load * service / (2 * (1 - load)), rel=0.15)


def test_text_never_waits_for_a_tower_of_its_own_cluster_but_does_where_both_share_a_device() -> None:
    slow = replace(COSTS, encoder=replace(COSTS.encoder, tower_batch=2.0))
    requests = [picture_request(1), PlannedRequest(2, 100, 20)]
    times = [0.0, 1.0]
    apart, together = (
        run(shape, requests, times, costs=slow).records[1] for shape in (on_devices(1, 1), colocated(1))
    )
    [alone] = run(on_devices(1, 1), requests[1:], [0.0]).records
    assert apart.ttft == pytest.approx(alone.ttft)
    assert together.ttft > alone.ttft + 0.9


def test_requests_for_one_picture_at_once_share_its_job() -> None:
    requests = [replace(picture_request(1), seed=seed) for seed in range(5)]
    found = run(on_devices(2, 2), requests, [0.0] * 5)
    caches = sorted(cache for record in found.records for cache in record.caches)
    assert found.counters.tower_items == 1 and caches == ["encoded", *["joined"] * 4]


SHAPES = (on_devices(1, 1), on_devices(2, 3), colocated(1), colocated(2))


def nothing_left(found: Simulation) -> bool:
    return not any(found.leftovers.values())


@pytest.mark.parametrize("shape", SHAPES, ids=lambda shape: shape.name)
def test_every_request_ends_as_asked_and_nothing_is_held_after_it(shape: ClusterShape) -> None:
    found = run(shape, MIX, rate=6, count=60)
    assert all(record.ok and record.output_tokens == record.asked_tokens for record in found.records)
    assert nothing_left(found), found.leftovers
    assert all(
        0 <= share <= 1 + 1e-9 for name, share in found.counters.utilisation.items() if name != "proxy"
    )


def test_equal_arguments_give_equal_results_and_another_seed_others() -> None:
    first, second = (run(on_devices(2, 2), MIX, rate=20, seed=3) for _ in range(2))
    assert first == second
    assert run(on_devices(2, 2), MIX, rate=20, seed=4).records != first.records


def test_beyond_the_queue_requests_are_answered_with_429() -> None:
    limits = replace(LIMITS, proxy=ProxyConfig(max_queue=8))
    found = run(on_devices(1, 1), TEXT, rate=500, count=80, limits=limits)
    refused = [record for record in found.records if not record.ok]
    assert len(refused) > 20
    assert all(record.error.startswith("HTTP 429") for record in refused)
    assert nothing_left(found)


def test_embeddings_that_the_store_loses_are_encoded_again() -> None:
    """A store of three pictures, and PD workers with room for more."""
    limits = replace(LIMITS, store_memory=3 * 100 * MODEL.row_bytes, proxy=ProxyConfig(flow_control=False))
    slow = replace(COSTS, pd=replace(COSTS.pd, load_item=0.05))
    load = Workload(20, 8, ((3, 1.0),), ((320, 320, 1.0),))
    found = run(on_devices(2, 1), load, rate=30, count=40, limits=limits, costs=slow)
    assert found.counters.re_encodes > 0
    assert all(record.ok or record.error.startswith("HTTP ") for record in found.records)
    assert nothing_left(found), found.leftovers


@pytest.mark.parametrize(
    ("times", "shape", "words"),
    [([0.0], on_devices(1, 1), "2 requests have 1 times"), ([0.0, 1.0], on_devices(0, 1), "has no encoder")],
)
def test_what_cannot_be_simulated_is_named(times: list[float], shape: ClusterShape, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        simulate(plan_requests(PICTURE, 2, 0), times, shape, COSTS, MODEL)


def test_the_simulator_needs_no_torch() -> None:
    code = "import sys, triptych_bench.simulator.run; assert not {'torch', 'transformers'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=30)
