"""A request whose numbers are none ends with an error, and nobody else ever reads them."""

from __future__ import annotations

import pytest
import torch

from support.data.checkpoints import build_checkpoint
from support.encdec.batches import varied
from support.encdec.cell import EncDecCheckpoint
from support.engine.engine_cell import EngineCell, Prompt, engine_cell, reference
from triptych.base.config import MIB
from triptych.base.errors import InternalError
from triptych.ec_connector.base import EncoderOutput

SPOILED = Prompt("What is this?", ((1, 96, 64),))
OTHERS = [
    Prompt("Say something about the weather, and then about the sea."),
    Prompt("And this?", ((2, 64, 96),)),
    Prompt("One more."),
]


def spoil(cell: EngineCell, value: float) -> str:
    """Submits a request with one such value in the last row of its picture; the request's id."""
    token_ids = reference(cell.checkpoint.path, SPOILED, 8).prompt_token_ids
    request = cell.request(SPOILED, token_ids, 8)
    [feature] = request.features
    rows = cell.checkpoint.rows(feature.mm_hash).clone()
    rows[-1, 3] = value
    cell.store[feature.mm_hash] = EncoderOutput(feature.plan, rows)
    cell.engine.submit(request)
    return request.request_id


@pytest.mark.parametrize(("value", "budget"), [(float("nan"), 32), (float("inf"), 512)])
def test_others_beside_it_and_after_it_in_its_blocks_are_exact(checkpoint, value, budget):
    expected = [reference(checkpoint.path, prompt, 8).token_ids for prompt in OTHERS]
    # Few blocks: those of the failed request are soon another request's.
    flags = {"max_num_batched_tokens": budget, "kv_memory": MIB // 2, "prefix_caching": False}
    with engine_cell(checkpoint, **flags) as cell:
        for _ in range(3):
            name = spoil(cell, value)
            assert cell.answer(OTHERS, 8) == expected
            error = cell.wait(name, "finished").error
            assert isinstance(error, InternalError) and "NaN or infinity" in str(error)
        cell.assert_at_rest()
        cache = cell.engine.runner.kv_cache
        assert all(tensor.isfinite().all() for tensor in (*cache.keys, *cache.values))


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), None], ids=["nan", "inf", "-inf throughout"])
def test_logits_that_leave_no_token_end_their_own_request_alone(checkpoint, bad, monkeypatch):
    expected = {prompt: reference(checkpoint.path, prompt, 8).token_ids for prompt in OTHERS}
    logits, non_finite = checkpoint.decoder.logits, False

    def spoil_one(hidden: torch.Tensor) -> torch.Tensor:
        """One row of the first step that has some."""
        nonlocal non_finite
        values = logits(hidden)
        if len(values) > 1 and not non_finite:
            non_finite = True
            if bad is None:
                values[-1] = -torch.inf
            else:
                values[-1, 5] = bad
        return values

    monkeypatch.setattr(checkpoint.decoder, "logits", spoil_one)
    with engine_cell(checkpoint) as cell:
        requests = {
            prompt: cell.request(prompt, reference(checkpoint.path, prompt, 8).prompt_token_ids, 8)
            for prompt in OTHERS
        }
        for request in requests.values():
            cell.engine.submit(request)
        errors = []
        for prompt, request in requests.items():
            error = cell.wait(request.request_id, "finished").error
            if error is None:
                assert cell.tokens(request.request_id) == expected[prompt]
            else:
                errors.append(error)
        assert len(errors) == 1, "two rows were computed together, and one was spoilt"
        assert isinstance(errors[0], InternalError) and "NaN, infinite" in str(errors[0])
        cell.assert_at_rest()


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_a_projection_that_fails_ends_the_requests_on_its_item_alone(bad: float) -> None:
    bart = EncDecCheckpoint.open(build_checkpoint("bart"))
    prompt = list(bart.decoder.prompt_defaults({}).token_ids)
    inputs, expected = zip(*varied(bart, "bart", 3), strict=True)
    with engine_cell(bart, max_model_len=128) as cell:
        requests = [bart.request(cell, each, prompt, 64) for each in inputs]
        [victim] = requests[1].features
        entry = cell.store[victim.mm_hash]
        cell.store[victim.mm_hash] = EncoderOutput(victim.plan, torch.full_like(entry.data, bad))
        for request in requests:
            cell.engine.submit(request)
        errors = [cell.wait(request.request_id, "finished").error for request in requests]
        assert isinstance(errors[1], InternalError) and "NaN or infinity" in str(errors[1])
        assert [errors[0], errors[2]] == [None, None]
        for index in (0, 2):
            assert cell.tokens(requests[index].request_id) == expected[index].token_ids
        cell.assert_at_rest()
