"""Encoder graphs of one checkpoint against ordinary tower calls: capture, memory, speed, and equal rows.

    python -m benchmarks.gpu.encoder_graphs MODEL [--device cuda] [--dtype bfloat16] [--side 640]
        [--budgets 256,1024] [--write]
    python -m benchmarks.gpu.encoder_graphs MODEL --device cpu --dtype float32 --side 64 --repeats 1

On a CPU the buffers are the same and the calls are plain ones. Items are pictures of `side` pixels, texts of
`tokens` tokens or sounds of one window, by the model. Memory is what the allocator holds more after a
budget's capture than before it; a smaller budget finds room in what a larger one has left.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import torch
from PIL import Image

from benchmarks.gpu.device_limits import command_of, gpu_parser, page, table
from benchmarks.gpu.engine import median_seconds
from benchmarks.micro.engine_decode import synchronize
from benchmarks.result_page import RESULTS, publish
from triptych.base.config import format_size
from triptych.base.machine.graphs import CapturedGraph, GraphBackend, graph_backend
from triptych.encoder_worker.graphs.manager import EncoderCudaGraphManager, GraphTower
from triptych.encoder_worker.graphs.packing import GraphLimits, parse_budgets, token_budgets
from triptych.models.base import EncoderSide, Media, PreparedItem
from triptych.models.encoder_graph import SupportsEncoderCudaGraph
from triptych.models.registry import load_encoder

RESULT = RESULTS / "gpu_encoder_graphs.md"
COUNTS = (1, 4, 16)


class NoiseFile:
    """An `AudioFile` of noise that fills a window of any model."""

    digest = "noise"

    def waveform(self, rate: int) -> np.ndarray:
        return np.random.default_rng(0).standard_normal(30 * rate).astype(np.float32) * 0.1


class TimedCaptures(GraphBackend):
    """A backend that notes the time and the memory after each capture."""

    def __init__(self, inner: GraphBackend, device: torch.device) -> None:
        self.mode = inner.mode  # type: ignore[misc]
        self._inner, self._device = inner, device
        self.moments = [self._moment()]

    def capture(self, run: Callable[[], object]) -> CapturedGraph:
        graph = self._inner.capture(run)
        self.moments.append(self._moment())
        return graph

    def _moment(self) -> tuple[float, int]:
        synchronize(self._device.type)
        held = torch.cuda.memory_reserved(self._device) if self._device.type == "cuda" else 0
        return time.perf_counter(), held


@dataclass(frozen=True)
class Subject:
    """The encoder with its captured graphs, and one item per count to be timed."""

    encoder: EncoderSide
    manager: EncoderCudaGraphManager
    captures: TimedCaptures
    items: Sequence[PreparedItem]


def media(encoder: EncoderSide, side: int, tokens: int, number: int) -> tuple[Media, dict[str, str]]:
    """The n-th medium of the encoder's modality, and the options that go with it."""
    random = np.random.default_rng(number)
    if encoder.modality == "text":
        # Small ids are in every vocabulary.
        return random.integers(5, 200, tokens).astype("<u4").tobytes(), {"form": "token_ids"}
    if encoder.modality == "audio":
        return NoiseFile(), {}
    return Image.fromarray(random.integers(0, 256, (side, side, 3), dtype=np.uint8)), {}


def capture(arguments: argparse.Namespace) -> Subject:
    """Loads the checkpoint and captures its graphs."""
    device = torch.device(arguments.device)
    encoder = load_encoder(arguments.model, device=device, dtype=getattr(torch, arguments.dtype))
    made = [media(encoder, arguments.side, arguments.tokens, number) for number in range(max(COUNTS))]
    items = [encoder.preprocess(medium, options) for medium, options in made]
    assert isinstance(encoder, SupportsEncoderCudaGraph), f"{arguments.model} has no encoder graphs"
    tower: GraphTower = encoder
    config = tower.get_encoder_cudagraph_config()
    if arguments.budgets:
        budgets = parse_budgets(arguments.budgets, config.token_multiple)
    else:
        # Rounded up, so that all items go into one replay.
        rows = -(-max(COUNTS) * items[0].rows // config.token_multiple) * config.token_multiple
        budgets = token_budgets(config.min_token_budget, rows, config.token_multiple)
    backend = graph_backend("cuda" if device.type == "cuda" else "static", device, "--device")
    assert backend is not None
    captures = TimedCaptures(backend, device)
    frames = tower.encoder_cudagraph_item_frames(items[0]) * max(COUNTS)
    manager = EncoderCudaGraphManager(tower, captures, GraphLimits(budgets, max(COUNTS), frames))
    manager.capture()
    return Subject(encoder, manager, captures, items)


def capture_rows(subject: Subject) -> list[str]:
    """One line per budget, the largest first, as they are captured."""
    lines = []
    budgets = sorted(subject.manager.limits.budgets, reverse=True)
    for budget, (before, after) in zip(budgets, pairwise(subject.captures.moments), strict=True):
        memory = format_size(after[1] - before[1]) if subject.encoder.device.type == "cuda" else "-"
        lines.append(f"| {budget} | {(after[0] - before[0]) * 1e3:.1f} ms | {memory} |")
    return lines


@torch.inference_mode()
def speed_rows(subject: Subject, repeats: int) -> list[str]:
    """One line per number of items; AssertionError where a row of a graph has NaN."""
    lines = []
    device = subject.encoder.device.type
    for count in COUNTS:
        items = subject.items[:count]
        eager, graphs = (
            median_seconds(lambda call=call, items=items: call(items), device, repeats)  # type: ignore[misc]
            for call in (subject.encoder.encode, subject.manager.encode)
        )
        wanted, found = torch.cat(subject.encoder.encode(items)), torch.cat(subject.manager.encode(items))
        assert torch.isfinite(found).all(), f"NaN or infinity in the rows of {count} items"
        difference = float((found.float() - wanted.float()).abs().max())
        lines.append(
            f"| {count} | {sum(item.rows for item in items)} | {eager * 1e3:.2f} ms | {graphs * 1e3:.2f} ms "
            f"| {eager / graphs:.2f}x | {difference:.1e} of {float(wanted.abs().max()):.1e} |"
        )
    return lines


def report(subject: Subject, arguments: argparse.Namespace) -> str:
    """The page: how it was made, captures, speed."""
    command = command_of("encoder_graphs", arguments, "side", "tokens", "repeats")
    command += f" --budgets {arguments.budgets}" if arguments.budgets else ""
    mode = subject.captures.mode
    body = [
        f"Buffers of all budgets: {format_size(subject.manager.nbytes)}.",
        "",
        *table("budget (rows)", "capture", "memory"),
        *capture_rows(subject),
        "",
        *table("items", "rows", "ordinary call", "graphs", "gain", "largest difference"),
        *speed_rows(subject, arguments.repeats),
    ]
    return page("Encoder graphs", command, arguments.device, f"graphs: {mode}; medians", body)


def main(argv: list[str] | None = None) -> None:
    parser = gpu_parser(__doc__, RESULT)
    parser.add_argument("--budgets", default="", help="output rows, as --encoder-graph-budgets takes them")
    arguments = parser.parse_args(argv)
    publish(report(capture(arguments), arguments), RESULT, write=arguments.write)


if __name__ == "__main__":
    main()
