"""Ranks of a tower: each batch in shares, and a rank that is lost."""

from __future__ import annotations

import itertools
import os
import select
from collections.abc import Iterator, Sequence
from typing import NamedTuple
from unittest.mock import Mock

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from support.data.checkpoints import build_checkpoint
from support.data.pictures import picture
from support.ranks.threads import RankThreads
from triptych.base.config import EncoderConfig
from triptych.base.errors import ConfigError
from triptych.base.metrics import EncoderMetrics
from triptych.base.ranks.channel import RankFailed, RankLost
from triptych.encoder_worker.loading import load_tower
from triptych.encoder_worker.ranks import tower as tower_module
from triptych.encoder_worker.ranks.program import handler
from triptych.encoder_worker.ranks.shared_items import share, shared
from triptych.encoder_worker.ranks.tower import (
    DataParallelTower,
    RankMetrics,
    ShareEncoder,
    calls,
    divide,
    load_ranks,
)
from triptych.models.base import EncoderSide, PreparedItem

RANKS = 4
SIZES = ((64, 64), (160, 96), (96, 96), (64, 128), (128, 128), (64, 96), (96, 64))
#: Patches of one call: several of the pictures, but not all of them.
CALL = 40


class Started(NamedTuple):
    """A tower of four ranks; its ranks' threads, and the tower that each of them has."""

    tower: DataParallelTower
    group: RankThreads
    alone: EncoderSide
    metrics: EncoderMetrics


@pytest.fixture(scope="module")
def alone() -> EncoderSide:
    return load_tower(EncoderConfig(model=str(build_checkpoint("qwen3_vl"))))


@pytest.fixture
def started(alone: EncoderSide) -> Iterator[Started]:
    group = RankThreads(RANKS, lambda rank: handler(ShareEncoder(alone, CALL), alone.device))
    tower, metrics = DataParallelTower(alone, group, CALL), EncoderMetrics("tiny")
    tower.attach(RankMetrics(metrics, "tiny", tower.ranks), lambda: None)
    with torch.inference_mode():
        yield Started(tower, group, alone, metrics)
    tower.close()


def _items(tower: EncoderSide, count: int) -> list[PreparedItem]:
    return [tower.preprocess(picture(n, *SIZES[n]), {}) for n in range(count)]


def _one_by_one(tower: EncoderSide, items: Sequence[PreparedItem]) -> list[torch.Tensor]:
    return [tower.encode([item])[0] for item in items]


@pytest.mark.parametrize("count", [0, 1, 2, 4, 5, 7], ids="{} items".format)
def test_any_number_of_items_is_encoded_as_by_one_rank_and_in_order(started, count):
    items = _items(started.tower, count)
    found = started.tower.encode(items)
    assert len(found) == count
    for one, other in zip(found, _one_by_one(started.alone, items), strict=True):
        assert one.is_contiguous()
        torch.testing.assert_close(one, other, atol=1e-5, rtol=1e-4)


def test_a_batch_of_one_item_for_each_rank_is_equal_bit_by_bit(started):
    items = _items(started.tower, RANKS)
    found = started.tower.encode(items)
    alone = _one_by_one(started.alone, items)
    assert all(torch.equal(one, other) for one, other in zip(found, alone, strict=True))


def test_metrics_show_each_ranks_items_and_patches(started):
    items = _items(started.tower, 5)
    started.tower.encode(items)

    def values(name: str) -> list[float | None]:
        labels = [{"model_name": "tiny", "rank": str(rank)} for rank in range(RANKS)]
        return [started.metrics.registry.get_sample_value(name, one) for one in labels]

    assert sorted(values("triptych_encoder_rank_items_total")) == [1, 1, 1, 2]
    assert sum(values("triptych_encoder_rank_patches_total")) == sum(item.cost for item in items)
    assert values("triptych_encoder_rank_failures_total") == [None] * RANKS
    registry = started.metrics.registry
    assert registry.get_sample_value("triptych_encoder_ranks", {"model_name": "tiny"}) == RANKS


@pytest.mark.parametrize(("cost", "rank"), [(10**9, 0), (1, 3)])
def test_an_item_that_one_rank_fails_on_fails_its_batch_and_the_next_batch_works(started, cost, rank):
    bad = PreparedItem(rows=4, length=4, grid_thw=(1, 1, 1), cost=cost, tensors={})
    with pytest.raises(RankFailed if rank else KeyError, match=f"rank {rank}: KeyError" if rank else None):
        started.tower.encode([*_items(started.tower, 3), bad])
    labels = {"model_name": "tiny", "rank": str(rank)}
    failures = started.metrics.registry.get_sample_value("triptych_encoder_rank_failures_total", labels)
    assert failures == (1 if rank else None)
    items = _items(started.tower, 7)
    found = started.tower.encode(items)
    for one, other in zip(found, _one_by_one(started.alone, items), strict=True):
        torch.testing.assert_close(one, other, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("fails", ["the second share", "the copy of a reply"])
def test_a_batch_that_fails_here_leaves_no_ranks_reply_to_the_next_batch(started, monkeypatch, fails):
    """Rows of the next batch would be taken before they are written, and saved."""
    if fails == "the second share":
        real, left = tower_module.share, [1]

        def refused(*given):
            if not left:
                raise OSError(24, "Too many open files")
            left.pop()
            return real(*given)

        monkeypatch.setattr(tower_module, "share", refused)
    else:
        monkeypatch.setattr(torch.Tensor, "clone", Mock(side_effect=RuntimeError("no memory")))
    with pytest.raises((OSError, RuntimeError)):
        started.tower.encode(_items(started.tower, RANKS))
    monkeypatch.undo()
    channels = [thread.channel for thread in started.group.threads]
    assert select.select(channels, [], [], 0.5)[0] == [], "a reply is left"
    items = _items(started.tower, 7)
    found = started.tower.encode(items)
    for one, other in zip(found, _one_by_one(started.alone, items), strict=True):
        torch.testing.assert_close(one, other, atol=1e-5, rtol=1e-4)


def test_a_rank_that_dies_is_the_end_of_the_engine(started):
    started.group.threads[1].die()
    with pytest.raises(RankLost, match="rank 2 is gone"):
        started.tower.encode(_items(started.tower, 5))


def test_too_few_ranks_are_refused_at_the_start():
    config = EncoderConfig(model=str(build_checkpoint("qwen3_vl")), encoder_data_parallel=0)
    with pytest.raises(ConfigError, match="--encoder-data-parallel 0: give a number of ranks from 1"):
        load_ranks(config)


COSTS = st.lists(st.integers(1, 5000), max_size=40)


@pytest.mark.parametrize(
    ("costs", "ranks", "shares"),
    [
        ([], 4, [[], [], [], []]),
        ([7], 4, [[0], [], [], []]),
        ([7], 1, [[0]]),
        ([1, 1, 1, 1, 1], 4, [[0, 4], [1], [2], [3]]),
        ([5, 1, 1, 1, 8], 2, [[4], [0, 1, 2, 3]]),
        ([256, 1024, 256, 512], 2, [[1], [0, 2, 3]]),
        ([1, 2, 3], 3, [[2], [1], [0]]),
        ([0, 0, 0], 2, [[0, 2], [1]]),
    ],
)
def test_the_largest_items_go_first_to_the_rank_that_has_least(costs, ranks, shares):
    assert divide(costs, ranks) == shares


@settings(deadline=None, max_examples=50)
@given(COSTS, st.integers(1, 8))
def test_every_item_has_one_rank_and_no_rank_has_more_than_an_equal_share_plus_one_item(costs, ranks):
    shares = divide(costs, ranks)
    assert len(shares) == ranks
    assert sorted(itertools.chain(*shares)) == list(range(len(costs)))
    busiest = max(sum(costs[i] for i in share) for share in shares)
    assert busiest <= sum(costs) / ranks + max(costs, default=0) * (1 - 1 / ranks) + 1e-6
    assert sum(bool(share) for share in shares) == min(ranks, len(costs))


@settings(deadline=None, max_examples=50)
@given(st.lists(st.integers(1, 30), min_size=1, max_size=6), st.integers(1, 3))
def test_the_busiest_rank_has_at_most_four_thirds_of_the_best_division(costs, ranks):
    def busiest(owners: tuple[int, ...]) -> int:
        return max(sum(c for c, owner in zip(costs, owners, strict=True) if owner == r) for r in range(ranks))

    best = min(busiest(owners) for owners in itertools.product(range(ranks), repeat=len(costs)))
    found = max(sum(costs[i] for i in share) for share in divide(costs, ranks))
    assert found <= best * 4 / 3


@pytest.mark.parametrize(
    ("costs", "limit", "found"),
    [
        ([], 10, []),
        ([99], 10, [range(1)]),
        ([5, 5, 5], 10, [range(2), range(2, 3)]),
        ([99, 1, 99, 4, 6], 10, [range(1), range(1, 2), range(2, 3), range(3, 5)]),
    ],
)
def test_calls_of_the_tower_keep_to_the_limit_and_a_larger_item_is_alone(costs, limit, found):
    assert calls(costs, limit) == found


@settings(deadline=None, max_examples=50)
@given(COSTS, st.integers(1, 9000))
def test_all_items_are_in_a_call_in_their_order(costs, limit):
    found = calls(costs, limit)
    assert [i for call in found for i in call] == list(range(len(costs)))
    assert all(len(call) == 1 or sum(costs[i] for i in call) <= limit for call in found)


def _item(rows: int, *, runs: tuple[tuple[int, int], ...] | None = None, **tensors: torch.Tensor):
    return PreparedItem(rows, rows + 2, (1, rows, 1), cost=rows, tensors=tensors, runs=runs)


def test_items_of_all_dtypes_and_shapes_cross_unchanged_and_their_rows_come_back():
    items = [
        _item(3, pixels=torch.randn(3, 5), mask=torch.tensor([True, False]), scalar=torch.tensor(7)),
        _item(1, runs=((0, 1), (4, 2)), pixels=torch.randn(6, 4).T, empty=torch.empty(0, 4)),
        _item(2, halves=torch.randn(3).to(torch.bfloat16), ids=torch.tensor([[1, 2]], dtype=torch.int32)),
    ]
    descriptor, description, rows = share(items, 4, torch.bfloat16)
    other = shared(descriptor, description)
    os.close(descriptor)
    for ours, theirs in zip(items, other.items, strict=True):
        assert (ours.rows, ours.length, ours.grid_thw, ours.cost, ours.runs) == (
            *(theirs.rows, theirs.length, theirs.grid_thw, theirs.cost, theirs.runs),
        )
        assert list(ours.tensors) == list(theirs.tensors)
        for name, tensor in ours.tensors.items():
            assert tensor.dtype == theirs.tensors[name].dtype
            assert torch.equal(tensor, theirs.tensors[name])
    assert [tuple(place.shape) for place in rows] == [(3, 4), (1, 4), (2, 4)]
    for number, place in enumerate(other.rows):
        place.fill_(number + 1)
    assert [place.unique().tolist() for place in rows] == [[1.0], [2.0], [3.0]]
    assert torch.equal(other.items[0].tensors["pixels"], items[0].tensors["pixels"]), (
        "no place is over another"
    )


def test_a_new_share_holds_nothing_of_an_earlier_one():
    for fill in (5.0, 0.0):
        descriptor, description, rows = share([_item(4)], 8, torch.float32)
        assert not rows[0].any()
        shared(descriptor, description).rows[0].fill_(fill)
        os.close(descriptor)


def test_a_dtype_that_is_not_shared_is_an_error_and_leaves_no_descriptor():
    before = len(os.listdir("/proc/self/fd"))
    with pytest.raises(TypeError, match="complex64"):
        share([_item(1, wave=torch.zeros(1, dtype=torch.complex64))], 4, torch.float32)
    assert len(os.listdir("/proc/self/fd")) == before
