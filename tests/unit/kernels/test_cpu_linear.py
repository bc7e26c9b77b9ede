"""The CPU's linear layers.

`ONEDNN_MAX_CPU_ISA=AVX2` before pytest, or AVX512_CORE, AVX512_CORE_VNNI, AVX512_CORE_BF16, AVX512_CORE_AMX,
runs tests as on an older chip, on which oneDNN lays weights out otherwise: after a change of the kernels or
of prepacking, tests/unit/kernels, tests/unit/models and tests/integration/pd_worker/engine at each of them.
"""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
import torch
from torch import nn
from torch.nn import functional

from triptych.kernels import cpu_linear as kernel
from triptych.kernels.library import kernel_library
from triptych.models.weights import prepack
from triptych.models.weights.prepack import PrepackedLinear

EPSILON = 1e-6

pytestmark = pytest.mark.skipif(kernel_library() is None, reason="no compiled kernels")


def draw(*shape: int, dtype: torch.dtype = torch.bfloat16, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def blocked(weight: torch.Tensor, block: int) -> torch.Tensor:
    """The weight as oneDNN lays it out on a chip with AMX, `block` 32, or with AVX-512, 64; as it is, 1."""
    outs, ins = weight.shape
    return weight.view(outs // block, block, ins // 2, 2).transpose(1, 2).contiguous()


@pytest.fixture(params=(1, 32, 64), ids=lambda block: f"blocks of {block}")
def block(request: pytest.FixtureRequest) -> int:
    return int(request.param)


def among_nan(x: torch.Tensor) -> torch.Tensor:
    """A view of `x` in memory that is NaN beside it."""
    rows, width = x.shape
    inside = torch.full((rows, width + 6), float("nan"), dtype=x.dtype)[:, 3 : width + 3]
    return inside.copy_(x)


def check(found: torch.Tensor, expected: torch.Tensor, atol: float = 2e-2) -> None:
    torch.testing.assert_close(found.float(), expected, atol=atol, rtol=1e-2)


@pytest.mark.parametrize("instructions", range(kernel.WIDEST + 1))
@pytest.mark.parametrize("rows", [1, 2, 5, 6, 7, 13, 16, 32])
@pytest.mark.parametrize("sizes", [(64, 2), (128, 34), (192, 520), (64, 32), (192, 544)])
def test_every_instruction_set_gives_the_product(rows, sizes, block, instructions):
    outs, ins = sizes
    x, weight, bias = among_nan(draw(rows, ins)), draw(outs, ins, seed=1), draw(outs, seed=2)
    packed = blocked(weight, block)
    found = kernel.multiply(x, packed.data_ptr(), outs, block, bias=bias, instructions=instructions)
    check(found, functional.linear(x.float(), weight.float(), bias.float()))


@pytest.mark.parametrize("rows", [33, 47, 48, 49, 64, 100])
@pytest.mark.parametrize("sizes", [(128, 32), (384, 96), (128, 34), (2048, 544)])
@pytest.mark.parametrize("beside", ["bias", "norm", "residual", "gated"])
@pytest.mark.parametrize("block", kernel.BLOCKS, indirect=True)
def test_many_rows_have_the_product_and_all_that_stands_beside_it(beside, sizes, rows, block):
    outs, ins = sizes
    x, weight = among_nan(draw(rows, ins)), draw(outs, ins, seed=1)
    packed = blocked(weight, block)
    scale, bias, added = draw(ins, seed=2), draw(outs, seed=3), among_nan(draw(rows, outs, seed=4))
    parts = {"bias": {"bias": bias}, "norm": {"norm": scale}, "residual": {"residual": added}}
    given = parts.get(beside, {"gated": True, "bias": bias})
    found = kernel.multiply(x, packed.data_ptr(), outs, block, epsilon=EPSILON, **given)
    normed = functional.rms_norm(x.float(), (ins,), scale.float(), EPSILON).bfloat16()
    product = (normed if beside == "norm" else x).float() @ weight.float().T
    product += bias.float() if "bias" in given else added.float() if beside == "residual" else 0
    gated = functional.silu(product[:, : outs // 2]) * product[:, outs // 2 :]
    check(found, gated if beside == "gated" else product, atol={"norm": 0.1, "gated": 1.5}.get(beside, 6e-2))


@pytest.mark.parametrize("instructions", range(kernel.WIDEST + 1))
@pytest.mark.parametrize("rows", [1, 2, 3, 4, 5, 6, 7, 13, 32])
@pytest.mark.parametrize("sizes", [(32, 2), (64, 34), (96, 520), (64, 544)])
@pytest.mark.parametrize("biased", [True, False])
def test_every_instruction_set_gives_the_product_of_a_plain_weight_of_float32(
    biased, sizes, rows, instructions
):
    outs, ins = sizes
    x, weight = among_nan(draw(rows, ins, dtype=torch.float32)), draw(outs, ins, dtype=torch.float32, seed=1)
    bias = draw(outs, dtype=torch.float32, seed=2) if biased else None
    found = kernel.multiply(x, weight.data_ptr(), outs, kernel.PLAIN, bias=bias, instructions=instructions)
    torch.testing.assert_close(found, functional.linear(x, weight, bias), atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("more", ["norm", "residual", "gated", "block"])
def test_of_float32_the_kernel_takes_a_plain_weight_with_a_bias_alone(more: str) -> None:
    x, weight = draw(2, 64, dtype=torch.float32), draw(64, 64, dtype=torch.float32)
    options: dict[str, object] = {
        "norm": {"norm": draw(64, dtype=torch.float32)},
        "residual": {"residual": draw(2, 64, dtype=torch.float32)},
        "gated": {"gated": True},
    }.get(more, {})
    with pytest.raises(ValueError, match="linear"):
        kernel.multiply(x, weight.data_ptr(), 64, 32 if more == "block" else kernel.PLAIN, **options)


@pytest.mark.parametrize("outs", [16, 48])
def test_the_kernel_refuses_a_plain_weight_of_a_number_of_outputs_that_it_cannot_take(outs: int) -> None:
    with pytest.raises(ValueError, match="linear"):
        kernel.multiply(draw(2, 64), draw(outs, 64).data_ptr(), outs, kernel.PLAIN)


@pytest.mark.parametrize("instructions", range(kernel.WIDEST + 1))
@pytest.mark.parametrize("rows", [1, 8, 17])
@pytest.mark.parametrize("ins", [70, 96])
def test_a_norm_before_and_a_sum_after_are_part_of_the_call(
    rows: int, ins: int, block: int, instructions: int
) -> None:
    x, weight, scale = among_nan(draw(rows, ins)), draw(128, ins, seed=1), draw(ins, seed=2)
    added, packed = among_nan(draw(rows, 128, seed=3)), blocked(weight, block)
    found = kernel.multiply(
        x,
        packed.data_ptr(),
        128,
        block,
        norm=scale,
        epsilon=EPSILON,
        residual=added,
        instructions=instructions,
    )
    normed = functional.rms_norm(x.float(), (ins,), scale.float(), EPSILON)
    # A normalised input may be rounded to the other of its two neighbours.
    check(found, normed.bfloat16().float() @ weight.float().T + added.float(), atol=6e-2)


@pytest.mark.parametrize("instructions", range(kernel.WIDEST + 1))
@pytest.mark.parametrize("biased", [True, False])
@pytest.mark.parametrize("ins", [66, 64])
def test_gated_outputs_are_silu_of_one_half_times_the_other(
    ins: int, biased: bool, block: int, instructions: int
) -> None:
    x, weight = draw(17, ins), draw(256, ins, seed=1)
    bias, packed = draw(256, seed=2) if biased else None, blocked(weight, block)
    found = kernel.multiply(
        x, packed.data_ptr(), 256, block, gated=True, bias=bias, instructions=instructions
    )
    gate, up = functional.linear(x.float(), weight.float(), None if bias is None else bias.float()).chunk(
        2, -1
    )
    check(found, functional.silu(gate) * up)


@pytest.mark.parametrize("instructions", range(kernel.WIDEST + 1))
def test_huge_inputs_overflow_where_torchs_do_and_nan_stays_in_its_row(block: int, instructions: int) -> None:
    x, packed = draw(4, 64), blocked(torch.eye(64, dtype=torch.bfloat16), block)
    x[0], x[1], x[2, 5] = 3e38, -3e38, float("nan")
    doubled = kernel.multiply(x, packed.data_ptr(), 64, block, residual=x, instructions=instructions)
    expected = x + x
    # Nothing of another row or input is in an output, but a NaN times zero is one.
    assert doubled[2].isnan().all()
    assert torch.equal(doubled[[0, 1, 3]], expected[[0, 1, 3]])
    wide = blocked(torch.cat([torch.eye(64), torch.eye(64)]).to(torch.bfloat16), block)
    gated = kernel.multiply(x, wide.data_ptr(), 128, block, gated=True, instructions=instructions)
    assert gated[0].isposinf().all() and gated[1].eq(0).all() and gated[2].isnan().all()
    normed = kernel.multiply(
        x * 1e-22, packed.data_ptr(), 64, block, norm=torch.ones(64, dtype=x.dtype), instructions=instructions
    )
    assert torch.equal(normed[[0, 1]], torch.stack([torch.ones(64), -torch.ones(64)]).to(x.dtype))


@pytest.mark.parametrize("threads", [2, 5])
def test_threads_change_no_number(threads: int, block: int) -> None:
    x, weight, before = draw(7, 96), blocked(draw(640, 96, seed=1), block), torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        alone = kernel.multiply(x, weight.data_ptr(), 640, block)
        torch.set_num_threads(threads)
        assert torch.equal(kernel.multiply(x, weight.data_ptr(), 640, block), alone)
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("sizes", [(64, 3), (65, 4), (0, 4), (64, 0)])
def test_sizes_that_do_not_fit_the_blocks_are_refused(sizes: tuple[int, int], block: int) -> None:
    outs, ins = sizes
    with pytest.raises(ValueError, match="does not take"):
        kernel.multiply(draw(1, ins), blocked(draw(64, 4), block).data_ptr(), outs, block)


@pytest.mark.parametrize(("outs", "size"), [(96, 64), (64, 48), (64, 0), (64, -32)])
def test_blocks_that_the_kernel_does_not_have_or_that_do_not_fit_are_refused(outs: int, size: int) -> None:
    with pytest.raises(ValueError, match="does not take"):
        kernel.multiply(draw(1, 4), blocked(draw(96, 4), 32).data_ptr(), outs, size)
    with pytest.raises(ValueError, match="does not take"):
        # Neither half is whole blocks.
        kernel.multiply(draw(1, 4), blocked(draw(96, 4), 32).data_ptr(), 96, 32, gated=True)


@pytest.mark.parametrize("instructions", range(kernel.WIDEST + 1))
@pytest.mark.parametrize("sizes", [(1, 1), (9, 35), (33, 128)])
def test_rows_are_normalised_and_gated_beside_another_product(sizes: tuple[int, int], instructions: int):
    rows, width = sizes
    x, scale = among_nan(draw(rows, 2 * width)), draw(2 * width, seed=1)
    normed = kernel.normalise(x, scale, EPSILON, instructions=instructions)
    check(normed, functional.rms_norm(x.float(), (2 * width,), scale.float(), EPSILON))
    gated = kernel.gate(x, instructions=instructions)
    check(gated, functional.silu(x[:, :width].float()) * x[:, width:].float())
    assert normed.shape == (rows, 2 * width) and gated.shape == (rows, width)


@pytest.mark.parametrize("instructions", range(kernel.WIDEST + 1))
def test_rows_overflow_where_torchs_do_and_nan_stays_in_its_row(instructions: int) -> None:
    x = draw(4, 64)
    x[0], x[1, :32], x[1, 32:], x[2, 5] = 3e38, -3e38, 1.0, float("nan")
    gated = kernel.gate(x, instructions=instructions)
    assert gated[0].isposinf().all() and gated[1].eq(0).all()
    assert gated[2].isnan().tolist() == [at == 5 for at in range(32)] and gated[3].isfinite().all()
    normed = kernel.normalise(x, torch.ones(64, dtype=x.dtype), EPSILON, instructions=instructions)
    assert normed[2].isnan().all() and normed[3].isfinite().all()


@pytest.mark.parametrize("shape", [(0, 4), (2, 0)])
def test_no_rows_and_no_width_are_refused(shape: tuple[int, int]) -> None:
    with pytest.raises(ValueError, match="does not take"):
        kernel.gate(draw(*shape))


def layer(outs: int = 256, ins: int = 256) -> nn.Linear:
    plain = nn.Linear(ins, outs).to(torch.bfloat16)
    with torch.no_grad():
        plain.weight.copy_(draw(outs, ins))
    return plain


needs_blocked_bfloat16 = pytest.mark.skipif(
    not prepack.can_prepack(torch.device("cpu"), torch.bfloat16), reason="no blocked bfloat16 weights"
)


def packed_by_hand(plain: nn.Linear, block: int, monkeypatch: pytest.MonkeyPatch) -> PrepackedLinear:
    """The layer with its weight as another chip's oneDNN lays it out, for our kernel alone."""
    memory = blocked(plain.weight.detach(), block)
    monkeypatch.setattr(torch.ops.mkldnn, "data_ptr", lambda _: memory.data_ptr())
    monkeypatch.setattr(torch.ops.mkldnn, "_nbytes", lambda _: memory.nbytes)
    packed = PrepackedLinear(plain)
    packed.by_hand = memory
    return packed


@needs_blocked_bfloat16
@pytest.mark.parametrize("block", kernel.BLOCKS, indirect=True)
def test_the_kernel_reads_every_layout_of_every_chip(block, monkeypatch):
    plain, calls = layer(), []
    packed = packed_by_hand(plain, block, monkeypatch)
    assert packed.block == block
    inner = prepack.multiply
    monkeypatch.setattr(prepack, "multiply", lambda *args, **named: calls.append(1) or inner(*args, **named))
    for rows in (1, max(packed.known)):
        x = draw(rows, 256, seed=1)
        check(packed(x), functional.linear(x.float(), plain.weight.float(), plain.bias.float()).detach())
    assert len(calls) == 2


@needs_blocked_bfloat16
def test_a_prepacked_layer_gives_rows_to_the_kernel_and_others_to_onednn_as_the_chip_has_tiles(monkeypatch):
    plain, calls = layer(), []
    packed = PrepackedLinear(plain)
    inner = prepack.multiply
    monkeypatch.setattr(prepack, "multiply", lambda *args, **named: calls.append(1) or inner(*args, **named))
    few, tiles = max(prepack.FEW_ROWS), kernel.instructions_here() == 4
    for rows, by_kernel in ((1, True), (few, True), (few + 1, tiles), (700, tiles), (0, False)):
        calls.clear()
        x = draw(rows, 256, seed=1)
        check(packed(x), functional.linear(x.float(), plain.weight.float(), plain.bias.float()).detach())
        # Where oneDNN leaves the weight as it was, as with AVX-512 alone, it multiplies all rows.
        assert bool(calls) == (by_kernel and packed.block > 0)
    assert not packed.fuses(draw(256, 1).T.expand(2, 256)[:, ::2])
    monkeypatch.setattr(prepack, "kernel_library", lambda: None)
    assert not PrepackedLinear(plain).fuses(draw(1, 256))


LEVELS = {
    "AVX512_CORE": (0, torch.cpu._is_avx512_supported()),
    "AVX512_CORE_BF16": (64, torch.cpu._is_avx512_bf16_supported()),
    "AVX512_CORE_AMX": (32, torch.cpu._is_amx_tile_supported()),
}
#: Prints outputs of a block of a layer, and how far off it is, relative to the largest.
PROGRAM = """
import torch
from triptych.models.weights.prepack import PrepackedLinear
plain = torch.nn.Linear(128, 192, bias=False).to(torch.bfloat16)
packed, x = PrepackedLinear(plain), torch.randn(2, 128).bfloat16()
expected = x.float() @ plain.weight.detach().float().T
print(packed.block, float((packed(x).float() - expected).abs().max() / expected.abs().max()))
"""


@pytest.mark.slow
@pytest.mark.parametrize("level", LEVELS)
def test_the_layout_of_each_level_of_onednn_is_known_where_it_blocks_pairs_of_inputs(level: str) -> None:
    block, here = LEVELS[level]
    if not here:
        pytest.skip(f"no {level}")
    environment = os.environ | {"ONEDNN_MAX_CPU_ISA": level}
    done = subprocess.run([sys.executable, "-c", PROGRAM], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    found, error = done.stdout.split()
    assert int(found) == block and float(error) < 2e-2


@needs_blocked_bfloat16
@pytest.mark.parametrize("block", kernel.BLOCKS, indirect=True)
@pytest.mark.parametrize("chosen", [(), (1, 4), (2, 64), prepack.ROWS])
def test_the_kernel_multiplies_the_rows_that_were_chosen_and_the_rest_is_alike(chosen, block, monkeypatch):
    plain, calls = layer(), []
    packed = packed_by_hand(plain, block, monkeypatch)
    packed.choose(chosen)
    inner, norm = prepack.multiply, nn.RMSNorm(256, EPSILON).to(torch.bfloat16)
    norm.weight = nn.Parameter(draw(256, seed=4), requires_grad=False)
    monkeypatch.setattr(prepack, "multiply", lambda *args, **named: calls.append(1) or inner(*args, **named))
    for rows in (*range(1, 34), 40, 65, 300):
        calls.clear()
        x, added = draw(rows, 256, seed=1), draw(rows, 256, seed=2)
        weight, bias = plain.weight.detach().float(), plain.bias.detach().float()
        normed = functional.rms_norm(x.float(), (256,), norm.weight.float(), EPSILON).bfloat16().float()
        product = functional.linear(normed, weight, bias)
        check(packed.multiply(x, norm=norm, residual=added), product + added.float(), atol=0.3)
        first, second = functional.linear(x.float(), weight, bias).chunk(2, -1)
        check(packed.multiply(x, gated=True), functional.silu(first) * second, atol=1.5)
        above = min((count for count in prepack.ROWS if count >= rows), default=max(prepack.ROWS))
        assert len(calls) == (2 if above in chosen and above in packed.known else 0), rows


@needs_blocked_bfloat16
def test_a_layout_that_is_not_known_is_left_to_onednn(monkeypatch: pytest.MonkeyPatch) -> None:
    other = torch.ops.mkldnn._reorder_linear_weight(draw(256, 256, seed=5))
    assert not prepack.known_block(layer().weight.detach(), other)
    # Neither 32 nor 64 divide it: oneDNN pads it.
    assert PrepackedLinear(layer(outs=80)).block == 0


def test_the_widest_set_of_this_chip_is_what_torch_sees() -> None:
    widest = kernel.instructions_here()
    assert 0 <= widest <= kernel.WIDEST
    if sys.platform == "linux" and torch.backends.cpu.get_cpu_capability() == "AVX512":
        # The system may refuse tiles to a process.
        assert widest in ((3, 4) if torch.cpu._is_avx512_bf16_supported() else (2,))
