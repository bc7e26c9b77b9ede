"""Models with recurrent layers in a whole engine: exact however prompts are cut, cached or preempted."""

from __future__ import annotations

import random
import time
from collections.abc import Sequence
from typing import Any

import pytest

from support.engine.engine_cell import EngineCell, engine_cell
from support.engine.engine_requests import make_request
from support.engine.hybrid_decoder import MODELS, HybridCheckpoint, HybridDecoder, generated
from triptych.base.config import MIB
from triptych.pd_worker.core.request import EngineRequest

TOKENS = 16


@pytest.fixture(scope="module", params=list(MODELS))
def name(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def checkpoint(name: str) -> HybridCheckpoint:
    return HybridCheckpoint(HybridDecoder(name))


def prompts(count: int, *, shared: int = 0, longest: int = 90) -> list[list[int]]:
    rng = random.Random(count + shared)
    common = [rng.randrange(1, 256) for _ in range(shared)]
    return [[*common, *(rng.randrange(1, 256) for _ in range(rng.randint(2, longest)))] for _ in range(count)]


def requests(token_ids: Sequence[Sequence[int]], max_tokens: int = TOKENS) -> list[EngineRequest]:
    now = time.monotonic()
    return [
        make_request(f"{now}-{i}", ids, max_tokens=max_tokens, arrival=now + i / 1e3, deadline=now + 60)
        for i, ids in enumerate(token_ids)
    ]


def assert_exact_answers(
    cell: EngineCell, name: str, token_ids: Sequence[Sequence[int]], count: int = TOKENS
) -> None:
    got = cell.finish(requests(token_ids, count))
    expected = [generated(name, ids, count) for ids in token_ids]
    assert got == expected
    assert len({token for answer in got for token in answer}) > count // 2, "too few tokens to show anything"


@pytest.mark.parametrize("budget", [1, 7, 16, 512])
def test_prompts_in_chunks_and_batches_are_answered_as_by_generate(
    checkpoint: Any, name: str, budget: int
) -> None:
    with engine_cell(checkpoint, connector=None, max_num_batched_tokens=budget, max_num_seqs=5) as cell:
        assert_exact_answers(cell, name, prompts(7))
        cell.assert_at_rest()


def test_equal_beginnings_are_computed_once(checkpoint: Any, name: str) -> None:
    token_ids = prompts(4, shared=70)
    with engine_cell(checkpoint, connector=None) as cell:
        for ids in (*token_ids, token_ids[0]):
            assert_exact_answers(cell, name, [ids], 24)
        # The first two compute all; two go on from where they part, and one from its last full block.
        hits = 64 * 2 + (len(token_ids[0]) - 1) // 16 * 16
        assert cell.metric("vllm:prefix_cache_hits_total") == hits
        assert cell.metric("triptych_pd_state_snapshots") > 0
        cell.assert_at_rest()


@pytest.mark.parametrize("preemption", ["recompute", "swap"])
def test_preempted_requests_are_answered_as_by_generate(checkpoint: Any, name: str, preemption: str) -> None:
    flags = {
        "preemption": preemption,
        "max_model_len": 128,
        "kv_memory": 20 * 16 * 1024,
        "swap_memory": 4 * MIB,
    }
    with engine_cell(checkpoint, connector=None, **flags) as cell:
        assert_exact_answers(cell, name, prompts(6, longest=60), 48)
        assert cell.metric("vllm:num_preemptions_total") > 0
        assert (cell.metric("triptych_pd_swapped_blocks_total") > 0) is (preemption == "swap")
        cell.assert_at_rest()


def test_a_resumed_request_goes_on_as_if_it_had_never_stopped(checkpoint: Any, name: str) -> None:
    token_ids = prompts(2)
    expected = [generated(name, ids, TOKENS) for ids in token_ids]
    with engine_cell(checkpoint, connector=None) as cell:
        resumed = requests(token_ids, TOKENS - 9)
        for request, tokens in zip(resumed, expected, strict=True):
            request.output_token_ids.extend(tokens[:9])
        assert cell.finish(resumed) == [tokens[9:] for tokens in expected]


def test_the_states_matter(checkpoint: Any, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The control: with states that are lost between chunks the answers differ."""
    zeros = "triptych.pd_worker.runner.state_pool.StatePool.end"
    monkeypatch.setattr(zeros, lambda self, chunks, states: [x.zero_() for x in self._slots.values()])
    token_ids = prompts(3)
    with engine_cell(checkpoint, connector=None) as cell:
        got = cell.finish(requests(token_ids))
    assert all(answer != generated(name, ids, TOKENS) for answer, ids in zip(got, token_ids, strict=True))
