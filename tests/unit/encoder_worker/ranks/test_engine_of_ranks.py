"""The engine over a tower of several ranks: an item that fails fails alone, and a lost rank is its end."""

from __future__ import annotations

import queue
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
import torch

from support.fakes.fake_connector import fake_transfer
from support.processes.cluster import wait_for
from support.ranks.threads import RankThreads
from triptych.base.types import ItemPlan, Options
from triptych.ec_connector.base import OutputCache
from triptych.encoder_worker.engine import Encoded, EncoderEngine, TowerItem
from triptych.encoder_worker.ranks.program import handler
from triptych.encoder_worker.ranks.tower import DataParallelTower, ShareEncoder
from triptych.models.base import EncoderSide, Media, PreparedItem

WIDTH = 4
CPU = torch.device("cpu")
#: The items' costs: their ranks are 3, 0, 2, 3 and 1.
COSTS = (10, 50, 30, 20, 40)


class _Doubling(EncoderSide):
    """Puts out twice its input, after a while; an item with NaN fails its call."""

    width, dtype, device = WIDTH, torch.float32, CPU
    module = torch.nn.Identity()

    def __init__(self, seconds: float = 0.0) -> None:
        self._seconds = seconds

    @classmethod
    def load(
        cls, path: Path, *, device: torch.device, dtype: torch.dtype, quantize: bool = False
    ) -> EncoderSide:
        raise NotImplementedError

    def preprocess(self, media: Media, options: Options) -> PreparedItem:
        raise NotImplementedError

    def encode(self, items: Sequence[PreparedItem]) -> list[torch.Tensor]:
        time.sleep(self._seconds)
        rows = [item.tensors["rows"] * 2 for item in items]
        if any(row.isnan().any() for row in rows):
            raise RuntimeError("a bad item")
        return rows


class _Bench:
    """An engine over four ranks, and what it has reported."""

    def __init__(self) -> None:
        self.group = RankThreads(4, lambda rank: handler(ShareEncoder(_Doubling(0.02), 100), CPU))
        self.tower = DataParallelTower(_Doubling(), self.group, 100)
        self.events: queue.Queue[tuple[str, object]] = queue.Queue()
        self.engine = EncoderEngine(self.tower, fake_transfer("Recording"), OutputCache(1 << 20))
        self.engine.start(lambda mm_hash, event: self.events.put((mm_hash, event)))

    def encoded(self, values: Sequence[float]) -> dict[str, Encoded]:
        """What becomes of one item for each value, by key."""
        found: dict[str, Encoded] = {}
        self.engine.encode([_item(str(n), value, COSTS[n]) for n, value in enumerate(values)])
        while len(found) < len(values):
            mm_hash, event = self.events.get(timeout=30)
            if isinstance(event, Encoded):
                found[mm_hash] = event
        return found


@pytest.fixture
def b() -> Iterator[_Bench]:
    bench = _Bench()
    yield bench
    bench.engine.stop()
    bench.tower.close()


def _item(key: str, value: float, cost: int) -> TowerItem:
    prepared = PreparedItem(2, 2, (), cost, {"rows": torch.full((2, WIDTH), value)})
    plan = ItemPlan(key, "n" * 64, "image", 2, WIDTH, "float32", 2)
    return TowerItem(plan, prepared, None, "", lambda: True)


@pytest.mark.parametrize("bad", range(5))
def test_an_item_that_any_rank_fails_on_takes_no_other_with_it(b: _Bench, bad: int) -> None:
    found = b.encoded([float("nan") if n == bad else n + 1.0 for n in range(5)])
    failed = found.pop(str(bad))
    assert isinstance(failed.error, RuntimeError) and str(failed.error) == "a bad item"
    assert _values(found) == {str(n): 2.0 * (n + 1) for n in range(5) if n != bad}
    # Of one call, and with no answer left over from the batch before.
    assert _values(b.encoded([n + 6.0 for n in range(5)])) == {str(n): 2.0 * (n + 6) for n in range(5)}


def test_a_rank_that_is_lost_is_the_death_of_the_engine(b: _Bench) -> None:
    assert len(b.encoded([1.0] * 5)) == 5
    b.group.threads[2].die()
    b.engine.encode([_item(str(n), 1.0, 1) for n in range(5)])
    wait_for("the engine's death", lambda: b.engine.beat.dead, 30)
    assert not any(isinstance(event, Encoded) and event.error for event in _left(b.events))


def _values(found: dict[str, Encoded]) -> dict[str, float]:
    """The one value of each item's embedding, by key."""
    outputs = {key: event.output for key, event in found.items() if event.output is not None}
    return {key: output.data.unique().item() for key, output in outputs.items()}


def _left(events: queue.Queue[tuple[str, object]]) -> list[tuple[str, object]]:
    return [events.get_nowait() for _ in range(events.qsize())]
