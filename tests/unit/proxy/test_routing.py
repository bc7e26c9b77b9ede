from __future__ import annotations

import tracemalloc

from triptych.proxy.admission import Backpressure
from triptych.proxy.routing import (
    EncoderLoad,
    LossRecord,
    PDLoad,
    PrefixAffinity,
    choose_encoder,
    choose_pd,
    rendezvous,
)


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


def test_no_encoder_no_choice() -> None:
    assert choose_encoder([], "k", 1.0) is None


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


def test_media_are_refused_while_re_encodes_exceed_a_tenth_of_the_work() -> None:
    pressure = Backpressure()
    for at in range(20):
        pressure.record(1.0, float(at), re_encode=False)
    assert not pressure.refuses_media(20.0)
    for at in range(4):
        pressure.record(1.0, 20.0 + at, re_encode=True)
    assert pressure.refuses_media(24.0)
    assert not pressure.refuses_media(60.0)


def test_a_tenth_of_the_work_is_still_allowed() -> None:
    pressure = Backpressure()
    for _ in range(90):
        pressure.record(1.0, 0.0, re_encode=False)
    for _ in range(10):
        pressure.record(1.0, 0.0, re_encode=True)
    assert not pressure.refuses_media(1.0)


def test_a_single_loss_refuses_no_request() -> None:
    pressure = Backpressure()
    pressure.record(1.0, 0.0, re_encode=True)
    assert not pressure.refuses_media(1.0)


def test_the_longest_known_prefix_stands_for_all_before_it() -> None:
    affinity = PrefixAffinity()
    affinity.record(["one", "two", "three"], "a")
    affinity.record(["one", "two"], "b")  # another conversation that begins alike
    assert affinity.depth(["one", "two", "three", "four"], "a") == 3
    assert affinity.depth(["one", "two", "three", "four"], "b") == 2
    assert affinity.depth(["one", "two", "three", "four"], "c") == 0
    assert affinity.depth([], "a") == 0


def test_two_losses_in_company_make_a_suspect_and_a_third_does_not_convict_it() -> None:
    record = LossRecord()
    assert not record.suspect
    for number in range(3):
        assert not record.add(f"w{number}", alone=False)
        assert record.suspect is (number >= 1)
    assert record.addresses == {"w1", "w2"}
    assert record.add("w3", alone=True)
    assert len(record) == 3


def test_only_a_connections_loss_is_withdrawn_when_its_process_returns() -> None:
    record = LossRecord()
    record.add("w1", "i1", alone=False, final=False)
    record.add("w2", "i2", alone=False)
    record.withdraw("i2")
    assert record.suspect
    record.withdraw("i1")
    assert not record.suspect and record.addresses == {"w2"}
