"""Classes without a family of their own, through the engine: the tokens of transformers' generate."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from support.engine.engine_cell import engine_cell
from support.generic.classes import CLASSES
from support.generic.serving import GenericModel
from triptych.pd_worker.core.request_events import RequestFinished

#: Different tokens of one class's answers that the reference has at least: fewer would prove little.
_DISTINCT = 8


@pytest.fixture(scope="module", params=CLASSES)
def model(request: pytest.FixtureRequest) -> Iterator[GenericModel]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield GenericModel.open(request.param)
    torch.set_num_threads(threads)


@pytest.mark.parametrize("budget", [16, 4096], ids=["in chunks", "whole"])
def test_one_picture_two_and_none_together_and_from_the_prefix_cache(
    model: GenericModel, budget: int
) -> None:
    prompts = model.prompts()
    expected = [model.reference(*prompt) for prompt in prompts]
    assert len({token for tokens in expected for token in tokens}) >= _DISTINCT
    with engine_cell(model, max_num_batched_tokens=budget, block_size=4) as cell:
        assert cell.finish([model.request(cell, *prompt) for prompt in prompts]) == expected
        assert cell.finish([model.request(cell, *prompt) for prompt in prompts]) == expected
        ends = [event for event in cell.events if isinstance(event, RequestFinished)]
        assert all(event.usage.cached_tokens > 0 for event in ends[-len(prompts) :])
        assert budget > 16 or cell.metric("triptych_pd_chunked_prefills_total") > 0
        cell.assert_at_rest()


def test_zeroed_rows_change_the_answer(model: GenericModel, monkeypatch: pytest.MonkeyPatch) -> None:
    ids, items = model.prompts()[0]
    monkeypatch.setattr(model, "zeroed", True)
    with engine_cell(model, block_size=4) as cell:
        assert cell.finish([model.request(cell, ids, items)]) != [model.reference(ids, items)]


def test_the_sides_hold_all_parameters_and_share_none_but_those_of_shells(model: GenericModel) -> None:
    whole = dict(model.whole.named_parameters())
    sides = [dict(side.module.named_parameters()) for side in (model.encoder, model.decoder)]
    assert set(sides[0]) | set(sides[1]) == set(whole)
    assert {name.rsplit(".", 1)[-1] for name in set(sides[0]) & set(sides[1])} <= {"image_newline"}
    for side in sides:
        assert all(torch.equal(parameter, whole[name]) for name, parameter in side.items())
