"""The pool of blocks, and the blocks of each request."""

from __future__ import annotations

import random
from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from support.engine.engine_requests import make_feature
from triptych.base.types import MMFeature
from triptych.pd_worker.core.kv_cache.block_pool import BlockPool, PrefixChain
from triptych.pd_worker.core.kv_cache.kv_cache_manager import KVCacheManager
from triptych.pd_worker.core.kv_cache.state_slots import StateSlots

ROOT = b"r" * 32


def chain(
    tokens: Sequence[int], features: Sequence[MMFeature] = (), *, root: bytes = ROOT, size: int = 4
) -> PrefixChain:
    return PrefixChain(root, tokens, [], features, size)


def computed(manager: KVCacheManager, name: str, tokens: Sequence[int], *features: MMFeature) -> None:
    """A request that computed `tokens` and ended."""
    links = chain(tokens, features, size=manager.block_size)
    assert manager.allocate(name, [], len(tokens))
    manager.register(name, links, len(tokens))
    manager.free(name)


def hits(manager: KVCacheManager, links: PrefixChain) -> int:
    return len(manager.find_prefix(links, links._num_prompt_tokens))


def test_the_first_blocks_are_used_first_and_counted_once() -> None:
    pool = BlockPool(8)
    first = pool.allocate(3)
    assert (first, pool.most_used) == ([0, 1, 2], 3)
    pool.release(first)
    assert max(pool.allocate(2)) < pool.most_used == 3
    assert max(pool.allocate(4)) < pool.most_used == 6


def test_blocks_of_a_span_depend_on_all_of_its_tokens_and_those_before_it_do_not() -> None:
    """Tokens that attend to later ones have other keys where those differ."""
    one, other = list(range(16)), [*range(14), 99, 100]
    plain = [PrefixChain(ROOT, tokens, [], [], 4).digests(2) for tokens in (one, other)]
    assert plain[0] == plain[1]
    spanned = [PrefixChain(ROOT, tokens, [], [], 4, ((5, 15),)).digests(2) for tokens in (one, other)]
    assert spanned[0][0] == spanned[1][0] == plain[0][0]
    assert spanned[0][1] != spanned[1][1]


def test_after_a_reset_every_block_and_slot_is_free_and_nothing_is_found() -> None:
    manager = KVCacheManager(8, 4, states=StateSlots(1, 0))
    assert manager.allocate("a", [], 8)
    manager.register("a", chain(range(8)), 8)
    manager.reset()
    assert hits(manager, chain(range(9))) == 0
    assert manager.allocate("b", [], 32)


@pytest.mark.parametrize(
    ("cached", "asked", "found"),
    [
        pytest.param(10, chain(range(12)), 2, id="full blocks of an equal prefix are found"),
        pytest.param(8, chain(range(8)), 1, id="the last token is always computed"),
        pytest.param(8, chain(range(9), root=b"s" * 32), 0, id="another root shares nothing"),
    ],
)
def test_of_what_another_request_has_computed(cached: int, asked: PrefixChain, found: int) -> None:
    manager = KVCacheManager(8, 4)
    computed(manager, "a", range(cached))
    assert hits(manager, asked) == found


def test_equal_placeholders_of_different_images_share_nothing() -> None:
    manager = KVCacheManager(16, 4)
    tokens = [1, 2, *[9] * 8, 3, 4, 5, 6]
    computed(manager, "a", tokens, make_feature("cat", 2, 8))
    assert hits(manager, chain(tokens, [make_feature("dog", 2, 8)])) == 0
    assert hits(manager, chain(tokens, [make_feature("cat", 2, 8)])) == 3


def test_one_image_at_two_offsets_of_a_block_shares_nothing() -> None:
    manager = KVCacheManager(16, 4)
    tokens = [9] * 12
    computed(manager, "a", tokens, make_feature("cat", 0, 8))
    assert hits(manager, chain(tokens, [make_feature("cat", 1, 8)])) == 0


def test_the_third_of_three_images_decides_its_block() -> None:
    manager = KVCacheManager(16, 4)
    tokens = [9] * 13
    first = [make_feature(name, 4 * i, 4) for i, name in enumerate("abc")]
    other = [make_feature(name, 4 * i, 4) for i, name in enumerate("abd")]
    computed(manager, "a", tokens, *first)
    assert hits(manager, chain(tokens, other)) == 2


def test_tokens_that_move_across_a_block_boundary_change_the_digest() -> None:
    assert chain([1, 2, 3, 4]).digests(1) != chain([1, 2, 34, 4]).digests(1)
    assert chain(range(8)).digests(2)[1] != chain([0, 0, 0, 0, 4, 5, 6, 7]).digests(2)[1]


def test_without_prefix_caching_nothing_is_found() -> None:
    manager = KVCacheManager(8, 4, prefix_caching=False)
    computed(manager, "a", range(8))
    assert hits(manager, chain(range(9))) == 0


@pytest.mark.parametrize(
    ("blocks", "cached", "taken", "found"),
    [
        pytest.param(2, 8, 8, 0, id="a reused block is not found any more"),
        pytest.param(4, 8, 8, 2, id="blocks of unknown content are taken before cached ones"),
        pytest.param(3, 12, 4, 2, id="the end of a cached prefix goes before its head"),
    ],
)
def test_of_a_prefix_when_another_request_takes_blocks(blocks, cached, taken, found):
    manager = KVCacheManager(blocks, 4)
    computed(manager, "a", range(cached))
    assert manager.allocate("b", [], taken)
    assert hits(manager, chain(range(cached + 1))) == found


def test_a_shared_prefix_takes_no_new_blocks() -> None:
    manager = KVCacheManager(4, 4)
    computed(manager, "a", range(8))
    prefix = manager.find_prefix(chain(range(12)), 12)
    assert manager.allocate("b", prefix, 12)
    assert manager.allocate("c", prefix, 9)
    assert manager.num_used == 4
    manager.free("b")
    manager.free("c")
    assert manager.num_free == 4


def test_too_few_blocks_change_nothing() -> None:
    manager = KVCacheManager(4, 4)
    computed(manager, "a", range(8))
    prefix = manager.find_prefix(chain(range(20)), 20)
    assert not manager.allocate("b", prefix, 20)
    assert not manager.allocate("b", prefix, 12, spare=2)
    assert manager.num_free == 4
    assert manager.allocate("b", prefix, 12, spare=1)
    assert not manager.grow("b", 17)
    assert len(manager.table("b")) == 3


def test_freeing_twice_is_freeing_once() -> None:
    manager = KVCacheManager(4, 4)
    manager.allocate("a", [], 16)
    manager.free("a")
    manager.free("a")
    assert manager.num_free == 4
    assert manager.table("a") == []


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 10**6))
def test_no_block_is_lost_or_held_by_a_wrong_request(seed: int) -> None:
    """Random requests over few distinct prefixes: a block in two tables holds the same full prefix."""
    rng = random.Random(seed)
    manager = KVCacheManager(rng.randint(4, 24), rng.choice([2, 4]))
    live: dict[str, tuple[PrefixChain, list[int]]] = {}
    for step in range(60):
        if rng.random() < 0.5 or not live:
            prompt = [rng.randint(0, 1)] * rng.randint(1, 16)
            links = chain(prompt, size=manager.block_size)
            prefix = manager.find_prefix(links, len(prompt))
            assert len(prefix) * manager.block_size < len(prompt)
            if manager.allocate(f"r{step}", prefix, len(prompt)):
                live[f"r{step}"] = (links, prompt)
        else:
            name = rng.choice(list(live))
            links, prompt = live[name]
            if rng.random() < 0.5:
                manager.register(name, links, rng.randint(0, len(prompt)))
            else:
                manager.free(name)
                del live[name]
        content: dict[int, tuple[int, bytes]] = {}
        for name, (links, prompt) in live.items():
            full = links.digests(len(prompt) // manager.block_size)
            for index, block in enumerate(manager.table(name)):
                mine = (index, full[index] if index < len(full) else name.encode())
                assert content.setdefault(block, mine) == mine
        assert manager.num_used == len(content)
    for name in live:
        manager.free(name)
    assert manager.num_free == manager.num_blocks


@pytest.mark.parametrize("seed", range(10))
def test_a_block_is_free_or_in_one_table(seed: int) -> None:
    draw, pool, tables = random.Random(seed), BlockPool(50), list[list[int]]()
    for _ in range(100):
        if tables and draw.random() < 0.5:
            pool.release(reversed(tables.pop(draw.randrange(len(tables)))))
        elif count := draw.randrange(pool.num_free + 1):
            table = pool.allocate(count)
            if draw.random() < 0.5:
                pool.label(table, [draw.randbytes(8) for _ in table])
            tables.append(table)
        held = [block for table in tables for block in table]
        assert len(held) == len(set(held)) == pool.num_used
        assert all(pool.is_free(block) == (block not in held) for block in range(50))


def test_a_freed_table_is_the_next_one_in_the_same_order() -> None:
    pool = BlockPool(8)
    first = pool.allocate(3)
    assert first == [0, 1, 2], "host blocks that follow one another are copied at once"
    pool.release(reversed(first))
    assert pool.allocate(5) == [0, 1, 2, 3, 4]


def test_the_oldest_are_evicted_first_and_no_block_too_many() -> None:
    """A full cache of scattered tables."""
    draw = random.Random(0)
    pool = BlockPool(800)
    blocks = pool.allocate(800)
    draw.shuffle(blocks)
    digests = [block.to_bytes(2, "big") for block in blocks]
    pool.label(blocks, digests)
    pool.release(blocks)
    needed = 0
    for _ in range(60):
        count = draw.choice([1, 1, 1, 12])
        needed += count
        assert len(pool.allocate(count)) == count
        gone = [pool.find(digest) is None for digest in digests]
        assert gone == [True] * needed + [False] * (800 - needed), "the least recently used go first"
    assert pool.num_free == 800 - needed
    assert pool.drain_changes() >= set(digests[:needed])


def test_too_few_blocks_are_an_error_and_change_nothing() -> None:
    pool = BlockPool(4)
    pool.allocate(2)
    with pytest.raises(KeyError, match="3 blocks are wanted and 2 are free"):
        pool.allocate(3)
    assert pool.num_free == 2 and pool.allocate(2)


def test_looking_a_prompt_up_of_which_nothing_is_cached_makes_few_of_its_digests() -> None:
    manager, long = KVCacheManager(64, 4), chain(range(100_000))
    assert manager.find_prefix(long, 100_000) == []
    assert len(long._digests) <= 64


def test_digests_made_piece_by_piece_are_those_made_at_once() -> None:
    at_once, by_piece = chain(range(1000)), chain(range(1000))
    pieces = [by_piece.digests(end, end - 10) for end in range(10, 251, 10)]
    assert [digest for piece in pieces for digest in piece] == at_once.digests(250)
