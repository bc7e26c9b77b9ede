"""The third part on a GPU: towers without and with graphs, copies to the host, transfers of embeddings."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from PIL import Image

from benchmarks.gpu.device_limits import DeviceLimits, known_limits, tower_work
from benchmarks.gpu.engine_rounds import median_seconds
from benchmarks.gpu.part_page import PartPage
from benchmarks.gpu.random_models import random_weights, write_model
from benchmarks.micro.hot_paths import measure_transfers, transfer_rows
from triptych.apps.launch.embedded_store import EmbeddedStore
from triptych.base.config import MIB
from triptych.base.machine.device import Device
from triptych.base.machine.graphs import graph_backend
from triptych.encoder_worker.graphs.manager import EncoderCudaGraphManager, GraphTower
from triptych.encoder_worker.graphs.packing import GraphLimits
from triptych.encoder_worker.host_copier import HostCopier
from triptych.models.base import EncoderSide, Media, PreparedItem
from triptych.models.encoder_graph import SupportsEncoderCudaGraph
from triptych.models.registry import load_encoder

_COLUMNS = ("tower", "rows", "how", "time", "share of the limit", "largest difference")


class NoiseFile:
    """An `AudioFile` of noise that fills a window of any model."""

    digest = "noise"

    def waveform(self, rate: int) -> np.ndarray:
        return np.random.default_rng(0).standard_normal(30 * rate).astype(np.float32) * 0.1


@dataclass(frozen=True, slots=True)
class Medium:
    """One batch of a tower: `count` equal inputs, called `name` in the report."""

    name: str
    media: Media
    count: int
    #: How the encoder reads it.
    form: str = ""


def _picture(width: int, height: int, count: int) -> Medium:
    pixels = np.random.default_rng(count).integers(0, 256, (height, width, 3), dtype=np.uint8)
    return Medium(f"{count} x {width} x {height}", Image.fromarray(pixels), count)


def _media(family: str, *, small: bool) -> Iterator[Medium]:
    if family == "whisper":
        for count in (1, 2) if small else (1, 4):
            yield Medium(f"whisper, {count} window{'s' * (count > 1)}", NoiseFile(), count)
    elif family == "bart":
        length = 32 if small else 512
        ids = np.random.default_rng(0).integers(5, 200, length).astype("<u4").tobytes()
        for count in (1, 2) if small else (1, 16):
            yield Medium(f"bart, {count} x {length} tokens", ids, count, "token_ids")
    elif small:
        yield from (_picture(96, 96, 1), _picture(96, 96, 2), _picture(128, 64, 1))
    else:
        yield from (_picture(448, 448, 1), _picture(448, 448, 16))
        yield from (_picture(1920, 1080, 1), _picture(1920, 1080, 2))


def run(page: PartPage, device: str, *, small: bool) -> None:
    """The whole part; `small` where no GPU is there."""
    target, dtype = torch.device(device), torch.float32 if small else torch.bfloat16
    Device.of(target).open()
    limits = known_limits(device, dtype)
    page.write(limits.said())
    with tempfile.TemporaryDirectory() as folder:
        for family in ("qwen3_vl", "whisper", "bart"):
            with page.case(f"tower of {family}"):
                path = write_model(family, Path(folder) / family, small=small)
                with random_weights(target, dtype):
                    encoder = load_encoder(path, device=target, dtype=dtype)
                _towers(page, encoder, list(_media(family, small=small)), limits, small=small)
                del encoder
                Device.of(target).empty_cache()
    with page.case("copies to the host"):
        _copies(page, target)
    with page.case("transfers"):
        _transfers(page, 1 if small else 10)


def _towers(
    page: PartPage, encoder: EncoderSide, media: Sequence[Medium], limits: DeviceLimits, *, small: bool
) -> None:
    page.table(*_COLUMNS)
    repeats = 1 if small else 10
    for medium in media:
        with page.case(medium.name):
            options = {"form": medium.form} if medium.form else {}
            began = time.perf_counter()
            item = encoder.preprocess(medium.media, options)
            page.row(
                medium.name, item.rows, "preprocessing of one", _shown(time.perf_counter() - began), "", ""
            )
            items = [item] * medium.count
            work, rows, device = tower_work(encoder, items), item.rows * medium.count, encoder.device.type
            seconds = median_seconds(lambda i=items: encoder.encode(i), device, repeats)  # type: ignore[misc]
            page.row(medium.name, rows, "eager", _shown(seconds), work.ratio(seconds, limits), "")
            manager = _captured(encoder, items)
            seconds = median_seconds(lambda i=items, m=manager: m.encode(i), device, repeats)  # type: ignore[misc]
            share, off = work.ratio(seconds, limits), _difference(encoder, manager, items)
            page.row(medium.name, rows, "graph", _shown(seconds), share, f"{off:.1e}")
            del manager


def _shown(seconds: float) -> str:
    return f"{seconds * 1e3:.2f} ms"


def _difference(
    encoder: EncoderSide, manager: EncoderCudaGraphManager, items: Sequence[PreparedItem]
) -> float:
    """The largest difference of a replay's rows, as a share of the largest element."""
    eager, replayed = torch.cat(encoder.encode(items)), torch.cat(manager.encode(items))
    if not torch.isfinite(replayed).all():
        raise RuntimeError("the rows of a replay have NaN or infinity")
    return float((replayed.float() - eager.float()).abs().max() / eager.float().abs().max())


@torch.inference_mode()
def _captured(encoder: EncoderSide, items: Sequence[PreparedItem]) -> EncoderCudaGraphManager:
    """A manager with one graph, of just these items."""
    assert isinstance(encoder, SupportsEncoderCudaGraph)
    tower: GraphTower = encoder
    backend = graph_backend(
        "cuda" if Device.of(encoder.device).captures else "static", encoder.device, "--encoder-graphs"
    )
    assert backend is not None
    multiple = tower.get_encoder_cudagraph_config().token_multiple
    budget = -(-sum(item.rows for item in items) // multiple) * multiple
    frames = tower.encoder_cudagraph_item_frames(items[0]) * len(items)
    manager = EncoderCudaGraphManager(tower, backend, GraphLimits((budget,), len(items), frames))
    manager.capture()
    return manager


def _copies(page: PartPage, device: torch.device) -> None:
    """An embedding from the device to the host: as encoder workers copy and check it, and by torch alone."""
    page.table("device to host", "MB", "as workers do, checked", "torch alone", "GB/s")
    copier = HostCopier(device)
    for name, rows in (("448 px", 196), ("1080p", 2040)):
        output = torch.randn(rows, 16384, device=device, dtype=torch.bfloat16)
        ours = median_seconds(lambda o=output: copier([o]), device.type, 10)  # type: ignore[misc]
        plain = median_seconds(lambda o=output: o.to("cpu", copy=True), device.type, 10)  # type: ignore[misc]
        page.row(name, f"{output.nbytes / 1e6:.1f}", f"{ours * 1e3:.2f} ms", f"{plain * 1e3:.2f} ms",
                 f"{output.nbytes / ours / 1e9:.1f}")  # fmt: skip


def _transfers(page: PartPage, repeats: int) -> None:
    """From the encoder worker's host memory to a checked tensor in the PD worker's process, on one host."""
    with tempfile.TemporaryDirectory() as folder, EmbeddedStore(Path(folder), 1024 * MIB) as store:
        turns = measure_transfers(store.url, repeats)
    page.table("embedding", "path", "ms, median (best)", "CPU ms")
    for row in transfer_rows(turns):
        page.row(*row)
