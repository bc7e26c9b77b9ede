"""Two tensor-parallel ranks in two processes over gloo and a real store: the tokens of `generate`."""

from __future__ import annotations

import asyncio
import os
import signal
import threading
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from support.data.checkpoints import build_checkpoint
from support.data.oracle import assert_exact
from support.encdec.batches import varied
from support.encdec.cell import EncDecCheckpoint
from support.engine.engine_cell import Checkpoint, EngineCell, Prompt, reference
from support.engine.engine_events import kind
from support.pd_ranks.rank_pair import rank_pair, save
from triptych.ec_connector.base import EncoderOutput
from triptych.models.base import DecoderSide
from triptych.models.registry import load_encoder
from triptych.pd_worker.core.request import EngineRequest

pytestmark = pytest.mark.timeout(300)

CAT, DOG, TREE = (1, 96, 64), (2, 64, 96), (3, 64, 64)
PROMPTS = [
    Prompt("What is this?", (CAT,)),
    Prompt("Say something about the weather, and then about the sea."),
    Prompt("Compare these three.", (CAT, DOG, TREE)),
    Prompt("One more, and then another one."),
    Prompt("Two of them.", (DOG, DOG)),
    Prompt("Who has seen the wind?"),
]
TOKENS = 24
SLOW = pytest.mark.slow


def opener(path: Path) -> Callable[[DecoderSide], Checkpoint]:
    encoder = load_encoder(path, device=torch.device("cpu"), dtype=torch.float32)
    return lambda decoder: Checkpoint(path, encoder, decoder)


def request_of(cell: EngineCell, prompt: Prompt, tokens: int = TOKENS) -> EngineRequest:
    ids = reference(cell.checkpoint.path, prompt, TOKENS).prompt_token_ids
    request = cell.request(prompt, ids, tokens, publish=False)
    request.ready = frozenset(feature.mm_hash for feature in request.features)
    return request


def outputs_of(cell: EngineCell, request: EngineRequest) -> list[EncoderOutput]:
    plans = {feature.mm_hash: feature.plan for feature in request.features}
    return [EncoderOutput(plan, cell.checkpoint.rows(key)) for key, plan in plans.items()]


@pytest.mark.parametrize(
    "family", ["qwen3_vl", pytest.param("qwen2_5_vl", marks=SLOW), pytest.param("llava", marks=SLOW)]
)
async def test_pictures_chunks_prefixes_and_swaps_of_two_ranks_are_exact(family, store_url, store):
    path = build_checkpoint(family)
    expected = [reference(path, prompt, TOKENS) for prompt in PROMPTS]
    flags = {"block_size": 4, "max_model_len": 256, "max_num_batched_tokens": 33, "preemption": "swap"}
    async with rank_pair(path, store_url, opener(path), blocks=70, **flags) as (cell, _):
        for _ in range(2):
            requests = [request_of(cell, prompt) for prompt in PROMPTS]
            for request in requests:
                await save(store, outputs_of(cell, request))
            got = await asyncio.to_thread(cell.finish, requests)
            assert_exact(expected, got, min_distinct=10)
        assert cell.metric("triptych_pd_ranks") == 2
        assert cell.metric("triptych_pd_swapped_blocks_total") > 0
        assert cell.metric("vllm:prefix_cache_hits_total") > 0
        cell.assert_at_rest()


@pytest.mark.slow
@pytest.mark.parametrize("family", ["bart", "mbart", "t5", "whisper", "trocr"])
async def test_cross_attention_of_two_ranks_is_exact(family, store_url, store):
    path = build_checkpoint(family, variant="even" if family == "t5" else "")
    async with rank_pair(
        path, store_url, lambda decoder: EncDecCheckpoint(path, decoder), max_model_len=80
    ) as (cell, _):
        checkpoint = cell.checkpoint
        assert isinstance(checkpoint, EncDecCheckpoint)
        prompt = list(checkpoint.decoder.prompt_defaults({}).token_ids)
        inputs, expected = zip(*varied(checkpoint, family, 4), strict=True)
        requests = [checkpoint.request(cell, each, prompt, 64) for each in inputs]
        await save(store, cell.store.values())
        got = await asyncio.to_thread(cell.finish, requests)
        assert_exact(list(expected), got)
        cell.assert_at_rest()


async def test_a_rank_killed_in_mid_stream_ends_the_engine_and_answers_nothing(store_url, store):
    path = build_checkpoint("qwen3_vl")
    async with rank_pair(path, store_url, opener(path)) as (cell, ranks):
        dead, lost = threading.Event(), threading.Event()
        cell.engine.beat.on_death(dead.set)
        ranks.beats[0].on_death(lost.set)
        request = request_of(cell, PROMPTS[1], tokens=400)
        cell.engine.submit(request)
        await asyncio.to_thread(cell.wait, request.request_id, "tokens")
        (pid,) = ranks.pids
        assert pid is not None
        os.kill(pid, signal.SIGKILL)
        assert await asyncio.to_thread(dead.wait, 240), "rank 0 waits in a collective for ever"
        assert await asyncio.to_thread(lost.wait, 240), "nobody sees that rank 1 has ended"
        assert not [event.finished for event in cell.events if kind(event) == "finished"]
