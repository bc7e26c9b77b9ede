"""Heads of queries and keys, rotated in place, and of keys and values, written into the cache."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional

from triptych.kernels import cpu_attention
from triptych.kernels.library import kernel_library

EPSILON = 1e-6
SETS = range(cpu_attention.WIDEST + 1)

pytestmark = pytest.mark.skipif(kernel_library() is None, reason="no compiled kernels")


def draw(*shape: int, dtype: torch.dtype, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def among_nan_heads(x: torch.Tensor) -> torch.Tensor:
    """A view of x [T, heads, dim] in memory that is NaN before and behind each token's heads."""
    tokens, heads, dim = x.shape
    memory = torch.full((tokens, heads * dim + 6), float("nan"), dtype=x.dtype)
    view = memory[:, 3:-3].view(tokens, heads, dim)
    return view.copy_(x)


def expected(
    x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, norm: torch.Tensor | None
) -> torch.Tensor:
    x, cos, sin = x.float(), cos.float(), sin.float()
    if norm is not None:
        x = functional.rms_norm(x, x.shape[-1:], None, EPSILON) * norm.float()
    return x * cos + x.roll(x.shape[-1] // 2, -1) * sin


@pytest.mark.parametrize("instructions", SETS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("sizes", [(1, 1, 2), (3, 5, 34), (9, 3, 80), (21, 2, 128)])
@pytest.mark.parametrize("normed", [True, False], ids=["norm", "no norm"])
def test_every_instruction_set_rotates_heads_and_nothing_beside_them(sizes, dtype, normed, instructions):
    tokens, heads, dim = sizes
    x, norm = draw(*sizes, dtype=dtype), draw(heads, dim, dtype=dtype, seed=1) if normed else None
    cos, sin = draw(2, tokens, 1, dim, dtype=dtype, seed=2)
    found = among_nan_heads(x)
    cpu_attention.rotate(found, cos, sin, norm, EPSILON, instructions=instructions)
    error = 1e-5 if dtype == torch.float32 else 1e-2
    torch.testing.assert_close(found.float(), expected(x, cos, sin, norm), atol=error, rtol=error)
    assert found._base is not None and int(found._base.isnan().sum()) == 6 * tokens


@pytest.mark.parametrize("instructions", SETS)
def test_bfloat16_is_rotated_by_angles_of_float32_with_one_rounding_at_the_end(instructions: int) -> None:
    x = draw(9, 3, 80, dtype=torch.bfloat16)
    cos, sin = draw(2, 9, 1, 80, dtype=torch.float32, seed=2)
    found = among_nan_heads(x)
    assert cpu_attention.rotates(found, cos, sin)
    cpu_attention.rotate(found, cos, sin, instructions=instructions)
    assert torch.equal(found, expected(x, cos, sin, None).bfloat16())
    assert found._base is not None and int(found._base.isnan().sum()) == 6 * len(x)


def test_angles_narrower_than_the_heads_are_not_taken() -> None:
    x, angles = torch.ones(1, 1, 4), torch.ones(1, 1, 4, dtype=torch.bfloat16)
    assert not cpu_attention.rotates(x, angles, angles)
    with pytest.raises(ValueError, match="does not take"):
        cpu_attention.rotate(x, angles, angles)


@pytest.mark.parametrize("instructions", SETS)
def test_huge_heads_overflow_as_torchs_do_and_nan_stays_in_its_head(instructions: int) -> None:
    x = draw(2, 3, 32, dtype=torch.float32)
    x[0, 0], x[0, 1, 3] = 3e38, float("nan")
    norm = draw(3, 32, dtype=torch.float32, seed=1)
    cos, sin = draw(2, 2, 1, 32, dtype=torch.float32, seed=2)
    for weight in (norm, None):
        found = x.clone()
        cpu_attention.rotate(found, cos, sin, weight, EPSILON, instructions=instructions)
        torch.testing.assert_close(found, expected(x, cos, sin, weight), equal_nan=True)


@pytest.mark.parametrize("threads", [2, 5])
def test_threads_change_no_number_and_write_all_tokens(threads: int) -> None:
    x, before = draw(23, 3, 16, dtype=torch.float32), torch.get_num_threads()
    cos, sin = draw(2, 23, 1, 16, dtype=torch.float32, seed=2)
    alone, together = x.clone(), x.clone()
    caches = torch.zeros(2, 2, 3, 40, 16)
    slots = torch.randperm(40, generator=torch.Generator().manual_seed(0))[:23]
    try:
        for count, out, cache in ((1, alone, caches[0]), (threads, together, caches[1])):
            torch.set_num_threads(count)
            cpu_attention.rotate(out, cos, sin)
            cpu_attention.write_cache(cache[0], cache[1], slots, x, x + 1)
    finally:
        torch.set_num_threads(before)
    assert torch.equal(alone, together) and torch.equal(caches[0], caches[1])
    assert torch.equal(caches[1, 0][:, slots], x.transpose(0, 1))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_keys_and_values_of_other_widths_are_written_to_their_slots_alone(dtype: torch.dtype) -> None:
    keys, values = (torch.full((2, 9, dim), float("nan"), dtype=dtype) for dim in (8, 5))
    key, value = (
        among_nan_heads(draw(3, 2, 8, dtype=dtype)),
        draw(2, 3, 5, dtype=dtype, seed=1).transpose(0, 1),
    )
    slots = torch.tensor([7, 0, 4])
    cpu_attention.write_cache(keys, values, slots, key, value)
    assert torch.equal(keys[:, slots], key.transpose(0, 1)) and torch.equal(
        values[:, slots], value.transpose(0, 1)
    )
    others = [slot for slot in range(9) if slot not in slots.tolist()]
    assert keys[:, others].isnan().all() and values[:, others].isnan().all()


@pytest.mark.parametrize("slot", [-1, 9])
def test_a_slot_outside_of_the_cache_is_an_error_and_nothing_is_written(slot: int) -> None:
    rows, new = torch.zeros(2, 9, 4), torch.ones(2, 2, 4)
    with pytest.raises(IndexError, match="outside of the cache's 9"):
        cpu_attention.write_cache(rows, rows.clone(), torch.tensor([1, slot]), new, new)
    assert not rows.any()


def test_an_odd_width_is_refused_and_what_does_not_fit_is_known() -> None:
    with pytest.raises(ValueError, match="does not take"):
        cpu_attention.rotate(torch.zeros(1, 1, 3), torch.zeros(1, 1, 3), torch.zeros(1, 1, 3))
    rows, new = torch.zeros(2, 9, 4), torch.ones(3, 2, 4)
    assert cpu_attention.fits(rows, new)
    for other in (new.bfloat16(), torch.ones(3, 1, 4), torch.ones(3, 2, 5), torch.ones(3, 2, 8)[..., ::2]):
        assert not cpu_attention.fits(rows, other)
