"""Rows in 8 bits: half of 16, near what they were, and never finite where the tower's were not."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch

from support.data.items import make_plan
from triptych.base.hashing import stored_as, tower_of
from triptych.base.types import INT8, ItemPlan, scales_fit
from triptych.ec_connector.base import EncoderOutput
from triptych.ec_connector.connectors.host_buffers import bytes_of
from triptych.ec_connector.int8_rows import as_stored, finite_scales, packed, rows_of, unpacked


def int8_plan(rows: int, width: int, scales: int) -> ItemPlan:
    return replace(make_plan(rows=rows, width=width, dtype=INT8), scales=scales)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("rows, width, scales", [(1, 3, 1), (5, 12, 4), (300, 2048, 2), (0, 8, 2)])
def test_each_part_of_a_row_is_within_half_a_step_of_its_own_scale(dtype, rows, width, scales):
    torch.manual_seed(0)
    # Levels of other sizes: with one scale a row the small ones would be lost.
    given = torch.randn(rows, scales, width // scales) * 10.0 ** torch.arange(scales).view(1, -1, 1)
    given = given.reshape(rows, width).to(dtype)
    stored = packed(given, scales)
    assert stored.numel() == int8_plan(rows, width, scales).nbytes
    shape = rows, scales, width // scales
    error = (unpacked(stored, scales) - given.float()).abs().view(shape)
    step = given.float().abs().view(shape).amax(2, keepdim=True) / 127
    assert bool((error <= step * 0.5001).all())


def test_rows_are_read_wherever_they_begin_and_zeros_stay_zeros():
    given = torch.randn(9, 6)
    given[4] = 0
    output = EncoderOutput(int8_plan(9, 6, 3), packed(given, 3))
    whole = rows_of(output, 0, 9)
    assert not whole[4].any()
    for first in range(9):
        assert torch.equal(rows_of(output, first, 1), whole[first : first + 1])
    plain = EncoderOutput(make_plan(rows=9, width=6), given)
    assert torch.equal(rows_of(plain, 2, 3), given[2:5])


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_rows_that_were_not_finite_have_no_finite_scale(value):
    given, plan = torch.randn(4, 8), int8_plan(4, 8, 2)
    assert finite_scales(bytes_of(as_stored(given, plan)), plan)
    given[2, 5] = value
    assert not finite_scales(bytes_of(as_stored(given, plan)), plan)


def test_what_is_not_of_the_plans_shape_is_left_for_its_check_to_name():
    given = torch.randn(3, 8)
    assert as_stored(given, int8_plan(4, 8, 2)) is given
    assert as_stored(given, make_plan(rows=3, width=8)) is given


@pytest.mark.parametrize(
    "dtype, width, scales, fits",
    [("int8", 8, 2, True), ("int8", 8, 0, False), ("int8", 8, 3, False), ("bfloat16", 8, 2, False),
     ("bfloat16", 8, 0, True)],
)  # fmt: skip
def test_rows_of_int8_alone_have_scales_one_for_each_equal_part(dtype, width, scales, fits):
    assert scales_fit(dtype, width, scales) is fits


def test_another_form_has_another_namespace_and_towers_that_are_equal_have_equal_ones():
    one, other = "ab" * 16 + "cd" * 16, "ab" * 16 + "ef" * 16
    assert len({one, other, stored_as(one, INT8), stored_as(other, INT8)}) == 4
    assert tower_of(stored_as(one, INT8)) == tower_of(stored_as(other, INT8)) != tower_of(one)
