"""Requests that make room for another tenant's give the tokens of `generate`, and so do those."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from support.data.oracle import assert_exact
from support.engine.engine_cell import Checkpoint, EngineCell, Prompt, engine_cell, reference
from support.engine.prompts import CAT, DOG, ONE, TEXT, TWICE
from support.engine.slow_steps import slow_steps
from triptych.pd_worker.core.request import EngineRequest

#: Long enough that A's answers have not ended when B asks.
LENGTH = 64
BIRD = (9, CAT[1], CAT[2])
CATS, DOGS, BIRDS = (Prompt("What is this?", (drawn,)) for drawn in (CAT, DOG, BIRD))


def requests_of(cell: EngineCell, tenant: str, prompts: Sequence[Prompt]) -> list[EngineRequest]:
    """The tenant's requests: made beforehand, for what takes time ends the answers of those at work."""
    path = cell.checkpoint.path
    requests = [
        cell.request(prompt, reference(path, prompt, LENGTH).prompt_token_ids, LENGTH) for prompt in prompts
    ]
    for request in requests:
        request.tenant = tenant
    return requests


def submit(cell: EngineCell, requests: Sequence[EngineRequest]) -> None:
    for request in requests:
        cell.engine.submit(request)


def assert_answers(cell: EngineCell, prompts: Sequence[Prompt], requests: Sequence[EngineRequest]) -> None:
    for request in requests:
        done = cell.wait(request.request_id, "finished")
        assert done.error is None, done.error
    results = [reference(cell.checkpoint.path, prompt, LENGTH) for prompt in prompts]
    assert_exact(results, [cell.tokens(request.request_id) for request in requests], min_distinct=15)
    cell.assert_at_rest()


@pytest.mark.parametrize("preemption", ["recompute", "swap"])
@pytest.mark.parametrize("prefix_caching", [True, False])
def test_pictures_that_give_their_places_to_another_tenant_and_come_back_are_exact(
    checkpoint: Checkpoint, preemption: str, prefix_caching: bool
) -> None:
    theirs, ours = [TWICE, ONE, TWICE, DOGS], [ONE, CATS]
    flags = {"preemption": preemption, "prefix_caching": prefix_caching, "block_size": 8}
    with engine_cell(checkpoint, max_num_seqs=2, **flags) as cell:
        flood, asks = requests_of(cell, "a", theirs), requests_of(cell, "b", ours)
        hurry = slow_steps(cell.engine)
        submit(cell, flood)
        for request in flood[:2]:
            cell.wait(request.request_id, "tokens")
        submit(cell, asks)
        cell.wait(asks[0].request_id, "admitted")
        hurry()
        assert_answers(cell, [*theirs, *ours], [*flood, *asks])
        assert cell.metric("triptych_pd_tenant_preemptions_total") > 0


def test_pictures_that_give_their_room_to_another_tenant_and_come_back_are_exact(
    checkpoint: Checkpoint,
) -> None:
    waiting, ours = [CATS, DOGS], [BIRDS]
    reference_ids = [reference(checkpoint.path, prompt, LENGTH).prompt_token_ids for prompt in waiting]
    features = [
        feature
        for ids, prompt in zip(reference_ids, waiting, strict=True)
        for feature in checkpoint.features(ids, prompt)
    ]
    room = sum(feature.plan.nbytes for feature in features)
    with engine_cell(checkpoint, max_num_seqs=2, encoder_cache_memory=room) as cell:
        flood, behind = requests_of(cell, "a", [TEXT, TEXT]), requests_of(cell, "a", waiting)
        asks = requests_of(cell, "b", ours)
        hurry = slow_steps(cell.engine)
        submit(cell, flood)
        for request in flood:
            cell.wait(request.request_id, "tokens")
        submit(cell, behind)
        flood += behind
        cell.wait(flood[-1].request_id, "admitted")
        submit(cell, asks)
        cell.wait(asks[0].request_id, "admitted")
        hurry()
        assert_answers(cell, [TEXT, TEXT, *waiting, *ours], [*flood, *asks])
        assert cell.metric("triptych_pd_room_given_up_total") > 0
