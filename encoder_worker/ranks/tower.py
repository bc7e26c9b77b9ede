"""A tower whose batches are encoded by several ranks, of which this process is the first."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from triptych.base.engine_beat import EngineBeat
from triptych.base.ranks.errors import RankFailed
from triptych.base.ranks.group import RankGroup
from triptych.base.types import Options
from triptych.encoder_worker.ranks.balance import divide
from triptych.encoder_worker.ranks.metrics import RankMetrics
from triptych.encoder_worker.ranks.share_encoder import ShareEncoder
from triptych.encoder_worker.ranks.shared_items import share
from triptych.models.base import EncoderSide, Media, PreparedItem


@dataclass(frozen=True, slots=True)
class _Sent:
    """A share that another rank encodes: the items' places in the batch, and those of their embeddings."""

    rank: int
    items: list[int]
    rows: list[torch.Tensor]


class DataParallelTower(EncoderSide):
    """An encoder side that divides each batch among the ranks of `group`, by patches.

    `inner` is this process's own tower, whose sizes and modules are also those of the whole. A RankLost in
    `encode` is the end of the engine that calls it.
    """

    def __init__(self, inner: EncoderSide, group: RankGroup, batch_patches: int) -> None:
        self.modality = inner.modality  # type: ignore[misc]
        self.width, self.dtype, self.device = inner.width, inner.dtype, inner.device
        self.module = inner.module
        #: This rank's own tower.
        self.inner = inner
        self._own = ShareEncoder(inner, batch_patches)
        self._group = group
        self._tick: Callable[[], object] = lambda: None
        self._metrics: RankMetrics | None = None

    @property
    def beats(self) -> list[EngineBeat]:
        """The beats of the other ranks, to be watched."""
        return self._group.beats

    @property
    def ranks(self) -> int:
        """How many they are, with this one."""
        return self._group.size

    def attach(self, metrics: RankMetrics, tick: Callable[[], object]) -> None:
        """Counts in `metrics` from now on, and calls `tick` once a second while other ranks are slower."""
        self._metrics, self._tick = metrics, tick

    @classmethod
    def load(
        cls, path: Path, *, device: torch.device, dtype: torch.dtype, quantize: bool = False
    ) -> EncoderSide:
        raise NotImplementedError("its ranks load a family's tower each")

    def preprocess(self, media: Media, options: Options) -> PreparedItem:
        return self.inner.preprocess(media, options)

    def sample(self) -> Media:
        return self.inner.sample()

    def encode(self, items: Sequence[PreparedItem]) -> list[torch.Tensor]:
        """Embeddings in the order of the items: this rank's on its device, those of other ranks on the host.

        An Exception, of any rank, is raised when all of them have ended.
        """
        own, *others = divide([item.cost for item in items], self._group.size)
        sent = [self._send(rank, indices, items) for rank, indices in enumerate(others, 1) if indices]
        outputs = dict[int, torch.Tensor]()
        failure: Exception | None = None
        try:
            self._count(0, own, items)
            outputs |= zip(own, self._own.encode([items[index] for index in own]), strict=True)
        except Exception as error:
            failure = error
        for one in sent:
            try:
                self._group.receive(one.rank, while_waiting=self._tick)
                # Kept outputs would keep the whole share's memory.
                outputs |= zip(one.items, (rows.clone() for rows in one.rows), strict=True)
            except RankFailed as error:
                if self._metrics is not None:
                    self._metrics.failed(one.rank)
                failure = failure or error
        if failure is not None:
            raise failure
        return [outputs[index] for index in range(len(items))]

    def _send(self, rank: int, indices: list[int], items: Sequence[PreparedItem]) -> _Sent:
        self._count(rank, indices, items)
        descriptor, description, rows = share([items[i] for i in indices], self.width, self.dtype)
        try:
            self._group.send(description, [descriptor], to=rank)
        finally:
            os.close(descriptor)
        return _Sent(rank, indices, rows)

    def _count(self, rank: int, indices: list[int], items: Sequence[PreparedItem]) -> None:
        if self._metrics is not None:
            self._metrics.share(rank, len(indices), sum(items[i].cost for i in indices))

    def close(self) -> None:
        """Ends the other ranks."""
        self._group.close()
