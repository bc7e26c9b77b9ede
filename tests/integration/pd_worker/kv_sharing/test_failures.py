"""What is lost, damaged, late, foreign or without room on the way of KV blocks is computed, and right."""

from __future__ import annotations

import asyncio
import itertools
import logging
import threading
import time
from collections.abc import Sequence
from types import SimpleNamespace

import pytest
import torch

from support.engine.engine_cell import Checkpoint, EngineCell, Prompt, engine_cell, reference
from support.engine.prompts import CAT, DOG
from support.engine.sharing import (
    BLOCK_SIZE,
    COMPUTED,
    LOADED,
    PATIENCE,
    SAVED,
    blocks_in,
    blocks_of,
    damage_blocks,
    new_root,
    rooted,
    sharing_cell,
    wait_for,
    wait_for_saves,
)
from triptych.base.types import FinishReason, ItemPlan
from triptych.pd_worker.core.request import EngineRequest
from triptych.pd_worker.kv_sharing import block_loads, transfers
from triptych.pd_worker.kv_sharing.kv_copier import KVCopier
from triptych.pd_worker.kv_sharing.transfers import KVTransfers
from triptych.store.embedding_store import EmbeddingStore

TOKENS = 8
PROMPTS = [
    Prompt("Compare the two, and say which one you would take.", (CAT, DOG)),
    Prompt("What is it?", (DOG,)),
]


def requests_of(cell: EngineCell, root: bytes) -> Sequence[EngineRequest]:
    path = cell.checkpoint.path
    made = [cell.request(p, reference(path, p, TOKENS).prompt_token_ids, TOKENS) for p in PROMPTS]
    return rooted(made, root)


def answer(cell: EngineCell, root: bytes) -> None:
    """All prompts at once, as `generate` answers them; returns once their blocks are saved."""
    path = cell.checkpoint.path
    assert cell.finish(requests_of(cell, root)) == [reference(path, p, TOKENS).token_ids for p in PROMPTS]
    wait_for_saves(cell)
    cell.assert_at_rest()


def test_a_store_that_was_flushed_costs_the_computing(checkpoint, server):
    root = new_root()
    with sharing_cell(checkpoint, server.url) as cell:
        answer(cell, root)
        server.call("FLUSHALL")
        with sharing_cell(checkpoint, server.url) as other:
            answer(other, root)
            assert other.metric(LOADED) == 0
            assert other.metric(SAVED) > 0, "it is saved again"


def test_a_store_that_is_away_costs_the_computing_and_is_used_once_it_is_back(
    checkpoint, server, monkeypatch, caplog
):
    monkeypatch.setattr(transfers, "_AWAY_SECONDS", 0.2)
    root = new_root()
    with (
        caplog.at_level(logging.WARNING),
        sharing_cell(checkpoint, server.url) as cell,
        sharing_cell(checkpoint, server.url) as other,
    ):
        answer(cell, root)
        server.kill()
        answer(other, new_root())
        assert other.metric(LOADED) == 0
        server.start()
        time.sleep(0.3)
        again = new_root()
        answer(cell, again)
        assert blocks_in(server)
        answer(other, again)
        assert other.metric(LOADED) > 0
    assert any("KV blocks are not shared for" in record.getMessage() for record in caplog.records)


def test_damaged_blocks_are_computed_deleted_and_saved_again(checkpoint, server, monkeypatch):
    load, begun = KVTransfers.load, itertools.count()

    async def later(transfers: KVTransfers, plan: ItemPlan) -> torch.Tensor | None:
        """What comes behind the first damaged value is still on the way when that one is known."""
        await asyncio.sleep(0.05 * next(begun))
        return await load(transfers, plan)

    monkeypatch.setattr(KVTransfers, "load", later)
    root = new_root()
    with sharing_cell(checkpoint, server.url) as cell:
        answer(cell, root)
    damage_blocks(server)
    with sharing_cell(checkpoint, server.url) as cell:
        answer(cell, root)
        assert cell.metric(LOADED) == 0
        assert cell.metric(SAVED) > 0
    with sharing_cell(checkpoint, server.url) as cell:
        answer(cell, root)
        assert cell.metric(LOADED) == BLOCK_SIZE * len(blocks_of(requests_of(cell, root), last=0))


def test_a_value_that_is_none_of_ours_under_a_blocks_key_is_replaced(checkpoint, server):
    root = new_root()
    with sharing_cell(checkpoint, server.url) as cell:
        answer(cell, root)
    for name in blocks_in(server):
        server.call("SET", name.decode(), "something else", "EX", 600)
    for loads in (False, True):
        with sharing_cell(checkpoint, server.url) as cell:
            answer(cell, root)
            assert (cell.metric(LOADED) > 0) is loads


def test_another_block_size_finds_nothing(checkpoint, server):
    root = new_root()
    with sharing_cell(checkpoint, server.url) as cell:
        answer(cell, root)
    with sharing_cell(checkpoint, server.url, block_size=2 * BLOCK_SIZE) as cell:
        answer(cell, root)
        assert cell.metric(LOADED) == 0


def test_another_dtype_finds_nothing_and_leaves_what_is_saved(checkpoint, server):
    """Even under one model key, which names the dtype as well: a key of both would hold either's value."""
    foreign = Checkpoint.open("qwen3_vl", dtype=torch.bfloat16)
    prompt = Prompt("Compare the two, and say which one of them you would take with you.")
    token_ids = reference(checkpoint.path, prompt, TOKENS).prompt_token_ids
    root, saved = new_root(), {}
    for each in (checkpoint, foreign):
        with sharing_cell(each, server.url) as cell:
            cell.finish(rooted([cell.request(prompt, token_ids, TOKENS)], root))
            wait_for_saves(cell)
            assert cell.metric(LOADED) == 0
            assert cell.metric(SAVED) > 0
        there = {name: server.call("GET", name.decode()) for name in blocks_in(server)}
        assert saved.items() <= there.items()
        saved = there


def test_two_workers_that_save_the_same_blocks_at_once_leave_one_value_each(checkpoint, server):
    root = new_root()
    with sharing_cell(checkpoint, server.url) as one, sharing_cell(checkpoint, server.url) as other:
        requests = [*requests_of(one, root)], [*requests_of(other, root)]
        for first, second in zip(*requests, strict=True):
            one.engine.submit(first)
            other.engine.submit(second)
        for cell, submitted in zip((one, other), requests, strict=True):
            for request in submitted:
                assert cell.wait(request.request_id, "finished").error is None
            wait_for_saves(cell)
    with sharing_cell(checkpoint, server.url) as cell:
        answer(cell, root)
        assert cell.metric(LOADED) > 0
        assert cell.metric(SAVED) == 0


class Gate:
    """Loads of blocks wait here until it is opened."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self._open, self.waiting = threading.Event(), threading.Event()
        load = EmbeddingStore.load

        async def slow(store, plan, into):
            if plan.modality == "kv":
                self.waiting.set()
                while not self._open.is_set():
                    await asyncio.sleep(0.01)
            return await load(store, plan, into)

        monkeypatch.setattr(EmbeddingStore, "load", slow)

    def open(self) -> None:
        self._open.set()


def test_a_copy_that_fails_ends_no_request_and_is_not_saved(checkpoint, server, monkeypatch):
    def take(self, blocks):
        raise RuntimeError("not enough memory: you tried to allocate 640 KiB")

    root = new_root()
    with sharing_cell(checkpoint, server.url) as cell:
        with monkeypatch.context() as failing:
            failing.setattr(KVCopier, "take", take)
            answer(cell, root)
        assert cell.metric(SAVED) == 0 and blocks_in(server) == []
        answer(cell, new_root())


def test_a_request_that_is_cancelled_while_its_blocks_are_on_the_way_is_dropped(
    checkpoint, server, monkeypatch
):
    root, gate = new_root(), Gate(monkeypatch)
    with sharing_cell(checkpoint, server.url) as cell:
        answer(cell, root)
    with sharing_cell(checkpoint, server.url) as cell:
        request = requests_of(cell, root)[0]
        cell.engine.submit(request)
        assert gate.waiting.wait(40)
        cell.engine.cancel([request.request_id], request.proxy_id)
        assert cell.wait(request.request_id, "finished").reason == FinishReason.ABORT
        gate.open()
        wait_for(lambda: cell.metric("triptych_pd_shared_kv_wait_seconds_count") == 1, "the end of the look")
        cell.assert_at_rest()
        assert cell.metric(LOADED) == 0 and cell.metric(COMPUTED) == 0
        assert cell.tokens(request.request_id) == []
        answer(cell, root)
        assert cell.metric(LOADED) > 0


class Limits:
    """The limits of waits for blocks, which are over when they are told to be."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self._begun: list[tuple[asyncio.AbstractEventLoop, asyncio.Timeout]] = []
        #: What each was to be.
        self.seconds: list[float] = []
        own = SimpleNamespace(**{**vars(asyncio), "timeout": self._limit})
        monkeypatch.setattr(block_loads, "asyncio", own)

    def _limit(self, seconds: float) -> asyncio.Timeout:
        self.seconds.append(seconds)
        limit = asyncio.timeout(None)
        self._begun.append((asyncio.get_running_loop(), limit))
        return limit

    def end_first(self) -> None:
        loop, limit = self._begun[0]
        loop.call_soon_threadsafe(limit.reschedule, 0.0)


def test_blocks_that_come_too_late_are_not_waited_for_and_hold_up_nobody_else(
    checkpoint, server, monkeypatch
):
    root, gate = new_root(), Gate(monkeypatch)
    with sharing_cell(checkpoint, server.url) as cell:
        answer(cell, root)
    limits = Limits(monkeypatch)
    with sharing_cell(checkpoint, server.url) as cell:
        late, other = requests_of(cell, root)
        other.prefix_root = new_root()
        cell.engine.submit(late)
        assert gate.waiting.wait(40)
        assert cell.finish([other]) == [reference(checkpoint.path, PROMPTS[1], TOKENS).token_ids]
        assert cell.tokens(late.request_id) == [], "the other one was answered while this one waited"
        assert limits.seconds == [PATIENCE] * 2
        limits.end_first()
        assert cell.wait(late.request_id, "finished").error is None
        assert cell.tokens(late.request_id) == reference(checkpoint.path, PROMPTS[0], TOKENS).token_ids
        assert cell.metric("triptych_pd_shared_kv_late_total") == 1
        assert cell.metric(LOADED) == 0
        gate.open()


def test_a_worker_that_stops_ends_the_requests_that_wait_for_blocks(checkpoint, server, monkeypatch):
    root, gate = new_root(), Gate(monkeypatch)
    with sharing_cell(checkpoint, server.url) as cell:
        answer(cell, root)
    with sharing_cell(checkpoint, server.url) as cell:
        request = requests_of(cell, root)[0]
        cell.engine.submit(request)
        assert gate.waiting.wait(40)
        cell.engine.stop()
        end = cell.wait(request.request_id, "finished")
        assert end.error is not None and "shutting down" in str(end.error)


def test_loads_take_no_block_that_running_requests_need(checkpoint, server):
    """With a cache that one request fills, another one's blocks are not put in."""
    root = new_root()
    with sharing_cell(checkpoint, server.url) as cell:
        answer(cell, root)
    tokens = len(reference(checkpoint.path, PROMPTS[0], TOKENS).prompt_token_ids)
    blocks = (tokens + 64) // BLOCK_SIZE + 3
    memory = blocks * BLOCK_SIZE * checkpoint.decoder.geometry.token_elements * 4
    with sharing_cell(checkpoint, server.url, kv_memory=memory, max_model_len=tokens + 64) as cell:
        long = cell.request(PROMPTS[0], reference(checkpoint.path, PROMPTS[0], TOKENS).prompt_token_ids, 60)
        long.prefix_root = new_root()
        cell.engine.submit(long)
        cell.wait(long.request_id, "admitted")
        wait_for(lambda: len(cell.tokens(long.request_id)) > 0, "its first token")
        requests = requests_of(cell, root)
        outputs = cell.finish(requests)
        assert outputs == [reference(checkpoint.path, p, TOKENS).token_ids for p in PROMPTS]
        assert cell.wait(long.request_id, "finished").error is None


def test_a_full_queue_saves_nothing_more_and_answers_as_ever(checkpoint, server, monkeypatch):
    monkeypatch.setattr(KVTransfers, "has_room", lambda self, nbytes: False)
    root = new_root()
    with sharing_cell(checkpoint, server.url) as cell:
        answer(cell, root)
        assert cell.metric(SAVED) == 0
        assert cell.metric("triptych_pd_shared_kv_dropped_tokens_total") > 0
    assert blocks_in(server) == []


def test_blocks_above_their_share_of_the_store_are_not_saved(checkpoint, server):
    server.call("CONFIG", "SET", "maxmemory", "64mb")
    root = new_root()
    with sharing_cell(checkpoint, server.url, kv_store_share=1e-6) as cell:
        answer(cell, root)
        assert cell.metric(SAVED) == 0
        assert cell.metric("triptych_pd_shared_kv_dropped_tokens_total") > 0
    assert blocks_in(server) == []


def test_without_the_flag_nothing_is_saved_or_looked_for(checkpoint, server):
    with engine_cell(checkpoint, store=server.url) as cell:
        assert cell.engine.sharing is None
        cell.answer(PROMPTS, TOKENS)
    assert blocks_in(server) == []
