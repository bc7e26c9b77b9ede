"""An encoder engine over a tower that puts out its input, with a connector that records saves."""

from __future__ import annotations

import queue
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, Self

import torch
from PIL import Image

from support.fakes.fake_connector import RecordingWorker, fake_transfer
from triptych.base.cpu.step_pacer import StepPacer
from triptych.base.types import ItemPlan
from triptych.ec_connector.base import OutputCache
from triptych.encoder_worker.engine import Encoded, EncoderEngine, TowerItem
from triptych.models.base import EncoderSide, PreparedItem
from triptych.protos.encoder_pb2 import EncodeEvent

WIDTH = 4
FAILING = -7.0


class Tower(EncoderSide):
    """Puts out its input; an item of `FAILING` fails its batch."""

    width, dtype, device = WIDTH, torch.float32, torch.device("cpu")

    def __init__(self) -> None:
        self.batches: list[int] = []

    @classmethod
    def load(cls, path: Path, **options: Any) -> EncoderSide:
        raise NotImplementedError

    def preprocess(self, image: Image.Image, options: Mapping[str, Any]) -> PreparedItem:
        raise NotImplementedError

    def encode(self, items: Sequence[PreparedItem]) -> list[torch.Tensor]:
        self.batches.append(len(items))
        rows = [item.tensors["rows"] for item in items]
        if any((row == FAILING).any() for row in rows):
            raise RuntimeError("a bad item")
        return rows


class SlowTower(Tower):
    """Stays in its second batch until it is let go."""

    def __init__(self) -> None:
        super().__init__()
        self.in_second, self.let_go = threading.Event(), threading.Event()

    def encode(self, items: Sequence[PreparedItem]) -> list[torch.Tensor]:
        if self.batches:
            self.in_second.set()
            assert self.let_go.wait(30)
        return super().encode(items)


class Told(NamedTuple):
    """What the engine tells of an item; of a batch that is over its items in the tower and its calls."""

    mm_hash: str
    event: Any

    @property
    def kind(self) -> str:
        """encoded, ready, failed, or done of a batch."""
        if isinstance(self.event, EncodeEvent):
            return self.event.WhichOneof("body") or ""
        return "encoded" if isinstance(self.event, Encoded) else "done"


class Bench:
    def __init__(
        self,
        tower: Tower | None = None,
        connector: str = "Recording",
        *,
        thread_per_batch: bool = False,
        pacer: StepPacer | None = None,
    ) -> None:
        self.tower, self.outputs = tower or Tower(), OutputCache(1 << 20)
        self.events: queue.Queue[Told] = queue.Queue()
        #: Of the last batch: items in the tower, and calls.
        self.batch = 0, 0
        self.engine = EncoderEngine(
            self.tower,
            fake_transfer(connector),
            self.outputs,
            pacer,
            thread_per_batch=thread_per_batch,
            on_batch=self._note_batch,
        )
        saver = self.engine.get_ec_transfer()
        assert isinstance(saver, RecordingWorker)
        self.saver = saver

    def __enter__(self) -> Self:
        self.engine.start(lambda mm_hash, event: self.events.put(Told(mm_hash, event)))
        return self

    def __exit__(self, *error: object) -> None:
        self.engine.stop()

    def encode(self, batch: Sequence[TowerItem]) -> None:
        """The batch's end is among the events."""
        self.engine.encode(batch).add_done_callback(lambda done: self.events.put(Told("", self.batch)))

    def _note_batch(self, items: int, calls: int, seconds: float) -> None:
        self.batch = items, calls

    def take(self, count: int) -> list[Told]:
        return [self.events.get(timeout=10) for _ in range(count)]


def item(key: str, *, value: float = 1.0, rows: int = 2, needed: bool = True, digest: str = "") -> TowerItem:
    data = torch.full((2, WIDTH), value)
    prepared = PreparedItem(2, 2, (), 1, {"rows": data})
    plan = ItemPlan(key, "n" * 64, "image", rows, WIDTH, "float32", rows)
    return TowerItem(plan, prepared, None, digest, lambda: needed)
