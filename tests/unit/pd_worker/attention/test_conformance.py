"""Every backend computes every type of attention as the formula says: self, towards an encoder, both ways."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from support.engine.attention_case import (
    BATCH,
    DIM,
    FULL_BLOCKS,
    LONG,
    SINKS,
    Case,
    Chunk,
    bias_by_distance,
    bias_by_position,
    close,
)
from triptych.base.config import PDConfig
from triptych.base.config.flags import flags_of
from triptych.base.errors import ConfigError
from triptych.models.geometry import LayerRule, SpanRule
from triptych.pd_worker.attention import attention
from triptych.pd_worker.attention.attention import BACKENDS, backend_on

#: The kernel in Triton has tests of its own.
ON_CPU = ("cpu", "sdpa")


def test_the_flag_offers_every_backend() -> None:
    flags = {flag.name: flag for flag in flags_of(PDConfig)}
    assert flags["attention_backend"].choices == BACKENDS


@pytest.mark.parametrize(
    ("device", "asked", "used", "installed"),
    [
        ("cpu", "auto", "cpu", True),
        ("cpu", "auto", "sdpa", False),
        ("cpu", "sdpa", "sdpa", True),
        ("cuda", "auto", "triton", True),
        ("cuda", "auto", "sdpa", False),
        ("cuda", "triton", "triton", True),
    ],
)
def test_auto_is_the_kernel_of_the_device_where_there_is_one(monkeypatch, device, asked, used, installed):
    monkeypatch.setattr(attention, "find_spec", lambda name: name if installed else None)
    monkeypatch.setattr(attention, "kernel_library", lambda: object() if installed else None)
    assert backend_on(torch.device(device), asked) == used


def test_a_kernel_is_refused_on_another_device(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match="--attention-backend triton is for CUDA: use auto"):
        backend_on(torch.device("cpu"), "triton")
    with pytest.raises(ConfigError, match="--attention-backend cpu is for a CPU"):
        backend_on(torch.device("cuda"), "cpu")
    monkeypatch.setattr(attention, "kernel_library", lambda: None)
    with pytest.raises(ConfigError, match="needs g\\+\\+ or a wheel with kernels"):
        backend_on(torch.device("cpu"), "cpu")


@pytest.mark.parametrize("backend", ON_CPU)
@pytest.mark.parametrize("chunks", [BATCH, FULL_BLOCKS, LONG], ids=["mixed", "full blocks", "long"])
@pytest.mark.parametrize("kv_heads", [2, 4])
class TestEveryBackend:
    @pytest.mark.parametrize(
        "options", [{}, {"sliding_window": 3}, {"softcap": 2.0}, {"sliding_window": 5, "softcap": 1.0}]
    )
    def test_self_attention_is_causal(self, backend, chunks, kv_heads, options):
        case = Case(chunks, kv_heads)
        expected = case.expected_self(window=options.get("sliding_window"), softcap=options.get("softcap"))
        close(case.attend(backend, **options), expected)

    @pytest.mark.parametrize("window", [None, 3])
    @pytest.mark.parametrize("bias", [bias_by_position(), bias_by_distance()], ids=["position", "distance"])
    def test_a_bias_counts_in_prefill_and_decode(self, backend, chunks, kv_heads, bias, window):
        case = Case(chunks, kv_heads)
        options = {} if window is None else {"sliding_window": window}
        close(case.attend(backend, bias=bias, **options), case.expected_self(bias, window))

    @pytest.mark.parametrize(
        ("options", "bias"),
        [
            ({}, None),
            ({"sliding_window": 3}, None),
            ({"softcap": 2.0}, None),
            ({"sliding_window": 3}, bias_by_distance()),
        ],
        ids=["plain", "window", "softcap", "window and bias"],
    )
    def test_a_sink_is_one_more_term_of_the_softmax(self, backend, chunks, kv_heads, options, bias):
        case = Case(chunks, kv_heads)
        window, softcap = options.get("sliding_window"), options.get("softcap")
        expected = case.expected_self(bias, window, softcap, sinks=SINKS)
        close(case.attend(backend, bias=bias, s_aux=torch.nn.Parameter(SINKS), **options), expected)
        close(case.attend(backend, cross=True, s_aux=SINKS), case.expected_cross(SINKS))

    def test_cross_attention_sees_the_whole_of_its_own_encoder_output(self, backend, chunks, kv_heads):
        case = Case(chunks, kv_heads)
        before = [blocks.clone() for blocks in (*case.cache.keys, *case.cache.values)]
        close(case.attend(backend, cross=True, bias=bias_by_position()), case.expected_cross())
        after = [*case.cache.keys, *case.cache.values]
        assert all(torch.equal(a, b) for a, b in zip(before, after, strict=True)), "nothing is written"


@pytest.mark.parametrize("kv_heads", [1, 2])
@pytest.mark.parametrize("bias", [None, bias_by_position()])
@pytest.mark.parametrize("options", [{}, {"sliding_window": 5}])
def test_no_call_falls_to_the_kernel_that_writes_all_scores_out(monkeypatch, kv_heads, bias, options):
    calls = []
    inner = F.scaled_dot_product_attention

    def spied(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        calls.append(query)
        assert not kwargs.get("enable_gqa"), "with a mask, only the written-out kernel takes that on CUDA"
        assert query.shape[:2] == key.shape[:2] == value.shape[:2] and query.dim() == 4
        assert {tensor.stride(-1) for tensor in (query, key, value)} == {1}
        with sdpa_kernel([SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION]):
            return inner(query, key, value, *args, **kwargs)

    monkeypatch.setattr(F, "scaled_dot_product_attention", spied)
    case = Case(BATCH, kv_heads)
    close(case.attend("sdpa", bias=bias, **options), case.expected_self(bias, options.get("sliding_window")))
    close(case.attend("sdpa", cross=True), case.expected_cross())
    assert len(calls) == 8, "two decodes and two prefills, towards themselves and towards the encoder"


def test_shared_keys_of_a_group_are_not_copied(monkeypatch: pytest.MonkeyPatch) -> None:
    """A sequence's keys are as many bytes as before, whatever the number of heads that share them."""
    case, shared = Case((Chunk(30, 9, 7),), 1), []
    inner = F.scaled_dot_product_attention

    def spied(query: torch.Tensor, key: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        shared.append(key.untyped_storage().nbytes() < key.numel() * key.element_size())
        return inner(query, key, *args, **kwargs)

    monkeypatch.setattr(F, "scaled_dot_product_attention", spied)
    close(case.attend("sdpa"), case.expected_self())
    assert shared == [True]


def test_another_requests_contents_change_nothing() -> None:
    one, other = Case(BATCH, seed=0), Case(BATCH, seed=0)
    for kind in (other.own, other.encoder):
        for i in (0, 2, 3):
            kind[i] = tuple(part + 1 for part in kind[i])  # type: ignore[index,call-overload]
    other.own_tables = [
        other._fill(k, v, c.length - c.count) for (k, v), c in zip(other.own, BATCH, strict=True)
    ]
    other.cross_tables = [other._fill(k, v, len(k)) for k, v in other.encoder]
    for backend in ON_CPU:
        for cross in (False, True):
            assert torch.equal(one.attend(backend, cross=cross)[1], other.attend(backend, cross=cross)[1])


@pytest.mark.parametrize("backend", ON_CPU)
def test_decodes_that_share_an_encoder_output_read_the_same_rows(backend: str) -> None:
    case = Case((Chunk(9, 1, 40), Chunk(5, 1, 40), Chunk(16, 1, 23), Chunk(7, 1, 40), Chunk(9, 6, 40)))
    for sharing in (1, 3, 4):
        case.encoder[sharing], case.cross_tables[sharing] = case.encoder[0], case.cross_tables[0]
    close(case.attend(backend, cross=True), case.expected_cross())


@pytest.mark.parametrize("spans", SpanRule)
@pytest.mark.parametrize(("window", "chunk"), [(None, None), (3, None), (None, 4), (5, 6)])
def test_a_layers_rule_decides_what_it_reaches(spans, window, chunk):
    rule, atomic = LayerRule(window, chunk, spans), ((7, 13),)
    case = Case((Chunk(9, 1), Chunk(16, 1), Chunk(14, 14, 1, atomic), Chunk(18, 12, 1, atomic)), 2)
    # The keyword of the attention function does not count where there are rules.
    close(case.attend("sdpa", rule=rule, sliding_window=2), case.expected_self(rule=rule))


@pytest.mark.parametrize("backend", ON_CPU)
@pytest.mark.parametrize("kv_heads", [2, 4])
def test_values_of_another_width_than_the_keys(kv_heads: int, backend: str) -> None:
    case = Case((Chunk(9, 1), Chunk(10, 6)), kv_heads, value_dim=5)
    assert case.cache.token_bytes == 2 * kv_heads * (DIM + 5) * 4
    close(case.attend(backend), case.expected_self())


@pytest.mark.parametrize("count", [12, 9])
def test_an_atomic_span_attends_both_ways(count: int) -> None:
    case = Case((Chunk(12, count, 1, ((3, 9),)),), 2)
    close(case.attend("sdpa"), case.expected_self())


@pytest.mark.parametrize("name", ["attention_bias", "position_bias", "score_mod"])
def test_what_it_would_have_to_ignore_is_an_error(name: str) -> None:
    with pytest.raises(NotImplementedError, match=name):
        Case((Chunk(4, 4),)).attend("sdpa", **{name: object()})


def test_attention_that_is_not_causal_is_an_error() -> None:
    with pytest.raises(NotImplementedError, match="causal"):
        Case((Chunk(4, 4),)).attend("sdpa", is_causal=False)
