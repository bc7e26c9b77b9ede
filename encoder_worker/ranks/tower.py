"""A tower whose batches are encoded by several ranks, of which this process is the first."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from triptych.base.config import EncoderConfig
from triptych.base.engine_beat import EngineBeat
from triptych.base.errors import InternalError
from triptych.base.metrics import EncoderMetrics
from triptych.base.ranks.channel import RankFailed, RankStartError
from triptych.base.ranks.group import RankGroup
from triptych.base.ranks.process_group import check_ranks
from triptych.base.types import Options
from triptych.encoder_worker.loading import activation_bytes, load
from triptych.encoder_worker.ranks.shared_items import share
from triptych.models.audio import AudioFile
from triptych.models.base import EncoderSide, Media, PreparedItem
from triptych.models.defaults import resolve_device
from triptych.models.identity import ModelIdentity
from triptych.models.video.clip import Clip, ClipInfo, SegmentEnds


def divide(costs: Sequence[int], ranks: int) -> list[list[int]]:
    """For each rank its items' indices, ascending: largest items first, each to the rank with the least cost.

    No rank has more than an equal share of the sum plus one item, nor more than 4/3 of what the best division
    gives the busiest. Ranks come in order: with fewer items than ranks, the last ones have none.
    """
    shares: list[list[int]] = [[] for _ in range(ranks)]
    loads = [0] * ranks
    for index in sorted(range(len(costs)), key=lambda i: (-costs[i], i)):
        rank = loads.index(min(loads))
        shares[rank].append(index)
        loads[rank] += max(costs[index], 1)
    return [sorted(share) for share in shares]


def calls(costs: Sequence[int], limit: int) -> list[range]:
    """The calls of the tower for a share of these costs: neighbours up to `limit`, a larger item alone.

    Memory is measured for one such call (`--encoder-batch-patches`).
    """
    ranges: list[range] = []
    begin, cost = 0, 0
    for index, each in enumerate(costs):
        if index > begin and cost + each > limit:
            ranges.append(range(begin, index))
            begin, cost = index, 0
        cost += each
    return [*ranges, range(begin, len(costs))] if costs else ranges


class ShareEncoder:
    """A tower and the most patches of one call of it."""

    def __init__(self, encoder: EncoderSide, batch_patches: int) -> None:
        self._encoder = encoder
        self._batch_patches = batch_patches

    def encode(self, items: Sequence[PreparedItem]) -> list[torch.Tensor]:
        """One [rows, width] tensor per item, on the tower's device."""
        outputs: list[torch.Tensor] = []
        for call in calls([item.cost for item in items], self._batch_patches):
            outputs += self._encoder.encode([items[index] for index in call])
        for item, output in zip(items, outputs, strict=True):
            if tuple(output.shape) != (item.rows, self._encoder.width):
                raise InternalError(
                    f"the tower gave {tuple(output.shape)} for {item.rows}x{self._encoder.width} planned"
                )
        return outputs


class RankMetrics:
    """Counters of what each rank was given, and of the shares that it failed on."""

    def __init__(self, metrics: EncoderMetrics, model_name: str, ranks: int) -> None:
        self._metrics = metrics
        self._model_name = model_name
        metrics.ranks.set(ranks)

    def share(self, rank: int, items: int, patches: int) -> None:
        """Counts one rank's share of a batch."""
        self._metrics.rank_items.labels(self._model_name, rank).inc(items)
        self._metrics.rank_patches.labels(self._model_name, rank).inc(patches)

    def failed(self, rank: int) -> None:
        """Counts a share that raised an exception; its items are encoded again, one by one, by rank 0."""
        self._metrics.rank_failures.labels(self._model_name, rank).inc()


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

    def preprocess_video(self, clip: Clip, options: Options) -> PreparedItem:
        return self.inner.preprocess_video(clip, options)

    def preprocess_sound(self, audio: AudioFile, options: Options) -> PreparedItem:
        return self.inner.preprocess_sound(audio, options)

    def extra_video_rows(self) -> int | None:
        return self.inner.extra_video_rows()

    def video_segments(self, info: ClipInfo, options: Options, frames: int, extra_rows: int) -> SegmentEnds:
        return self.inner.video_segments(info, options, frames, extra_rows)

    def sample(self) -> Media:
        return self.inner.sample()

    def encode(self, items: Sequence[PreparedItem]) -> list[torch.Tensor]:
        """Embeddings in the order of the items: this rank's on its device, those of other ranks on the host.

        An Exception, of any rank, is raised when all of them have ended.
        """
        own, *others = divide([item.cost for item in items], self._group.size)
        sent = list[_Sent]()
        outputs = dict[int, torch.Tensor]()
        failure: Exception | None = None
        try:
            for rank, indices in enumerate(others, 1):
                if indices:
                    sent.append(self._send(rank, indices, items))
            self._count(0, own, items)
            outputs |= zip(own, self._own.encode([items[index] for index in own]), strict=True)
        except Exception as error:
            failure = error
        # All of them, whatever has failed: a reply that is left would be taken for that of the next batch.
        for one in sent:
            try:
                self._group.receive(one.rank, while_waiting=self._tick)
                # Kept outputs would keep the whole share's memory.
                outputs |= zip(one.items, (rows.clone() for rows in one.rows), strict=True)
            except Exception as error:
                if self._metrics is not None and isinstance(error, RankFailed):
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


logger = logging.getLogger(__name__)

OPTION = "--encoder-data-parallel"


def load_ranks(config: EncoderConfig) -> tuple[EncoderSide, ModelIdentity]:
    """The tower, with its other ranks if it has any, and its model's identity.

    ConfigError for what cannot work as configured, RankStartError for a rank that does not start.
    """
    size = config.encoder_data_parallel
    check_ranks(OPTION, size, resolve_device(config.device))
    if size == 1:
        return _loaded(config)
    group = RankGroup("encoder", size, config)
    group.start()
    try:
        encoder, model = _loaded(config)
        for rank, ready in enumerate(group.wait_ready(), 1):
            if ready != {"width": encoder.width, "dtype": str(encoder.dtype)}:
                raise RankStartError(f"rank {rank} has another tower than rank 0: {ready}")
    except BaseException:
        group.close(seconds=0)
        raise
    logger.info("%d ranks share each batch; processes %s", size, group.pids)
    return DataParallelTower(encoder, group, config.batch_patches), model


def _loaded(config: EncoderConfig) -> tuple[EncoderSide, ModelIdentity]:
    encoder, model = load(config)
    activation_bytes(config, encoder)
    return encoder, model
