"""What is said of the kernels in use, for any machine."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import nn

from triptych.kernels import cpu_linear
from triptych.kernels.library import kernel_library
from triptych.models.weights import prepack
from triptych.models.weights.kernel_report import SETS, Capabilities, choice_of, kernels_in_use
from triptych.models.weights.prepack import PrepackedLinear

AMX = Capabilities(compiled=True, instructions=4, blocked=True, block=32)
BFLOAT16 = replace(AMX, instructions=3, block=64)
AVX512 = replace(AMX, instructions=2, block=0)
AVX2 = Capabilities(compiled=True, instructions=1, blocked=False, block=0)


def said(has: Capabilities, dtype: torch.dtype = torch.bfloat16, **options: object) -> dict[str, str]:
    uses = kernels_in_use(has, dtype=dtype, **{"device": "cpu", "attention": "cpu", **options})
    return {use.part: str(use).partition(": ")[2] for use in uses}


def test_every_set_of_instructions_that_a_kernel_takes_has_a_name() -> None:
    assert len(SETS) == cpu_linear.WIDEST + 1


def test_a_machine_with_everything_gives_no_reasons() -> None:
    assert said(AMX) == {"linear": "AMX", "attention": "AMX", "pages": "2 MiB"}


@pytest.mark.parametrize(
    ("has", "linear", "attention"),
    [
        (BFLOAT16, "AVX-512 with bfloat16 (this machine has no AMX)", "AVX-512 with bfloat16 ("),
        (
            AVX512,
            "oneDNN (ours does not read its layout: it wants AVX-512 with bfloat16, or AMX)",
            "AVX-512 (",
        ),
        (AVX2, "torch (oneDNN lays out no bfloat16 on this chip: it wants AVX-512)", "AVX2 ("),
        (replace(AMX, compiled=False), "oneDNN (no compiled kernels: install g++", "AMX"),
    ],
)
def test_a_chip_that_lacks_something_is_told_what(has: Capabilities, linear: str, attention: str) -> None:
    found = said(has)
    assert found["linear"].startswith(linear) and found["attention"].startswith(attention)


def test_a_flag_that_keeps_a_kernel_from_use_is_named() -> None:
    assert said(AMX, linear="onednn")["linear"] == "oneDNN (--linear-kernel onednn)"
    assert said(AMX, quantization="w8a8")["linear"] == "8 bits (--quantization w8a8 has its own products)"
    assert said(AMX, torch.float32)["linear"] == "oneDNN (ours multiplies bfloat16: --dtype bfloat16)"
    assert said(AMX, torch.float32)["attention"].startswith("AVX-512 (wider ones are of bfloat16")
    assert said(AMX, attention="sdpa")["attention"] == "sdpa"
    assert said(replace(AMX, compiled=False), attention="sdpa")["attention"].startswith("sdpa (no compiled")
    assert said(AMX, device="cuda", attention="triton") == {"linear": "torch", "attention": "triton"}


def test_products_that_onednn_computes_faster_are_counted() -> None:
    assert said(AMX, chosen=(24, 24))["linear"] == "AMX"
    assert said(AMX, chosen=(4, 24))["linear"] == "AMX (oneDNN is faster for 20 of 24 sizes and rows)"
    assert said(AMX, chosen=(0, 24))["linear"] == "oneDNN (oneDNN is faster for 24 of 24 sizes and rows)"
    assert said(AMX, chosen=(24, 24), linear="triptych")["linear"] == "AMX"


def test_a_system_that_gives_no_huge_pages_is_told_why() -> None:
    assert said(replace(AMX, no_huge_pages="never"))["pages"] == "4 KiB (never)"


def test_this_machine_is_as_torch_says() -> None:
    here = Capabilities.of_this()
    assert here.compiled == (kernel_library() is not None)
    assert here.blocked == prepack.can_prepack(torch.device("cpu"), torch.bfloat16)
    if here.compiled and torch.cpu._is_avx512_bf16_supported():
        assert here.instructions >= 3
    if here.instructions == 4:
        assert torch.cpu._is_amx_tile_supported()
    assert all(kernels_in_use(here, device="cpu", dtype=torch.bfloat16, attention="cpu"))


def test_a_choice_is_counted_by_size() -> None:
    if not prepack.can_prepack(torch.device("cpu"), torch.bfloat16):
        pytest.skip("no blocked bfloat16 weights")
    layers = nn.ModuleList(PrepackedLinear(nn.Linear(64, outs).to(torch.bfloat16)) for outs in (64, 64, 128))
    for layer in layers:
        layer.block = layer.block or 64
        layer.choose((1, 2))
    assert choice_of(layers) == (4, 2 * len(layers[0].known)) and choice_of(nn.Linear(2, 2)) is None
