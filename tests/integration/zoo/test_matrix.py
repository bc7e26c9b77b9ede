"""The whole matrix of each class: chunks, blocks, prefix hits, evicted embeddings, other attempts."""

from __future__ import annotations

import pytest

from support.engine.engine_events import kind
from support.zoo.cases import Case
from support.zoo.status import SERVED

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(300),
    pytest.mark.parametrize("case", SERVED, indirect=True, scope="module"),
]


@pytest.mark.parametrize(("budget", "block_size"), [(7, 4), (16, 16), (4096, 8)])
def test_chunks_and_blocks_change_nothing(case: Case, budget: int, block_size: int) -> None:
    with case.engine(budget, block_size=block_size) as cell:
        case.assert_exact(case.answer(cell))
        cell.assert_at_rest()


def test_each_prompt_alone_is_answered_as_in_a_batch(case: Case) -> None:
    for number in range(len(case.prompts)):
        with case.engine() as cell:
            case.assert_exact(case.answer(cell, [number]), [number])


def test_a_prefix_from_the_cache_changes_nothing(case: Case) -> None:
    with case.engine(budget=33, block_size=4) as cell:
        case.assert_exact(case.answer(cell))
        case.assert_exact(case.answer(cell))
        ends = [event.finished for event in cell.events if kind(event) == "finished"]
        # The state of recurrent layers is kept only where that is worth a step.
        recurrent = bool(case.served.decoder.geometry.states)
        assert recurrent or sum(end.cached_tokens for end in ends) > 0


def test_an_embedding_that_was_evicted_is_asked_for_again(case: Case) -> None:
    with case.engine() as cell:
        request = case.served.request(cell, case.prompts[0], case.count)
        cell.store.clear()
        cell.engine.submit(request)
        missing = cell.wait(request.request_id, "item_missing")
        case.served.request(cell, case.prompts[0], case.count)
        cell.engine.items_ready([missing.mm_hash])
        cell.wait(request.request_id, "finished")
        case.assert_exact([cell.tokens(request.request_id)], [0])
        cell.assert_at_rest()


def test_another_worker_goes_on_where_the_first_ended(case: Case) -> None:
    with case.engine(budget=33) as cell:
        request = case.served.request(cell, case.prompts[0], case.count - 5)
        request.output_token_ids.extend(case.references[0].token_ids[:5])
        (rest,) = cell.finish([request])
        case.assert_exact([[*case.references[0].token_ids[:5], *rest]], [0])
