"""For whom a PD worker is kept."""

from __future__ import annotations

import random

from triptych.pd_worker.server import ARRIVAL_SECONDS, Isolation

ME, OTHER = ("p1", "r1"), ("p1", "r2")


def claimed(tokens: int = 4) -> Isolation:
    isolation = Isolation()
    assert isolation.claim(ME, tokens, None, 0.0)
    return isolation


def test_a_worker_that_is_reserved_for_no_request_takes_all() -> None:
    assert Isolation().admits(OTHER, None, 0.0)


def test_until_its_request_comes_a_worker_takes_no_other_one_for_a_while() -> None:
    isolation = claimed()
    assert not isolation.admits(OTHER, None, ARRIVAL_SECONDS - 1)
    assert isolation.admits(ME, None, ARRIVAL_SECONDS - 1)
    assert claimed().admits(OTHER, None, ARRIVAL_SECONDS)


def test_a_request_has_the_worker_to_itself_until_it_has_put_out_its_tokens() -> None:
    isolation = claimed(tokens=4)
    assert isolation.admits(ME, None, 1.0)
    assert not isolation.admits(OTHER, 0, 100.0)
    assert not isolation.admits(OTHER, 3, 100.0)
    assert isolation.admits(OTHER, 4, 100.0)
    assert isolation.admits(OTHER, 0, 100.0)


def test_a_request_that_ended_before_anybody_else_came_does_not_keep_the_worker() -> None:
    isolation = claimed()
    assert isolation.admits(ME, None, 1.0)
    assert isolation.admits(OTHER, None, 1.0)


def test_a_request_that_is_cancelled_before_it_came_frees_the_worker() -> None:
    isolation = claimed()
    isolation.free(OTHER)
    assert not isolation.admits(OTHER, None, 1.0)
    isolation.free(ME)
    assert isolation.admits(OTHER, None, 1.0)


def test_another_proxy_waits_for_its_turn_and_the_same_one_takes_it_over() -> None:
    isolation = claimed()
    assert not isolation.claim(("p2", "r9"), 4, None, 1.0)
    assert not isolation.claim(("p2", "r9"), 4, 3, 1.0)
    assert isolation.claim(OTHER, 4, 3, 1.0)
    assert isolation.key == OTHER


def test_a_reservation_of_a_worker_always_ends() -> None:
    draw = random.Random(7)
    for _ in range(300):
        isolation, now, here = Isolation(), 0.0, {}
        for _ in range(draw.randint(1, 20)):
            key = (draw.choice("pq"), draw.choice("rs"))
            produced = here.get(isolation.key)
            action = draw.random()
            if action < 0.3:
                if isolation.claim(key, 4, produced, now):
                    here.clear()
            elif action < 0.6:
                kept = isolation.key
                if isolation.admits(key, produced, now):
                    assert kept in (None, key) or isolation.key is None
                    here[key] = 0
            elif action < 0.8 and here:
                here[draw.choice(sorted(here))] += 1
            elif here:
                del here[draw.choice(sorted(here))]
            now += draw.random() * 4
        here.clear()
        assert isolation.admits(("z", "z"), None, now + ARRIVAL_SECONDS)
