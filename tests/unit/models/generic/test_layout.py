"""Items of generic models: layouts, masks of spans, and what decides a picture's tensors."""

from __future__ import annotations

import importlib.metadata
import json
from pathlib import Path

import pytest
import torch

from triptych.base.errors import InvalidRequest
from triptych.models.generic import processor
from triptych.models.generic.layout import ItemLayout
from triptych.models.generic.masks import span_rule, spans_of
from triptych.models.generic.processor import processor_settings
from triptych.models.geometry import SpanRule


def test_a_layout_comes_back_from_its_counts() -> None:
    layout = ItemLayout(
        (7, 9, 9, 9, 8, 9, 9),
        ((0,), (1,), (1,), (1,), (0,), (1,), (1,)),
        {1: torch.tensor([[1, 4, 6]])},
        head=(10, 10),
        tail=(11,),
    )
    counts = layout.encode()
    back = ItemLayout.decode(counts)
    assert (back.tokens, back.types, back.head, back.tail) == (layout.tokens, layout.types, (10, 10), (11,))
    assert list(back.grids) == [1]
    assert torch.equal(back.grids[1], layout.grids[1])
    assert min(counts) >= 0


def test_equal_tokens_with_equal_types_are_one_run() -> None:
    many = ItemLayout((5, *[9] * 1000, 6), ((0,), *[(1,)] * 1000, (0,)))
    assert len(many.encode()) < 16
    assert ItemLayout.decode(many.encode()).tokens == many.tokens


@pytest.mark.parametrize(
    "counts",
    [(), (1,), (0, 0, 1, 0, 2, 4, 4), (0, 0, 0, 0, 5), (0, 0, 0, 0, 5, 1 << 30), (0, 0, 1, 0, 1, 1 << 40)],
)
def test_counts_that_are_no_layout_are_refused(counts: tuple[int, ...]) -> None:
    with pytest.raises(InvalidRequest, match="layout"):
        ItemLayout.decode(counts)


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


@pytest.mark.parametrize(
    ("name", "is_part"),
    [("Llama4ImageProcessor", True), ("Llama4ImageProcessorFast", True), ("SiglipImageProcessor", False)],
)
def test_torchvisions_version_is_part_where_there_is_no_processor_on_pil(
    name: str, is_part: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "preprocessor_config.json").write_text(json.dumps({"image_processor_type": name}))
    plain = processor_settings(tmp_path)
    assert "torchvision" not in plain
    monkeypatch.setattr(processor, "is_torchvision_available", lambda: True)
    monkeypatch.setattr(importlib.metadata, "version", lambda package: f"{package} 1.0")
    config = processor_settings(tmp_path)
    assert config == plain | ({"torchvision": "torchvision 1.0"} if is_part else {})
