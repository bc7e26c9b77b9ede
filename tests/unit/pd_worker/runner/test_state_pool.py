"""Steps as recurrent layers compute them: chunks whole or in pieces, and states kept where they end."""

from __future__ import annotations

import mmap
import sys
from pathlib import Path

import pytest
import torch

from support.engine.engine_requests import STORE, ModellessEngine, make_feature, make_request
from triptych.models.recurrent import StateShape
from triptych.pd_worker.core.outputs import ScheduledChunk
from triptych.pd_worker.runner.state_pool import StatePool, groups_of

KEYS = (("conv", 0, 0), ("recurrent", 2, 0))


@pytest.fixture
def chunk() -> ScheduledChunk:
    """Tokens [9, 100) of a prompt whose state is kept at 60 and 96, with pictures at [9, 29) and [40, 61)."""
    STORE.clear()
    engine = ModellessEngine(
        STORE, slots=4, snapshots=4, budget=128, block_size=4, capacity=4096, overlap=False
    )
    items = [make_feature("dog", 9, 20), make_feature("cat", 40, 21)]
    engine.add(make_request("a", 100, items, ready=[]))
    engine.arrive(*items)
    return engine.run_out()[-1].chunks[-1]


def test_a_chunk_is_one_where_layers_keep_states_inside(chunk: ScheduledChunk) -> None:
    assert groups_of([chunk], in_pieces=True) == [[chunk]]


def test_otherwise_it_is_computed_in_pieces_that_end_there(chunk: ScheduledChunk) -> None:
    pieces = [piece for (piece,) in groups_of([chunk], in_pieces=False)]
    assert [(piece.start, piece.end, piece.kept_at) for piece in pieces] == [
        (9, 60, [60]), (60, 96, [96]), (96, 100, []),
    ]  # fmt: skip
    assert [[(rows.first, rows.count, rows.at) for rows in piece.rows] for piece in pieces] == [
        [(0, 20, 0), (0, 20, 31)], [(20, 1, 0)], [],
    ]  # fmt: skip
    assert {(piece.slot, piece.block_ids) for piece in pieces} == {(chunk.slot, chunk.block_ids)}


def test_states_go_to_snapshots_inside_a_chunk_and_at_its_end(chunk: ScheduledChunk) -> None:
    pool = StatePool([StateShape(key, (2, 3), torch.float32) for key in KEYS], 8, 0, torch.device("cpu"))
    (piece,) = groups_of([chunk], in_pieces=False)[0]
    states = pool.begin([piece])
    states.update_conv_state(torch.ones(1, 2, 51), 0)
    states.update_recurrent_state(torch.full((1, 2, 3), 2.0), 2)
    pool.end([piece], states)
    (_, index) = piece.snapshots[0]
    assert pool.read(index).equal(pool.read(chunk.slot))
    assert pool.read(index).view(torch.float32).tolist() == [1.0] * 6 + [2.0] * 6


def resident() -> int:
    """Bytes of this process in memory."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * mmap.PAGESIZE


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
@pytest.mark.parametrize("slots", [(8, 0), (0, 8)], ids=["slots", "host slots"])
def test_the_first_snapshots_pay_for_no_pages(slots: tuple[int, int]) -> None:
    shapes = [StateShape(key, (4 << 20,), torch.float32) for key in KEYS]
    before = resident()
    pool = StatePool(shapes, *slots, torch.device("cpu"))
    assert resident() - before > 200 << 20
    del pool
