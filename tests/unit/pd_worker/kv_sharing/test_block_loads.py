"""Blocks that arrive are idle blocks of the pool; they take no room that running requests need."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from support.engine.engine_requests import make_request
from triptych.base.metrics import PDMetrics
from triptych.base.types import ItemPlan
from triptych.pd_worker.core.kv_cache.block_pool import PrefixChain
from triptych.pd_worker.core.kv_cache.kv_cache_manager import KVCacheManager
from triptych.pd_worker.core.request import EngineRequest
from triptych.pd_worker.kv_sharing.block_loads import BlockLoads
from triptych.pd_worker.kv_sharing.cost_rule import CostRule
from triptych.pd_worker.kv_sharing.stored_kv import StoredKV

SIZE = 4


@dataclass
class Store:
    """Transfers that end at once, of a store that has all groups but those in `absent`."""

    absent: set[str] = field(default_factory=set)
    away: bool = False
    held: int = 0
    asked: list[ItemPlan] = field(default_factory=list)

    def start(self, work: Coroutine[Any, Any, None]) -> None:
        asyncio.run(work)

    async def find(self, plans: Sequence[ItemPlan], tenant: str) -> int:
        self.asked += plans
        return next((i for i, plan in enumerate(plans) if plan.mm_hash in self.absent), len(plans))

    async def first_of(self, plans: Sequence[ItemPlan], most: int) -> int | None:
        return None

    async def load(self, plan: ItemPlan) -> torch.Tensor:
        self.held += plan.nbytes
        return torch.zeros(plan.nbytes, dtype=torch.uint8)

    def release(self, nbytes: int) -> None:
        self.held -= nbytes

    def call_soon(self, callback: Callable[[], None]) -> None:
        callback()


class Copier:
    def __init__(self) -> None:
        self.fails = False
        self.written: list[int] = []

    def put(self, blocks: Sequence[int], rows: torch.Tensor, which: Sequence[int]) -> None:
        if self.fails:
            raise MemoryError("no memory")
        self.written += blocks


@dataclass
class Cell:
    """A pool of `blocks` blocks, of which running requests will need `spare`."""

    blocks: int = 16
    spare: int = 0
    group: int = 2

    def __post_init__(self) -> None:
        self.kv, self.store, self.copier = KVCacheManager(self.blocks, SIZE), Store(), Copier()
        self.form = StoredKV("model", block_size=SIZE, width=64, dtype="float32", shapes=[])
        self.form.group_blocks = self.group
        self.known: list[bytes] = []
        self.added: list[EngineRequest] = []
        self.commands: list[Callable[[], None]] = []
        self.loads = BlockLoads(
            self.form, self.kv, self.copier, self.store, CostRule(1, asked=False), PDMetrics("m"),  # type: ignore[arg-type]
            spare=lambda: self.spare, stored=self.known.append,
        )  # fmt: skip

    def look(self, request: EngineRequest) -> None:
        """Looks, then carries out what came for the engine's thread."""
        assert self.loads.begin(request, self.commands.append, lambda: self.arrive(request))
        for command in self.commands:
            command()
        self.commands.clear()

    def arrive(self, request: EngineRequest) -> None:
        self.commands.append(lambda: self.added.append(request) if self.loads.arrived(request) else None)

    def found(self, request: EngineRequest) -> int:
        chain = PrefixChain(request.prefix_root, request.prompt_token_ids, [], (), SIZE)
        return len(self.kv.find_prefix(chain, request.num_tokens))


def test_a_prompts_blocks_are_found_as_if_they_had_been_computed_and_hold_nothing() -> None:
    cell, request = Cell(), make_request("a", 26)
    cell.look(request)
    assert cell.added == [request]
    assert cell.found(request) == 6
    assert cell.kv.num_used == 0 and cell.store.held == 0


def test_a_request_of_which_all_is_here_asks_for_nothing() -> None:
    cell = Cell()
    cell.look(make_request("a", 26))
    asked = len(cell.store.asked)
    cell.look(make_request("b", 26))
    assert len(cell.store.asked) == asked and len(cell.added) == 2


def test_a_gap_ends_the_prefix() -> None:
    cell, request = Cell(), make_request("a", 26)
    chain = PrefixChain(request.prefix_root, request.prompt_token_ids, [], (), SIZE)
    cell.store.absent.add(cell.form.groups(chain.digests(6))[1].plan.mm_hash)
    cell.look(request)
    assert cell.found(request) == 2


def test_blocks_that_running_requests_will_need_stay_free() -> None:
    cell, request = Cell(blocks=8, spare=1), make_request("a", 26)
    assert cell.kv.allocate("running", [], 4 * SIZE)
    cell.look(request)
    assert cell.added == [request]
    assert cell.found(request) == 3, "of four free ones"
    assert cell.kv.num_used == 4
    assert cell.kv.grow("running", 5 * SIZE)


def test_room_that_has_gone_meanwhile_ends_the_prefix_and_evicts_nothing_that_is_held() -> None:
    cell, request = Cell(blocks=8), make_request("a", 26)
    begin = cell.loads.begin(request, cell.commands.append, lambda: cell.arrive(request))
    assert begin and cell.kv.allocate("running", [], 5 * SIZE)
    for command in cell.commands:
        command()
    assert cell.added == [request] and cell.found(request) == 2
    assert cell.kv.num_used == 5 and cell.store.held == 0


def test_what_cannot_be_written_is_computed_and_its_blocks_are_free() -> None:
    cell, request = Cell(), make_request("a", 26)
    cell.copier.fails = True
    cell.loads.begin(request, cell.commands.append, lambda: cell.arrive(request))
    for command in cell.commands:
        with contextlib.suppress(MemoryError):
            command()
    assert cell.added == [request] and cell.found(request) == 0
    assert cell.kv.num_used == 0 and cell.store.held == 0


def test_the_end_of_a_loaded_prefix_is_evicted_first() -> None:
    cell, request = Cell(blocks=8), make_request("a", 26)
    cell.look(request)
    assert cell.kv.allocate("running", [], 4 * SIZE)
    assert cell.found(request) == 4


def test_a_dropped_request_gets_nothing_and_is_not_added() -> None:
    cell, request = Cell(), make_request("a", 26)
    cell.loads.begin(request, cell.commands.append, lambda: cell.arrive(request))
    assert cell.loads.drop(["a"], "another proxy") == []
    assert cell.loads.drop(["a"], "proxy") == [request]
    for command in cell.commands:
        command()
    assert cell.added == [] and cell.copier.written == [] and cell.store.held == 0


def test_nothing_is_looked_for_while_the_store_is_away_or_for_a_short_prompt() -> None:
    cell = Cell()
    assert not cell.loads.begin(make_request("a", SIZE), cell.commands.append, lambda: None)
    cell.store.away = True
    assert not cell.loads.begin(make_request("b", 26), cell.commands.append, lambda: None)
