"""Tokens that come a second time are compared, and not new."""

from __future__ import annotations

import pytest

from triptych.pd_worker.vllm.attempt import Diverged, Replay


def test_known_tokens_are_dropped_and_later_ones_are_new():
    replay = Replay((5, 6))
    assert [replay.is_new(token) for token in (5, 6, 5)] == [False, False, True]


def test_another_token_than_before_is_a_divergence():
    replay = Replay((5, 6))
    replay.is_new(5)
    with pytest.raises(Diverged, match="output token 1 is 7, and was 6"):
        replay.is_new(7)
