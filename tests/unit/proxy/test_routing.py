from __future__ import annotations

import tracemalloc

from triptych.proxy.routing import EncoderLoad, PDLoad, PrefixAffinity, choose_encoder, choose_pd, rendezvous


def test_the_encoder_with_least_outstanding_work_is_chosen() -> None:
    loads = [EncoderLoad("a", 9.0), EncoderLoad("b", 1.0), EncoderLoad("c", 5.0)]
    assert choose_encoder(loads, "k", 1.0) == "b"


def test_among_equal_encoders_the_key_decides() -> None:
    loads = [EncoderLoad("a", 0.0), EncoderLoad("b", 0.0)]
    chosen = {key: choose_encoder(loads, key, 1.0) for key in map(str, range(200))}
    assert all(chosen[key] == choose_encoder(reversed(loads), key, 1.0) for key in chosen)
    assert 60 < sum(address == "a" for address in chosen.values()) < 140


def test_a_keys_encoder_changes_only_when_that_encoder_goes() -> None:
    three = [EncoderLoad(name, 0.0) for name in "abc"]
    for key in map(str, range(100)):
        before = choose_encoder(three, key, 1.0)
        after = choose_encoder(three[:2], key, 1.0)
        assert before in (after, "c")


def test_text_goes_to_the_least_busy_pd_worker() -> None:
    loads = [PDLoad("a", 5, 64), PDLoad("b", 2, 64)]
    assert choose_pd(loads, ["x"], PrefixAffinity()) == "b"


def test_a_longer_known_prefix_wins_while_the_load_allows_it() -> None:
    affinity = PrefixAffinity()
    affinity.record(["one"], "a")
    affinity.record(["one", "two"], "b")
    affinity.record(["one"], "a")
    assert choose_pd([PDLoad("a", 0, 64), PDLoad("b", 3, 64)], ["one", "two"], affinity) == "b"
    assert choose_pd([PDLoad("a", 0, 64), PDLoad("b", 40, 64)], ["one", "two"], affinity) == "a"
    assert choose_pd([PDLoad("a", 3, 64)], ["one", "two"], affinity) == "a"


def test_affinity_follows_the_worker_that_has_taken_the_request() -> None:
    affinity = PrefixAffinity()
    affinity.record(["one"], "a")
    affinity.record(["one"], "b")
    assert affinity.owner(["one"], ["a", "b"]) == "b"
    assert affinity.owner(["one"], ["a"]) is None


def test_affinity_forgets_a_prefix_whose_slot_another_one_takes() -> None:
    affinity = PrefixAffinity(slots=1)
    affinity.record(["x"], "a")
    affinity.record(["y"], "b")
    assert affinity.owner(["x"], ["a", "b"]) is None
    assert affinity.owner(["y"], ["a", "b"]) == "b"


def test_affinity_takes_no_memory_for_new_prefixes() -> None:
    affinity = PrefixAffinity()
    tracemalloc.start()
    for number in range(50_000):
        affinity.record([str(number)], "a")
    grown, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert grown < 4096


def test_rendezvous_is_the_same_in_every_process() -> None:
    assert rendezvous("k", "a") == 4338435921006465380


def test_the_longest_known_prefix_stands_for_all_before_it() -> None:
    affinity = PrefixAffinity()
    affinity.record(["one", "two", "three"], "a")
    affinity.record(["one", "two"], "b")  # another conversation that begins alike
    assert affinity.depth(["one", "two", "three", "four"], "a") == 3
    assert affinity.depth(["one", "two", "three", "four"], "b") == 2
    assert affinity.depth(["one", "two", "three", "four"], "c") == 0
    assert affinity.depth([], "a") == 0
