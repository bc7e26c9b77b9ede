"""The park table: when a request may be scheduled, when it fails, and which host copies stay."""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest

from triptych.base.types import ItemPlan
from triptych.integrations.vllm.host_copies import HostCopy
from triptych.integrations.vllm.park_table import LoadOutcome, LoadReport, NeededItem, ParkLimits, ParkTable

WAIT, MEDIA_WAIT, SETTLE = 30.0, 1.0, 3
#: Two items of 4 rows and one of 2: a row has 8 bytes.
MEMORY = 80


def key(name: str) -> str:
    return name.encode().hex().ljust(64, "0")


def copy_of(name: str, rows: int = 4, grid: tuple[int, ...] = ()) -> HostCopy:
    plan = ItemPlan(key(name), "n" * 64, "image", rows, 2, "float32", rows, grid_thw=grid)
    return HostCopy(plan, memoryview(bytearray(plan.nbytes)))


def item(name: str, rows: int = 4, *, media: bool = False, grid: tuple[int, ...] = ()) -> NeededItem:
    return NeededItem(key(name), rows, media, grid)


@dataclass
class FakeLoads:
    """Loads that end when the test says so."""

    started: list[str] = field(default_factory=list)
    dropped: list[str] = field(default_factory=list)
    waiting: list[LoadReport] = field(default_factory=list)

    def start(self, identifier: str) -> None:
        self.started.append(identifier)

    def reports(self) -> list[LoadReport]:
        reports, self.waiting = self.waiting, []
        return reports

    def drop(self, copy: HostCopy) -> None:
        self.dropped.append(copy.plan.mm_hash)

    def copied(self, name: str, rows: int = 4, grid: tuple[int, ...] = ()) -> None:
        self.waiting.append(LoadReport(key(name), LoadOutcome.COPIED, copy_of(name, rows, grid)))

    def absent(self, name: str) -> None:
        self.waiting.append(LoadReport(key(name), LoadOutcome.ABSENT, reason="absent"))

    def no_room(self, name: str, missing: int, nbytes: int = 32) -> None:
        report = LoadReport(key(name), LoadOutcome.NO_SPACE, None, "full", missing, nbytes)
        self.waiting.append(report)


class Bench:
    """A table with its loads and a clock that the test moves."""

    def __init__(self) -> None:
        self.now = 100.0
        self.loads = FakeLoads()
        self.table = ParkTable(self.loads, ParkLimits(WAIT, MEDIA_WAIT, SETTLE, MEMORY), lambda: self.now)

    def ensure(self, request: str, *items: NeededItem) -> bool:
        return self.table.ensure(request, items)

    def ready(self, request: str, name: str) -> None:
        """The request has its item's copy and may be scheduled."""
        assert not self.ensure(request, item(name))
        self.loads.copied(name)
        assert self.ensure(request, item(name))

    def computed(self, name: str) -> None:
        """vLLM has the item in its encoder cache, and there is no copy and no value any more."""
        self.table.engine_cache.allocated(key(name), item(name).size)
        self.table.end_step()

    def steps(self, count: int) -> None:
        for _ in range(count):
            self.table.end_step()


@pytest.fixture
def bench() -> Bench:
    return Bench()


def test_a_request_is_parked_until_its_item_is_copied(bench):
    assert not bench.ensure("r", item("a"))
    assert not bench.ensure("r", item("a"))
    assert bench.loads.started == [key("a")]
    bench.loads.copied("a")
    assert bench.ensure("r", item("a"))
    assert bench.table.has_copy(key("a"))
    assert bench.table.take_unavailable() == set()


def test_all_items_of_a_request_are_loaded_together(bench):
    assert not bench.ensure("r", item("a"), item("b"))
    assert bench.loads.started == [key("a"), key("b")]
    bench.loads.copied("a")
    assert not bench.ensure("r", item("a"), item("b"))
    bench.loads.copied("b")
    assert bench.ensure("r", item("a"), item("b"))


def test_two_requests_on_one_item_share_a_load(bench):
    assert not bench.ensure("r", item("a"))
    assert not bench.ensure("s", item("a"))
    assert bench.loads.started == [key("a")]
    bench.loads.copied("a")
    assert bench.ensure("r", item("a"))
    assert bench.ensure("s", item("a"))


def test_a_result_changes_nothing_before_the_next_ensure(bench):
    assert not bench.ensure("r", item("a"))
    bench.loads.copied("a")
    assert not bench.table.has_copy(key("a"))


def test_an_absent_item_is_loaded_again_after_a_pause_that_grows(bench):
    pauses = []
    for _ in range(8):
        assert not bench.ensure("r", item("a"))
        bench.loads.absent("a")
        count, began = len(bench.loads.started), bench.now
        while len(bench.loads.started) == count:
            assert not bench.ensure("r", item("a"))
            bench.now += 0.001
        pauses.append(bench.now - began)
    assert pauses[0] < pauses[1] < pauses[2]
    assert pauses[-1] == pytest.approx(0.25, abs=0.01)


def test_a_request_whose_item_never_comes_is_named_once_at_its_deadline(bench):
    assert not bench.ensure("r", item("a"))
    bench.now += WAIT - 0.1
    assert not bench.ensure("r", item("a"))
    assert bench.table.take_unavailable() == set()
    bench.now += 0.2
    assert not bench.ensure("r", item("a"))
    assert bench.table.take_unavailable() == {"r"}
    assert not bench.ensure("r", item("a"))
    assert bench.table.take_unavailable() == set()


def test_the_deadline_counts_from_the_start_of_each_wait(bench):
    bench.ready("r", "a")
    bench.now += WAIT
    assert not bench.ensure("r", item("b"))
    bench.now += WAIT / 2
    assert not bench.ensure("r", item("b"))
    assert bench.table.take_unavailable() == set()


def test_media_in_the_request_are_encoded_by_the_engine_when_the_store_has_no_value(bench):
    assert not bench.ensure("r", item("a", media=True))
    bench.loads.absent("a")
    assert bench.ensure("r", item("a", media=True))
    assert not bench.table.has_copy(key("a"))


def test_media_in_the_request_do_not_wait_long_for_a_store_that_is_silent(bench):
    assert not bench.ensure("r", item("a", media=True))
    bench.now += MEDIA_WAIT
    assert bench.ensure("r", item("a", media=True))


def test_a_request_with_media_and_without_waits_for_what_the_engine_cannot_encode(bench):
    items = (item("a", media=True), item("b"))
    assert not bench.ensure("r", *items)
    bench.loads.absent("a")
    assert not bench.ensure("r", *items)
    bench.loads.copied("b")
    assert bench.ensure("r", *items)


def test_a_copy_that_comes_late_is_taken_by_a_request_that_would_encode(bench):
    assert not bench.ensure("r", item("a", media=True))
    bench.now += MEDIA_WAIT
    assert bench.ensure("r", item("a", media=True))
    bench.loads.copied("a")
    assert bench.ensure("r", item("a", media=True))
    assert bench.table.has_copy(key("a"))


def test_an_identifier_that_is_no_mm_hash_is_never_looked_for(bench):
    plain = NeededItem("holiday.png", 4, has_media=False)
    assert not bench.ensure("r", plain)
    assert bench.table.take_unavailable() == {"r"}
    assert bench.ensure("s", NeededItem("holiday.png", 4, has_media=True))
    assert not bench.ensure("t", NeededItem("lora:" + key("a"), 4, has_media=False))
    assert bench.loads.started == []


@pytest.mark.parametrize("rows,grid", [(5, ()), (4, (1, 2, 8))])
def test_a_value_of_another_size_fails_a_request_without_media(bench, rows, grid):
    assert not bench.ensure("r", item("a", rows, grid=grid))
    bench.loads.copied("a", 4, grid=(1, 4, 4))
    assert not bench.ensure("r", item("a", rows, grid=grid))
    assert bench.table.take_unavailable() == {"r"}


def test_a_value_of_another_size_goes_and_media_are_encoded_by_the_engine(bench):
    assert not bench.ensure("r", item("a", 5, media=True))
    bench.loads.copied("a", 4)
    assert bench.ensure("r", item("a", 5, media=True))
    assert not bench.table.has_copy(key("a"))
    assert bench.loads.dropped == [key("a")]


def test_one_identifier_for_items_of_two_sizes_fails_the_request(bench):
    assert not bench.ensure("r", item("a", 4), item("a", 5, media=True))
    assert bench.table.take_unavailable() == {"r"}
    assert bench.loads.dropped == []


def test_an_item_that_stands_twice_in_a_prompt_is_loaded_once(bench):
    assert not bench.ensure("r", item("a"), item("a"))
    bench.loads.copied("a")
    assert bench.ensure("r", item("a"), item("a"))
    assert bench.loads.started == [key("a")]


def test_the_copies_of_scheduled_items_go_with_their_step_and_no_other(bench):
    bench.ready("r", "a")
    bench.table.use(key("a"))
    bench.table.use(key("unknown"))
    assert [copy.plan.mm_hash for copy in bench.table.end_step()] == [key("a")]
    assert bench.table.end_step() == []


def test_a_copy_stays_after_its_request_for_the_next_one(bench):
    bench.ready("r", "a")
    bench.table.finished("r")
    assert bench.ensure("s", item("a"))
    assert bench.loads.started == [key("a")]


def test_room_is_made_by_the_longest_unused_copies_that_no_request_holds(bench):
    for name in "abc":
        bench.ready(name, name)
    bench.table.finished("b")
    bench.table.finished("a")
    assert not bench.ensure("r", item("d"))
    bench.loads.no_room("d", 32)
    assert not bench.ensure("r", item("d"))
    assert bench.loads.dropped == [key("b")]
    bench.now += 0.02
    assert not bench.ensure("r", item("d"))
    assert bench.loads.started[-1] == key("d")


def test_a_copy_is_not_freed_before_the_steps_that_read_it_are_over(bench):
    bench.ready("r", "a")
    bench.table.use(key("a"))
    bench.table.finished("r")
    for step in range(SETTLE + 1):
        bench.loads.no_room("d", 32)
        assert not bench.ensure("s", item("d"))
        assert (bench.loads.dropped == [key("a")]) is (step >= SETTLE)
        bench.table.end_step()


def test_the_older_of_two_parked_requests_takes_the_copies_of_the_younger(bench):
    assert not bench.ensure("old", item("a"), item("b"))
    assert not bench.ensure("young", item("c"), item("d"))
    bench.loads.copied("a")
    bench.loads.copied("c")
    bench.loads.no_room("d", 32)
    assert not bench.ensure("young", item("c"), item("d"))
    assert bench.loads.dropped == []
    bench.loads.no_room("b", 32)
    assert not bench.ensure("old", item("a"), item("b"))
    assert bench.loads.dropped == [key("c")]


def test_a_copy_that_a_running_request_needs_is_never_taken(bench):
    assert not bench.ensure("old", item("a"))
    bench.ready("running", "c")
    bench.loads.no_room("a", 32)
    assert not bench.ensure("old", item("a"))
    assert bench.loads.dropped == []


def test_a_request_that_has_computed_its_items_holds_no_copies(bench):
    bench.ready("r", "a")
    assert bench.ensure("r")
    bench.loads.no_room("d", 32)
    assert not bench.ensure("s", item("d"))
    bench.loads.no_room("d", 32)
    assert not bench.ensure("s", item("d"))
    assert bench.loads.dropped == [key("a")]


def test_a_finished_request_leaves_nothing_behind(bench):
    assert not bench.ensure("r", item("a"))
    bench.loads.absent("a")
    assert not bench.ensure("r", item("a"))
    bench.now += WAIT
    assert not bench.ensure("r", item("a"))
    bench.table.finished("r")
    bench.table.finished("r")
    assert bench.table.take_unavailable() == set()
    assert not bench.ensure("r", item("a"))
    assert len(bench.loads.started) == 2


def test_a_request_whose_items_exceed_host_memory_together_is_refused_at_once(bench, caplog):
    items = (item("a"), item("b"), item("c"))
    assert not bench.ensure("r", *items)
    bench.loads.copied("a")
    bench.loads.no_room("c", 16)
    assert not bench.ensure("r", *items)
    assert bench.table.take_unavailable() == set(), "another request may hold what is missing"
    bench.loads.copied("b")
    assert not bench.ensure("r", *items)
    assert bench.table.take_unavailable() == {"r"}
    assert "items together need more" in caplog.text and key("c")[:8] in caplog.text


def test_an_item_that_exceeds_host_memory_is_refused_at_once_or_encoded_from_its_media(bench):
    bench.ready("before", "b")
    bench.table.finished("before")
    for request, media in (("r", False), ("s", True)):
        large = item("a", 11, media=media)
        assert not bench.ensure(request, large)
        bench.loads.no_room("a", 8, 88)
        assert bench.ensure(request, large) is media
        bench.table.finished(request)
        assert bench.table.take_unavailable() == set()
    assert bench.loads.dropped == [], "nothing was given up for what does not fit"


def test_an_item_in_the_engines_cache_needs_no_load(bench):
    bench.computed("a")
    assert bench.ensure("r", item("a"))
    assert bench.loads.started == []
    # Those behind it are loaded.
    assert not bench.ensure("s", item("a"), item("b"))
    assert bench.loads.started == [key("b")]
    bench.loads.copied("b")
    assert bench.ensure("s", item("a"), item("b"))


def test_an_item_that_has_left_the_engines_cache_is_loaded(bench):
    bench.computed("a")
    bench.table.end_step([key("a")])
    assert not bench.ensure("r", item("a"))
    assert bench.loads.started == [key("a")]


def test_the_engines_cache_is_not_relied_on_where_a_place_for_another_item_may_empty_it(bench):
    bench.ready("old", "b")
    bench.computed("a")
    # In this request, by an item before it; in this step, by a request before it.
    assert not bench.ensure("r", item("b"), item("a"))
    assert bench.ensure("old", item("b"))
    assert not bench.ensure("s", item("a"))
    bench.table.end_step()
    assert bench.ensure("s", item("a"))
