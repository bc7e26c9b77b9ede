"""The paged attention kernel, by Triton's interpreter in float32, against the formula written out and SDPA.

In bfloat16 the interpreter's products are not those of a GPU: 16 bits are tested by `tests/gpu`.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

from support.engine.attention_case import (
    BATCH,
    FULL_BLOCKS,
    LONG,
    SINKS,
    Case,
    Chunk,
    bias_by_distance,
    bias_by_position,
    close,
)
from triptych.base.machine.device import Device
from triptych.kernels.paged_attention import LAUNCHES, PagedQueries, PagedScores, attend
from triptych.models.geometry import LayerRule, SpanRule

#: One token alone, exactly one block, the last key alone in its block, and a length of many turns.
RAGGED = (Chunk(1, 1), Chunk(4, 1), Chunk(5, 1), Chunk(333, 1), Chunk(2, 2), Chunk(130, 65), Chunk(65, 65))
BATCHES = [BATCH, FULL_BLOCKS, LONG, RAGGED]


@pytest.fixture(params=[1, 132], ids=["whole", "split"])
def processors(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> int:
    """A device of that many: with many, the keys of a decode are split."""
    monkeypatch.setattr(Device, "processors", request.param)
    return int(request.param)


def poison(case: Case) -> None:
    """NaN in every slot of the cache that is no sequence's."""
    kept = [
        case.cache.slots(t, c.length - c.count) for t, c in zip(case.own_tables, case.chunks, strict=True)
    ]
    kept += [case.cache.slots(t, c.rows) for t, c in zip(case.cross_tables, case.chunks, strict=True)]
    slots = torch.cat(kept)
    for blocks in (*case.cache.keys, *case.cache.values):
        rows = blocks.flatten(0, 1)
        saved = rows[slots].clone()
        rows.fill_(torch.nan)
        rows[slots] = saved


@pytest.mark.parametrize("kv_heads", [1, 4])
def test_query_heads_share_the_keys_of_their_kv_head(processors: int, kv_heads: int) -> None:
    case = Case(BATCH, kv_heads)
    close(case.attend("triton"), case.expected_self())


@pytest.mark.parametrize("chunks", BATCHES)
@pytest.mark.parametrize("options", [{}, {"sliding_window": 3}, {"sliding_window": 70, "softcap": 1.0}])
def test_decodes_and_chunks_read_their_own_keys_alone(processors, chunks, options):
    case = Case(chunks, 2)
    poison(case)
    expected = case.expected_self(window=options.get("sliding_window"), softcap=options.get("softcap"))
    close(case.attend("triton", **options), expected)


@pytest.mark.parametrize("chunks", BATCHES)
@pytest.mark.parametrize("window", [None, 3])
def test_a_bias_by_positions_counts_in_prefill_and_decode(processors, chunks, window):
    case, bias = Case(chunks, 2), bias_by_position()
    poison(case)
    options = {} if window is None else {"sliding_window": window}
    close(case.attend("triton", bias=bias, **options), case.expected_self(bias, window))


@pytest.mark.parametrize("chunks", BATCHES)
@pytest.mark.parametrize("options", [{}, {"sliding_window": 3}, {"softcap": 2.0}])
def test_a_sink_is_one_more_term_of_the_softmax(processors, chunks, options):
    case = Case(chunks, 2)
    poison(case)
    window, softcap = options.get("sliding_window"), options.get("softcap")
    expected = case.expected_self(None, window, softcap, sinks=SINKS)
    close(case.attend("triton", s_aux=SINKS, **options), expected)
    close(case.attend("triton", cross=True, s_aux=SINKS), case.expected_cross(SINKS))


def test_a_bias_by_distance_is_looked_up_on_the_fly(processors: int) -> None:
    case, bias = Case(RAGGED, 2), bias_by_distance()
    close(case.attend("triton", bias=bias), case.expected_self(bias))


@pytest.mark.parametrize("chunks", BATCHES)
def test_cross_attention_sees_the_whole_of_its_own_encoder_output(processors, chunks):
    case = Case(chunks, 2)
    poison(case)
    close(case.attend("triton", cross=True, bias=bias_by_position()), case.expected_cross())


@pytest.mark.parametrize("spans", SpanRule)
@pytest.mark.parametrize(("window", "chunk"), [(None, None), (3, None), (None, 4), (5, 6)])
def test_a_layers_rule_decides_what_it_reaches(processors, spans, window, chunk):
    rule, pictures = LayerRule(window, chunk, spans), ((7, 13), (20, 90))
    case = Case(
        (Chunk(9, 1), Chunk(100, 1), Chunk(14, 14, 1, pictures), Chunk(95, 88, 1, pictures), Chunk(6, 6)), 2
    )
    poison(case)
    close(case.attend("triton", rule=rule, sliding_window=2), case.expected_self(rule=rule))


@pytest.mark.parametrize(
    ("key_dim", "value_dim"), [(64, 64), (72, 72), (80, 48), (96, 96), (160, 128), (256, 256)]
)
@pytest.mark.parametrize("longest", [1, 9])
@pytest.mark.parametrize("causal", [True, False], ids=["decoder", "encoder"])
def test_widths_of_heads_against_sdpa(key_dim: int, value_dim: int, longest: int, causal: bool) -> None:
    generator = torch.Generator().manual_seed(key_dim)
    q = torch.randn(longest, 6, key_dim, generator=generator)
    blocks = torch.randperm(9, generator=generator)[:3]
    keys, values = (torch.full((9, 16, 2, dim), torch.nan) for dim in (key_dim, value_dim))
    k, v = (torch.randn(40, 2, dim, generator=generator) for dim in (key_dim, value_dim))
    for blocked, part in ((keys, k), (values, v)):
        for index, block in enumerate(blocks):
            piece = part[16 * index : 16 * index + 16]
            blocked[block, : len(piece)] = piece
    queries = PagedQueries(torch.tensor([0, longest]), torch.tensor([40]), blocks[None], longest)
    out = torch.empty(longest, 6, value_dim)
    attend(q, keys, values, queries, PagedScores(0.2, causal=causal), out)
    mask = torch.ones(longest, 40, dtype=torch.bool).tril(40 - longest) if causal else None
    heads = [part.transpose(0, 1)[None] for part in (q, k, v)]
    expected = F.scaled_dot_product_attention(*heads, attn_mask=mask, scale=0.2, enable_gqa=True)
    close(out, expected[0].transpose(0, 1))


def test_sequences_that_share_a_prefix_read_the_same_blocks(processors: int) -> None:
    case = Case((Chunk(40, 1), Chunk(38, 1), Chunk(37, 5)), 2)
    for i, shared in ((1, 8), (2, 8)):
        case.own_tables[i] = [*case.own_tables[0][:shared], *case.own_tables[i][shared:]]
        case.own[i] = tuple(
            torch.cat([first[: shared * 4], own[shared * 4 :]])
            for first, own in zip(case.own[0], case.own[i], strict=True)
        )  # type: ignore[assignment]
    close(case.attend("triton"), case.expected_self())


def test_more_query_heads_for_a_kv_head_than_rows_of_a_tile() -> None:
    q = torch.randn(2, 71, 16, generator=torch.Generator().manual_seed(1))
    k, v = (torch.randn(1, 16, 1, 16, generator=torch.Generator().manual_seed(seed)) for seed in (2, 3))
    queries = PagedQueries(torch.tensor([0, 2]), torch.tensor([11]), torch.tensor([[0]]), 2)
    out = torch.empty(2, 71, 16)
    attend(q, k, v, queries, PagedScores(1.0), out)
    heads = q.transpose(0, 1)[None], k[:, :11].transpose(1, 2), v[:, :11].transpose(1, 2)
    mask = torch.ones(2, 11, dtype=torch.bool).tril(9)
    expected = F.scaled_dot_product_attention(*heads, attn_mask=mask, scale=1.0, enable_gqa=True)
    close(out, expected[0].transpose(0, 1))


def test_parts_of_decodes_take_memory_for_the_decodes_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """A chunk of 400 tokens stands behind one decode, whose keys are split."""
    monkeypatch.setattr(Device, "processors", 132)
    sizes: list[int] = []
    empty = torch.empty
    monkeypatch.setattr(
        torch, "empty", lambda *size, **kind: (sizes.append(size[0]), empty(*size, **kind))[1]
    )
    case = Case((Chunk(600, 1), Chunk(400, 400)), 2)
    close(case.attend("triton"), case.expected_self())
    assert sizes == [401, 1], "the output, and parts"


def test_every_launch_that_make_gpu_measures_computes_the_same(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(str(Path(__file__).parents[2]))
    from benchmarks.gpu.kernel_launches import measure_launches
    from benchmarks.gpu.part_page import PartPage

    page = PartPage(tmp_path / "part.md")
    measure_launches(page, "cpu", torch.float32, small=True)
    rows = [line.split(" | ")[0] for line in (tmp_path / "part.md").read_text().splitlines() if "," in line]
    assert rows == [f"| {work}, {launch}" for work in ("decodes", "a prompt's chunk") for launch in LAUNCHES]
