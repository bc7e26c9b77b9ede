"""Tokens that the model lacks, or log-probabilities of other tokens, never come from an engine."""

from __future__ import annotations

import pytest

from triptych.pd_worker.core.outputs import RawLogprobs
from triptych.pd_worker.vllm.http.replies import (
    ChosenToken,
    EngineGarbage,
    RankedToken,
    StreamChoice,
    StreamChunk,
    TokenLogprobs,
    check_tokens,
)


def chunk(token_ids: list[int], logprobs: TokenLogprobs | None = None) -> StreamChunk:
    return StreamChunk([StreamChoice(token_ids, logprobs=logprobs)])


@pytest.mark.parametrize("token_ids", [[10], [-1], [3, 10]])
def test_tokens_that_the_model_lacks_are_garbage(token_ids):
    with pytest.raises(EngineGarbage, match="beyond 9"):
        check_tokens(chunk(token_ids), 10)


def test_logprobs_of_other_tokens_are_garbage():
    content = TokenLogprobs([ChosenToken(4, -1.0)])
    check_tokens(chunk([4], content), 10)
    with pytest.raises(EngineGarbage):
        check_tokens(chunk([3], content), 10)


def test_the_likeliest_tokens_are_taken_by_rank():
    top = [RankedToken(8, -5.0, 9), RankedToken(3, -1.0, 1), RankedToken(4, -2.0, 2)]
    assert ChosenToken(8, -5.0, 9, top).raw(2) == RawLogprobs((8, -5.0), ((3, -1.0), (4, -2.0)))
    assert ChosenToken(8, -5.0, 9, top).raw(0) == RawLogprobs((8, -5.0), ())
