from __future__ import annotations

import msgpack
import pytest

from triptych.base.scaling import PoolDemand, ScalingDecision, ScalingRules, SharedRules
from triptych.registry.scaling import ScalingBoard, unpack_decision, unpack_demand, unpack_rules
from triptych.store import keys
from triptych.store.embedding_store import EmbeddingStore

#: Seconds in which nothing ends while a test runs.
TERM = 600
DEMAND = PoolDemand(12.5, 7, 2.0, 0.75, 0.5)
OTHER = PoolDemand(1.0, 1, 1.0, 0.25, 0.125)
THREE = ScalingDecision(3, "flow", active=True)
FOUR = ScalingDecision(4, "backlog", active=True)
OLD, NEW = ScalingRules(1, 8, 2.0), ScalingRules(1, 4, 2.0, window=30.0)


async def test_every_proxy_reads_the_demand_of_all_live_ones(store: EmbeddingStore) -> None:
    first, second = ScalingBoard(store), ScalingBoard(store)
    assert await first.publish("p1", "encoder", DEMAND, TERM) == [DEMAND]
    both = await second.publish("p2", "encoder", OTHER, TERM)
    assert sorted(both, key=lambda demand: demand.waiting) == [OTHER, DEMAND]
    assert await first.publish("p1", "pd", DEMAND, TERM) == [DEMAND]
    assert len(await first.publish("p1", "encoder", OTHER, TERM)) == 2


async def test_the_demand_of_a_dead_proxy_counts_no_more_and_is_deleted(store: EmbeddingStore) -> None:
    board = ScalingBoard(store)
    await board.publish("dead", "encoder", DEMAND, -1)
    assert await board.publish("p1", "encoder", OTHER, TERM) == [OTHER]
    assert await store.control.execute("HKEYS", keys.demands("encoder")[0]) == [b"p1"]


async def test_a_proxy_that_leaves_takes_its_demand_with_it(store: EmbeddingStore) -> None:
    board = ScalingBoard(store)
    await board.publish("p1", "encoder", DEMAND, TERM)
    await board.withdraw("p1", "encoder")
    await board.withdraw("p1", "encoder")
    assert await board.publish("p2", "encoder", OTHER, TERM) == [OTHER]


async def test_a_decision_is_in_force_until_its_term_ends(store: EmbeddingStore) -> None:
    board = ScalingBoard(store)
    assert await board.decision("encoder") is None
    assert await board.announce("encoder", THREE, TERM)
    assert await ScalingBoard(store).decision("encoder") == THREE
    assert await board.decision("pd") is None
    assert await board.announce("encoder", FOUR, -1)
    assert await board.decision("encoder") is None


async def test_a_proxy_does_not_undo_a_decision_that_it_has_not_read(store: EmbeddingStore) -> None:
    ours, theirs = ScalingBoard(store), ScalingBoard(store)
    await ours.announce("encoder", THREE, TERM)
    await theirs.decision("encoder")
    assert await theirs.announce("encoder", FOUR, TERM)
    assert not await ours.announce("encoder", THREE, TERM)
    assert await ours.decision("encoder") == FOUR
    assert await ours.announce("encoder", THREE, TERM)


async def test_the_newest_rules_are_those_of_all_proxies(store: EmbeddingStore) -> None:
    old, new = ScalingBoard(store), ScalingBoard(store)
    first = await old.agree("encoder", OLD, None, TERM, newest=True)
    assert first.rules == OLD and first.supported
    again = await ScalingBoard(store).agree("encoder", OLD, None, TERM, newest=True)
    assert again == first, "they are the same"
    second = await new.agree("encoder", NEW, None, TERM, newest=True)
    assert second.rules == NEW and second.generation > first.generation
    assert await old.agree("encoder", OLD, None, TERM) == second
    assert await old.agree("encoder", OLD, first.generation, TERM) == second, "that generation is over"
    assert (await old.agree("pd", OLD, None, TERM, newest=True)).rules == OLD
    third = await old.agree("encoder", OLD, second.generation, TERM)
    assert third.rules == OLD and third.generation > second.generation


async def test_rules_are_supported_while_a_proxy_has_them(store: EmbeddingStore) -> None:
    old, new = ScalingBoard(store), ScalingBoard(store)
    await old.agree("encoder", OLD, None, TERM, newest=True)
    assert (await new.agree("encoder", NEW, None, -1, newest=True)).supported is False
    assert (await old.agree("encoder", OLD, None, TERM)).supported is False
    assert (await new.agree("encoder", NEW, None, TERM)).supported is True
    assert (await old.agree("encoder", OLD, None, TERM)).supported is True


async def test_a_decision_by_rules_that_have_been_replaced_is_refused(store: EmbeddingStore) -> None:
    old, new = ScalingBoard(store), ScalingBoard(store)
    await old.agree("encoder", OLD, None, TERM, newest=True)
    await new.agree("encoder", NEW, None, TERM, newest=True)
    assert not await old.announce("encoder", FOUR, TERM)
    await old.agree("encoder", OLD, None, TERM)
    assert await old.announce("encoder", FOUR, TERM)


async def test_a_flushed_store_gets_the_rules_back_from_any_proxy(store: EmbeddingStore) -> None:
    old, new = ScalingBoard(store), ScalingBoard(store)
    await old.agree("encoder", OLD, None, TERM, newest=True)
    await new.agree("encoder", NEW, None, TERM, newest=True)
    before = await old.agree("encoder", OLD, None, TERM)
    await store.control.execute("FLUSHALL")
    assert await old.agree("encoder", OLD, None, TERM) == SharedRules(NEW, before.generation, supported=False)
    assert await new.agree("encoder", NEW, None, TERM) == before
    assert await store.control.execute("PTTL", keys.RULES) == -1


async def test_rules_that_others_have_written_are_none_and_can_be_replaced(store: EmbeddingStore) -> None:
    board = ScalingBoard(store)
    generation = (await board.agree("encoder", OLD, None, TERM, newest=True)).generation
    await store.control.execute("HSET", keys.RULES, "encoder", b"\xc1 not ours")
    shared = await board.agree("encoder", OLD, None, TERM)
    assert shared.rules is None and shared.generation == generation
    assert (await board.agree("encoder", OLD, generation, TERM)).rules == OLD


@pytest.mark.parametrize(
    "value",
    [
        [1, 8, 2.0, 0.7, 60.0],
        [1.0, 8, 2.0, 0.7, 60.0, 0.25],
        [True, 8, 2.0, 0.7, 60.0, 0.25],
        [9, 8, 2.0, 0.7, 60.0, 0.25],
        [1, 1 << 40, 2.0, 0.7, 60.0, 0.25],
        [1, 8, float("nan"), 0.7, 60.0, 0.25],
        [1, 8, "2", 0.7, 60.0, 0.25],
    ],
)
def test_rules_that_make_no_sense_are_none(value: object) -> None:
    assert unpack_rules(msgpack.packb(value)) is None


async def test_what_others_have_written_is_ignored_and_replaced(store, caplog):
    board = ScalingBoard(store)
    await board.publish("p1", "encoder", DEMAND, TERM)
    await board.announce("encoder", THREE, TERM)
    await store.control.execute("HSET", keys.demands("encoder")[0], "p1", b"\xc1 not ours")
    await store.control.execute("HSET", keys.DECISIONS, "encoder", b"\xc1 not ours")
    for _ in range(2):
        assert await board.publish("p2", "encoder", OTHER, TERM) == [OTHER]
        assert await board.decision("encoder") is None
    assert caplog.text.count("cannot be read") == 1
    assert await board.announce("encoder", FOUR, TERM)
    assert await board.decision("encoder") == FOUR


@pytest.mark.parametrize("raw", [b"", b"\xc1", b"\x95", b"\x85" * 40, b"\xff" * 9])
def test_bytes_that_are_no_msgpack_are_none(raw: bytes) -> None:
    assert unpack_demand(raw) is None
    assert unpack_decision(raw) is None
