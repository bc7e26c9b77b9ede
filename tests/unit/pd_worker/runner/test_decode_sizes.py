"""Sizes of decode graphs, and the memory that they take."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from support.engine.engine_cell import Checkpoint
from support.graphs import RecordingBackend
from triptych.base.config import PDConfig
from triptych.base.machine.graphs import CapturedGraph, GraphBackend
from triptych.pd_worker.runner import memory_profile
from triptych.pd_worker.runner.decode_graphs import (
    DecodeSize,
    decode_sizes,
    powers_of_two,
    shown,
    smallest_fit,
)
from triptych.pd_worker.runner.graph_start import graph_bytes, measured_graph_bytes, sizes_of


@pytest.mark.parametrize(
    ("first", "last", "powers"),
    [(1, 8, [1, 2, 4, 8]), (1, 6, [1, 2, 4, 6]), (1, 1, [1]), (16, 100, [16, 32, 64, 100]), (16, 9, [9])],
)
def test_powers_of_two_end_with_the_most_even_where_that_is_none(first, last, powers):
    assert powers_of_two(first, last) == powers


def test_a_graph_for_each_power_of_two_of_sequences_with_tables_for_the_longest() -> None:
    sizes = decode_sizes(6, 100)
    assert sizes == [DecodeSize(batch, 100) for batch in (1, 2, 4, 6)]
    assert shown(sizes) == "4 sizes up to 6 sequences of 100 blocks"


def test_tables_of_encoder_outputs_hold_the_longest_too() -> None:
    sizes = decode_sizes(1, 28, 64)
    assert sizes == [DecodeSize(1, 28, 64)]
    assert shown(sizes) == "1 sizes up to 1 sequences of 28 blocks and 64 of an encoder output"


@pytest.mark.parametrize(
    ("needed", "size"),
    [
        (DecodeSize(1, 1), DecodeSize(1, 64)),
        (DecodeSize(3, 17), DecodeSize(4, 64)),
        (DecodeSize(8, 64), DecodeSize(8, 64)),
        (DecodeSize(9, 1), None),
        (DecodeSize(1, 65), None),
    ],
)
def test_the_smallest_size_that_holds_a_step_is_taken(needed: DecodeSize, size: DecodeSize | None) -> None:
    assert smallest_fit(decode_sizes(8, 64), needed) == size


@settings(max_examples=50, deadline=None)
@given(st.integers(1, 70), st.data())
def test_every_step_has_a_size_and_less_than_half_of_its_rows_are_padding(seqs, data):
    needed = DecodeSize(data.draw(st.integers(1, seqs)), 3, 5)
    size = smallest_fit(decode_sizes(seqs, 9, 20), needed)
    assert size is not None and (size.batch < 2 * needed.batch or size.batch == 1)


SIZES = [DecodeSize(batch, 16) for batch in (1, 2, 4, 8, 16, 32, 64)]


@pytest.mark.parametrize(
    ("sizes", "losses", "total"),
    [
        (SIZES, [100, 8, 6, 4], 100 + 18 + 3 * 6),
        (SIZES, [100, 0, 0, 1], 100 + 1 + 1),
        (SIZES, [100, -5, 0, 0], 100),
        (SIZES[:2], [100, 8], 108),
        (SIZES[:1], [100], 100),
    ],
)
def test_the_largest_are_captured_and_the_rest_count_as_those_after_the_first(sizes, losses, total):
    free, captured = [1000], list[DecodeSize]()

    def capture(size: DecodeSize) -> None:
        free[0] -= losses[len(captured)]
        captured.append(size)

    assert graph_bytes(sizes, capture, lambda: free[0]) == total
    assert captured == sorted(sizes, reverse=True)[:4]


class Memory:
    """A device that loses 7 bytes to each graph; its calls and the captures are in order."""

    share = 0.5

    def __init__(self) -> None:
        self.calls, self.bytes = list[str](), 1 << 30

    def free(self) -> int:
        self.calls.append("free")
        return self.bytes

    def used(self) -> int:
        return 0

    def reset_peak(self) -> None:
        self.calls.append("reset")

    def peak(self) -> int:
        return 0


class Backend(GraphBackend):
    """Records, and takes memory; the graph `fails` cannot be captured."""

    mode = "static"

    def __init__(self, memory: Memory, fails: int = -1) -> None:
        self.memory, self.fails, self.captured = memory, fails, 0

    def capture(self, run):  # type: ignore[no-untyped-def]
        if self.captured == self.fails:
            raise torch.OutOfMemoryError("no")
        self.captured += 1
        self.memory.calls.append("capture")
        self.memory.bytes -= 7
        graph: CapturedGraph = RecordingBackend().capture(run)
        return graph


@pytest.fixture(scope="module")
def checkpoint() -> Checkpoint:
    return Checkpoint.open("qwen3_vl")


CONFIG = PDConfig(max_num_seqs=8, max_model_len=4096, decode_graphs="cuda")


def test_free_memory_is_read_around_each_capture_with_torchs_cache_empty(checkpoint: Checkpoint) -> None:
    memory = Memory()
    nbytes = measured_graph_bytes(CONFIG, checkpoint.decoder, memory, Backend(memory))
    assert nbytes == 7 * len(sizes_of(CONFIG, checkpoint.decoder))
    assert memory.calls == ["reset", "free", *["capture", "free"] * 4, "reset"]


def test_a_graph_that_cannot_be_captured_leaves_the_estimate(checkpoint, caplog):
    memory = Memory()
    assert measured_graph_bytes(CONFIG, checkpoint.decoder, memory, Backend(memory, fails=2)) is None
    assert "estimated" in caplog.text and memory.calls[-1] == "reset"


def test_an_accelerators_plan_has_the_measured_memory(checkpoint, monkeypatch):
    monkeypatch.setattr(memory_profile, "measured_graph_bytes", lambda *_: 123456)
    monkeypatch.setattr(memory_profile, "activation_bytes", lambda *_: 0)
    device = checkpoint.decoder.device
    try:
        checkpoint.decoder.device = torch.device("cuda", 0)
        plan = memory_profile.size_kv_memory(CONFIG, checkpoint.decoder, Memory())
    finally:
        checkpoint.decoder.device = device
    assert plan.needs.graphs == 123456 + plan.needs.block, "and the spare block"
