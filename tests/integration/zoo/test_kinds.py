"""One class of each kind in chunks and from the prefix cache; the slow matrix has all classes."""

from __future__ import annotations

import pytest
import torch

from support.engine.engine_events import kind
from support.zoo.cases import Case
from support.zoo.checkpoint import model_of

#: Tiles with newlines, windows, grids, levels with experts, spans, runs, and latent attention.
FAMILIES = ("LlavaNext", "AyaVision", "Qwen2VL", "Qwen3VLMoe", "Gemma3", "Mistral3", "Kimi_K25")

pytestmark = pytest.mark.parametrize(
    "case", [f"{family}ForConditionalGeneration" for family in FAMILIES], indirect=True, scope="module"
)


@pytest.mark.parametrize("budget", [16, 4096], ids=["in chunks", "whole"])
def test_one_picture_two_and_none_together_and_from_the_prefix_cache(case: Case, budget: int) -> None:
    with case.engine(budget, block_size=4) as cell:
        case.assert_exact(case.answer(cell))
        case.assert_exact(case.answer(cell))
        ends = [event.finished for event in cell.events if kind(event) == "finished"]
        assert all(event.cached_tokens > 0 for event in ends[-len(case.prompts) :])
        assert budget > 16 or cell.metric("triptych_pd_chunked_prefills_total") > 0
        cell.assert_at_rest()


def test_the_sides_hold_all_parameters_and_share_none_but_those_of_shells(case: Case) -> None:
    whole = dict(model_of(case.served.recipe.name).named_parameters())
    sides = [dict(side.module.named_parameters()) for side in (case.served.encoder, case.served.decoder)]
    shared = set(sides[0]) & set(sides[1])
    assert {name.rsplit(".", 1)[-1] for name in shared} <= {"image_newline"}
    # Merged and packed layers have names of their own, and all elements of theirs.
    held = sum(parameter.numel() for side in sides for parameter in side.values())
    assert held - sum(whole[name].numel() for name in shared) == sum(map(torch.numel, whole.values()))
    for side in sides:
        plain = [name for name in side.keys() & whole.keys() if not side[name].is_mkldnn]
        assert all(torch.equal(side[name], whole[name]) for name in plain)
