"""What prefill before all items are there is worth in virtual time, and that it never costs."""

from __future__ import annotations

import pytest

from benchmarks.overlap_prefill.simulated import alone, bare, bound, loaded, published


def test_a_prompt_of_twice_a_pictures_encode_time_has_its_first_token_in_four_fifths_of_the_time() -> None:
    assert bound(2.0) == pytest.approx(0.75)
    assert 0.75 <= alone(bare(), 2.0).ratio <= 0.8


@pytest.mark.parametrize("ratio", [0.25, 0.5, 1.0, 2.0, 4.0, 8.0])
def test_a_request_alone_is_never_later_for_it(ratio: float) -> None:
    assert bound(ratio) <= alone(bare(), ratio).ratio < 1
    assert alone(published("a100"), ratio).ratio < 1


def test_requests_under_load_are_not_later_for_it_in_the_mean() -> None:
    assert loaded(bare(), 2.0, 0.8, 40).ratio < 1
