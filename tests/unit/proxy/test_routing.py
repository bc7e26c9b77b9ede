"""Where requests and items go, and which requests may have ended their workers."""

from __future__ import annotations

import random
import tracemalloc
from dataclasses import dataclass, field

import pytest

from triptych.proxy.routing import (
    CLEARING_TOKENS,
    FULL,
    MAX_LOSSES,
    EncoderLoad,
    PDLoad,
    PrefixAffinity,
    Suspects,
    choose_encoder,
    choose_pd,
    of_role,
    rendezvous,
    role_for,
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


MODEL = "m"


def load(address: str, in_flight: int = 0) -> PDLoad:
    return PDLoad(address, in_flight, 64)


def suspects_of(*requests: str, at: tuple[str, str] = ("w1", "w2")) -> Suspects[str]:
    made: Suspects[str] = Suspects()
    for number, address in enumerate(at):
        made.lost(address, f"i{number}", requests, final=True)
    return made


def tried(suspects: Suspects[str], request: str, *addresses: str, tokens: int = 0) -> str:
    """The worker that the request now has to itself."""
    address = suspects.place(request, MODEL, [load(each) for each in addresses])
    assert address is not None
    suspects.alone(request, tokens)
    return address


def test_a_request_present_at_two_losses_is_a_suspect_and_one_present_at_one_is_not() -> None:
    suspects: Suspects[str] = Suspects()
    assert suspects.lost("w1", "i1", ["a", "b"], final=True) == []
    assert not suspects.suspect("a")
    assert suspects.lost("w2", "i2", ["a", "c"], final=True) == []
    assert [suspects.suspect(each) for each in "abc"] == [True, False, False]


def test_the_third_loss_counts_only_for_a_request_that_was_alone() -> None:
    suspects = suspects_of("a", "b")
    for number in range(5):
        assert suspects.lost("w1", f"again {number}", ["a", "b"], final=True) == []
    tried(suspects, "a", "w1")
    assert suspects.lost("w1", "i9", ["a"], final=True) == ["a"]
    assert not suspects.suspect("a")
    assert suspects.suspect("b")
    assert suspects.apart == frozenset()


def test_a_worker_lost_before_it_was_empty_makes_no_suspect() -> None:
    suspects = suspects_of("a")
    assert suspects.place("a", MODEL, [load("w1")]) == "w1"
    assert suspects.lost("w1", "i9", ["a"], final=True) == []
    assert suspects.suspect("a")


def test_the_loss_of_a_worker_other_than_its_own_is_not_its_fault() -> None:
    suspects = suspects_of("a")
    tried(suspects, "a", "w3")
    assert suspects.lost("w4", "i9", ["a"], final=True) == []
    assert suspects.suspect("a")


def test_suspects_of_one_model_take_turns_and_those_of_another_need_not_wait() -> None:
    suspects = suspects_of("a", "b", "other")
    tried(suspects, "a", "w1", "w2")
    assert suspects.place("b", MODEL, [load("w1"), load("w2")]) is None
    assert suspects.place("other", "another model", [load("w9")]) == "w9"
    assert suspects.apart == {"w1", "w9"}


def test_a_suspect_is_cleared_after_some_tokens_of_its_own_and_the_next_one_may_go() -> None:
    suspects = suspects_of("a", "b")
    tried(suspects, "a", "w1", tokens=20)
    assert not suspects.progress("a", 20 + CLEARING_TOKENS - 1)
    assert suspects.progress("a", 20 + CLEARING_TOKENS)
    assert not suspects.suspect("a")
    assert suspects.apart == frozenset()
    assert suspects.place("b", MODEL, [load("w1")]) == "w1"


def test_a_cleared_request_begins_to_count_again() -> None:
    suspects = suspects_of("a")
    tried(suspects, "a", "w1")
    assert suspects.progress("a", CLEARING_TOKENS)
    suspects.lost("w1", "i8", ["a"], final=True)
    assert not suspects.suspect("a")
    suspects.lost("w1", "i9", ["a"], final=True)
    assert suspects.suspect("a")


@pytest.mark.parametrize("end", ["forget", "retreat"])
def test_a_suspect_that_ends_or_comes_back_gives_its_worker_back(end: str) -> None:
    suspects = suspects_of("a", "b")
    tried(suspects, "a", "w1")
    assert getattr(suspects, end)("a") is True
    assert suspects.suspect("a") is (end == "retreat")
    assert suspects.place("b", MODEL, [load("w1")]) == "w1"


def test_a_suspect_goes_where_it_has_lost_no_worker_then_where_the_last_one_was_then_to_the_least_busy():
    suspects = suspects_of("a", "b", at=("w1", "w1"))
    assert suspects.place("a", MODEL, [load("w1"), load("w2", 9), load("w3", 5)]) == "w3"
    suspects.forget("a")
    assert suspects.place("b", MODEL, [load("w1"), load("w2"), load("w3", 5)]) == "w3"
    suspects.retreat("b")
    assert suspects.place("b", MODEL, [load("w1")]) == "w1"


def test_without_a_worker_a_suspect_waits() -> None:
    suspects = suspects_of("a")
    assert suspects.place("a", MODEL, []) is None
    assert suspects.apart == frozenset()


def test_a_lost_connection_makes_no_suspect_and_a_stalled_process_does() -> None:
    suspects: Suspects[str] = Suspects()
    suspects.lost("w1", "i1", ["a", "b"], final=False)
    suspects.lost("w1", "i1", ["b"], final=True)
    suspects.lost("w2", "i2", ["a", "b"], final=True)
    assert suspects.suspect("a")
    suspects.returned("i1")
    assert not suspects.suspect("a")
    assert suspects.suspect("b")


@dataclass
class Request:
    """`poison`: output tokens at which it ends its worker; None for a good one."""

    name: str
    poison: int | None
    wanted: int
    tokens: int = 0
    at: str | None = None
    end: str = ""


@dataclass
class World:
    """Workers that end and come back, and a router that does what `Suspects` says."""

    draw: random.Random
    count: int
    requests: list[Request]
    suspects: Suspects[str] = field(default_factory=Suspects)
    down: set[str] = field(default_factory=set)
    incarnation: int = 0

    @property
    def addresses(self) -> list[str]:
        return [f"w{index}" for index in range(self.count) if f"w{index}" not in self.down]

    def here(self, address: str) -> list[Request]:
        return [request for request in self.requests if request.at == address]

    def lose(self, address: str, *, blame: bool = True) -> None:
        """The worker ends, or hands everything over."""
        there = self.here(address)
        if blame:
            self.incarnation += 1
            names = [request.name for request in there]
            guilty = self.suspects.lost(address, f"i{self.incarnation}", names, final=True)
            for request in there:
                if request.name in guilty:
                    request.end = "500"
            self.down.add(address)
        for request in there:
            request.at = None
            self.suspects.retreat(request.name)

    def route(self) -> None:
        for request in self.requests:
            if request.end or request.at is not None:
                continue
            loads = [load(each, len(self.here(each))) for each in self.addresses]
            if self.suspects.suspect(request.name):
                address = self.suspects.place(request.name, MODEL, loads)
                if address is not None:
                    self.lose(address, blame=False)
                    self.trial(request, address)
                continue
            free = [each for each in loads if each.address not in self.suspects.apart]
            if free:
                request.at = self.draw.choice(free).address

    def trial(self, request: Request, address: str) -> None:
        assert request.name in self.suspects.on_trial
        request.at = address
        self.suspects.alone(request.name, request.tokens)

    def step(self, address: str) -> None:
        """One step of a worker, which a poison ends."""
        there = self.here(address)
        self.check()
        if any(request.poison is not None and request.tokens >= request.poison for request in there):
            self.lose(address)
            return
        for request in there:
            request.tokens += 1
            self.suspects.progress(request.name, request.tokens)
            if request.tokens >= request.wanted:
                request.end, request.at = "200", None
                self.suspects.forget(request.name)

    def check(self) -> None:
        for address in self.suspects.apart:
            assert len(self.here(address)) <= 1, "a suspect is not alone"
        running = [r for r in self.requests if r.at is not None and self.suspects.suspect(r.name)]
        assert len(running) <= 1, "two suspects run at once"
        assert all(r.at in self.suspects.apart for r in running)


def random_losses(seed: int) -> None:
    draw = random.Random(seed)
    poisons = draw.randint(0, 3)
    requests = [
        Request(f"r{index}", draw.choice([0, 1, 5, 20]) if index < poisons else None, draw.randint(1, 40))
        for index in range(draw.randint(poisons + 1, 20))
    ]
    draw.shuffle(requests)
    world = World(draw, draw.randint(1, 4), requests)
    accidents = 4
    for _ in range(20_000):
        if all(request.end for request in requests):
            break
        world.route()
        world.check()
        address = f"w{draw.randrange(world.count)}"
        event = draw.random()
        if address in world.down:
            if event < 0.5:
                world.down.discard(address)
        elif event < 0.02 and accidents and address not in world.suspects.apart:
            accidents -= 1
            world.lose(address)
        elif event < 0.04:
            world.lose(address, blame=False)
        elif event < 0.05 and world.here(address):
            gone = draw.choice(world.here(address))
            gone.end, gone.at = "499", None
            world.suspects.forget(gone.name)
        else:
            world.step(address)
    else:
        raise AssertionError(f"stuck: {[r for r in requests if not r.end]}")
    for request in requests:
        if request.poison is None:
            assert request.end in ("200", "499"), request
        elif request.poison < request.wanted:
            assert request.end in ("500", "499"), request
    assert not world.suspects.apart
    assert not any(world.suspects.suspect(request.name) for request in requests)
    assert MAX_LOSSES == 3


def test_under_random_losses_good_requests_are_answered_and_poisons_are_found() -> None:
    for seed in range(300):
        random_losses(seed)


def test_new_requests_go_to_prefill_workers_and_begun_or_short_ones_to_decode_workers():
    assert role_for(begun=False, prompt_tokens=300, threshold=256) == "prefill"
    assert role_for(begun=False, prompt_tokens=255, threshold=256) == "decode"
    assert role_for(begun=True, prompt_tokens=300, threshold=256) == "decode"
    assert role_for(begun=False, prompt_tokens=0, threshold=0) == "prefill"


def test_a_worker_without_a_role_takes_all_and_a_role_without_a_worker_falls_to_the_others():
    workers = [PDLoad(role, 0, 64, role) for role in ("prefill", "decode", "both")]
    assert [load.address for load in of_role(workers, "prefill")] == ["prefill", "both"]
    assert [load.address for load in of_role(workers, "decode")] == ["decode", "both"]
    assert of_role(workers[:1], "decode") == workers[:1]


@pytest.mark.parametrize(
    ("load", "has_place"),
    [
        (PDLoad("d", 3, 4), True),
        (PDLoad("d", 4, 4), False),
        (PDLoad("d", 0, 4, requests=3), True),
        (PDLoad("d", 0, 4, requests=4), False),
        (PDLoad("d", 0, 4, kv_usage=FULL), False),
    ],
)
def test_a_request_is_handed_to_a_worker_that_begins_it_at_once(load: PDLoad, has_place: bool):
    assert load.has_place is has_place
