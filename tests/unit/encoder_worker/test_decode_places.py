"""Places of decodes between tenants: whose turn is next, and how many each may have."""

from __future__ import annotations

import pytest

from triptych.encoder_worker.decode_places import DecodePlace, DecodePlaces
from triptych.encoder_worker.scheduler import EncoderItem, EncoderScheduler, Errand


def filled(
    places: DecodePlaces, tenant: str, place: DecodePlace = DecodePlace.PROCESS, now: float = 0.0
) -> int:
    """Begins decodes of the tenant until it has no place more; returns their number."""
    count = 0
    while places.may_begin(tenant, place):
        places.begin((tenant, place, count), tenant, place, 0.0)
        count += 1
    return count


@pytest.mark.parametrize(
    ("threads", "shares"), [(1, [1, 1, 0]), (2, [2, 1, 1, 0]), (8, [8, 4, 2, 1, 1, 0]), (3, [3, 2, 1, 0])]
)
@pytest.mark.parametrize("place", [DecodePlace.PROCESS, DecodePlace.INDEX])
def test_one_tenant_has_all_cores_and_whoever_comes_next_finds_places(threads, shares, place):
    """Up to the capacity, which is the sum of the shares."""
    places = DecodePlaces(threads)
    assert [filled(places, f"tenant {number}", place) for number in range(len(shares))] == shares
    assert places.used(place) == places.capacity(place) == sum(shares)


def test_threads_are_one_tenants_as_far_as_they_go() -> None:
    places = DecodePlaces(4)
    assert filled(places, "alice", DecodePlace.THREAD) == 4
    assert filled(places, "bob", DecodePlace.THREAD) == 0
    assert filled(places, "bob", DecodePlace.PROCESS) == 4


def test_the_tenant_with_the_least_seconds_is_next_those_under_way_included() -> None:
    places = DecodePlaces(2)
    places.begin("long", "alice", DecodePlace.PROCESS, 0.0)
    places.begin("short", "bob", DecodePlace.PROCESS, 0.0)
    assert places.end("short", 3.0) == 3.0
    assert places.seconds("alice", 3.0) == places.seconds("bob", 3.0) == 3.0
    assert places.seconds("alice", 9.0) > places.seconds("bob", 9.0)
    assert places.end("long", 10.0) == 10.0
    assert (places.seconds("alice", 20.0), places.seconds("bob", 20.0)) == (10.0, 3.0)


def test_a_decode_is_charged_once() -> None:
    places = DecodePlaces(2)
    places.begin("one", "alice", DecodePlace.THREAD, 0.0)
    assert [places.end("one", 2.0), places.end("one", 5.0)] == [2.0, 0.0]
    assert places.seconds("alice", 5.0) == 2.0
    assert len(places) == 0


def test_time_without_decodes_saves_nothing_up() -> None:
    places = DecodePlaces(2)
    for number in range(10):
        places.begin(number, "alice", DecodePlace.THREAD, 10.0 * number)
        places.end(number, 10.0 * number + 10.0)
    assert places.seconds("alice", 100.0) == 100.0
    # Who comes now is served next, and does not have 100 s before alice is served again.
    assert places.seconds("bob", 100.0) == 90.0


def test_a_tenant_that_comes_again_has_saved_nothing_up() -> None:
    places = DecodePlaces(2)
    places.begin("first", "bob", DecodePlace.THREAD, 0.0)
    places.end("first", 1.0)
    for number in range(10):
        places.begin(number, "alice", DecodePlace.THREAD, 10.0 * number)
        places.end(number, 10.0 * number + 10.0)
    places.begin("again", "bob", DecodePlace.THREAD, 100.0)
    assert places.seconds("bob", 101.0) == 91.0


class Queue:
    """A scheduler whose items have arrived with their media, in order."""

    def __init__(self, threads: int = 1) -> None:
        self.scheduler = EncoderScheduler[EncoderItem](
            prepared_memory=100, batch_patches=10, preparations=threads, tower_credit=4
        )
        self.names: dict[EncoderItem, str] = {}

    def add(self, tenant: str, count: int = 1, *, heavy: bool = False, re_encode: bool = False) -> None:
        for _ in range(count):
            item = EncoderItem(tenant=tenant, heavy=heavy, re_encode=re_encode, looked_up=True)
            self.names[item] = f"{tenant}{sum(name[0] == tenant[0] for name in self.names.values())}"
            self.scheduler.add(item)
            self.scheduler.media_arrived(item)

    def served(self, seconds: dict[str, float], until: float) -> list[str]:
        """The order in which decodes begin at one place, each of which takes its tenant's seconds."""
        now, order = 0.0, []
        while now < until and (item := self.scheduler.next_preparation(now)) is not None:
            order.append(self.names[item])
            now += seconds[item.tenant]
            self.scheduler.decoded(item, now)
            self.scheduler.prepared(item, nbytes=1, cost=1)
        return order


def test_a_flood_of_one_tenant_is_served_in_turn_with_whoever_comes_later() -> None:
    queue = Queue()
    queue.add("a", 100)
    queue.add("b", 2)
    assert queue.served({"a": 1.0, "b": 1.0}, 5.0) == ["a0", "b0", "a1", "b1", "a2"]


def test_turns_are_by_seconds_and_not_by_files() -> None:
    queue = Queue()
    queue.add("a", 100)
    queue.add("b", 100)
    assert "".join(name[0] for name in queue.served({"a": 4.0, "b": 1.0}, 16.0)) == "abbbbabbbb"


def test_of_one_tenant_the_first_to_arrive_is_first() -> None:
    queue = Queue()
    queue.add("a", 5)
    assert queue.served({"a": 1.0}, 9.0) == ["a0", "a1", "a2", "a3", "a4"]


def test_re_encodes_of_admitted_requests_go_first() -> None:
    queue = Queue()
    queue.add("b", 1)
    queue.add("a", 2)
    queue.add("a", 1, re_encode=True)
    assert queue.served({"a": 9.0, "b": 1.0}, 30.0)[:2] == ["a2", "b0"]


def test_heavy_decodes_of_one_tenant_leave_places_and_threads_to_the_others() -> None:
    queue = Queue(threads=2)
    queue.add("a", 16, heavy=True)
    queue.add("b", 1, heavy=True)
    queue.add("c", 3)
    begun = []
    while (item := queue.scheduler.next_preparation(0.0)) is not None:
        begun.append(queue.names[item])
    assert sorted(begun) == ["a0", "a1", "b0", "c0", "c1"]


def test_of_one_tenants_items_those_that_may_run_first_are_decoded_first() -> None:
    queue = Queue(threads=1)
    queue.add("a", 4)
    items = list(queue.names)
    for item in (items[3], items[2]):
        queue.scheduler.permit(item)
    assert queue.served({"a": 1.0}, 4.0) == ["a3", "a2", "a0", "a1"]


def test_heavy_decodes_that_wait_hold_up_no_small_one_of_their_own_tenant() -> None:
    queue = Queue(threads=2)
    queue.add("a", 16, heavy=True)
    queue.add("a", 3)
    begun = []
    while (item := queue.scheduler.next_preparation(0.0)) is not None:
        begun.append(queue.names[item])
    assert begun == ["a0", "a1", "a16", "a17"]


def test_an_item_that_is_removed_keeps_its_place_until_its_thread_has_ended() -> None:
    queue = Queue(threads=1)
    queue.add("a", 3)
    first = queue.scheduler.next_preparation(0.0)
    assert first is not None
    queue.scheduler.remove(first)
    assert queue.scheduler.next_preparation(1.0) is None
    assert queue.scheduler.decoded(first, 2.0) == 2.0
    assert queue.scheduler.next_preparation(2.0) is not None


def test_what_is_removed_before_its_turn_never_begins() -> None:
    queue = Queue(threads=1)
    queue.add("a", 4096)
    first = queue.scheduler.next_preparation(0.0)
    assert first is not None
    for item in queue.names:
        queue.scheduler.remove(item)
    queue.scheduler.decoded(first, 1.0)
    assert queue.scheduler.next_preparation(1.0) is None


def test_an_item_that_turns_out_heavy_waits_for_a_process_and_frees_its_thread() -> None:
    queue = Queue(threads=1)
    queue.add("a", 2)
    first = queue.scheduler.next_preparation(0.0)
    assert first is not None
    queue.scheduler.too_heavy(first)
    queue.scheduler.decoded(first, 0.1)
    begun = [queue.scheduler.next_preparation(0.1), queue.scheduler.next_preparation(0.1)]
    assert [(item is first, item and item.place) for item in begun] == [
        (True, DecodePlace.PROCESS),
        (False, DecodePlace.THREAD),
    ]


def test_errands_go_by_tenant_and_have_places_of_their_own() -> None:
    scheduler = Queue(threads=1).scheduler
    errands = [Errand(tenant, lambda: None) for tenant in "aab"]
    for errand in errands:
        scheduler.add_errand(errand)
    assert [scheduler.next_errand(0.0) for _ in range(3)] == [errands[0], errands[2], None]
    scheduler.drop_errand(errands[1])
    scheduler.decoded(errands[0], 1.0)
    assert scheduler.next_errand(1.0) is None


def test_decoded_media_push_pixels_out_that_need_not_be_kept_and_no_others() -> None:
    queue = Queue(threads=4)
    scheduler, decoded = queue.scheduler, [0]
    scheduler.decoded_bytes = lambda: decoded[0]
    queue.add("a", 2)
    kept, loose = queue.names
    for item in (kept, loose):
        scheduler.next_preparation(0.0)
        scheduler.prepared(item, nbytes=40, cost=1)
    scheduler.permit(kept)
    decoded[0] = 50
    scheduler.shrink()
    assert (kept.has_pixels, loose.has_pixels) == (True, False)
    assert scheduler.pinned_bytes == 40
    decoded[0] = 1000
    scheduler.shrink()
    assert kept.has_pixels
