"""Spans and their rules, by masks made by hand."""

from __future__ import annotations

import pytest
import torch

from triptych.models.base import SpanRule
from triptych.models.generic.masks import span_rule, spans_of

SPANS = ((2, 6), (7, 9))
TOKENS = 12


def mask(rule: SpanRule, window: int | None = None, chunk: int | None = None) -> torch.Tensor:
    """True where the token of a row attends to that of a column."""

    def attends(query: int, key: int) -> bool:
        both = any(start <= query < end and start <= key < end for start, end in SPANS)
        near = (window is None or key > query - window) and (chunk is None or query // chunk == key // chunk)
        if rule is SpanRule.WHOLE:
            return both or (key <= query and near)
        return (key <= query or (both and rule is SpanRule.CUT)) and near

    return torch.tensor([[attends(query, key) for key in range(TOKENS)] for query in range(TOKENS)])


@pytest.mark.parametrize("rule", SpanRule)
def test_a_class_mask_names_its_rule_under_a_window_shorter_than_its_spans(rule: SpanRule) -> None:
    assert span_rule(mask(rule, window=2), SPANS, 2, None) is rule
    assert span_rule(mask(rule, window=2), SPANS, 3, None) is None


def test_a_causal_mask_in_chunks_is_told_from_one_without() -> None:
    assert span_rule(mask(SpanRule.NONE, chunk=3), SPANS, None, 3) is SpanRule.NONE
    assert span_rule(mask(SpanRule.NONE, chunk=3), SPANS, None, None) is None


def test_spans_are_stretches_of_tokens_that_attend_to_the_next_in_any_layer_type() -> None:
    causal, both = (mask(rule).diagonal(1) for rule in (SpanRule.NONE, SpanRule.WHOLE))
    assert spans_of({"sliding_attention": causal, "full_attention": both}) == SPANS
    assert spans_of({"full_attention": causal}) == ()
    assert spans_of({}) == ()
