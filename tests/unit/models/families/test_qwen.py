"""Qwen's towers, run plainly and in graphs."""

from __future__ import annotations

import functools
import random

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from transformers import AutoConfig
from transformers.models.qwen2_5_vl.modeling_qwen2_5_vl import Qwen2_5_VLModel, apply_rotary_pos_emb_vision
from transformers.models.qwen3_vl.modeling_qwen3_vl import Qwen3VLModel
from transformers.vision_utils import get_vision_window_index

from support.data.checkpoints import build_checkpoint
from support.data.pictures import picture
from triptych.base.types import ItemPlan, MMFeature, Placement
from triptych.models.base import DecoderSide, EncoderSide, PreparedItem
from triptych.models.families import qwen_graph, segments
from triptych.models.families.qwen2_5_vl import Qwen2_5VLEncoder
from triptych.models.families.qwen3_vl import Qwen3VLEncoder
from triptych.models.families.qwen_graph import QwenGraph
from triptych.models.families.segments import rotated
from triptych.models.registry import family_of

MERGE = 2


def feature(offset: int, rows: int, columns: int) -> MMFeature:
    count = rows * columns
    grid = (1, rows * MERGE, columns * MERGE)
    plan = ItemPlan("0" * 64, "n", "image", count, 8, "float32", count, None, grid)
    return MMFeature(plan, Placement(offset, count))


def layout(rng: random.Random) -> tuple[int, list[MMFeature]]:
    """A prompt's length and its images: text first, between and after, as every template puts it."""
    index, features = rng.randrange(0, 20), []
    for _ in range(rng.randrange(0, 5)):
        features.append(feature(index, rng.randrange(1, 9), rng.randrange(1, 9)))
        index = features[-1].placement.end + rng.randrange(1, 20)
    return max(index, 1), features


def reference(model: torch.nn.Module, length: int, features: list[MMFeature]) -> tuple[torch.Tensor, int]:
    types = torch.zeros(1, length, dtype=torch.int)
    for each in features:
        types[0, each.placement.offset : each.placement.end] = 1
    grids = torch.tensor([each.plan.grid_thw for each in features]) if features else None
    ids = torch.zeros(1, length, dtype=torch.long)
    positions, delta = model.get_rope_index(ids, types, image_grid_thw=grids)
    return positions[:, 0], int(delta)


@functools.cache
def decoder(family: str) -> DecoderSide:
    path = build_checkpoint(family)
    return family_of(path).decoder.without_weights(path, dtype=torch.float32)


def positions(side: DecoderSide, length: int, features: list[MMFeature]) -> tuple[torch.Tensor, int]:
    ids = [5] * length
    for each in features:
        ids[each.placement.offset : each.placement.end] = side.placeholder(each.plan)
    return side.positions(ids, features)


@pytest.mark.parametrize(
    ("family", "model_class"), [("qwen3_vl", Qwen3VLModel), ("qwen2_5_vl", Qwen2_5_VLModel)]
)
def test_positions_equal_transformers_for_any_layout_of_images(family, model_class):
    config = AutoConfig.from_pretrained(build_checkpoint(family))
    with torch.device("meta"):
        model = model_class(config)
    rng = random.Random(7)
    for _ in range(60):
        length, features = layout(rng)
        expected, expected_delta = reference(model, length, features)
        found, delta = positions(decoder(family), length, features)
        assert torch.equal(found, expected)
        assert delta == expected_delta


def test_a_text_prompt_counts_in_every_row() -> None:
    found, delta = positions(decoder("qwen3_vl"), 5, [])
    assert found.tolist() == [[0, 1, 2, 3, 4]] * 3
    assert delta == 0


def test_features_may_come_in_any_order() -> None:
    features = [feature(1, 2, 2), feature(6, 1, 3)]
    forward, _ = positions(decoder("qwen3_vl"), 12, features)
    backward, _ = positions(decoder("qwen3_vl"), 12, features[::-1])
    assert torch.equal(forward, backward)


CPU = torch.device("cpu")
FAMILIES = ["qwen3_vl", "qwen2_5_vl"]
SIZES = [(64, 64), (200, 90), (40, 300), (90, 90)]


@pytest.fixture(scope="module", params=FAMILIES)
def tower(request: pytest.FixtureRequest) -> Qwen3VLEncoder | Qwen2_5VLEncoder:
    path = build_checkpoint(request.param)
    return family_of(path).encoder.load(path, device=CPU, dtype=torch.float32)


def prepared(tower: EncoderSide, count: int = len(SIZES)) -> list[PreparedItem]:
    return [tower.preprocess(picture(n, *size), {}) for n, size in enumerate(SIZES[:count])]


def values_of(tower: QwenGraph, items: list[PreparedItem], budget: int) -> dict[str, torch.Tensor]:
    """Whole buffers of a batch, filled with NaN before."""
    config = tower.get_encoder_cudagraph_config()
    buffers = tower.prepare_encoder_cudagraph_capture_inputs(budget, 8, 8, CPU, torch.float32).values
    assert tuple(buffers) == config.buffer_keys
    values = tower.prepare_encoder_cudagraph_replay_buffers(items, 8, 8).values
    assert set(values) == set(config.buffer_keys)
    for key, buffer in buffers.items():
        buffer.fill_(torch.nan if buffer.is_floating_point() else torch.iinfo(buffer.dtype).max)
        used = len(values[key])
        buffer[:used] = values[key]
        config.padding(key)(buffer, used)
    return buffers


def run(tower: QwenGraph, items: list[PreparedItem], budget: int) -> list[torch.Tensor]:
    with torch.inference_mode():
        rows = tower.encoder_cudagraph_forward(values_of(tower, items, budget))
    assert rows.shape == (budget, tower.width)
    return tower.split_encoder_cudagraph_output(rows, items)


def test_the_eager_tower_is_transformers_own_to_the_bit(tower: Qwen3VLEncoder | Qwen2_5VLEncoder) -> None:
    original = type(tower.tower)._from_config(tower.vision_config, attn_implementation="sdpa")
    original.load_state_dict(tower.tower.state_dict(), strict=False, assign=True)
    original.patch_embed = tower.tower.patch_embed
    items = prepared(tower)
    pixels = tower.pixels(items)
    with torch.inference_mode():
        out = original(pixels, grid_thw=torch.tensor([item.grid_thw for item in items]))
    expected = torch.cat(tower.columns(out), dim=-1)
    assert torch.equal(torch.cat(tower.encode(items)), expected)


def test_small_large_small_gives_the_first_rows_again(tower: Qwen3VLEncoder | Qwen2_5VLEncoder) -> None:
    """A rotary table that grew in between, in place of one that each call computes, would show here."""
    small, large = prepared(tower, 1), [tower.preprocess(picture(9, 600, 500), {})]
    first = run(tower, small, 64)[0].clone()
    run(tower, large, 512)
    assert torch.equal(run(tower, small, 64)[0], first)


def test_segments_with_a_kernel_for_offsets_give_the_same(tower, monkeypatch):
    """On CUDA; here a stand-in that leaves rows outside its offsets unwritten and checks what it gets."""

    def varlen(
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        q_offsets: torch.Tensor,
        k_offsets: torch.Tensor,
        longest_q: int,
        longest_k: int,
    ) -> torch.Tensor:
        out = torch.full_like(query, torch.nan)
        offsets = q_offsets.tolist()
        assert offsets[0] == 0 and offsets[-1] == len(query) and offsets == sorted(offsets)
        for start, stop in zip(offsets, offsets[1:], strict=False):
            assert stop - start <= longest_q, "the kernel computes no more rows of a segment"
            if stop > start:
                parts = (part[start:stop].transpose(0, 1) for part in (query, key, value))
                out[start:stop] = nn.functional.scaled_dot_product_attention(*parts).transpose(0, 1)
        return out

    monkeypatch.setattr(segments, "varlen_attn", varlen)
    monkeypatch.setattr(qwen_graph, "has_varlen", lambda *_: True)
    items = prepared(tower)
    rows = run(tower, items, sum(item.rows for item in items) + 61)
    for own, row in zip(tower.encode(items), rows, strict=True):
        torch.testing.assert_close(row, own, atol=2e-5, rtol=0)


SIDES = st.integers(1, 30)


@settings(deadline=None, max_examples=40)
@given(st.lists(st.tuples(SIDES, SIDES), min_size=1, max_size=6), st.integers(0, 500))
def test_windows_of_any_pictures_and_of_padding_find_room(sides: list[tuple[int, int]], padding: int) -> None:
    tower = Qwen2_5VLEncoder.__new__(Qwen2_5VLEncoder)
    tower.merge_size = 2
    tower.vision_config = type("Vision", (), {"window_size": 112, "patch_size": 14})()
    grids = torch.tensor([(1, 2 * rows, 2 * columns) for rows, columns in sides])
    rows = sum(height * width for height, width in sides) + padding
    index, offsets = get_vision_window_index(grids, 2, 112, 14)
    (shape, dtype) = tower.graph_shapes(rows, len(sides))["cu_window_seqlens"]
    buffer = torch.zeros(shape, dtype=dtype)
    assert len(offsets) <= len(buffer)
    buffer[: len(offsets)] = offsets
    tower.graph_padding()["cu_window_seqlens"](buffer, len(offsets))
    lengths = buffer.clamp(max=4 * rows).diff()
    assert lengths.min() >= 0 and lengths.max() <= 64
    assert 4 * rows - int(buffer.clamp(max=4 * rows)[-1]) <= 64, "no segment is longer than a window"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("rows", [0, 1, 9])
@pytest.mark.parametrize("dim", [8, 72, 80])
@pytest.mark.parametrize("kernel", [True, False], ids=["kernel", "torch"])
def test_queries_and_keys_are_rotated_as_transformers_does(
    rows: int, dim: int, dtype: torch.dtype, kernel: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.manual_seed(0)
    packed = torch.randn(rows, 3, 4, dim).to(dtype)
    angles = torch.randn(rows, dim // 2).repeat(1, 2)
    value = packed[:, 2].clone()
    wanted = torch.stack(
        apply_rotary_pos_emb_vision(packed[:, 0], packed[:, 1], angles.cos(), angles.sin()), 1
    )
    if not kernel:
        monkeypatch.setattr(segments, "rotates", lambda *_: False)
    found = rotated(packed[:, :2], angles.cos(), angles.sin())
    assert found.dtype == dtype
    assert torch.equal(found, wanted)
    assert torch.equal(packed[:, 2], value), "values are left as they are"
