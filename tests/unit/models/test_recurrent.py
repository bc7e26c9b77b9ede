"""Recurrent layers of transformers over state slots: sequences interleaved, in chunks, and from snapshots."""

from __future__ import annotations

import sys

import pytest
import torch
from transformers import (
    DynamicCache,
    Lfm2Config,
    Lfm2Model,
    NemotronHConfig,
    NemotronHModel,
    Qwen3_5TextConfig,
    Qwen3_5TextModel,
)

from triptych.base.errors import ConfigError, InternalError
from triptych.models.recurrent import (
    RecurrentStates,
    StateShape,
    cache_keyword,
    keep_inside,
    learn_states,
)
from triptych.pd_worker.attention.attention import ATTENTION_NAME

SIZES = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 16,
    "vocab_size": 64,
    "pad_token_id": 0,
}


def qwen3_5():
    layers = {"layer_types": ["linear_attention"] * 3}
    heads = {"linear_key_head_dim": 8, "linear_value_head_dim": 8}
    heads |= {"linear_num_key_heads": 2, "linear_num_value_heads": 4}
    return Qwen3_5TextModel(Qwen3_5TextConfig(**SIZES, **layers, **heads))


def lfm2():
    return Lfm2Model(
        Lfm2Config(**SIZES, conv_L_cache=3, layer_types=["conv"] * 3, block_auto_adjust_ff_dim=False)
    )


def nemotron_h():
    mamba = {"mamba_num_heads": 4, "mamba_head_dim": 8, "ssm_state_size": 8, "n_groups": 2, "chunk_size": 8}
    return NemotronHModel(NemotronHConfig(**SIZES, **mamba, layers_block_type=["mamba"] * 3))


@pytest.fixture(params=[qwen3_5, lfm2, nemotron_h], ids=lambda build: build.__name__)
def model(request):
    torch.manual_seed(0)
    model = request.param().eval()
    # A name without masks of its own.
    model.config._attn_implementation = ATTENTION_NAME
    for parameter in model.parameters():
        if parameter.ndim > 1:
            # Small weights would hide what states do.
            parameter.data = torch.randn_like(parameter) / parameter[0].numel() ** 0.5
    keep_inside(model)
    return model


def forward(model, cache, embeds, first):
    """embeds [B, T, hidden] at positions from `first` [B] on."""
    positions = torch.tensor(first)[:, None] + torch.arange(embeds.shape[1])
    with torch.no_grad():
        return model(
            inputs_embeds=embeds,
            position_ids=positions,
            use_cache=False,
            **{cache_keyword(model.forward): cache},
        ).last_hidden_state


def learn(model) -> tuple[StateShape, ...]:
    return learn_states(lambda states: forward(model, states, torch.randn(1, 3, 32), [0]), range(3))


def pool_of(shapes, slots):
    return {shape.key: torch.full((slots, *shape.shape), float("nan"), dtype=shape.dtype) for shape in shapes}


def clear(pool, slot):
    for states in pool.values():
        states[slot] = 0


def chunk(model, pool, slot, embeds, start, end, kept=()):
    states = RecurrentStates(pool, [slot], kept)
    out = forward(model, states, embeds[None, start:end], [start])
    states.flush()
    states.check_kept()
    return out[0]


def own(model, embeds, ends):
    """What the model gives with transformers' own cache, in chunks that end there."""
    cache, parts = DynamicCache(config=model.config), []
    for start, end in zip((0, *ends), ends, strict=False):
        parts.append(forward(model, cache, embeds[None, start:end], [start])[0])
    return torch.cat(parts)


def close(got, expected):
    # Its own cache begins without a state, and a slot with zeros: Mamba's first token differs by rounding.
    torch.testing.assert_close(got, expected, atol=1e-3, rtol=1e-3)


@pytest.mark.parametrize("sizes", [(1, 7), (7, 16), (16, 1)])
def test_interleaved_sequences_in_chunks_give_what_each_gives_alone(model, sizes):
    pool = pool_of(learn(model), 4)
    embeds, slots = [torch.randn(40, 32), torch.randn(33, 32)], (2, 0)
    ends = [[*range(size, len(x), size), len(x)] for x, size in zip(embeds, sizes, strict=True)]
    got: list[list[torch.Tensor]] = [[], []]
    for slot in slots:
        clear(pool, slot)
    for turn in range(max(map(len, ends))):
        for i in (0, 1):
            if turn < len(ends[i]):
                start = ends[i][turn - 1] if turn else 0
                got[i].append(chunk(model, pool, slots[i], embeds[i], start, ends[i][turn]))
    for i in (0, 1):
        close(torch.cat(got[i]), own(model, embeds[i], ends[i]))


@pytest.mark.parametrize("slots", [(1, 2), (3, 0)], ids=["adjacent", "gathered"])
def test_tokens_of_several_sequences_are_computed_together(model, slots):
    pool = pool_of(learn(model), 4)
    embeds = [torch.randn(20, 32), torch.randn(20, 32)]
    for i, slot in enumerate(slots):
        clear(pool, slot)
        chunk(model, pool, slot, embeds[i], 0, 12 + i)
    for step in range(5):
        states = RecurrentStates(pool, slots)
        at = [12 + step, 13 + step]
        out = forward(model, states, torch.stack([embeds[i][at[i]][None] for i in (0, 1)]), at)
        states.flush()
        for i in (0, 1):
            close(out[i, 0], own(model, embeds[i], [12 + i, *range(13 + i, at[i] + 2)])[-1])


def test_a_sequence_that_goes_on_from_a_snapshot_is_equal_bit_by_bit(model):
    pool = pool_of(learn(model), 4)
    embeds = torch.randn(40, 32)
    clear(pool, 0)
    chunk(model, pool, 0, embeds, 0, 16)
    for states in pool.values():
        states[3] = states[0]
    first = chunk(model, pool, 0, embeds, 16, 40)
    for states in pool.values():
        states[2] = states[3]
    assert torch.equal(chunk(model, pool, 2, embeds, 16, 40), first)
    clear(pool, 1)
    without = chunk(model, pool, 1, embeds, 16, 40)
    assert float((without - first).abs().max()) > 1e-2, "the states are of no effect: nothing was shown"


@pytest.mark.parametrize("ends", [(16,), (1,), (39,), (3, 16, 17)])
def test_states_inside_a_chunk_are_those_of_chunks_that_end_there(model, ends):
    pool = pool_of(learn(model), 6)
    embeds = torch.randn(40, 32)
    clear(pool, 0)
    whole = chunk(model, pool, 0, embeds, 0, 40, [(end, 3 + at) for at, end in enumerate(ends)])
    clear(pool, 1)
    parts = []
    for at, (start, end) in enumerate(zip((0, *ends), (*ends, 40), strict=True)):
        parts.append(chunk(model, pool, 1, embeds, start, end))
        if end < 40:
            for states in pool.values():
                close(states[3 + at], states[1])
    for states in pool.values():
        close(states[0], states[1])
    close(whole, torch.cat(parts))


def test_states_that_no_known_function_computes_are_not_kept_inside(model, monkeypatch):
    assert all(shape.inside for shape in learn(model))
    file = sys.modules[type(model).__module__]
    for name in ("torch_chunk_gated_delta_rule", "mamba2_chunk_scan"):
        if hasattr(file, name):
            monkeypatch.setattr(file, name, getattr(file, name).__wrapped__)
    by_kind = {shape.key[0]: shape.inside for shape in learn(model)}
    assert by_kind["conv"] and not by_kind.get("recurrent")
    pool = pool_of(learn(model), 4)
    states = RecurrentStates(pool, [0], [(8, 3)])
    forward(model, states, torch.randn(1, 16, 32), [0])
    if "recurrent" in by_kind:
        with pytest.raises(InternalError, match="not kept"):
            states.check_kept()


def test_a_function_with_other_arguments_stays_as_it_is(model, monkeypatch):
    def other(query, state): ...

    file = sys.modules[type(model).__module__]
    for name in ("torch_chunk_gated_delta_rule", "mamba2_chunk_scan"):
        monkeypatch.setattr(file, name, other, raising=False)
        keep_inside(model)
        assert getattr(file, name) is other


def test_a_slot_has_the_bytes_of_all_states(model):
    shapes = learn(model)
    assert {shape.key[1] for shape in shapes} == {0, 1, 2}
    pool = pool_of(shapes, 1)
    assert sum(shape.nbytes for shape in shapes) == sum(
        states.numel() * states.element_size() for states in pool.values()
    )


def test_a_recurrent_layer_that_asks_for_no_state_is_refused(model):
    with pytest.raises(ConfigError, match=r"recurrent layers \[0, 1, 2\]"):
        learn_states(lambda states: forward(model, None, torch.randn(1, 3, 32), [0]), range(3))


def test_the_cache_keyword_is_read_from_the_signature():
    def today(inputs_embeds, cache=None, **kwargs): ...
    def before(inputs_embeds, past_key_values=None, **kwargs): ...
    def neither(inputs_embeds, **kwargs): ...

    assert cache_keyword(today) == "cache"
    assert cache_keyword(before) == "past_key_values"
    with pytest.raises(ConfigError, match="takes no cache"):
        cache_keyword(neither)
