"""A tower of several ranks gives each item what one rank gives it, whatever the number of items."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import pytest
import torch

from support.data.checkpoints import build_checkpoint
from support.data.pictures import picture
from support.ranks.threads import RankThreads
from triptych.base.config import EncoderConfig
from triptych.base.errors import ConfigError
from triptych.base.metrics import EncoderMetrics
from triptych.base.ranks.channel import RankFailed, RankLost
from triptych.encoder_worker.loading import load_tower
from triptych.encoder_worker.ranks.program import handler
from triptych.encoder_worker.ranks.tower import DataParallelTower, RankMetrics, ShareEncoder, load_ranks
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


def test_a_rank_that_dies_is_the_end_of_the_engine(started):
    started.group.threads[1].die()
    with pytest.raises(RankLost, match="rank 2 is gone"):
        started.tower.encode(_items(started.tower, 5))


def test_too_few_ranks_are_refused_at_the_start():
    config = EncoderConfig(model=str(build_checkpoint("qwen3_vl")), encoder_data_parallel=0)
    with pytest.raises(ConfigError, match="--encoder-data-parallel 0: give a number of ranks from 1"):
        load_ranks(config)
