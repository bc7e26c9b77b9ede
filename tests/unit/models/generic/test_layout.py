"""Layouts, segments and towers of classes without an adapter."""

from __future__ import annotations

import importlib.metadata
import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import nn
from transformers.models.glm4v.modeling_glm4v import Glm4vVisionAttention
from transformers.models.qwen2_vl.modeling_qwen2_vl import VisionAttention
from transformers.models.siglip.modeling_siglip import SiglipAttention
from transformers.models.video_llama_3.modeling_video_llama_3 import VideoLlama3VisionAttention

from triptych.base.errors import InvalidRequest
from triptych.base.types import Options
from triptych.models.base import PreparedItem
from triptych.models.generic import processor
from triptych.models.generic.encoder import PatchConv2d, PatchConv3d, attends_in_segments, speed_up
from triptych.models.generic.layout import ItemLayout
from triptych.models.generic.masks import span_rule, spans_of
from triptych.models.generic.processor import processor_settings
from triptych.models.generic.segments import measured_extra_rows
from triptych.models.geometry import SpanRule
from triptych.models.video.clip import Clip


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


Tower = Callable[[torch.Tensor], torch.Tensor]


def pairs(pixels: torch.Tensor) -> torch.Tensor:
    """Two rows of each pair of frames."""
    means = pixels.flatten(1).mean(1).view(-1, 2).mean(1, keepdim=True)
    return (means * torch.tensor([[1.0, 2.0, 3.0]])).repeat_interleave(2, 0)


def attending(pixels: torch.Tensor) -> torch.Tensor:
    rows = pairs(pixels)
    return torch.softmax(rows @ rows.T, -1) @ rows


def causal(pixels: torch.Tensor) -> torch.Tensor:
    return pairs(pixels).cumsum(0)


def numbered(pixels: torch.Tensor) -> torch.Tensor:
    rows = pairs(pixels)
    return rows + torch.arange(len(rows))[:, None]


def with_newline(pixels: torch.Tensor) -> torch.Tensor:
    return torch.cat([pairs(pixels), torch.ones(1, 3)])


def pooled(pixels: torch.Tensor) -> torch.Tensor:
    return pairs(pixels).mean(0, keepdim=True)


def measured(tower: Tower) -> int | None:
    def prepare(clip: Clip, options: Options) -> PreparedItem:
        assert options == {"num_frames": clip.info.frames}
        frames = clip.frames(range(clip.info.frames))
        pixels = torch.from_numpy(frames.copy()).float() / 255 + 1
        rows = len(tower(pixels))
        return PreparedItem(rows, rows, (), cost=len(pixels), tensors={"pixel_values_videos": pixels})

    return measured_extra_rows(prepare, lambda item: tower(item.tensors["pixel_values_videos"]))


@pytest.mark.parametrize(
    ("tower", "extra"),
    [(pairs, 0), (with_newline, 1), (attending, None), (causal, None), (numbered, None), (pooled, None)],
)
def test_only_a_tower_whose_frames_stand_alone_is_divided(tower: Tower, extra: int | None) -> None:
    assert measured(tower) == extra


def test_a_model_without_videos_is_not_divided() -> None:
    def refuse(clip: Clip, options: Options) -> PreparedItem:
        raise InvalidRequest("video: this model takes no videos", param="video")

    assert measured_extra_rows(refuse, lambda item: torch.zeros(1)) is None


@pytest.mark.parametrize(("convolution", "faster"), [(nn.Conv2d, PatchConv2d), (nn.Conv3d, PatchConv3d)])
def test_a_convolution_over_patches_gives_what_it_gave(convolution: type, faster: type) -> None:
    generator = torch.Generator().manual_seed(1)
    tower = nn.Sequential(convolution(3, 8, kernel_size=4, stride=4))
    shape = tower[0].kernel_size
    inputs = [torch.randn(5, 3, *(size * count for size in shape), generator=generator) for count in (1, 3)]
    with torch.inference_mode():
        before = [tower(each) for each in inputs]
        speed_up(tower)
        after = [tower(each) for each in inputs]
    assert type(tower[0]) is faster
    for own, given in zip(before, after, strict=True):
        torch.testing.assert_close(given, own, atol=1e-6, rtol=1e-5)


def test_a_convolution_beyond_its_input_stays() -> None:
    tower = nn.Sequential(nn.Conv3d(3, 8, kernel_size=4, padding=1), nn.Conv2d(4, 8, 2, groups=2))
    speed_up(tower)
    assert [type(part) for part in tower] == [nn.Conv3d, nn.Conv2d]


def test_attention_is_replaced_where_its_code_is_that_of_qwen3_vl() -> None:
    assert attends_in_segments(VisionAttention)
    assert attends_in_segments(Glm4vVisionAttention)
    assert not attends_in_segments(VideoLlama3VisionAttention)
    assert not attends_in_segments(SiglipAttention)
