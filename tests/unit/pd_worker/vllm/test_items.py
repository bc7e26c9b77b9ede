"""Items that vLLM cannot be given are refused by name."""

from __future__ import annotations

from dataclasses import replace

import pytest

from support.data.items import make_plan
from triptych.base.errors import ConfigError, InvalidRequest
from triptych.base.vllm_classes import CLASSES, GENERIC, class_of
from triptych.models.generic.layout import ItemLayout
from triptych.pd_worker.vllm.calls import check_items


def test_items_of_other_kinds_than_the_classes_are_refused_by_name():
    known = CLASSES["Qwen3VLForConditionalGeneration"]
    check_items([make_plan(), replace(make_plan(), modality="video")], known)
    with pytest.raises(InvalidRequest, match="kind audio: .* takes image and video items alone"):
        check_items([make_plan(), replace(make_plan(), modality="audio")], known)


def test_segments_are_refused_where_positions_run_through_the_video():
    layout = ItemLayout((5,) * 8, ((),) * 8, continues=True).encode()
    plan = replace(make_plan(rows=8), modality="video", layout=layout)
    check_items([plan], CLASSES["Qwen3VLForConditionalGeneration"])
    with pytest.raises(InvalidRequest, match="--video-segment-frames 0"):
        check_items([plan], CLASSES["Qwen2_5_VLForConditionalGeneration"])


def test_a_class_that_the_table_lacks_is_refused_with_the_row_to_write():
    with pytest.raises(
        ConfigError, match=r"row `\"MyForConditionalGeneration\": VLLMClass\(\),` in triptych/base"
    ):
        class_of("MyForConditionalGeneration")
    with pytest.raises(ConfigError, match="--engine-class generic"):
        class_of("MyForConditionalGeneration")
    assert class_of("MyForConditionalGeneration", generic=True) is GENERIC
    # A known class is never tried: neither by its own name nor by that with a head for scores.
    for name in ("InternVLForConditionalGeneration", "Qwen3VLForSequenceClassification"):
        assert class_of(name, generic=True) is not GENERIC
