"""Engines that share KV blocks in a store, and what their requests should find there."""

from __future__ import annotations

import itertools
import threading
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import pytest

from support.engine.engine_cell import EngineCell, engine_cell
from support.stores.server import StoreServer
from triptych.pd_worker.core.kv_cache.block_pool import PrefixChain
from triptych.pd_worker.core.outputs import ModelRunnerOutput, SchedulerOutput
from triptych.pd_worker.core.request import EngineRequest
from triptych.pd_worker.engine import Engine
from triptych.pd_worker.kv_sharing import cost_rule

BLOCK_SIZE = 4
#: Steps of an engine that is held: to the offer, and to the hand-over. An answer has more.
FEW_STEPS, MORE_STEPS = 6, 30
#: Tokens to draw from. A chunk and a decode add up in another order: among hundreds of likely tokens, a draw
#: would fall between two of them now and then.
FEW = 4
LOADED = "triptych_pd_shared_kv_loaded_tokens_total"
SAVED = "triptych_pd_shared_kv_saved_tokens_total"
LOADED_BYTES = "triptych_pd_shared_kv_loaded_bytes_total"
SAVED_BYTES = "triptych_pd_shared_kv_saved_bytes_total"
HITS, COMPUTED = "vllm:prefix_cache_hits_total", "vllm:prompt_tokens_total"
QUERIES = "vllm:prefix_cache_queries_total"
#: Seconds that requests wait for blocks where no request is to compute what it could load.
PATIENCE = 40.0


def new_root() -> bytes:
    """The root of prefixes that no other test has: as another tenant's."""
    return uuid.uuid4().bytes * 2


@contextmanager
def sharing_cell(checkpoint: Any, store: str, **flags: Any) -> Iterator[EngineCell]:
    """An engine that saves and looks for blocks in the store."""
    flags = {"block_size": BLOCK_SIZE, "share_prefixes": "on", **flags}
    with engine_cell(checkpoint, store=store, **flags) as cell:
        yield cell


def rooted(requests: Sequence[EngineRequest], root: bytes) -> Sequence[EngineRequest]:
    for request in requests:
        request.prefix_root = root
    return requests


def blocks_of(requests: Sequence[EngineRequest], *, last: int = 1) -> set[bytes]:
    """The digests of the full blocks of prompts without their `last` tokens."""
    digests: set[bytes] = set()
    for request in requests:
        chain = PrefixChain(
            request.prefix_root, request.prompt_token_ids, [], request.features, BLOCK_SIZE, request.both_ways
        )
        digests.update(chain.digests((request.num_prompt_tokens - last) // BLOCK_SIZE))
    return digests


def blocks_in(server: StoreServer) -> list[bytes]:
    """Keys of KV blocks in the store."""
    return [key for key in server.call("KEYS", "kv:*") if key.endswith(b"}")]


def damage_blocks(server: StoreServer) -> None:
    """Changes some bytes of each of them, before its end."""
    for name in blocks_in(server):
        server.call("SETRANGE", name.decode(), int(server.call("STRLEN", name.decode())) - 9, "damage")


def wait_for_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """No request computes what it could load because a busy machine loads it slowly."""
    for bound in ("_SHORTEST", "_LONGEST"):
        monkeypatch.setattr(cost_rule, bound, PATIENCE)


def hold(engine: Engine, taken: threading.Event | None = None) -> None:
    """The engine computes some tokens, then none before its request may be offered, then some more and none
    before it is `taken`, if that is given: no answer is over too soon, however long a save takes.
    """
    assert engine.sharing is not None and engine.sharing.saves is not None
    runner, saves = engine.runner, engine.sharing.saves
    assert saves.on_stored is not None
    execute, offer, steps = runner.execute, saves.on_stored, itertools.count()
    offered = threading.Event()

    def held(scheduled: SchedulerOutput) -> ModelRunnerOutput:
        done = next(steps) if scheduled.rows else 0
        if done > FEW_STEPS:
            offered.wait(60)
        if done > MORE_STEPS and taken is not None:
            taken.wait(60)
        return execute(scheduled)

    def offers(request: EngineRequest) -> None:
        offer(request)
        offered.set()

    runner.execute = held  # type: ignore[method-assign]
    saves.on_stored = offers


def wait_for(holds: Callable[[], bool], what: str, seconds: float = 40.0) -> None:
    deadline = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < deadline, f"waited {seconds:g} s for: {what}"
        time.sleep(0.005)


def wait_for_saves(cell: EngineCell) -> None:
    """Returns once all that the engine has computed is saved, or given up."""
    sharing = cell.engine.sharing
    assert sharing is not None and sharing.saves is not None
    saving = sharing.saves._saving
    wait_for(lambda: not saving, "the saves")
