"""Pictures of classes that were not run: our calls name what vLLM 0.32's own processors made of them."""

from __future__ import annotations

from dataclasses import dataclass, replace

import pytest

from support.data.items import make_plan
from triptych.base.types import JsonObject, MMFeature, Placement
from triptych.base.vllm_classes import CLASSES
from triptych.pd_worker.frontend.prompt import Prompt
from triptych.pd_worker.vllm.class_trial import disagreement
from triptych.pd_worker.vllm.http.call import EngineCall, body_of, size_of
from triptych.pd_worker.vllm.http.replies import PlaceholderRange, RenderedItems, RenderedPrompt

ROW, START, END = 319, 316, 315


@dataclass(frozen=True)
class Recorded:
    """What a processor made of "user: <picture>What": kind, rows, grid, and the placeholder's place."""

    architecture: str
    kind: str
    rows: int
    grid: tuple[int, ...]
    offset: int
    length: int

    @property
    def tokens(self) -> list[int]:
        return [87, 85, 71, 84, 28, 223, START, *[ROW] * self.rows, END, 57, 74, 67, 86]


#: By each processor's `apply`, of pictures of 16x16 and 32x16 pixels (Step: 32x32, without windows).
RECORDED = (
    Recorded("MiniMaxM3SparseForConditionalGeneration", "image", 49, (1, 14, 14), 6, 51),
    Recorded("MiniMaxM3SparseForConditionalGeneration", "image", 50, (1, 10, 20), 6, 52),
    Recorded("KimiK25ForConditionalGeneration", "vision_chunk", 4, (1, 4, 4), 7, 4),
    Recorded("KimiK25ForConditionalGeneration", "vision_chunk", 8, (1, 4, 8), 7, 8),
    Recorded("Step3p7ForConditionalGeneration", "image", 169, (), 6, 171),
)


def prompt_of(recorded: Recorded, place: Placement) -> Prompt:
    plan = replace(make_plan(rows=recorded.rows), length=place.length, grid_thw=recorded.grid)
    return Prompt(tuple(recorded.tokens), (MMFeature(plan, place),))


@pytest.mark.parametrize("recorded", RECORDED, ids=lambda one: f"{one.architecture}-{one.rows}")
@pytest.mark.parametrize("marked", [False, True])
def test_a_call_names_the_kind_the_rows_places_and_the_grid_that_vllm_has(recorded, marked):
    place = Placement(6, recorded.rows + 2, ((1, recorded.rows),)) if marked else Placement(7, recorded.rows)
    prompt, kind = prompt_of(recorded, place), CLASSES[recorded.architecture].image_kind
    body: JsonObject = body_of(EngineCall(recorded.tokens, {}, features=prompt.features, image_kind=kind))
    assert body["features"]["mm_placeholders"] == {
        recorded.kind: [{"offset": recorded.tokens.index(ROW), "length": recorded.rows}]
    }
    assert body["features"].keys() == {"mm_hashes", "mm_placeholders", "mm_metadata"}
    assert all(list(named) == [recorded.kind] for named in body["features"].values())
    if recorded.grid:
        assert size_of(prompt.features[0].plan) == ("image_grid_thw", recorded.grid)


@pytest.mark.parametrize("recorded", RECORDED, ids=lambda one: f"{one.architecture}-{one.rows}")
def test_a_trial_finds_the_rows_between_the_same_tokens(recorded):
    kind, prompt = CLASSES[recorded.architecture].image_kind, prompt_of(recorded, Placement(7, recorded.rows))
    place = PlaceholderRange(recorded.offset, recorded.length)
    rendered = RenderedPrompt(recorded.tokens, RenderedItems({recorded.kind: [place]}))
    assert disagreement(prompt, rendered, {ROW}, kind) == ""
    other = replace(recorded, rows=recorded.rows + 1)
    more = prompt_of(other, Placement(7, other.rows))
    assert f"the encoder makes {other.rows} rows" in disagreement(more, rendered, {ROW}, kind)
