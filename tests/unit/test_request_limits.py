from __future__ import annotations

import math

import pytest

from triptych.base.errors import InvalidRequest
from triptych.base.request import RepetitionPenalty, Seed, Temperature, TopP, check_limits


@pytest.mark.parametrize("value", [None, 0, 0.5, 2])
def test_values_within_both_limits_pass_and_so_does_none(value: float | None) -> None:
    check_limits("temperature", value, Temperature)


@pytest.mark.parametrize(
    ("value", "kind", "words"),
    [
        (2.1, Temperature, "at least 0 and at most 2"),
        (-0.1, Temperature, "at least 0 and at most 2"),
        (math.nan, Temperature, "at least 0 and at most 2"),
        (math.inf, Temperature, "at least 0 and at most 2"),
        (0, TopP, "above 0 and at most 1"),
        (0, RepetitionPenalty, "at least 0.01 and at most 10"),
        (1 << 63, Seed, f"at least {-(1 << 63)} and at most {(1 << 63) - 1}"),
    ],
)
def test_what_is_outside_is_refused_with_both_limits(value: float, kind: object, words: str) -> None:
    with pytest.raises(InvalidRequest, match=f"field must be {words}") as caught:
        check_limits("field", value, kind)
    assert caught.value.param == "field"


def test_optional_types_have_the_limits_of_the_type_that_is_not_none() -> None:
    with pytest.raises(InvalidRequest):
        check_limits("field", 3, Temperature | None)
