"""Simulations whose answer is known without one."""

from __future__ import annotations

from dataclasses import replace

import pytest

from support.simulated import COSTS, LIMITS, MODEL, RPC, run
from triptych.base.config import EncoderConfig
from triptych.goodput.load.workload import Picture, PlannedRequest
from triptych.simulator.cluster.requests import JPEG_BYTES
from triptych.simulator.cluster.shape import colocated, on_devices
from triptych.simulator.costs.costs import chunk_context

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
    counters = run(on_devices(2, 2), requests, [0.0] * 5).counters
    assert counters.tower_items == 1 and counters.items == {"encoded": 1, "joined": 4}
