"""An encoder side that encodes through graphs, and the choice whether a worker has one."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from pathlib import Path

import torch

from triptych.base.config import EncoderConfig
from triptych.base.errors import ConfigError
from triptych.base.machine.device import Device, memory_of
from triptych.base.machine.device_fault import check_device
from triptych.base.machine.graphs import graph_backend
from triptych.base.metrics import EncoderMetrics
from triptych.base.types import Options
from triptych.encoder_worker.graphs.manager import EncoderCudaGraphManager, GraphTower
from triptych.encoder_worker.graphs.packing import GraphLimits, parse_budgets, token_budgets
from triptych.models.audio import AudioFile
from triptych.models.base import EncoderSide, Media, PreparedItem
from triptych.models.encoder_graph import EncoderCudaGraphConfig, SupportsEncoderCudaGraph
from triptych.models.video.clip import Clip, ClipInfo, SegmentEnds

logger = logging.getLogger(__name__)

_FLAG = "--encoder-graphs"


class GraphEncoder(EncoderSide):
    """An encoder side whose batches go through graphs; everything else is that of `encoder`."""

    def __init__(self, encoder: EncoderSide, graphs: EncoderCudaGraphManager) -> None:
        self.graphs = graphs
        self._encoder = encoder
        self.modality = encoder.modality  # type: ignore[misc]
        self.width, self.dtype, self.device = encoder.width, encoder.dtype, encoder.device
        self.module = encoder.module

    @classmethod
    def load(
        cls, path: Path, *, device: torch.device, dtype: torch.dtype, quantize: bool = False
    ) -> EncoderSide:
        raise NotImplementedError("made of an encoder side that is loaded")

    def preprocess(self, media: Media, options: Options) -> PreparedItem:
        return self._encoder.preprocess(media, options)

    def preprocess_video(self, clip: Clip, options: Options) -> PreparedItem:
        return self._encoder.preprocess_video(clip, options)

    def preprocess_sound(self, audio: AudioFile, options: Options) -> PreparedItem:
        return self._encoder.preprocess_sound(audio, options)

    def extra_video_rows(self) -> int | None:
        return self._encoder.extra_video_rows()

    def video_segments(self, info: ClipInfo, options: Options, frames: int, extra_rows: int) -> SegmentEnds:
        return self._encoder.video_segments(info, options, frames, extra_rows)

    def sample(self) -> Media:
        return self._encoder.sample()

    def encode(self, items: Sequence[PreparedItem]) -> list[torch.Tensor]:
        return self.graphs.encode(items)


def with_graphs(config: EncoderConfig, encoder: EncoderSide) -> EncoderSide:
    """The encoder side with its graphs captured, or itself where --encoder-graphs asks for none.

    ConfigError where `static` or `cuda` cannot be had. With `auto` the worker then starts without graphs.
    """
    backend = graph_backend(config.encoder_graphs, encoder.device, _FLAG)
    if backend is None:
        return encoder
    try:
        tower = _graph_tower(encoder)
        limits = graph_limits(config, encoder, tower.get_encoder_cudagraph_config())
        manager = EncoderCudaGraphManager(tower, backend, limits)
        _capture(manager, encoder.device)
    except _NoGraphs as error:
        check_device(error.__cause__, encoder.device)
        if config.encoder_graphs != "auto":
            raise ConfigError(f"{_FLAG} {config.encoder_graphs}: {error}: give {_FLAG} off") from error
        logger.warning("encoder graphs are off: %s", error, exc_info=error.__cause__)
        return encoder
    return GraphEncoder(encoder, manager)


class _NoGraphs(Exception):
    """The tower has no form of fixed shape, or its capture failed."""


def _graph_tower(encoder: EncoderSide) -> GraphTower:
    if not isinstance(encoder, SupportsEncoderCudaGraph):
        raise _NoGraphs(f"{type(encoder).__name__} has no form of fixed shape")
    return encoder


def _capture(manager: EncoderCudaGraphManager, device: torch.device) -> None:
    memory = memory_of(device)
    try:
        before = memory.free()
        manager.capture()
        if not Device.of(device).on_host:
            manager.device_bytes = max(0, before - memory.free())
    except Exception as error:
        raise _NoGraphs(f"the tower could not be captured ({error})") from error


def graph_limits(config: EncoderConfig, encoder: EncoderSide, graph: EncoderCudaGraphConfig) -> GraphLimits:
    """Budgets and limits by the flags; by default budgets up to the rows of one --encoder-batch-patches.

    By default a replay takes as many items as smallest budgets go into the largest one, and the frames of a
    segment of a video.
    """
    multiple, min_budget = graph.token_multiple, graph.min_token_budget
    if config.encoder_graph_budgets:
        budgets = parse_budgets(config.encoder_graph_budgets, multiple)
    else:
        sample = encoder.preprocess(encoder.sample(), {})
        rows = config.batch_patches * sample.rows // max(1, sample.cost)
        budgets = token_budgets(min_budget, min(rows, graph.max_token_budget or rows), multiple)
    items = config.encoder_graph_max_items or max(1, budgets[-1] // min_budget)
    # Of pictures each is one frame; a frame of a video has at least four rows.
    segment = config.video_segment_frames if "video" in graph.modalities else 0
    frames = config.encoder_graph_max_frames or max(items, min(segment, budgets[-1] // 4))
    return GraphLimits(budgets, items, frames)


def uncounted_bytes(encoder: EncoderSide) -> int:
    """Device memory of the tower's graphs that torch does not report as allocated."""
    graphs = encoder.graphs if isinstance(encoder, GraphEncoder) else None
    return 0 if graphs is None else max(0, graphs.device_bytes - graphs.nbytes)


class GraphMetrics:
    """Counts replays and eager items in the worker's metrics."""

    def __init__(self, metrics: EncoderMetrics, model_name: str) -> None:
        self._metrics = metrics
        self._model_name = model_name

    def hit(self, budget: int, items: int, rows: int) -> None:
        """Counts one replay of this budget, with its number of items and their rows in total."""
        self._metrics.graph_hits.inc(items)
        self._metrics.graph_padding_rows.inc(budget - rows)
        self._metrics.graph_replays.labels(self._model_name, str(budget)).inc()

    def miss(self, items: int) -> None:
        """So many items were encoded eagerly."""
        self._metrics.graph_misses.inc(items)


def count_graphs(encoder: EncoderSide, metrics: EncoderMetrics, model_name: str) -> None:
    """From now on counts here what becomes of items, where the encoder side has graphs."""
    if isinstance(encoder, GraphEncoder):
        encoder.graphs.counts = GraphMetrics(metrics, model_name)
        metrics.graph_buffer_bytes.set(encoder.graphs.nbytes)
