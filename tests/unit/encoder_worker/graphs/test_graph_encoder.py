"""Graphs of an encoder, and the sizes that they are captured at."""

from __future__ import annotations

import logging
from dataclasses import replace
from types import SimpleNamespace
from unittest.mock import ANY

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

from support.data.checkpoints import build_checkpoint
from support.videos.cases import prepared
from support.videos.classes import CLASSES
from support.videos.clips import make_clip
from triptych.base.config import EncoderConfig
from triptych.base.errors import ConfigError
from triptych.base.machine import graphs
from triptych.base.machine.device import Device
from triptych.base.machine.graphs import EagerStatic
from triptych.base.metrics import EncoderMetrics
from triptych.encoder_worker.graphs import graph_encoder
from triptych.encoder_worker.graphs.graph_encoder import (
    count_graphs,
    uncounted_bytes,
    with_graphs,
)
from triptych.encoder_worker.graphs.manager import BudgetGraphMetadata, GraphCounts, poison, write_buffers
from triptych.encoder_worker.graphs.packing import parse_budgets, smallest_fitting, token_budgets
from triptych.encoder_worker.loading import check_encoder_memory
from triptych.models.base import EncoderSide
from triptych.models.encoder_graph import EncoderCudaGraphConfig, pad_repeat_last
from triptych.models.registry import load_encoder

STATIC = EncoderConfig(encoder_graphs="static")


@pytest.fixture(scope="module")
def encoder() -> EncoderSide:
    return load_encoder(build_checkpoint("qwen3_vl"), device=torch.device("cpu"), dtype=torch.float32)


def test_by_default_a_cpu_has_no_graphs_and_a_gpu_has(encoder, monkeypatch):
    assert with_graphs(EncoderConfig(), encoder) is encoder
    monkeypatch.setattr(graphs, "CudaGraph", lambda device: EagerStatic())
    backend = graphs.graph_backend(EncoderConfig().encoder_graphs, torch.device("cuda"), "--encoder-graphs")
    assert isinstance(backend, EagerStatic)


def test_cuda_graphs_need_cuda(encoder: EncoderSide) -> None:
    with pytest.raises(ConfigError, match="--encoder-graphs cuda needs --device cuda"):
        with_graphs(EncoderConfig(encoder_graphs="cuda"), encoder)


class Unready(Exception):
    pass


def test_a_capture_that_fails_ends_the_start_or_with_auto_leaves_the_tower_eager(
    encoder: EncoderSide, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(values: dict[str, torch.Tensor]) -> torch.Tensor:
        raise Unready("operation not permitted when stream is capturing")

    monkeypatch.setattr(encoder, "encoder_cudagraph_forward", fail)
    with pytest.raises(
        ConfigError, match=r"--encoder-graphs static: the tower could not be captured \(operation not"
    ):
        with_graphs(STATIC, encoder)
    # `auto` with a GPU, whose backend is another one here.
    monkeypatch.setattr(graph_encoder, "graph_backend", lambda *_: EagerStatic())
    with caplog.at_level(logging.WARNING):
        assert with_graphs(replace(STATIC, encoder_graphs="auto"), encoder) is encoder
    assert "encoder graphs are off: the tower could not be captured" in caplog.text


def test_a_tower_without_a_form_of_fixed_shape_is_refused(encoder: EncoderSide) -> None:
    class Plain(EncoderSide):
        load = preprocess = encode = None  # type: ignore[assignment]

    plain = Plain()
    plain.device = torch.device("cpu")
    with pytest.raises(ConfigError, match="--encoder-graphs static: Plain has no form of fixed shape: give"):
        with_graphs(STATIC, plain)


def test_it_encodes_like_the_tower_and_counts_in_the_worker_s_metrics(encoder: EncoderSide) -> None:
    graphed = with_graphs(STATIC, encoder)
    metrics = EncoderMetrics("m")
    count_graphs(encoder, metrics, "m")
    count_graphs(graphed, metrics, "m")
    items = [
        graphed.preprocess(Image.new("RGB", size, "red"), {}) for size in ((64, 64), (400, 600), (90, 40))
    ]
    for own, output in zip(encoder.encode(items), graphed.encode(items), strict=True):
        torch.testing.assert_close(output, own, atol=1e-5, rtol=0)
    value = metrics.registry.get_sample_value
    labels = {"model_name": "m"}
    assert value("triptych_encoder_graph_hits_total", labels) == 2
    assert value("triptych_encoder_graph_misses_total", labels) == 1
    assert value("triptych_encoder_graph_replays_total", labels | {"token_budget": "64"}) == 1
    padding = 64 - items[0].rows - items[2].rows
    assert value("triptych_encoder_graph_padding_rows_total", labels) == padding
    assert value("triptych_encoder_graph_buffer_bytes", labels) == graphed.graphs.nbytes > 0


@pytest.mark.parametrize("family", ["Qwen3VL", "Qwen2_5_VL"])
@pytest.mark.parametrize(("frames", "missed"), [(0, 0), (4, 1)])
def test_a_video_is_packed_with_pictures_where_its_frames_fit(family, frames, missed, tmp_path):
    case = next(entry for entry in CLASSES if entry.family == family).case(tmp_path, make_clip())
    plain = load_encoder(case.model, device=torch.device("cpu"), dtype=torch.float32)
    graphs = with_graphs(replace(STATIC, encoder_graph_max_frames=frames), plain)
    graphs.graphs._poisoned = True
    # Of one pair of frames, and of more than four.
    short, long = (
        prepared(replace(case, clip=make_clip(size=(16, 24), frames=number, rate=2)), graphs)
        for number in (2, 10)
    )
    assert (short.grid_thw[0], long.grid_thw[0]) == (1, 5)
    picture = graphs.preprocess(Image.new("RGB", (40, 16), "red"), {})
    items = [picture, long, short, picture]
    for own, output in zip(plain.encode(items), graphs.encode(items), strict=True):
        torch.testing.assert_close(output, own, atol=1e-5, rtol=0)
    assert graphs.graphs.counts == GraphCounts(4 - missed, missed, ANY, ANY)


class Cuda(Device):
    """A device with memory of its own; its tensors stay where they are."""

    on_host = False


def test_what_a_gpu_loses_to_its_graphs_counts_beside_the_weights(encoder, monkeypatch):
    losses = iter((900 << 20, 600 << 20))
    monkeypatch.setattr(graph_encoder.Device, "of", Cuda)
    monkeypatch.setattr(graph_encoder, "memory_of", lambda _: SimpleNamespace(free=lambda: next(losses)))
    graphed = with_graphs(STATIC, encoder)
    assert uncounted_bytes(graphed) == (300 << 20) - graphed.graphs.nbytes > 0
    assert uncounted_bytes(encoder) == 0
    memory = SimpleNamespace(
        reset_peak=lambda: None, used=lambda: 10, peak=lambda: 15, free=lambda: 1 << 30, share=0.5
    )
    held = 10 + uncounted_bytes(graphed)
    config = EncoderConfig(device_memory=held + 4, max_image_pixels=128 * 128, encoder_batch_patches=64)
    with pytest.raises(ConfigError, match=r"needs 2\d\d.* MiB for its weights and 5 "):
        check_encoder_memory(config, graphed, memory)
    assert check_encoder_memory(replace(config, device_memory=held + 5), graphed, memory) == 5


CONFIG = EncoderCudaGraphConfig(
    ("image",), ("pixel_values", "cu_seqlens"), 2, {"cu_seqlens": pad_repeat_last}
)


def buffers() -> dict[str, torch.Tensor]:
    made = {"pixel_values": torch.empty(4, 2), "cu_seqlens": torch.empty(4, dtype=torch.int32)}
    poison(made)
    return made


def values(rows: int = 3) -> dict[str, torch.Tensor]:
    return {"pixel_values": torch.ones(rows, 2), "cu_seqlens": torch.tensor([0, rows], dtype=torch.int32)}


def test_a_replay_writes_values_and_padding_over_all_that_was_there() -> None:
    written = buffers()
    write_buffers(written, values(), CONFIG)
    assert written["pixel_values"].tolist() == [[1, 1]] * 3 + [[0, 0]]
    assert written["cu_seqlens"].tolist() == [0, 3, 3, 3]


def test_offsets_of_two_buffers_are_padded_apart() -> None:
    """As if both were one buffer, the first's tail would hold the second's offsets."""
    config = EncoderCudaGraphConfig(
        ("image",),
        ("cu_seqlens", "cu_window_seqlens"),
        2,
        {"cu_seqlens": pad_repeat_last, "cu_window_seqlens": pad_repeat_last},
    )
    held = {key: torch.empty(5, dtype=torch.int32) for key in config.buffer_keys}
    poison(held)
    write_buffers(
        held,
        {"cu_seqlens": torch.tensor([0, 8]).int(), "cu_window_seqlens": torch.tensor([0, 4, 8]).int()},
        config,
    )
    assert held["cu_seqlens"].tolist() == [0, 8, 8, 8, 8]
    assert held["cu_window_seqlens"].tolist() == [0, 4, 8, 8, 8]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"cu_seqlens": None}, r"missing \['cu_seqlens'\], not expected \[\]"),
        (
            {"pixel_valuescu_seqlens": torch.ones(1)},
            r"missing \[\], not expected \['pixel_valuescu_seqlens'\]",
        ),
        ({"pixel_values": torch.ones(5, 2)}, r"pixel_values: values \(5, 2\) do not fit the buffer \(4, 2\)"),
        ({"pixel_values": torch.ones(3, 1)}, r"pixel_values: values \(3, 1\) do not fit"),
        ({"pixel_values": torch.ones(3)}, r"pixel_values: values \(3,\) do not fit"),
        ({"cu_seqlens": torch.tensor([0.0, 3.0])}, "cu_seqlens: values of torch.float32 for a buffer of"),
    ],
)
def test_values_that_do_not_fit_are_an_error_and_nothing_is_written(change, message):
    held = buffers()
    given = {key: value for key, value in (values() | change).items() if value is not None}
    with pytest.raises(ValueError, match=message):
        write_buffers(held, given, CONFIG)
    assert held["pixel_values"].isnan().all()


def test_the_bytes_of_a_budget_are_those_of_its_buffers() -> None:
    graph = EagerStatic().capture(lambda: None)
    made = BudgetGraphMetadata(4, 2, 2, graph, buffers(), torch.empty(4, 2))
    assert made.nbytes == 4 * 2 * 4 + 4 * 4 + 4 * 2 * 4


@pytest.mark.parametrize(
    ("minimum", "maximum", "multiple", "budgets"),
    [
        (256, 4096, 1, (256, 512, 1024, 2048, 4096)),
        (100, 350, 1, (100, 200, 350)),
        (100, 100, 1, (100,)),
        (100, 101, 1, (100, 101)),
        (64, 16, 1, (64,)),
        (576, 5000, 576, (576, 1152, 2304, 4608)),
        (576, 100, 576, (576,)),
    ],
)
def test_budgets_double_from_the_least_and_end_with_the_most(minimum, maximum, multiple, budgets):
    assert token_budgets(minimum, maximum, multiple) == budgets


@settings(deadline=None, max_examples=50)
@given(st.integers(1, 50), st.integers(1, 8), st.integers(1, 10_000))
def test_budgets_ascend_by_at_most_a_factor_of_two_and_are_multiples(multiple, items, maximum):
    budgets = token_budgets(multiple * items, maximum, multiple)
    assert budgets[0] == multiple * items
    assert all(one < other <= 2 * one for one, other in zip(budgets, budgets[1:], strict=False))
    assert all(budget % multiple == 0 for budget in budgets)
    assert budgets[-1] == budgets[0] or maximum - multiple < budgets[-1] <= maximum


def test_given_budgets_are_sorted_and_taken_once() -> None:
    assert parse_budgets("512,256, 512") == (256, 512)
    assert parse_budgets("1152,576", 576) == (576, 1152)


@pytest.mark.parametrize(
    ("text", "multiple", "message"),
    [
        ("256,many", 1, "--encoder-graph-budgets 256,many: give numbers of output rows"),
        ("0", 1, "--encoder-graph-budgets 0: 0 is below 1"),
        ("-576", 576, "-576 is below 1"),
        ("576,600", 576, "600 is no multiple of 576, the rows of one item of this model: give .*576,1152"),
    ],
)
def test_a_budget_that_cannot_be_is_refused_with_the_flag(text: str, multiple: int, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        parse_budgets(text, multiple)


def test_the_smallest_budget_with_room_is_taken() -> None:
    budgets = (100, 200, 350)
    assert [smallest_fitting(budgets, rows) for rows in (1, 100, 101, 350)] == [100, 100, 200, 350]
    assert smallest_fitting(budgets, 351) is None
