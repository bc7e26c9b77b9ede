"""Quantized weights, and the linear layer of 8 by 8 bits."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.nn import functional

from support.data.checkpoints import FAMILIES, build_checkpoint
from support.data.model_prompts import ModelPrompt, batch_logits
from support.encdec.checkpoints import FAMILIES as ENCDEC_FAMILIES
from support.encdec.reference import NAME, decoder_logits
from support.engine.reference_attention import NAME as DENSE
from support.matrix import matrix
from triptych.apps.launch.plan.memory import weight_bytes
from triptych.base.errors import ConfigError
from triptych.models.identity import model_identity
from triptych.models.registry import load_decoder, load_encoder
from triptych.models.weights import quantization
from triptych.models.weights.loading import parameter_bytes
from triptych.models.weights.prepack import PrepackedLinear
from triptych.models.weights.quantization import (
    QUANTIZATIONS,
    Int8Linear,
    W8A8Linear,
    check_w8a8,
    inputs_are_quantized,
    is_exact,
    quantize,
    quantize_inputs,
    quantize_rows,
    replace_linears,
)

CPU = torch.device("cpu")
#: Families besides one of each kind.
OTHERS = [family for family in (*FAMILIES, *ENCDEC_FAMILIES) if family not in ("qwen3_vl", "bart")]
#: Those that this machine can compute.
SERVED = [name for name in QUANTIZATIONS if is_exact() or not inputs_are_quantized(name)]


def quantized_copy(linear: nn.Linear) -> Int8Linear:
    made = Int8Linear(linear)
    weight, scale = quantize(linear.weight.detach())
    made.load_state_dict({"weight": weight, "scale": scale}, strict=False, assign=True)
    return made


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize(("rows", "out"), [(1, 24), (4, 24), (5, 24), (3, 5000)])
@pytest.mark.parametrize(
    ("dtype", "error"), [(torch.float32, 1e-5), (torch.bfloat16, 1e-2), (torch.float16, 2e-3)]
)
def test_the_product_is_that_of_the_rounded_weight(dtype, error, rows, out, bias):
    torch.manual_seed(0)
    linear = nn.Linear(64, out, bias=bias, dtype=dtype)
    made = quantized_copy(linear)
    x = torch.randn(2, rows, 64).to(dtype)
    rounded = made.weight.float() * made.scale[:, None]
    wanted = functional.linear(x.float(), rounded, None if linear.bias is None else linear.bias.float())
    assert made(x).dtype == dtype
    torch.testing.assert_close(made(x).float(), wanted, atol=error, rtol=error)


def test_what_float16_holds_does_not_overflow_before_its_scale() -> None:
    linear = nn.Linear(64, 24, bias=False, dtype=torch.float16)
    nn.init.constant_(linear.weight, 0.125)
    x = torch.full((1, 64), 1000.0, dtype=torch.float16)
    torch.testing.assert_close(quantized_copy(linear)(x), torch.full((1, 24), 8000.0).half())


@pytest.mark.parametrize("inputs", [8, 24, 40, 100])
def test_inputs_of_no_whole_block_do_not_reach_the_kernel_which_reads_beyond_them(inputs: int) -> None:
    linear = nn.Linear(inputs, 24, dtype=torch.bfloat16)
    made, x = quantized_copy(linear), torch.randn(2, inputs).bfloat16()
    wanted = functional.linear(x.float(), made.weight.float() * made.scale[:, None], linear.bias.float())
    torch.testing.assert_close(made(x).float(), wanted, atol=1e-2, rtol=1e-2)


def test_no_weight_moves_by_more_than_half_a_step_of_its_channel_and_zeros_stay() -> None:
    weight = torch.randn(8, 100) * torch.logspace(-4, 3, 8)[:, None]
    weight[3] = 0
    whole, scale = quantize(weight)
    step = weight.abs().amax(dim=1) / 127
    assert ((whole * scale[:, None] - weight).abs() <= step[:, None] / 2 * 1.001).all()
    assert not whole[3].any()
    assert (whole.abs().amax(dim=1)[step > 0] == 127).all()


def test_a_layer_that_two_modules_hold_stays_one_and_the_head_stays_as_it_is() -> None:
    class Pair(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.left = nn.Sequential(nn.Linear(4, 4))
            self.right = nn.Sequential(self.left[0])
            self.lm_head = nn.Linear(4, 9)
            self.embed_tokens = nn.Embedding(9, 4)

    pair = Pair()
    names = replace_linears(pair)
    assert names >= {"left.0.weight"}
    assert isinstance(pair.left[0], Int8Linear)
    assert pair.left[0] is pair.right[0]
    assert type(pair.lm_head) is nn.Linear


def rounded(module: nn.Module) -> None:
    """Linear layers but the head get the values that 8 bits can say."""
    for name, layer in module.named_modules():
        if isinstance(layer, (nn.Linear, PrepackedLinear)) and not name.endswith("lm_head"):
            whole, scale = quantize(layer.weight.detach().to_dense())
            plain = nn.Linear(layer.in_features, layer.out_features, bias=False)
            plain.weight.data = whole * scale[:, None]
            layer.weight = plain.weight if type(layer) is nn.Linear else PrepackedLinear(plain).weight


@pytest.mark.parametrize("family", [*FAMILIES, *ENCDEC_FAMILIES])
def test_every_family_computes_with_the_rounded_weights_which_take_less(family: str) -> None:
    path = build_checkpoint(family)
    plain = load_encoder(path, device=CPU, dtype=torch.float32)
    rounded(plain.module)
    encoder = load_encoder(path, device=CPU, dtype=torch.float32, quantization="int8")
    assert Int8Linear in kinds(encoder.module)
    item = encoder.preprocess(encoder.sample(), {})
    [rows], [wanted] = encoder.encode([item]), plain.encode([item])
    torch.testing.assert_close(rows, wanted, atol=2e-4, rtol=1e-3)
    attention = NAME if family in ENCDEC_FAMILIES else DENSE
    decoders = [
        load_decoder(path, device=CPU, dtype=torch.float32, attn_implementation=attention, quantization=name)
        for name in ("int8", "none")
    ]
    linears = [m for m in decoders[0].module.modules() if type(m) is nn.Linear]
    assert linears == [decoders[0].module.get_submodule("lm_head")]
    assert parameter_bytes(decoders[0].module) < parameter_bytes(decoders[1].module)
    rounded(decoders[1].module)
    ids = list(range(40, 52))
    if family in ENCDEC_FAMILIES:
        got, expected = (decoder_logits(decoder, [ids], [wanted])[0] for decoder in decoders)
    else:
        got, expected = (batch_logits(decoder, [ModelPrompt(ids, [], [])]) for decoder in decoders)
    assert float(expected.std()) > 0.5
    torch.testing.assert_close(got, expected, atol=2e-3, rtol=1e-3)


def test_keys_change_with_what_is_computed_otherwise(tmp_path: Path) -> None:
    path = build_checkpoint("bart", tmp_path / "model")
    identities = {
        name: model_identity(path, dtype=torch.float32, quantization=name) for name in QUANTIZATIONS
    }
    assert len({identity.model_key for identity in identities.values()}) == len(QUANTIZATIONS)
    assert identities["none"] == model_identity(path, dtype=torch.float32)
    assert identities["int8-decoder"].namespace == identities["none"].namespace
    assert identities["w8a8-decoder"].namespace == identities["none"].namespace
    towers = {identities[name].namespace for name in ("none", "int8", "w8a8")}
    assert len(towers) == 3


@pytest.mark.parametrize("family", ["qwen3_vl", "bart", "t5", "whisper", "trocr"])
def test_the_plan_before_loading_holds_what_both_sides_take(family: str) -> None:
    path = build_checkpoint(family)
    options = {"device": CPU, "dtype": torch.float32}
    for name in SERVED:
        encoder = load_encoder(path, **options, quantization=name)
        decoder = load_decoder(path, **options, attn_implementation=NAME, quantization=name)
        held = max(parameter_bytes(encoder.module), parameter_bytes(decoder.module))
        assert held <= weight_bytes(path, "float32", name)
    for name in ("int8", "w8a8"):
        assert weight_bytes(path, "float32", name) < 0.8 * weight_bytes(path, "float32")


DTYPES = (torch.float32, torch.bfloat16, torch.float16)
#: A CPU without VNNI refuses the flag, see the last tests.
needs_vnni = pytest.mark.skipif(not is_exact(), reason="this CPU does not multiply 8-bit integers exactly")


def int8_layer(
    inputs: int, outputs: int, dtype: torch.dtype = torch.float32, bias: bool = False
) -> Int8Linear:
    linear = nn.Linear(inputs, outputs, bias=bias, dtype=dtype).requires_grad_(False)
    made = Int8Linear(linear)
    weight, scale = quantize(linear.weight)
    made.load_state_dict({"weight": weight, "scale": scale}, strict=False, assign=True)
    return made


@needs_vnni
@settings(max_examples=30, deadline=None)
@given(
    rows=st.integers(1, 40),
    inputs=st.sampled_from((1, 8, 17, 64, 100, 513)),
    outputs=st.sampled_from((1, 16, 24, 65)),
    dtype=st.sampled_from(DTYPES),
    exponent=st.integers(-3, 2),
    bias=st.booleans(),
    seed=st.integers(0, 1000),
)
def test_the_product_differs_by_half_a_step_of_every_input_at_most(
    rows: int, inputs: int, outputs: int, dtype: torch.dtype, exponent: int, bias: bool, seed: int
) -> None:
    torch.manual_seed(seed)
    original = int8_layer(inputs, outputs, dtype, bias)
    x = (torch.randn(rows, inputs) * 10.0**exponent).to(dtype)
    weight = original.weight * original.scale[:, None]
    wanted = functional.linear(x.float(), weight, None if original.bias is None else original.bias.float())
    half_step = x.float().abs().amax(-1, keepdim=True) / 254
    bound = half_step * weight.abs().sum(-1)
    # The result is rounded to the dtype: before the row's magnitude, after it, and with the bias.
    slack = 4 * torch.finfo(dtype).eps * (1 + wanted.abs() + bound)
    out = W8A8Linear(original)(x)
    assert out.dtype == dtype
    assert ((out.float() - wanted).abs() <= bound + slack).all()


@needs_vnni
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_what_a_row_gives_does_not_depend_on_the_rows_beside_it(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    layer = W8A8Linear(int8_layer(3000, 96, dtype))
    x = torch.randn(200, 3000).to(dtype)
    # In parts, too.
    assert x.numel() > 2 * quantization._PART
    together = layer(x)
    for count in (1, 2, 3, 17, 64):
        assert torch.equal(layer(x[100 : 100 + count]), together[100 : 100 + count])
    beside = x.clone()
    beside[::2] *= 1000
    assert torch.equal(layer(beside)[1::2], together[1::2])


@needs_vnni
def test_rows_of_any_layout_and_shape_give_the_same() -> None:
    layer = W8A8Linear(int8_layer(24, 40, bias=True))
    x = torch.randn(5, 3, 72)[..., 24:48]
    assert torch.equal(layer(x), layer(x.contiguous().view(15, 24)).view(5, 3, 40))
    assert layer(x[:0]).shape == (0, 3, 40)


@needs_vnni
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_rows_of_zeros_give_the_bias(dtype: torch.dtype) -> None:
    original = int8_layer(64, 24, dtype, bias=True)
    x = torch.randn(3, 64).to(dtype)
    x[1] = 0
    assert torch.equal(W8A8Linear(original)(x)[1], original.bias)


@needs_vnni
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
def test_a_row_that_is_not_finite_gives_nothing_finite_and_its_neighbours_do(dtype, value):
    layer = W8A8Linear(int8_layer(64, 24, dtype, bias=True))
    x = torch.randn(4, 64).to(dtype)
    clean = layer(x)
    x[2, 5] = value
    out = layer(x)
    assert not out[2].isfinite().any()
    assert torch.equal(out[[0, 1, 3]], clean[[0, 1, 3]])


def test_rows_are_rounded_to_the_nearest_of_255_steps() -> None:
    x = torch.tensor([[1.0, -0.5, 0.2, 0.0], [0.0, 0.0, 0.0, 0.0], [-6.0, 3.0, 0.01, 0.03]])
    whole, largest = quantize_rows(x)
    assert whole.tolist() == [[127, -64, 25, 0], [0, 0, 0, 0], [-127, 64, 0, 1]]
    assert largest[[0, 2]].flatten().tolist() == [1, 6]
    # What zeros are divided by must not be zero.
    assert (127 / largest).isfinite().all()


@needs_vnni
def test_a_layer_that_two_modules_hold_stays_one() -> None:
    layer = int8_layer(8, 8)
    model = nn.ModuleDict({"left": layer, "right": nn.Sequential(layer)})
    quantize_inputs(model)
    assert isinstance(model["left"], W8A8Linear)
    assert model["left"] is model["right"][0]  # type: ignore[index]


def kinds(module: nn.Module) -> set[type[nn.Module]]:
    return {type(part) for part in module.modules()} & {Int8Linear, W8A8Linear}


@needs_vnni
@pytest.mark.parametrize("family", matrix(["qwen3_vl", "bart", *OTHERS], quick=2))
def test_every_family_computes_near_its_8_bit_weights(family: str) -> None:
    path = build_checkpoint(family)
    attention = NAME if family in ENCDEC_FAMILIES else DENSE
    encoders, decoders = {}, {}
    for name in ("int8", "w8a8"):
        encoders[name] = load_encoder(path, device=CPU, dtype=torch.float32, quantization=name)
        decoders[name] = load_decoder(
            path, device=CPU, dtype=torch.float32, attn_implementation=attention, quantization=name
        )
    assert kinds(encoders["w8a8"].module) == kinds(decoders["w8a8"].module) == {W8A8Linear}
    item = encoders["int8"].preprocess(encoders["int8"].sample(), {})
    rows = {name: encoder.encode([item])[0] for name, encoder in encoders.items()}
    ids = list(range(40, 52))
    if family in ENCDEC_FAMILIES:
        logits = {n: decoder_logits(decoder, [ids], [rows["int8"]])[0] for n, decoder in decoders.items()}
    else:
        logits = {n: batch_logits(decoder, [ModelPrompt(ids, [], [])]) for n, decoder in decoders.items()}
    for found in (rows, logits):
        error = (found["w8a8"] - found["int8"]).abs().mean() / found["int8"].std()
        assert 0 < error < 0.05


@pytest.mark.parametrize("quantization", ["int8-decoder", pytest.param("w8a8-decoder", marks=needs_vnni)])
def test_what_is_for_the_decoder_leaves_the_tower_as_it_is(quantization: str) -> None:
    path, options = build_checkpoint("qwen3_vl"), {"device": CPU, "dtype": torch.float32}
    assert not kinds(load_encoder(path, **options, quantization=quantization).module)
    assert kinds(load_decoder(path, **options, quantization=quantization, attn_implementation=DENSE).module)


def test_another_device_than_a_cpu_is_refused_before_anything_is_loaded() -> None:
    path = build_checkpoint("qwen3_vl")
    with pytest.raises(ConfigError, match=r"--quantization w8a8 multiplies on CPUs only, .* none"):
        load_encoder(path, device=torch.device("cuda"), dtype=torch.float32, quantization="w8a8")


def test_a_torch_without_the_operators_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(quantization, "_OPERATORS", ("qlinear_of_tomorrow",))
    with pytest.raises(ConfigError, match="w8a8-decoder: this CPU .* give --quantization int8"):
        check_w8a8("w8a8-decoder", CPU)


@pytest.mark.slow
def test_a_cpu_that_saturates_is_refused() -> None:
    """oneDNN restricted to AVX2 adds pairs of products in 16 bits, as CPUs without VNNI do."""
    script = (
        "import torch; from triptych.models.weights.quantization import check_w8a8; "
        "check_w8a8('w8a8', torch.device('cpu'))"
    )
    environment = os.environ | {"ONEDNN_MAX_CPU_ISA": "AVX2"}
    done = subprocess.run(
        [sys.executable, "-c", script], env=environment, capture_output=True, text=True, timeout=120
    )
    assert done.returncode != 0
    assert "does not multiply 8-bit integers exactly" in done.stderr
