"""An unmodified vLLM that our encoder worker feeds through the store."""

from __future__ import annotations

import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from PIL import Image

from support.vllm_engine.fleet import TEXT, ask, assert_as_generate, fresh, raw, stored
from triptych.store import keys

pytestmark = [pytest.mark.slow, pytest.mark.vllm, pytest.mark.timeout(900)]


@pytest.fixture(autouse=True)
def the_engine_lives_on(fleet: Any) -> Iterator[None]:
    """After every test: vLLM is healthy, and answers what our encoder worker has encoded."""
    yield
    image = fresh()
    fleet.encoder.encode(image)
    assert_as_generate(fleet, [ask(fleet, stored(fleet, image))], [[image]])
    assert fleet.vllm.is_alive()


def test_mixed_requests_are_answered_as_generate_does(fleet):
    shapes = ((64, 64), (96, 48), (48, 128), (128, 128))
    pictures = [fresh(*shapes[number % 4]) for number in range(12)]
    requests: list[list[Image.Image]] = [[]]
    for number in range(23):
        requests.append([pictures[(number * 5 + each) % 12] for each in range(number % 4 + 1)])
    fleet.encoder.encode(*pictures)
    with ThreadPoolExecutor(8) as pool:
        answers = list(
            pool.map(lambda images: ask(fleet, *(stored(fleet, each) for each in images)), requests)
        )
    assert_as_generate(fleet, answers, requests)
    outputs = {tuple(answer["token_ids"]) for answer in answers}
    assert len(outputs) > 12, "the pictures hardly decide what is generated"


def test_pictures_that_are_stored_and_others_mix_in_one_request(fleet):
    ours, theirs = fresh(), fresh(96, 48)
    fleet.encoder.encode(ours)
    known = raw(ours, fleet.encoder.key(ours))
    answers = [ask(fleet, raw(theirs), known), ask(fleet, known, raw(theirs))]
    assert_as_generate(fleet, answers, [[theirs, ours], [ours, theirs]])


def test_a_request_waits_for_an_embedding_that_comes_later(fleet):
    image = fresh()
    with ThreadPoolExecutor(1) as pool:
        asked = pool.submit(ask, fleet, stored(fleet, image))
        time.sleep(1)
        assert not asked.done()
        fleet.encoder.encode(image)
        assert_as_generate(fleet, [asked.result()], [[image]])


def test_a_request_whose_embedding_never_comes_is_an_error_and_others_go_on(fleet):
    absent, present = fresh(), fresh()
    fleet.encoder.encode(present)
    with ThreadPoolExecutor(1) as pool:
        asked = pool.submit(ask, fleet, stored(fleet, absent))
        assert_as_generate(fleet, [ask(fleet, stored(fleet, present))], [[present]])
        assert asked.result()["status"] == 500


def test_pictures_in_the_request_are_encoded_by_vllm_when_the_store_has_none(fleet):
    image = fresh()
    answers = [ask(fleet, raw(image)), ask(fleet, raw(image, fleet.encoder.key(image)))]
    assert_as_generate(fleet, answers, [[image], [image]])


def test_a_flushed_store_is_a_miss_until_the_picture_is_encoded_again(fleet):
    image = fresh()
    fleet.encoder.encode(image)
    fleet.store.call("FLUSHALL")
    with ThreadPoolExecutor(1) as pool:
        asked = pool.submit(ask, fleet, stored(fleet, image))
        fleet.encoder.encode(image)
        assert_as_generate(fleet, [asked.result()], [[image]])


def test_a_value_that_was_evicted_before_its_load_is_an_error(fleet):
    image = fresh()
    fleet.encoder.encode(image)
    fleet.store.call("DEL", keys.embedding(fleet.encoder.key(image)))
    assert ask(fleet, stored(fleet, image))["status"] == 500


@pytest.mark.parametrize("harm", ["damaged", "truncated"])
def test_a_harmed_value_is_a_miss_and_is_replaced(fleet, harm):
    image = fresh()
    fleet.encoder.encode(image)
    key = keys.embedding(fleet.encoder.key(image))
    value = bytearray(fleet.store.call("GET", key))
    if harm == "truncated":
        value = value[: len(value) // 2]
    else:
        value[-5] ^= 255
    fleet.store.call("SET", key, bytes(value), "EX", 600)
    with ThreadPoolExecutor(1) as pool:
        asked = pool.submit(ask, fleet, stored(fleet, image))
        deadline = time.monotonic() + 60
        while fleet.store.call("EXISTS", key) and time.monotonic() < deadline:
            time.sleep(0.05)
        fleet.encoder.encode(image)
        assert_as_generate(fleet, [asked.result()], [[image]])


def test_a_wrong_grid_is_an_error_and_never_reaches_the_model(fleet):
    image = fresh()
    fleet.encoder.encode(image)
    wrong = [ask(fleet, stored(fleet, image, grid)) for grid in ([1, 4, 8], [1, 4, 16], [1, 16, 16])]
    assert [answer["status"] for answer in wrong] == [500] * 3
    assert_as_generate(fleet, [ask(fleet, stored(fleet, image))], [[image]])


def test_a_uuid_that_is_no_mm_hash_is_served_by_the_picture_alone(fleet):
    image = fresh()
    assert ask(fleet, stored(fleet, image, uuid="holiday"))["status"] == 500
    assert_as_generate(fleet, [ask(fleet, raw(image, "holiday"))], [[image]])


def test_a_store_that_is_down_for_five_seconds_loses_no_request(fleet):
    mine, other = fresh(), fresh()
    fleet.store.kill()
    with ThreadPoolExecutor(3) as pool:
        text = pool.submit(ask, fleet)
        with_pixels = pool.submit(ask, fleet, raw(other))
        waiting = pool.submit(ask, fleet, stored(fleet, mine))
        time.sleep(5)
        assert not waiting.done()
        fleet.store.start()
        fleet.encoder.encode(mine)
        answers = [text.result(), with_pixels.result(), waiting.result()]
    assert_as_generate(fleet, answers, [[], [other], [mine]])


def test_a_client_that_leaves_while_its_request_waits_leaves_nothing_behind(fleet):
    import http.client
    import json

    image = fresh()
    connection = http.client.HTTPConnection("127.0.0.1", fleet.vllm.port, timeout=1)
    body = {"model": "model", "messages": [{"role": "user", "content": [stored(fleet, image), TEXT]}]}
    connection.request("POST", "/v1/chat/completions", json.dumps(body), {"Content-Type": "application/json"})
    with pytest.raises(TimeoutError):
        connection.getresponse()
    connection.close()
    deadline = time.monotonic() + 60
    while fleet.vllm.metrics().get("vllm:num_requests_waiting", 0) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert fleet.vllm.metrics()["vllm:num_requests_waiting"] == 0
