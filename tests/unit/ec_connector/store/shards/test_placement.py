"""Which shard holds an item."""

from __future__ import annotations

from collections import Counter

from triptych.ec_connector.store.shards.placement import placed

NAMES = ["10.0.0.1:6379/0", "10.0.0.2:6379/0", "10.0.0.3:6379/0", "10.0.0.4:6379/0"]
HASHES = [f"{n:064x}" for n in range(2000)]


def by_name(names: list[str], mm_hash: str) -> list[str]:
    return [names[index] for index in placed(names, mm_hash)]


def test_the_order_of_the_list_does_not_matter() -> None:
    for mm_hash in HASHES[:200]:
        assert (
            by_name(NAMES, mm_hash)
            == by_name(NAMES[::-1], mm_hash)
            == by_name(NAMES[2:] + NAMES[:2], mm_hash)
        )


def test_items_spread_evenly_over_the_shards_and_over_their_stand_ins() -> None:
    firsts = Counter(by_name(NAMES, mm_hash)[0] for mm_hash in HASHES)
    assert min(firsts.values()) > 0.8 * len(HASHES) / len(NAMES), firsts
    stand_ins = Counter(
        by_name(NAMES, mm_hash)[1] for mm_hash in HASHES if by_name(NAMES, mm_hash)[0] == NAMES[0]
    )
    assert min(stand_ins.values()) > 0.7 * firsts[NAMES[0]] / 3, stand_ins


def test_a_further_shard_takes_its_part_and_moves_nothing_else() -> None:
    for mm_hash in HASHES:
        before, after = by_name(NAMES[:3], mm_hash)[0], by_name(NAMES, mm_hash)[0]
        assert after in (before, NAMES[3])
