"""What stands for an item without media in a call of vLLM."""

from __future__ import annotations

from dataclasses import replace

from support.data.items import make_plan
from triptych.base.types import Placement
from triptych.base.vllm_classes import ROWS
from triptych.pd_worker.vllm.http.call import range_of, size_of


def test_an_items_size_is_its_grid():
    assert size_of(make_plan()) == ("image_grid_thw", (1, 2, 14))


def test_an_item_without_a_grid_still_has_a_field_which_the_connector_knows():
    assert size_of(replace(make_plan(rows=7), grid_thw=())) == (ROWS, (7,))


def test_a_placeholder_is_the_tokens_that_take_rows():
    assert range_of(Placement(10, 6, ((1, 4),))) == {"offset": 11, "length": 4}
    assert range_of(Placement(10, 6)) == {"offset": 10, "length": 6}
